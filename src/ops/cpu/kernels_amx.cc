// Products on matrix tiles (AMX), which Highway does not have: one instruction multiplies 16 rows of x with 16 rows of
// W over 32 columns of bf16, or 64 of bytes. Tiles serve every number of rows, one included: the instruction's order of
// summation is not vdpbf16ps's (it adds the even and the odd columns apart), and a row must not depend on its
// neighbours.
//
// bf16 activations: blocks of 8 groups of 32 columns. Codes become bf16 in scratch memory, once for all rows; a group's
// sum leaves the tile and is scaled into 16 accumulators in registers. int4's minima are one more group with scale 1:
// its columns are, for each of the 8 groups, the minimum's upper and lower 8 bits against the upper and lower 8 of the
// sum of x. So they cost a ninth instead of as much as the scales.
//
// int8 activations: sums of integers are exact, so that tiles give vpdpbusd's bits, and both are used: tiles for many
// rows.
#include "ops/cpu/kernels.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)

// GCC 12 takes the undefined vectors inside its own intrinsics for uninitialised variables.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

namespace phsa::ops {
namespace {

#include "ops/cpu/grouped_avx512-inl.h"

#include "ops/cpu/bf16_formats_avx512-inl.h"

#include "base/amx-inl.h"

constexpr int kBlockGroups = 8;
constexpr int kPanels = 4;  // expanded at a time: 36 KB of operands, and 9 KB of 16 rows of x, in the nearest cache
constexpr int kRowsOfTile = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kRowsCache = 640 * 1024;  // of the second cache, for rows of x

// Of one panel's block: operands of the groups, with minima one more; then their scales.
constexpr int64_t kPanelBytes = (kBlockGroups + 1) * kTileBytes + 2 * kBlockGroups * 64;

// Codes of a type of weights as operands. A group has kWords words of two columns; an operand has kRows = kWords rows.
struct Int4 {
  static constexpr int kWords = 16, kGroups = kBlockGroups;
  static constexpr bool kMinimum = true;
  static void Expand(const uint8_t* panel, const PanelLayout& layout, int32_t first, int32_t groups, uint8_t* out) {
    float scales[2 * kBlockGroups * 16];
    DirectInt4::Expand(panel + layout.codes, panel, first, groups, out, scales);
    float* const to = reinterpret_cast<float*>(out + (kBlockGroups + 1) * kTileBytes);
    uint8_t* minima = out + kBlockGroups * kTileBytes;
    for (int32_t g = 0; g < groups; ++g, minima += 128) {
      _mm512_storeu_ps(to + g * 16, _mm512_loadu_ps(scales + g * 32));
      StoreMinima(_mm512_loadu_ps(scales + g * 32 + 16), minima);
    }
    for (int32_t g = groups; g < kBlockGroups; ++g, minima += 128) StoreMinima(_mm512_setzero_ps(), minima);
  }
  // Two words: the upper 8 bits twice, the lower 8 twice.
  static PHSA_INLINE void StoreMinima(__m512 minimum, uint8_t* out) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i high = _mm512_and_si512(_mm512_castps_si512(minimum), mask);
    const __m512i low = _mm512_and_si512(_mm512_castps_si512(_mm512_sub_ps(minimum, _mm512_castsi512_ps(high))), mask);
    _mm512_storeu_si512(out, _mm512_or_si512(high, _mm512_srli_epi32(high, 16)));
    _mm512_storeu_si512(out + 64, _mm512_or_si512(low, _mm512_srli_epi32(low, 16)));
  }
};

struct Int8 {
  static constexpr int kWords = 16, kGroups = kBlockGroups;
  static constexpr bool kMinimum = false;
  static void Expand(const uint8_t* panel, const PanelLayout& layout, int32_t first, int32_t groups, uint8_t* out) {
    DirectInt8::Expand(panel + layout.codes, panel, first, groups, out,
                       reinterpret_cast<float*>(out + (kBlockGroups + 1) * kTileBytes));
  }
};

struct Int6 {
  static constexpr int kWords = 8, kGroups = 2 * kBlockGroups;  // of 16 columns
  static constexpr bool kMinimum = false;
  static void Expand(const uint8_t* panel, const PanelLayout& layout, int32_t first, int32_t groups, uint8_t* out) {
    DirectInt6::Expand(panel + layout.codes, panel, first, groups, out,
                       reinterpret_cast<float*>(out + (kBlockGroups + 1) * kTileBytes));
  }
};

// What the tiles of a panel and a block have in common.
struct Args {
  const uint8_t* operands;
  const float* scales;
  const uint8_t* x;       // of the first row
  const uint8_t* x_sums;  // its groups' sums, for minima
  int64_t x_row_stride;
  int32_t groups;
  float* y;
  int64_t y_stride;
  bool first, last;
  const float* factor;
  const float* bias;
  __mmask16 mask;
};

// tmm0, 1: sums; 4: x; 6, 7: operands. 2, 3 and 5: the same of the last rows, if fewer than 16.
template <bool kTail, int kPair>
PHSA_INLINE void Sum(const uint8_t* x, int64_t x_stride, const uint8_t* operand, float* sums) {
  if constexpr (kTail && kPair == 0) {
    PHSA_TILE_ZERO(2);
    PHSA_TILE_LOAD(5, x, x_stride);
    PHSA_TILE_LOAD(6, operand, 64);
    PHSA_TILE_BF16(2, 5, 6);
    PHSA_TILE_STORE(2, sums, 64);
  } else if constexpr (kTail) {
    PHSA_TILE_ZERO(3);
    PHSA_TILE_LOAD(5, x, x_stride);
    PHSA_TILE_LOAD(7, operand, 64);
    PHSA_TILE_BF16(3, 5, 7);
    PHSA_TILE_STORE(3, sums + 256, 64);
  } else if constexpr (kPair == 0) {
    PHSA_TILE_ZERO(0);
    PHSA_TILE_LOAD(4, x, x_stride);
    PHSA_TILE_LOAD(6, operand, 64);
    PHSA_TILE_BF16(0, 4, 6);
    PHSA_TILE_STORE(0, sums, 64);
  } else {
    PHSA_TILE_ZERO(1);
    PHSA_TILE_LOAD(4, x, x_stride);
    PHSA_TILE_LOAD(7, operand, 64);
    PHSA_TILE_BF16(1, 4, 7);
    PHSA_TILE_STORE(1, sums + 256, 64);
  }
}

// `rows` of x, at most kRows, by one panel and block. What the other accumulators add up goes nowhere.
template <class Format, bool kTail, int kRows>
__attribute__((noinline)) void Tile(const Args& t, int32_t row, int32_t rows, float* sums) {
  constexpr int64_t kOperandBytes = Format::kWords * 64;
  __m512 acc[kRows];
  float* y = t.y + row * t.y_stride;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    acc[r] = t.first || r >= rows ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(t.mask, y + r * t.y_stride);
  }
  const uint8_t* x = t.x + row * t.x_row_stride;
  const uint8_t* const x_sums = t.x_sums + row * t.x_row_stride;
  const uint8_t* const minima = t.operands + kBlockGroups * kTileBytes;
  const uint8_t* operand = t.operands;
  const auto add = [&](const float* from, __m512 scale) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) acc[r] = _mm512_fmadd_ps(_mm512_loadu_ps(from + r * 16), scale, acc[r]);
  };
  // The sums of one group are on their way while those of the one before are scaled.
  int32_t g = 0;
  if (t.groups > 0) Sum<kTail, 0>(x, t.x_row_stride, operand, sums);
  for (; g + 2 <= t.groups; g += 2) {
    x += Format::kWords * 4;
    operand += kOperandBytes;
    Sum<kTail, 1>(x, t.x_row_stride, operand, sums);
    add(sums, _mm512_loadu_ps(t.scales + g * 16));
    x += Format::kWords * 4;
    operand += kOperandBytes;
    if (g + 2 < t.groups) {
      Sum<kTail, 0>(x, t.x_row_stride, operand, sums);
    } else if constexpr (Format::kMinimum) {
      Sum<kTail, 0>(x_sums, t.x_row_stride, minima, sums);
    }
    add(sums + 256, _mm512_loadu_ps(t.scales + g * 16 + 16));
  }
  if (g < t.groups) {
    if constexpr (Format::kMinimum) {
      Sum<kTail, 1>(x_sums, t.x_row_stride, minima, sums);
    }
    add(sums, _mm512_loadu_ps(t.scales + g * 16));
    if constexpr (Format::kMinimum) add(sums + 256, _mm512_set1_ps(1));
  } else if constexpr (Format::kMinimum) {
    if (t.groups > 0) add(sums, _mm512_set1_ps(1));
  }
  const __m512 factor = t.factor != nullptr ? _mm512_maskz_loadu_ps(t.mask, t.factor) : _mm512_set1_ps(1);
  const __m512 bias = t.bias != nullptr ? _mm512_maskz_loadu_ps(t.mask, t.bias) : _mm512_setzero_ps();
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) break;
    if (t.last) acc[r] = _mm512_add_ps(_mm512_mul_ps(acc[r], factor), bias);
    _mm512_mask_storeu_ps(y + r * t.y_stride, t.mask, acc[r]);
  }
}

