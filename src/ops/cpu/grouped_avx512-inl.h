// Products of int8 and int4 weights on AVX-512: what the files for bf16 and for 8-bit integer instructions share. To be
// included inside their namespaces; each file is compiled for its own instructions. As in those files, no inline
// function of another header may be called here: the linker could keep the copy that needs AVX-512.
//
// A "format" says how codes become operands of the instruction and what is done with a group's sum:
//   Group        32 columns of a row of x, beginning with their words of 32 bits, one for each operand
//   kLoads       steps in which a panel's codes of one group are loaded
//   kGroupBytes  bytes of a panel's codes of one group
//   kOperands    operands, each one instruction's worth of columns, in what was loaded
//   kScaleBytes  bytes of a panel's scales of one group
//   Loaded, Load(), Operand(), Scale(), Minimum()
//   Start(), Dot(), Finish()  the sum of a group: from nothing, plus a word, and into the sum over groups

#define PHSA_INLINE inline __attribute__((always_inline))

// Up to 6 rows × 2 panels or 3 rows × 4: 12 sums of the group, 12 over groups, 4 operands or loaded words, a broadcast
// and a table: 30 of 32 registers. One row alone takes 4 panels as well: four streams from memory instead of two, 34
// instead of 28 GB/s.
constexpr int kTileRows = 6;
constexpr int kFewRows = 3;
constexpr int kTilePanels = 2;
constexpr int kTilePanelsFewRows = 4;

// What the tiles of some panels have in common.
struct TileArgs {
  const uint8_t* codes;  // of the first panel's first group
  const uint8_t* scales;
  int64_t panel_codes, panel_scales;  // bytes to the next panel
  int32_t groups, block_groups;
  const uint8_t* x;
  int64_t x_row_stride, x_block_stride;
  float* y;
  int64_t y_stride;
  bool first, last;     // of the blocks: before the last one, y keeps partial sums
  const float* factor;  // or null: one
  const float* bias;    // or null: zero
  __mmask16 last_mask;  // of the last panel's rows, those that the matrix has

  // Groups [g, g + block), as many as there are; g is the first of a block of x.
  PHSA_INLINE void SetBlock(const Share& s, int32_t g, int32_t block) {
    groups = s.groups - g < block ? s.groups - g : block;
    first = g == 0;
    last = g + block >= s.groups;
    x = s.x + (g > 0 ? g / s.block_groups : 0) * s.x_block_stride;
  }
};

PHSA_INLINE __m512i Broadcast32(const uint8_t* at) {
  int32_t word;
  __builtin_memcpy(&word, at, 4);
  return _mm512_set1_epi32(word);
}

// Rows of x, a stride apart, by two pointers and that stride: with a pointer for each row GCC 12 runs out of registers
// and moves operands through the stack.
struct RowPointers {
  const uint8_t *even, *odd;
  int64_t stride;
  PHSA_INLINE RowPointers(const uint8_t* x, int64_t row_stride) : even(x), odd(x + row_stride), stride(row_stride) {
    asm("" : "+r"(odd));  // or it would be found out to be even + stride, and become many pointers again
  }
  PHSA_INLINE const uint8_t* operator[](int r) const { return (r % 2 == 0 ? even : odd) + r / 2 * 2 * stride; }
  PHSA_INLINE void Advance(int64_t bytes) {
    even += bytes;
    odd += bytes;
  }
};

// The sums of a tile, from nothing or from what y holds of earlier blocks, and back.
template <int kRows, int kPanels>
PHSA_INLINE void LoadSums(const TileArgs& t, int32_t row, __m512 (&acc)[kRows][kPanels]) {
  const float* y = t.y + row * t.y_stride;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r, y += t.y_stride) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const __mmask16 mask = p + 1 == kPanels ? t.last_mask : static_cast<__mmask16>(0xffff);
      acc[r][p] = t.first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, y + p * 16);
    }
  }
}

template <int kRows, int kPanels>
PHSA_INLINE void StoreSums(const TileArgs& t, int32_t row, __m512 (&acc)[kRows][kPanels]) {
  if (t.last) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const __mmask16 mask = p + 1 == kPanels ? t.last_mask : static_cast<__mmask16>(0xffff);
      const __m512 factor = t.factor != nullptr ? _mm512_maskz_loadu_ps(mask, t.factor + p * 16) : _mm512_set1_ps(1);
      const __m512 bias = t.bias != nullptr ? _mm512_maskz_loadu_ps(mask, t.bias + p * 16) : _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) acc[r][p] = _mm512_add_ps(_mm512_mul_ps(acc[r][p], factor), bias);
    }
  }
  float* y = t.y + row * t.y_stride;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r, y += t.y_stride) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const __mmask16 mask = p + 1 == kPanels ? t.last_mask : static_cast<__mmask16>(0xffff);
      _mm512_mask_storeu_ps(y + p * 16, mask, acc[r][p]);
    }
  }
}

