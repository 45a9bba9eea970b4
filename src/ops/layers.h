// What a decoder layer does besides products and attention. Rows are independent: the results of a row depend on that
// row alone, to the last bit. Work is spread over the executor's threads by rows.
#ifndef PHSA_OPS_LAYERS_H_
#define PHSA_OPS_LAYERS_H_

#include <cstdint>
#include <vector>

#include "phsa/c.h"

namespace phsa {

// out[m][dim] = x / sqrt(mean(x²) + eps) · weight[dim]. In place where out = x.
void RmsNorm(const float* x, int64_t x_stride, int32_t m, int32_t dim, const float* weight, float eps, float* out,
             int64_t out_stride, const phsa_executor& executor);

// x += y, both [m][dim].
void AddRows(float* x, int64_t x_stride, const float* y, int64_t y_stride, int32_t m, int32_t dim,
             const phsa_executor& executor);

// x[m][dim] += y, then out = RmsNorm(x): one pass over the residual stream between two halves of a layer.
void AddRmsNorm(float* x, int64_t x_stride, const float* y, int64_t y_stride, int32_t m, int32_t dim,
                const float* weight, float eps, float* out, int64_t out_stride, const phsa_executor& executor);

// out[m][dim] = silu(gate) · up, silu(g) = g / (1 + e^-g). In place where out = gate.
void SiluMul(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int32_t m, int32_t dim,
             float* out, int64_t out_stride, const phsa_executor& executor);

// The same with GELU by tanh, g/2 · (1 + tanh(√(2/π) · (g + 0.044715 · g³))), in place of silu.
void GeluMul(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int32_t m, int32_t dim,
             float* out, int64_t out_stride, const phsa_executor& executor);

// gpt-oss's gate: g · sigmoid(alpha · g) · (u + 1), with g = min(gate, limit) and u = up between ±limit.
void ClampedSwiglu(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int32_t m, int32_t dim,
                   float alpha, float limit, float* out, int64_t out_stride, const phsa_executor& executor);

// x[m][dim] *= factor.
void ScaleRows(float* x, int64_t x_stride, int32_t m, int32_t dim, float factor, const phsa_executor& executor);

// cos_sin[m][2][half]: factor · cos and factor · sin of positions[r] · frequencies[i], in double precision before they
// are rounded to f32. The layers of a model share one table per step: sin and cos of m × half angles cost more than
// turning. factor: YaRN's attention factor. A frequency of 0 is of a pair that is not turned: 1 and 0, without factor.
void RopeTable(const int32_t* positions, int32_t m, const double* frequencies, int32_t half, float factor,
               float* cos_sin, const phsa_executor& executor);

// Rotation over halves: for each of `heads` heads of a row, (x[i], x[i + head_dim/2]) turns by the angles of RopeTable.
// norm: [head_dim] or null: Qwen3's RMS norm of each head, with eps, before the turn.
// out: row r of head h at out + out_rows[r] + h · out_head_stride elements of `out_dtype` (phsa_dtype): a cache page or
// a packed buffer. Null out_rows: row r starts at r · out_row_stride. An f32 out may be x itself.
struct RopeParams {
  const float* x = nullptr;
  int64_t x_stride = 0;
  int32_t m = 0, heads = 0, head_dim = 0;  // head_dim: even, at most kMaxHeadDim
  const float* cos_sin = nullptr;          // [m][2][head_dim / 2]
  const float* norm = nullptr;
  float eps = 0;
  // [heads][head_dim] or null: what the channels are multiplied with after the turn.
  const float* channel_scale = nullptr;
  // Then mixes the channels of a head, each becoming a sum of all with one size and other signs. Scores of queries and
  // keys that both are mixed stay what they are.
  bool mix = false;
  int32_t out_dtype = PHSA_F32;
  void* out = nullptr;
  const int64_t* out_rows = nullptr;
  int64_t out_row_stride = 0, out_head_stride = 0;
};
inline constexpr int32_t kMaxHeadDim = 1024;
void Rope(const RopeParams& params, const phsa_executor& executor);

// Copies rows [m][dim] to `dtype` rows (a value cache's page rows; `out_rows` as above), and back.
void StoreRows(const float* x, int64_t x_stride, int32_t m, int32_t dim, int32_t dtype, void* out,
               const int64_t* out_rows, int64_t out_row_stride, const phsa_executor& executor);
void LoadRows(int32_t dtype, const void* x, int64_t x_row_stride, int32_t m, int32_t dim, float* out,
              int64_t out_stride, const phsa_executor& executor);

// Rows [m][dim] as 8-bit codes, each with the least scale (bf16) that keeps them within ±127: row r at
// codes + code_rows[r], its scale at scales + scale_rows[r]. A row that is not finite gets a scale that is no number.
void StoreCodes(const float* x, int64_t x_stride, int32_t m, int32_t dim, int8_t* codes, const int64_t* code_rows,
                uint16_t* scales, const int64_t* scale_rows, const phsa_executor& executor);

// log(sum(exp(x))) of `count` logits, in double precision over a fixed order: for losses and probabilities.
double LogSumExp(const float* x, int64_t count);

}  // namespace phsa

#endif  // PHSA_OPS_LAYERS_H_
