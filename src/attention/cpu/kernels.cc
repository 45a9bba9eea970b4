// Highway compiles this file once per SIMD target; see kernels.h for what each function promises.
#include "attention/cpu/kernels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "base/dtype.h"
#include "base/simd_highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/cpu/kernels.cc"
// GCC 12 takes the undefined vectors inside its own AVX-512 intrinsics for uninitialised variables.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace phsa::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;
inline constexpr int kLanes = HWY_LANES(float);
inline constexpr int kVectorsPerPanel = kPanel / kLanes;

// The register tile: kTileVectors vectors of columns by kTileRows rows of accumulators, plus the columns' operands and
// one broadcast. 32 registers (AVX-512, NEON): 4 × 6 + 4 + 1 = 29. 16 registers (AVX2): 2 × 6 + 2 + 1 = 15.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr int kTileVectors = 4;
#else
inline constexpr int kTileVectors = 2;
#endif
inline constexpr int kTileRows = 6;

HWY_INLINE V LoadAsF32(F d, const float* p) { return hn::LoadU(d, p); }

HWY_INLINE V LoadAsF32(F d, const hwy::bfloat16_t* p) {
  const hn::Rebind<uint16_t, F> d16;
  const hn::RebindToUnsigned<F> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)))));
}

HWY_INLINE V LoadAsF32(F d, const hwy::float16_t* p) {
  const hn::Rebind<hwy::float16_t, F> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, p));
}

HWY_INLINE V LoadAsF32(F d, const int8_t* p) {
  const hn::Rebind<int8_t, F> d8;
  const hn::Rebind<int32_t, F> d32;
  return hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d8, p)));
}

HWY_INLINE void StoreFromF32(V v, F d, float* p) { hn::StoreU(v, d, p); }

// v rounded to bf16, in the upper halves of the lanes; what the lower ones hold does not matter. To nearest even, as
// Bf16FromF32 does: the reference and every target store the same representative.
HWY_INLINE hn::Vec<hn::RebindToUnsigned<F>> RoundToBf16(F d, V v) {
  const hn::RebindToUnsigned<F> d32;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffu)));
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x00400000u));
  const auto is_nan = hn::MaskFromVec(hn::BitCast(d32, hn::VecFromMask(d, hn::Ne(v, v))));
  return hn::IfThenElse(is_nan, quiet, rounded);
}

HWY_INLINE void StoreFromF32(V v, F d, hwy::bfloat16_t* p) {
  const hn::Rebind<uint16_t, F> d16;
  const hn::Rebind<int32_t, F> ds32;
  const auto bits = hn::ShiftRight<16>(RoundToBf16(d, v));
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(ds32, bits)), d16, reinterpret_cast<uint16_t*>(p));
}

HWY_INLINE void StoreFromF32(V v, F /*d*/, hwy::float16_t* p) {
  const hn::Rebind<hwy::float16_t, F> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, p);
}

// Calls fn with a pointer of the element type that `dtype` names.
template <class Fn>
HWY_INLINE void WithType(const void* p, int32_t dtype, Fn&& fn) {
  if (dtype == PHSA_F32) {
    fn(static_cast<const float*>(p));
  } else if (dtype == PHSA_F16) {
    fn(static_cast<const hwy::float16_t*>(p));
  } else {
    fn(static_cast<const hwy::bfloat16_t*>(p));
  }
}

