// The properties of the method, through the public Plan, on every target of this machine, against the reference.
//
// How close is close. With q, k and v exact, what a kernel may lose is:
//  - f32 arithmetic: a dot product over head_dim, summed in SIMD lanes, is off by at most about 32 · 2^-24 · |q|·|k|,
//    a few dozen roundings; exp and the sums of a softmax by a few more units. Through exp, an absolute error of a
//    logit is a relative error of a weight: RelativeError below.
//  - the type itself: the output is rounded once to it, and a kernel may round the softmax weights to it before the
//    product with v. Two roundings of Σ p·|v|, with a margin of half as much again: 3 · eps.
// Everything is measured against Σ p·|v|, not the output, which may cancel to nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>

#include "attention/cpu/kernels.h"
#include "attention/reference.h"
#include "attention_cases.h"
#include "phsa/threads.h"

namespace phsa {
namespace {

using cases::AttentionCase;
using cases::AttentionData;
using cases::AttentionResult;
using cases::Describe;
using cases::Layout;
using cases::MakeData;
using cases::OneOf;
using cases::Random;
using cases::RandomCase;
using cases::RunCase;
using cases::RunOptions;
using cases::SameBits;
using cases::Session;
using cases::Uniform;
using reference::Matrix;
using reference::Method;

size_t Index(int64_t i) { return static_cast<size_t>(i); }

std::vector<std::string> Targets() {
  std::istringstream names(phsa_targets());
  std::vector<std::string> out;
  for (std::string name; names >> name;) out.push_back(name);
  return out;
}

class Attention : public testing::Test {
 protected:
  void SetUp() override { first_target_ = phsa_target(); }
  void TearDown() override { phsa_set_target(first_target_.c_str()); }

  // Runs the body once per target, with the target's name in every failure.
  template <class Body>
  void ForEachTarget(Body&& body) {
    std::set<const cpu::Kernels*> seen;
    for (const std::string& target : Targets()) {
      ASSERT_EQ(phsa_set_target(target.c_str()), PHSA_OK) << phsa_last_error();
      // Targets that bring nothing for the attention have the kernels of another one.
      if (ActiveSimd() != Simd::kReference && !seen.insert(&cpu::ActiveKernels()).second) continue;
      SCOPED_TRACE("target " + target);
      body();
      if (HasFatalFailure()) return;
    }
  }

 private:
  std::string first_target_;
};

// Another policy with the case's numbers. infllm2-64 allows budgets that the others do not.
void SetPolicy(AttentionCase* c, Policy policy) {
  const int32_t block = c->settings.block_size;
  c->settings.policy = policy;
  c->settings.init_tokens = (c->settings.init_tokens + block - 1) / block * block;
  c->settings.local_tokens = (c->settings.local_tokens + block - 1) / block * block;
}

Matrix Head(const std::vector<float>& rows, int32_t num_rows, int32_t heads, int32_t head, int32_t width) {
  Matrix out(num_rows, width);
  for (int32_t r = 0; r < num_rows; ++r) {
    for (int32_t c = 0; c < width; ++c) {
      out.Row(r)[Index(c)] = rows[Index((int64_t{r} * heads + head) * width + c)];
    }
  }
  return out;
}

Matrix Absolute(Matrix m) {
  for (double& x : m.data) x = std::fabs(x);
  return m;
}

double LargestNorm(const Matrix& m) {
  double largest = 0;
  for (int32_t r = 0; r < m.rows; ++r) {
    double sum = 0;
    for (const double x : m.Row(r)) sum += x * x;
    largest = std::max(largest, sum);
  }
  return std::sqrt(largest);
}

// Of a softmax weight computed in f32: see the top of the file.
double RelativeError(const Method& method, const Matrix& q, double largest_key) {
  return (32 * LargestNorm(q) * largest_key * method.scale + 64) * 0x1p-24;
}

double LargestElement(const Matrix& m) {
  double largest = 0;
  for (const double x : m.data) largest = std::max(largest, std::fabs(x));
  return largest;
}

// How far a score by parts may be off because an element or two of a part were rounded to the other neighbour: their
// sums differ in the last bits of f32, and nobody sees the kernels' own parts.
double PartRounding(const Method& method, const Matrix& q, const Matrix& k) {
  if (method.dtype == PHSA_F32) return 0;
  return 4 * DtypeEpsilon(method.dtype) * LargestElement(q) * LargestElement(k) * method.scale;
}

// Of queries that choose by parts: all, and those where rounding decides which blocks survive.
int64_t judged_choices = 0, unclear_choices = 0;

// The scores by which a query must have chosen, or nothing where rounding may decide which blocks survive: then what
// was chosen must be among those that may.
std::optional<std::vector<double>> ExpectedScores(const Method& method, const Matrix& q, const Matrix& reps,
                                                  const Matrix& parts, int32_t position, double tolerance,
                                                  std::span<const int32_t> chosen) {
  std::vector<double> coarse = reference::LogScores(method, q, reps, position);
  if (method.parts == 1) return coarse;
  const int32_t end = position / method.block - method.local_blocks;
  std::vector<double> order;
  for (int32_t t = method.init_blocks; t < end; ++t) order.push_back(coarse[Index(t)]);
  if (method.survivors > 0 && order.size() > Index(method.survivors)) {
    std::sort(order.begin(), order.end(), std::greater<>());
    const double last_in = order[Index(method.survivors - 1)], first_out = order[Index(method.survivors)];
    if (last_in - first_out <= 4 * tolerance) {
      ++unclear_choices;
      for (const int32_t t : chosen) EXPECT_GE(coarse[Index(t)], last_in - 4 * tolerance) << "block " << t;
      return std::nullopt;
    }
  }
  return reference::LogScoresOfParts(method, q, parts, reference::FineBlocks(method, coarse, position), position);
}

// Checks one result row by row: representatives, lists, scores, output, log-sum-exp. The stages are judged one by one,
// each from what the stage before it really gave, so that a near tie is no excuse for anything else.
void ExpectAgreesWithReference(const AttentionCase& c, const AttentionData& data, const AttentionResult& result) {
  const Settings& settings = c.settings;

  const bool none = settings.group_reduce == GroupReduce::kNone;
  const int32_t choosing = none ? 1 : c.group;
  const int32_t selection_heads = c.num_q_heads() / choosing;
  const double eps = DtypeEpsilon(c.dtype);
  for (int32_t s = 0; s < c.num_seqs(); ++s) {
    const int32_t len = c.kv_lens[Index(s)];
    for (int32_t kv_head = 0; kv_head < c.num_kv_heads; ++kv_head) {
      Method method = reference::MethodOf(settings, kv_head, c.head_dim, c.dtype, c.scale);
      method.window = c.window;
      const Matrix k = Head(data.k[Index(s)], len, c.num_kv_heads, kv_head, c.head_dim);
      const Matrix v = Head(data.v[Index(s)], len, c.num_kv_heads, kv_head, c.head_dim);
      const Matrix v_absolute = Absolute(v);
      const double largest_key = LargestNorm(k);
      const std::vector<uint8_t> flags = c.flags ? data.flags[Index(s)] : std::vector<uint8_t>();

      // Where no coarse level comes first, the parts are what is kept.
      const bool parts_kept = method.parts > 1 && method.survivors == 0;
      const auto represent = parts_kept ? reference::RepresentParts : reference::Represent;
      const Matrix expected_reps = represent(method, k, flags);
      const Matrix expected_sizes = represent(method, Absolute(k), flags);
      ASSERT_EQ(result.reps[Index(s)].size(), Index(int64_t{expected_reps.rows} * c.num_kv_heads * expected_reps.cols));
      const Matrix reps = Head(result.reps[Index(s)], expected_reps.rows, c.num_kv_heads, kv_head, expected_reps.cols);
      const Matrix coarse_reps = parts_kept ? reference::Represent(method, k, flags) : reps;
      const Matrix parts = parts_kept         ? reps
                           : method.parts > 1 ? reference::RepresentParts(method, k, flags)
                                              : Matrix();
      const double largest_rep = std::max(LargestNorm(reps), LargestNorm(parts));
      for (size_t n = 0; n < reps.data.size(); ++n) {
        // Bounds are copies. Means are sums of at most 64 in f32, then rounded: to the neighbour at worst.
        const double tolerance = method.representation == Representation::kBounds
                                     ? 0
                                     : 2 * eps * std::fabs(expected_reps.data[n]) +
                                           64 * 0x1p-24 * std::fabs(expected_sizes.data[n]) +
                                           (c.dtype == PHSA_F16 ? 0x1p-24 : 0);
        ASSERT_NEAR(reps.data[n], expected_reps.data[n], tolerance)
            << "representative, element " << n << " of kv_head " << kv_head << ", sequence " << s;
      }

      for (int32_t position = c.first[Index(s)]; position < len; ++position) {
        const auto where = [&](int32_t head) {
          return fmt::format("sequence {} position {} head {}", s, position, head);
        };
        const Matrix q_all = Head({data.q[Index(s)].begin() + int64_t{position} * c.num_q_heads() * c.head_dim,
                                   data.q[Index(s)].begin() + int64_t{position + 1} * c.num_q_heads() * c.head_dim},
                                  c.num_q_heads(), 1, 0, c.head_dim);
        const int32_t own = position / method.block;
        const bool below = method.dense || position < method.dense_below;
        const int32_t candidates = std::max(0, own - method.local_blocks - method.init_blocks);
        for (int32_t first = kv_head * c.group; first < (kv_head + 1) * c.group; first += choosing) {
          std::vector<int32_t> chosen;
          if (method.top_k > 0) {
            const int64_t offset = (int64_t{position} * selection_heads + first / choosing) * method.top_k;
            const int32_t* list = &result.selection[Index(s)][Index(offset)];
            const float* scores = &result.scores[Index(s)][Index(offset)];
            const int32_t expected_count = below ? 0 : std::min(method.top_k, candidates);
            for (int32_t j = 0; j < method.top_k; ++j) {
              if (j >= expected_count) {
                ASSERT_EQ(list[j], -1) << where(first) << " slot " << j;
                ASSERT_EQ(scores[j], 0) << where(first) << " slot " << j;
                continue;
              }
              ASSERT_GE(list[j], j == 0 ? method.init_blocks : list[j - 1] + 1) << where(first) << " slot " << j;
              ASSERT_LT(list[j], own - method.local_blocks) << where(first) << " slot " << j;
              chosen.push_back(list[j]);
            }

            Matrix q(choosing, c.head_dim);
            std::copy_n(q_all.Row(first).begin(), q.data.size(), q.data.begin());
            const double rounding = 2 * RelativeError(method, q, largest_rep);
            judged_choices += method.parts > 1;
            const auto wanted = ExpectedScores(method, q, coarse_reps, parts, position, rounding, chosen);
            const double tolerance = rounding + (method.parts > 1 ? PartRounding(method, q, k) : 0);
            double worst = HUGE_VAL, best_left_out = -HUGE_VAL;
            for (size_t j = 0; j < chosen.size() && wanted; ++j) {
              const double score = std::exp((*wanted)[Index(chosen[j])]);
              ASSERT_NEAR(scores[j], score, std::expm1(tolerance) * score + 1e-30)
                  << where(first) << " block " << chosen[j];
              worst = std::min(worst, (*wanted)[Index(chosen[j])]);
            }
            for (int32_t t = method.init_blocks; t < own - method.local_blocks && expected_count > 0 && wanted; ++t) {
              if (std::find(chosen.begin(), chosen.end(), t) == chosen.end()) {
                best_left_out = std::max(best_left_out, (*wanted)[Index(t)]);
              }
            }
            // A list may differ from the reference's only where the scores are the same to rounding, however small.
            ASSERT_GE(worst, best_left_out - 2 * tolerance) << where(first);
          }

          const std::vector<int32_t> tokens = reference::Tokens(method, chosen, position);
          for (int32_t h = first; h < first + choosing; ++h) {
            const float* const sink = c.sinks.empty() ? nullptr : &c.sinks[Index(h)];
            const reference::Attention expected = reference::Attend(method, q_all.Row(h), k, v, tokens, sink);
            const reference::Attention sizes = reference::Attend(method, q_all.Row(h), k, v_absolute, tokens, sink);
            Matrix q(1, c.head_dim);
            std::copy_n(q_all.Row(h).begin(), q.data.size(), q.data.begin());
            const double weights = RelativeError(method, q, largest_key);
            const int64_t head = int64_t{position} * c.num_q_heads() + h;
            for (int32_t d = 0; d < c.head_dim; ++d) {
              const double tolerance = ((c.dtype == PHSA_F32 ? 0 : 3 * eps) + 2 * weights) * sizes.out[Index(d)] + 1e-6;
              ASSERT_NEAR(result.out[Index(s)][Index(head * c.head_dim + d)], expected.out[Index(d)], tolerance)
                  << where(h) << " element " << d;
            }
            ASSERT_NEAR(result.lse[Index(s)][Index(head)], expected.lse,
                        2 * weights + 0x1p-22 * std::fabs(expected.lse))
                << where(h);
          }
        }
      }
    }
  }
}

#define EXPECT_SAME_RESULT(a, b)             \
  do {                                       \
    EXPECT_EQ((a).selection, (b).selection); \
    EXPECT_TRUE(SameBits((a).out, (b).out)); \
    EXPECT_TRUE(SameBits((a).lse, (b).lse)); \
  } while (false)

// Queries that have more candidates than they may choose: without many of these, agreement says little.
int64_t QueriesWithAChoice(const AttentionCase& c) {
  const Method method = reference::MethodOf(c.settings, 0, c.head_dim, c.dtype);
  int64_t count = 0;
  for (size_t s = 0; s < c.kv_lens.size(); ++s) {
    for (int32_t i = c.first[s]; i < c.kv_lens[s]; ++i) {
      const int32_t candidates = i / method.block - method.local_blocks - method.init_blocks;
      count += method.top_k > 0 && i >= method.dense_below && candidates > method.top_k;
    }
  }
  return count;
}

TEST_F(Attention, RandomBatchesAgreeWithTheReference) {
  Random random(1);
  int64_t choices = 0;
  judged_choices = unclear_choices = 0;
  for (int n = 0; n < 250; ++n) {
    const AttentionCase c = RandomCase(&random);
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] { ExpectAgreesWithReference(c, data, RunCase(c, data)); });
    if (HasFailure()) return;
    choices += QueriesWithAChoice(c);
  }
  EXPECT_GT(judged_choices, 5000);
  EXPECT_LT(unclear_choices, judged_choices / 20);
  EXPECT_GT(choices, 4000);
}

