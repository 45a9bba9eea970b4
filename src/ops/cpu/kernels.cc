// Highway compiles this file once per SIMD target; see kernels.h for what each function promises. All products here run
// in f32: weights of other types are widened, a block of a panel at a time, into scratch memory that stays in the
// nearest cache. Integer codes are exact in f32, and so are their sums within a group: products with int8 activations
// give the same bits here and with integer instructions.
#include "ops/cpu/kernels.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "base/dtype.h"
#include "base/simd_highway.h"
#include "ops/layers.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/kernels.cc"
// GCC 12 takes the undefined vectors inside its own AVX-512 intrinsics for uninitialised variables.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace phsa::ops {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;
using U = hn::RebindToUnsigned<F>;
using I = hn::RebindToSigned<F>;
inline constexpr int kLanes = HWY_LANES(float);
inline constexpr int kVectorsPerPanel = kPanelRows / kLanes;

// ---- Conversion of elements --------------------------------------------------------------------------------------

// f16 in hardware; Highway's emulation does not round as base/dtype.h does.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_NEON
inline constexpr bool kHasF16 = true;
#else
inline constexpr bool kHasF16 = false;
#endif

HWY_INLINE V LoadF16(F d, const uint16_t* p) {
  if constexpr (kHasF16) {
    const hn::Rebind<hwy::float16_t, F> d16;
    return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
  } else {
    HWY_ALIGN float wide[kLanes];
    for (int i = 0; i < kLanes; ++i) wide[i] = F32FromF16(p[i]);
    return hn::Load(d, wide);
  }
}

HWY_INLINE V LoadBf16(F d, const uint16_t* p) {
  const hn::Rebind<uint16_t, F> d16;
  const U d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, p))));
}

HWY_INLINE void StoreF16(V v, F d, uint16_t* p) {
  if constexpr (kHasF16) {
    const hn::Rebind<hwy::float16_t, F> d16;
    hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
  } else {
    HWY_ALIGN float wide[kLanes];
    hn::Store(v, d, wide);
    for (int i = 0; i < kLanes; ++i) p[i] = F16FromF32(wide[i]);
  }
}

// The bits of v rounded to bf16, to nearest even as Bf16FromF32 does, in the upper halves of the lanes.
HWY_INLINE hn::Vec<U> RoundToBf16(F d, V v) {
  const U d32;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffu)));
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x00400000u));
  const auto is_nan = hn::MaskFromVec(hn::BitCast(d32, hn::VecFromMask(d, hn::Ne(v, v))));
  return hn::And(hn::IfThenElse(is_nan, quiet, rounded), hn::Set(d32, 0xffff0000u));
}

HWY_INLINE void StoreBf16(V v, F d, uint16_t* p) {
  const hn::Rebind<uint16_t, F> d16;
  const I di;
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, hn::ShiftRight<16>(RoundToBf16(d, v)))), d16, p);
}

void ToF32(const void* x, int32_t dtype, int32_t n, float* out) {
  if (dtype == PHSA_F32) {
    std::memmove(out, x, static_cast<size_t>(n) * 4);
    return;
  }
  const F d;
  const auto* p = static_cast<const uint16_t*>(x);
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    hn::StoreU(dtype == PHSA_F16 ? LoadF16(d, p + i) : LoadBf16(d, p + i), d, out + i);
  for (; i < n; ++i) out[i] = LoadElement(dtype, x, i);
}

void FromF32(const float* x, int32_t dtype, int32_t n, void* out) {
  if (dtype == PHSA_F32) {
    std::memmove(out, x, static_cast<size_t>(n) * 4);
    return;
  }
  const F d;
  auto* p = static_cast<uint16_t*>(out);
  int32_t i = 0;
  if (dtype == PHSA_F16) {
    for (; i + kLanes <= n; i += kLanes) StoreF16(hn::LoadU(d, x + i), d, p + i);
  } else {
    for (; i + kLanes <= n; i += kLanes) StoreBf16(hn::LoadU(d, x + i), d, p + i);
  }
  for (; i < n; ++i) StoreElement(dtype, out, i, x[i]);
}

// ---- Rows of a layer ---------------------------------------------------------------------------------------------

