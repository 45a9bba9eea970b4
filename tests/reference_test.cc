// The oracle against examples small enough to do by hand, and against code written another way.
#include "attention/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace phsa::reference {
namespace {

// Blocks of 2 tokens and one channel keep the numbers small; the functions take any.
Method Small(Representation representation = Representation::kMixedMean) {
  Method method;
  method.representation = representation;
  method.block = 2;
  method.top_k = 1;
  return method;
}

Matrix Column(const std::vector<double>& values) {
  Matrix out(static_cast<int32_t>(values.size()), 1);
  out.data = values;
  return out;
}

Matrix RandomMatrix(std::mt19937* random, int32_t rows, int32_t cols) {
  std::normal_distribution<double> normal;
  Matrix out(rows, cols);
  for (double& x : out.data) x = static_cast<float>(normal(*random));
  return out;
}

using Ints = std::vector<int32_t>;

TEST(Represent, MixesTheMeanOfTheBlockWithTheMeanOfItsPunctuation) {
  Method method = Small();
  const Matrix k = Column({1, 3, 2, 6, 5, 7, 9});
  const std::vector<uint8_t> flags = {0, 1, 1, 1, 0, 0, 1};
  method.lambda = 0.5;
  // Means 2, 4, 6; punctuation 3, 4, none. The seventh token's block is not complete.
  EXPECT_EQ(Represent(method, k, flags).data, (std::vector<double>{2.5, 4, 6}));
  method.lambda = 0;
  EXPECT_EQ(Represent(method, k, flags).data, (std::vector<double>{3, 4, 6}));
  method.lambda = 1;
  EXPECT_EQ(Represent(method, k, flags).data, (std::vector<double>{2, 4, 6}));
  method.lambda = 0.25;
  EXPECT_EQ(Represent(method, k, {}).data, (std::vector<double>{2, 4, 6})) << "no flags";
}

TEST(Represent, IsTheWeightedSumOfTheSpecification) {
  // weight_i = λ/m + (1 - λ)·flag_i/count.
  std::mt19937 random(1);
  Method method;
  method.representation = Representation::kMixedMean;
  method.lambda = 0.9;
  const Matrix k = RandomMatrix(&random, 16 * 8, 5);
  std::vector<uint8_t> flags;
  for (int32_t i = 0; i < k.rows; ++i) flags.push_back(i >= 32 && random() % 5 == 0);
  const Matrix reps = Represent(method, k, flags);
  ASSERT_EQ(reps.rows, 8);
  for (int32_t t = 0; t < 8; ++t) {
    int count = 0;
    for (int32_t i = 0; i < 16; ++i) count += flags[static_cast<size_t>(t * 16 + i)];
    for (size_t c = 0; c < 5; ++c) {
      double sum = 0;
      for (int32_t i = 0; i < 16; ++i) {
        const double flag = flags[static_cast<size_t>(t * 16 + i)];
        sum += (count == 0 ? 1.0 / 16 : 0.9 / 16 + 0.1 * flag / count) * k.Row(t * 16 + i)[c];
      }
      EXPECT_NEAR(reps.Row(t)[c], sum, 1e-7);
    }
  }
}

TEST(Represent, RoundsToTheTypeOfTheCache) {
  Method method = Small();
  const Matrix k = Column({1, 1.001});
  method.dtype = PHSA_F32;
  EXPECT_EQ(Represent(method, k, {}).data[0], 1.0005f);
  method.dtype = PHSA_BF16;
  EXPECT_EQ(Represent(method, k, {}).data[0], 1.0);
  method.dtype = PHSA_F16;
  EXPECT_EQ(Represent(method, k, {}).data[0], 1.0009765625);
}

TEST(Represent, PoolsThirtyTwoTokensEverySixteen) {
  Method method;
  method.representation = Representation::kPooled;
  method.block = 64;
  std::vector<double> keys;
  for (int i = 0; i < 79; ++i) keys.push_back(i);
  EXPECT_EQ(Represent(method, Column(keys), {}).data, (std::vector<double>{15.5, 31.5, 47.5}));
  keys.push_back(79);
  EXPECT_EQ(Represent(method, Column(keys), {}).data, (std::vector<double>{15.5, 31.5, 47.5, 63.5}));
  keys.resize(31);
  EXPECT_EQ(Represent(method, Column(keys), {}).rows, 0);
}

TEST(Represent, KeepsTheBoundsOfEachChannel) {
  Matrix k(5, 2);
  k.data = {1, -1, 3, -2, 0, 5, -4, 6, 100, 100};
  const Matrix reps = Represent(Small(Representation::kBounds), k, {});
  EXPECT_EQ(reps.cols, 4);
  EXPECT_EQ(reps.data, (std::vector<double>{3, -1, 1, -2, 0, 6, -4, 5}));
}

// The scores themselves: small enough here that their logarithms lose nothing.
std::vector<double> Score(const Method& method, const Matrix& q, const Matrix& reps, int32_t position) {
  std::vector<double> scores = LogScores(method, q, reps, position);
  for (double& x : scores) x = std::exp(x);
  return scores;
}

TEST(Score, RanksBlocksThatAreFurtherApartThanNumbersReach) {
  Method method = Small();
  const std::vector<double> scores = LogScores(method, Column({1, 1}), Column({0, -3000, -1000, -2000, 5}), 10);
  EXPECT_NEAR(scores[1], -3005 + std::log(2) - std::log1p(std::exp(-5)), 1e-9);
  method.top_k = 2;
  EXPECT_EQ(Select(method, scores, 10), (std::vector<int32_t>{0, 4}));
  method.init_blocks = 1;
  method.local_blocks = 1;
  EXPECT_EQ(Select(method, scores, 10), (std::vector<int32_t>{2, 3}));
}

TEST(Score, IsTheSoftmaxOverTheBlocksBeforeTheOwnSummedOverTheGroup) {
  Method method = Small();
  // Logits of a head with q = 1: ln 1, ln 2, ln 5; of one with q = 0: all the same.
  const Matrix reps = Column({std::log(1), std::log(2), std::log(5), 77});
  const std::vector<double> one = Score(method, Column({1}), reps, 6);
  ASSERT_EQ(one.size(), 3u);
  EXPECT_NEAR(one[0], 1.0 / 8, 1e-12);
  EXPECT_NEAR(one[1], 2.0 / 8, 1e-12);
  EXPECT_NEAR(one[2], 5.0 / 8, 1e-12);
  const std::vector<double> sum = Score(method, Column({1, 0}), reps, 7);
  EXPECT_NEAR(sum[0], 1.0 / 8 + 1.0 / 3, 1e-12);
  EXPECT_NEAR(sum[2], 5.0 / 8 + 1.0 / 3, 1e-12);
  method.group_reduce = GroupReduce::kMax;
  const std::vector<double> max = Score(method, Column({1, 0}), reps, 7);
  EXPECT_NEAR(max[0], 1.0 / 3, 1e-12);
  EXPECT_NEAR(max[2], 5.0 / 8, 1e-12);
  EXPECT_TRUE(Score(method, Column({1}), reps, 1).empty()) << "nothing lies before the first block";
}

TEST(Score, ScalesTheDotProducts) {
  Method method = Small();
  method.scale = 0.5;
  const std::vector<double> scores = Score(method, Column({2}), Column({std::log(1), std::log(3)}), 4);
  EXPECT_NEAR(scores[1], 3.0 / 4, 1e-12);
}

TEST(Score, OfBoundsTakesTheBetterBoundOfEachChannel) {
  const Method method = Small(Representation::kBounds);
  Matrix q(1, 2);
  q.data = {2, -1};
  Matrix reps(2, 4);
  reps.data = {3, -1, 1,  -2,  // max(6, 2) + max(1, 2) = 8
               0, 6,  -4, 5};  // max(0, -8) + max(-6, -5) = -5
  const std::vector<double> scores = Score(method, q, reps, 4);
  EXPECT_NEAR(scores[0] / scores[1], std::exp(13), 1e-3);
}

// InfLLM v2 written straight from its description: which entries a query sees is decided token by token, and the
// pooling is the padded max-pooling of the frameworks.
std::vector<double> BruteForceInfllm2(const Matrix& q, const Matrix& k, int32_t position, GroupReduce reduce) {
  const int32_t own_begin = position / 64 * 64;
  std::vector<std::vector<double>> entries;
  for (int32_t begin = 0; begin + 32 <= k.rows; begin += 16) {
    if (begin + 31 >= own_begin) continue;  // its last token lies in the own block or behind it
    std::vector<double> mean(static_cast<size_t>(k.cols), 0);
    for (int32_t i = begin; i < begin + 32; ++i) {
      for (size_t c = 0; c < mean.size(); ++c) mean[c] += k.Row(i)[c];
    }
    for (double& x : mean) x = static_cast<float>(x / 32);
    entries.push_back(mean);
  }
  std::vector<double> group(entries.size(), 0);
  for (int32_t h = 0; h < q.rows; ++h) {
    double denominator = 0;
    std::vector<double> weights;
    for (const auto& entry : entries) {
      double dot = 0;
      for (size_t c = 0; c < entry.size(); ++c) dot += q.Row(h)[c] * entry[c];
      weights.push_back(std::exp(dot / std::sqrt(static_cast<double>(k.cols))));
      denominator += weights.back();
    }
    for (size_t j = 0; j < weights.size(); ++j) {
      const double p = weights[j] / denominator;
      group[j] = reduce == GroupReduce::kMax ? std::max(group[j], p) : group[j] + p;
    }
  }
  std::vector<double> padded = {-HUGE_VAL};
  padded.insert(padded.end(), group.begin(), group.end());
  std::vector<double> pooled;
  for (int32_t block = 0; block < position / 64; ++block) {
    double best = -HUGE_VAL;
    for (size_t n = static_cast<size_t>(block) * 4; n < static_cast<size_t>(block) * 4 + 5 && n < padded.size(); ++n) {
      best = std::max(best, padded[n]);
    }
    pooled.push_back(best);
  }
  return pooled;
}

TEST(Score, OfInfllm2On64TokenBlocksAgreesWithBruteForce) {
  std::mt19937 random(2);
  for (const GroupReduce reduce : {GroupReduce::kSum, GroupReduce::kMax}) {
    Method method;
    method.representation = Representation::kPooled;
    method.block = 64;
    method.group_reduce = reduce;
    method.scale = 1 / std::sqrt(8.0);
    const Matrix k = RandomMatrix(&random, 500, 8), q = RandomMatrix(&random, 3, 8);
    const Matrix reps = Represent(method, k, {});
    for (const int32_t position : {0, 63, 64, 100, 127, 128, 250, 447, 448, 499}) {
      const std::vector<double> scores = Score(method, q, reps, position);
      const std::vector<double> expected = BruteForceInfllm2(q, k, position, reduce);
      ASSERT_EQ(scores.size(), expected.size());
      for (size_t b = 0; b < scores.size(); ++b) EXPECT_NEAR(scores[b], expected[b], 1e-12) << position << " " << b;
    }
  }
}

TEST(Select, TakesTheBestCandidatesAscendingAndTiesToTheLowerBlock) {
  Method method = Small();
  method.init_blocks = 1;
  method.local_blocks = 1;
  // Query 15 is in block 7; block 0 is init and 6 local: 1 … 5 are candidates.
  const std::vector<double> scores = {9, 1, 3, 2, 3, 3, 9};
  const auto chosen = [&](int32_t k) {
    method.top_k = k;
    return Select(method, scores, 15);
  };
  EXPECT_EQ(chosen(0), Ints{});
  EXPECT_EQ(chosen(1), (Ints{2}));
  EXPECT_EQ(chosen(2), (Ints{2, 4}));
  EXPECT_EQ(chosen(3), (Ints{2, 4, 5}));
  EXPECT_EQ(chosen(4), (Ints{2, 3, 4, 5}));
  EXPECT_EQ(chosen(5), (Ints{1, 2, 3, 4, 5}));
  EXPECT_EQ(chosen(50), (Ints{1, 2, 3, 4, 5}));
}

TEST(Select, HasNoListWhereEverythingIsReadByPosition) {
  Method method = Small();
  method.dense_below = 6;
  const std::vector<double> scores = {1, 2, 3};
  EXPECT_EQ(Select(method, scores, 5), Ints{});
  EXPECT_EQ(Select(method, scores, 6), Ints{2});
  method.dense = true;
  EXPECT_EQ(Select(method, scores, 6), Ints{});
}

TEST(Select, TakesWhatIsNoNumberLast) {
  Method method = Small();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> scores = {nan, 0.1, nan, 0.2};
  method.top_k = 2;
  EXPECT_EQ(Select(method, scores, 8), (Ints{1, 3}));
  method.top_k = 3;
  EXPECT_EQ(Select(method, scores, 8), (Ints{0, 1, 3}));
}

TEST(Tokens, AreInitLocalAndChosenBlocksCausallyAndOnce) {
  Method method = Small();
  method.init_blocks = 1;
  method.local_blocks = 1;
  EXPECT_EQ(Tokens(method, Ints{2}, 12), (Ints{0, 1, 4, 5, 10, 11, 12}));
  EXPECT_EQ(Tokens(method, Ints{}, 13), (Ints{0, 1, 10, 11, 12, 13}));
  // Init and local overlap.
  EXPECT_EQ(Tokens(method, Ints{}, 2), (Ints{0, 1, 2}));
  EXPECT_EQ(Tokens(method, Ints{}, 0), (Ints{0}));
  method.init_blocks = 100;
  EXPECT_EQ(Tokens(method, Ints{}, 4), (Ints{0, 1, 2, 3, 4}));
  method.init_blocks = method.local_blocks = 0;
  EXPECT_EQ(Tokens(method, Ints{}, 5), (Ints{4, 5}));
  method.dense_below = 6;
  EXPECT_EQ(Tokens(method, Ints{}, 5), (Ints{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(Tokens(method, Ints{}, 6), (Ints{6}));
}

TEST(SepllmTokens, AreInitLocalAndTheSeparatorsBetween) {
  Method method = Small(Representation::kNone);
  method.init_blocks = 1;
  method.local_blocks = 1;
  //                                        0  1  2  3  4  5  6  7  8  9  10 11
  const std::vector<uint8_t> separators = {0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 0};
  EXPECT_EQ(SepllmTokens(method, separators, 10), (Ints{0, 1, 3, 6, 7, 8, 9, 10}));
  EXPECT_EQ(SepllmTokens(method, separators, 6), (Ints{0, 1, 3, 4, 5, 6}));
  EXPECT_EQ(SepllmTokens(method, separators, 0), (Ints{0}));
  const std::vector<uint8_t> none(12, 0), all(12, 1);
  EXPECT_EQ(SepllmTokens(method, none, 11), (Ints{0, 1, 8, 9, 10, 11})) << "streaming";
  EXPECT_EQ(SepllmTokens(method, all, 11).size(), 12u) << "dense";
}

TEST(Attend, WeighsTheValuesBySoftmaxAndReturnsItsLogSumExp) {
  Method method = Small();
  method.scale = 0.5;
  Matrix k(3, 2), v(3, 2);
  k.data = {2 * std::log(3), 0, 99, 99, 0, 5};
  v.data = {4, 8, 99, 99, 0, 4};
  const std::vector<double> q = {1, 0};
  // Logits ln 3 and 0: weights 3/4 and 1/4; token 1 is not read.
  const Attention attention = Attend(method, q, k, v, Ints{0, 2});
  EXPECT_NEAR(attention.out[0], 3, 1e-12);
  EXPECT_NEAR(attention.out[1], 7, 1e-12);
  EXPECT_NEAR(attention.lse, std::log(4), 1e-12);
}

TEST(Attend, SurvivesLogitsThatOverflowExp) {
  Method method = Small();
  const Attention attention = Attend(method, std::vector<double>{1}, Column({2000, 1000}), Column({1, 2}), Ints{0, 1});
  EXPECT_EQ(attention.out[0], 1);
  EXPECT_EQ(attention.lse, 2000);
}

TEST(AttendGradients, AreTheFiniteDifferencesOfAttend) {
  std::mt19937 random(3);
  Method method = Small();
  method.scale = 0.7;
  const int32_t d = 4, n = 7;
  Matrix q = RandomMatrix(&random, 1, d), k = RandomMatrix(&random, n, d), v = RandomMatrix(&random, n, d);
  const Matrix d_out = RandomMatrix(&random, 1, d);
  const Ints tokens = {0, 2, 3, 6};
  Matrix d_q(1, d), d_k(n, d), d_v(n, d);
  AttendGradients(method, q.Row(0), k, v, tokens, d_out.Row(0), d_q.Row(0), &d_k, &d_v);
  const auto loss = [&] {
    const Attention attention = Attend(method, q.Row(0), k, v, tokens);
    double sum = 0;
    for (size_t c = 0; c < attention.out.size(); ++c) sum += attention.out[c] * d_out.data[c];
    return sum;
  };
  const auto check = [&](const char* name, Matrix* input, const Matrix& gradient) {
    for (size_t e = 0; e < input->data.size(); ++e) {
      constexpr double kStep = 1e-5;
      const double at = input->data[e];
      input->data[e] = at + kStep;
      const double above = loss();
      input->data[e] = at - kStep;
      const double below = loss();
      input->data[e] = at;
      EXPECT_NEAR(gradient.data[e], (above - below) / (2 * kStep), 1e-8) << name << " " << e;
    }
  };
  check("q", &q, d_q);
  check("k", &k, d_k);
  check("v", &v, d_v);
}

TEST(AttendGradients, OfKeysAndValuesAddUpOverCallsAndThatOfTheQueryIsOverwritten) {
  std::mt19937 random(4);
  const Method method = Small();
  const Matrix q = RandomMatrix(&random, 1, 3), k = RandomMatrix(&random, 2, 3), v = RandomMatrix(&random, 2, 3);
  const Matrix d_out = RandomMatrix(&random, 1, 3);
  Matrix d_q(1, 3), d_k(2, 3), d_v(2, 3);
  AttendGradients(method, q.Row(0), k, v, Ints{0, 1}, d_out.Row(0), d_q.Row(0), &d_k, &d_v);
  const Matrix once_q = d_q, once_k = d_k, once_v = d_v;
  AttendGradients(method, q.Row(0), k, v, Ints{0, 1}, d_out.Row(0), d_q.Row(0), &d_k, &d_v);
  EXPECT_EQ(d_q.data, once_q.data);
  for (size_t e = 0; e < d_k.data.size(); ++e) {
    EXPECT_DOUBLE_EQ(d_k.data[e], 2 * once_k.data[e]);
    EXPECT_DOUBLE_EQ(d_v.data[e], 2 * once_v.data[e]);
  }
}

TEST(MethodOf, RoundsTheBudgetsUpToBlocksAndKnowsEachPolicy) {
  Settings settings = {.policy = Policy::kInfllm2_64, .block_size = 64, .init_tokens = 16, .local_tokens = 144};
  Method method = MethodOf(settings, 0, 64, PHSA_F32);
  EXPECT_EQ(method.init_blocks, 1);
  EXPECT_EQ(method.local_blocks, 3);
  EXPECT_EQ(method.representation, Representation::kPooled);
  EXPECT_EQ(method.scale, 0.125);

  settings = {};
  settings.head_lambda = {0.25f, 0.5f};
  EXPECT_EQ(MethodOf(settings, 1, 64, PHSA_F32).lambda, 0.5);
  settings.policy = Policy::kInfllm2;
  EXPECT_EQ(MethodOf(settings, 1, 64, PHSA_F32).lambda, 1) << "mean pooling whatever lambda says";
  settings.policy = Policy::kStreaming;
  EXPECT_EQ(MethodOf(settings, 0, 64, PHSA_F32).top_k, 0);
  settings.policy = Policy::kDense;
  EXPECT_TRUE(MethodOf(settings, 0, 64, PHSA_F32).dense);
  EXPECT_EQ(MethodOf(settings, 0, 64, PHSA_F32, 0.3).scale, 0.3);
}

}  // namespace
}  // namespace phsa::reference
