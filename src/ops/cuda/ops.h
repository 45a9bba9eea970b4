// What a decoder layer does on the GPU besides products and attention: plain structs with device pointers. Nothing here
// allocates or waits for the device; every function queues its kernels on the stream, so all of them can be captured in
// a CUDA graph, and returns what the launches answered. A row's results depend on that row alone, to the last bit.
//
// Activations are bf16, the residual stream is f32. Rows begin at multiples of 16 bytes, and their widths are multiples
// of 8 elements.
#ifndef PHSA_OPS_CUDA_OPS_H_
#define PHSA_OPS_CUDA_OPS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "ops/cuda/limits.h"
#include "ops/cuda/matrix_view.h"

namespace phsa::cuda {

// Whether the build has these kernels for the current device.
cudaError_t KernelsRun();

// out[m][dim] (bf16) = x / sqrt(mean(x²) + eps) · weight[dim].
struct NormParams {
  int32_t m, dim;
  float* x;             // [rows][dim], the residual stream
  const float* weight;  // [dim]
  float eps;
  void* out;  // [m][dim]
};
cudaError_t RmsNorm(const NormParams& params, cudaStream_t stream);
// The same for the rows that `rows` names: row i of out is the norm of row rows[i] of x.
cudaError_t RmsNormOfRows(const NormParams& params, const int32_t* rows, cudaStream_t stream);
// Writes x first: row r becomes row tokens[r] of embedding [vocab][dim] (bf16), times `scale`.
cudaError_t EmbedAndNorm(const NormParams& params, const void* embedding, float scale, const int32_t* tokens,
                         cudaStream_t stream);

// x[m][dim] += y / sqrt(mean(y²) + eps) · weight[dim]: a norm behind a product, all f32.
struct AddNormParams {
  int32_t m, dim;
  const float* y;       // [m][dim]
  const float* weight;  // [dim]
  float eps;
  float* x;  // [m][dim], the residual stream
};
cudaError_t AddRmsNorm(const AddNormParams& params, cudaStream_t stream);

// What joins the two halves of an MLP.
struct GateParams {
  enum class Kind : int32_t {
    kSilu,          // silu(gate) · up
    kGeluTanh,      // gelu(gate) · up, by the tangent
    kClampedSwiglu  // g · sigmoid(alpha · g) · (u + 1), of a gate up to `limit` and an up within ±limit
  } kind;
  float alpha, limit;  // of kClampedSwiglu
};

// Rows of two arrays that `rows` [m] names, one behind the other: row i of kept_x is row rows[i] of x, and so on.
struct KeepParams {
  int32_t m, x_dim, y_dim;
  const int32_t* rows;
  const float* x;  // [rows][x_dim]
  const void* y;   // 2 bytes an element, [rows][y_dim]
  float* kept_x;
  void* kept_y;
};
cudaError_t KeepRows(const KeepParams& params, cudaStream_t stream);

// Products of a few rows, as decoding a few sequences asks for: bound by reading the weights once, and by the number of
// launches, so what comes before and after a product is in the same kernel.
inline constexpr int32_t kFewRows = 4;
struct FewRowsParams {
  enum class Result : int32_t {
    kBf16,      // y = norm(x) · weightsᵀ + bias
    kGateMul,   // y = gate of such products; weights [2 · n][k]: those of gate, then those of up
    kAddToF32,  // y += scale · x · weightsᵀ + bias
    kF32,       // y = that
  } result;
  int32_t m, n, k;  // m up to kFewRows; int8: k a multiple of 32
  MatrixView weights;
  const void* bias;   // [n], kGateMul: [2][n], in the type of y; or null
  const void* x;      // [m][k]: f32, the residual stream, which is normed and rounded to bf16 first; to f32: bf16
  const float* norm;  // [k]; not read where y is f32
  float eps;
  void* y;          // [m][n]: bf16 or f32
  float scale;      // not read where y is bf16
  GateParams gate;  // of kGateMul
};
// Whether there is such a kernel for the shape; else it is for cuBLASLt.
bool IsForFewRows(int32_t m, int32_t k);
cudaError_t MultiplyFewRows(const FewRowsParams& params, cudaStream_t stream);

// Products of some more rows with int8 weights, as decoding a batch asks for: on the tensor cores, and the weights are
// nowhere written as bf16. (The same with bf16 weights was slower than cuBLASLt.)
inline constexpr int32_t kSomeRows = 16;
struct SomeRowsParams {
  int32_t m, n, k;     // m up to kSomeRows, k a multiple of 32
  MatrixView weights;  // int8
  const void* bias;    // [n] in the type of y, or null
  const void* x;       // bf16 [m][k]
  void* y;             // [m][n]
  enum class Result : int32_t {
    kBf16,      // y = x · weightsᵀ + bias
    kF32,       // y = scale · x · weightsᵀ + bias
    kAddToF32,  // y += that
  } result;
  float scale;
};
bool IsForSomeRows(const SomeRowsParams& params);
cudaError_t MultiplySomeRows(const SomeRowsParams& params, cudaStream_t stream);

// What the rows of a step need once for all layers.
struct RowsParams {
  int32_t m, half;            // head_dim / 2
  const int32_t* positions;   // [m]
  const double* frequencies;  // [half], radians per position
  float factor;               // of sin and cos
  float* cos_sin;             // [m][2][half]; angles in double precision: they are right at a million positions
  // Whether each row is punctuation goes into its page; null: the pages stay as they are.
  const uint8_t* flags;      // [m]
  const int64_t* flag_rows;  // [m]: where in `pages`, in bytes; -1: a padding row
  uint8_t* pages;
};
cudaError_t PrepareRows(const RowsParams& params, cudaStream_t stream);

// From the product of q, k and v to what attention reads: RMS norm of each head where the model has one, rotation over
// halves, and the step's keys and values into the cache.
struct HeadsParams {
  int32_t m, num_q_heads, num_kv_heads;
  int32_t head_dim;              // of kHeadDims
  const void* qkv;               // bf16 [m][(q heads + 2 · kv heads) · head_dim]
  const float* cos_sin;          // [m][2][head_dim / 2]
  const float *q_norm, *k_norm;  // [head_dim] or null
  float eps;
  bool f16;                   // what is written: f16, or bf16
  void* queries;              // [m][q head][head_dim]
  void *keys, *values;        // of the layer, in the first page
  const int64_t* cache_rows;  // [m]: where a row's keys and values lie, in elements; -1: a padding row
  int64_t cache_head_stride;  // elements
};
cudaError_t RopeAndAppend(const HeadsParams& params, cudaStream_t stream);

// In place, from f16 to bf16.
cudaError_t Bf16FromF16(void* x, int64_t count, cudaStream_t stream);

// int8 weights [n][k] rounded to bf16, for products of more rows than those above take: out [n][k].
cudaError_t Bf16FromInt8(const MatrixView& weights, int32_t n, int32_t k, void* out, cudaStream_t stream);

// out[m][dim] = the gate of gate_up[m][2][dim]; all bf16.
cudaError_t GateMul(const GateParams& gate, const void* gate_up, int64_t m, int32_t dim, void* out,
                    cudaStream_t stream);

// The most likely tokens of a row of logits, and what makes them probabilities. Ties go to the lower token.
inline constexpr int32_t kTopLogits = 64;
struct TopLogits {
  double log_sum_exp;  // no finite number where a logit is none
  float asked;         // the logit of TopParams::asked
  int32_t finite;      // whether all logits are
  int32_t count;       // of `top`: kTopLogits, or the vocabulary where that is smaller
  struct Entry {
    int32_t token;
    float logit;
  } top[kTopLogits];  // logits descending; what is no number comes last
};
struct TopParams {
  int32_t m, vocab;     // up to kMaxTopVocab
  const float* logits;  // [m][logits_stride]
  int64_t logits_stride;
  const int32_t* asked;  // [m]: a token of each row whose logit is wanted too; -1: none
  TopLogits* out;        // [m]
  void* workspace;       // TopWorkspaceSize(m, vocab) bytes
};
size_t TopWorkspaceSize(int32_t m, int32_t vocab);
cudaError_t FindTop(const TopParams& params, cudaStream_t stream);

}  // namespace phsa::cuda

#endif  // PHSA_OPS_CUDA_OPS_H_