template <class Format>
PHSA_INLINE void LastTile(const Args& t, int32_t row, int32_t rows, float* sums) {
  if (rows == 1) return Tile<Format, true, 1>(t, row, rows, sums);
  if (rows <= 4) return Tile<Format, true, 4>(t, row, rows, sums);
  if (rows <= 8) return Tile<Format, true, 8>(t, row, rows, sums);
  Tile<Format, true, 16>(t, row, rows, sums);
}

// All rows by the panels from output n on, and the block that begins with group g.
template <class Format>
PHSA_INLINE void MultiplyBlock(const Share& s, int32_t n, int32_t most, int32_t g, float* sums) {
  constexpr int32_t kGroupsPerGroup = Format::kGroups / kBlockGroups;
  const int32_t outputs = s.outputs - n < most ? s.outputs - n : most;
  const int panels = (outputs + 15) / 16;
  const uint8_t* const panel = s.panels + n / 16 * s.layout.bytes;
  const int32_t groups = s.groups - g < s.block_groups ? s.groups - g : s.block_groups;
  for (int p = 0; p < panels; ++p) {
    Format::Expand(panel + p * s.layout.bytes, s.layout, g * kGroupsPerGroup, groups * kGroupsPerGroup,
                   s.scratch + p * kPanelBytes);
  }
  Args t = {};
  t.x = s.x + (g > 0 ? g / s.block_groups : 0) * s.x_block_stride;
  t.x_sums = t.x + s.block_groups * 64;
  t.x_row_stride = s.x_row_stride;
  t.groups = groups * kGroupsPerGroup;
  t.y_stride = s.y_stride;
  t.first = g == 0;
  t.last = g + s.block_groups >= s.groups;
  for (int32_t row = 0; row < s.m; row += kRowsOfTile) {
    for (int p = 0; p < panels; ++p) {
      const int32_t at = n + p * 16, left = s.outputs - at;
      t.operands = s.scratch + p * kPanelBytes;
      t.scales = reinterpret_cast<const float*>(t.operands + (kBlockGroups + 1) * kTileBytes);
      t.y = s.y + at;
      t.factor = s.factors + at;
      t.bias = s.bias != nullptr ? s.bias + at : nullptr;
      t.mask = static_cast<__mmask16>(left >= 16 ? 0xffffu : (1u << left) - 1);
      if (s.m - row >= kRowsOfTile) {
        Tile<Format, false, 16>(t, row, kRowsOfTile, sums);
      } else {
        LastTile<Format>(t, row, s.m - row, sums);
      }
    }
  }
}

