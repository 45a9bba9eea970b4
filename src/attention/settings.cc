// Settings from presets, C structs and JSON, and the one judge of their values.
#include "phsa/settings.h"

#include <charconv>
#include <cmath>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "attention/c_structs.h"
#include "attention/plan.h"
#include "attention/setting_list.h"
#include "base/as_given.h"
#include "base/errors.h"
#include "base/strict_json.h"
#include "base/utf8.h"

namespace phsa {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

// A JSON text is not trusted: these keep what it can ask for (layers × lists) to some 64 MB.
constexpr int32_t kMaxLayers = 4096;
constexpr size_t kMaxPunctuation = 4096, kMaxPunctuationIds = 16384;
constexpr std::string_view kIds = "ids:";  // what a list of ids is in Settings::punctuation: "ids:11,13"
constexpr int kMaxDepth = 4;               // the root, "layers", one override, its list of lambdas

std::optional<GroupReduce> FindGroupReduce(std::string_view name) {
  for (const GroupReduce reduce : kGroupReduces) {
    if (name == Name(reduce)) return reduce;
  }
  return std::nullopt;
}

// A value as it may appear in a message. Lists and objects are named only: they may be of any size and depth.
std::string Shown(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  if (value.is_string()) return Quoted(value.get_ref<const std::string&>());
  return value.dump();
}

// Where a value stands, for messages: "top_k", or "layers \"3-5\": top_k".
std::string Where(const std::string& place, const std::string& key) {
  return place.empty() ? key : fmt::format("{}: {}", place, key);
}

int32_t ReadInt(const Json& value, const std::string& where, const std::string& allowed) {
  // Through 64 bits, so that a huge number is refused here and does not wrap around.
  if (value.is_number_unsigned() && value.get<uint64_t>() <= INT32_MAX) return value.get<int32_t>();
  if (value.is_number_integer() && !value.is_number_unsigned() && value.get<int64_t>() >= INT32_MIN) {
    return value.get<int32_t>();
  }
  ThrowInvalid("settings: {} is {}; allowed: {}", where, Shown(value), allowed);
}

float ReadLambda(const Json& value, const std::string& where) {
  const double number = value.is_number() ? value.get<double>() : -1;
  if (!(number >= 0 && number <= 1)) {
    ThrowInvalid("settings: {} is {}; allowed: a number from 0 to 1", where, Shown(value));
  }
  return static_cast<float>(number);
}

const std::string& ReadString(const Json& value, const std::string& where, const std::string& allowed) {
  if (!value.is_string()) ThrowInvalid("settings: {} is {}; allowed: {}", where, Shown(value), allowed);
  return value.get_ref<const std::string&>();
}

// A list of token ids as Settings has it.
std::string ReadIds(const Json& list, const std::string& where) {
  std::string out(kIds);
  for (const Json& item : list) {
    const int32_t id = ReadInt(item, where, "a list of token ids");
    out += fmt::format("{}{}", out.size() > kIds.size() ? "," : "", id);
    // Stops early: a list of millions must not become a text of megabytes first.
    if (out.size() > kMaxPunctuationIds) {
      ThrowInvalid("settings: {} lists {} ids; allowed: as many as take {} characters", where, list.size(),
                   kMaxPunctuationIds);
    }
  }
  return out;
}

// The values of JSON, one by one. What is a number of the right type is judged by Validate.
void Read(const PolicySetting& row, const Json& value, const std::string& where, Settings* out) {
  const std::string& name = ReadString(value, where, Allowed(row));
  const PolicyRow* const policy = FindPolicy(name);
  if (policy == nullptr) ThrowInvalid("settings: {} is {}; allowed: {}", where, Quoted(name), Allowed(row));
  out->policy = policy->policy;
}

void Read(const ReduceSetting& row, const Json& value, const std::string& where, Settings* out) {
  const std::string& name = ReadString(value, where, Allowed(row));
  const std::optional<GroupReduce> reduce = FindGroupReduce(name);
  if (!reduce) ThrowInvalid("settings: {} is {}; allowed: {}", where, Quoted(name), Allowed(row));
  out->group_reduce = *reduce;
}

void Read(const IntSetting& row, const Json& value, const std::string& where, Settings* out) {
  out->*row.value = ReadInt(value, where, Allowed(row));
}

void Read(const LambdaSetting&, const Json& value, const std::string& where, Settings* out) {
  if (value.is_array()) {
    if (value.empty() || value.size() > static_cast<size_t>(kMaxHeads)) {
      ThrowInvalid("settings: {} is a list of {}; allowed: one number per KV head, 1 to {}", where, value.size(),
                   kMaxHeads);
    }
    out->head_lambda.clear();
    for (const Json& item : value) {
      out->head_lambda.push_back(ReadLambda(item, fmt::format("{}[{}]", where, out->head_lambda.size())));
    }
  } else if (value.is_number()) {
    out->lambda = ReadLambda(value, where);
    out->head_lambda.clear();
  } else {
    ThrowInvalid("settings: {} is {}; allowed: a number from 0 to 1, or a list of them, one per KV head", where,
                 Shown(value));
  }
}

void Read(const TextSetting& row, const Json& value, const std::string& where, Settings* out) {
  out->*row.value = value.is_array() ? ReadIds(value, where)
                                     : ReadString(value, where, "the name of a set or of a file, or a list of ids");
}

// Reads one object of settings over `base`. `place` is empty for the root, which alone may have "layers".
Settings ReadSettings(const Json& object, const Settings& base, const std::string& place) {
  Settings out = base;
  std::set<std::string_view> names;
  for (const auto& [key, value] : object.items()) {
    const bool known = WithSetting(key, [&, &key = key, &given = value](const auto& row) {
      const std::string where = Where(place, key == row.name ? Marked(Setting{row.name}) : key);
      if (!names.insert(row.name).second) ThrowInvalid("settings: {} is given twice, as {} too", where, row.name);
      Read(row, given, where, &out);
    });
    if (known) continue;
    if (key == "tested_tokens" && place.empty()) {
      // What whoever made the model says of it; nothing is computed with it.
      if (ReadInt(value, key, "1 and up") < 1) ThrowInvalid("settings: {} is {}; allowed: 1 and up", key, Shown(value));
    } else if (!(key == "layers" && place.empty())) {
      ThrowInvalid("settings: {} is not a setting; allowed: {}{}", Where(place, Quoted(key)), SettingNames(),
                   place.empty() ? ", tested_tokens, layers" : "");
    }
  }
  // Where the policy has one block size, nobody should have to spell it out.
  if (names.contains("attention") && !names.contains("block")) out.block_size = BlockSizeOf(out.policy, out.block_size);
  try {
    Validate(out);
  } catch (const Error& error) {
    if (place.empty()) throw;
    throw Error(error.status(), fmt::format("{} (in {})", error.message(), place));
  }
  return out;
}

// "7" or "3-5", both ends included.
std::pair<int32_t, int32_t> ReadLayers(const std::string& key) {
  const auto fail = [&] {
    ThrowInvalid("settings: layers has the key {}; allowed: a layer (\"3\") or a range (\"3-5\") within 0 to {}",
                 Quoted(key), kMaxLayers - 1);
  };
  const auto number = [&](std::string_view text) {
    int32_t out = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
    if (text.empty() || text[0] == '-' || error != std::errc() || end != text.data() + text.size()) fail();
    if (out >= kMaxLayers) fail();
    return out;
  };
  const std::string_view text = key;
  const size_t dash = text.find('-');
  const int32_t first = number(text.substr(0, dash));
  const int32_t last = dash == std::string_view::npos ? first : number(text.substr(dash + 1));
  if (first > last) fail();
  return {first, last};
}

Json Parse(std::string_view text) {
  const auto too_deep = [] { ThrowInvalid("settings: nested deeper than {} levels", kMaxDepth); };
  const auto twice = [](const std::string& key) { ThrowInvalid("settings: {} is given twice", Quoted(key)); };
  try {
    return ParseStrictly<Json>(text, kMaxDepth, too_deep, twice);
  } catch (const Json::parse_error& error) {
    ThrowInvalid("settings: not valid JSON at byte {}", error.byte);
  } catch (const Json::exception& error) {
    ThrowInvalid("settings: not valid JSON: {}", Quoted(error.what()));
  }
}

OrderedJson ValueJson(const PolicySetting& row, const Settings& settings) { return Name(settings.*row.value); }
OrderedJson ValueJson(const ReduceSetting& row, const Settings& settings) { return Name(settings.*row.value); }
OrderedJson ValueJson(const IntSetting& row, const Settings& settings) { return settings.*row.value; }
OrderedJson ValueJson(const LambdaSetting& row, const Settings& settings) {
  if (settings.head_lambda.empty()) return AsGiven(settings.*row.value);
  OrderedJson list = OrderedJson::array();
  for (const float lambda : settings.head_lambda) list.push_back(AsGiven(lambda));
  return list;
}
OrderedJson ValueJson(const TextSetting& row, const Settings& settings) {
  const std::string& text = settings.*row.value;
  return text.starts_with(kIds) ? OrderedJson::parse("[" + text.substr(kIds.size()) + "]") : OrderedJson(text);
}

OrderedJson ToJson(const Settings& settings) {
  Validate(settings);
  OrderedJson out;
  ForEachSetting([&](const auto& row) { out[row.name] = ValueJson(row, settings); });
  return out;
}

void Check(const PolicySetting& row, const Settings& settings) {
  const auto number = static_cast<int32_t>(settings.*row.value);
  if (!IsPolicy(number)) ThrowInvalid("settings: {} is {}; allowed: {}", Setting{row.name}, number, Allowed(row));
}

void Check(const ReduceSetting& row, const Settings& settings) {
  if (FindGroupReduce(Name(settings.*row.value))) return;
  ThrowInvalid("settings: {} is {}; allowed: {}", Setting{row.name}, static_cast<int32_t>(settings.*row.value),
               Allowed(row));
}

void Check(const IntSetting& row, const Settings& settings) {
  const int32_t value = settings.*row.value, block = settings.block_size;
  if (row.value == &Settings::block_size) {
    if (const int32_t own = BlockSizeOf(settings.policy, block); block != own) {
      ThrowInvalid("settings: {} is {}; allowed with {}: {}", Setting{row.name}, block, Name(settings.policy), own);
    }
  }
  // What is never computed with but for its own sake, dense_below, keeps to the block.
  const bool is_budget = row.value == &Settings::init_tokens || row.value == &Settings::local_tokens;
  const int32_t unit = is_budget ? BudgetUnit(settings.policy, block) : block;
  if (!Takes(row, value, unit)) {
    ThrowInvalid("settings: {} is {}; allowed: {}", Setting{row.name}, value, Allowed(row, unit));
  }
}

void CheckLambda(const std::string& name, float value) {
  // Written so that NaN fails too.
  if (!(value >= 0 && value <= 1)) ThrowInvalid("settings: {} is {}; allowed: 0 to 1", name, value);
}

void Check(const LambdaSetting& row, const Settings& settings) {
  CheckLambda(Marked(Setting{row.name}), settings.*row.value);
  if (settings.head_lambda.size() > static_cast<size_t>(kMaxHeads)) {
    ThrowInvalid("settings: head_lambda has {} values; allowed: one per KV head, at most {}",
                 settings.head_lambda.size(), kMaxHeads);
  }
  for (size_t head = 0; head < settings.head_lambda.size(); ++head) {
    CheckLambda(fmt::format("head_lambda[{}]", head), settings.head_lambda[head]);
  }
}

void Check(const TextSetting& row, const Settings& settings) {
  const std::string& text = settings.*row.value;
  if (text.starts_with(kIds)) {
    if (text.size() > kMaxPunctuationIds || text.find_first_not_of("0123456789,", kIds.size()) != std::string::npos ||
        !Json::accept("[" + text.substr(kIds.size()) + "]")) {
      ThrowInvalid("settings: {} is {}; allowed after {}: ids with commas between them", Setting{row.name},
                   Quoted(text), kIds);
    }
    return;
  }
  if (text.empty() || text.size() > kMaxPunctuation || !IsUtf8(text) || text.find('\0') != std::string::npos) {
    ThrowInvalid("settings: {} is {}; allowed: the name of a set, or of a file, 1 to {} bytes of UTF-8",
                 Setting{row.name}, Quoted(text), kMaxPunctuation);
  }
}

}  // namespace

