// Products with bf16 activations by vdpbf16ps, which Highway 1.0 does not have: twice the multiply-adds of f32 per
// instruction. It adds the two products of a pair without a rounding in between and treats denormals as zero; each
// result still has one accumulator and one order. Codes of int8 and int4 weights are exact in bf16.
#include "ops/cpu/kernels.h"

#if defined(__x86_64__) && defined(__AVX512BF16__)

// GCC 12 takes the undefined vectors inside its own intrinsics for uninitialised variables.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

namespace phsa::ops {
namespace {

#include "ops/cpu/grouped_avx512-inl.h"

// Of two panels, expanded, 18 groups are 41 KB, and of four bf16 panels 9 groups 36 KB: a little more than the nearest
// cache, which costs less than to begin and end tiles more often.
constexpr int kMaxBlockGroups = 18;
constexpr int kPlainBlockGroups = 9;

struct XGroup {
  uint16_t x[32];
  float sum;  // for int4's minima
};

struct Bf16Sums {
  using Group = XGroup;
  using Sum = __m512;
  static PHSA_INLINE __m512 Start(const XGroup*) { return _mm512_setzero_ps(); }
  static PHSA_INLINE __m512 Dot(__m512 sum, __m512i operand, __m512i e) {
    // With the intrinsic GCC 12 keeps some operands of a loop on the stack.
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(e), "v"(operand));
    return sum;
  }
};

struct Bf16WithoutMinimum : Bf16Sums {
  static PHSA_INLINE __m512 Minimum(const uint8_t*) { return _mm512_setzero_ps(); }
  static PHSA_INLINE __m512 Finish(__m512 acc, __m512 sum, __m512 scale, __m512, const XGroup*) {
    return _mm512_fmadd_ps(sum, scale, acc);
  }
};

struct Bf16WithMinimum : Bf16Sums {
  static PHSA_INLINE __m512 Finish(__m512 acc, __m512 sum, __m512 scale, __m512 minimum, const XGroup* x) {
    acc = _mm512_fmadd_ps(sum, scale, acc);
    return _mm512_fmadd_ps(minimum, _mm512_set1_ps(x->sum), acc);
  }
};

// int8 weights: the bytes of a word as integers, as f32, and of two columns the upper halves, which hold all their
// bits.
struct DirectInt8 : Bf16WithoutMinimum {
  static constexpr int kOperands = 2, kLoads = 8, kScaleBytes = 32, kGroupBytes = 512;
  using Loaded = __m512i;
  static PHSA_INLINE __m512i Load(const uint8_t* codes, int load) {
    return _mm512_xor_si512(_mm512_loadu_si512(codes + load * 64), _mm512_set1_epi8(-128));
  }
  PHSA_INLINE __m512i Operand(__m512i loaded, int i) const {
    const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(loaded, i == 0 ? 24 : 8), 24);
    const __m512i odd = _mm512_srai_epi32(i == 0 ? _mm512_slli_epi32(loaded, 16) : loaded, 24);
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(even)), 16),
                                   _mm512_castps_si512(_mm512_cvtepi32_ps(odd)));
  }
  static PHSA_INLINE __m512 Scale(const uint8_t* at) { return LoadF16(at); }

  static void Expand(const uint8_t* codes, const uint8_t* scales, int32_t first, int32_t groups, uint8_t* out,
                     float* out_scales) {
    ExpandScales(scales + int64_t{first} * kScaleBytes, groups, out_scales);
    codes += int64_t{first} * kLoads * 64;
    const DirectInt8 format;
    for (int32_t i = 0; i < groups * kLoads; ++i, codes += 64, out += 128) {
      const __m512i loaded = Load(codes, 0);
      _mm512_storeu_si512(out, format.Operand(loaded, 0));
      _mm512_storeu_si512(out + 64, format.Operand(loaded, 1));
    }
  }
};