template <class Format>
void Multiply(const Share& s) {
  const int32_t tail = s.m % kRowsOfTile;
  const int32_t rows = tail > 0 ? tail : kRowsOfTile;
  TileShapes shapes;
  shapes.Set(0, 1, kRowsOfTile, 16);
  shapes.Set(2, 3, rows, 16);
  shapes.Set(4, 4, kRowsOfTile, Format::kWords);
  shapes.Set(5, 5, rows, Format::kWords);
  shapes.Set(6, 7, Format::kWords, 16);
  shapes.Load();
  // Rows that a tile lacks are added up all the same: zeros, or it may be numbers that the CPU is slow with.
  alignas(64) float sums[2 * 256] = {};
  // As many blocks at a time as fit into the second cache with all rows of x.
  const int64_t fit = kRowsCache / (s.m * s.x_row_stride);
  const int32_t most = s.m <= kRowsOfTile ? 16 : kPanels * 16;
  const int32_t at_once = fit > 1 ? static_cast<int32_t>(fit) * s.block_groups : s.block_groups;
  for (int32_t first = 0; first < s.groups || first == 0; first += at_once) {
    const int32_t end = s.groups - first < at_once ? s.groups : first + at_once;
    for (int32_t n = 0; n < s.outputs; n += most) {
      int32_t g = first;
      do {
        MultiplyBlock<Format>(s, n, most, g, sums);
        g += s.block_groups;
      } while (g < end);
    }
  }
}