// Every shape the kernels are compiled for, with few queries over several blocks, policies and reductions in turn.
TEST_F(Attention, EveryHeadDimGroupSizeBlockSizeAndTypeAgreesWithTheReference) {
  Random random(2);
  int n = 0;
  for (const int32_t head_dim : {64, 80, 96, 128, 256}) {
    for (const int32_t group : {1, 2, 3, 6, 7, 16}) {
      for (const int32_t block : {16, 32, 64}) {
        for (const int32_t dtype : {PHSA_F32, PHSA_F16, PHSA_BF16}) {
          AttentionCase c;
          c.seed = random();
          c.settings = cases::RandomSettings(&random, 1);
          if (c.settings.policy == Policy::kInfllm2_64 && block != 64) c.settings.policy = Policy::kPhsa;
          c.settings.block_size = block;
          c.settings.init_tokens = c.settings.local_tokens = block;
          c.settings.dense_below = 0;
          c.settings.top_k = 1 + n % 4;
          c.dtype = dtype;
          c.codes = n % 5 == 0;
          c.group = group;
          c.head_dim = head_dim;
          c.kv_lens = {9 * block + Uniform(&random, 0, block)};
          c.first = {c.kv_lens[0] - Uniform(&random, 1, 5)};
          const AttentionData data = MakeData(c);
          SCOPED_TRACE(fmt::format("case {}: {}", n++, Describe(c)));
          ForEachTarget([&] { ExpectAgreesWithReference(c, data, RunCase(c, data)); });
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(Attention, ThreadCountStagesAndWhereRepresentativesLiveChangeNoBit) {
  ThreadPool pool2(2, 2), pool5(5, 5);
  Random random(3);
  for (int n = 0; n < 40; ++n) {
    const AttentionCase c = RandomCase(&random, {.work = 2'000'000});
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] {
      const AttentionResult one = RunCase(c, data);
      RunOptions options;
      options.executor = pool2.executor();
      const AttentionResult two = RunCase(c, data, options);
      EXPECT_SAME_RESULT(one, two);
      EXPECT_TRUE(SameBits(one.reps, two.reps));
      EXPECT_TRUE(SameBits(one.scores, two.scores));
      options.executor = pool5.executor();
      options.stages = true;
      const AttentionResult apart = RunCase(c, data, options);
      EXPECT_SAME_RESULT(one, apart);
      EXPECT_TRUE(SameBits(one.reps, apart.reps));
      EXPECT_TRUE(SameBits(one.scores, apart.scores));
      options.stages = false;
      options.reps = false;
      EXPECT_SAME_RESULT(one, RunCase(c, data, options));
      options.stages = true;
      EXPECT_SAME_RESULT(one, RunCase(c, data, options));
      options = {};
      options.lists = false;
      EXPECT_TRUE(SameBits(one.out, RunCase(c, data, options).out)) << "without lists";
    });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, CodesGiveTheBitsOfTheNumbersTheyStandFor) {
  Random random(25);
  for (int n = 0; n < 40; ++n) {
    AttentionCase c = RandomCase(&random, {.work = 2'000'000});
    c.codes = true;
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    AttentionCase numbers = c;
    numbers.codes = false;
    RunOptions options;
    options.page_size = n % 2 == 0 ? 0 : 128;
    ForEachTarget([&] {
      const AttentionResult expected = RunCase(numbers, data, options), got = RunCase(c, data, options);
      EXPECT_SAME_RESULT(expected, got);
      EXPECT_TRUE(SameBits(expected.reps, got.reps));
      EXPECT_TRUE(SameBits(expected.scores, got.scores));
    });
    if (HasFailure()) return;
  }
}

// Runs the whole case in chunks; every sequence advances by `chunk` a call until it ends.
AttentionResult RunInChunks(const AttentionCase& c, const AttentionData& data, int32_t chunk,
                            const RunOptions& options) {
  Session session(c, data, options);
  std::vector<int32_t> to(c.kv_lens.size(), 0);
  while (to != c.kv_lens) {
    for (size_t s = 0; s < to.size(); ++s) to[s] = std::min(c.kv_lens[s], to[s] + chunk);
    session.Forward(to);
  }
  return std::move(session.result);
}

TEST_F(Attention, ChunksOfAnySizeGiveTheBitsOfOnePass) {
  Random random(4);
  int64_t choices = 0;
  for (int n = 0; n < 100; ++n) {
    AttentionCase c = RandomCase(&random, {.work = 8'000'000, .self_attention = true});
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] {
      const AttentionResult whole = RunCase(c, data);
      for (const int32_t chunk : {1, 7, 64, 512}) {
        SCOPED_TRACE(fmt::format("chunks of {}", chunk));
        RunOptions options;
        options.reps = chunk != 64;  // once without a cache of representatives
        const AttentionResult chunked = RunInChunks(c, data, chunk, options);
        EXPECT_SAME_RESULT(whole, chunked);
        EXPECT_TRUE(SameBits(whole.scores, chunked.scores));
        if (options.reps) {
          EXPECT_TRUE(SameBits(whole.reps, chunked.reps));
        }
      }
    });
    if (HasFailure()) return;
    choices += QueriesWithAChoice(c);
  }
  EXPECT_GT(choices, 1500);
}

TEST_F(Attention, AWindowIsReadToItsFirstTokenInAnyChunks) {
  Random random(41);
  for (int n = 0; n < 60; ++n) {
    AttentionCase c = RandomCase(&random, {.work = 4'000'000, .self_attention = true});
    SetPolicy(&c, Policy::kDense);
    // Around blocks of 16 and chunks of 128 tokens, and beyond most texts.
    c.window = OneOf(&random, {1, 2, 15, 16, 17, 31, 64, 100, 128, 129, 300, 100'000});
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: window {} {}", n, c.window, Describe(c)));
    ForEachTarget([&] {
      const AttentionResult whole = RunCase(c, data);
      ExpectAgreesWithReference(c, data, whole);
      for (const int32_t chunk : {1, 7, 512}) {
        SCOPED_TRACE(fmt::format("chunks of {}", chunk));
        EXPECT_SAME_RESULT(whole, RunInChunks(c, data, chunk, {}));
      }
    });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, SinksWeakenWhatIsReadAndChangeNoChoiceInAnyChunks) {
  Random random(43);
  int64_t choices = 0;
  for (int n = 0; n < 40; ++n) {
    AttentionCase c = RandomCase(&random, {.work = 2'000'000, .self_attention = true});
    if (n % 3 == 0) {
      SetPolicy(&c, Policy::kDense);
      c.window = OneOf(&random, {1, 16, 100, 129});
    }
    const AttentionData data = MakeData(c);
    const std::vector<std::vector<int32_t>> chosen_without = RunCase(c, data).selection;
    // From sinks that take nothing to those that take nearly all, and more than f32's exponentials hold.
    for (int32_t h = 0; h < c.num_q_heads(); ++h) {
      c.sinks.push_back(OneOf(&random, {-HUGE_VALF, -200.0f, -3.0f, 0.0f, 0.5f, 2.0f, 9.0f, 300.0f, 1e5f}));
    }
    SCOPED_TRACE(fmt::format("case {}: window {} {}", n, c.window, Describe(c)));
    ForEachTarget([&] {
      const AttentionResult whole = RunCase(c, data);
      ExpectAgreesWithReference(c, data, whole);
      for (const int32_t chunk : {1, 7, 512}) {
        SCOPED_TRACE(fmt::format("chunks of {}", chunk));
        EXPECT_SAME_RESULT(whole, RunInChunks(c, data, chunk, {}));
      }
    });
    EXPECT_EQ(RunCase(c, data).selection, chosen_without);
    if (HasFailure()) return;
    choices += QueriesWithAChoice(c);
  }
  EXPECT_GT(choices, 100);
}

TEST_F(Attention, ASinkOfNoWeightChangesNoBit) {
  Random random(44);
  AttentionCase c = RandomCase(&random, {.work = 3'000'000, .self_attention = true});
  const AttentionData data = MakeData(c);
  ForEachTarget([&] {
    c.sinks.clear();
    const AttentionResult without = RunCase(c, data);
    c.sinks.assign(Index(c.num_q_heads()), -HUGE_VALF);
    EXPECT_SAME_RESULT(without, RunCase(c, data));
  });
}

TEST(Window, ReadsItsTokensAndTakesNothingButDenseForward) {
  const int32_t length = 1000;
  PlanDesc desc;
  desc.settings.policy = Policy::kDense;
  desc.num_q_heads = desc.num_kv_heads = 1;
  desc.head_dim = 64;
  desc.num_seqs = 1;
  desc.q_lens = desc.kv_lens = &length;
  desc.window = 100;
  int64_t read = 0, dense = 0;
  Plan(desc).TokensRead(nullptr, &read, &dense);
  EXPECT_EQ(read, 100 * 101 / 2 + 900 * 100);
  EXPECT_EQ(dense, 1000 * 1001 / 2);
  const auto refusal = [&] {
    try {
      const Plan plan(desc);
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  desc.settings.policy = Policy::kPhsa;
  EXPECT_EQ(refusal(), "plan: window is 100 with the policy phsa; a window takes dense");
  desc.settings.policy = Policy::kDense;
  desc.device = PHSA_DEVICE_CUDA;
  desc.dtype = PHSA_BF16;
  EXPECT_EQ(refusal(), phsa_has_device(PHSA_DEVICE_CUDA)
                           ? ""
                           : "plan: device is 1 (CUDA), but this build has no CUDA; build with -DPHSA_CUDA=ON");
  desc.device = PHSA_DEVICE_CPU;
  desc.window = -1;
  EXPECT_EQ(refusal(), "plan: window is -1; allowed: 0 (no limit) to 1073741824");
}

TEST_F(Attention, ALongPromptInChunksGivesTheBitsOfOnePass) {
  // Longer than any tile of a kernel and than the chunk of 512, long enough for kernels that treat long prompts apart,
  // beside a short sequence that they do not.
  ThreadPool pool(3, 3);
  Random random(5);
  int n = 0;
  for (const Policy policy : {Policy::kPhsa, Policy::kPhsa, Policy::kPhsa, Policy::kDense, Policy::kInfllm2_64,
                              Policy::kStreaming, Policy::kQuest, Policy::kPhsa, Policy::kInfllm2, Policy::kPhsa}) {
    AttentionCase c;
    c.seed = random();
    c.settings.parts = n < 7 ? 1 : 2 << (n - 7);  // 2, 4, 8
    c.settings.survivors = n == 9 ? 0 : 20;
    c.dtype = n % 3;
    c.num_kv_heads = 2;
    c.group = 1 + n % 2;
    c.kv_lens = {1209, 45};
    c.first = {0, 0};
    c.settings.policy = policy;
    c.settings.block_size = BlockSizeOf(policy, c.settings.block_size);
    c.settings.init_tokens = c.settings.local_tokens = 64;
    c.settings.top_k = 6;
    const AttentionData data = MakeData(c);
    RunOptions options;
    if (n++ % 2 == 1) options.page_size = 128;
    options.layout = OneOf(&random, {Layout::kPacked, Layout::kPadded, Layout::kHeadMajor});
    SCOPED_TRACE(Describe(c));
    ForEachTarget([&] {
      if (std::string(phsa_target()) == "reference") return;  // independent of chunks by construction, and slow
      options.executor = pool.executor();
      const AttentionResult whole = RunCase(c, data, options);
      options.executor = Init<Executor>();
      EXPECT_SAME_RESULT(whole, RunCase(c, data, options));
      for (const int32_t chunk : {100, 512}) EXPECT_SAME_RESULT(whole, RunInChunks(c, data, chunk, {}));
      AttentionCase last = c;  // what the oracle has time for
      last.first = {1195, 40};
      ExpectAgreesWithReference(last, data, whole);
    });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, AFewQueriesOverALongCacheAgreeWithTheReference) {
  Random random(23);
  int n = 0;
  for (const Policy policy : {Policy::kDense, Policy::kPhsa, Policy::kInfllm2, Policy::kInfllm2_64, Policy::kQuest,
                              Policy::kPhsa, Policy::kInfllm2}) {
    for (const int32_t top_k : {16, 300}) {
      AttentionCase c;
      c.seed = random();
      c.settings.parts = n < 10 ? 1 : 2 << (n - 10) % 3;
      c.settings.survivors = n % 2 == 0 ? 64 : 0;
      c.dtype = n++ % 3;
      c.group = 2;
      c.settings.policy = policy;
      c.settings.block_size = BlockSizeOf(policy, c.settings.block_size);
      c.settings.top_k = top_k;
      c.kv_lens = {12011};
      c.first = {12008};
      const AttentionData data = MakeData(c);
      SCOPED_TRACE(Describe(c));
      ForEachTarget([&] { ExpectAgreesWithReference(c, data, RunCase(c, data)); });
      if (HasFailure()) return;
    }
  }
}

TEST_F(Attention, AFewQueriesReadInPiecesByManyThreadsGiveTheBitsOfATileOfMany) {
  ThreadPool pool(16, 16);  // more than cores: workers are interrupted anywhere
  Random random(29);
  int n = 0;
  for (const Policy policy : {Policy::kDense, Policy::kPhsa, Policy::kInfllm2_64, Policy::kQuest, Policy::kPhsa,
                              Policy::kInfllm2, Policy::kPhsa}) {
    AttentionCase c;
    c.seed = random();
    c.settings.parts = n < 4 ? 1 : 2 << (n - 4);
    c.settings.survivors = n % 2 == 0 ? 70 : 0;
    c.dtype = n++ % 3;
    c.group = 3;
    c.num_kv_heads = 2;
    c.settings.policy = policy;
    c.settings.block_size = BlockSizeOf(policy, c.settings.block_size);
    c.settings.init_tokens = 128;
    c.settings.local_tokens = 512;
    c.settings.top_k = 40;  // two windows of chosen blocks
    c.kv_lens = {5003, 700};
    c.first = {4970, 660};
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(Describe(c));
    ForEachTarget([&] {
      if (std::string(phsa_target()) == "reference") return;  // has no pieces
      const AttentionResult tiles = RunCase(c, data);
      for (const int32_t queries : {1, 4, 20}) {
        AttentionCase few = c;
        for (size_t s = 0; s < c.kv_lens.size(); ++s) few.first[s] = c.kv_lens[s] - queries;
        RunOptions options;
        options.executor = pool.executor();
        const AttentionResult pieces = RunCase(few, data, options);
        for (size_t s = 0; s < c.kv_lens.size(); ++s) {
          const auto same = [&](const auto& of_tiles, const auto& of_pieces) {
            const size_t row = of_tiles[s].size() / Index(c.kv_lens[s]), begin = Index(few.first[s]) * row;
            const size_t bytes = Index(queries) * row * sizeof(of_tiles[s][0]);
            return bytes == 0 ||  // dense attention chooses nothing
                   std::memcmp(of_tiles[s].data() + begin, of_pieces[s].data() + begin, bytes) == 0;
          };
          EXPECT_TRUE(same(tiles.out, pieces.out)) << queries << " queries of sequence " << s;
          EXPECT_TRUE(same(tiles.lse, pieces.lse)) << queries << " queries of sequence " << s;
          EXPECT_TRUE(same(tiles.selection, pieces.selection)) << queries << " queries of sequence " << s;
          EXPECT_TRUE(same(tiles.scores, pieces.scores)) << queries << " queries of sequence " << s;
        }
      }
    });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, PagesGiveTheBitsOfContiguousKeys) {
  Random random(6);
  for (int n = 0; n < 30; ++n) {
    const AttentionCase c = RandomCase(&random, {.work = 2'000'000});
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    const int32_t page_size = OneOf(&random, {64, 128, 192, 256});
    const Layout layout = OneOf(&random, {Layout::kPacked, Layout::kPadded, Layout::kHeadMajor});
    ForEachTarget([&] {
      const AttentionResult contiguous = RunCase(c, data);
      RunOptions options;
      options.page_size = page_size;
      options.layout = layout;
      const AttentionResult paged = RunCase(c, data, options);
      EXPECT_SAME_RESULT(contiguous, paged);
      EXPECT_TRUE(SameBits(contiguous.reps, paged.reps));
      EXPECT_TRUE(SameBits(contiguous.scores, paged.scores));
      options.reps = false;
      EXPECT_SAME_RESULT(contiguous, RunCase(c, data, options));
    });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, StridesAndStartsChangeNoBit) {
  Random random(7);
  for (int n = 0; n < 20; ++n) {
    const AttentionCase c = RandomCase(&random);
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] {
      const AttentionResult packed = RunCase(c, data);
      for (const Layout layout : {Layout::kPadded, Layout::kHeadMajor}) {
        RunOptions options;
        options.layout = layout;
        const AttentionResult result = RunCase(c, data, options);
        EXPECT_SAME_RESULT(packed, result);
        EXPECT_TRUE(SameBits(packed.reps, result.reps));
      }
    });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, PackedSequencesGiveTheBitsOfEachAlone) {
  Random random(8);
  int batches = 0;
  for (int n = 0; batches < 20; ++n) {
    const AttentionCase c = RandomCase(&random, {.work = 2'000'000});
    if (c.num_seqs() == 1) continue;
    ++batches;
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] {
      const AttentionResult packed = RunCase(c, data);
      for (size_t s = 0; s < c.kv_lens.size(); ++s) {
        if (c.first[s] == c.kv_lens[s]) continue;
        AttentionCase alone = c;
        alone.kv_lens = {c.kv_lens[s]};
        alone.first = {c.first[s]};
        const AttentionData own = {{data.q[s]},     {data.k[s]},        {data.v[s]},
                                   {data.flags[s]}, {data.k_scales[s]}, {data.v_scales[s]}};
        const AttentionResult result = RunCase(alone, own);
        EXPECT_EQ(result.selection[0], packed.selection[s]);
        EXPECT_TRUE(SameBits(result.out, {packed.out[s]}));
        EXPECT_TRUE(SameBits(result.lse, {packed.lse[s]}));
      }
    });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, ADecodeBatchGivesTheBitsOfThePrefill) {
  Random random(9);
  for (const int32_t dtype : {PHSA_F32, PHSA_F16, PHSA_BF16}) {
    int n = 0;
    for (const Policy policy : {Policy::kPhsa, Policy::kQuest, Policy::kInfllm2_64, Policy::kDense, Policy::kPhsa,
                                Policy::kPhsa, Policy::kInfllm2}) {
      AttentionCase c;
      c.seed = random();
      c.settings.parts = n < 4 ? 1 : 2 << (n - 4);
      c.settings.survivors = n++ % 2 == 0 ? 5 : 0;
      c.dtype = dtype;
      c.group = 3;
      c.num_kv_heads = 2;
      c.settings.policy = policy;
      c.settings.block_size = BlockSizeOf(policy);
      c.settings.init_tokens = c.settings.local_tokens = c.settings.block_size;
      c.settings.top_k = 2;
      c.kv_lens = {1, 16, 130, 200, 33, 321};
      c.first.assign(6, 0);
      const AttentionData data = MakeData(c);
      SCOPED_TRACE(Describe(c));
      AttentionCase decode = c;
      for (size_t s = 0; s < c.kv_lens.size(); ++s) decode.first[s] = c.kv_lens[s] - 1;
      ForEachTarget([&] {
        const AttentionResult prefill = RunCase(c, data);
        RunOptions options;
        options.page_size = 64;
        const AttentionResult step = RunCase(decode, data, options);
        for (size_t s = 0; s < c.kv_lens.size(); ++s) {
          const size_t row = Index(c.num_q_heads() * c.head_dim), begin = Index(c.kv_lens[s] - 1) * row;
          EXPECT_EQ(0, std::memcmp(&prefill.out[s][begin], &step.out[s][begin], row * sizeof(float)));
        }
      });
    }
  }
}

TEST_F(Attention, TakingEveryCandidateIsDenseAttention) {
  Random random(10);
  for (int n = 0; n < 40; ++n) {
    AttentionCase c = RandomCase(&random, {.work = 2'000'000});
    if (c.settings.policy != Policy::kInfllm2_64) {
      SetPolicy(&c, OneOf(&random, {Policy::kPhsa, Policy::kInfllm2, Policy::kQuest}));
    }
    c.settings.top_k = 300;
    AttentionCase dense = c;
    SetPolicy(&dense, Policy::kDense);
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] {
      const AttentionResult all = RunCase(c, data);
      const AttentionResult expected = RunCase(dense, data);
      for (size_t s = 0; s < all.out.size(); ++s) {
        for (size_t i = Index(int64_t{c.first[s]} * c.num_q_heads() * c.head_dim); i < all.out[s].size(); ++i) {
          // |v| is below 6: the same weights, summed in another order, rounded to the type.
          ASSERT_NEAR(all.out[s][i], expected.out[s][i], 6 * (3 * DtypeEpsilon(c.dtype) + 1e-4)) << i;
        }
      }
    });
    if (HasFailure()) return;
  }
}

// Keys that differ within a block in one half only: one mean a block sees half of the difference, two parts see it.
TEST_F(Attention, PartsFindTheHalfOfABlockThatOneMeanHides) {
  AttentionCase c;
  c.settings.init_tokens = c.settings.local_tokens = 16;
  c.settings.top_k = 1;
  c.settings.lambda = 1;
  c.kv_lens = {40 * 16};
  c.first = {40 * 16 - 1};
  c.flags = false;
  AttentionData data = MakeData(c);
  std::fill(data.k[0].begin(), data.k[0].end(), 0.0f);
  std::fill(data.q[0].begin(), data.q[0].end(), 0.0f);
  for (int32_t i = 0; i < c.kv_lens[0]; ++i) data.q[0][Index(i * c.head_dim)] = 8;
  const auto key = [&](int32_t token) -> float& { return data.k[0][Index(token * c.head_dim)]; };
  for (int32_t i = 0; i < 8; ++i) {
    key(10 * 16 + i) = 20, key(10 * 16 + 8 + i) = -20;  // mean 0, half of it most relevant
    key(20 * 16 + i) = key(20 * 16 + 8 + i) = 2;        // all of it a little relevant
  }
  for (const int32_t survivors : {0, 39}) {
    c.settings.survivors = survivors;
    ForEachTarget([&] {
      c.settings.parts = 1;
      EXPECT_EQ(RunCase(c, data).selection[0].back(), 20);
      for (const int32_t parts : {2, 4, 8}) {
        c.settings.parts = parts;
        EXPECT_EQ(RunCase(c, data).selection[0].back(), 10) << parts << " parts";
      }
    });
  }
  // The coarse level is part of the definition: what it drops is not chosen.
  c.settings.survivors = 1;
  ForEachTarget([&] { EXPECT_EQ(RunCase(c, data).selection[0].back(), 20); });
}

TEST_F(Attention, AllCandidatesSurvivingIsTheExactRule) {
  Random random(31);
  for (int n = 0; n < 20; ++n) {
    AttentionCase c = RandomCase(&random, {.work = 2'000'000});
    SetPolicy(&c, Policy::kPhsa);
    c.settings.parts = OneOf(&random, {2, 4, 8});
    c.settings.survivors = 0;
    AttentionCase many = c;
    many.settings.survivors = 1000;
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] { EXPECT_SAME_RESULT(RunCase(c, data), RunCase(many, data)); });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, PartsMeanNothingToPoliciesWithoutMeans) {
  Random random(32);
  for (const Policy policy : {Policy::kDense, Policy::kStreaming, Policy::kQuest, Policy::kInfllm2_64}) {
    AttentionCase c = RandomCase(&random, {.work = 2'000'000});
    c.settings.block_size = BlockSizeOf(policy);
    c.settings.dense_below = 0;
    SetPolicy(&c, policy);
    c.settings.parts = 1;
    AttentionCase parts = c;
    parts.settings.parts = 4;
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(Describe(c));
    ForEachTarget([&] { EXPECT_SAME_RESULT(RunCase(c, data), RunCase(parts, data)); });
  }
}

TEST(Kernels, TheBestKAreThoseOfASortWithTiesToTheLowerIndex) {
  Random random(33);
  for (const Simd target : SimdTargets()) {
    if (target == Simd::kReference) continue;
    const cpu::Kernels* const kernels = &cpu::KernelsOf(target);
    for (int n = 0; n < 400; ++n) {
      const int32_t end = Uniform(&random, 1, n % 10 == 0 ? 5000 : 400), begin = Uniform(&random, 0, end - 1) / 2;
      const int32_t k = Uniform(&random, 1, end - begin);
      std::vector<float> values(Index(end + 16));
      const int kind = Uniform(&random, 0, 4);
      for (float& x : values) {
        const float u = static_cast<float>(random()) / 4294967296.0f;
        x = kind == 0   ? u
            : kind == 1 ? std::exp2(-200 * u)                               // far apart, denormal numbers among them
            : kind == 2 ? static_cast<float>(Uniform(&random, 0, 5))        // ties
            : kind == 3 ? -u * 1e30f                                        // below zero
                        : (u < 0.5f ? -HUGE_VALF : std::round(8 * u) - 6);  // no score, ties, both signs, zero
      }
      std::vector<int32_t> expected(Index(end - begin));
      std::iota(expected.begin(), expected.end(), begin);
      std::stable_sort(expected.begin(), expected.end(),
                       [&](int32_t a, int32_t b) { return values[Index(a)] > values[Index(b)]; });
      expected.resize(Index(k));
      std::sort(expected.begin(), expected.end());
      std::vector<int32_t> scratch(Index(end - begin)), best(Index(k), -1);
      kernels->top_k(values.data(), begin, end, k, scratch.data(), best.data());
      ASSERT_EQ(best, expected) << Name(target) << " kind " << kind << " of " << end - begin << " k " << k;
    }
  }
}

TEST_F(Attention, LambdaOneIsMeanPooling) {
  Random random(11);
  for (int n = 0; n < 15; ++n) {
    AttentionCase c = RandomCase(&random, {.work = 2'000'000});
    SetPolicy(&c, Policy::kPhsa);
    c.settings.head_lambda.clear();
    c.settings.lambda = 1;
    AttentionCase mean = c;
    SetPolicy(&mean, Policy::kInfllm2);
    mean.settings.lambda = 0.25f;  // infllm2 does not look at it
    mean.flags = false;
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] {
      const AttentionResult result = RunCase(c, data), expected = RunCase(mean, data);
      EXPECT_TRUE(SameBits(result.reps, expected.reps));
      EXPECT_SAME_RESULT(result, expected);
    });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, BlocksWithoutPunctuationAreMeanPooledWhateverLambda) {
  Random random(12);
  for (int n = 0; n < 15; ++n) {
    AttentionCase c = RandomCase(&random, {.work = 2'000'000});
    SetPolicy(&c, Policy::kPhsa);
    c.settings.head_lambda.clear();
    c.settings.lambda = OneOf(&random, {0.0f, 0.3f, 0.9f});
    c.flags = true;
    AttentionData data = MakeData(c);
    AttentionCase mean = c;
    SetPolicy(&mean, Policy::kInfllm2);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] {
      const AttentionResult result = RunCase(c, data), expected = RunCase(mean, data);
      for (size_t s = 0; s < c.kv_lens.size(); ++s) {
        const int64_t width = int64_t{c.num_kv_heads} * c.head_dim;
        const int32_t span = c.settings.block_size / (c.settings.survivors == 0 ? c.settings.parts : 1);
        for (int32_t t = 0; t < c.kv_lens[s] / span; ++t) {
          const auto begin = data.flags[s].begin() + t * span;
          const auto marked = std::count(begin, begin + span, 1);
          if (marked == span) continue;  // both means are the same
          const bool any = marked > 0;
          const size_t row = Index(t * width);
          const bool same =
              std::memcmp(&result.reps[s][row], &expected.reps[s][row], Index(width) * sizeof(float)) == 0;
          EXPECT_EQ(same, !any) << "row " << t;
        }
      }
    });
    for (auto& flags : data.flags) std::fill(flags.begin(), flags.end(), uint8_t{0});
    ForEachTarget([&] { EXPECT_SAME_RESULT(RunCase(c, data), RunCase(mean, data)); });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, FlagsThatAreMissingAreFlagsThatAreZero) {
  Random random(13);
  for (int n = 0; n < 10; ++n) {
    AttentionCase c = RandomCase(&random, {.work = 2'000'000});
    c.flags = true;
    AttentionData data = MakeData(c);
    for (auto& flags : data.flags) std::fill(flags.begin(), flags.end(), uint8_t{0});
    AttentionCase missing = c;
    missing.flags = false;
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] { EXPECT_SAME_RESULT(RunCase(c, data), RunCase(missing, data)); });
  }
}

TEST_F(Attention, EqualScoresGoToTheLowerBlocks) {
  Random random(14);
  int n = 0;
  for (const Policy policy :
       {Policy::kPhsa, Policy::kInfllm2, Policy::kQuest, Policy::kInfllm2_64, Policy::kPhsa, Policy::kInfllm2}) {
    ++n;
    for (const int32_t dtype : {PHSA_F32, PHSA_F16, PHSA_BF16}) {
      for (const bool zero : {true, false}) {
        AttentionCase c;
        c.seed = random();
        c.settings.parts = n > 4 ? 4 : 1;
        c.settings.survivors = zero ? 5 : 0;
        c.dtype = dtype;
        c.group = 2;
        c.settings.policy = policy;
        c.settings.block_size = BlockSizeOf(policy);
        c.settings.init_tokens = c.settings.local_tokens = c.settings.block_size;
        c.settings.top_k = 3;
        c.kv_lens = {41 * c.settings.block_size + 5};
        c.first = {c.kv_lens[0] - 40};
        AttentionData data = MakeData(c);
        // Every key the same: every representative the same. With zero, every dot product is exactly zero.
        c.flags = false;
        for (size_t i = 0; i < data.k[0].size(); ++i) data.k[0][i] = zero ? 0 : data.k[0][i % Index(c.head_dim)];
        SCOPED_TRACE(Describe(c));
        ForEachTarget([&] {
          const AttentionResult result = RunCase(c, data);
          for (int32_t i = c.first[0]; i < c.kv_lens[0]; ++i) {
            const std::vector<int32_t> list(&result.selection[0][Index(i * 3)], &result.selection[0][Index(i * 3)] + 3);
            ASSERT_EQ(list, (std::vector<int32_t>{1, 2, 3})) << "position " << i << " zero " << zero;
          }
        });
      }
    }
  }
}

TEST_F(Attention, PositionsBelowDenseBelowReadEverythingAndTheOthersDoNotNotice) {
  Random random(15);
  for (int n = 0; n < 15; ++n) {
    AttentionCase c = RandomCase(&random, {.work = 2'000'000});
    if (c.settings.policy == Policy::kDense) c.settings.policy = Policy::kPhsa;
    const int32_t below = c.settings.dense_below = 4 * c.settings.block_size;
    AttentionCase sparse = c;
    sparse.settings.dense_below = 0;
    AttentionCase dense = c;
    SetPolicy(&dense, Policy::kDense);
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] {
      const AttentionResult mixed = RunCase(c, data), never = RunCase(sparse, data), always = RunCase(dense, data);
      for (size_t s = 0; s < c.kv_lens.size(); ++s) {
        const int64_t row = int64_t{c.num_q_heads()} * c.head_dim;
        for (int32_t i = c.first[s]; i < c.kv_lens[s]; ++i) {
          for (size_t e = Index(i * row); e < Index((i + 1) * row); ++e) {
            if (i < below) {
              ASSERT_NEAR(mixed.out[s][e], always.out[s][e], 6 * (3 * DtypeEpsilon(c.dtype) + 1e-4));
            } else {
              ASSERT_EQ(mixed.out[s][e], never.out[s][e]);
            }
          }
        }
      }
    });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, HeadsWithTheirOwnLambdaChooseAsIfAllHadIt) {
  Random random(16);
  for (int n = 0; n < 10; ++n) {
    AttentionCase c = RandomCase(&random);
    SetPolicy(&c, Policy::kPhsa);
    c.num_kv_heads = 2;
    c.group = 2;
    c.settings.top_k = 2;
    c.settings.dense_below = 0;
    c.settings.group_reduce = GroupReduce::kSum;
    c.settings.head_lambda = {0.0f, 0.75f};
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] {
      const AttentionResult result = RunCase(c, data);
      for (int32_t head = 0; head < 2; ++head) {
        AttentionCase uniform = c;
        uniform.settings.head_lambda.clear();
        uniform.settings.lambda = c.settings.head_lambda[Index(head)];
        const AttentionResult expected = RunCase(uniform, data);
        for (size_t s = 0; s < c.kv_lens.size(); ++s) {
          for (int32_t i = c.first[s]; i < c.kv_lens[s]; ++i) {
            for (int32_t j = 0; j < 2; ++j) {
              const size_t e = Index((i * 2 + head) * 2 + j);
              ASSERT_EQ(result.selection[s][e], expected.selection[s][e]);
            }
          }
        }
      }
    });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, WithoutGroupReductionEachHeadChoosesAsIfAlone) {
  Random random(17);
  for (int n = 0; n < 10; ++n) {
    AttentionCase c = RandomCase(&random);
    c.codes = false;
    if (c.settings.policy == Policy::kDense || c.settings.policy == Policy::kStreaming) {
      c.settings.policy = Policy::kPhsa;
    }
    c.settings.group_reduce = GroupReduce::kNone;
    c.settings.head_lambda.clear();
    c.num_kv_heads = 1;
    c.group = 3;
    c.settings.top_k = 2;
    const AttentionData data = MakeData(c);
    AttentionCase expanded = c;  // the same keys three times, one query head each
    expanded.num_kv_heads = 3;
    expanded.group = 1;
    expanded.settings.group_reduce = GroupReduce::kSum;
    AttentionData copies = data;
    for (size_t s = 0; s < c.kv_lens.size(); ++s) {
      for (auto* rows : {&copies.k[s], &copies.v[s]}) {
        std::vector<float> tripled;
        for (size_t i = 0; i < rows->size(); i += Index(c.head_dim)) {
          for (int copy = 0; copy < 3; ++copy) {
            tripled.insert(tripled.end(), rows->begin() + static_cast<int64_t>(i),
                           rows->begin() + static_cast<int64_t>(i) + c.head_dim);
          }
        }
        *rows = tripled;
      }
    }
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] { EXPECT_EQ(RunCase(c, data).selection, RunCase(expanded, copies).selection); });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, TheOwnBlockAndLaterTokensNeverChangeTheSelection) {
  Random random(18);
  for (int n = 0; n < 10; ++n) {
    AttentionCase c = RandomCase(&random);
    const AttentionData data = MakeData(c);
    AttentionData changed = data;
    for (size_t s = 0; s < c.kv_lens.size(); ++s) {
      const int64_t own = c.kv_lens[s] / c.settings.block_size * c.settings.block_size;
      const int64_t row = int64_t{c.num_kv_heads} * c.head_dim;
      for (size_t e = Index(own * row); e < changed.k[s].size(); ++e) changed.k[s][e] = 100;
    }
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] { EXPECT_EQ(RunCase(c, data).selection, RunCase(c, changed).selection); });
  }
}

