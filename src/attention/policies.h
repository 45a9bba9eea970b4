// The policies, in one table: what each is called, how it represents and scores blocks, what it needs, where it runs
// and how reports show it. No other file names a policy but the reference, which is what the kernels are tested
// against, and tests; they ask here. Header only, so that libphsa and whoever links it read the same table.
#ifndef PHSA_ATTENTION_POLICIES_H_
#define PHSA_ATTENTION_POLICIES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "attention/blocks.h"
#include "phsa/settings.h"

namespace phsa {

// How a policy represents blocks and scores them. The kernels differ in this and in nothing else of a policy.
enum class Representation {
  kNone,       // nothing is chosen
  kMixedMean,  // lambda · mean + (1 - lambda) · mean of the punctuation keys
  kPooled,     // mean of 32 keys every 16, max-pooled onto blocks of 64 tokens
  kBounds,     // per-channel maximum, then minimum
};

// Pooled rows: entry j covers tokens [16j, 16j + 32); block B takes the best of entries 4B-1 … 4B+3.
inline constexpr int32_t kPoolStride = 16;
inline constexpr int32_t kPoolSize = 32;

inline constexpr int32_t kLeastBlock = 16;  // tokens

struct PolicyRow {
  Policy policy;
  const char* name;   // in settings, flags and JSON
  const char* label;  // as reports write it
  Representation representation = Representation::kNone;
  bool dense = false;           // all blocks are read, whatever the other settings say
  bool weighs = false;          // the means weigh punctuation by lambda; else lambda, where it is looked at, is 1
  int32_t own_block = 0;        // tokens of a block, where it has one size only; 0: any
  bool reference_only = false;  // plans, and with them the engine, refuse it
  bool baseline = false;        // reports compare the others with it
  int32_t rank = 0;             // its place among the rows of a report: baselines first, PHSA last
  int32_t colour = 0;           // in charts (eval/plot.h)
};

// In the order of phsa_policy (c.h).
inline constexpr PolicyRow kPolicies[] = {
    {.policy = Policy::kDense,
     .name = "dense",
     .label = "dense",
     .dense = true,
     .baseline = true,
     .rank = 0,
     .colour = 0},
    {.policy = Policy::kPhsa,
     .name = "phsa",
     .label = "PHSA",
     .representation = Representation::kMixedMean,
     .weighs = true,
     .rank = 6,
     .colour = 2},
    {.policy = Policy::kInfllm2,
     .name = "infllm2",
     .label = "InfLLM v2",
     .representation = Representation::kMixedMean,
     .baseline = true,
     .rank = 3,
     .colour = 1},
    {.policy = Policy::kInfllm2_64,
     .name = "infllm2-64",
     .label = "InfLLM v2 (64)",
     .representation = Representation::kPooled,
     .own_block = 64,
     .rank = 4,
     .colour = 5},
    {.policy = Policy::kStreaming, .name = "streaming", .label = "streaming", .rank = 1, .colour = 3},
    {.policy = Policy::kQuest,
     .name = "quest",
     .label = "Quest",
     .representation = Representation::kBounds,
     .rank = 5,
     .colour = 4},
    {.policy = Policy::kSepllm, .name = "sepllm", .label = "sepllm", .reference_only = true, .rank = 2, .colour = 3},
};

// What a model's own settings are for, and what is meant where sparse attention is asked for without a name.
inline constexpr Policy kOwnPolicy = Policy::kPhsa;

constexpr bool IsPolicy(int64_t number) { return number >= 0 && number < int64_t{std::size(kPolicies)}; }
constexpr const PolicyRow& RowOf(Policy policy) { return kPolicies[static_cast<size_t>(policy)]; }

static_assert(
    [] {
      for (size_t i = 0; i < std::size(kPolicies); ++i) {
        if (static_cast<size_t>(kPolicies[i].policy) != i) return false;
      }
      return true;
    }(),
    "the rows are in the order of phsa_policy");

constexpr bool Runs(Policy policy) { return !RowOf(policy).reference_only; }
// Whether the CUDA kernels do it; where CUDA is not built, none of them do.
constexpr bool RunsOnCuda(Policy policy) {
  return Runs(policy) && (RowOf(policy).representation == Representation::kNone ||
                          RowOf(policy).representation == Representation::kMixedMean);
}
constexpr bool IsDense(Policy policy) { return RowOf(policy).dense; }
constexpr bool IsSparse(Policy policy) { return !IsDense(policy); }
// Whether queries choose blocks, so that K means something.
constexpr bool Chooses(Policy policy) { return RowOf(policy).representation != Representation::kNone; }
// Whether blocks are represented by mixed means, so that parts mean something.
constexpr bool HasMeans(Policy policy) { return RowOf(policy).representation == Representation::kMixedMean; }
// Whether lambda and the set of punctuation mean something.
constexpr bool Weighs(Policy policy) { return RowOf(policy).weighs; }
// Whether representatives are plain means: lambda is 1, and one left over from another policy says nothing.
constexpr bool HasPlainMeans(Policy policy) {
  return !Weighs(policy) && (HasMeans(policy) || RowOf(policy).representation == Representation::kPooled);
}
constexpr int32_t BlockSizeOf(Policy policy, int32_t otherwise = kLeastBlock) {
  return RowOf(policy).own_block > 0 ? RowOf(policy).own_block : otherwise;
}
// Init and local are multiples of so many tokens. A policy with a block size of its own rounds them up to its blocks,
// so that the budgets of the others can be given to it.
constexpr int32_t BudgetUnit(Policy policy, int32_t block_size) {
  return RowOf(policy).own_block > 0 ? kLeastBlock : block_size;
}

// Null: none is called that.
constexpr const PolicyRow* FindPolicy(std::string_view name) {
  for (const PolicyRow& row : kPolicies) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

// Of the policies that run, those of which `holds` is true.
template <class Predicate>
std::vector<Policy> PoliciesThat(const Predicate& holds) {
  std::vector<Policy> all;
  for (const PolicyRow& row : kPolicies) {
    if (Runs(row.policy) && holds(row.policy)) all.push_back(row.policy);
  }
  return all;
}
// Their names: "phsa, infllm2", or with `last` before the last.
template <class Predicate>
std::string PolicyNames(const Predicate& holds, std::string_view last = ", ") {
  const std::vector<Policy> all = PoliciesThat(holds);
  std::string names;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i > 0) names += i + 1 < all.size() ? ", " : last;
    names += RowOf(all[i]).name;
  }
  return names;
}
inline std::string PolicyNames() { return PolicyNames(Runs); }

