// Products and layers on every SIMD target of this machine: what operations.h has no column for, such as bits that
// threads and neighbours must not change.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/errors.h"
#include "base/simd.h"
#include "matrices.h"
#include "ops/layers.h"
#include "ops/linear.h"
#include "phsa/threads.h"

namespace phsa {
namespace {

using matrices::HasOddBits;
using matrices::kPairs;
using matrices::MakeWeights;
using matrices::Multiply;
using matrices::Name;
using matrices::Pair;
using matrices::RandomFloats;
using matrices::Weights;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class Ops : public testing::Test {
 protected:
  void SetUp() override { first_target_ = Name(ActiveSimd()); }
  void TearDown() override { SetSimd(first_target_); }

  template <class Body>
  void ForEachTarget(Body&& body) {
    for (const Simd simd : SimdTargets()) {
      if (simd == Simd::kReference) continue;  // of the attention
      const std::string target = Name(simd);
      SetSimd(target);
      SCOPED_TRACE("target " + target);
      body();
    }
  }

  template <class Body>
  void ForEachTargetAndPair(Body&& body) {
    ForEachTarget([&] {
      for (const Pair& pair : kPairs) {
        SCOPED_TRACE(Name(pair));
        if (HasOddBits(pair.weights) && !FastProducts().odd_bits) {
          EXPECT_FALSE(HasProduct(pair.weights, ActivationType::kF32));
          continue;
        }
        ASSERT_TRUE(HasProduct(pair.weights, pair.activations));
        body(pair);
      }
    });
  }

  std::string first_target_;
};

void ExpectProduct(const Weights& w, const std::vector<float>& x, int32_t m, ActivationType activations,
                   const float* bias, const std::vector<float>& y) {
  const matrices::ExpectedProduct expected =
      matrices::Expect(w, x, m, activations, bias, ActiveSimd() == Simd::kAvx3Amx);
  ASSERT_EQ(y.size(), expected.value.size());
  for (size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], expected.value[i], expected.bound[i]) << i;
}

TEST_F(Ops, ARowOfTheProductDependsOnNoOtherRow) {
  constexpr int32_t kRows = 52, kCols = 584, kM = 512;
  ForEachTargetAndPair([&](const Pair& pair) {
    const Weights w = MakeWeights(pair.weights, kRows, kCols, 11);
    const std::vector<float> x = RandomFloats(size_t{kM} * kCols, 5);
    const std::vector<float> bias = RandomFloats(kRows, 6);
    const auto whole = Multiply(x, kM, pair.activations, {{&w.matrix, bias.data()}})[0];
    for (const int32_t m : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 33, 100}) {
      const int32_t begin = 5 * m % 400;  // somewhere else for each
      const std::vector<float> part(x.begin() + begin * kCols, x.begin() + (begin + m) * kCols);
      const auto y = Multiply(part, m, pair.activations, {{&w.matrix, bias.data()}})[0];
      ASSERT_EQ(std::memcmp(y.data(), whole.data() + begin * kRows, y.size() * 4), 0) << m << " rows";
    }
  });
}

TEST_F(Ops, ThreadsAndNeighboursInACallChangeNoBit) {
  constexpr int32_t kCols = 352;
  ForEachTargetAndPair([&](const Pair& pair) {
    const Weights q = MakeWeights(pair.weights, 200, kCols, 21), k = MakeWeights(pair.weights, 37, kCols, 22);
    const std::vector<float> bias = RandomFloats(200, 6);
    for (const int32_t m : {1, 9, 70}) {
      const std::vector<float> x = RandomFloats(static_cast<size_t>(m) * kCols, 8);
      const auto alone_q = Multiply(x, m, pair.activations, {{&q.matrix, bias.data()}})[0];
      const auto alone_k = Multiply(x, m, pair.activations, {{&k.matrix}})[0];
      for (const int32_t threads : {1, 2, 3}) {
        ThreadPool pool(threads, threads);
        const auto y = Multiply(x, m, pair.activations, {{&k.matrix}, {&q.matrix, bias.data()}, {&k.matrix}}, &pool);
        ASSERT_EQ(y[0], alone_k) << threads << " threads, m " << m;
        ASSERT_EQ(y[1], alone_q) << threads << " threads, m " << m;
        ASSERT_EQ(y[2], alone_k) << threads << " threads, m " << m;
      }
    }
  });
}

