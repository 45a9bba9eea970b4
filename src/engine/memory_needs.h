// What running a model will take, known before anything is loaded.
#ifndef PHSA_ENGINE_MEMORY_NEEDS_H_
#define PHSA_ENGINE_MEMORY_NEEDS_H_

#include <cstdint>
#include <string>

namespace phsa {

struct MemoryNeeds {
  std::string gpu;  // the one whose memory it is; empty: the system's
  uint64_t weights = 0, key_values = 0, representatives = 0, workspace = 0;  // bytes
  std::string weight_types, kv_type;
  int32_t context = 0;       // tokens of the longest text
  int32_t cache_tokens = 0;  // of all texts that are held at once
  uint64_t available = 0;    // what can be had now
  uint64_t total() const { return weights + key_values + representatives + workspace; }
  std::string Text() const;  // one line
};

bool Fits(const MemoryNeeds& needs);
// Throws phsa::Error with both numbers where it does not fit.
void CheckFits(const MemoryNeeds& needs);

}  // namespace phsa

#endif  // PHSA_ENGINE_MEMORY_NEEDS_H_
