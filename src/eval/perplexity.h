// How well a model predicts a text.
#ifndef PHSA_EVAL_PERPLEXITY_H_
#define PHSA_EVAL_PERPLEXITY_H_

#include <cstdint>
#include <span>
#include <vector>

#include "engine/session.h"

namespace phsa {

struct PerplexityResult {
  double loss = 0;     // mean over tokens 2 … N, natural logarithm
  int32_t tokens = 0;  // N
  double seconds = 0;
  std::vector<int32_t> top_tokens;  // the most likely token after each of the N
  double perplexity() const;
};

// The tokens as one window. Empty result (tokens = 0) where callbacks.stop asked for it.
PerplexityResult Perplexity(Engine& engine, std::span<const int32_t> tokens, const GenerateCallbacks& callbacks);

}  // namespace phsa

#endif  // PHSA_EVAL_PERPLEXITY_H_
