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

struct Int8Sums {
  using Group = Int8Group;
  using Sum = __m512i;
  using Loaded = __m512i;
  static PHSA_INLINE __m512i Load(const uint8_t* codes, int load) { return _mm512_loadu_si512(codes + load * 64); }
  static PHSA_INLINE __m512i Dot(__m512i sum, __m512i operand, __m512i e) {
    // The intrinsic makes GCC 12 copy every sum before and after each instruction of a loop.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(operand), "v"(e));
    return sum;
  }
};

struct Int8WithoutMinimum : Int8Sums {
  static PHSA_INLINE __m512i Start(const Int8Group* x) { return _mm512_set1_epi32(x->start); }
  static PHSA_INLINE __m512 Minimum(const uint8_t*) { return _mm512_setzero_ps(); }
  static PHSA_INLINE __m512 Finish(__m512 acc, __m512i sum, __m512 scale, __m512, const Int8Group* x) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(x->scale)), acc);
  }
};

struct Int8WithMinimum : Int8Sums {
  static PHSA_INLINE __m512i Start(const Int8Group*) { return _mm512_setzero_si512(); }
  static PHSA_INLINE __m512 Finish(__m512 acc, __m512i sum, __m512 scale, __m512 minimum, const Int8Group* x) {
    acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(x->scale)), acc);
    return _mm512_fmadd_ps(minimum, _mm512_set1_ps(x->sum), acc);
  }
};

// int8 weights: a word is an operand as it lies.
struct DirectInt8 : Int8WithoutMinimum {
  static constexpr int kOperands = 1, kLoads = 8, kScaleBytes = 32, kGroupBytes = 512;
  PHSA_INLINE __m512i Operand(__m512i loaded, int) const { return loaded; }
  static PHSA_INLINE __m512 Scale(const uint8_t* at) { return LoadF16(at); }
};

// int4 weights: the low halves of the bytes are one operand, the high halves the next.
struct DirectInt4 : Int8WithMinimum {
  static constexpr int kOperands = 2, kLoads = 4, kScaleBytes = 64, kGroupBytes = 256;
  PHSA_INLINE __m512i Operand(__m512i loaded, int i) const {
    const __m512i low = _mm512_set1_epi8(15);
    return _mm512_and_si512(i == 0 ? loaded : _mm512_srli_epi16(loaded, 4), low);
  }
  static PHSA_INLINE __m512 Scale(const uint8_t* at) { return LoadF16(at); }
  static PHSA_INLINE __m512 Minimum(const uint8_t* at) { return LoadF16(at + 32); }

  static void Expand(const uint8_t* codes, const uint8_t* scales, int32_t first, int32_t groups, uint8_t* out,
                     float* out_scales) {
    ExpandScales(scales + int64_t{first} * kScaleBytes, groups * 2, out_scales);
    codes += int64_t{first} * kLoads * 64;
    const DirectInt4 format;
    for (int32_t i = 0; i < groups * kLoads; ++i, codes += 64, out += 128) {
      const __m512i loaded = Load(codes, 0);
      _mm512_storeu_si512(out, format.Operand(loaded, 0));
      _mm512_storeu_si512(out + 64, format.Operand(loaded, 1));
    }
  }
};

struct ExpandedInt4 : Int8WithMinimum {
  static constexpr int kOperands = 1, kLoads = 8, kScaleBytes = 128, kGroupBytes = 512;
  PHSA_INLINE __m512i Operand(__m512i loaded, int) const { return loaded; }
  static PHSA_INLINE __m512 Scale(const uint8_t* at) { return _mm512_loadu_ps(at); }
  static PHSA_INLINE __m512 Minimum(const uint8_t* at) { return _mm512_loadu_ps(at + 64); }
};

// int6 weights: as int4's, with two bits more.
struct Int6Sums {
  using Group = Int8HalfGroup;
  using Sum = __m512i;
  static PHSA_INLINE __m512i Dot(__m512i sum, __m512i operand, __m512i e) { return Int8Sums::Dot(sum, operand, e); }
  static PHSA_INLINE __m512i Start(const Group* x) { return _mm512_set1_epi32(x->start); }
  static PHSA_INLINE __m512 Minimum(const uint8_t*) { return _mm512_setzero_ps(); }
  static PHSA_INLINE __m512 Finish(__m512 acc, __m512i sum, __m512 scale, __m512, const Group* x) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(x->scale)), acc);
  }
};

struct DirectInt6 : Int6Sums {
  static constexpr int kOperands = 2, kLoads = 2, kScaleBytes = 32, kGroupBytes = 192;
  using Loaded = Int6Codes;
  static PHSA_INLINE Int6Codes Load(const uint8_t* codes, int load) { return Int6Codes::Load(codes, load); }
  PHSA_INLINE __m512i Operand(const Int6Codes& loaded, int i) const {
    const __m512i low = i == 0 ? loaded.low : _mm512_srli_epi16(loaded.low, 4);
    const __m512i high = _mm512_slli_epi16(loaded.high, i == 0 ? 4 : 2);
    // Bits 0 to 3 of the one, the others of the other.
    const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low, high, 0xca);
    return _mm512_and_si512(code, _mm512_set1_epi8(63));
  }
  static PHSA_INLINE __m512 Scale(const uint8_t* at) { return LoadF16(at); }

  static void Expand(const uint8_t* codes, const uint8_t* scales, int32_t first, int32_t groups, uint8_t* out,
                     float* out_scales) {
    ExpandScales(scales + int64_t{first} * kScaleBytes, groups, out_scales);
    codes += int64_t{first} * kGroupBytes;
    const DirectInt6 format;
    for (int32_t g = 0; g < groups; ++g, codes += kGroupBytes) {
      for (int i = 0; i < 4; ++i, out += 64) _mm512_storeu_si512(out, format.Operand(Load(codes, i / 2), i % 2));
    }
  }
};

struct ExpandedInt6 : Int6Sums {
  static constexpr int kOperands = 1, kLoads = 4, kScaleBytes = 64, kGroupBytes = 256;
  using Loaded = __m512i;
  static PHSA_INLINE __m512i Load(const uint8_t* codes, int load) { return _mm512_loadu_si512(codes + load * 64); }
  PHSA_INLINE __m512i Operand(__m512i loaded, int) const { return loaded; }
  static PHSA_INLINE __m512 Scale(const uint8_t* at) { return _mm512_loadu_ps(at); }
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

}  // namespace

void AddAvx512Vnni(Kernels* kernels) {
  constexpr int kInt8 = static_cast<int>(ActivationType::kInt8);
  kernels->products[static_cast<int>(WeightType::kInt8)][kInt8] = {kMaxBlockGroupsInt8, sizeof(Int8Group), 0,
                                                                   &Convert<false>, &MultiplyDirect<DirectInt8>};
  kernels->products[static_cast<int>(WeightType::kInt4)][kInt8] = {
      kMaxBlockGroups, sizeof(Int8Group), ScratchBytes<ExpandedInt4>(kMaxBlockGroups), &Convert<true>,
      &MultiplyEither<DirectInt4, ExpandedInt4, 13>};
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
