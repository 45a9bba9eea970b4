// The block arithmetic against the reference, for every rule and position that small numbers allow.
#include "attention/blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "attention/plan.h"
#include "attention/reference.h"

namespace phsa {
namespace {

constexpr int32_t kBlock = 4;

// The reference takes the same numbers in tokens, and knows nothing of BlockRules.
reference::Method MethodOf(const BlockRules& rules) {
  reference::Method method;
  method.dense = rules.dense_blocks == kDenseEverywhere;
  method.block = kBlock;
  method.init_blocks = rules.init_blocks;
  method.local_blocks = rules.local_blocks;
  method.top_k = rules.top_k;
  method.dense_below = method.dense ? 0 : rules.dense_blocks * kBlock;
  method.window = rules.window;
  return method;
}

template <typename Check>
void EachRule(Check check) {
  for (const int32_t init : {0, 1, 2, 3}) {
    for (const int32_t local : {0, 1, 2, 4}) {
      for (const int32_t top_k : {0, 1, 2, 5}) {
        for (const int32_t dense : {0, 1, 3, 6, kDenseEverywhere}) check(BlockRules{init, local, top_k, dense, 0});
      }
    }
  }
}

constexpr int32_t kPositions = 13 * kBlock + 1;

// check(rules, their method, position, what the reference chooses there by some scores)
template <typename Check>
void EachChoice(uint32_t seed, Check check) {
  std::mt19937 random(seed);
  EachRule([&](const BlockRules& rules) {
    const reference::Method method = MethodOf(rules);
    for (int32_t position = 0; position < kPositions; ++position) {
      const int32_t b = position / kBlock;
      std::vector<double> scores(static_cast<size_t>(b));
      for (double& score : scores) score = std::uniform_real_distribution<double>()(random);
      const std::vector<int32_t> chosen = reference::Select(method, scores, position);
      check(rules, method, position, chosen);
      if (::testing::Test::HasFatalFailure()) return;
    }
  });
}

TEST(BlockRules, AListIsAsLongAndWithinTheBlocksThatTheReferenceChoosesFrom) {
  EachChoice(1, [&](const BlockRules& rules, const reference::Method& method, int32_t position,
                    const std::vector<int32_t>& chosen) {
    const int32_t b = position / kBlock;
    ASSERT_EQ(rules.Chosen(b), static_cast<int32_t>(chosen.size()));
    for (const int32_t t : chosen) {
      ASSERT_GE(t, rules.CandidateBegin());
      ASSERT_LT(t, rules.CandidateEnd(b));
    }
    // Every candidate is chosen by some scores, so the range is no wider than it need be.
    if (rules.Chosen(b) == 0) return;
    for (const int32_t t : {rules.CandidateBegin(), rules.CandidateEnd(b) - 1}) {
      std::vector<double> scores(static_cast<size_t>(b));
      scores[static_cast<size_t>(t)] = 1;
      const std::vector<int32_t> best = reference::Select(method, scores, position);
      ASSERT_NE(std::find(best.begin(), best.end(), t), best.end());
    }
  });
}

TEST(BlockRules, AQueryReadsTheTokensThatTheReferenceReads) {
  EachChoice(2, [&](const BlockRules& rules, const reference::Method& method, int32_t position,
                    const std::vector<int32_t>& chosen) {
    const int32_t b = position / kBlock;
    const std::vector<int32_t> tokens = reference::Tokens(method, chosen, position);
    std::vector<int32_t> ours;
    const auto add = [&](int32_t begin, int32_t end) {
      for (int32_t i = begin * kBlock; i < std::min(end * kBlock, position + 1); ++i) ours.push_back(i);
    };
    add(0, rules.InitEnd(b));
    for (const int32_t t : chosen) add(t, t + 1);
    add(rules.LocalBegin(b), b + 1);
    ASSERT_EQ(ours, tokens) << "init " << rules.init_blocks << ", local " << rules.local_blocks << ", top_k "
                            << rules.top_k << ", dense " << rules.dense_blocks << ", position " << position;
    ASSERT_EQ(rules.TokensRead(position, rules.Chosen(b), kBlock), static_cast<int64_t>(tokens.size()));
    ASSERT_EQ(rules.ReadsAll(b), rules.TokensRead(position, rules.Chosen(b), kBlock) == position + 1);
    for (int32_t t = 0; t <= b; ++t) {
      const bool listed = std::find(chosen.begin(), chosen.end(), t) != chosen.end();
      const bool read = std::find(tokens.begin(), tokens.end(), t * kBlock) != tokens.end();
      ASSERT_EQ(rules.Always(t, b) || listed, read) << t;
      if (!read || t < rules.init_blocks || listed) continue;
      ASSERT_LT(b, rules.LocalQueryEnd(t));
    }
  });
}

TEST(BlockRules, QueriesReadABlockAsLocalUpToItsLocalQueryEndAndNoFurther) {
  EachRule([&](const BlockRules& rules) {
    if (rules.dense_blocks == kDenseEverywhere) return;
    for (int32_t t = rules.init_blocks; t < 12; ++t) {
      int32_t last = t;
      for (int32_t b = t; b < 24; ++b) {
        if (rules.Always(t, b)) last = b;
      }
      // Dense queries may lie before the block, and then its own local queries end first.
      ASSERT_EQ(rules.LocalQueryEnd(t), last + 1);
    }
  });
}

TEST(BlockRules, AWindowReadsTheLastTokensAndNoOthers) {
  for (int32_t window = 1; window < 40; ++window) {
    BlockRules rules;
    rules.local_blocks = BlocksFor(window - 1, kBlock);
    rules.window = window;
    const reference::Method method = MethodOf(rules);
    for (int32_t position = 0; position < kPositions; ++position) {
      const std::vector<int32_t> tokens = reference::Tokens(method, {}, position);
      ASSERT_EQ(tokens.front(), rules.WindowBegin(position));
      ASSERT_GE(rules.WindowBegin(position), rules.LocalBegin(position / kBlock) * kBlock);
      ASSERT_EQ(rules.TokensRead(position, 0, kBlock), static_cast<int64_t>(tokens.size()));
    }
  }
}

TEST(BlockRules, TheLargestNumbersDoNotOverflow) {
  BlockRules rules;
  rules.init_blocks = rules.local_blocks = rules.top_k = BlocksFor(kMaxTokens, 16);
  const int32_t position = kMaxTokens - 1, b = position / 16;
  EXPECT_TRUE(rules.ReadsAll(b));
  EXPECT_EQ(rules.TokensRead(position, 0, 16), kMaxTokens);
  rules = {0, 0, 1, kDenseEverywhere, 0};
  EXPECT_TRUE(rules.Dense(position));
  EXPECT_EQ(rules.LocalQueryEnd(b), kDenseEverywhere);
  EXPECT_EQ(BlocksFor(kMaxTokens, 64), 1 << 24);
}

TEST(BlockRules, AreWhatTheSettingsSay) {
  Settings settings = {.policy = Policy::kPhsa, .init_tokens = 32, .local_tokens = 256, .top_k = 8, .dense_below = 64};
  const BlockRules phsa = RulesOf(settings);
  EXPECT_EQ(phsa.init_blocks, 2);
  EXPECT_EQ(phsa.local_blocks, 16);
  EXPECT_EQ(phsa.top_k, 8);
  EXPECT_EQ(phsa.dense_blocks, 4);
  settings.policy = Policy::kStreaming;
  EXPECT_EQ(RulesOf(settings).top_k, 0);
  settings.policy = Policy::kDense;
  EXPECT_EQ(RulesOf(settings).dense_blocks, kDenseEverywhere);
}

}  // namespace
}  // namespace phsa
