// The inner loops of the operations, one table per SIMD target.
//
// A matrix is stored in panels of 16 rows. A panel's codes are words of 32 bits, [word][16]: word w of the 16 rows lies
// in 64 bytes side by side, so one vector holds the same columns of 16 rows, whatever the vector's length. A word holds
//   f32   column w;
//   bf16  columns 2w, 2w+1, from the low half up;
//   int8  columns 4w to 4w+3, from the low byte up, each plus 128: what vpdpbusd takes;
//   int4  columns 8w to 8w+7: the four bytes hold columns 0, 4, 1, 5 in their low and 2, 6, 3, 7 in their high halves.
//   So
//         the low (or high) halves of all bytes are one operand of vpdpbusd, and shifts by 0, 4, 8, 12 bring columns
//         (0, 1), (2, 3), (4, 5), (6, 7) into the low bits of the 16-bit halves, where one table look-up makes them
//         bf16.
// Groups of 32 columns have f16 scales, and int4 minima, times a power of two of the row (`factors`), which keeps them
// far from both ends of f16's range:  w = factor · (scale · code + minimum).
//   int8 panel  scales [groups][16], then, at a multiple of 64 bytes, the codes
//   int4 panel  scales and minima [groups][2][16], then the codes
// int6 has groups of 16 columns, 12 bytes of codes each: two words as int4's with the low four bits of columns 0 to 7
// and 8 to 15, then one with the two high bits of all. Where the int4 words have column c in the low (high) half of
// byte k of word l, that one has them in its byte k, from bit 4 l (4 l + 2) up.
//   int6 panel  scales [2 groups][16], then the codes;  w = factor · scale · (code - 32)
//
// Every product sums in one order, with one accumulator for each result: over words, or within a group and then over
// groups. How many rows or panels a call takes therefore changes no bit of any result.
#ifndef PHSA_OPS_CPU_KERNELS_H_
#define PHSA_OPS_CPU_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "ops/linear.h"

namespace phsa::ops {

inline constexpr int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline constexpr int32_t NumGroups(int32_t cols) { return (cols + kWeightGroup - 1) / kWeightGroup; }

// Where things lie in a panel, in bytes.
struct PanelLayout {
  int64_t codes, bytes;
};
inline constexpr PanelLayout LayoutOf(WeightType type, int32_t cols) {
  const int64_t groups = NumGroups(cols), group_codes = int64_t{kWeightGroup} * kPanelRows;
  switch (type) {
    case WeightType::kF32: return {0, int64_t{cols} * kPanelRows * 4};
    case WeightType::kBf16: return {0, groups * group_codes * 2};
    case WeightType::kInt8: {
      const int64_t scales = RoundUp(groups * kPanelRows * 2, 64);
      return {scales, scales + groups * group_codes};
    }
    case WeightType::kInt6: {
      const int64_t scales = 2 * groups * kPanelRows * 2;
      return {scales, scales + 2 * groups * 3 * 4 * kPanelRows};
    }
    case WeightType::kInt4: return {groups * kPanelRows * 4, groups * (kPanelRows * 4 + group_codes / 2)};
  }
  return {0, 0};
}

// One task's share of a product: some panels by some rows of x.
struct Share {
  const uint8_t* panels;
  PanelLayout layout;
  const float* factors;  // [outputs], int8, int4 and int6
  const float* bias;     // [outputs] or null
  int32_t outputs;       // rows of W: the last panel may be partly used
  int32_t cols, groups;
  // Blocks of so many groups of x: group g of row r lies at
  //   x + g / block_groups · x_block_stride + r · x_row_stride + g % block_groups · Product::group_bytes.
  int32_t block_groups;
  const uint8_t* x;
  int64_t x_row_stride, x_block_stride;
  int32_t m;
  float* y;
  int64_t y_stride;
  uint8_t* scratch;  // Product::scratch_bytes, aligned to 64
};

// How one type of weights is multiplied with one type of activations. x is converted block by block of columns, so that
// a block of many rows is one stretch of memory, and a block of a panel stays in the nearest cache while all rows of x
// pass by it.
struct Product {
  int32_t max_block_groups;
  int32_t group_bytes;   // of 32 columns of one row of x
  size_t scratch_bytes;  // of one thread
  // Converts a row, with zeros behind its columns up to a whole group, into blocks `block_stride` bytes apart. Null: x
  // is used as it is.
  void (*convert)(const float* x, int32_t cols, int32_t block_groups, uint8_t* out, int64_t block_stride);
  void (*multiply)(const Share& share);
  int32_t row_align = 1;  // a block of a row takes a multiple of so many bytes
  int32_t tile_rows = 6;  // rows of x that go by together
};

// 32 columns of a row of x as the integer instructions take them.
struct Int8Group {
  int8_t codes[kWeightGroup];  // for int4 weights in the order in which the halves of their words hold columns
  float scale;
  float sum;      // scale · sum of codes, for int4's minima
  int32_t start;  // -128 · sum of codes, for int8's offset
};

struct Kernels {
  // [weights][activations]; multiply is null where the pair is not allowed.
  Product products[5][3];
  ProductSupport fast;

  // Product::convert to Int8Group.
  void (*convert_to_int8)(const float* x, int32_t cols, int32_t block_groups, uint8_t* out, int64_t block_stride);
  void (*convert_to_int8_for_int4)(const float* x, int32_t cols, int32_t block_groups, uint8_t* out,
                                   int64_t block_stride);

  float (*sum_of_squares)(const float* x, int32_t n);
  void (*scale_by)(const float* x, float factor, const float* weight, int32_t n, float* out);  // x · factor · weight
  void (*add)(float* x, const float* y, int32_t n);                                            // x += y
  void (*silu_mul)(const float* gate, const float* up, int32_t n, float* out);
  void (*gelu_mul)(const float* gate, const float* up, int32_t n, float* out);
  void (*clamped_swiglu)(const float* gate, const float* up, int32_t n, float alpha, float limit, float* out);
  // (x[i], x[i + half]) turned; out [2 half] may be x.
  void (*rotate)(const float* x, const float* cos, const float* sin, int32_t half, float* out);
  // x becomes H · x, in blocks of the largest power of two that divides n, where H is orthogonal and its elements are
  // of one size (a Hadamard matrix, its rows in some order): products with another row that is mixed so stay what they
  // are.
  void (*mix)(float* x, int32_t n);
  void (*to_f32)(const void* x, int32_t dtype, int32_t n, float* out);
  void (*from_f32)(const float* x, int32_t dtype, int32_t n, void* out);
  // A row as 8-bit codes; returns their scale as the bits of bf16 (base/dtype.h).
  uint16_t (*to_codes)(const float* x, int32_t n, int8_t* codes);
};

// 16 columns of one, for int6 weights: in the order of their words, too.
struct Int8HalfGroup {
  int8_t codes[kInt6Group];
  float scale;
  int32_t start;  // -32 · sum of codes
};

// Those of the target in use (base/simd.h); with the attention's reference the best.
const Kernels& ActiveKernels();

// Replace entries of the table of a target by those of the files with instructions that Highway 1.0 lacks, for CPUs
// that have them; in builds that lack them nothing.
void AddAvx2(Kernels* kernels);
void AddAvx512Vnni(Kernels* kernels);
void AddAvx512Bf16(Kernels* kernels);
void AddAmx(Kernels* kernels);

}  // namespace phsa::ops

#endif  // PHSA_OPS_CPU_KERNELS_H_