// ---- bf16 weights ------------------------------------------------------------------------------------------------

// They lie as operands, and nothing is to be scaled: a block's sums stay in the tiles, 2 × 2 of them.
constexpr int kPlainBlockGroups = 32;

// tmm0 to 3: sums, [rows][panels]; 4, 5: x of 16 rows each; 6, 7: operands.
template <int kRowTiles, int kPanelTiles>
PHSA_INLINE void PlainTile(const Args& t, int32_t row, int64_t panel_bytes, float* sums) {
  const uint8_t* x = t.x + row * t.x_row_stride;
  const uint8_t* operand = t.operands;
  PHSA_TILE_ZERO(0);
  if constexpr (kPanelTiles == 2) PHSA_TILE_ZERO(1);
  if constexpr (kRowTiles == 2) PHSA_TILE_ZERO(2);
  if constexpr (kRowTiles == 2 && kPanelTiles == 2) PHSA_TILE_ZERO(3);
  for (int32_t g = 0; g < t.groups; ++g, x += 64, operand += kTileBytes) {
    PHSA_TILE_LOAD(4, x, t.x_row_stride);
    PHSA_TILE_LOAD(6, operand, 64);
    PHSA_TILE_BF16(0, 4, 6);
    if constexpr (kPanelTiles == 2) {
      PHSA_TILE_LOAD(7, operand + panel_bytes, 64);
      PHSA_TILE_BF16(1, 4, 7);
    }
    if constexpr (kRowTiles == 2) {
      PHSA_TILE_LOAD(5, x + kRowsOfTile * t.x_row_stride, t.x_row_stride);
      PHSA_TILE_BF16(2, 5, 6);
      if constexpr (kPanelTiles == 2) PHSA_TILE_BF16(3, 5, 7);
    }
  }
  PHSA_TILE_STORE(0, sums, 64);
  if constexpr (kPanelTiles == 2) PHSA_TILE_STORE(1, sums + 256, 64);
  if constexpr (kRowTiles == 2) PHSA_TILE_STORE(2, sums + 512, 64);
  if constexpr (kRowTiles == 2 && kPanelTiles == 2) PHSA_TILE_STORE(3, sums + 768, 64);
}

// A tile's sums go into y.
PHSA_INLINE void AddPlain(const Args& t, int32_t row, int32_t rows, int32_t at, __mmask16 mask, const float* sums) {
  const __m512 bias = t.bias != nullptr ? _mm512_maskz_loadu_ps(mask, t.bias + at) : _mm512_setzero_ps();
  float* y = t.y + row * t.y_stride + at;
  for (int32_t r = 0; r < rows; ++r, y += t.y_stride, sums += 16) {
    __m512 sum = _mm512_loadu_ps(sums);
    if (!t.first) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), sum);
    if (t.last) sum = _mm512_add_ps(sum, bias);
    _mm512_mask_storeu_ps(y, mask, sum);
  }
}