TEST_F(Attention, WhatIsNoNumberStillGivesListsOfCandidates) {
  Random random(19);
  for (int n = 0; n < 30; ++n) {
    AttentionCase c = RandomCase(&random, {.work = 2'000'000});
    AttentionData data = MakeData(c);
    const float bad = OneOf(&random, {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                                      -std::numeric_limits<float>::infinity()});
    for (auto* tensor : {&data.k, &data.v, &data.q}) {
      for (auto& values : *tensor) {
        const uint32_t rate = OneOf(&random, {1u, 3u, 5000u});
        for (float& x : values) {
          if (random() % rate == 0) x = bad;
        }
      }
    }
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    ForEachTarget([&] {
      const AttentionResult result = RunCase(c, data);
      const Method method = reference::MethodOf(c.settings, 0, c.head_dim, c.dtype);
      if (method.top_k == 0) return;
      const int32_t heads = c.settings.group_reduce == GroupReduce::kNone ? c.num_q_heads() : c.num_kv_heads;
      for (size_t s = 0; s < c.kv_lens.size(); ++s) {
        for (int32_t i = c.first[s]; i < c.kv_lens[s]; ++i) {
          const int32_t end = i / method.block - method.local_blocks;
          const int32_t count = i < method.dense_below ? 0 : std::clamp(end - method.init_blocks, 0, method.top_k);
          for (int32_t h = 0; h < heads; ++h) {
            const int32_t* list = &result.selection[s][Index((int64_t{i} * heads + h) * method.top_k)];
            for (int32_t j = 0; j < method.top_k; ++j) {
              if (j >= count) {
                ASSERT_EQ(list[j], -1);
              } else {
                ASSERT_GE(list[j], j == 0 ? method.init_blocks : list[j - 1] + 1);
                ASSERT_LT(list[j], end);
              }
            }
          }
        }
      }
    });
    if (HasFailure()) return;
  }
}