// 2^x for x <= 0, relative error 2e-9 before rounding; 0 below -126. Degree 6 on [-1/2, 1/2].
HWY_INLINE V Exp2(F d, V x) {
  const V lowest = hn::Set(d, -126.0f);
  const auto keep = hn::Ge(x, lowest);
  x = hn::Max(x, lowest);
  const V n = hn::Round(x);
  const V f = hn::Sub(x, n);
  V p = hn::Set(d, 1.5353361e-4f);
  p = hn::MulAdd(p, f, hn::Set(d, 1.3398874e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 9.6184373e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.5503323e-2f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.4022648e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.9314720e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const hn::RebindToSigned<F> di;
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  return hn::IfThenElseZero(keep, hn::Mul(p, hn::BitCast(d, exponent)));
}

float Exp2Scalar(float x) {
  const F d;
  return hn::GetLane(Exp2(d, hn::Set(d, x)));
}

// Sum and maximum of the lanes in an order that depends on nothing but the vector's length.
HWY_INLINE float SumLanes(F d, V v) { return hn::GetLane(hn::SumOfLanes(d, v)); }
HWY_INLINE float MaxLanes(F d, V v) { return hn::GetLane(hn::MaxOfLanes(d, v)); }

void ToF32(const void* src, int32_t dtype, int n, float* dst) {
  const F d;
  WithType(src, dtype, [&](const auto* p) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) hn::StoreU(LoadAsF32(d, p + i), d, dst + i);
    if (i < n) {
      uint64_t tail[kLanes] = {};
      auto* t = reinterpret_cast<std::remove_const_t<std::remove_pointer_t<decltype(p)>>*>(tail);
      std::memcpy(t, p + i, sizeof(*p) * static_cast<size_t>(n - i));
      float wide[kLanes];
      hn::StoreU(LoadAsF32(d, t), d, wide);
      std::memcpy(dst + i, wide, sizeof(float) * static_cast<size_t>(n - i));
    }
  });
}

// n is a multiple of 16: a row of head_dim elements.
void FromF32(const float* src, int32_t dtype, int n, void* dst) {
  const F d;
  WithType(dst, dtype, [&](const auto* p) {
    auto* out = const_cast<std::remove_const_t<std::remove_pointer_t<decltype(p)>>*>(p);
    for (int i = 0; i < n; i += kLanes) StoreFromF32(hn::LoadU(d, src + i), d, out + i);
  });
}

// f16 in hardware; Highway's emulation does not round as base/dtype.h does.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_NEON
inline constexpr bool kHasF16 = true;
#else
inline constexpr bool kHasF16 = false;
#endif

void FromCodes(const int8_t* codes, float scale, int32_t dtype, int n, void* dst) {
  if (!kHasF16 && dtype == PHSA_F16) {
    for (int i = 0; i < n; ++i) StoreElement(dtype, dst, i, static_cast<float>(codes[i]) * scale);
    return;
  }
  const F d;
  const V s = hn::Set(d, scale);
  WithType(dst, dtype, [&](const auto* p) {
    auto* out = const_cast<std::remove_const_t<std::remove_pointer_t<decltype(p)>>*>(p);
    for (int i = 0; i < n; i += kLanes) StoreFromF32(hn::Mul(LoadAsF32(d, codes + i), s), d, out + i);
  });
}

// The same, widened to f32 again.
void FromCodesToF32(const int8_t* codes, float scale, int32_t dtype, int n, float* dst) {
  if (dtype == PHSA_F32) {
    FromCodes(codes, scale, dtype, n, dst);
    return;
  }
  if (dtype == PHSA_F16) {
    HWY_ALIGN hwy::float16_t half[256];
    FromCodes(codes, scale, dtype, n, half);
    ToF32(half, dtype, n, dst);
    return;
  }
  const F d;
  const hn::RebindToUnsigned<F> d32;
  const V s = hn::Set(d, scale);
  const auto upper = hn::Set(d32, 0xffff0000u);
  for (int i = 0; i < n; i += kLanes) {
    const auto bits = hn::And(RoundToBf16(d, hn::Mul(LoadAsF32(d, codes + i), s)), upper);
    hn::StoreU(hn::BitCast(d, bits), d, dst + i);
  }
}

void Scale(float* x, int n, float factor) {
  const F d;
  const V f = hn::Set(d, factor);
  for (int i = 0; i < n; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, x + i), f), d, x + i);
}

void Merge(const float* from, float from_max, float from_sum, int n, float factor, float* to, float* to_max,
           float* to_sum) {
  const F d;
  if (from_max > *to_max) {
    const float weight = Exp2Scalar((*to_max - from_max) * factor);
    const V w = hn::Set(d, weight);
    for (int i = 0; i < n; i += kLanes) {
      hn::StoreU(hn::MulAdd(hn::LoadU(d, to + i), w, hn::LoadU(d, from + i)), d, to + i);
    }
    *to_max = from_max;
    *to_sum = *to_sum * weight + from_sum;
    return;
  }
  const float weight = Exp2Scalar((from_max - *to_max) * factor);
  const V w = hn::Set(d, weight);
  for (int i = 0; i < n; i += kLanes) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, from + i), w, hn::LoadU(d, to + i)), d, to + i);
  }
  *to_sum = *to_sum + from_sum * weight;
}