TEST_F(Ops, AGateWhereBothHalvesAreMadeGivesTheBitsOfOneAfterwards) {
  constexpr int32_t kRows = 203, kCols = 96;
  const LinearGate gate = {[](const void*, const float* of_gate, const float* up, int32_t n, float* out) {
                             SiluMul(of_gate, n, up, n, 1, n, out, n, {});
                           },
                           nullptr};
  ForEachTargetAndPair([&](const Pair& pair) {
    const Weights a = MakeWeights(pair.weights, kRows, kCols, 25), b = MakeWeights(pair.weights, kRows, kCols, 26);
    for (const int32_t m : {1, 9, 70}) {
      const std::vector<float> x = RandomFloats(static_cast<size_t>(m) * kCols, 8);
      const auto halves = Multiply(x, m, pair.activations, {{&a.matrix}, {&b.matrix}});
      std::vector<float> expected(halves[0].size());
      SiluMul(halves[0].data(), kRows, halves[1].data(), kRows, m, kRows, expected.data(), kRows, {});
      for (const int32_t threads : {1, 3}) {
        ThreadPool pool(threads, threads);
        ASSERT_EQ(Multiply(x, m, pair.activations, {{&a.matrix}, {&b.matrix}}, &pool, &gate)[0], expected)
            << threads << " threads, m " << m;
      }
    }
  });
}

TEST_F(Ops, RowsOfAFileHaveTheBitsOfPackedOnes) {
  ForEachTargetAndPair([&](const Pair& pair) {
    if (pair.weights != WeightType::kF32 && pair.weights != WeightType::kBf16) return;
    for (const auto& [rows, cols] : {std::pair{1, 1}, {37, 96}, {200, 352}, {130, 101}, {66, 3}}) {
      const Weights w = MakeWeights(pair.weights, rows, cols, 23);
      // Not at a multiple of anything.
      std::vector<uint8_t> file(1);
      for (const float value : w.part) {
        const auto bits = std::bit_cast<uint32_t>(value);
        for (int i = pair.weights == WeightType::kF32 ? 0 : 2; i < 4; ++i) file.push_back(bits >> (8 * i) & 0xff);
      }
      const Matrix of_file = Matrix::OfFile(pair.weights, rows, cols, file.data() + 1);
      std::vector<float> row(static_cast<size_t>(cols));
      of_file.GetRow(rows - 1, row.data());
      EXPECT_TRUE(std::equal(row.begin(), row.end(), w.part.end() - cols));
      const std::vector<float> bias = RandomFloats(static_cast<size_t>(rows), 6);
      for (const int32_t m : {1, 9, 70}) {
        const std::vector<float> x = RandomFloats(static_cast<size_t>(m) * static_cast<size_t>(cols), 8);
        const auto packed = Multiply(x, m, pair.activations, {{&w.matrix, bias.data()}})[0];
        for (const int32_t threads : {1, 3}) {
          ThreadPool pool(threads, threads);
          const auto y = Multiply(x, m, pair.activations, {{&of_file, bias.data()}, {&of_file}}, &pool);
          ASSERT_EQ(y[0], packed) << rows << " x " << cols << ", " << threads << " threads, m " << m;
        }
      }
    }
  });
}

// Sums of integers are exact in every instruction set, and what follows is the same arithmetic wherever it is fused.
TEST_F(Ops, Int8ActivationsGiveTheSameBitsOnEveryTargetWithFusedMultiplyAdd) {
  for (const WeightType type : {WeightType::kInt8, WeightType::kInt4, WeightType::kInt4K}) {
    const Weights w = MakeWeights(type, 35, 320, 31);
    const std::vector<float> x = RandomFloats(10 * 320, 32);
    std::vector<float> first;
    for (const Simd simd : SimdTargets()) {
      if (simd == Simd::kSse4 || simd == Simd::kPortable) continue;
      const std::string target = Name(simd);
      SetSimd(target);
      const auto y = Multiply(x, 10, ActivationType::kInt8, {{&w.matrix}})[0];
      if (first.empty()) first = y;
      EXPECT_EQ(y, first) << WeightTypeName(type) << " on " << target;
    }
  }
}