// Settings

inline Settings DenseSettings(Settings settings = {}) {
  settings.policy = Policy::kDense;
  return settings;
}
constexpr bool IsDense(const Settings& settings) { return IsDense(settings.policy); }
// Whether all layers read everything; of a model whose number of layers is known, the base may be none of them.
inline bool IsDense(const LayerSettings& settings) {
  return IsDense(settings.base) && std::all_of(settings.layers.begin(), settings.layers.end(),
                                               [](const auto& layer) { return IsDense(layer.second); });
}
inline bool IsDense(const LayerSettings& settings, int32_t num_layers) {
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    if (!IsDense(settings.ForLayer(layer))) return false;
  }
  return true;
}

// The blocks that these settings have every query read and choose from.
inline BlockRules RulesOf(const Settings& settings) {
  BlockRules rules;
  rules.init_blocks = BlocksFor(settings.init_tokens, settings.block_size);
  rules.local_blocks = BlocksFor(settings.local_tokens, settings.block_size);
  // With K = 0 nothing is chosen, so nothing need be represented or scored: that is `streaming` by another name.
  rules.top_k = Chooses(settings.policy) ? settings.top_k : 0;
  rules.dense_blocks = IsDense(settings) ? kDenseEverywhere : BlocksFor(settings.dense_below, settings.block_size);
  return rules;
}

// The rows of representatives that these settings keep.
inline RepRules RepRulesOf(const Settings& settings) {
  if (RowOf(settings.policy).representation == Representation::kPooled) return {kPoolStride, kPoolSize};
  // Where blocks are chosen by their parts alone, those are what is kept; survivors need one mean a block first.
  const int32_t parts = HasMeans(settings.policy) && settings.survivors == 0 ? settings.parts : 1;
  return {settings.block_size / parts, settings.block_size / parts};
}

}  // namespace phsa

#endif  // PHSA_ATTENTION_POLICIES_H_
