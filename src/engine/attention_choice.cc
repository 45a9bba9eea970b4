#include "engine/attention_choice.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <vector>

#include "attention/policies.h"
#include "base/as_given.h"
#include "base/errors.h"
#include "base/nearest.h"
#include "base/plain_names.h"
#include "io/json.h"
#include "phsa/punctuation.h"

namespace phsa {
namespace {

// Of an object that SettingsFromJson takes and that names one.
Policy PolicyOf(const Json& settings) { return PolicyFromName(settings["attention"].get_ref<const std::string&>()); }

// Settings as they grow from source to source: each object has all keys.
struct Merged {
  const Json preset;
  bool carries_dense = false;  // settings of a model that attends densely by default
  Json base = preset;
  std::map<std::string, Json> layers;  // by layer or range, as the source has them

  void SetPolicy(Policy policy, Json& one) const {
    const Policy was = PolicyOf(one);
    if (policy == was) return;
    one["attention"] = Name(policy);
    // What belongs to a policy comes and goes with it.
    const int32_t usual = preset["block"];
    if (BlockSizeOf(policy, usual) != BlockSizeOf(was, usual)) one["block"] = BlockSizeOf(policy, usual);
    // Those of a model that attends densely by default are for whoever asks for the policy that they are for.
    if (IsSparse(was) || (carries_dense && policy != kOwnPolicy)) {
      one["parts"] = preset["parts"];
      one["survivors"] = preset["survivors"];
    }
    if (HasPlainMeans(policy) || HasPlainMeans(was)) {
      one["lambda"] = HasPlainMeans(policy) ? Json(1) : preset["lambda"];
    }
  }

  void Change(const Json& source, bool own_policy, Json& one) const {
    if (source.contains("attention") && !own_policy) SetPolicy(PolicyOf(source), one);
    for (const auto& [key, value] : source.items()) {
      if (key != "attention" && key != "layers" && key != "tested_tokens") one[key] = value;
    }
  }

  // `source` is one that SettingsFromJson takes.
  void Add(const Json& source) {
    const Json was = base["attention"];
    if (source.contains("attention") && IsDense(PolicyOf(source))) layers.clear();
    Change(source, false, base);
    if (!source.contains("layers")) {
      for (auto& [range, one] : layers) Change(source, one["attention"] != was, one);
      return;
    }
    layers.clear();
    for (const auto& [range, change] : source["layers"].items()) {
      Change(change, false, layers[range] = base);
    }
  }

