// Products with int8 activations by vpdpbusd, which Highway 1.0 does not have: sixteen sums of four products of bytes
// per instruction, exact, four times the multiply-adds of f32. The instruction takes unsigned codes (of the weights)
// and signed ones (of x). int4 codes are unsigned; int8 codes are stored plus 128, which the sums take back by starting
// at -128 · Σ x.
#include "ops/cpu/kernels.h"

#if defined(__x86_64__) && defined(__AVX512VNNI__)

// GCC 12 takes the undefined vectors inside its own intrinsics for uninitialised variables.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

namespace phsa::ops {
namespace {

#include "ops/cpu/grouped_avx512-inl.h"

// Of two panels, expanded, 24 groups are 30 KB: about what the nearest cache holds. int8 codes are not expanded.
constexpr int kMaxBlockGroups = 24;
constexpr int kMaxBlockGroupsInt8 = 48;

#include "ops/cpu/int8_formats_avx512-inl.h"

// What codes are expanded to.
struct Expanded : Int8WithMinimum {
  static constexpr int kOperands = 1, kLoads = 8, kGroupBytes = 512;
  using Scales = F32Scales<2>;
  PHSA_INLINE __m512i Operand(__m512i loaded, int) const { return loaded; }
};

struct ExpandedInt6 : Int6Sums {
  static constexpr int kOperands = 1, kLoads = 4, kGroupBytes = 256;
  using Scales = F32Scales<1>;
  using Loaded = __m512i;
  static PHSA_INLINE __m512i Load(const uint8_t* codes, int load) { return _mm512_loadu_si512(codes + load * 64); }
  PHSA_INLINE __m512i Operand(__m512i loaded, int) const { return loaded; }
};

void MultiplyInt6(const Share& s) { MultiplyEither<DirectInt6, ExpandedInt6, 13>(HalfGroups(s)); }

// As in kernels.cc, in a third of the time: of products with few outputs the conversion is a large part.
template <bool kInt4>
PHSA_INLINE void ConvertGroup(__m512 a, __m512 b, Int8Group* out) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i largest = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), magnitude),
                                           _mm512_and_si512(_mm512_castps_si512(b), magnitude));
  const uint32_t bits = _mm512_reduce_max_epu32(largest);
  float amax;
  __builtin_memcpy(&amax, &bits, 4);
  const bool finite = bits < 0x7f800000u;
  if (!finite || !(amax > 0x1p-100f)) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->codes), _mm256_setzero_si256());
    out->scale = out->sum = finite ? 0.0f : __builtin_nanf("");
    out->start = 0;
    return;
  }
  const __m512 inverse = _mm512_set1_ps(127.0f / amax);
  const __m512i ia = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), ib = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
  __m256i codes =
      _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(ia)), _mm512_cvtepi32_epi8(ib), 1);
  if (kInt4) {
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    codes = _mm256_shuffle_epi8(codes, _mm256_broadcastsi128_si256(order));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->codes), codes);
  const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(ia, ib));
  out->scale = amax / 127.0f;
  out->sum = out->scale * static_cast<float>(sum);
  out->start = -128 * sum;
}

template <bool kInt4>
void Convert(const float* x, int32_t cols, int32_t block_groups, uint8_t* out, int64_t block_stride) {
  for (int32_t c = 0; c < cols; out += block_stride) {
    auto* group = reinterpret_cast<Int8Group*>(out);
    for (int32_t g = 0; g < block_groups && c < cols; ++g, ++group, c += 32) {
      const HalfMasks masks = MasksOf(cols - c);
      ConvertGroup<kInt4>(_mm512_maskz_loadu_ps(masks.low, x + c), _mm512_maskz_loadu_ps(masks.high, x + c + 16),
                          group);
    }
  }
}

// The same codes and scale, in halves.
void ConvertForInt6(const float* x, int32_t cols, int32_t block_groups, uint8_t* out, int64_t block_stride) {
  for (int32_t c = 0; c < cols; out += block_stride) {
    auto* half = reinterpret_cast<Int8HalfGroup*>(out);
    for (int32_t g = 0; g < block_groups && c < cols; ++g, c += 32) {
      const HalfMasks masks = MasksOf(cols - c);
      Int8Group group;
      ConvertGroup<true>(_mm512_maskz_loadu_ps(masks.low, x + c), _mm512_maskz_loadu_ps(masks.high, x + c + 16),
                         &group);
      for (int h = 0; h < 2; ++h, ++half) {
        __builtin_memcpy(half->codes, group.codes + 16 * h, 16);
        half->scale = group.scale;
        half->start = 0;
        for (int i = 0; i < 16; ++i) half->start -= 32 * half->codes[i];
      }
    }
  }
}

template <class Direct>
void SetWithMinimum(Kernels* kernels, WeightType weights) {
  kernels->products[static_cast<int>(weights)][static_cast<int>(ActivationType::kInt8)] = {
      kMaxBlockGroups, sizeof(Int8Group), ScratchBytes<Expanded>(kMaxBlockGroups), &Convert<true>,
      &MultiplyEither<Direct, Expanded, 13>};
}

}  // namespace

void AddAvx512Vnni(Kernels* kernels) {
  constexpr int kInt8 = static_cast<int>(ActivationType::kInt8);
  kernels->products[static_cast<int>(WeightType::kInt8)][kInt8] = {kMaxBlockGroupsInt8, sizeof(Int8Group), 0,
                                                                   &Convert<false>, &MultiplyDirect<DirectInt8>};
  SetWithMinimum<DirectInt4>(kernels, WeightType::kInt4);
  SetWithMinimum<DirectInt4K>(kernels, WeightType::kInt4K);
  SetWithMinimum<DirectInt5>(kernels, WeightType::kInt5);
  SetWithMinimum<DirectInt5K>(kernels, WeightType::kInt5K);
  kernels->products[static_cast<int>(WeightType::kInt6)][kInt8] = {kMaxBlockGroups, 2 * sizeof(Int8HalfGroup),
                                                                   ScratchBytes<ExpandedInt6>(2 * kMaxBlockGroups),
                                                                   &ConvertForInt6, &MultiplyInt6};
  kernels->fast.int8 = true;
}

}  // namespace phsa::ops

#else

namespace phsa::ops {
void AddAvx512Vnni(Kernels*) {}
}  // namespace phsa::ops

#endif