// Sixteen sums, of every sixteenth element, then a tree: the same order for every vector length.
float SumOfSquares(const float* x, int32_t n) {
  const F d;
  V sums[kVectorsPerPanel];
  HWY_UNROLL(16)
  for (int v = 0; v < kVectorsPerPanel; ++v) sums[v] = hn::Zero(d);
  int32_t i = 0;
  for (; i + 16 <= n; i += 16) {
    HWY_UNROLL(16)
    for (int v = 0; v < kVectorsPerPanel; ++v) {
      const V e = hn::LoadU(d, x + i + v * kLanes);
      sums[v] = hn::MulAdd(e, e, sums[v]);
    }
  }
  HWY_ALIGN float lane[16];
  HWY_UNROLL(16)
  for (int v = 0; v < kVectorsPerPanel; ++v) hn::Store(sums[v], d, lane + v * kLanes);
  for (int j = 0; i < n; ++i, ++j) lane[j] += x[i] * x[i];
  for (int half = 8; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  return lane[0];
}

void ScaleBy(const float* x, float factor, const float* weight, int32_t n, float* out) {
  const F d;
  const V f = hn::Set(d, factor);
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, x + i), f), hn::LoadU(d, weight + i)), d, out + i);
  }
  for (; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

void Add(float* x, const float* y, int32_t n) {
  const F d;
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(hn::Add(hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, x + i);
  for (; i < n; ++i) x[i] += y[i];
}

// e^x for x <= 0, relative error 1e-7; 0 below -87. x = (n + f) · ln 2, ln 2 in two parts so that f keeps its bits.
HWY_INLINE V ExpOfNegative(F d, V x) {
  const V lowest = hn::Set(d, -87.0f);
  const auto keep = hn::Not(hn::Lt(x, lowest));  // NaN is kept
  const V n = hn::Round(hn::Mul(hn::Max(x, lowest), hn::Set(d, 1.44269504f)));
  V f = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
  f = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), f);
  V p = hn::Set(d, 1.9875691500e-4f);
  p = hn::MulAdd(p, f, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.0000001201e-1f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(f, f), f), hn::Set(d, 1.0f));
  const I di;
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  return hn::IfThenElseZero(keep, hn::Mul(p, hn::BitCast(d, exponent)));
}

// s = 1 / (1 + e^-g), through e^-|g| <= 1, which cannot overflow: for g < 0, s = e^-|g| / (1 + e^-|g|).
HWY_INLINE V Sigmoid(F d, V g) {
  const V one = hn::Set(d, 1.0f);
  const V e = ExpOfNegative(d, hn::Neg(hn::Abs(g)));
  const V numerator = hn::IfThenElse(hn::Lt(g, hn::Zero(d)), e, one);
  return hn::Div(numerator, hn::Add(one, e));
}

// out = vector(gate, up).
template <class Vector>
HWY_INLINE void Gate(const float* gate, const float* up, int32_t n, float* out, const Vector& vector) {
  const F d;
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(vector(hn::LoadU(d, gate + i), hn::LoadU(d, up + i)), d, out + i);
  }
  if (i < n) {
    HWY_ALIGN float g[kLanes] = {}, u[kLanes] = {};
    const size_t rest = static_cast<size_t>(n - i) * 4;
    std::memcpy(g, gate + i, rest);
    std::memcpy(u, up + i, rest);
    hn::Store(vector(hn::Load(d, g), hn::Load(d, u)), d, g);
    std::memcpy(out + i, g, rest);
  }
}

// out = gate · sigmoid(argument(gate)) · up.
template <class Argument>
HWY_INLINE void GateMul(const float* gate, const float* up, int32_t n, float* out, const Argument& argument) {
  const F d;
  Gate(gate, up, n, out, [&](V g, V u) HWY_ATTR { return hn::Mul(hn::Mul(g, Sigmoid(d, argument(g))), u); });
}

// silu(g) = g · sigmoid(g).
void SiluMul(const float* gate, const float* up, int32_t n, float* out) {
  GateMul(gate, up, n, out, [](V g) HWY_ATTR { return g; });
}

// GELU by tanh: g/2 · (1 + tanh(u)) with u = √(2/π) · (g + 0.044715 · g³), which is g · sigmoid(2u).
void GeluMul(const float* gate, const float* up, int32_t n, float* out) {
  GateMul(gate, up, n, out, [](V g) HWY_ATTR {
    const F d;
    const V cubic = hn::Mul(hn::Mul(hn::Set(d, 0.044715f), hn::Mul(g, g)), g);
    return hn::Mul(hn::Set(d, 1.5957691216057308f), hn::Add(g, cubic));
  });
}