TEST_F(Attention, TokensReadAreThoseOfTheReference) {
  Random random(20);
  for (int n = 0; n < 30; ++n) {
    const AttentionCase c = RandomCase(&random);
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    const AttentionResult result = RunCase(c, data);
    const int32_t choosing = c.settings.group_reduce == GroupReduce::kNone ? 1 : c.group;
    const Method method = reference::MethodOf(c.settings, 0, c.head_dim, c.dtype);
    int64_t expected_read = 0, expected_dense = 0;
    std::vector<int32_t> selection, q_lens;
    for (size_t s = 0; s < c.kv_lens.size(); ++s) {
      q_lens.push_back(c.kv_lens[s] - c.first[s]);
      const size_t per_query = Index(c.num_q_heads() / choosing * method.top_k);
      selection.insert(selection.end(), result.selection[s].begin() + c.first[s] * static_cast<int64_t>(per_query),
                       result.selection[s].end());
      for (int32_t i = c.first[s]; i < c.kv_lens[s]; ++i) {
        for (int32_t h = 0; h < c.num_q_heads(); ++h) {
          const auto list =
              std::span(result.selection[s])
                  .subspan(Index(i) * per_query + Index(h / choosing * method.top_k), Index(method.top_k));
          expected_read += static_cast<int64_t>(reference::Tokens(method, list, i).size());
          expected_dense += i + 1;
        }
      }
    }
    PlanDesc desc;
    desc.settings = c.settings;
    desc.num_q_heads = c.num_q_heads();
    desc.num_kv_heads = c.num_kv_heads;
    desc.head_dim = c.head_dim;
    desc.num_seqs = c.num_seqs();
    desc.q_lens = q_lens.data();
    desc.kv_lens = c.kv_lens.data();
    int64_t read = 0, dense = 0;
    Plan(desc).TokensRead(selection.data(), &read, &dense);
    EXPECT_EQ(read, expected_read);
    EXPECT_EQ(dense, expected_dense);
    Plan(desc).TokensRead(nullptr, &read, &dense);
    EXPECT_EQ(read, expected_read) << "without the lists, which are all full";
  }
}