template <class Format, int kRows, int kPanels>
__attribute__((noinline)) void Tile(const TileArgs& t, int32_t row) {
  using Group = typename Format::Group;
  const Format format;
  __m512 acc[kRows][kPanels];
  RowPointers x(t.x + row * t.x_row_stride, t.x_row_stride);
  LoadSums(t, row, acc);
  const uint8_t* codes = t.codes;
  const uint8_t* scales = t.scales;
  const int64_t next_block = t.x_block_stride - t.block_groups * static_cast<int64_t>(sizeof(Group));
  for (int32_t left = t.groups; left > 0;) {
    for (int32_t stop = left < t.block_groups ? 0 : left - t.block_groups; left > stop; --left) {
      typename Format::Sum sum[kRows][kPanels];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) sum[r][p] = Format::Start(reinterpret_cast<const Group*>(x[r]));
      }
#pragma GCC unroll 1
      for (int load = 0; load < Format::kLoads; ++load) {
        typename Format::Loaded loaded[kPanels];
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) loaded[p] = Format::Load(codes + p * t.panel_codes, load);
#pragma GCC unroll 4
        for (int i = 0; i < Format::kOperands; ++i) {
          __m512i operand[kPanels];
#pragma GCC unroll 4
          for (int p = 0; p < kPanels; ++p) operand[p] = format.Operand(loaded[p], i);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const __m512i e = Broadcast32(x[r] + (load * Format::kOperands + i) * 4);
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) sum[r][p] = Format::Dot(sum[r][p], operand[p], e);
          }
        }
      }
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        const __m512 scale = Format::Scale(scales + p * t.panel_scales);
        const __m512 minimum = Format::Minimum(scales + p * t.panel_scales);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          acc[r][p] = Format::Finish(acc[r][p], sum[r][p], scale, minimum, reinterpret_cast<const Group*>(x[r]));
        }
      }
      x.Advance(sizeof(Group));
      codes += Format::kGroupBytes;
      scales += Format::kScaleBytes;
    }
    x.Advance(next_block);
  }
  StoreSums(t, row, acc);
}

// All rows in tiles of nearly equal height.
template <class Format, int kPanels>
void TileRows(const TileArgs& t, int32_t m) {
  constexpr int kMost = kPanels > kTilePanels ? kFewRows : kTileRows;
  const int32_t tiles = (m + kMost - 1) / kMost;
  int32_t row = 0;
  for (int32_t i = 0; i < tiles; ++i) {
    const int32_t rows = (m - row + (tiles - i) - 1) / (tiles - i);
    if constexpr (kPanels <= kTilePanels) {
      if (rows == 4) Tile<Format, 4, kPanels>(t, row);
      if (rows == 5) Tile<Format, 5, kPanels>(t, row);
      if (rows == 6) Tile<Format, 6, kPanels>(t, row);
    }
    if (rows == 1) Tile<Format, 1, kPanels>(t, row);
    if (rows == 2) Tile<Format, 2, kPanels>(t, row);
    if (rows == 3) Tile<Format, 3, kPanels>(t, row);
    row += rows;
  }
}

PHSA_INLINE TileArgs ArgsOf(const Share& s, int32_t n, int panels, int32_t outputs) {
  TileArgs t = {};
  t.block_groups = s.block_groups;
  t.x = s.x;
  t.x_row_stride = s.x_row_stride;
  t.x_block_stride = s.x_block_stride;
  t.y = s.y + n;
  t.y_stride = s.y_stride;
  t.factor = s.factors != nullptr ? s.factors + n : nullptr;
  t.bias = s.bias != nullptr ? s.bias + n : nullptr;
  t.last_mask = static_cast<__mmask16>(0xffffu >> (panels * 16 - outputs));
  return t;
}

