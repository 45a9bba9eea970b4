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

#include "ops/cpu/bf16_formats_avx512-inl.h"

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

void AddAvx512Bf16(Kernels* kernels) {
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
}

}  // namespace phsa::ops

#else

namespace phsa::ops {
void AddAvx512Bf16(Kernels*) {}
}  // namespace phsa::ops

#endif