// Lists that no scores gave: random candidates, as many as a list must hold.
std::vector<int32_t> RandomLists(const AttentionCase& c, Random* random) {
  const Method method = reference::MethodOf(c.settings, 0, c.head_dim, c.dtype);
  const int32_t heads = c.settings.group_reduce == GroupReduce::kNone ? c.num_q_heads() : c.num_kv_heads;
  std::vector<int32_t> lists;
  for (size_t s = 0; s < c.kv_lens.size(); ++s) {
    for (int32_t i = 0; i < c.kv_lens[s]; ++i) {
      for (int32_t h = 0; h < heads; ++h) {
        std::vector<int32_t> list;
        const int32_t end = i < method.dense_below ? 0 : i / method.block - method.local_blocks;
        for (int32_t t = method.init_blocks; t < end; ++t) list.push_back(t);
        std::shuffle(list.begin(), list.end(), *random);
        if (list.size() > Index(method.top_k)) list.resize(Index(method.top_k));
        std::sort(list.begin(), list.end());
        list.resize(Index(method.top_k), -1);
        lists.insert(lists.end(), list.begin(), list.end());
      }
    }
  }
  return lists;
}

// Attention over lists of the caller, by the public Attend and by the reference; self-attention in f32, packed.
TEST_F(Attention, AttendReadsTheBlocksOfTheListsItIsGiven) {
  Random random(24);
  for (int n = 0; n < 20; ++n) {
    AttentionCase c = RandomCase(&random, {.work = 4'000'000, .self_attention = true});
    c.codes = false;
    c.dtype = PHSA_F32;
    if (c.settings.policy == Policy::kDense || c.settings.policy == Policy::kStreaming) {
      c.settings.policy = Policy::kPhsa;
    }
    c.settings.top_k = 3;
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    std::vector<int32_t> lists = RandomLists(c, &random);
    std::vector<float> q, k, v;
    for (size_t s = 0; s < c.kv_lens.size(); ++s) {
      q.insert(q.end(), data.q[s].begin(), data.q[s].end());
      k.insert(k.end(), data.k[s].begin(), data.k[s].end());
      v.insert(v.end(), data.v[s].begin(), data.v[s].end());
    }
    PlanDesc desc;
    desc.settings = c.settings;
    desc.num_q_heads = c.num_q_heads();
    desc.num_kv_heads = c.num_kv_heads;
    desc.head_dim = c.head_dim;
    desc.num_seqs = c.num_seqs();
    desc.q_lens = desc.kv_lens = c.kv_lens.data();
    desc.scale = c.scale;
    const Plan plan(desc);
    ForEachTarget([&] {
      std::vector<float> out(q.size()), lse(Index(plan.NumQueries() * c.num_q_heads()));
      cases::Buffer workspace(plan.WorkspaceSize());
      ForwardParams params = Init<ForwardParams>();
      params.q = q.data();
      params.out = out.data();
      params.q_token_stride = params.out_token_stride = c.num_q_heads() * c.head_dim;
      params.q_head_stride = params.out_head_stride = c.head_dim;
      params.kv = Init<KeyValues>();
      params.kv.k = k.data();
      params.kv.v = v.data();
      params.kv.k_token_stride = params.kv.v_token_stride = c.num_kv_heads * c.head_dim;
      params.kv.k_head_stride = params.kv.v_head_stride = c.head_dim;
      params.lse = lse.data();
      params.selection = lists.data();
      params.workspace = workspace.data();
      params.workspace_size = workspace.size();
      plan.Attend(params);

      const int32_t choosing = c.settings.group_reduce == GroupReduce::kNone ? 1 : c.group;
      int64_t start = 0;
      for (size_t s = 0; s < c.kv_lens.size(); ++s) {
        for (int32_t h = 0; h < c.num_q_heads(); ++h) {
          const int32_t kv_head = h / c.group;
          const Method method = reference::MethodOf(c.settings, kv_head, c.head_dim, c.dtype, c.scale);
          const Matrix queries = Head(data.q[s], c.kv_lens[s], c.num_q_heads(), h, c.head_dim);
          const Matrix keys = Head(data.k[s], c.kv_lens[s], c.num_kv_heads, kv_head, c.head_dim);
          const Matrix values = Head(data.v[s], c.kv_lens[s], c.num_kv_heads, kv_head, c.head_dim);
          const double weights = RelativeError(method, queries, LargestNorm(keys));
          for (int32_t i = 0; i < c.kv_lens[s]; ++i) {
            const int64_t list = (start + i) * (c.num_q_heads() / choosing) + h / choosing;
            const auto chosen = std::span(lists).subspan(Index(list * method.top_k), Index(method.top_k));
            const reference::Attention expected =
                reference::Attend(method, queries.Row(i), keys, values, reference::Tokens(method, chosen, i));
            // The log-sum-exp tells which tokens were read: leaving out or adding one moves it by far more.
            ASSERT_NEAR(lse[Index((start + i) * c.num_q_heads() + h)], expected.lse,
                        1e-3 + 1e-5 * std::fabs(expected.lse))
                << "sequence " << s << " position " << i << " head " << h;
            for (int32_t e = 0; e < c.head_dim; ++e) {
              ASSERT_NEAR(out[Index(((start + i) * c.num_q_heads() + h) * c.head_dim + e)], expected.out[Index(e)],
                          6 * (3 * DtypeEpsilon(c.dtype) + 1e-4 + 2 * weights))
                  << "sequence " << s << " position " << i << " head " << h;
            }
          }
        }
        start += c.kv_lens[s];
      }
    });
    if (HasFailure()) return;
  }
}

