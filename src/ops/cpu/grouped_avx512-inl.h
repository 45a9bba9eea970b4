// Products of int8 and int4 weights on AVX-512: what the files for bf16 and for 8-bit integer instructions share. To be
// included inside their namespaces; each file is compiled for its own instructions. As in those files, no inline
// function of another header may be called here: the linker could keep the copy that needs AVX-512.
//
// A "format" says how codes become operands of the instruction and what is done with a group's sum:
//   Group        32 columns of a row of x, beginning with their words of 32 bits, one for each operand
//   kLoads       steps in which a panel's codes of one group are loaded
//   kGroupBytes  bytes of a panel's codes of one group
//   kOperands    operands, each one instruction's worth of columns, in what was loaded
//   Scales       how scales and minima lie, and their Reader
//   Loaded, Load(), Operand()
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
  const uint8_t* codes;   // of the first panel's group `group`
  const uint8_t* scales;  // of the first panel, from its first group on
  int32_t group;
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

// Few rows read a matrix once, from memory, where the CPU's own prefetching is not enough for codes that take many
// instructions: it stops at 4 KB, and begins anew in each panel. So they are asked for this much earlier, where a panel
// ends those of the panels that come next; scales, of which there are few, always those of the panels that come next.
// One row by 1536 × 1536 int4k, bf16 activations: 77 µs of a Zen 5 core without, 41 with, 46 into the second cache
// only; 1 and 4 KB ahead are slower. int8 codes with int8 activations are used as they lie: 70 µs without, 76 with.
constexpr int64_t kAhead = 2048;
template <int kBytes>
PHSA_INLINE void Prefetch(const uint8_t* at) {
#pragma GCC unroll 8
  for (int i = 0; i < kBytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(at + i), _MM_HINT_T0);
}

// ---- Scales ------------------------------------------------------------------------------------------------------

PHSA_INLINE __m512 LoadF16(const uint8_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

// A group's scales of 16 rows, and where kValues is 2 its minima behind them. A Reader goes over the groups of a tile:
// Begin() each, then End(). Expand() writes those of some groups as f32 in that order, what F32Scales reads.
template <int kValues>
struct F32Scales {
  static constexpr int kFloats = 16 * kValues;
  template <int kPanels>
  struct Reader {
    const uint8_t* at;
    int64_t panel;
    PHSA_INLINE explicit Reader(const TileArgs& t)
        : at(t.scales + int64_t{t.group} * kFloats * 4), panel(t.panel_scales) {}
    PHSA_INLINE void Begin() {}
    PHSA_INLINE void End() { at += kFloats * 4; }
    PHSA_INLINE __m512 Scale(int p) const { return _mm512_loadu_ps(at + p * panel); }
    PHSA_INLINE __m512 Minimum(int p) const {
      return kValues == 2 ? _mm512_loadu_ps(at + p * panel + 64) : _mm512_setzero_ps();
    }
  };
};

template <int kValues>
struct F16Scales {
  static constexpr int kFloats = 16 * kValues;
  template <int kPanels>
  struct Reader {
    const uint8_t* at;
    int64_t panel;
    PHSA_INLINE explicit Reader(const TileArgs& t)
        : at(t.scales + int64_t{t.group} * kFloats * 2), panel(t.panel_scales) {}
    PHSA_INLINE void Begin() {
      if constexpr (kPanels == kTilePanelsFewRows) {
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) Prefetch<kFloats * 2>(at + (p + kPanels) * panel);
      }
    }
    PHSA_INLINE void End() { at += kFloats * 2; }
    PHSA_INLINE __m512 Scale(int p) const { return LoadF16(at + p * panel); }
    PHSA_INLINE __m512 Minimum(int p) const {
      return kValues == 2 ? LoadF16(at + p * panel + 32) : _mm512_setzero_ps();
    }
  };
  static PHSA_INLINE void Expand(const uint8_t* scales, int32_t first, int32_t groups, float* out) {
    scales += int64_t{first} * kFloats * 2;
    for (int32_t i = 0; i < groups * kValues; ++i) _mm512_storeu_ps(out + i * 16, LoadF16(scales + i * 32));
  }
};