void ClampedSwiglu(const float* gate, const float* up, int32_t n, float alpha, float limit, float* out) {
  Gate(gate, up, n, out, [=](V g, V u) HWY_ATTR {
    const F d;
    const V most = hn::Set(d, limit);
    g = hn::Min(g, most);
    u = hn::Max(hn::Min(u, most), hn::Neg(most));
    return hn::Mul(hn::Mul(g, Sigmoid(d, hn::Mul(hn::Set(d, alpha), g))), hn::Add(u, hn::Set(d, 1.0f)));
  });
}

void Rotate(const float* x, const float* cos, const float* sin, int32_t half, float* out) {
  const F d;
  int32_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const V a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + half + i);
    const V c = hn::LoadU(d, cos + i), s = hn::LoadU(d, sin + i);
    hn::StoreU(hn::Sub(hn::Mul(a, c), hn::Mul(b, s)), d, out + i);
    hn::StoreU(hn::Add(hn::Mul(b, c), hn::Mul(a, s)), d, out + half + i);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    out[i] = a * cos[i] - b * sin[i];
    out[half + i] = b * cos[i] + a * sin[i];
  }
}

// ---- Products ----------------------------------------------------------------------------------------------------

// A group of x: the columns as f32, what the group's sums are scaled by, and the sum of its x.
struct XGroup {
  float x[kWeightGroup];
  float scale;
  float sum;
};

// A block of one panel: codes as f32 [column][16], then the scales and minima of its groups.
inline constexpr int kBlockGroups = 6;
struct PanelBlock {
  float codes[kBlockGroups * kWeightGroup][kPanelRows];
  float scale[kBlockGroups][kPanelRows];
  float minimum[kBlockGroups][kPanelRows];
};

HWY_INLINE float SumLanes(F d, V v) { return hn::GetLane(hn::SumOfLanes(d, v)); }

// The largest magnitude of a group decides the scale. A group with infinity or NaN has scale NaN and zeros for codes;
// one below 2^-100 is zero, so that the inverse stays finite.
struct Quantiser {
  float scale, inverse;
};
HWY_INLINE Quantiser QuantiserOf(const float* x) {
  const F d;
  const U du;
  // As integers the magnitudes of floats compare the same, with infinity and NaN on top.
  const auto magnitude = hn::Set(du, 0x7fffffffu);
  auto largest = hn::Zero(du);
  HWY_UNROLL(8)
  for (int i = 0; i < kWeightGroup; i += kLanes) {
    largest = hn::Max(largest, hn::And(hn::BitCast(du, hn::LoadU(d, x + i)), magnitude));
  }
  const uint32_t bits = hn::GetLane(hn::MaxOfLanes(du, largest));
  if (bits >= 0x7f800000u) return {NAN, 0};
  const float amax = std::bit_cast<float>(bits);
  if (amax <= 0x1p-100f) return {0, 0};
  return {amax / 127.0f, 127.0f / amax};
}

// To nearest, ties to even. Where the inverse is zero so are the codes, also those of infinity and NaN.
HWY_INLINE V Quantise(F d, const Quantiser& q, const float* x) {
  if (q.inverse == 0) return hn::Zero(d);
  return hn::Round(hn::Mul(hn::LoadU(d, x), hn::Set(d, q.inverse)));
}

// All stages are alike: sums of neighbours go to the first half, their differences to the second.
void Mix(float* x, int32_t n) {
  HWY_ALIGN float other[kMaxHeadDim];
  const int32_t block = n & -n, half = block / 2;
  const float scale = 1 / std::sqrt(static_cast<float>(block));
  for (int32_t at = 0; at < n; at += block) {
    float *from = x + at, *to = other;
    for (int32_t done = 1; done < block; done *= 2) {
      int32_t i = 0;
#if HWY_TARGET != HWY_SCALAR
      const hn::CappedTag<float, 8> d;
      constexpr int32_t kStep = HWY_MIN(8, kLanes);
      for (; i + kStep <= half; i += kStep) {
        const auto low = hn::LoadU(d, from + 2 * i), high = hn::LoadU(d, from + 2 * i + kStep);
        const auto even = hn::ConcatEven(d, high, low), odd = hn::ConcatOdd(d, high, low);
        hn::StoreU(hn::Add(even, odd), d, to + i);
        hn::StoreU(hn::Sub(even, odd), d, to + half + i);
      }
#endif
      for (; i < half; ++i) {
        const float even = from[2 * i], odd = from[2 * i + 1];
        to[i] = even + odd;
        to[half + i] = even - odd;
      }
      std::swap(from, to);
    }
    for (int32_t i = 0; i < block; ++i) x[at + i] = from[i] * scale;
  }
}