TEST_F(Ops, StridesOfXAndYAreHonoured) {
  constexpr int32_t kRows = 21, kCols = 40, kM = 8, kXStride = 57, kYStride = 30;
  ForEachTargetAndPair([&](const Pair& pair) {
    const Weights w = MakeWeights(pair.weights, kRows, kCols, 41);
    const std::vector<float> dense = RandomFloats(size_t{kM} * kCols, 42);
    std::vector<float> x(size_t{kM} * kXStride, kNan), y(size_t{kM} * kYStride, 77.0f);
    for (int r = 0; r < kM; ++r) std::copy_n(dense.begin() + r * kCols, kCols, x.begin() + r * kXStride);
    const size_t size = LinearWorkspaceSize(pair.weights, pair.activations, kM, kCols, 1);
    auto* workspace = static_cast<uint8_t*>(std::aligned_alloc(64, (size + 63) / 64 * 64));
    const LinearOutput output = {&w.matrix, nullptr, y.data(), kYStride};
    Linear(x.data(), kXStride, kM, pair.activations, {&output, 1}, workspace, size, {});
    std::free(workspace);
    const auto expected = Multiply(dense, kM, pair.activations, {{&w.matrix}})[0];
    for (int r = 0; r < kM; ++r) {
      for (int c = 0; c < kYStride; ++c) {
        ASSERT_EQ(y[static_cast<size_t>(r * kYStride + c)],
                  c < kRows ? expected[static_cast<size_t>(r * kRows + c)] : 77.0f);
      }
    }
  });
}

TEST_F(Ops, NothingToMultiplyIsNoError) {
  ForEachTargetAndPair([&](const Pair& pair) {
    const Weights some = MakeWeights(pair.weights, 16, 32, 1), none = MakeWeights(pair.weights, 0, 32, 1);
    const std::vector<float> x = RandomFloats(3 * 32, 2);
    EXPECT_TRUE(Multiply({}, 0, pair.activations, {{&some.matrix}})[0].empty());
    const auto y = Multiply(x, 3, pair.activations, {{&none.matrix}, {&some.matrix}});
    EXPECT_TRUE(y[0].empty());
    ASSERT_NO_FATAL_FAILURE(ExpectProduct(some, x, 3, pair.activations, nullptr, y[1]));
  });
}

TEST_F(Ops, ZerosTinyAndHugeActivationsKeepTheirMeaning) {
  ForEachTargetAndPair([&](const Pair& pair) {
    const Weights w = MakeWeights(pair.weights, 16, 64, 51);
    const std::vector<float> zeros(64, 0.0f);
    const auto nothing = Multiply(zeros, 1, pair.activations, {{&w.matrix}});
    for (const float v : nothing[0]) EXPECT_EQ(v, 0.0f);
    for (const float scale : {1e-25f, 1e-6f, 1e6f, 1e25f}) {
      const std::vector<float> x = RandomFloats(64, 52, scale);
      const auto y = Multiply(x, 1, pair.activations, {{&w.matrix}});
      ASSERT_NO_FATAL_FAILURE(ExpectProduct(w, x, 1, pair.activations, nullptr, y[0])) << scale;
    }
  });
}

TEST_F(Ops, NanAndInfinityStayInTheirRow) {
  ForEachTargetAndPair([&](const Pair& pair) {
    const Weights w = MakeWeights(pair.weights, 20, 96, 61);
    std::vector<float> x = RandomFloats(7 * 96, 62);
    const auto clean = Multiply(x, 7, pair.activations, {{&w.matrix}})[0];
    x[96 + 40] = kNan;
    x[3 * 96 + 95] = kInfinity;
    x[4 * 96] = -kInfinity;
    const auto y = Multiply(x, 7, pair.activations, {{&w.matrix}})[0];
    for (size_t r = 0; r < 7; ++r) {
      for (size_t n = 0; n < 20; ++n) {
        if (r == 1) {
          EXPECT_TRUE(std::isnan(y[r * 20 + n]));
        } else if (r == 3 || r == 4) {
          EXPECT_FALSE(std::isfinite(y[r * 20 + n]));
        } else {
          EXPECT_EQ(y[r * 20 + n], clean[r * 20 + n]);
        }
      }
    }
  });
}