// Scales of two levels become f32 for all groups of a factor at once: kGroups of them in kBytes.
template <class Super>
struct TwoLevels {
  static constexpr int kFloats = Super::kFloats;
  template <int kPanels>
  struct Reader {
    alignas(64) float values[kPanels][Super::kGroups * kFloats];
    const uint8_t* at;
    int64_t panel;
    int32_t group;
    PHSA_INLINE explicit Reader(const TileArgs& t)
        : at(t.scales + int64_t{t.group / Super::kGroups} * Super::kBytes),
          panel(t.panel_scales),
          group(t.group % Super::kGroups) {
      if (t.groups > 0) Next();
    }
    PHSA_INLINE void Next() {
      for (int p = 0; p < kPanels; ++p) {
        Super::Expand(at + p * panel, values[p]);
        if constexpr (kPanels == kTilePanelsFewRows) Prefetch<Super::kBytes>(at + (p + kPanels) * panel);
      }
      at += Super::kBytes;
    }
    PHSA_INLINE void Begin() {
      if (group < Super::kGroups) return;
      group = 0;
      Next();
    }
    PHSA_INLINE void End() { ++group; }
    PHSA_INLINE __m512 Scale(int p) const { return _mm512_load_ps(values[p] + group * kFloats); }
    PHSA_INLINE __m512 Minimum(int p) const {
      return kFloats == 32 ? _mm512_load_ps(values[p] + group * kFloats + 16) : _mm512_setzero_ps();
    }
  };
  static PHSA_INLINE void Expand(const uint8_t* scales, int32_t first, int32_t groups, float* out) {
    alignas(64) float values[Super::kGroups * kFloats];
    for (int32_t g = first; g < first + groups; ++g, out += kFloats) {
      const int32_t in = g % Super::kGroups;
      if (in == 0 || g == first) Super::Expand(scales + int64_t{g / Super::kGroups} * Super::kBytes, values);
      for (int i = 0; i < kFloats; i += 16) _mm512_storeu_ps(out + i, _mm512_load_ps(values + in * kFloats + i));
    }
  }
};

PHSA_INLINE __m512 ByteScales(const uint8_t* at, __m512 factor) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), factor);
}

struct SuperOfSixBits {
  static constexpr int kGroups = 8, kFloats = 32, kBytes = kSuperBytes;
  static PHSA_INLINE void Expand(const uint8_t* super, float* out) {
    const __m512i nibble = _mm512_set1_epi8(15), upper = _mm512_set1_epi8(0x30);
    const __m512i high = _mm512_loadu_si512(super + 192);
    alignas(64) uint8_t scales[128], mins[128];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512i low = _mm512_loadu_si512(super + 64 + 64 * i);
      const __m512i high_scale = i == 0 ? _mm512_slli_epi16(high, 4) : high;
      const __m512i high_min = i == 0 ? _mm512_slli_epi16(high, 2) : _mm512_srli_epi16(high, 2);
      // The low bits of the one, the others of the other.
      const __m512i scale = _mm512_ternarylogic_epi32(nibble, low, _mm512_and_si512(high_scale, upper), 0xca);
      const __m512i min =
          _mm512_ternarylogic_epi32(nibble, _mm512_srli_epi16(low, 4), _mm512_and_si512(high_min, upper), 0xca);
      _mm512_store_si512(scales + 64 * i, scale);
      _mm512_store_si512(mins + 64 * i, min);
    }
    const __m512 factor = LoadF16(super), min_factor = LoadF16(super + 32);
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
      _mm512_storeu_ps(out + g * 32, ByteScales(scales + g * 16, factor));
      _mm512_storeu_ps(out + g * 32 + 16, ByteScales(mins + g * 16, min_factor));
    }
  }
};

struct SuperOfInt6 {
  static constexpr int kGroups = 16, kFloats = 16, kBytes = kSuperBytesInt6;
  static PHSA_INLINE void Expand(const uint8_t* super, float* out) {
    const __m512 factor = LoadF16(super);
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(super + 32 + g * 16));
      _mm512_storeu_ps(out + g * 16, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), factor));
    }
  }
};

using SixBitScales = TwoLevels<SuperOfSixBits>;
using Int6Scales = TwoLevels<SuperOfInt6>;

// ---- Codes of 5 and 6 bits ---------------------------------------------------------------------------------------

