// Products of bf16 pairs by vdpbf16ps, which Highway 1.0 does not have: twice the multiply-adds of f32 per instruction.
// No inline function of the standard library may be called here: the linker could keep the copy that needs AVX-512.
// The instruction adds the two products of a pair without a rounding in between and treats denormals as zero; each
// result still has one accumulator and one order, so it depends on the row and the key alone.
#include "attention/cpu/kernels.h"

#if defined(__x86_64__) && defined(__AVX512BF16__)

// GCC 12 takes the undefined vectors inside its own intrinsics for uninitialised variables.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

#include <cstring>

namespace phsa::cpu {
namespace {

constexpr int kTileVectors = 4;
constexpr int kTileRows = 6;

#include "attention/cpu/turn16_avx512-inl.h"

template <int Rows, int Vectors, bool kAccumulate>
inline __attribute__((always_inline)) void Tile(const uint32_t* const* a, const uint32_t* b, int64_t vector_stride,
                                                int64_t k_stride, int k_count, float* const* c, int64_t column) {
  __m512 acc[Rows][Vectors];
  const char* row[Rows];  // of q a row may begin at an odd element, where no uint32_t may lie
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    row[r] = reinterpret_cast<const char*>(a[r]);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      acc[r][v] = kAccumulate ? _mm512_loadu_ps(c[r] + column + v * 16) : _mm512_setzero_ps();
    }
  }
  for (int k = 0; k < k_count; ++k) {
    __m512bh operand[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      operand[v] = (__m512bh)_mm512_loadu_si512(b + k * k_stride + v * vector_stride);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      int32_t pair;
      std::memcpy(&pair, row[r] + 4 * static_cast<int64_t>(k), 4);
      const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], x, operand[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) _mm512_storeu_ps(c[r] + column + v * 16, acc[r][v]);
  }
}

template <int Vectors, bool kAccumulate>
void TileRows(const uint32_t* const* a, int rows, const uint32_t* b, int64_t vector_stride, int64_t k_stride,
              int k_count, float* const* c, int64_t column) {
  constexpr int kRows = Vectors == kTileVectors ? kTileRows : 8;
  int r = 0;
  for (; r + kRows <= rows; r += kRows) {
    Tile<kRows, Vectors, kAccumulate>(a + r, b, vector_stride, k_stride, k_count, c + r, column);
  }
  for (; r + 4 <= rows; r += 4) {
    Tile<4, Vectors, kAccumulate>(a + r, b, vector_stride, k_stride, k_count, c + r, column);
  }
  for (; r + 3 <= rows; r += 3) {
    Tile<3, Vectors, kAccumulate>(a + r, b, vector_stride, k_stride, k_count, c + r, column);
  }
  for (; r + 2 <= rows; r += 2) {
    Tile<2, Vectors, kAccumulate>(a + r, b, vector_stride, k_stride, k_count, c + r, column);
  }
  if (r < rows) Tile<1, Vectors, kAccumulate>(a + r, b, vector_stride, k_stride, k_count, c + r, column);
}

template <bool kAccumulate>
void TileColumns(const uint32_t* const* a, int rows, const uint32_t* b, int64_t vector_stride, int64_t k_stride,
                 int k_count, float* const* c, int vectors) {
  int v = 0;
  for (; v + kTileVectors <= vectors; v += kTileVectors) {
    TileRows<kTileVectors, kAccumulate>(a, rows, b + v * vector_stride, vector_stride, k_stride, k_count, c, v * 16);
  }
  for (; v + 2 <= vectors; v += 2) {
    TileRows<2, kAccumulate>(a, rows, b + v * vector_stride, vector_stride, k_stride, k_count, c, v * 16);
  }
  for (; v < vectors; ++v) {
    TileRows<1, kAccumulate>(a, rows, b + v * vector_stride, vector_stride, k_stride, k_count, c, v * 16);
  }
}

void Dot(const uint32_t* const* a, int rows, const uint32_t* panels, int num_panels, int words, float* const* c) {
  TileColumns<false>(a, rows, panels, int64_t{words} * kPanel, kPanel, words, c, num_panels);
}

void Accumulate(const uint32_t* const* p, int rows, int words, int /*step*/, const uint32_t* values, int64_t stride,
                int columns, float* const* o) {
  TileColumns<true>(p, rows, values, 16, stride, words, o, columns / 16);
}

// A pair of bf16 is one word, so a panel of bf16 is a turned matrix of words: 16 × 16 of them at a time in registers.
void PackPanel(const void* const* src, int32_t /*dtype*/, int rows, int elements, uint32_t* dst) {
  const int words = elements / 2;
  for (int c = 0; c < words; c += 16) {
    const int n = words - c < 16 ? words - c : 16;
    const __mmask16 mask = static_cast<__mmask16>((1u << n) - 1);
    __m512i x[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      x[r] = r < rows ? _mm512_maskz_loadu_epi32(mask, static_cast<const uint16_t*>(src[r]) + 2 * c)
                      : _mm512_setzero_si512();
    }
    Turn16(x);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      if (r < n) _mm512_storeu_si512(dst + (c + r) * kPanel, x[r]);
    }
  }
}