#if HWY_TARGET == HWY_AVX3

#include "attention/cpu/turn16_avx512-inl.h"

void PackPanel(const void* const* src, int32_t dtype, int rows, int elements, uint32_t* dst) {
  const F d;
  WithType(src[0], dtype, [&](const auto* first) {
    for (int c = 0; c < elements; c += 16) {
      __m512i x[16];
      HWY_UNROLL(16)
      for (int r = 0; r < 16; ++r) {
        x[r] = r < rows ? _mm512_castps_si512(LoadAsF32(d, static_cast<decltype(first)>(src[r]) + c).raw)
                        : _mm512_setzero_si512();
      }
      Turn16(x);
      HWY_UNROLL(16)
      for (int r = 0; r < 16; ++r) _mm512_storeu_si512(dst + (c + r) * kPanel, x[r]);
    }
  });
}

#else

// o[k · 16 + i] = row[i][c + k] for i, k < 4.
HWY_INLINE void Turn4x4(const float* const* row, int c, float* o) {
#if HWY_TARGET == HWY_SCALAR
  for (int k = 0; k < 4; ++k) {
    for (int i = 0; i < 4; ++i) o[k * kPanel + i] = row[i][c + k];
  }
#else
  const hn::Full128<float> d4;
  const hn::Full128<uint64_t> d2;
  const auto r0 = hn::LoadU(d4, row[0] + c), r1 = hn::LoadU(d4, row[1] + c);
  const auto r2 = hn::LoadU(d4, row[2] + c), r3 = hn::LoadU(d4, row[3] + c);
  const auto lo01 = hn::BitCast(d2, hn::InterleaveLower(d4, r0, r1));
  const auto hi01 = hn::BitCast(d2, hn::InterleaveUpper(d4, r0, r1));
  const auto lo23 = hn::BitCast(d2, hn::InterleaveLower(d4, r2, r3));
  const auto hi23 = hn::BitCast(d2, hn::InterleaveUpper(d4, r2, r3));
  hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, lo01, lo23)), d4, o);
  hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, lo01, lo23)), d4, o + kPanel);
  hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, hi01, hi23)), d4, o + 2 * kPanel);
  hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, hi01, hi23)), d4, o + 3 * kPanel);
#endif
}

// Rows of 16-bit elements are widened first; then 4 × 4 words at a time are turned, which every target does in eight
// shuffles of 128 bits.
void PackPanel(const void* const* src, int32_t dtype, int rows, int elements, uint32_t* dst) {
  float* out = reinterpret_cast<float*>(dst);
  HWY_ALIGN float wide[4][512];
  for (int r = 0; r < kPanel; r += 4) {
    const float* row[4];
    for (int i = 0; i < 4; ++i) {
      if (r + i >= rows) {
        std::memset(wide[i], 0, sizeof(float) * static_cast<size_t>(elements));
        row[i] = wide[i];
      } else if (dtype == PHSA_F32) {
        row[i] = static_cast<const float*>(src[r + i]);
      } else {
        ToF32(src[r + i], dtype, elements, wide[i]);
        row[i] = wide[i];
      }
    }
    for (int c = 0; c < elements; c += 4) Turn4x4(row, c, out + c * kPanel + r);
  }
}

#endif

void PackValues(const void* src, int64_t stride, int32_t dtype, int rows, int columns, uint32_t* dst) {
  float* out = reinterpret_cast<float*>(dst);
  for (int r = 0; r < rows; ++r, out += columns) {
    if (dtype == PHSA_F32) {
      std::memcpy(out, static_cast<const float*>(src) + r * stride, sizeof(float) * static_cast<size_t>(columns));
    } else {
      ToF32(static_cast<const uint16_t*>(src) + r * stride, dtype, columns, out);
    }
  }
}

