#include "engine/attention_choice.h"

#include <fmt/ranges.h>

#include "base/errors.h"
#include "base/nearest.h"

namespace phsa {
namespace {

LayerSettings CarriedSettings(const std::string& json, bool is_auto) {
  LayerSettings settings = SettingsFromJson(json);
  if (is_auto && json.find("\"dense_below\"") == std::string::npos) {
    settings.base.dense_below = kCrossover;
    for (auto& [layer, one] : settings.layers) one.dense_below = kCrossover;
  }
  return settings;
}

// PolicyFromName, less what the engine does not run.
Policy RunnablePolicy(const std::string& name) {
  std::vector<std::string> names = {"auto"};
  for (const Policy policy :
       {Policy::kDense, Policy::kPhsa, Policy::kInfllm2, Policy::kInfllm2_64, Policy::kStreaming, Policy::kQuest}) {
    if (name == Name(policy)) return policy;
    names.emplace_back(Name(policy));
  }
  ThrowInvalid("attention is {}{}; allowed: {}", Quoted(name), DidYouMean(name, names), fmt::join(names, ", "));
}

void SetPolicy(Settings& settings, Policy policy) {
  settings.policy = policy;
  if (policy == Policy::kInfllm2_64) settings.block_size = 64;
  if (policy == Policy::kInfllm2 || policy == Policy::kInfllm2_64) {
    settings.lambda = 1;
    settings.head_lambda.clear();
  }
}

}  // namespace

LayerSettings ResolveAttention(const AttentionChoice& choice, const ModelConfig& config, int64_t context) {
  LayerSettings settings;
  settings.base = Settings::Preset(context);
  settings.base.policy = Policy::kDense;
  const bool is_auto = choice.policy == "auto";
  if (!choice.config_json.empty()) {
    settings = CarriedSettings(choice.config_json, is_auto);
  } else if (is_auto && !config.phsa_settings.empty()) {
    settings = CarriedSettings(config.phsa_settings, is_auto);
  }
  const auto change = [&](Settings& one) {
    if (!is_auto) SetPolicy(one, RunnablePolicy(choice.policy));
    if (choice.top_k) one.top_k = *choice.top_k;
    if (choice.lambda) {
      one.lambda = *choice.lambda;
      one.head_lambda.clear();
    }
    if (choice.init) one.init_tokens = *choice.init;
    if (choice.local) one.local_tokens = *choice.local;
    if (choice.block) one.block_size = *choice.block;
    if (!choice.punctuation.empty()) one.punctuation = choice.punctuation;
    if (!choice.group_reduce.empty()) one.group_reduce = GroupReduceFromName(choice.group_reduce);
    Validate(one);
  };
  change(settings.base);
  for (auto& [layer, one] : settings.layers) change(one);
  return settings;
}

}  // namespace phsa
