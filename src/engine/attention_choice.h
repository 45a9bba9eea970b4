// How a user says which attention to use, and the settings that come of it: for the program, the Python package, the
// server and export alike. phsa.settings.resolve is the same rule for what runs on PyTorch;
// tests/data/attention_rule.json holds both to it.
#ifndef PHSA_ENGINE_ATTENTION_CHOICE_H_
#define PHSA_ENGINE_ATTENTION_CHOICE_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "attention/setting_list.h"
#include "io/model_source.h"
#include "phsa/settings.h"

namespace phsa {

// Query positions from which PHSA was measured to be faster than dense attention (docs/engine.md).
inline constexpr int32_t kCrossover = 1024;

// What is not set is left to the settings file, then to what the model or its adapter carries, then to the preset for
// the context, in which the attention is dense.
struct AttentionChoice {
  std::string policy = "auto";  // not set; or a policy's name (phsa/settings.h)
  // Empty: not set; or the paper's init and local (and one representative a block) by name, above the file and beneath
  // what is set here: paper-4k, paper-32k.
  std::string preset;
  GivenSettings given;      // by name; without "attention", which is the policy
  std::string config_json;  // the text of a settings file (docs/settings.md); empty: none
};

// `context`: the longest text, for the preset. Throws phsa::Error naming the setting, its value and what is allowed.
//
// A source changes what it names, in all layers. Two keys are more than themselves: another policy brings its own
// lambda, parts and block size and leaves layers alone that have a policy of their own, but for "dense", which is for
// all; "layers" replaces the overrides that lie beneath.
LayerSettings ResolveAttention(const AttentionChoice& choice, const ModelConfig& config, int64_t context);

// Throws phsa::Error where something that `given` sets (its file apart) matters to none of these settings.
void RefuseWithoutEffect(const AttentionChoice& given, std::span<const LayerSettings> settings);

// The settings that the model or its adapter carries, complete, as JSON; empty: it carries none.
std::string CarriedSettings(const ModelConfig& config);
// The longest text that they say it was tested with; none: they do not say.
std::optional<int32_t> TestedTokens(const ModelConfig& config);
// For people, where a text is longer than that.
std::string PastTestedTokens(const ModelConfig& config, int32_t tested, int64_t tokens);

}  // namespace phsa

#endif  // PHSA_ENGINE_ATTENTION_CHOICE_H_
