// The inner loops of the CPU backend, one table per SIMD target.
//
// All products run on "words" of 32 bits: one f32, or, on CPUs with a bf16 dot product, two neighbouring bf16. So one
// driver (forward.cc, select.cc) serves both: a row of head_dim elements has head_dim / per_word words.
//
// Two layouts:
//   panel   [word][16]          16 keys (or representatives) side by side, so that one vector holds the same word of 16
//                               keys; the operand of `dot`.
//   values  [key word][column]  rows of V, one word per column; the operand of `accumulate`. For f32 it is V itself.
//
// Every sum runs in one fixed order: dots over words, accumulations over keys, both from the first to the last with one
// accumulator per result (tiles: the even and the odd elements of 16 words or a `step` first, then their sum into it).
// How many rows or panels a call takes therefore changes no bit of any result, which is what makes the attention
// independent of chunks, batches and threads.
#ifndef PHSA_ATTENTION_CPU_KERNELS_H_
#define PHSA_ATTENTION_CPU_KERNELS_H_

#include <cstdint>

#include "base/simd.h"

namespace phsa::cpu {

inline constexpr int kPanel = 16;  // keys per panel, whatever the vector length

struct Products {
  int per_word;  // elements per word: 1 (f32) or 2 (bf16)

  // dst[w][i] = word w of row i for i < rows, 0 for rows <= i < 16. src[i]: a row of `elements` elements of `dtype`.
  // per_word == 2 takes bf16 only.
  void (*pack_panel)(const void* const* src, int32_t dtype, int rows, int elements, uint32_t* dst);
  // dst[r][c] (r < rows / per_word): V as words. An odd last row is paired with zeros.
  void (*pack_values)(const void* src, int64_t stride, int32_t dtype, int rows, int columns, uint32_t* dst);
  // The same from rows of 8-bit codes, whose elements are code · scales[row] rounded to `dtype`: the words that the
  // functions above give for such rows. At most 256 elements or columns.
  void (*pack_panel_codes)(const int8_t* const* src, const float* scales, int32_t dtype, int rows, int elements,
                           uint32_t* dst);
  void (*pack_values_codes)(const int8_t* src, int64_t stride, const float* scales, int32_t dtype, int rows,
                            int columns, uint32_t* dst);
  // c[r][16 p + i] = Σ_w a[r][w] · panels[p][w][i]: rows × panels dot products. A panel has `words` · 16 words.
  void (*dot)(const uint32_t* const* a, int rows, const uint32_t* panels, int num_panels, int words, float* const* c);
  // o[r][c] += Σ_j p[r][j] · values[j][c] over `words` words of p; `stride` words between rows of values. Where an
  // instruction adds up several words before they join o, these are `step` words from a multiple of it on, 16 at most.
  void (*accumulate)(const uint32_t* const* p, int rows, int words, int step, const uint32_t* values, int64_t stride,
                     int columns, float* const* o);
  // One step of the running softmax over s[0, n), n a multiple of 16: raises *max to cover s, replaces s by
  // 2^((s - max) · factor) as words, adds their sum to *sum (after scaling it) and returns the factor by which what was
  // accumulated so far must be scaled.
  float (*softmax)(float* s, int n, float factor, float* max, float* sum);
};

struct Kernels {
  Products f32;
  const Products* bf16;  // null where the CPU has no bf16 dot product

  void (*to_f32)(const void* src, int32_t dtype, int n, float* dst);
  void (*from_f32)(const float* src, int32_t dtype, int n, void* dst);
  // dst[i] = codes[i] · scale rounded to dtype; n is a multiple of 16.
  void (*from_codes)(const int8_t* codes, float scale, int32_t dtype, int n, void* dst);
  void (*scale)(float* x, int n, float factor);
  // Adds one softmax to another: their largest scores, the sums of their exponentials beside these, and what was
  // accumulated with them.
  void (*merge)(const float* from, float from_max, float from_sum, int n, float factor, float* to, float* to_max,
                float* to_sum);
  // dst[c] = Σ_i weight[i] · src[i][c], in f32, rounded to dtype.
  void (*weighted_sum)(const void* src, int64_t stride, int32_t dtype, int rows, int columns, const float* weight,
                       void* dst);
  // dst[0, columns) = the largest value of each column, dst[columns, 2 columns) = the smallest.
  void (*bounds)(const void* src, int64_t stride, int32_t dtype, int rows, int columns, void* dst);
  // s[0, n) becomes 2^((s - max) · factor), and 0 up to the next multiple of 16; returns the sum.
  float (*exponentials)(float* s, int n, float factor);
  // group[t] = Σ_h e[h][t] · weight[h] (or the maximum over h) for t in [begin, end); NaN becomes -1, below any score.
  void (*group_scores)(const float* const* e, const float* weight, int heads, bool maximum, int begin, int end,
                       float* group);
  // s[16 p + i] is the score of part p of block i, for 16 blocks of which the first `blocks` count. max[i] becomes the
  // largest of block i's, sum[i] = Σ_p 2^((s - max[i]) · factor); -inf and 0 for blocks that do not count.
  void (*sum_parts)(const float* s, int parts, int blocks, float factor, float* max, float* sum);
  // e[t] = sum[t] · 2^((max[t] - the largest max) · factor) for t < n, 0 up to the next multiple of 16, to which max
  // and sum have room; returns the sum of e.
  float (*join_parts)(const float* max, const float* sum, int n, float factor, float* e);
  // The indices in [begin, end) of the k largest values, ties to the lower index, ascending. end - begin >= k >= 1;
  // no NaN among them. scratch: [end - begin].
  void (*top_k)(const float* values, int begin, int end, int k, int32_t* scratch, int32_t* out);
  // dst[j][c] += Σ_r p[r][j] · rows[r][c] for j < keys: the transposed product of the backward. `stride` between rows
  // of dst.
  void (*accumulate_transposed)(const float* const* p, const float* const* rows, int num_rows, int keys, int columns,
                                float* dst, int64_t stride);
  // p[j] = 2^(s[j] · factor - offset), dp[j] = p[j] · (dp[j] - delta) · scale, for j < n; s becomes p.
  void (*softmax_gradient)(float* s, float* dp, int n, float factor, float offset, float delta, float scale);
  float (*dot_product)(const float* a, const float* b, int n);
};

// Those of a target that this CPU runs (base/simd.h). Targets that bring nothing for the attention share a table.
const Kernels& KernelsOf(Simd target);
inline const Kernels& ActiveKernels() { return KernelsOf(ActiveSimd()); }

// The bf16 products of kernels_avx512bf16.cc, and the same with dot and accumulate on matrix tiles (kernels_amx.cc),
// for CPUs that have the instructions; null in builds that lack them.
const Products* Avx512Bf16Products();
const Products* AmxProducts();

inline const Products& ProductsFor(const Kernels& kernels, bool bf16) {
  return bf16 && kernels.bf16 != nullptr ? *kernels.bf16 : kernels.f32;
}

}  // namespace phsa::cpu

#endif  // PHSA_ATTENTION_CPU_KERNELS_H_