// n is a multiple of 16.
uint16_t ToCodes(const float* x, int32_t n, int8_t* codes) {
  const F d;
  const U du;
  const hn::Rebind<int8_t, F> d8;
  const auto magnitude = hn::Set(du, 0x7fffffffu);
  auto largest = hn::Zero(du);
  for (int32_t i = 0; i < n; i += kLanes) {
    largest = hn::Max(largest, hn::And(hn::BitCast(du, hn::LoadU(d, x + i)), magnitude));
  }
  const uint16_t scale = CodeScale(std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(du, largest))));
  if (scale == 0 || scale == CodeScale(NAN)) {
    std::memset(codes, 0, static_cast<size_t>(n));
    return scale;
  }
  const V inverse = hn::Set(d, 1 / F32FromBf16(scale));
  for (int32_t i = 0; i < n; i += kLanes) {
    const auto code = hn::NearestInt(hn::Mul(hn::LoadU(d, x + i), inverse));
    hn::StoreU(hn::DemoteTo(d8, code), d8, codes + i);
  }
  return scale;
}

template <ActivationType kActivations>
HWY_INLINE void ConvertGroup(const float* x, XGroup* out) {
  const F d;
  V total = hn::Zero(d);
  if constexpr (kActivations == ActivationType::kInt8) {
    const Quantiser q = QuantiserOf(x);
    for (int i = 0; i < kWeightGroup; i += kLanes) {
      const V code = Quantise(d, q, x + i);
      total = hn::Add(total, code);
      hn::StoreU(code, d, out->x + i);
    }
    out->scale = q.scale;
    out->sum = q.scale * SumLanes(d, total);
  } else {
    for (int i = 0; i < kWeightGroup; i += kLanes) {
      V e = hn::LoadU(d, x + i);
      if constexpr (kActivations == ActivationType::kBf16) e = hn::BitCast(d, RoundToBf16(d, e));
      total = hn::Add(total, e);
      hn::StoreU(e, d, out->x + i);
    }
    out->scale = 1;
    out->sum = SumLanes(d, total);
  }
}

// Columns of each 8 in the order in which the halves of an int4 word hold them (kernels.h).
HWY_INLINE void OrderForInt4(int8_t* codes) {
#if HWY_TARGET == HWY_SCALAR
  for (int8_t* c = codes; c < codes + kWeightGroup; c += 8) {
    const int8_t ordered[8] = {c[0], c[4], c[1], c[5], c[2], c[6], c[3], c[7]};
    std::memcpy(c, ordered, 8);
  }
#else
  alignas(16) static constexpr int8_t kOrder[16] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
  const hn::Full128<int8_t> d;
  const auto order = hn::Load(d, kOrder);
  for (int i = 0; i < kWeightGroup; i += 16) {
    hn::StoreU(hn::TableLookupBytes(hn::LoadU(d, codes + i), order), d, codes + i);
  }
#endif
}

template <bool kInt4>
HWY_INLINE void ConvertGroup(const float* x, Int8Group* out) {
  const F d;
  const I di;
  const hn::Rebind<int8_t, F> d8;
  const Quantiser q = QuantiserOf(x);
  V total = hn::Zero(d);
  HWY_UNROLL(8)
  for (int i = 0; i < kWeightGroup; i += kLanes) {
    const V code = Quantise(d, q, x + i);
    total = hn::Add(total, code);
    hn::StoreU(hn::DemoteTo(d8, hn::ConvertTo(di, code)), d8, out->codes + i);
  }
  if constexpr (kInt4) OrderForInt4(out->codes);
  const float sum = SumLanes(d, total);
  out->scale = q.scale;
  out->sum = q.scale * sum;
  out->start = -128 * static_cast<int32_t>(sum);
}

// group(from, to) for each group of a row; a last one that is not whole is followed by zeros.
template <class Group, class Fn>
HWY_INLINE void ForGroups(const float* x, int32_t cols, int32_t block_groups, uint8_t* out, int64_t block_stride,
                          const Fn& fn) {
  for (int32_t c = 0; c < cols; out += block_stride) {
    auto* group = reinterpret_cast<Group*>(out);
    for (int32_t g = 0; g < block_groups && c < cols; ++g, ++group, c += kWeightGroup) {
      if (c + kWeightGroup <= cols) {
        fn(x + c, group);
      } else {
        float padded[kWeightGroup] = {};
        std::memcpy(padded, x + c, static_cast<size_t>(cols - c) * 4);
        fn(padded, group);
      }
    }
  }
}