void MultiplyPlain(const Share& s) {
  constexpr int32_t kRows = 2 * kRowsOfTile;
  const int32_t rest = s.m % kRows;
  alignas(64) float sums[4 * 256];
  // All rows but the rest, then the rest, each with a shape of tiles.
  for (int part = 0; part < 2; ++part) {
    const int32_t begin = part == 0 ? 0 : s.m - rest, end = part == 0 ? s.m - rest : s.m;
    if (begin == end) continue;
    const int32_t upper = end - begin < kRowsOfTile ? end - begin : kRowsOfTile;
    const int32_t lower = part == 0 ? kRowsOfTile : rest > kRowsOfTile ? rest - kRowsOfTile : 0;
    TileShapes shapes;
    shapes.Set(0, 1, upper, 16);
    shapes.Set(2, 3, lower > 0 ? lower : upper, 16);
    shapes.Set(4, 4, upper, 16);
    shapes.Set(5, 5, lower > 0 ? lower : upper, 16);
    shapes.Set(6, 7, 16, 16);
    shapes.Load();
    for (int32_t n = 0; n < s.outputs; n += 32) {
      const int32_t outputs = s.outputs - n < 32 ? s.outputs - n : 32;
      const uint32_t mask = outputs >= 32 ? 0xffffffffu : (1u << outputs) - 1;
      Args t = {};
      t.x_row_stride = s.x_row_stride;
      t.y = s.y + n;
      t.y_stride = s.y_stride;
      t.bias = s.bias != nullptr ? s.bias + n : nullptr;
      for (int32_t g = 0; g < s.groups || g == 0; g += s.block_groups) {
        t.groups = s.groups - g < s.block_groups ? s.groups - g : s.block_groups;
        t.x = s.x + g / s.block_groups * s.x_block_stride;
        t.operands = s.panels + n / 16 * s.layout.bytes + g * kTileBytes;
        t.first = g == 0;
        t.last = g + s.block_groups >= s.groups;
        for (int32_t row = begin; row < end; row += kRows) {
          if (lower > 0 && outputs > 16) {
            PlainTile<2, 2>(t, row, s.layout.bytes, sums);
          } else if (lower > 0) {
            PlainTile<2, 1>(t, row, s.layout.bytes, sums);
          } else if (outputs > 16) {
            PlainTile<1, 2>(t, row, s.layout.bytes, sums);
          } else {
            PlainTile<1, 1>(t, row, s.layout.bytes, sums);
          }
          const auto low = static_cast<__mmask16>(mask), high = static_cast<__mmask16>(mask >> 16);
          AddPlain(t, row, upper, 0, low, sums);
          if (outputs > 16) AddPlain(t, row, upper, 16, high, sums + 256);
          if (lower > 0) AddPlain(t, row + kRowsOfTile, lower, 0, low, sums + 512);
          if (lower > 0 && outputs > 16) AddPlain(t, row + kRowsOfTile, lower, 16, high, sums + 768);
        }
      }
    }
  }
}

// ---- x -----------------------------------------------------------------------------------------------------------

PHSA_INLINE uint32_t RoundToBf16(float x) {
  return static_cast<uint32_t>(_mm_cvtsi128_si32((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)))) & 0xffffu;
}

// Groups of 32 bf16, and for int4's minima, behind a block's groups, the sums of each in two words alike: its upper 8
// bits and its lower 8.
template <bool kSums>
void Convert(const float* x, int32_t cols, int32_t block_groups, uint8_t* out, int64_t block_stride) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int32_t c = 0; c < cols; out += block_stride) {
    uint8_t* to = out;
    uint8_t* sums = out + block_groups * 64;
    if (kSums) _mm512_storeu_si512(sums, _mm512_setzero_si512());
    for (int32_t g = 0; g < block_groups && c < cols; ++g, to += 64, c += 32) {
      const HalfMasks masks = MasksOf(cols - c);
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(masks.high, x + c + 16),
                                                        _mm512_maskz_loadu_ps(masks.low, x + c));
      _mm512_storeu_si512(to, both);
      if (!kSums) continue;
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
      const float sum = _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
      const uint32_t high = RoundToBf16(sum);
      const uint32_t high_bits = high << 16;
      float rounded;
      __builtin_memcpy(&rounded, &high_bits, 4);
      const uint32_t word = high | RoundToBf16(sum - rounded) << 16;
      __builtin_memcpy(sums + g * 8, &word, 4);
      __builtin_memcpy(sums + g * 8 + 4, &word, 4);
    }
  }
}

template <WeightType kWeights>
void Set(Kernels* kernels, int block_groups, int group_bytes, size_t scratch,
         void (*convert)(const float*, int32_t, int32_t, uint8_t*, int64_t), void (*multiply)(const Share&)) {
  Product& product = kernels->products[static_cast<int>(kWeights)][static_cast<int>(ActivationType::kBf16)];
  product = {block_groups, group_bytes, scratch, convert, multiply};
  product.row_align = 64;
  product.tile_rows = kRowsOfTile;
}

}  // namespace

void AddAmx(Kernels* kernels) {
  Set<WeightType::kInt4>(kernels, kBlockGroups, 72, kPanels * kPanelBytes, &Convert<true>, &Multiply<Int4>);
  Set<WeightType::kInt8>(kernels, kBlockGroups, 64, kPanels * kPanelBytes, &Convert<false>, &Multiply<Int8>);
  Set<WeightType::kInt6>(kernels, kBlockGroups, 64, kPanels * kPanelBytes, &Convert<false>, &Multiply<Int6>);
  Set<WeightType::kBf16>(kernels, kPlainBlockGroups, 64, 0, &Convert<false>, &MultiplyPlain);
}

}  // namespace phsa::ops

#else

namespace phsa::ops {
void AddAmx(Kernels*) {}
}  // namespace phsa::ops

#endif
