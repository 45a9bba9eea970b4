// How a user says how tokens are chosen. What is not set is what the model recommends, then what SamplerSettings has.
#ifndef PHSA_ENGINE_SAMPLING_CHOICE_H_
#define PHSA_ENGINE_SAMPLING_CHOICE_H_

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/sampler.h"
#include "io/model_source.h"

namespace phsa {

struct SamplingChoice {
  std::optional<float> temperature, top_p, min_p, repetition_penalty;
  std::optional<int32_t> top_k;
  std::optional<uint64_t> seed;  // none: another one each time
  // No model recommends these.
  float frequency_penalty = 0, presence_penalty = 0;
  std::vector<std::pair<int32_t, float>> logit_bias = {};
};

// Throws phsa::Error naming the setting and what it may be.
SamplerSettings ResolveSampling(const SamplingChoice& choice, const ModelConfig& config);

}  // namespace phsa

#endif  // PHSA_ENGINE_SAMPLING_CHOICE_H_