TEST_F(Ops, RowsComeBackAsTheyWereSet) {
  for (const int32_t cols : {1, 31, 32, 50, 128, 260, 768}) {
    for (const int32_t rows : {1, 16, 19}) {
      for (int i = 0; i < kNumWeightTypes; ++i) {
        const auto type = static_cast<WeightType>(i);
        const Weights w = MakeWeights(type, rows, cols, 71);
        std::vector<float> row(static_cast<size_t>(cols));
        for (int32_t r = 0; r < rows; ++r) {
          w.matrix.GetRow(r, row.data());
          for (int32_t c = 0; c < cols; ++c) {
            const size_t at = static_cast<size_t>(r * cols + c);
            ASSERT_FLOAT_EQ(row[static_cast<size_t>(c)], w.part[at] + w.minimum[at])
                << WeightTypeName(type) << " row " << r << " column " << c;
          }
        }
      }
    }
  }
}

TEST_F(Ops, F32RowsAreExactAndBf16RowsRounded) {
  const std::vector<float> values = RandomFloats(45, 81);
  std::vector<float> row(45);
  Matrix f32(WeightType::kF32, 3, 45), bf16(WeightType::kBf16, 3, 45);
  f32.SetRow(2, values.data());
  f32.GetRow(2, row.data());
  EXPECT_EQ(row, values);
  bf16.SetRow(2, values.data());
  bf16.GetRow(2, row.data());
  for (size_t i = 0; i < 45; ++i) EXPECT_EQ(row[i], RoundTo(PHSA_BF16, values[i]));
  f32.GetRow(1, row.data());
  for (const float v : row) EXPECT_EQ(v, 0.0f);
}

TEST_F(Ops, Int8QuantisationIsOffByHalfAStepAtMost) {
  for (const float size : {1e-20f, 1e-6f, 1.0f, 1e6f, 1e20f}) {
    std::vector<float> values = RandomFloats(100, 91, size);
    for (size_t i = 32; i < 64; ++i) values[i] *= 1e-3f;
    Matrix matrix(WeightType::kInt8, 1, 100);
    matrix.SetRow(0, values.data());
    std::vector<float> row(100);
    matrix.GetRow(0, row.data());
    for (size_t begin = 0; begin < 100; begin += 32) {
      const size_t end = std::min<size_t>(begin + 32, 100);
      float largest = 0;
      for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(values[i]));
      // The scale is rounded to 11 bits: the largest value may lie a little outside of 127 steps.
      const float step = largest / 127.0f;
      for (size_t i = begin; i < end; ++i) EXPECT_NEAR(row[i], values[i], 0.57f * step) << size << " at " << i;
    }
  }
}

TEST_F(Ops, Int8RowsOutsideOfAMatrixAreThoseInIt) {
  for (const int32_t cols : {7, 32, 100, 576}) {
    for (const float size : {0.0f, 1e-20f, 1.0f, 1e20f}) {
      std::vector<float> values = RandomFloats(static_cast<size_t>(cols), 92, size), row(values.size());
      values[1] = kNan;
      values[2] = -kInfinity;
      std::vector<int8_t> codes(values.size());
      std::vector<uint16_t> scales((values.size() + 31) / 32);
      Matrix matrix(WeightType::kInt8, 1, cols);
      const auto expect_same = [&](float factor) {
        matrix.GetRow(0, row.data());
        int exponent = 0;
        EXPECT_EQ(std::frexp(factor, &exponent), 0.5f) << "no power of two";
        for (size_t i = 0; i < values.size(); ++i) {
          ASSERT_EQ(F32FromF16(scales[i / 32]) * codes[i] * factor, row[i]) << cols << ' ' << size << " at " << i;
        }
      };
      const float factor = QuantizeInt8(values.data(), cols, codes.data(), scales.data());
      matrix.SetRow(0, values.data());
      expect_same(factor);
      EXPECT_EQ(row[1], 0.0f);
      EXPECT_EQ(row[2], 0.0f);
      // A row whose codes are known.
      std::vector<float> known = RandomFloats(scales.size(), 93, size);
      for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<int8_t>(i * 37);
      matrix.SetRowInt8(0, codes.data(), known.data());
      expect_same(RoundInt8Scales(known.data(), static_cast<int32_t>(known.size()), scales.data()));
    }
  }
}

