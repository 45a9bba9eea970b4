#include "eval/settings_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "attention/policies.h"
#include "eval/niah/records.h"

namespace phsa {

std::string PartsInWords(const Settings& settings) {
  if (settings.parts == 1 || !HasMeans(settings.policy)) return "";
  return fmt::format(", {} parts{}", settings.parts,
                     settings.survivors == 0 ? "" : fmt::format(" of {} blocks", settings.survivors));
}

std::string SettingsInWords(const LayerSettings& settings) {
  const Settings& base = settings.base;
  const Settings usual;
  std::string words = "reads everything";
  if (!IsDense(base)) {
    words = fmt::format("init {}, local {}", base.init_tokens, base.local_tokens);
    if (Chooses(base.policy)) words += fmt::format(", K {}", base.top_k);
    words += PartsInWords(base);
    const int32_t block = BlockSizeOf(base.policy, usual.block_size);
    if (base.block_size != block) words += fmt::format(", block {}", base.block_size);
    if (Weighs(base.policy)) {
      words += base.head_lambda.empty() ? fmt::format(", λ {:g}", base.lambda) : std::string(", λ per head");
      words += ", " + base.punctuation;
    }
    if (base.group_reduce != usual.group_reduce) words += fmt::format(", group {}", Name(base.group_reduce));
    if (base.dense_below > 0) words += fmt::format(", dense below {}", base.dense_below);
  }
  return settings.layers.empty() ? words : words + "; some layers differ";
}

nlohmann::ordered_json SettingsObject(const LayerSettings& settings) {
  if (IsDense(settings)) return {{"attention", Name(settings.base.policy)}};
  return nlohmann::ordered_json::parse(SettingsToJson(settings));
}

void AddDistinct(const std::string& name, const LayerSettings& attention, std::vector<NamedAttention>* all) {
  LayerSettings canonical = Canonical(attention);
  const auto known =
      std::find_if(all->begin(), all->end(), [&](const NamedAttention& one) { return one.attention == canonical; });
  if (known == all->end()) {
    all->push_back({name, std::move(canonical), {}});
  } else if (known->name != name && std::find(known->same.begin(), known->same.end(), name) == known->same.end()) {
    known->same.push_back(name);
  }
}

std::vector<std::string> SameInWords(const std::vector<NamedAttention>& all) {
  std::vector<std::string> sentences;
  for (const NamedAttention& one : all) {
    for (const std::string& name : one.same) {
      std::string sentence = fmt::format("{} is the same as {}", name, one.name);
      // Names that stand for several K say it once.
      if (std::find(sentences.begin(), sentences.end(), sentence) == sentences.end()) sentences.push_back(sentence);
    }
  }
  return sentences;
}

}  // namespace phsa