void PackPanelCodes(const int8_t* const* src, const float* scales, int32_t dtype, int rows, int elements,
                    uint32_t* dst) {
  HWY_ALIGN float wide[kPanel][256];
  const void* at[kPanel];
  for (int r = 0; r < rows; ++r) {
    FromCodesToF32(src[r], scales[r], dtype, elements, wide[r]);
    at[r] = wide[r];
  }
  PackPanel(at, PHSA_F32, rows, elements, dst);
}

void PackValuesCodes(const int8_t* src, int64_t stride, const float* scales, int32_t dtype, int rows, int columns,
                     uint32_t* dst) {
  float* out = reinterpret_cast<float*>(dst);
  for (int r = 0; r < rows; ++r, out += columns) FromCodesToF32(src + r * stride, scales[r], dtype, columns, out);
}

// c[r] (+)= Σ_k a[r][k] · b[k · k_stride …] for Rows rows and Vectors vectors of columns, all in registers. Vector v of
// the columns lies at (v / kVectorsPerPanel) · panel_stride + (v % kVectorsPerPanel) · kLanes.
template <int Rows, int Vectors, bool kAccumulate>
HWY_INLINE void Tile(const float* const* a, const float* b, int64_t panel_stride, int64_t k_stride, int k_count,
                     float* const* c, int64_t column) {
  const F d;
  V acc[Rows][Vectors];
  const float* row[Rows];
  HWY_UNROLL(8)
  for (int r = 0; r < Rows; ++r) {
    row[r] = a[r];
    HWY_UNROLL(8)
    for (int v = 0; v < Vectors; ++v) {
      acc[r][v] = kAccumulate ? hn::LoadU(d, c[r] + column + v * kLanes) : hn::Zero(d);
    }
  }
  for (int k = 0; k < k_count; ++k) {
    V operand[Vectors];
    HWY_UNROLL(8)
    for (int v = 0; v < Vectors; ++v) {
      operand[v] =
          hn::LoadU(d, b + k * k_stride + (v / kVectorsPerPanel) * panel_stride + (v % kVectorsPerPanel) * kLanes);
    }
    HWY_UNROLL(8)
    for (int r = 0; r < Rows; ++r) {
      const V x = hn::Set(d, row[r][k]);
      HWY_UNROLL(8)
      for (int v = 0; v < Vectors; ++v) acc[r][v] = hn::MulAdd(x, operand[v], acc[r][v]);
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < Rows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < Vectors; ++v) hn::StoreU(acc[r][v], d, c[r] + column + v * kLanes);
  }
}

template <int Vectors, bool kAccumulate>
HWY_NOINLINE void TileRows(const float* const* a, int rows, const float* b, int64_t panel_stride, int64_t k_stride,
                           int k_count, float* const* c, int64_t column) {
  // With few columns more rows fit; eight independent sums hide the latency of the multiply-add.
  constexpr int kRows = Vectors == kTileVectors ? kTileRows : 8;
  int r = 0;
  const auto tile = [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    for (; r + kCount <= rows; r += kCount) {
      Tile<kCount, Vectors, kAccumulate>(a + r, b, panel_stride, k_stride, k_count, c + r, column);
    }
  };
  tile(std::integral_constant<int, kRows>());
  tile(std::integral_constant<int, 4>());
  tile(std::integral_constant<int, 3>());
  tile(std::integral_constant<int, 2>());
  tile(std::integral_constant<int, 1>());
}

// Columns go in steps of kTileVectors vectors, then two, then one.
template <bool kAccumulate>
HWY_INLINE void TileColumns(const float* const* a, int rows, const float* b, int64_t panel_stride, int64_t k_stride,
                            int k_count, float* const* c, int columns) {
  const int vectors = columns / kLanes;
  int v = 0;
  const auto steps_of = [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    for (; v + kCount <= vectors; v += kCount) {
      const float* at = b + (v / kVectorsPerPanel) * panel_stride + (v % kVectorsPerPanel) * kLanes;
      TileRows<kCount, kAccumulate>(a, rows, at, panel_stride, k_stride, k_count, c, v * kLanes);
    }
  };
  steps_of(std::integral_constant<int, kTileVectors>());
  steps_of(std::integral_constant<int, 2>());
  steps_of(std::integral_constant<int, 1>());
}