TEST_F(Ops, ScalesOutsideTheRangeOfF16AreKept) {
  for (const float size : {1e-30f, 1e-8f, 1e8f, 1e25f}) {
    const std::vector<float> scales = {size, size / 64}, mins = {-3 * size, size};
    std::vector<uint8_t> codes(64);
    for (size_t i = 0; i < 64; ++i) codes[i] = static_cast<uint8_t>(i % 16);
    Matrix matrix(WeightType::kInt4, 1, 64);
    matrix.SetRowCodes(0, codes.data(), scales.data(), mins.data());
    std::vector<float> row(64);
    matrix.GetRow(0, row.data());
    for (size_t i = 0; i < 64; ++i) {
      const double expected = codes[i] * static_cast<double>(scales[i / 32]) + mins[i / 32];
      EXPECT_NEAR(row[i] / size, expected / size, 16 * 0x1p-11) << size << " at " << i;
    }
  }
}

TEST_F(Ops, AMatrixTooLargeForTheMachineIsRefused) {
  try {
    Matrix matrix(WeightType::kF32, 2000000000, 2000000000);
    FAIL() << "16 exabytes were found";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), PHSA_OUT_OF_MEMORY);
  }
}

// ---- Layers ------------------------------------------------------------------------------------------------------

constexpr int32_t kDims[] = {1, 7, 16, 33, 64, 576, 1000};

TEST_F(Ops, ANormAfterAnAdditionHasTheBitsOfBothApart) {
  constexpr int32_t kM = 5;
  constexpr float kEps = 1e-5f;
  ForEachTarget([&] {
    for (const int32_t dim : kDims) {
      const size_t n = static_cast<size_t>(kM) * static_cast<size_t>(dim);
      const std::vector<float> x = RandomFloats(n, 101, 3), y = RandomFloats(n, 102);
      const std::vector<float> weight = RandomFloats(static_cast<size_t>(dim), 103);
      std::vector<float> sum = x, added = x, normed(n), out(n);
      AddRmsNorm(sum.data(), dim, y.data(), dim, kM, dim, weight.data(), kEps, normed.data(), dim, {});
      AddRows(added.data(), dim, y.data(), dim, kM, dim, {});
      EXPECT_EQ(added, sum);
      RmsNorm(sum.data(), dim, kM, dim, weight.data(), kEps, out.data(), dim, {});
      EXPECT_EQ(normed, out);
    }
  });
}

TEST_F(Ops, SiluMulOfWhatIsNoNumberIsItsLimit) {
  ForEachTarget([&] {
    const float special[] = {kInfinity, -kInfinity, kNan, 0.0f, -0.0f}, ones[] = {1, 1, 1, 1, 1};
    float out[5];
    SiluMul(special, 5, ones, 5, 1, 5, out, 5, {});
    EXPECT_EQ(out[0], kInfinity);
    EXPECT_TRUE(std::isnan(out[2]));
    EXPECT_EQ(out[3], 0.0f);
    EXPECT_EQ(out[4], 0.0f);
  });
}