template <bool kInt4>
void ConvertToInt8(const float* x, int32_t cols, int32_t block_groups, uint8_t* out, int64_t block_stride) {
  ForGroups<Int8Group>(x, cols, block_groups, out, block_stride,
                       [](const float* from, Int8Group* to) HWY_ATTR { ConvertGroup<kInt4>(from, to); });
}

template <ActivationType kActivations>
void Convert(const float* x, int32_t cols, int32_t block_groups, uint8_t* out, int64_t block_stride) {
  ForGroups<XGroup>(x, cols, block_groups, out, block_stride,
                    [](const float* from, XGroup* to) HWY_ATTR { ConvertGroup<kActivations>(from, to); });
}

// Columns [begin, begin + count) of a panel, count a multiple of 32.
template <WeightType kWeights>
void Widen(const uint8_t* panel, int64_t codes_offset, int32_t begin, int32_t count, PanelBlock* out) {
  const F d;
  const U du;
  const I di;
  constexpr int kPerWord = kWeights == WeightType::kInt4 ? 8 : kWeights == WeightType::kInt8 ? 4 : 2;
  const auto* words = reinterpret_cast<const uint32_t*>(panel + codes_offset) + int64_t{begin / kPerWord} * kPanelRows;
  for (int32_t c = 0; c < count; c += kPerWord, words += kPanelRows) {
    for (int v = 0; v < kPanelRows; v += kLanes) {
      const auto word = hn::LoadU(du, words + v);
      const auto store = [&](int column, V value) { hn::StoreU(value, d, out->codes[c + column] + v); };
      const auto code = [&](auto shifted, uint32_t mask)
                            HWY_ATTR { return hn::ConvertTo(d, hn::BitCast(di, hn::And(shifted, hn::Set(du, mask)))); };
      if constexpr (kWeights == WeightType::kBf16) {
        store(0, hn::BitCast(d, hn::ShiftLeft<16>(word)));
        store(1, hn::BitCast(d, hn::And(word, hn::Set(du, 0xffff0000u))));
      } else if constexpr (kWeights == WeightType::kInt8) {
        const V offset = hn::Set(d, 128.0f);
        store(0, hn::Sub(code(word, 255), offset));
        store(1, hn::Sub(code(hn::ShiftRight<8>(word), 255), offset));
        store(2, hn::Sub(code(hn::ShiftRight<16>(word), 255), offset));
        store(3, hn::Sub(code(hn::ShiftRight<24>(word), 255), offset));
      } else {
        store(0, code(word, 15));
        store(2, code(hn::ShiftRight<4>(word), 15));
        store(4, code(hn::ShiftRight<8>(word), 15));
        store(6, code(hn::ShiftRight<12>(word), 15));
        store(1, code(hn::ShiftRight<16>(word), 15));
        store(3, code(hn::ShiftRight<20>(word), 15));
        store(5, code(hn::ShiftRight<24>(word), 15));
        store(7, code(hn::ShiftRight<28>(word), 15));
      }
    }
  }
  if constexpr (kWeights != WeightType::kBf16) {
    constexpr int kPerGroup = kWeights == WeightType::kInt4 ? 2 * kPanelRows : kPanelRows;
    const auto* scales = reinterpret_cast<const uint16_t*>(panel) + int64_t{begin / kWeightGroup} * kPerGroup;
    for (int32_t g = 0; g < count / kWeightGroup; ++g, scales += kPerGroup) {
      for (int v = 0; v < kPanelRows; v += kLanes) {
        hn::StoreU(LoadF16(d, scales + v), d, out->scale[g] + v);
        if constexpr (kWeights == WeightType::kInt4) {
          hn::StoreU(LoadF16(d, scales + kPanelRows + v), d, out->minimum[g] + v);
        }
      }
    }
  }
}