void Dot(const uint32_t* const* a, int rows, const uint32_t* panels, int num_panels, int words, float* const* c) {
  TileColumns<false>(reinterpret_cast<const float* const*>(a), rows, reinterpret_cast<const float*>(panels),
                     int64_t{words} * kPanel, kPanel, words, c, num_panels * kPanel);
}

void Accumulate(const uint32_t* const* p, int rows, int words, int /*step*/, const uint32_t* values, int64_t stride,
                int columns, float* const* o) {
  TileColumns<true>(reinterpret_cast<const float* const*>(p), rows, reinterpret_cast<const float*>(values), kPanel,
                    stride, words, o, columns);
}

float Softmax(float* s, int n, float factor, float* max, float* sum) {
  const F d;
  V m = hn::LoadU(d, s);
  for (int i = kLanes; i < n; i += kLanes) m = hn::Max(m, hn::LoadU(d, s + i));
  const float old_max = *max;
  const float new_max = std::max(old_max, MaxLanes(d, m));
  const V f = hn::Set(d, factor), offset = hn::Set(d, new_max * factor);
  V total = hn::Zero(d);
  for (int i = 0; i < n; i += kLanes) {
    const V e = Exp2(d, hn::MulSub(hn::LoadU(d, s + i), f, offset));
    total = hn::Add(total, e);
    hn::StoreU(e, d, s + i);
  }
  const float rescale = old_max == new_max ? 1.0f : Exp2Scalar((old_max - new_max) * factor);
  *max = new_max;
  *sum = *sum * rescale + SumLanes(d, total);
  return rescale;
}

void WeightedSum(const void* src, int64_t stride, int32_t dtype, int rows, int columns, const float* weight,
                 void* dst) {
  const F d;
  WithType(src, dtype, [&](const auto* p) {
    auto* out = static_cast<std::remove_const_t<std::remove_pointer_t<decltype(p)>>*>(dst);
    for (int c = 0; c < columns; c += kLanes) {
      V total = hn::Zero(d);
      for (int r = 0; r < rows; ++r) total = hn::MulAdd(hn::Set(d, weight[r]), LoadAsF32(d, p + r * stride + c), total);
      StoreFromF32(total, d, out + c);
    }
  });
}

void Bounds(const void* src, int64_t stride, int32_t dtype, int rows, int columns, void* dst) {
  const F d;
  WithType(src, dtype, [&](const auto* p) {
    auto* out = static_cast<std::remove_const_t<std::remove_pointer_t<decltype(p)>>*>(dst);
    for (int c = 0; c < columns; c += kLanes) {
      V high = LoadAsF32(d, p + c);
      V low = high;
      for (int r = 1; r < rows; ++r) {
        const V x = LoadAsF32(d, p + r * stride + c);
        high = hn::Max(high, x);
        low = hn::Min(low, x);
      }
      StoreFromF32(high, d, out + c);
      StoreFromF32(low, d, out + columns + c);
    }
  });
}

float Exponentials(float* s, int n, float factor) {
  const F d;
  const int padded = (n + kPanel - 1) / kPanel * kPanel;
  for (int i = n; i < padded; ++i) s[i] = -HUGE_VALF;
  V m = hn::LoadU(d, s);
  for (int i = kLanes; i < padded; i += kLanes) m = hn::Max(m, hn::LoadU(d, s + i));
  const V f = hn::Set(d, factor), offset = hn::Set(d, MaxLanes(d, m) * factor);
  V total = hn::Zero(d);
  for (int i = 0; i < padded; i += kLanes) {
    const V e = Exp2(d, hn::MulSub(hn::LoadU(d, s + i), f, offset));
    total = hn::Add(total, e);
    hn::StoreU(e, d, s + i);
  }
  return SumLanes(d, total);
}