// From the matrix as it lies in memory. Rows of one tile take all columns at once; more go block by block, so that a
// block of x stays in the second cache while all panels pass by.
template <class Format>
void MultiplyDirect(const Share& s) {
  const int most = s.m <= kFewRows ? kTilePanelsFewRows : kTilePanels;
  const int32_t block = s.m <= kTileRows ? s.groups : s.block_groups;
  for (int32_t g = 0; g < s.groups || g == 0; g += block) {
    for (int32_t n = 0; n < s.outputs; n += most * 16) {
      const int32_t outputs = s.outputs - n < most * 16 ? s.outputs - n : most * 16;
      const int panels = (outputs + 15) / 16;
      const uint8_t* const panel = s.panels + n / 16 * s.layout.bytes;
      TileArgs t = ArgsOf(s, n, panels, outputs);
      t.SetBlock(s, g, block);
      t.codes = panel + s.layout.codes + int64_t{g} * Format::kGroupBytes;
      t.scales = panel + int64_t{g} * Format::kScaleBytes;
      t.panel_codes = t.panel_scales = s.layout.bytes;
      switch (panels) {
        case 1: TileRows<Format, 1>(t, s.m); break;
        case 2: TileRows<Format, 2>(t, s.m); break;
        case 3: TileRows<Format, 3>(t, s.m); break;
        default: TileRows<Format, 4>(t, s.m); break;
      }
    }
  }
}

// By way of scratch memory, into which Direct::Expand writes the operands of a block's groups, with scales as f32, once
// for all rows of x.
template <class Direct, class Expanded>
void MultiplyExpanded(const Share& s) {
  constexpr int kStep = kTilePanels * 16;
  const int64_t panel_codes = int64_t{s.block_groups} * Expanded::kGroupBytes;
  const int64_t panel_scales = int64_t{s.block_groups} * Expanded::kScaleBytes;
  uint8_t* const codes = s.scratch;
  uint8_t* const scales = s.scratch + kTilePanels * panel_codes;
  for (int32_t g = 0; g < s.groups || g == 0; g += s.block_groups) {
    for (int32_t n = 0; n < s.outputs; n += kStep) {
      const int32_t outputs = s.outputs - n < kStep ? s.outputs - n : kStep;
      const int panels = outputs > 16 ? 2 : 1;
      TileArgs t = ArgsOf(s, n, panels, outputs);
      t.SetBlock(s, g, s.block_groups);
      for (int p = 0; p < panels; ++p) {
        const uint8_t* const panel = s.panels + (n / 16 + p) * s.layout.bytes;
        Direct::Expand(panel + s.layout.codes, panel, g, t.groups, codes + p * panel_codes,
                       reinterpret_cast<float*>(scales + p * panel_scales));
      }
      t.codes = codes;
      t.scales = scales;
      t.panel_codes = panel_codes;
      t.panel_scales = panel_scales;
      if (panels == 2) {
        TileRows<Expanded, 2>(t, s.m);
      } else {
        TileRows<Expanded, 1>(t, s.m);
      }
    }
  }
}

// Groups of 16 columns, two for each of the others.
PHSA_INLINE Share HalfGroups(const Share& s) {
  Share halves = s;
  halves.groups *= 2;
  halves.block_groups *= 2;
  return halves;
}

// int6 codes of one step: the low four bits of eight columns, and two high bits, those of the step's first operand from
// bit 0 of their byte up.
struct Int6Codes {
  __m512i low, high;
  static PHSA_INLINE Int6Codes Load(const uint8_t* codes, int word) {
    const __m512i high = _mm512_loadu_si512(codes + 128);
    return {_mm512_loadu_si512(codes + word * 64), word == 0 ? high : _mm512_srli_epi16(high, 4)};
  }
};

// Expanding pays from kExpandRows rows of x on.
template <class Direct, class Expanded, int kExpandRows>
void MultiplyEither(const Share& s) {
  if (s.m < kExpandRows) {
    MultiplyDirect<Direct>(s);
  } else {
    MultiplyExpanded<Direct, Expanded>(s);
  }
}

template <class Expanded>
constexpr size_t ScratchBytes(int max_block_groups) {
  return kTilePanels * static_cast<size_t>(max_block_groups) * (Expanded::kGroupBytes + Expanded::kScaleBytes);
}

// f16 scales (and minima, right behind) of a group, and the same as f32.
PHSA_INLINE __m512 LoadF16(const uint8_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

PHSA_INLINE void ExpandScales(const uint8_t* scales, int32_t count, float* out) {
  for (int32_t i = 0; i < count; ++i) _mm512_storeu_ps(out + i * 16, LoadF16(scales + i * 32));
}

// Which of a group's 32 columns there are.
struct HalfMasks {
  __mmask16 low, high;
};
PHSA_INLINE HalfMasks MasksOf(int32_t left) {
  const uint32_t all = left >= 32 ? 0xffffffffu : (1u << left) - 1;
  return {static_cast<__mmask16>(all), static_cast<__mmask16>(all >> 16)};
}