// The register tile: 6 rows by some vectors of sums, their operands and one broadcast. With 32 registers (AVX-512,
// NEON) 4 vectors: 4 × 6 + 4 + 1 = 29, or 2 where sums within a group stand beside sums over groups: 2 · 2 × 6 + 2 + 1
// = 27. With 16 registers 2: 2 × 6 + 2 + 1 = 15, and the sums over groups are spilled once a group. One or two rows
// take twice the vectors, so that enough sums are under way to hide the latency of a multiply-add.
inline constexpr int kTileRows = 6;
inline constexpr int kFewRows = 2;
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr int kPlainVectors = 4;
#else
inline constexpr int kPlainVectors = 2;
#endif
inline constexpr int kGroupedVectors = 2;
inline constexpr int kMostVectors = 2 * kPlainVectors;

constexpr int TileVectors(bool grouped, bool few) {
  return (grouped ? kGroupedVectors : kPlainVectors) * (few ? 2 : 1);
}
// Panels go in steps that fill a tile, or one by one where a panel holds several tiles.
constexpr int StepPanels(bool grouped, bool few) {
  const int vectors = TileVectors(grouped, few);
  return vectors > kVectorsPerPanel ? vectors / kVectorsPerPanel : 1;
}

// What the tiles of one block have in common.
struct TileArgs {
  const float* codes[kMostVectors];  // of vector v, column c at + 16 c
  const float* scale[kMostVectors];  // of vector v, group g at + 16 g
  const float* minimum[kMostVectors];
  int32_t cols;
  const uint8_t* x;
  int64_t x_row_stride;
  int32_t x_group_bytes;
  float* y;
  int64_t y_stride;
  bool first, last;     // of the blocks
  const float* factor;  // [vectors · kLanes] or null
  const float* bias;    // [vectors · kLanes] or null
};

template <int kRows, int kVectors, bool kGrouped, bool kMinimum>
HWY_INLINE void Tile(const TileArgs& t, int32_t row) {
  const F d;
  V acc[kRows][kVectors];
  const uint8_t* x[kRows];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    x[r] = t.x + (row + r) * t.x_row_stride;
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = t.first ? hn::Zero(d) : hn::LoadU(d, t.y + (row + r) * t.y_stride + v * kLanes);
    }
  }
  for (int32_t c = 0; c < t.cols; c += kWeightGroup) {
    const int32_t end = std::min(c + kWeightGroup, t.cols);
    V dot[kRows][kVectors];
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      HWY_UNROLL(8)
      for (int v = 0; v < kVectors; ++v) dot[r][v] = kGrouped ? hn::Zero(d) : acc[r][v];
    }
    for (int32_t i = c; i < end; ++i) {
      V operand[kVectors];
      HWY_UNROLL(8)
      for (int v = 0; v < kVectors; ++v) operand[v] = hn::LoadU(d, t.codes[v] + int64_t{i} * kPanelRows);
      HWY_UNROLL(8)
      for (int r = 0; r < kRows; ++r) {
        const V e = hn::Set(d, reinterpret_cast<const float*>(x[r])[i - c]);
        HWY_UNROLL(8)
        for (int v = 0; v < kVectors; ++v) dot[r][v] = hn::MulAdd(e, operand[v], dot[r][v]);
      }
    }
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) {
      HWY_UNROLL(8)
      for (int r = 0; r < kRows; ++r) {
        if constexpr (kGrouped) {
          const auto* group = reinterpret_cast<const XGroup*>(x[r]);
          const V scale = hn::Mul(hn::LoadU(d, t.scale[v] + c / 2), hn::Set(d, group->scale));
          acc[r][v] = hn::MulAdd(dot[r][v], scale, acc[r][v]);
          if constexpr (kMinimum) {
            acc[r][v] = hn::MulAdd(hn::LoadU(d, t.minimum[v] + c / 2), hn::Set(d, group->sum), acc[r][v]);
          }
        } else {
          acc[r][v] = dot[r][v];
        }
      }
    }
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) x[r] += t.x_group_bytes;
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) {
      if (t.last) {
        if (t.factor != nullptr) acc[r][v] = hn::Mul(acc[r][v], hn::LoadU(d, t.factor + v * kLanes));
        if (t.bias != nullptr) acc[r][v] = hn::Add(acc[r][v], hn::LoadU(d, t.bias + v * kLanes));
      }
      hn::StoreU(acc[r][v], d, t.y + (row + r) * t.y_stride + v * kLanes);
    }
  }
}