void GroupScores(const float* const* e, const float* weight, int heads, bool maximum, int begin, int end,
                 float* group) {
  const F d;
  // Whole vectors: the rows are padded to a multiple of 16, and what lies outside [begin, end) is not read later.
  for (int t = begin / kLanes * kLanes; t < end; t += kLanes) {
    V total = hn::Mul(hn::LoadU(d, e[0] + t), hn::Set(d, weight[0]));
    for (int h = 1; h < heads; ++h) {
      const V x = hn::LoadU(d, e[h] + t);
      const V w = hn::Set(d, weight[h]);
      total = maximum ? hn::Max(total, hn::Mul(x, w)) : hn::MulAdd(x, w, total);
    }
    hn::StoreU(hn::IfThenElse(hn::Eq(total, total), total, hn::Set(d, -1.0f)), d, group + t);
  }
}

void SumParts(const float* s, int parts, int blocks, float factor, float* max, float* sum) {
  const F d;
  const V f = hn::Set(d, factor), lowest = hn::Set(d, -HUGE_VALF);
  for (int i = 0; i < kPanel; i += kLanes) {
    V m = hn::LoadU(d, s + i);
    for (int p = 1; p < parts; ++p) m = hn::Max(m, hn::LoadU(d, s + p * kPanel + i));
    const V offset = hn::Mul(m, f);
    V total = hn::Zero(d);
    for (int p = 0; p < parts; ++p) {
      total = hn::Add(total, Exp2(d, hn::MulSub(hn::LoadU(d, s + p * kPanel + i), f, offset)));
    }
    const auto counts =
        hn::And(hn::Lt(hn::Iota(d, static_cast<float>(i)), hn::Set(d, static_cast<float>(blocks))), hn::Ne(m, lowest));
    hn::StoreU(hn::IfThenElse(counts, m, lowest), d, max + i);
    hn::StoreU(hn::IfThenElseZero(counts, total), d, sum + i);
  }
}

float JoinParts(const float* max, const float* sum, int n, float factor, float* e) {
  const F d;
  const V f = hn::Set(d, factor), end = hn::Set(d, static_cast<float>(n)), lowest = hn::Set(d, -HUGE_VALF);
  const int padded = (n + kPanel - 1) / kPanel * kPanel;
  V m = lowest;
  const auto counts = [&](int i) { return hn::Lt(hn::Iota(d, static_cast<float>(i)), end); };
  for (int i = 0; i < padded; i += kLanes) {
    m = hn::Max(m, hn::IfThenElse(counts(i), hn::LoadU(d, max + i), lowest));
  }
  const V offset = hn::Set(d, MaxLanes(d, m) * factor);
  V total = hn::Zero(d);
  for (int i = 0; i < padded; i += kLanes) {
    const V x = hn::Mul(hn::LoadU(d, sum + i), Exp2(d, hn::MulSub(hn::LoadU(d, max + i), f, offset)));
    const V kept = hn::IfThenElseZero(counts(i), x);
    total = hn::Add(total, kept);
    hn::StoreU(kept, d, e + i);
  }
  return SumLanes(d, total);
}