// int4 weights: after a shift, the low bits of each 16-bit half are a column's code, and the look-up ignores all but
// five bits; the table holds the sixteen codes twice, so that the fifth does not matter either.
struct DirectInt4 : Bf16WithMinimum {
  static constexpr int kOperands = 4, kLoads = 4, kScaleBytes = 64, kGroupBytes = 256;
  __m512i table =
      _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100,
                                               0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
  using Loaded = __m512i;
  static PHSA_INLINE __m512i Load(const uint8_t* codes, int load) { return _mm512_loadu_si512(codes + load * 64); }
  PHSA_INLINE __m512i Operand(__m512i loaded, int i) const {
    return _mm512_permutexvar_epi16(i == 0 ? loaded : _mm512_srli_epi16(loaded, static_cast<unsigned>(4 * i)), table);
  }
  static PHSA_INLINE __m512 Scale(const uint8_t* at) { return LoadF16(at); }
  static PHSA_INLINE __m512 Minimum(const uint8_t* at) { return LoadF16(at + 32); }

  static void Expand(const uint8_t* codes, const uint8_t* scales, int32_t first, int32_t groups, uint8_t* out,
                     float* out_scales) {
    ExpandScales(scales + int64_t{first} * kScaleBytes, groups * 2, out_scales);
    codes += int64_t{first} * kLoads * 64;
    const DirectInt4 format;
    for (int32_t i = 0; i < groups * kLoads; ++i, codes += 64, out += 256) {
      const __m512i loaded = Load(codes, 0);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) _mm512_storeu_si512(out + 64 * j, format.Operand(loaded, j));
    }
  }
};

// What Expand writes.
struct Expanded {
  static constexpr int kOperands = 1, kLoads = 16, kGroupBytes = 1024;
  using Loaded = __m512i;
  static PHSA_INLINE __m512i Load(const uint8_t* codes, int load) { return _mm512_loadu_si512(codes + load * 64); }
  static PHSA_INLINE __m512 Scale(const uint8_t* at) { return _mm512_loadu_ps(at); }
  PHSA_INLINE __m512i Operand(__m512i loaded, int) const { return loaded; }
};
struct ExpandedInt8 : Bf16WithoutMinimum, Expanded {
  static constexpr int kScaleBytes = 64;
};
struct ExpandedInt4 : Bf16WithMinimum, Expanded {
  static constexpr int kScaleBytes = 128;
  static PHSA_INLINE __m512 Minimum(const uint8_t* at) { return _mm512_loadu_ps(at + 64); }
};

// int6 weights, in groups of 16 columns: after shifts, four low bits and two high ones are a column's code, and the
// look-up ignores the other bits of its 16.
struct XHalfGroup {
  uint16_t x[16];
};
struct Int6Sums {
  using Group = XHalfGroup;
  using Sum = __m512;
  static PHSA_INLINE __m512 Start(const XHalfGroup*) { return _mm512_setzero_ps(); }
  static PHSA_INLINE __m512 Dot(__m512 sum, __m512i operand, __m512i e) { return Bf16Sums::Dot(sum, operand, e); }
  static PHSA_INLINE __m512 Minimum(const uint8_t*) { return _mm512_setzero_ps(); }
  static PHSA_INLINE __m512 Finish(__m512 acc, __m512 sum, __m512 scale, __m512, const XHalfGroup*) {
    return _mm512_fmadd_ps(sum, scale, acc);
  }
};