const char* Name(Policy policy) { return IsPolicy(static_cast<int32_t>(policy)) ? RowOf(policy).name : "unknown"; }

const char* Name(GroupReduce reduce) {
  switch (reduce) {
    case GroupReduce::kSum: return "sum";
    case GroupReduce::kMax: return "max";
    case GroupReduce::kNone: return "none";
  }
  return "unknown";
}

Policy PolicyFromName(std::string_view name) {
  const PolicyRow* const row = FindPolicy(name);
  if (row == nullptr)
    ThrowInvalid("settings: {} is {}; allowed: {}", Setting{"attention"}, Quoted(name), Allowed(PolicySetting{}));
  return row->policy;
}

GroupReduce GroupReduceFromName(std::string_view name) {
  const std::optional<GroupReduce> reduce = FindGroupReduce(name);
  if (!reduce) {
    ThrowInvalid("settings: {} is {}; allowed: {}", Setting{"group_reduce"}, Quoted(name), Allowed(ReduceSetting{}));
  }
  return *reduce;
}

Settings Settings::Preset(int64_t context_tokens) {
  if (context_tokens < 1) ThrowInvalid("settings: context_tokens is {}; allowed: 1 and up", context_tokens);
  Settings out;
  if (context_tokens <= 4096) {
    out.init_tokens = 16;
    out.local_tokens = 128;
  }
  return out;
}

