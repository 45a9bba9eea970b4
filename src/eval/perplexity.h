// How well a model predicts a text.
#ifndef PHSA_EVAL_PERPLEXITY_H_
#define PHSA_EVAL_PERPLEXITY_H_

#include <cstdint>
#include <span>
#include <vector>

#include "engine/session.h"
#include "eval/recall.h"

namespace phsa {

struct PerplexityResult {
  double loss = 0;     // mean over tokens 2 … N, natural logarithm
  int32_t tokens = 0;  // N
  double seconds = 0;
  std::vector<float> losses;        // of tokens 2 … N
  std::vector<int32_t> top_tokens;  // the most likely token after each of the N
  TokensRead tokens_read;
  double perplexity() const;
};

// The tokens as one window. Empty result (tokens = 0) where callbacks.stop asked for it. `recall`: measured as well, at
// the price of dense attention; null: not wanted.
PerplexityResult Perplexity(Engine& engine, std::span<const int32_t> tokens, const GenerateCallbacks& callbacks,
                            RecallMeter* recall = nullptr);

}  // namespace phsa

#endif  // PHSA_EVAL_PERPLEXITY_H_