// int5 codes of one step: the low four bits of eight columns, and the fifth ones, those of the step's first two
// operands of bytes in bits 0 and 1 of their byte.
struct Int5Codes {
  __m512i low, high;
  static PHSA_INLINE Int5Codes Load(const uint8_t* codes, int word) {
    return {_mm512_loadu_si512(codes + word * 64),
            _mm512_srl_epi16(_mm512_loadu_si512(codes + 256), _mm_cvtsi32_si128(2 * word))};
  }
};

// int6 codes of one step: the low four bits of eight columns, and two high bits, those of the step's first operand from
// bit 0 of their byte up.
struct Int6Codes {
  __m512i low, high;
  static PHSA_INLINE Int6Codes Load(const uint8_t* codes, int word) {
    const __m512i high = _mm512_loadu_si512(codes + 128);
    return {_mm512_loadu_si512(codes + word * 64), word == 0 ? high : _mm512_srli_epi16(high, 4)};
  }
};

// ---- Tiles -------------------------------------------------------------------------------------------------------

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
  typename Format::Scales::template Reader<kPanels> scales(t);
  const int64_t next_block = t.x_block_stride - t.block_groups * static_cast<int64_t>(sizeof(Group));
  [[maybe_unused]] const int64_t next_panels =
      kPanels * t.panel_codes - t.groups * static_cast<int64_t>(Format::kGroupBytes);
  for (int32_t left = t.groups; left > 0;) {
    for (int32_t stop = left < t.block_groups ? 0 : left - t.block_groups; left > stop; --left) {
      scales.Begin();
      if constexpr (kRows <= kFewRows && kPanels == kTilePanelsFewRows && Format::kOperands > 1) {
        const int64_t ahead = left * Format::kGroupBytes > kAhead ? kAhead : kAhead + next_panels;
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) Prefetch<Format::kGroupBytes>(codes + p * t.panel_codes + ahead);
      }
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
        const __m512 scale = scales.Scale(p), minimum = scales.Minimum(p);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          acc[r][p] = Format::Finish(acc[r][p], sum[r][p], scale, minimum, reinterpret_cast<const Group*>(x[r]));
        }
      }
      x.Advance(sizeof(Group));
      codes += Format::kGroupBytes;
      scales.End();
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
      t.scales = panel;
      t.group = g;
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

// Operands and scales of `groups` groups from group `first` on: codes as what the instruction takes, scales as f32.
template <class Direct>
PHSA_INLINE void ExpandGroups(const uint8_t* codes, const uint8_t* scales, int32_t first, int32_t groups, uint8_t* out,
                              float* out_scales) {
  Direct::Scales::Expand(scales, first, groups, out_scales);
  codes += int64_t{first} * Direct::kGroupBytes;
  const Direct format;
  for (int32_t g = 0; g < groups; ++g, codes += Direct::kGroupBytes) {
    for (int load = 0; load < Direct::kLoads; ++load) {
      const typename Direct::Loaded loaded = Direct::Load(codes, load);
#pragma GCC unroll 4
      for (int i = 0; i < Direct::kOperands; ++i, out += 64) _mm512_storeu_si512(out, format.Operand(loaded, i));
    }
  }
}

// By way of scratch memory, into which ExpandGroups writes the operands of a block's groups, with scales as f32, once
// for all rows of x.
template <class Direct, class Expanded>
void MultiplyExpanded(const Share& s) {
  constexpr int kStep = kTilePanels * 16;
  const int64_t panel_codes = int64_t{s.block_groups} * Expanded::kGroupBytes;
  const int64_t panel_scales = int64_t{s.block_groups} * Expanded::Scales::kFloats * 4;
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
        ExpandGroups<Direct>(panel + s.layout.codes, panel, g, t.groups, codes + p * panel_codes,
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
  return kTilePanels * static_cast<size_t>(max_block_groups) * (Expanded::kGroupBytes + Expanded::Scales::kFloats * 4);
}

// Which of a group's 32 columns there are.
struct HalfMasks {
  __mmask16 low, high;
};
PHSA_INLINE HalfMasks MasksOf(int32_t left) {
  const uint32_t all = left >= 32 ? 0xffffffffu : (1u << left) - 1;
  return {static_cast<__mmask16>(all), static_cast<__mmask16>(all >> 16)};
}
