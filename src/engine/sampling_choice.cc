#include "engine/sampling_choice.h"

#include <random>

namespace phsa {

SamplerSettings ResolveSampling(const SamplingChoice& choice, const ModelConfig& config) {
  SamplerSettings settings;
  const auto choose = [](const auto& user, const auto& model, auto& value) {
    if (user) {
      value = *user;
    } else if (model) {
      value = *model;
    }
  };
  choose(choice.temperature, config.temperature, settings.temperature);
  choose(choice.top_k, config.top_k, settings.top_k);
  choose(choice.top_p, config.top_p, settings.top_p);
  choose(choice.min_p, config.min_p, settings.min_p);
  choose(choice.repetition_penalty, config.repetition_penalty, settings.repetition_penalty);
  settings.frequency_penalty = choice.frequency_penalty;
  settings.presence_penalty = choice.presence_penalty;
  settings.logit_bias = choice.logit_bias;
  settings.seed = choice.seed ? *choice.seed : std::random_device{}();
  Validate(settings);
  return settings;
}

}  // namespace phsa