// All rows in tiles of nearly equal height.
template <bool kGrouped, bool kMinimum, bool kFew>
HWY_NOINLINE void TileRows(const TileArgs& t, int32_t m) {
  constexpr int kVectors = TileVectors(kGrouped, kFew);
  constexpr int kMost = kFew ? kFewRows : kTileRows;
  const int32_t tiles = (m + kMost - 1) / kMost;
  int32_t row = 0;
  for (int32_t i = 0; i < tiles; ++i) {
    const int32_t rows = (m - row + (tiles - i) - 1) / (tiles - i);
    if (rows == 1) Tile<1, kVectors, kGrouped, kMinimum>(t, row);
    if (rows == 2) Tile<2, kVectors, kGrouped, kMinimum>(t, row);
    if constexpr (!kFew) {
      if (rows == 3) Tile<3, kVectors, kGrouped, kMinimum>(t, row);
      if (rows == 4) Tile<4, kVectors, kGrouped, kMinimum>(t, row);
      if (rows == 5) Tile<5, kVectors, kGrouped, kMinimum>(t, row);
      if (rows == 6) Tile<6, kVectors, kGrouped, kMinimum>(t, row);
    }
    row += rows;
  }
}

// What a step of the loop over panels needs: widened panels, and where results of rows go that the matrix does not
// have.
inline constexpr int kRowsAtATime = 64;
template <bool kGrouped, bool kFew>
struct Scratch {
  static constexpr int kPanels = StepPanels(kGrouped, kFew), kOutputs = kPanels * kPanelRows;
  PanelBlock panels[kPanels];
  float y[kFew ? kFewRows : kRowsAtATime][kOutputs];
};

template <WeightType kWeights, bool kFew>
void MultiplyRows(const Share& s) {
  constexpr bool kGrouped = kWeights == WeightType::kInt8 || kWeights == WeightType::kInt4;
  constexpr bool kMinimum = kWeights == WeightType::kInt4;
  constexpr int kOutputs = Scratch<kGrouped, kFew>::kOutputs, kVectors = TileVectors(kGrouped, kFew);
  auto* scratch = reinterpret_cast<Scratch<kGrouped, kFew>*>(s.scratch);
  // f32 needs no padding; all others are padded to whole groups, in the panels and in x.
  const int32_t cols = kWeights == WeightType::kF32 ? s.cols : s.groups * kWeightGroup;
  const int32_t block_cols = s.block_groups * kWeightGroup;
  for (int32_t c = 0; c < cols || c == 0; c += block_cols) {
    for (int32_t n = 0; n < s.outputs; n += kOutputs) {
      const int32_t outputs = std::min(kOutputs, s.outputs - n);
      const int panels = (outputs + kPanelRows - 1) / kPanelRows;
      const uint8_t* const panel = s.panels + n / kPanelRows * s.layout.bytes;
      float factor[kOutputs] = {}, bias[kOutputs] = {};
      if (kGrouped) std::memcpy(factor, s.factors + n, static_cast<size_t>(outputs) * 4);
      if (s.bias != nullptr) std::memcpy(bias, s.bias + n, static_cast<size_t>(outputs) * 4);
      TileArgs t = {};
      t.cols = std::min(block_cols, cols - c);
      t.first = c == 0;
      t.last = c + block_cols >= cols;
      if constexpr (kWeights != WeightType::kF32) {
        for (int p = 0; p < panels; ++p) {
          Widen<kWeights>(panel + p * s.layout.bytes, s.layout.codes, c, t.cols, &scratch->panels[p]);
        }
      }
      t.x_row_stride = s.x_row_stride;
      t.x_group_bytes = kWeights == WeightType::kF32 ? kWeightGroup * 4 : static_cast<int32_t>(sizeof(XGroup));
      // Rows of x go by in strips whose results are copied where a tile cannot write to y itself.
      for (int32_t row = 0; row < s.m; row += kRowsAtATime) {
        const int32_t rows = std::min(kRowsAtATime, s.m - row);
        const bool direct = outputs == kOutputs;
        float* const y = s.y + row * s.y_stride + n;
        t.x = s.x + c / block_cols * s.x_block_stride + row * s.x_row_stride;
        if (!direct && !t.first) {
          for (int32_t r = 0; r < rows; ++r) {
            std::memcpy(scratch->y[r], y + r * s.y_stride, static_cast<size_t>(outputs) * 4);
          }
        }
        for (int v = 0; v < kOutputs / kLanes; v += kVectors) {
          for (int i = 0; i < kVectors; ++i) {
            const int p = std::min((v + i) / kVectorsPerPanel, panels - 1), at = (v + i) % kVectorsPerPanel * kLanes;
            t.codes[i] = kWeights == WeightType::kF32
                             ? reinterpret_cast<const float*>(panel + p * s.layout.bytes) + int64_t{c} * kPanelRows + at
                             : scratch->panels[p].codes[0] + at;
            t.scale[i] = scratch->panels[p].scale[0] + at;
            t.minimum[i] = scratch->panels[p].minimum[0] + at;
          }
          t.y = direct ? y + v * kLanes : scratch->y[0] + v * kLanes;
          t.y_stride = direct ? s.y_stride : kOutputs;
          t.factor = kGrouped ? factor + v * kLanes : nullptr;
          t.bias = s.bias != nullptr ? bias + v * kLanes : nullptr;
          TileRows<kGrouped, kMinimum, kFew>(t, rows);
        }
        if (!direct) {
          for (int32_t r = 0; r < rows; ++r) {
            std::memcpy(y + r * s.y_stride, scratch->y[r], static_cast<size_t>(outputs) * 4);
          }
        }
      }
    }
  }
}