// head_lambda has no length here: phsa_plan_create, which knows the number of KV heads, copies it.
Settings Settings::FromC(const phsa_settings& given) {
  const phsa_settings c = Widened(given, {offsetof(phsa_settings, parts)}, "settings");
  if (!IsPolicy(c.policy)) {
    ThrowInvalid("settings: policy is {}; allowed: 0 to {} ({})", c.policy, std::size(kPolicies) - 1,
                 Allowed(PolicySetting{}));
  }
  if (c.group_reduce < PHSA_GROUP_SUM || c.group_reduce > PHSA_GROUP_NONE) {
    ThrowInvalid("settings: group_reduce is {}; allowed: {} to {} ({})", c.group_reduce,
                 static_cast<int>(PHSA_GROUP_SUM), static_cast<int>(PHSA_GROUP_NONE), Allowed(ReduceSetting{}));
  }
  Settings out;
  ForEachSetting([&](const auto& row) {
    using Row = std::decay_t<decltype(row)>;
    if constexpr (!std::is_same_v<Row, TextSetting>) {
      out.*row.value = static_cast<std::decay_t<decltype(out.*row.value)>>(c.*row.c);
    }
  });
  if (out.parts == 0) out.parts = 1;
  return out;
}

void Validate(const Settings& settings) {
  ForEachSetting([&](const auto& row) { Check(row, settings); });
}