// Backward. Everything lies packed, as a framework's tensors do, or head-major.
struct Gradients {
  std::vector<float> d_q, d_k, d_v;  // [token of the batch][head][head_dim]
  bool operator==(const Gradients&) const = default;
};

struct BackwardInput {
  std::vector<int32_t> selection;  // [query][selection_head][slot]
  std::vector<float> d_out;        // [query][q_head][head_dim]
};

Gradients RunBackward(const AttentionCase& c, const AttentionData& data, const AttentionResult& forward,
                      const BackwardInput& input, Layout layout, const Executor& executor) {
  PlanDesc desc;
  desc.settings = c.settings;
  desc.dtype = c.dtype;
  desc.num_q_heads = c.num_q_heads();
  desc.num_kv_heads = c.num_kv_heads;
  desc.head_dim = c.head_dim;
  desc.num_seqs = c.num_seqs();
  desc.q_lens = desc.kv_lens = c.kv_lens.data();
  desc.scale = c.scale;
  desc.max_threads = std::max(1, executor.num_threads);
  const Plan plan(desc);
  const int64_t tokens = std::accumulate(c.kv_lens.begin(), c.kv_lens.end(), int64_t{0});
  const auto lay_out = [&](const std::vector<float>& values, int32_t heads) {
    cases::Rows rows(layout, c.dtype, 1, tokens, heads, c.head_dim);
    for (int64_t i = 0; i < tokens && !values.empty(); ++i) {
      for (int32_t h = 0; h < heads; ++h) {
        rows.Store(rows.Offset(0, i, h), &values[Index((i * heads + h) * c.head_dim)], c.head_dim);
      }
    }
    return rows;
  };
  const auto read_back = [&](const cases::Rows& rows, int32_t heads) {
    std::vector<float> values(Index(tokens * heads * c.head_dim));
    for (int64_t i = 0; i < tokens; ++i) {
      for (int32_t h = 0; h < heads; ++h) {
        rows.Load(rows.Offset(0, i, h), &values[Index((i * heads + h) * c.head_dim)], c.head_dim);
      }
    }
    return values;
  };
  const auto joined = [](const std::vector<std::vector<float>>& parts) {
    std::vector<float> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  const int32_t q_heads = c.num_q_heads(), kv_heads = c.num_kv_heads;
  const cases::Rows q = lay_out(joined(data.q), q_heads), k = lay_out(joined(data.k), kv_heads),
                    v = lay_out(joined(data.v), kv_heads), out = lay_out(joined(forward.out), q_heads),
                    d_out = lay_out(input.d_out, q_heads), d_q = lay_out({}, q_heads), d_k = lay_out({}, kv_heads),
                    d_v = lay_out({}, kv_heads);
  const std::vector<float> lse = joined(forward.lse);
  cases::Buffer workspace(plan.BackwardWorkspaceSize());
  BackwardParams params = Init<BackwardParams>();
  params.kv = Init<KeyValues>();
  const auto set = [](const cases::Rows& rows, auto* data_pointer, int64_t* token_stride, int64_t* head_stride) {
    *data_pointer = rows.data();
    *token_stride = rows.token_stride;
    *head_stride = rows.head_stride;
  };
  set(q, &params.q, &params.q_token_stride, &params.q_head_stride);
  set(k, &params.kv.k, &params.kv.k_token_stride, &params.kv.k_head_stride);
  set(v, &params.kv.v, &params.kv.v_token_stride, &params.kv.v_head_stride);
  set(out, &params.out, &params.out_token_stride, &params.out_head_stride);
  set(d_out, &params.d_out, &params.d_out_token_stride, &params.d_out_head_stride);
  set(d_q, &params.d_q, &params.d_q_token_stride, &params.d_q_head_stride);
  set(d_k, &params.d_k, &params.d_k_token_stride, &params.d_k_head_stride);
  set(d_v, &params.d_v, &params.d_v_token_stride, &params.d_v_head_stride);
  params.lse = lse.data();
  params.selection = input.selection.empty() ? nullptr : input.selection.data();
  params.workspace = workspace.data();
  params.workspace_size = workspace.size();
  params.executor = executor;
  plan.Backward(params);
  return {read_back(d_q, q_heads), read_back(d_k, kv_heads), read_back(d_v, kv_heads)};
}

BackwardInput MakeBackwardInput(const AttentionCase& c, const AttentionResult& forward) {
  Random random(c.seed + 1);
  BackwardInput input;
  for (size_t s = 0; s < c.kv_lens.size(); ++s) {
    input.selection.insert(input.selection.end(), forward.selection[s].begin(), forward.selection[s].end());
    const std::vector<float> d_out =
        cases::Normal(&random, int64_t{c.kv_lens[s]} * c.num_q_heads() * c.head_dim, 1, c.dtype);
    input.d_out.insert(input.d_out.end(), d_out.begin(), d_out.end());
  }
  return input;
}

// The gradients of the reference, and the sums of the absolute values of their terms: what rounding is measured by.
struct ExpectedGradients {
  std::vector<double> d_q, d_k, d_v, d_q_size, d_k_size, d_v_size;
};

// Also writes the out and lse of these lists to *saved.
ExpectedGradients ReferenceGradients(const AttentionCase& c, const AttentionData& data, const BackwardInput& input,
                                     AttentionResult* saved) {
  ExpectedGradients out;
  const int32_t choosing = c.settings.group_reduce == GroupReduce::kNone ? 1 : c.group;
  const int64_t tokens = std::accumulate(c.kv_lens.begin(), c.kv_lens.end(), int64_t{0});
  for (auto* q_side : {&out.d_q, &out.d_q_size}) q_side->resize(Index(tokens * c.num_q_heads() * c.head_dim));
  for (auto* kv_side : {&out.d_k, &out.d_v, &out.d_k_size, &out.d_v_size}) {
    kv_side->resize(Index(tokens * c.num_kv_heads * c.head_dim));
  }
  int64_t start = 0;
  for (int32_t s = 0; s < c.num_seqs(); ++s) {
    const int32_t len = c.kv_lens[Index(s)];
    for (int32_t kv_head = 0; kv_head < c.num_kv_heads; ++kv_head) {
      const Method method = reference::MethodOf(c.settings, kv_head, c.head_dim, c.dtype, c.scale);
      const Matrix k = Head(data.k[Index(s)], len, c.num_kv_heads, kv_head, c.head_dim);
      const Matrix v = Head(data.v[Index(s)], len, c.num_kv_heads, kv_head, c.head_dim);
      Matrix d_k(len, c.head_dim), d_v(len, c.head_dim), d_k_size(len, c.head_dim), d_v_size(len, c.head_dim);
      for (int32_t h = kv_head * c.group; h < (kv_head + 1) * c.group; ++h) {
        for (int32_t i = 0; i < len; ++i) {
          const int64_t row = (start + i) * c.num_q_heads() + h;
          std::vector<double> q(Index(c.head_dim)), d_out(Index(c.head_dim)), d_q(Index(c.head_dim));
          for (int32_t d = 0; d < c.head_dim; ++d) {
            q[Index(d)] = data.q[Index(s)][Index((int64_t{i} * c.num_q_heads() + h) * c.head_dim + d)];
            d_out[Index(d)] = input.d_out[Index(row * c.head_dim + d)];
          }
          std::vector<int32_t> chosen;
          if (method.top_k > 0) {
            const int64_t lists = (start + i) * (c.num_q_heads() / choosing) + h / choosing;
            for (int32_t j = 0; j < method.top_k; ++j) {
              const int32_t block = input.selection[Index(lists * method.top_k + j)];
              if (block >= 0) chosen.push_back(block);
            }
          }
          const std::vector<int32_t> read = reference::Tokens(method, chosen, i);
          reference::AttendGradients(method, q, k, v, read, d_out, d_q, &d_k, &d_v);
          std::copy(d_q.begin(), d_q.end(), out.d_q.begin() + row * c.head_dim);
          // The sizes: the same sums with every term taken absolute. Rounding `out` to the type moves dS by its share
          // of Σ |out · d_out|; the products with v are exact to f32, hence the small share of theirs.
          const reference::Attention forward = reference::Attend(method, q, k, v, read);
          const int64_t saved_row = int64_t{i} * c.num_q_heads() + h;
          saved->lse[Index(s)][Index(saved_row)] = static_cast<float>(forward.lse);
          double delta = 0, delta_size = 0;
          for (int32_t d = 0; d < c.head_dim; ++d) {
            saved->out[Index(s)][Index(saved_row * c.head_dim + d)] =
                RoundTo(c.dtype, static_cast<float>(forward.out[Index(d)]));
            delta += forward.out[Index(d)] * d_out[Index(d)];
            delta_size += std::fabs(forward.out[Index(d)] * d_out[Index(d)]);
          }
          for (const int32_t t : read) {
            double logit = 0, dp = 0, dp_size = 0;
            for (size_t d = 0; d < q.size(); ++d) {
              logit += q[d] * k.Row(t)[d];
              dp += d_out[d] * v.Row(t)[d];
              dp_size += std::fabs(d_out[d] * v.Row(t)[d]);
            }
            const double p = std::exp(logit * method.scale - forward.lse);
            const double ds = p * (std::fabs(dp - delta) + delta_size + dp_size / 32) * method.scale;
            for (size_t d = 0; d < q.size(); ++d) {
              out.d_q_size[Index(row * c.head_dim) + d] += ds * std::fabs(k.Row(t)[d]);
              d_k_size.Row(t)[d] += ds * std::fabs(q[d]);
              d_v_size.Row(t)[d] += p * std::fabs(d_out[d]);
            }
          }
        }
      }
      for (int32_t i = 0; i < len; ++i) {
        const int64_t to = ((start + i) * c.num_kv_heads + kv_head) * c.head_dim;
        std::copy(d_k.Row(i).begin(), d_k.Row(i).end(), out.d_k.begin() + to);
        std::copy(d_v.Row(i).begin(), d_v.Row(i).end(), out.d_v.begin() + to);
        std::copy(d_k_size.Row(i).begin(), d_k_size.Row(i).end(), out.d_k_size.begin() + to);
        std::copy(d_v_size.Row(i).begin(), d_v_size.Row(i).end(), out.d_v_size.begin() + to);
      }
    }
    start += len;
  }
  return out;
}

void ExpectGradient(const char* name, const std::vector<float>& got, const std::vector<double>& expected,
                    const std::vector<double>& size, double relative) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], expected[i], relative * size[i] + 1e-6) << name << ", element " << i;
  }
}