template <WeightType kWeights>
void Multiply(const Share& s) {
  if (s.m <= kFewRows) {
    MultiplyRows<kWeights, true>(s);
  } else {
    MultiplyRows<kWeights, false>(s);
  }
}

template <WeightType kWeights, ActivationType kActivations>
constexpr Product MakeProduct() {
  constexpr bool kInPlace = kWeights == WeightType::kF32;
  constexpr bool kGrouped = kWeights == WeightType::kInt8 || kWeights == WeightType::kInt4;
  return {kBlockGroups, kInPlace ? kWeightGroup * 4 : static_cast<int32_t>(sizeof(XGroup)),
          std::max(sizeof(Scratch<kGrouped, true>), sizeof(Scratch<kGrouped, false>)),
          kInPlace ? nullptr : &Convert<kActivations>, &Multiply<kWeights>};
}

Kernels GetKernels() {
  using W = WeightType;
  using A = ActivationType;
  return {{{MakeProduct<W::kF32, A::kF32>(), {}, {}},
           {{}, MakeProduct<W::kBf16, A::kBf16>(), {}},
           {MakeProduct<W::kInt8, A::kF32>(), MakeProduct<W::kInt8, A::kBf16>(), MakeProduct<W::kInt8, A::kInt8>()},
           {MakeProduct<W::kInt4, A::kF32>(), MakeProduct<W::kInt4, A::kBf16>(), MakeProduct<W::kInt4, A::kInt8>()}},
          {false, false},
          &ConvertToInt8<false>,
          &ConvertToInt8<true>,
          &SumOfSquares,
          &ScaleBy,
          &Add,
          &SiluMul,
          &GeluMul,
          &ClampedSwiglu,
          &Rotate,
          &Mix,
          &ToF32,
          &FromF32,
          &ToCodes};
}

}  // namespace HWY_NAMESPACE
}  // namespace phsa::ops
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace phsa::ops {

HWY_EXPORT(GetKernels);

const Kernels& ActiveKernels() {
  static const std::array<Kernels, kSimdTargets> tables = [] {
    const std::vector<Simd>& there = SimdTargets();
    std::array<Kernels, kSimdTargets> all{};
    const auto at = [&](Simd simd) -> Kernels& { return all[static_cast<size_t>(simd)]; };
    ForEachHighwayTarget([&](Simd simd) { at(simd) = HWY_DYNAMIC_DISPATCH(GetKernels)(); });
    // Files with instructions of their own are not entered where the CPU lacks them.
    const auto add = [&](Simd simd, Simd base, void (*more)(Kernels*)) {
      if (std::find(there.begin(), there.end(), simd) == there.end()) return;
      at(simd) = at(base);
      more(&at(simd));
    };
    add(Simd::kAvx2, Simd::kAvx2, &AddAvx2);
    add(Simd::kAvx3Vnni, Simd::kAvx3, &AddAvx512Vnni);
    add(Simd::kAvx3Bf16, Simd::kAvx3Vnni, &AddAvx512Bf16);
    add(Simd::kAvx3Amx, Simd::kAvx3Bf16, &AddAmx);
    at(Simd::kReference) = at(there.front());
    return all;
  }();
  return tables[static_cast<size_t>(ActiveSimd())];
}

}  // namespace phsa::ops

#endif  // HWY_ONCE