TEST_F(Ops, MixedHeadsKeepTheirProductsAndNoChannelStandsOut) {
  const int32_t position = 40;
  ForEachTarget([&] {
    for (const int32_t dim : {8, 64, 80, 96, 128, 256}) {
      const int32_t half = dim / 2, block = dim & -dim;
      std::vector<double> frequencies(static_cast<size_t>(half), 0.01);
      std::vector<float> table(static_cast<size_t>(dim));
      RopeTable(&position, 1, frequencies.data(), half, 1, table.data(), {});
      std::vector<float> x = RandomFloats(static_cast<size_t>(2 * dim), 123);
      x[3] = 100;  // of a key
      std::vector<float> plain(x.size()), mixed(x.size());
      RopeParams p;
      p.x = x.data();
      p.x_stride = 2 * dim;
      p.m = 1, p.heads = 2, p.head_dim = dim;
      p.cos_sin = table.data();
      p.out_head_stride = dim;
      p.out = plain.data();
      Rope(p, {});
      p.mix = true;
      p.out = mixed.data();
      Rope(p, {});
      double expected = 0, got = 0;
      for (int32_t i = 0; i < dim; ++i) {
        const auto at = static_cast<size_t>(i), other = static_cast<size_t>(dim + i);
        expected += double{plain[at]} * plain[other];
        got += double{mixed[at]} * mixed[other];
        EXPECT_LT(std::fabs(mixed[at]), 150 / std::sqrt(block) + 5) << "dim " << dim << " channel " << i;
      }
      EXPECT_NEAR(got, expected, 1e-3) << "dim " << dim;
    }
  });
}

TEST_F(Ops, StoredRowsAreRoundedAsScalarsAreAndComeBack) {
  std::vector<float> values = RandomFloats(2 * 1000, 131);
  const float special[] = {0.0f,    -0.0f,     65504.0f,   65520.0f, 1e-7f, -1e-8f,
                           6.1e-5f, kInfinity, -kInfinity, 1e38f,    3e-41f};
  std::copy(std::begin(special), std::end(special), values.begin() + 5);
  values[30] = kNan;
  ForEachTarget([&] {
    for (const int32_t dtype : {PHSA_F32, PHSA_F16, PHSA_BF16}) {
      for (const int32_t dim : kDims) {
        const int64_t rows[2] = {dim + 3, 0};
        std::vector<uint8_t> stored(static_cast<size_t>(2 * dim + 3) * DtypeSize(dtype));
        StoreRows(values.data(), 1000, 2, dim, dtype, stored.data(), rows, 0, {});
        std::vector<float> back(static_cast<size_t>(2 * dim));
        LoadRows(dtype, stored.data(), dim + 3, 2, dim, back.data(), dim, {});
        for (int32_t r = 0; r < 2; ++r) {
          for (int32_t i = 0; i < dim; ++i) {
            const float expected = RoundTo(dtype, values[static_cast<size_t>((1 - r) * 1000 + i)]);
            const float got = back[static_cast<size_t>(r * dim + i)];
            if (std::isnan(expected)) {
              EXPECT_TRUE(std::isnan(got));
            } else {
              ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(expected))
                  << DtypeName(dtype) << " " << i;
            }
          }
        }
      }
    }
  });
}

TEST_F(Ops, StoredCodesAreTheNearestAndSpecialRowsKeepTheirMeaning) {
  constexpr int32_t kRows = 7, kStride = 300;
  std::vector<float> values = RandomFloats(kRows * kStride, 132);
  for (int32_t i = 0; i < kStride; ++i) {
    values[static_cast<size_t>(kStride + i)] *= 1e30f;
    values[static_cast<size_t>(2 * kStride + i)] *= 1e-28f;
    values[static_cast<size_t>(3 * kStride + i)] = 0;
    values[static_cast<size_t>(4 * kStride + i)] *= 1e-38f;
  }
  values[5 * kStride + 3] = kNan;
  values[6 * kStride + 15] = -kInfinity;
  const int64_t code_rows[kRows] = {512, 0, 1024, 768, 256, 1536, 1280}, scale_rows[kRows] = {6, 4, 2, 0, 1, 3, 5};
  ThreadPool threads(3, 3);
  ForEachTarget([&] {
    for (const int32_t dim : {64, 80, 96, 128, 256}) {
      std::vector<int8_t> codes(7 * 256, 99);
      std::vector<uint16_t> scales(kRows, 0x1234);
      StoreCodes(values.data(), kStride, kRows, dim, codes.data(), code_rows, scales.data(), scale_rows,
                 threads.executor());
      for (int32_t r = 0; r < kRows; ++r) {
        const float* const row = values.data() + r * kStride;
        float largest = 0;
        for (int32_t i = 0; i < dim; ++i) {
          largest = std::isnan(row[i]) ? kInfinity : std::max(largest, std::fabs(row[i]));
          if (std::isinf(largest)) break;
        }
        const uint16_t scale = scales[static_cast<size_t>(scale_rows[r])];
        ASSERT_EQ(scale, CodeScale(largest)) << "row " << r;
        const int8_t* const own = codes.data() + code_rows[r];
        for (int32_t i = 0; i < dim; ++i) {
          const float back = FromCode(own[i], scale, PHSA_F32);
          if (std::isinf(largest)) {
            ASSERT_TRUE(std::isnan(back));
          } else if (scale == 0) {
            ASSERT_EQ(back, 0);
          } else {
            ASSERT_NEAR(back, row[i], 0.5001 * F32FromBf16(scale)) << "row " << r << " element " << i;
          }
        }
        for (int32_t i = dim; i < 256; ++i) ASSERT_EQ(own[i], 99);
      }
    }
  });
}