TEST_F(Attention, GradientsAgreeWithTheReferenceForEveryPolicy) {
  ThreadPool pool(3, 3);
  Random random(21);
  for (int n = 0; n < 48; ++n) {
    AttentionCase c = RandomCase(&random, {.work = 3'000'000, .self_attention = true});
    c.codes = false;
    const AttentionData data = MakeData(c);
    SCOPED_TRACE(fmt::format("case {}: {}", n, Describe(c)));
    // All targets get the reference's forward pass, so that only the backward is judged.
    ASSERT_EQ(phsa_set_target("reference"), PHSA_OK);
    AttentionResult forward = RunCase(c, data);
    BackwardInput input = MakeBackwardInput(c, forward);
    if (n % 2 == 1 && !input.selection.empty()) input.selection = RandomLists(c, &random);
    const ExpectedGradients expected = ReferenceGradients(c, data, input, &forward);
    // P, dS, out and the result may each be rounded to the type once: four roundings. In f32, the errors of the
    // logits as in the forward, of which the longest q and k of the case give the size.
    double largest_q = 0, largest_k = 0;
    for (size_t s = 0; s < data.q.size(); ++s) {
      largest_q = std::max(largest_q, LargestNorm(Head(data.q[s], c.kv_lens[s] * c.num_q_heads(), 1, 0, c.head_dim)));
      largest_k = std::max(largest_k, LargestNorm(Head(data.k[s], c.kv_lens[s] * c.num_kv_heads, 1, 0, c.head_dim)));
    }
    const double scale = c.scale > 0 ? c.scale : 1 / std::sqrt(c.head_dim);
    const double relative = (c.dtype == PHSA_F32 ? 0 : 4 * DtypeEpsilon(c.dtype)) +
                            2 * (32 * largest_q * largest_k * scale + 256) * 0x1p-24;
    ForEachTarget([&] {
      const Gradients one = RunBackward(c, data, forward, input, Layout::kPacked, Init<Executor>());
      ExpectGradient("d_q", one.d_q, expected.d_q, expected.d_q_size, relative);
      ExpectGradient("d_k", one.d_k, expected.d_k, expected.d_k_size, relative);
      ExpectGradient("d_v", one.d_v, expected.d_v, expected.d_v_size, relative);
      EXPECT_TRUE(one == RunBackward(c, data, forward, input, Layout::kPadded, pool.executor()))
          << "threads or strides changed a bit";
    });
    if (HasFailure()) return;
  }
}

}  // namespace
TEST_F(Attention, BeforeTheFirstCompleteBlockRepresentativesNeedNoRoom) {
  const int32_t length = 15;
  PlanDesc desc;
  desc.num_q_heads = desc.num_kv_heads = 1;
  desc.head_dim = 64;
  desc.num_seqs = 1;
  desc.q_lens = desc.kv_lens = &length;
  const Plan plan(desc);
  ASSERT_EQ(plan.NumReps(), 0);
  const std::vector<float> keys(size_t{64} * length);
  auto kv = Init<KeyValues>();
  kv.k = keys.data();
  kv.k_token_stride = 64;
  kv.k_head_stride = 64;
  EXPECT_NO_THROW(plan.Represent(kv, Init<Executor>()));
}

}  // namespace phsa
