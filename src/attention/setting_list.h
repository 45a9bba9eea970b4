// The attention's settings, each once: what it is called, what it takes, what it means and to which policies it says
// something. Flags and their help, JSON of files, models and requests, the structs of C, Python's table
// (python/phsa/_setting_table.py) and the table in docs/settings.md are made of this list. A new setting is a field of
// Settings, a row here and what computes with it; `phsa settings` writes the tables.
#ifndef PHSA_ATTENTION_SETTING_LIST_H_
#define PHSA_ATTENTION_SETTING_LIST_H_

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>

#include "attention/policies.h"
#include "phsa/settings.h"

namespace phsa {

struct SettingInfo {
  const char* name;                     // in JSON, requests and messages; the program's flag has dashes for its _
  const char* help;                     // one line
  bool (*matters)(Policy) = &IsSparse;  // to policies of which this is true
  const char* old_name = "";            // what JSON called it in its first version, and may still
  const char* c_name = "";              // of the field of phsa_settings; empty: as `name`
  const char* python = "";              // where Python cannot, or does not, use `name`
};

struct PolicySetting : SettingInfo {
  Policy Settings::*value;
  int32_t phsa_settings::*c;
};
struct ReduceSetting : SettingInfo {
  GroupReduce Settings::*value;
  int32_t phsa_settings::*c;
};
// `choices`, or else from 0 to `high`, where `of_blocks` says so in multiples of the block.
struct IntSetting : SettingInfo {
  int32_t Settings::*value;
  int32_t phsa_settings::*c;
  std::array<int32_t, 4> choices = {};  // up to the first 0
  int32_t high = 0;
  bool of_blocks = false;
};
// A number, or in JSON a list of one for each KV head.
struct LambdaSetting : SettingInfo {
  float Settings::*value;
  float phsa_settings::*c;
};
struct TextSetting : SettingInfo {
  std::string Settings::*value;
};

inline constexpr int32_t kMaxSettingTokens = 1 << 30, kMostChosen = 65536;

// In the order of JSON. The block comes before those that are multiples of it, so that it is judged first.
inline constexpr auto kSettings = std::tuple{
    PolicySetting{{.name = "attention",
                   .help = "the policy: which blocks are read",
                   .matters = [](Policy) { return true; },
                   .c_name = "policy",
                   .python = "policy"},
                  &Settings::policy,
                  &phsa_settings::policy},
    IntSetting{{.name = "block", .help = "tokens of a block", .old_name = "block_size", .c_name = "block_size"},
               &Settings::block_size,
               &phsa_settings::block_size,
               {16, 32, 64}},
    IntSetting{{.name = "init",
                .help = "tokens at the start that are always read",
                .old_name = "init_tokens",
                .c_name = "init_tokens"},
               &Settings::init_tokens,
               &phsa_settings::init_tokens,
               {},
               kMaxSettingTokens,
               true},
    IntSetting{{.name = "local",
                .help = "latest tokens that are always read, before the query's own block, which is read as well",
                .old_name = "local_tokens",
                .c_name = "local_tokens"},
               &Settings::local_tokens,
               &phsa_settings::local_tokens,
               {},
               kMaxSettingTokens,
               true},
    IntSetting{{.name = "top_k", .help = "blocks that a query chooses, for each KV head", .matters = &Chooses},
               &Settings::top_k,
               &phsa_settings::top_k,
               {},
               kMostChosen},
    LambdaSetting{{.name = "lambda",
                   .help = "weight of the plain mean in a representative; a list has one for each KV head",
                   .matters = &Weighs,
                   .python = "lam"},
                  &Settings::lambda,
                  &phsa_settings::lambda},
    ReduceSetting{
        {.name = "group_reduce",
         .help = "how the query heads of a KV head agree: sum or maximum of their softmax values, or each for "
                 "itself",
         .matters = &Chooses},
        &Settings::group_reduce,
        &phsa_settings::group_reduce},
    IntSetting{{.name = "dense_below", .help = "queries at positions below this read everything"},
               &Settings::dense_below,
               &phsa_settings::dense_below,
               {},
               kMaxSettingTokens,
               true},
    IntSetting{{.name = "parts",
                .help = "representatives of a block, one for each run of its tokens; 1 is the paper",
                .matters = &HasMeans},
               &Settings::parts,
               &phsa_settings::parts,
               {1, 2, 4, 8}},
    IntSetting{{.name = "survivors",
                .help = "with parts: blocks that one representative a block leaves for them, at least top_k; 0: all",
                .matters = &HasMeans},
               &Settings::survivors,
               &phsa_settings::survivors,
               {},
               kMaxSettingTokens},
    TextSetting{{.name = "punctuation", .help = "which tokens count as punctuation", .matters = &Weighs},
                &Settings::punctuation},
};

// fn(row) for each of them.
template <class Fn>
void ForEachSetting(const Fn& fn) {
  std::apply([&](const auto&... row) { (fn(row), ...); }, kSettings);
}
// Calls fn with the row of that name, in JSON of today or before; false: there is none.
template <class Fn>
bool WithSetting(std::string_view name, const Fn& fn) {
  bool found = false;
  ForEachSetting([&](const auto& row) {
    if (found || name.empty() || (name != row.name && name != row.old_name)) return;
    found = true;
    fn(row);
  });
  return found;
}
inline std::string SettingNames() {
  std::string names;
  ForEachSetting([&](const SettingInfo& row) { names += fmt::format("{}{}", names.empty() ? "" : ", ", row.name); });
  return names;
}

// What a row takes, for messages. `unit`: of what a number is a multiple; 0: of the block.
inline std::string Allowed(const IntSetting& row, int32_t unit = 0) {
  std::string choices;
  for (const int32_t choice : row.choices) {
    if (choice > 0) choices += fmt::format("{}{}", choices.empty() ? "" : ", ", choice);
  }
  if (!choices.empty()) return choices;
  if (!row.of_blocks) return fmt::format("0 to {}", row.high);
  const std::string of = unit > 0 ? fmt::format("{}", unit) : "the block";
  return fmt::format("multiples of {} from 0 to {}", of, row.high);
}
// With those that only the reference computes: settings name them, plans refuse them.
inline std::string Allowed(const PolicySetting&) {
  std::string names;
  for (const PolicyRow& row : kPolicies) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return names;
}
inline constexpr GroupReduce kGroupReduces[] = {GroupReduce::kSum, GroupReduce::kMax, GroupReduce::kNone};
inline std::string Allowed(const ReduceSetting&) {
  std::string names;
  for (const GroupReduce reduce : kGroupReduces) names += (names.empty() ? "" : ", ") + std::string(Name(reduce));
  return names;
}
inline std::string Allowed(const LambdaSetting&) { return "0 to 1"; }
inline std::string Allowed(const TextSetting&) { return "the name of a set or of a file"; }

inline bool Takes(const IntSetting& row, int32_t value, int32_t unit) {
  if (row.choices[0] > 0) return value > 0 && std::ranges::find(row.choices, value) != row.choices.end();
  return value >= 0 && value <= row.high && (!row.of_blocks || value % unit == 0);
}

// What somebody sets, by name, and nothing else: numbers, policies and sets as they were given, yet to be judged.
using SettingValue = std::variant<int32_t, float, std::string>;
using GivenSettings = std::map<std::string, SettingValue, std::less<>>;

}  // namespace phsa

#endif  // PHSA_ATTENTION_SETTING_LIST_H_