// Floats by rank: a < b exactly where their keys are (and 0 beside -0, which nothing here tells apart).
HWY_INLINE int32_t KeyOf(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits >= 0 ? bits : static_cast<int32_t>(static_cast<uint32_t>(bits) ^ 0x7fffffffu);
}
HWY_INLINE float OfKey(int32_t key) {
  const uint32_t bits = key >= 0 ? static_cast<uint32_t>(key) : static_cast<uint32_t>(key) ^ 0x7fffffffu;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// How many of x[0, n) are at least `least`; x is padded with -inf to whole vectors, and `least` is larger.
HWY_INLINE int CountAtLeast(const float* x, int n, float least) {
  const F d;
  const V bound = hn::Set(d, least);
  size_t count = 0;
  for (int i = 0; i < n; i += kLanes) count += hn::CountTrue(d, hn::Ge(hn::LoadU(d, x + i), bound));
  return static_cast<int>(count);
}

// The k-th largest value is at least the smallest of k lanes' maxima: one pass finds such a bound, a second keeps what
// reaches it, on real scores two to four times k. Among these the k-th value is found by halving the range of floats
// between the bound and the largest, one count a step: some ten steps part it from the next.
void TopK(const float* values, int begin, int end, int k, int32_t* scratch, int32_t* out) {
  const F d;
  constexpr int kMaxVectors = 16;
  constexpr int kMaxKept = 1024;
  const int vectors = (k + kLanes - 1) / kLanes;
  const int step = vectors * kLanes;
  HWY_ALIGN float kept[kMaxKept + kPanel];
  int n = 0;
  float bound = -HUGE_VALF;
  if (vectors <= kMaxVectors && end - begin >= 2 * step) {
    V least = hn::Set(d, HUGE_VALF);
    for (int i = 0; i < step; i += kLanes) {
      V m = hn::LoadU(d, values + begin + i);
      for (int t = begin + i + step; t + kLanes <= end; t += step) m = hn::Max(m, hn::LoadU(d, values + t));
      least = hn::Min(least, m);
    }
    bound = hn::GetLane(hn::MinOfLanes(d, least));
    least = hn::Set(d, bound);
    int t = begin;
    for (; t + kLanes <= end; t += kLanes) {
      uint8_t bits[8] = {};
      hn::StoreMaskBits(d, hn::Ge(hn::LoadU(d, values + t), least), bits);
      uint32_t mask = 0;
      std::memcpy(&mask, bits, 4);
      for (; mask != 0; mask &= mask - 1) scratch[n++] = t + __builtin_ctz(mask);
    }
    for (; t < end; ++t) {
      if (values[t] >= bound) scratch[n++] = t;
    }
  } else {
    for (int t = begin; t < end; ++t) scratch[n++] = t;
  }
  if (n > kMaxKept) {
    std::nth_element(scratch, scratch + k - 1, scratch + n,
                     [values](int32_t a, int32_t b) { return values[a] != values[b] ? values[a] > values[b] : a < b; });
    std::sort(scratch, scratch + k);
    std::copy_n(scratch, k, out);
    return;
  }

  float largest = -HUGE_VALF;
  for (int i = 0; i < n; ++i) {
    kept[i] = values[scratch[i]];
    largest = std::max(largest, kept[i]);
  }
  for (int i = n; i < n + kLanes; ++i) kept[i] = -HUGE_VALF;
  // At least k values reach `low`, fewer than k reach `high`.
  int64_t low = KeyOf(bound), high = int64_t{KeyOf(largest)} + 1;
  int reach = n;
  while (reach > k && high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const int count = CountAtLeast(kept, n, OfKey(static_cast<int32_t>(middle)));
    if (count >= k) {
      low = middle;
      reach = count;
    } else {
      high = middle;
    }
  }
  // Those above the k-th value, and of those that equal it the lowest.
  const float least = OfKey(static_cast<int32_t>(low));
  int equal = 0;
  if (reach > k) {
    for (int i = 0; i < n; ++i) equal += kept[i] == least;
  }
  int equal_left = reach > k ? k - (reach - equal) : n;
  for (int i = 0, written = 0; i < n && written < k; ++i) {
    if (!(kept[i] >= least)) continue;
    if (reach > k && kept[i] == least && equal_left-- <= 0) continue;
    out[written++] = scratch[i];
  }
}

template <int Keys, int Vectors>
HWY_INLINE void TransposedTile(const float* const* p, const float* const* rows, int num_rows, int key, int column,
                               float* dst, int64_t stride) {
  const F d;
  V acc[Keys][Vectors];
  HWY_UNROLL(8)
  for (int j = 0; j < Keys; ++j) {
    HWY_UNROLL(8)
    for (int v = 0; v < Vectors; ++v) acc[j][v] = hn::LoadU(d, dst + (key + j) * stride + column + v * kLanes);
  }
  for (int r = 0; r < num_rows; ++r) {
    V operand[Vectors];
    HWY_UNROLL(8)
    for (int v = 0; v < Vectors; ++v) operand[v] = hn::LoadU(d, rows[r] + column + v * kLanes);
    HWY_UNROLL(8)
    for (int j = 0; j < Keys; ++j) {
      const V x = hn::Set(d, p[r][key + j]);
      HWY_UNROLL(8)
      for (int v = 0; v < Vectors; ++v) acc[j][v] = hn::MulAdd(x, operand[v], acc[j][v]);
    }
  }
  HWY_UNROLL(8)
  for (int j = 0; j < Keys; ++j) {
    HWY_UNROLL(8)
    for (int v = 0; v < Vectors; ++v) hn::StoreU(acc[j][v], d, dst + (key + j) * stride + column + v * kLanes);
  }
}

void AccumulateTransposed(const float* const* p, const float* const* rows, int num_rows, int keys, int columns,
                          float* dst, int64_t stride) {
  const auto run = [&](auto vectors, int column) {
    constexpr int kVectors = decltype(vectors)::value;
    int j = 0;
    for (; j + kTileRows <= keys; j += kTileRows) {
      TransposedTile<kTileRows, kVectors>(p, rows, num_rows, j, column, dst, stride);
    }
    for (; j + 4 <= keys; j += 4) TransposedTile<4, kVectors>(p, rows, num_rows, j, column, dst, stride);
    for (; j < keys; ++j) TransposedTile<1, kVectors>(p, rows, num_rows, j, column, dst, stride);
  };
  int c = 0;
  for (; c + kTileVectors * kLanes <= columns; c += kTileVectors * kLanes) {
    run(std::integral_constant<int, kTileVectors>(), c);
  }
  for (; c < columns; c += kLanes) run(std::integral_constant<int, 1>(), c);
}

void SoftmaxGradient(float* s, float* dp, int n, float factor, float offset, float delta, float scale) {
  const F d;
  const V f = hn::Set(d, factor), o = hn::Set(d, offset), dl = hn::Set(d, delta), sc = hn::Set(d, scale);
  for (int i = 0; i < n; i += kLanes) {
    const V p = Exp2(d, hn::Min(hn::MulSub(hn::LoadU(d, s + i), f, o), hn::Zero(d)));
    hn::StoreU(p, d, s + i);
    hn::StoreU(hn::Mul(hn::Mul(p, hn::Sub(hn::LoadU(d, dp + i), dl)), sc), d, dp + i);
  }
}

float DotProduct(const float* a, const float* b, int n) {
  const F d;
  V total = hn::Zero(d);
  for (int i = 0; i < n; i += kLanes) total = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), total);
  return SumLanes(d, total);
}

