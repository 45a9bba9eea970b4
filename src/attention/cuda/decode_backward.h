// Decode and backward on the GPU: plain parameter structs with device pointers, the caller's workspace and stream. None
// of the functions allocates or waits for the device, so all of them can be captured in a CUDA graph.
#ifndef PHSA_ATTENTION_CUDA_DECODE_BACKWARD_H_
#define PHSA_ATTENTION_CUDA_DECODE_BACKWARD_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "phsa/c.h"

namespace phsa::cuda {

// What both need to know of a method. Blocks are of 16 tokens.
struct MethodParams {
  int32_t init_blocks;
  int32_t local_blocks;
  int32_t top_k;        // 0 to 64
  int32_t dense_below;  // query positions below this read everything; INT32_MAX: dense attention
  float scale;          // of the dot products, above 0
  int32_t parts;        // rows of reps that a block has: 1, 2, 4 or 8; the backward does not ask
};

// One query per sequence: the last token of each. `kv_lens` and all other arrays are in device memory and may change
// between replays of a graph, as long as no length passes `max_kv_len`.
struct DecodeParams {
  MethodParams method;
  int32_t dtype;  // PHSA_F16 or PHSA_BF16
  int32_t num_seqs;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;  // 64 or 128
  int32_t max_kv_len;
  int32_t group_reduce;      // PHSA_GROUP_SUM or PHSA_GROUP_MAX
  const int32_t* kv_lens;    // [num_seqs], the new token included; 0: no sequence, its output is zero
  float lambda;              // of the representative that the new token completes
  const float* head_lambda;  // [num_kv_heads] or null
  const void* q;             // [seq][q_head][head_dim]
  int64_t q_token_stride, q_head_stride;
  const void* k;  // [token][kv_head][head_dim], or [page][token][kv_head][head_dim]
  int64_t k_token_stride, k_head_stride, k_page_stride;
  const void* v;
  int64_t v_token_stride, v_head_stride, v_page_stride;
  const uint8_t* flags;  // [token] or [page][token]; null: none is punctuation
  int64_t flags_page_stride;
  void* reps;  // [row][kv_head][head_dim] or [page][row][kv_head][head_dim]; null only where nothing is chosen
  int64_t rep_row_stride, rep_head_stride, rep_page_stride;
  int32_t page_size;          // a multiple of 16; 0: contiguous
  const int32_t* page_table;  // [seq][page_table_stride]
  int64_t page_table_stride;
  const int64_t* kv_starts;   // [seq], contiguous layout: first row of k, v and flags
  const int64_t* rep_starts;  // [seq], contiguous layout: first row of reps
  void* out;                  // [seq][q_head][head_dim]
  int64_t out_token_stride, out_head_stride;
  float* lse;          // [seq][q_head] or null
  int32_t* selection;  // [seq][kv_head][top_k] or null: then it stays in the workspace
  void* workspace;
  size_t workspace_size;
};

// Bytes of workspace for these shapes (pointers are not read).
PHSA_API size_t DecodeWorkspaceSize(const DecodeParams& params);
// cudaErrorInvalidValue for shapes it does not support, else what the launches returned.
PHSA_API cudaError_t Decode(const DecodeParams& params, cudaStream_t stream);

// Gradients for a saved selection. Packed sequences, every query has a key: sequence s holds the tokens
// cu_seqlens[s] … cu_seqlens[s+1] - 1 of every array.
struct BackwardParams {
  MethodParams method;
  int32_t dtype;
  int32_t num_seqs;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t total_tokens;
  int32_t max_seq_len;
  const int32_t* cu_seqlens;  // [num_seqs + 1], device memory
  const void* q;              // [token][q_head][head_dim]
  int64_t q_token_stride, q_head_stride;
  const void* k;  // [token][kv_head][head_dim]
  int64_t k_token_stride, k_head_stride;
  const void* v;
  int64_t v_token_stride, v_head_stride;
  const void* out;
  int64_t out_token_stride, out_head_stride;
  const float* lse;          // [token][q_head], natural logarithm
  const int32_t* selection;  // [token][kv_head][top_k], ascending, -1 beyond the last; null where top_k is 0
  const void* d_out;
  int64_t d_out_token_stride, d_out_head_stride;
  void* d_q;
  int64_t d_q_token_stride, d_q_head_stride;
  void* d_k;
  int64_t d_k_token_stride, d_k_head_stride;
  void* d_v;
  int64_t d_v_token_stride, d_v_head_stride;
  void* workspace;
  size_t workspace_size;
};

size_t BackwardWorkspaceSize(const BackwardParams& params);
// cudaErrorInvalidValue for shapes it does not support, else what the launches returned.
cudaError_t Backward(const BackwardParams& params, cudaStream_t stream);
// Takes the plain kernels (sm_80 and later) on a Hopper GPU too. For tests.
void SetPlainBackward(bool plain);

}  // namespace phsa::cuda
#endif  // PHSA_ATTENTION_CUDA_DECODE_BACKWARD_H_