LayerSettings SettingsFromJson(std::string_view json) {
  const Json root = Parse(json);
  if (!root.is_object()) ThrowInvalid("settings: the JSON text is {}; allowed: an object", Shown(root));
  LayerSettings out;
  out.base = ReadSettings(root, Settings{}, "");
  const auto layers = root.find("layers");
  if (layers == root.end()) return out;
  if (!layers->is_object()) {
    ThrowInvalid("settings: layers is {}; allowed: an object such as {{\"0\": {{\"attention\": \"dense\"}}}}",
                 Shown(*layers));
  }
  for (const auto& [key, value] : layers->items()) {
    const auto [first, last] = ReadLayers(key);
    const std::string place = "layers " + Quoted(key);
    if (!value.is_object()) ThrowInvalid("settings: {} is {}; allowed: an object of settings", place, Shown(value));
    const Settings settings = ReadSettings(value, out.base, place);
    for (int32_t layer = first; layer <= last; ++layer) {
      if (!out.layers.emplace(layer, settings).second) {
        ThrowInvalid("settings: layer {} is given twice in layers, the second time by {}", layer, Quoted(key));
      }
    }
  }
  return out;
}

std::string SettingsToJson(const LayerSettings& settings) {
  OrderedJson out = ToJson(settings.base);
  OrderedJson layers = OrderedJson::object();
  for (auto it = settings.layers.begin(); it != settings.layers.end();) {
    const int32_t first = it->first;
    int32_t last = first;
    const Settings& layer = it->second;
    for (++it; it != settings.layers.end() && it->first == last + 1 && it->second == layer; ++it) ++last;
    if (first < 0 || last >= kMaxLayers) {
      ThrowInvalid("settings: layers has layer {}; allowed: 0 to {}", first < 0 ? first : last, kMaxLayers - 1);
    }
    const OrderedJson all = ToJson(layer);
    OrderedJson changes = OrderedJson::object();
    for (const auto& [key, value] : all.items()) {
      if (value != out[key]) changes[key] = value;
    }
    layers[first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last)] = changes;
  }
  if (!layers.empty()) out["layers"] = layers;
  return out.dump();
}

std::string SettingsToJson(const Settings& settings) { return ToJson(settings).dump(); }

}  // namespace phsa
