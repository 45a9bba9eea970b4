// How likely given texts are: log-likelihoods of continuations, many at once. What texts share from their beginnings is
// read once.
#ifndef PHSA_ENGINE_SCORER_H_
#define PHSA_ENGINE_SCORER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "engine/engine.h"

namespace phsa {

struct ScoreRequest {
  std::vector<int32_t> context, continuation;  // at least one token each
};

struct Score {
  double log_likelihood = 0;  // natural logarithm, sum over the continuation's tokens
  bool greedy = true;         // each of them is the most likely one (the lower id where two are equal)
  std::vector<float> token_log_probabilities;
};

struct ScoreCallbacks {
  std::function<void(size_t done, size_t total)> progress;  // requests; may be empty
  std::function<bool()> stop;                               // asked before every step; may be empty
};

// In the order of the requests; none: stopped. Probabilities are over the model's whole vocabulary. The continuation's
// last token is not read: context and continuation may be one token longer than the engine's context. Throws
// phsa::Error, before any work, naming the request that is empty, too long or has tokens that the model has not.
std::optional<std::vector<Score>> ScoreAll(Engine& engine, std::span<const ScoreRequest> requests,
                                           const ScoreCallbacks& callbacks);

}  // namespace phsa

#endif  // PHSA_ENGINE_SCORER_H_