  LayerSettings Finish() const {
    Json all = base;
    for (const auto& [range, one] : layers) {
      if (one != base) all["layers"][range] = one;
    }
    return SettingsFromJson(all.dump());
  }
};

// An object of settings with today's names.
Json Renamed(const Json& object) {
  Json out = Json::object();
  for (const auto& [key, value] : object.items()) {
    std::string name = key;
    WithSetting(key, [&](const SettingInfo& row) { name = row.name; });
    out[name] = value;
  }
  return out;
}

Json Parse(const std::string& json) {
  WithPlainNames([&] { return SettingsFromJson(json); });  // judges it
  Json out = Renamed(Json::parse(json));
  if (out.contains("layers")) {
    for (Json& one : out["layers"]) one = Renamed(one);
  }
  return out;
}

// Of the policies, those that the engine runs.
void CheckPolicy(const std::string& name) {
  std::vector<std::string> names = {"auto"};
  for (const Policy policy : PoliciesThat(Runs)) {
    if (name == Name(policy)) return;
    names.emplace_back(Name(policy));
  }
  ThrowInvalid("{} is {}{}; allowed: {}", Setting{"attention"}, Quoted(name), DidYouMean(name, names),
               fmt::join(names, ", "));
}

// What a model carries. It is data of others: it may name no file of this machine. `own_punctuation`: the user names
// it.
Json ParseCarried(const std::string& json, bool own_punctuation) {
  Json carried = Parse(json);
  if (!carried.contains("attention")) carried["attention"] = Name(kOwnPolicy);
  const std::vector<std::string> sets = PunctuationSetNames();
  const auto check = [&](Json& one) {
    if (own_punctuation) one.erase("punctuation");
    if (!one.contains("punctuation") || one["punctuation"].is_array()) return;
    const auto& name = one["punctuation"].get_ref<const std::string&>();
    if (std::find(sets.begin(), sets.end(), name) == sets.end()) {
      ThrowInvalid(
          "the settings that the model or its adapter carries name the punctuation {}; allowed there: {}, or a list of "
          "ids (a file can be given as {})",
          Quoted(name), fmt::join(sets, ", "), Setting{"punctuation"});
    }
  };
  check(carried);
  if (carried.contains("layers")) {
    for (Json& one : carried["layers"]) check(one);
  }
  return carried;
}

// Init and local of the paper's settings, and the one representative that its blocks have.
Json PresetOf(const std::string& name) {
  constexpr std::pair<const char*, int32_t> kPresets[] = {{"paper-4k", 4096}, {"paper-32k", 32768}};
  std::vector<std::string> names;
  for (const auto& [known, context] : kPresets) {
    names.emplace_back(known);
    if (name != known) continue;
    const Settings preset = Settings::Preset(context);
    return {{"init", preset.init_tokens}, {"local", preset.local_tokens}, {"parts", preset.parts}};
  }
  ThrowInvalid("{} is {}{}; allowed: {}", Setting{"preset"}, Quoted(name), DidYouMean(name, names),
               fmt::join(names, ", "));
}

bool NamesDense(const AttentionChoice& choice) {
  return choice.policy != "auto" && IsDense(PolicyFromName(choice.policy));
}

Json FlagsOf(const AttentionChoice& choice) {
  Json flags = Json::object();
  if (choice.policy != "auto") flags["attention"] = choice.policy;
  if (NamesDense(choice)) return flags;
  for (const auto& [name, value] : choice.given) {
    std::visit(
        [&, &key = name](const auto& one) {
          if constexpr (std::is_same_v<std::decay_t<decltype(one)>, float>) {
            flags[key] = AsGiven(one);
          } else {
            flags[key] = one;
          }
        },
        value);
  }
  return flags;
}

template <class Predicate>
bool AnyLayer(const LayerSettings& settings, const Predicate& predicate) {
  return predicate(settings.base) || std::any_of(settings.layers.begin(), settings.layers.end(),
                                                 [&](const auto& layer) { return predicate(layer.second); });
}

LayerSettings Resolve(const AttentionChoice& choice, const ModelConfig& config, int64_t context) {
  Merged merged{Json::parse(SettingsToJson(DenseSettings(Settings::Preset(context))))};
  if (choice.policy != "auto") CheckPolicy(choice.policy);  // before anything else is read: it lists the names
  Json file = choice.config_json.empty() ? Json::object() : Parse(choice.config_json);
  const bool own_punctuation = choice.given.contains("punctuation") || file.contains("punctuation");
  if (!config.phsa_settings.empty()) {
    const Json carried = ParseCarried(config.phsa_settings, own_punctuation);
    merged.Add(carried);
    merged.carries_dense = IsDense(PolicyOf(carried));
  }
  merged.Add(file);
  Json flags = choice.preset.empty() || NamesDense(choice) ? Json::object() : PresetOf(choice.preset);
  flags.update(FlagsOf(choice));
  merged.Add(flags);
  LayerSettings settings = merged.Finish();
  file.erase("tested_tokens");
  if (!file.empty() && !file.contains("attention") && choice.policy == "auto" && IsDense(settings)) {
    ThrowInvalid(
        "settings: {} has no effect: no policy is named, the model carries none, and the attention is dense; add "
        "\"attention\": \"{}\"",
        file.items().begin().key(), Name(kOwnPolicy));
  }
  return settings;
}

}  // namespace

LayerSettings ResolveAttention(const AttentionChoice& choice, const ModelConfig& config, int64_t context) {
  LayerSettings settings = Resolve(choice, config, context);
  // A layer with a window keeps it: nothing is chosen there, and reports shall not say otherwise.
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (config.Layer(layer).window == 0) continue;
    settings.layers[layer] = DenseSettings(settings.base);
  }
  // Layers that differ in what dense attention does not look at are none.
  if (IsDense(settings)) settings.layers.clear();
  return settings;
}

void RefuseWithoutEffect(const AttentionChoice& given, std::span<const LayerSettings> settings) {
  const auto any = [&](const auto& holds) {
    return std::any_of(settings.begin(), settings.end(),
                       [&](const LayerSettings& one) { return AnyLayer(one, holds); });
  };
  const auto check = [&](const char* name, bool (*matters)(Policy)) {
    if (any([&](const Settings& one) { return matters(one.policy); })) return;
    const bool unsaid = (given.policy.empty() || given.policy == "auto") && IsDense(settings.front());
    ThrowInvalid("{} has no effect: the attention is {}{}; give {} {}, or leave {} out", Setting{name},
                 Name(settings.front().base.policy), unsaid ? ", as nothing says otherwise" : "", Setting{"attention"},
                 PolicyNames(matters, " or "), Setting{name});
  };
  ForEachSetting([&](const SettingInfo& row) {
    if (given.given.contains(row.name)) check(row.name, row.matters);
  });
  if (!given.preset.empty()) check("preset", IsSparse);
  if (given.given.contains("survivors") &&
      !any([](const Settings& one) { return HasMeans(one.policy) && one.parts > 1; })) {
    ThrowInvalid("{0} has no effect: no block has parts; give {1} 2, 4 or 8, or leave {0} out", Setting{"survivors"},
                 Setting{"parts"});
  }
}

std::string CarriedSettings(const ModelConfig& config) {
  if (config.phsa_settings.empty()) return "";
  auto json = nlohmann::ordered_json::parse(SettingsToJson(Resolve({}, config, config.context)));
  if (const std::optional<int32_t> tested = TestedTokens(config)) json["tested_tokens"] = *tested;
  return json.dump();
}

std::optional<int32_t> TestedTokens(const ModelConfig& config) {
  if (config.phsa_settings.empty()) return std::nullopt;
  try {
    const Json carried = Parse(config.phsa_settings);
    if (carried.contains("tested_tokens")) return carried["tested_tokens"].get<int32_t>();
  } catch (const Error&) {
    // Told to those who attend by them.
  }
  return std::nullopt;
}

std::string PastTestedTokens(const ModelConfig& config, int32_t tested, int64_t tokens) {
  return fmt::format(
      "{} was tested with texts of up to {} tokens, as its settings say; this one has {}: answers may "
      "get worse beyond",
      config.name, tested, tokens);
}

}  // namespace phsa
