// Dot products and weighted sums of bf16 pairs on matrix tiles (AMX): 16 rows × 16 keys over 32 channels an
// instruction. Panels and values lie as it wants its second operand. Its order of summation is its own (the even and
// the odd elements of 16 words apart), so that tiles serve every number of rows, one included.
#include "attention/cpu/kernels.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)

#include <immintrin.h>

namespace phsa::cpu {
namespace {

#include "base/amx-inl.h"

constexpr int kRows = 16, kWords = 16;
constexpr int kMaxWords = 256;  // of a row that is copied: rep_width of quest's bounds, a chunk of keys

// Rows at any places as rows that are `stride` bytes apart, at most 16: where they lie, if they lie so.
struct Rows {
  const char* at;
  int64_t stride;
};

Rows InLine(const void* const* rows, int count) {
  const auto* first = static_cast<const char*>(rows[0]);
  const int64_t stride = count > 1 ? static_cast<const char*>(rows[1]) - first : 64;
  for (int r = 2; r < count; ++r) {
    if (static_cast<const char*>(rows[r]) - first != r * stride) return {nullptr, 0};
  }
  return {first, stride};
}

Rows Gather(const void* const* rows, int count, int words, uint32_t* copy) {
  const Rows in_line = InLine(rows, count);
  if (in_line.at != nullptr) return in_line;
  for (int r = 0; r < count; ++r) {
    const auto* from = static_cast<const char*>(rows[r]);
    uint32_t* const to = copy + r * words;
    for (int w = 0; w < words; w += 16) {
      const int left = words - w;
      const __mmask16 mask = static_cast<__mmask16>(left >= 16 ? 0xffffu : (1u << left) - 1);
      _mm512_mask_storeu_epi32(to + w, mask, _mm512_maskz_loadu_epi32(mask, from + 4 * w));
    }
  }
  return {reinterpret_cast<const char*>(copy), int64_t{4} * words};
}

// tmm0, 1: sums; 2: rows; 4, 5: operands. 3, 6 and 7: the same for the last words, if fewer than `step`.
void Shape(TileShapes& shapes, int rows, int step, int rest) {
  shapes.Set(0, 1, rows, 16);
  if (rest == 0) rest = step;  // not used
  shapes.Set(2, 2, rows, step);
  shapes.Set(3, 3, rows, rest);
  shapes.Set(4, 5, step, 16);
  shapes.Set(6, 7, rest, 16);
  shapes.Load();
}

// The sums in tmm0 and, with `two`, tmm1 += rows · operands: row w of an operand is its 16 columns of word w.
template <bool kTwo>
inline __attribute__((always_inline)) void Add(Rows a, int words, int step, const uint32_t* b, const uint32_t* second,
                                               int64_t b_stride) {
  const int64_t b_bytes = 4 * b_stride;
  int w = 0;
  for (; w + step <= words; w += step) {
    PHSA_TILE_LOAD(2, a.at + 4 * w, a.stride);
    PHSA_TILE_LOAD(4, b + w * b_stride, b_bytes);
    PHSA_TILE_BF16(0, 2, 4);
    if constexpr (kTwo) {
      PHSA_TILE_LOAD(5, second + w * b_stride, b_bytes);
      PHSA_TILE_BF16(1, 2, 5);
    }
  }
  if (w == words) return;
  PHSA_TILE_LOAD(3, a.at + 4 * w, a.stride);
  PHSA_TILE_LOAD(6, b + w * b_stride, b_bytes);
  PHSA_TILE_BF16(0, 3, 6);
  if constexpr (kTwo) {
    PHSA_TILE_LOAD(7, second + w * b_stride, b_bytes);
    PHSA_TILE_BF16(1, 3, 7);
  }
}

void CopyRows(const float* from, int64_t from_stride, int rows, float* const* to, int64_t column) {
  for (int r = 0; r < rows; ++r) _mm512_storeu_ps(to[r] + column, _mm512_loadu_ps(from + r * from_stride));
}

void Dot(const uint32_t* const* a, int rows, const uint32_t* panels, int num_panels, int words, float* const* c) {
  alignas(64) uint32_t copy[kRows * kMaxWords];
  alignas(64) float sums[2 * kRows * 16];
  const int64_t panel = int64_t{words} * kPanel;
  TileShapes shapes;
  for (int first = 0; first < rows; first += kRows) {
    const int n = rows - first < kRows ? rows - first : kRows;
    if (first == 0 || n < kRows) Shape(shapes, n, kWords, words % kWords);
    const Rows x = Gather(reinterpret_cast<const void* const*>(a + first), n, words, copy);
    const Rows to = InLine(reinterpret_cast<const void* const*>(c + first), n);
    auto* const out = const_cast<char*>(to.at);
    for (int p = 0; p < num_panels; p += 2) {
      const bool two = p + 1 < num_panels;
      const uint32_t* const b = panels + p * panel;
      PHSA_TILE_ZERO(0);
      if (two) {
        PHSA_TILE_ZERO(1);
        Add<true>(x, words, kWords, b, b + panel, kPanel);
      } else {
        Add<false>(x, words, kWords, b, nullptr, kPanel);
      }
      if (out != nullptr) {
        PHSA_TILE_STORE(0, out + 64 * p, to.stride);
        if (two) PHSA_TILE_STORE(1, out + 64 * (p + 1), to.stride);
        continue;
      }
      PHSA_TILE_STORE(0, sums, 64);
      CopyRows(sums, 16, n, c + first, p * 16);
      if (!two) continue;
      PHSA_TILE_STORE(1, sums + 256, 64);
      CopyRows(sums + 256, 16, n, c + first, p * 16 + 16);
    }
  }
}

void Accumulate(const uint32_t* const* p, int rows, int words, int step, const uint32_t* values, int64_t stride,
                int columns, float* const* o) {
  alignas(64) uint32_t copy[kRows * kMaxWords];
  alignas(64) float sums[2 * kRows * 16];
  TileShapes shapes;
  for (int first = 0; first < rows; first += kRows) {
    const int n = rows - first < kRows ? rows - first : kRows;
    if (first == 0 || n < kRows) Shape(shapes, n, step, words % step);
    const Rows x = Gather(reinterpret_cast<const void* const*>(p + first), n, words, copy);
    const Rows to = InLine(reinterpret_cast<const void* const*>(o + first), n);
    for (int c = 0; c < columns; c += 32) {
      const bool two = c + 16 < columns;
      char* out = const_cast<char*>(to.at) + 4 * c;
      char* second = out + 64;
      int64_t out_stride = to.stride;
      if (to.at == nullptr) {
        for (int r = 0; r < n; ++r) {
          _mm512_store_ps(sums + r * 16, _mm512_loadu_ps(o[first + r] + c));
          if (two) _mm512_store_ps(sums + 256 + r * 16, _mm512_loadu_ps(o[first + r] + c + 16));
        }
        out = reinterpret_cast<char*>(sums);
        second = reinterpret_cast<char*>(sums + 256);
        out_stride = 64;
      }
      PHSA_TILE_LOAD(0, out, out_stride);
      if (two) {
        PHSA_TILE_LOAD(1, second, out_stride);
        Add<true>(x, words, step, values + c, values + c + 16, stride);
        PHSA_TILE_STORE(1, second, out_stride);
      } else {
        Add<false>(x, words, step, values + c, nullptr, stride);
      }
      PHSA_TILE_STORE(0, out, out_stride);
      if (to.at != nullptr) continue;
      CopyRows(sums, 16, n, o + first, c);
      if (two) CopyRows(sums + 256, 16, n, o + first, c + 16);
    }
  }
}

}  // namespace

const Products* AmxProducts() {
  const Products* without = Avx512Bf16Products();
  if (without == nullptr) return nullptr;
  static const Products products = [without] {
    Products tiles = *without;
    tiles.dot = &Dot;
    tiles.accumulate = &Accumulate;
    return tiles;
  }();
  return &products;
}

}  // namespace phsa::cpu

#else

namespace phsa::cpu {
const Products* AmxProducts() { return nullptr; }
}  // namespace phsa::cpu

#endif
