#include "base/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace phsa {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The value of the 16-bit pattern of a format with that many mantissa bits, from the definition of IEEE 754.
double Value(uint16_t bits, int mantissa_bits, int bias) {
  const int exponent_bits = 15 - mantissa_bits;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  }
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias));
}

struct Format {
  int mantissa_bits, bias;
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);
};
constexpr Format kFormats[] = {{10, 15, F32FromF16, F16FromF32}, {7, 127, F32FromBf16, Bf16FromF32}};

TEST(Dtype, ARowsScaleIsTheLeastThatKeepsItsCodesInRange) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> exponent(-90, 120), mantissa(1, 2);
  for (int i = 0; i < 100000; ++i) {
    const float largest = std::ldexp(mantissa(random), static_cast<int>(exponent(random)));
    const uint16_t scale = CodeScale(largest);
    EXPECT_LE(std::nearbyint(largest / F32FromBf16(scale)), 127) << largest;
    EXPECT_GT(double{largest}, 127 * double{F32FromBf16(static_cast<uint16_t>(scale - 1))}) << largest;
  }
  EXPECT_EQ(CodeScale(0), 0);
  EXPECT_EQ(CodeScale(0x1p-101f), 0);
  for (const float none : {kInf, std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_TRUE(std::isnan(FromCode(0, CodeScale(none), PHSA_BF16)));
  }
}

TEST(Dtype, EveryPatternWidensToTheValueItStandsForAndComesBack) {
  for (const Format& format : kFormats) {
    for (int bits = 0; bits < 0x10000; ++bits) {
      const auto pattern = static_cast<uint16_t>(bits);
      const float wide = format.widen(pattern);
      const double expected = Value(pattern, format.mantissa_bits, format.bias);
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(wide)) << bits;
        EXPECT_TRUE(std::isnan(format.widen(format.narrow(wide)))) << bits;
      } else {
        EXPECT_EQ(wide, expected) << bits;
        EXPECT_EQ(format.narrow(wide), pattern) << bits;
      }
    }
  }
}

TEST(Dtype, NumbersBetweenTwoPatternsGoToTheNearestAndTiesToTheEvenOne) {
  for (const Format& format : kFormats) {
    const uint16_t infinity = format.narrow(kInf);
    // Every gap between neighbours, denormals and the one before infinity included.
    for (uint16_t low = 0; low + 1 < infinity; ++low) {
      const auto high = static_cast<uint16_t>(low + 1);
      const double a = format.widen(low), b = format.widen(high);
      const auto middle = static_cast<float>((a + b) / 2);
      ASSERT_EQ(middle, (a + b) / 2) << "the middle is exact in f32";
      EXPECT_EQ(format.narrow(middle), low % 2 == 0 ? low : high);
      EXPECT_EQ(format.narrow(std::nextafter(middle, 0.0f)), low);
      EXPECT_EQ(format.narrow(std::nextafter(middle, kInf)), high);
      EXPECT_EQ(format.narrow(-middle), (low % 2 == 0 ? low : high) | 0x8000);
    }
  }
}

TEST(Dtype, WhatIsTooLargeBecomesInfinityAndWhatIsTooSmallBecomesZero) {
  EXPECT_EQ(F16FromF32(65519.996f), 0x7bff);  // 65504, the largest
  EXPECT_EQ(F16FromF32(65520.0f), 0x7c00);
  EXPECT_EQ(F16FromF32(-1e30f), 0xfc00);
  EXPECT_EQ(Bf16FromF32(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(F16FromF32(0x1p-25f), 0x0000);  // half of the smallest: a tie, to even
  EXPECT_EQ(F16FromF32(0x1.000002p-25f), 0x0001);
  EXPECT_EQ(F16FromF32(-0.0f), 0x8000);
  EXPECT_EQ(Bf16FromF32(-0.0f), 0x8000);
}

TEST(Dtype, ANanStaysANanWhateverItsPayload) {
  for (const uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7fc00000u}) {
    const float nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(F32FromF16(F16FromF32(nan)))) << bits;
    EXPECT_TRUE(std::isnan(F32FromBf16(Bf16FromF32(nan)))) << bits;
  }
}

TEST(Dtype, RoundingIsNeverFurtherOffThanEpsilonSays) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(1.0f, 2.0f);
  for (int n = 0; n < 10000; ++n) {
    const float x = uniform(random);
    for (const int32_t dtype : {PHSA_F32, PHSA_F16, PHSA_BF16}) {
      EXPECT_LE(std::fabs(RoundTo(dtype, x) - x), DtypeEpsilon(dtype) * x);
    }
  }
}

TEST(Dtype, AnElementStoredIsLoadedBack) {
  for (const int32_t dtype : {PHSA_F32, PHSA_F16, PHSA_BF16}) {
    std::vector<unsigned char> memory(4 * DtypeSize(dtype), 0xee);
    StoreElement(dtype, memory.data(), 2, -1.5f);
    EXPECT_EQ(LoadElement(dtype, memory.data(), 2), -1.5f) << DtypeName(dtype);
    for (size_t i = 0; i < 2 * DtypeSize(dtype); ++i) EXPECT_EQ(memory[i], 0xee);
    for (size_t i = 3 * DtypeSize(dtype); i < memory.size(); ++i) EXPECT_EQ(memory[i], 0xee);
  }
}

}  // namespace
}  // namespace phsa