TEST_F(Ops, LayersGiveTheSameBitsForEveryThreadCount) {
  constexpr int32_t kM = 150, kDim = 1024;
  const std::vector<float> x = RandomFloats(size_t{kM} * kDim, 141), y = RandomFloats(size_t{kM} * kDim, 142);
  const std::vector<float> weight = RandomFloats(kDim, 143);
  const auto run = [&](const phsa_executor& executor) {
    std::vector<float> sum = x, normed(x.size()), gated(x.size()), turned(x.size()), table(size_t{kM} * 64);
    std::vector<int32_t> positions(kM);
    for (int32_t i = 0; i < kM; ++i) positions[static_cast<size_t>(i)] = i * 7;
    std::vector<double> frequencies(32, 0.1);
    AddRmsNorm(sum.data(), kDim, y.data(), kDim, kM, kDim, weight.data(), 1e-5f, normed.data(), kDim, executor);
    SiluMul(x.data(), kDim, y.data(), kDim, kM, kDim, gated.data(), kDim, executor);
    RopeTable(positions.data(), kM, frequencies.data(), 32, 1, table.data(), executor);
    RopeParams p;
    p.x = x.data();
    p.x_stride = kDim;
    p.m = kM, p.heads = 16, p.head_dim = 64;
    p.cos_sin = table.data();
    p.out = turned.data();
    p.out_row_stride = kDim;
    p.out_head_stride = 64;
    Rope(p, executor);
    std::vector<float> all = sum;
    for (const auto* part : {&normed, &gated, &turned}) all.insert(all.end(), part->begin(), part->end());
    return all;
  };
  ForEachTarget([&] {
    const std::vector<float> alone = run({});
    for (const int32_t threads : {2, 3}) {
      ThreadPool pool(threads, threads);
      ASSERT_EQ(run(pool.executor()), alone) << threads;
    }
  });
}

TEST_F(Ops, LogSumExpHoldsForLargeLogitsAndSumsAll) {
  std::vector<float> x(5000, 1000.0f);
  EXPECT_NEAR(LogSumExp(x.data(), 5000), 1000 + std::log(5000.0), 1e-9);
  x = RandomFloats(5000, 151, 5);
  double sum = 0;
  for (const float v : x) sum += std::exp(static_cast<double>(v));
  EXPECT_NEAR(LogSumExp(x.data(), 5000), std::log(sum), 1e-10);
  EXPECT_EQ(LogSumExp(x.data(), 0), -HUGE_VAL);
  x.assign(3, -kInfinity);
  EXPECT_EQ(LogSumExp(x.data(), 3), -HUGE_VAL);
}

TEST_F(Ops, AnUnknownTargetIsRefusedByName) {
  try {
    SetSimd("mmx");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), "set_target: no target \"mmx\" on this machine; allowed: " + SimdNames());
  }
}

}  // namespace
}  // namespace phsa
