// How a user says which attention to use, and the settings that come of it: for the program, the Python package and the
// server alike.
#ifndef PHSA_ENGINE_ATTENTION_CHOICE_H_
#define PHSA_ENGINE_ATTENTION_CHOICE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "io/model_source.h"
#include "phsa/settings.h"

namespace phsa {

// Query positions from which PHSA was measured to be faster than dense attention (docs/engine.md). "auto" reads densely
// below, unless the settings say themselves where.
inline constexpr int32_t kCrossover = 1024;

// What is not set is left to the settings file, then (policy "auto") to what the model carries, then to the preset for
// the context.
struct AttentionChoice {
  std::string policy = "auto";  // or a policy's name (phsa/settings.h)
  std::optional<int32_t> top_k;
  std::optional<float> lambda;
  std::optional<int32_t> init, local, block;
  std::string punctuation, group_reduce;  // empty: not set
  std::string config_json;                // the text of a settings file (docs/settings.md); empty: none
};

// `context`: the longest text, for the preset. Throws phsa::Error naming the setting, its value and what is allowed.
LayerSettings ResolveAttention(const AttentionChoice& choice, const ModelConfig& config, int64_t context);

}  // namespace phsa

#endif  // PHSA_ENGINE_ATTENTION_CHOICE_H_