Kernels GetKernels() {
  return {{1, &PackPanel, &PackValues, &PackPanelCodes, &PackValuesCodes, &Dot, &Accumulate, &Softmax},
          nullptr,
          &ToF32,
          &FromF32,
          &FromCodes,
          &Scale,
          &Merge,
          &WeightedSum,
          &Bounds,
          &Exponentials,
          &GroupScores,
          &SumParts,
          &JoinParts,
          &TopK,
          &AccumulateTransposed,
          &SoftmaxGradient,
          &DotProduct};
}

}  // namespace HWY_NAMESPACE
}  // namespace phsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace phsa::cpu {

HWY_EXPORT(GetKernels);

const Kernels& KernelsOf(Simd target) {
  static const std::array<Kernels, kSimdTargets> tables = [] {
    const std::vector<Simd>& there = SimdTargets();
    std::array<Kernels, kSimdTargets> all{};
    const auto at = [&](Simd simd) -> Kernels& { return all[static_cast<size_t>(simd)]; };
    ForEachHighwayTarget([&](Simd simd) { at(simd) = HWY_DYNAMIC_DISPATCH(GetKernels)(); });
    // Files with instructions of their own are not entered where the CPU lacks them.
    const auto add = [&](Simd simd, const Products* (*products)()) {
      if (std::find(there.begin(), there.end(), simd) == there.end()) return;
      at(simd) = at(Simd::kAvx3);
      at(simd).bf16 = products();
    };
    add(Simd::kAvx3Bf16, &Avx512Bf16Products);
    add(Simd::kAvx3Amx, &AmxProducts);
    return all;
  }();
  // Integer dot products have nothing to do here.
  return tables[static_cast<size_t>(target == Simd::kAvx3Vnni ? Simd::kAvx3 : target)];
}

}  // namespace phsa::cpu

#endif  // HWY_ONCE
