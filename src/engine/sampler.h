// Choosing the next token from its logits, in vLLM's order (transformers', as far as it has them): logit bias,
// penalties for repetition, frequency and presence, what a grammar allows, temperature, top-k, top-p, min-p.
#ifndef PHSA_ENGINE_SAMPLER_H_
#define PHSA_ENGINE_SAMPLER_H_

#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "model/logits_row.h"

namespace phsa {

struct SamplerSettings {
  float temperature = 0.8f;      // 0: the most likely token, the lower id where two are equal
  int32_t top_k = 40;            // 0: all
  float top_p = 0.95f;           // 1: all
  float min_p = 0.05f;           // 0: all; a token needs this share of the most likely one's probability
  float repetition_penalty = 1;  // 1: none; over the prompt and the answer
  float frequency_penalty = 0;   // 0: none; taken from a token's logit for each time that the answer has it
  float presence_penalty = 0;    // 0: none; taken once from the logit of a token that the answer has
  std::vector<std::pair<int32_t, float>> logit_bias = {};  // added to a token's logit
  uint64_t seed = 0;
};

// Throws phsa::Error naming the flag and what it may be.
void Validate(const SamplerSettings& settings);

// Which tokens may come at all.
class TokenFilter {
 public:
  virtual ~TokenFilter() = default;
  virtual bool Allows(int32_t token) = 0;
  // A bit for each token, the lowest of word 0 first; at least one is set. What lies behind it is not allowed.
  virtual std::span<const uint64_t> Mask() = 0;
};

[[noreturn]] void ThrowNoFiniteLogits();  // phsa::Error

class Sampler {
 public:
  explicit Sampler(const SamplerSettings& settings);
  // Of the tokens below `known`. `seen`: those before this one, prompt and answer; `answer`: its own. Throws
  // phsa::Error where no logit is finite. `filter`: null where all may come.
  int32_t Next(const LogitsRow& logits, int32_t known, std::span<const int32_t> seen,
               std::span<const int32_t> answer = {}, TokenFilter* filter = nullptr);

 private:
  // The tokens to draw from, the likeliest first, at most `count` of them.
  std::vector<TokenLogit> Likeliest(const LogitsRow& logits, size_t count, int32_t known, std::span<const int32_t> seen,
                                    std::span<const int32_t> answer, TokenFilter* filter);
  std::vector<TokenLogit> Allowed(const LogitsRow& logits, size_t count, int32_t known, TokenFilter& filter);
  SamplerSettings settings_;
  std::mt19937_64 random_;
  std::vector<float> logits_;    // with bias and penalties
  std::vector<float> biased_;    // with the bias alone
  std::vector<float> masked_;    // without those that a filter does not let through
  std::vector<double> weights_;  // of those to draw from
};

}  // namespace phsa

#endif  // PHSA_ENGINE_SAMPLER_H_
