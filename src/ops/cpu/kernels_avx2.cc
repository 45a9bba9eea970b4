// Products with int8 activations on CPUs that have AVX2 but no vpdpbusd. vpmaddubsw multiplies unsigned bytes (weights)
// with signed ones (x) and adds neighbours into 16 bits, where they must not overflow:
//   int4  15 · 127 · 2 = 3810, and the 8 sums of a group, 30480, still fit: they are added as 16 bits, widened once a
//   group. int8  |w| · (x with the sign of w): 128 · 127 · 2 = 32512 fits, but no further sum does; widened each time.
// No inline function of another header may be called here: the linker could keep the copy that needs AVX2.
#include "ops/cpu/kernels.h"

#if defined(__x86_64__) && defined(__AVX2__)

#include <immintrin.h>

namespace phsa::ops {
namespace {

#define PHSA_INLINE inline __attribute__((always_inline))

// 4 rows × one panel of two vectors: 8 sums of the group, 4 operands, 2 constants, a product and a broadcast: all of 16
// registers; the sums over groups are spilled once a group.
constexpr int kTileRows = 4;
constexpr int kMaxBlockGroups = 1 << 20;  // the codes of a panel need no scratch, and x no blocks

PHSA_INLINE __m256 LoadF16(const uint8_t* at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
PHSA_INLINE __m256i LoadBytes(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

PHSA_INLINE __m256i Broadcast32(const int8_t* at) {
  int32_t word;
  __builtin_memcpy(&word, at, 4);
  return _mm256_set1_epi32(word);
}

// sum[r][h] = the dot products of a group's 32 codes, of 8 rows of the panel from 8 h on, with those of row r of x.
struct Int4 {
  static constexpr int kCodeBytes = 256, kScaleBytes = 64;
  template <int kRows>
  static PHSA_INLINE void Sums(const uint8_t* codes, const Int8Group* const* x, __m256i (*sum)[2]) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int word = 0; word < 4; ++word) {
      const __m256i a = LoadBytes(codes + word * 64), b = LoadBytes(codes + word * 64 + 32);
      const __m256i operand[2][2] = {
          {_mm256_and_si256(a, low), _mm256_and_si256(b, low)},
          {_mm256_and_si256(_mm256_srli_epi16(a, 4), low), _mm256_and_si256(_mm256_srli_epi16(b, 4), low)}};
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256i e = Broadcast32(x[r]->codes + word * 8 + i * 4);
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h) {
            sum[r][h] = _mm256_add_epi16(sum[r][h], _mm256_maddubs_epi16(operand[i][h], e));
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] = _mm256_madd_epi16(sum[r][0], ones);
      sum[r][1] = _mm256_madd_epi16(sum[r][1], ones);
    }
  }
  static PHSA_INLINE __m256 AddMinimum(__m256 acc, const uint8_t* scales, const Int8Group* x) {
    return _mm256_fmadd_ps(LoadF16(scales + 32), _mm256_set1_ps(x->sum), acc);
  }
};

struct Int8 {
  static constexpr int kCodeBytes = 512, kScaleBytes = 32;
  template <int kRows>
  static PHSA_INLINE void Sums(const uint8_t* codes, const Int8Group* const* x, __m256i (*sum)[2]) {
    const __m256i offset = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int word = 0; word < 8; ++word) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256i w = _mm256_xor_si256(LoadBytes(codes + word * 64 + h * 32), offset);
        const __m256i magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256i e = _mm256_sign_epi8(Broadcast32(x[r]->codes + word * 4), w);
          sum[r][h] = _mm256_add_epi32(sum[r][h], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, e), ones));
        }
      }
    }
  }
  static PHSA_INLINE __m256 AddMinimum(__m256 acc, const uint8_t*, const Int8Group*) { return acc; }
};

// Rows [row, row + kRows) of x by one panel.
template <class Format, int kRows>
__attribute__((noinline)) void Tile(const Share& s, const uint8_t* panel, int32_t row, float (*out)[16]) {
  __m256 acc[kRows][2];
  const Int8Group* x[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    x[r] = reinterpret_cast<const Int8Group*>(s.x + (row + r) * s.x_row_stride);
  }
  const uint8_t* scales = panel;
  const uint8_t* codes = panel + s.layout.codes;
  for (int32_t g = 0; g < s.groups; ++g, scales += Format::kScaleBytes, codes += Format::kCodeBytes) {
    __m256i sum[kRows][2];
    Format::template Sums<kRows>(codes, x, sum);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256 scale = LoadF16(scales + h * 16);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x[r]->scale));
        acc[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][h]), both, acc[r][h]);
        acc[r][h] = Format::AddMinimum(acc[r][h], scales + h * 16, x[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) ++x[r];
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    _mm256_storeu_ps(out[r], acc[r][0]);
    _mm256_storeu_ps(out[r] + 8, acc[r][1]);
  }
}

template <class Format>
void Multiply(const Share& s) {
  for (int32_t n = 0; n < s.outputs; n += 16) {
    const uint8_t* const panel = s.panels + n / 16 * s.layout.bytes;
    const int32_t outputs = s.outputs - n < 16 ? s.outputs - n : 16;
    for (int32_t row = 0; row < s.m;) {
      const int32_t rows = s.m - row < kTileRows ? s.m - row : kTileRows;
      float out[kTileRows][16];
      switch (rows) {
        case 1: Tile<Format, 1>(s, panel, row, out); break;
        case 2: Tile<Format, 2>(s, panel, row, out); break;
        case 3: Tile<Format, 3>(s, panel, row, out); break;
        default: Tile<Format, 4>(s, panel, row, out); break;
      }
      for (int32_t r = 0; r < rows; ++r) {
        float* const y = s.y + (row + r) * s.y_stride + n;
        for (int32_t i = 0; i < outputs; ++i) {
          y[i] = out[r][i] * s.factors[n + i] + (s.bias != nullptr ? s.bias[n + i] : 0.0f);
        }
      }
      row += rows;
    }
  }
}

}  // namespace

void AddAvx2(Kernels* kernels) {
  constexpr int kInt8 = static_cast<int>(ActivationType::kInt8);
  Product& int8 = kernels->products[static_cast<int>(WeightType::kInt8)][kInt8];
  Product& int4 = kernels->products[static_cast<int>(WeightType::kInt4)][kInt8];
  int8 = {kMaxBlockGroups, sizeof(Int8Group), 0, kernels->convert_to_int8, &Multiply<Int8>};
  int4 = {kMaxBlockGroups, sizeof(Int8Group), 0, kernels->convert_to_int8_for_int4, &Multiply<Int4>};
  kernels->fast.int8 = true;
}

}  // namespace phsa::ops

#else

namespace phsa::ops {
void AddAvx2(Kernels*) {}
}  // namespace phsa::ops

#endif