struct DirectInt6 : Int6Sums {
  static constexpr int kOperands = 4, kLoads = 2, kScaleBytes = 32, kGroupBytes = 192;
  __m512i negative, positive;  // bf16 of the codes' values: -32 to -1, 0 to 31
  PHSA_INLINE DirectInt6() {
    const __m512i index = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const auto table = [&](int first) {
      const __m512i even = _mm512_add_epi32(_mm512_add_epi32(index, index), _mm512_set1_epi32(first));
      const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
      return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(even)), 16),
                                     _mm512_castps_si512(_mm512_cvtepi32_ps(odd)));
    };
    negative = table(-32);
    positive = table(0);
  }
  using Loaded = Int6Codes;
  static PHSA_INLINE Int6Codes Load(const uint8_t* codes, int load) { return Int6Codes::Load(codes, load); }
  PHSA_INLINE __m512i Operand(const Int6Codes& loaded, int i) const {
    const __m512i low = i == 0 ? loaded.low : _mm512_srli_epi16(loaded.low, static_cast<unsigned>(4 * i));
    const __m512i high = i == 0   ? _mm512_slli_epi16(loaded.high, 4)
                         : i == 1 ? _mm512_slli_epi16(loaded.high, 2)
                         : i == 2 ? _mm512_srli_epi16(loaded.high, 4)
                                  : _mm512_srli_epi16(loaded.high, 6);
    return _mm512_permutex2var_epi16(negative, _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, 0xca),
                                     positive);
  }
  static PHSA_INLINE __m512 Scale(const uint8_t* at) { return LoadF16(at); }

  static void Expand(const uint8_t* codes, const uint8_t* scales, int32_t first, int32_t groups, uint8_t* out,
                     float* out_scales) {
    ExpandScales(scales + int64_t{first} * kScaleBytes, groups, out_scales);
    codes += int64_t{first} * kGroupBytes;
    const DirectInt6 format;
    for (int32_t g = 0; g < groups; ++g, codes += kGroupBytes) {
      for (int word = 0; word < 2; ++word) {
        const Int6Codes loaded = Load(codes, word);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, out += 64) _mm512_storeu_si512(out, format.Operand(loaded, i));
      }
    }
  }
};

struct ExpandedInt6 : Int6Sums {
  static constexpr int kOperands = 1, kLoads = 8, kScaleBytes = 64, kGroupBytes = 512;
  using Loaded = __m512i;
  static PHSA_INLINE __m512i Load(const uint8_t* codes, int load) { return _mm512_loadu_si512(codes + load * 64); }
  PHSA_INLINE __m512i Operand(__m512i loaded, int) const { return loaded; }
  static PHSA_INLINE __m512 Scale(const uint8_t* at) { return _mm512_loadu_ps(at); }
};

void MultiplyInt6(const Share& s) { MultiplyEither<DirectInt6, ExpandedInt6, 13>(HalfGroups(s)); }

void ConvertForInt6(const float* x, int32_t cols, int32_t block_groups, uint8_t* out, int64_t block_stride) {
  for (int32_t c = 0; c < cols; out += block_stride) {
    uint8_t* to = out;
    for (int32_t g = 0; g < block_groups && c < cols; ++g, to += 64, c += 32) {
      const HalfMasks masks = MasksOf(cols - c);
      _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(masks.high, x + c + 16),
                                                           _mm512_maskz_loadu_ps(masks.low, x + c)));
    }
  }
}

// ---- bf16 weights ------------------------------------------------------------------------------------------------

// 4 panels × 6 rows: 24 sums, 4 operands and a broadcast: 29 of 32 registers.
constexpr int kPlainPanels = 4;

template <int kRows, int kPanels>
__attribute__((noinline)) void PlainTile(const TileArgs& t, int32_t row) {
  __m512 acc[kRows][kPanels];
  RowPointers x(t.x + row * t.x_row_stride, t.x_row_stride);
  LoadSums(t, row, acc);
  const uint8_t* codes = t.codes;
  const int64_t next_block = t.x_block_stride - t.block_groups * static_cast<int64_t>(sizeof(XGroup));
  for (int32_t left = t.groups; left > 0;) {
    for (int32_t stop = left < t.block_groups ? 0 : left - t.block_groups; left > stop; --left) {
#pragma GCC unroll 1
      for (int pair = 0; pair < 16; ++pair, codes += 64) {
        __m512i operand[kPanels];
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) operand[p] = _mm512_loadu_si512(codes + p * t.panel_codes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const __m512i e = Broadcast32(x[r] + 4 * pair);
#pragma GCC unroll 4
          for (int p = 0; p < kPanels; ++p) acc[r][p] = Bf16Sums::Dot(acc[r][p], operand[p], e);
        }
      }
      x.Advance(sizeof(XGroup));
    }
    x.Advance(next_block);
  }
  StoreSums(t, row, acc);
}

