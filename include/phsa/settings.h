// Which tokens a query reads: the settings of one attention layer, and of all layers of a model.
#ifndef PHSA_SETTINGS_H_
#define PHSA_SETTINGS_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "phsa/c.h"

namespace phsa {

enum class Policy : int32_t {
  kDense = PHSA_POLICY_DENSE,
  kPhsa = PHSA_POLICY_PHSA,
  kInfllm2 = PHSA_POLICY_INFLLM2,
  kInfllm2_64 = PHSA_POLICY_INFLLM2_64,
  kStreaming = PHSA_POLICY_STREAMING,
  kQuest = PHSA_POLICY_QUEST,
  kSepllm = PHSA_POLICY_SEPLLM,
};

enum class GroupReduce : int32_t {
  kSum = PHSA_GROUP_SUM,
  kMax = PHSA_GROUP_MAX,
  kNone = PHSA_GROUP_NONE,
};

// The defaults are the paper's 32k setting with the lambda that measured best, and the marks of English and Chinese:
// one set for every text, so that texts share their beginnings.
struct Settings {
  Policy policy = Policy::kPhsa;
  int32_t block_size = 16;
  int32_t init_tokens = 128;
  int32_t local_tokens = 512;
  int32_t top_k = 16;
  float lambda = 0.9f;
  GroupReduce group_reduce = GroupReduce::kSum;
  int32_t dense_below = 0;
  // phsa and infllm2: representatives per block, and how many blocks the coarse level (one representative a block)
  // leaves for them; 0: all. The others have one.
  int32_t parts = 1;
  int32_t survivors = 0;
  std::vector<float> head_lambda;     // empty, or one per KV head in place of `lambda`
  std::string punctuation = "en+zh";  // a named set, or a file

  bool operator==(const Settings&) const = default;

  // The paper's 4k setting (init 16, local 128) up to 4096 tokens of context, its 32k setting above.
  PHSA_API static Settings Preset(int64_t context_tokens);
  PHSA_API static Settings FromC(const phsa_settings& c);
};

// Throws phsa::Error naming the setting, its value and the allowed ones. The only place where settings are judged.
PHSA_API void Validate(const Settings& settings);

// Settings of a whole model: one for all layers, and overrides for some.
struct LayerSettings {
  Settings base;
  std::map<int32_t, Settings> layers;

  bool operator==(const LayerSettings&) const = default;
  const Settings& ForLayer(int32_t layer) const {
    auto it = layers.find(layer);
    return it == layers.end() ? base : it->second;
  }
};

// JSON as docs/settings.md describes it. Unknown keys, wrong types and invalid values throw phsa::Error.
PHSA_API LayerSettings SettingsFromJson(std::string_view json);
PHSA_API std::string SettingsToJson(const LayerSettings& settings);
PHSA_API std::string SettingsToJson(const Settings& settings);

PHSA_API const char* Name(Policy policy);               // "phsa", "infllm2-64", …
PHSA_API const char* Name(GroupReduce reduce);          // "sum", …
PHSA_API Policy PolicyFromName(std::string_view name);  // throws phsa::Error listing the names
PHSA_API GroupReduce GroupReduceFromName(std::string_view name);

}  // namespace phsa

#endif  // PHSA_SETTINGS_H_