void PackValues(const void* src, int64_t stride, int32_t /*dtype*/, int rows, int columns, uint32_t* dst) {
  const auto* in = static_cast<const uint16_t*>(src);
  for (int r = 0; r < rows; r += 2, dst += columns) {
    for (int c = 0; c < columns; c += 16) {
      const __m256i even = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + r * stride + c));
      const __m256i odd = r + 1 < rows ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + (r + 1) * stride + c))
                                       : _mm256_setzero_si256();
      _mm512_storeu_si512(
          dst + c, _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16)));
    }
  }
}

// Words of two lanes each, rounded to bf16: `low` in the low halves.
inline __m512i Pair(__m512 low, __m512 high) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// Four codes are one word, and turned as such: a lane then holds four neighbours of one key, and its scale is one
// vector for all.
void PackPanelCodes(const int8_t* const* src, const float* scales, int32_t /*dtype*/, int rows, int elements,
                    uint32_t* dst) {
  const __m512 scale = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << rows) - 1), scales);
  const int fours = elements / 4;
  for (int c = 0; c < fours; c += 16) {
    const int n = fours - c < 16 ? fours - c : 16;
    const __mmask16 mask = static_cast<__mmask16>((1u << n) - 1);
    __m512i x[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      x[r] = r < rows ? _mm512_maskz_loadu_epi32(mask, src[r] + 4 * c) : _mm512_setzero_si512();
    }
    Turn16(x);
#pragma GCC unroll 16
    for (int w = 0; w < 16; ++w) {
      if (w >= n) continue;
      const auto scaled = [&](__m512i code) { return _mm512_mul_ps(_mm512_cvtepi32_ps(code), scale); };
      const __m512 first = scaled(_mm512_srai_epi32(_mm512_slli_epi32(x[w], 24), 24));
      const __m512 second = scaled(_mm512_srai_epi32(_mm512_slli_epi32(x[w], 16), 24));
      const __m512 third = scaled(_mm512_srai_epi32(_mm512_slli_epi32(x[w], 8), 24));
      const __m512 fourth = scaled(_mm512_srai_epi32(x[w], 24));
      _mm512_storeu_si512(dst + (2 * (c + w)) * kPanel, Pair(first, second));
      _mm512_storeu_si512(dst + (2 * (c + w) + 1) * kPanel, Pair(third, fourth));
    }
  }
}

void PackValuesCodes(const int8_t* src, int64_t stride, const float* scales, int32_t /*dtype*/, int rows, int columns,
                     uint32_t* dst) {
  for (int r = 0; r < rows; r += 2, dst += columns) {
    const int8_t* const even = src + r * stride;
    const int8_t* const odd = even + stride;
    const bool two = r + 1 < rows;
    const __m512 even_scale = _mm512_set1_ps(scales[r]), odd_scale = _mm512_set1_ps(two ? scales[r + 1] : 0.0f);
    const auto scaled = [](const int8_t* from, __m512 scale) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)), scale);
    };
    for (int c = 0; c < columns; c += 16) {
      const __m512 low = scaled(even + c, even_scale);
      const __m512 high = two ? scaled(odd + c, odd_scale) : _mm512_setzero_ps();
      _mm512_storeu_si512(dst + c, Pair(low, high));
    }
  }
}

// As Exp2 of kernels.cc, in fewer terms: the result is rounded to 8 bits anyway. Degree 5, relative error 1e-7.
inline __m512 Exp2(__m512 x) {
  const __m512 lowest = _mm512_set1_ps(-126.0f);
  const __mmask16 keep = _mm512_cmp_ps_mask(x, lowest, _CMP_GE_OQ);
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.3264726e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6715127e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5507337e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022242e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314698e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(keep, p, n);
}

float Softmax(float* s, int n, float factor, float* max, float* sum) {
  __m512 m = _mm512_loadu_ps(s);
  for (int i = 16; i < n; i += 16) m = _mm512_max_ps(m, _mm512_loadu_ps(s + i));
  const float old_max = *max;
  const float chunk_max = _mm512_reduce_max_ps(m);
  const float new_max = chunk_max > old_max ? chunk_max : old_max;
  const __m512 f = _mm512_set1_ps(factor), offset = _mm512_set1_ps(new_max * factor);
  __m512 total = _mm512_setzero_ps();
  auto* words = reinterpret_cast<uint16_t*>(s);  // a word is written after the two values in its place were read
  for (int i = 0; i < n; i += 16) {
    const __m512 e = Exp2(_mm512_fmsub_ps(_mm512_loadu_ps(s + i), f, offset));
    total = _mm512_add_ps(total, e);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + i), (__m256i)_mm512_cvtneps_pbh(e));
  }
  const float rescale =
      old_max == new_max ? 1.0f : _mm512_cvtss_f32(Exp2(_mm512_set1_ps((old_max - new_max) * factor)));
  *max = new_max;
  *sum = *sum * rescale + _mm512_reduce_add_ps(total);
  return rescale;
}

const Products kProducts = {2, &PackPanel, &PackValues, &PackPanelCodes, &PackValuesCodes, &Dot, &Accumulate, &Softmax};

}  // namespace

const Products* Avx512Bf16Products() { return &kProducts; }

}  // namespace phsa::cpu

#else

namespace phsa::cpu {
const Products* Avx512Bf16Products() { return nullptr; }
}  // namespace phsa::cpu

#endif