template <int kPanels>
void PlainRows(const TileArgs& t, int32_t m) {
  const int32_t tiles = (m + kTileRows - 1) / kTileRows;
  int32_t row = 0;
  for (int32_t i = 0; i < tiles; ++i) {
    const int32_t rows = (m - row + (tiles - i) - 1) / (tiles - i);
    switch (rows) {
      case 1: PlainTile<1, kPanels>(t, row); break;
      case 2: PlainTile<2, kPanels>(t, row); break;
      case 3: PlainTile<3, kPanels>(t, row); break;
      case 4: PlainTile<4, kPanels>(t, row); break;
      case 5: PlainTile<5, kPanels>(t, row); break;
      default: PlainTile<6, kPanels>(t, row); break;
    }
    row += rows;
  }
}

// Blocks as in MultiplyDirect.
void MultiplyPlain(const Share& s) {
  constexpr int kStep = kPlainPanels * 16;
  const int32_t block = s.m <= kTileRows ? s.groups : s.block_groups;
  for (int32_t g = 0; g < s.groups || g == 0; g += block) {
    for (int32_t n = 0; n < s.outputs; n += kStep) {
      const int32_t outputs = s.outputs - n < kStep ? s.outputs - n : kStep;
      const int panels = (outputs + 15) / 16;
      TileArgs t = ArgsOf(s, n, panels, outputs);
      t.SetBlock(s, g, block);
      t.codes = s.panels + n / 16 * s.layout.bytes + int64_t{g} * 1024;
      t.panel_codes = s.layout.bytes;
      switch (panels) {
        case 1: PlainRows<1>(t, s.m); break;
        case 2: PlainRows<2>(t, s.m); break;
        case 3: PlainRows<3>(t, s.m); break;
        default: PlainRows<4>(t, s.m); break;
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------

void Convert(const float* x, int32_t cols, int32_t block_groups, uint8_t* out, int64_t block_stride) {
  for (int32_t c = 0; c < cols; out += block_stride) {
    auto* group = reinterpret_cast<XGroup*>(out);
    for (int32_t g = 0; g < block_groups && c < cols; ++g, ++group, c += 32) {
      const HalfMasks masks = MasksOf(cols - c);
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(masks.high, x + c + 16),
                                                        _mm512_maskz_loadu_ps(masks.low, x + c));
      _mm512_storeu_si512(group->x, both);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
      group->sum = _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
    }
  }
}

template <WeightType kWeights>
void Set(Kernels* kernels, int block_groups, size_t scratch, void (*multiply)(const Share&)) {
  kernels->products[static_cast<int>(kWeights)][static_cast<int>(ActivationType::kBf16)] = {
      block_groups, sizeof(XGroup), scratch, &Convert, multiply};
}

}  // namespace

bool AddAvx512Bf16(Kernels* kernels) {
  if (!__builtin_cpu_supports("avx512bf16")) return false;
  Set<WeightType::kBf16>(kernels, kPlainBlockGroups, 0, &MultiplyPlain);
  Set<WeightType::kInt8>(kernels, kMaxBlockGroups, ScratchBytes<ExpandedInt8>(kMaxBlockGroups),
                         &MultiplyEither<DirectInt8, ExpandedInt8, 4>);
  Set<WeightType::kInt4>(kernels, kMaxBlockGroups, ScratchBytes<ExpandedInt4>(kMaxBlockGroups),
                         &MultiplyEither<DirectInt4, ExpandedInt4, 13>);
  kernels->products[static_cast<int>(WeightType::kInt6)][static_cast<int>(ActivationType::kBf16)] = {
      kMaxBlockGroups, 2 * sizeof(XHalfGroup), ScratchBytes<ExpandedInt6>(2 * kMaxBlockGroups), &ConvertForInt6,
      &MultiplyInt6};
  kernels->fast.bf16 = true;
  kernels->fast.int6 =
      kernels->products[static_cast<int>(WeightType::kInt6)][static_cast<int>(ActivationType::kInt8)].multiply !=
      nullptr;
  return true;
}

}  // namespace phsa::ops

#else

namespace phsa::ops {
bool AddAvx512Bf16(Kernels*) { return false; }
}  // namespace phsa::ops

#endif
