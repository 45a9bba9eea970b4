// The CUDA kernels' interface: plain structs with device pointers. Nothing here allocates or waits for the device;
// every function queues its kernels on the stream and returns what the launches answered, so all of it can be captured
// in a CUDA graph. Who calls asks `Unsupported` (limits.h) first: the kernels trust their call.
//
// PHSA_API has what the engine calls beside the C ABI: as a Python module it takes the attention from libphsa.
#ifndef PHSA_ATTENTION_CUDA_CUDA_H_
#define PHSA_ATTENTION_CUDA_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "attention/cuda/limits.h"
#include "phsa/c.h"

namespace phsa::cuda {

// The sequences of a batch. The queries of a sequence are its last q_len positions, packed one sequence after the
// other.
struct Batch {
  int32_t num_seqs;
  int32_t total_q;            // all queries: cu_q[num_seqs]
  int32_t max_q_len;          // of one sequence
  int32_t max_kv_len;         // of one sequence
  const int32_t* cu_q;        // device [num_seqs + 1]: a sequence's first row of q, out, lse and selection
  const int32_t* kv_lens;     // device [num_seqs]
  const int64_t* kv_starts;   // device [num_seqs]: first row of k, v and flags; NULL: cu_q (self attention)
  const int64_t* rep_starts;  // device [num_seqs]: first row of reps; a block has Shape::parts of them
  int32_t page_size;          // 0: contiguous; else a multiple of 16, and the starts above are not read
  const int32_t* page_table;  // device [num_seqs][page_table_stride]
  int64_t page_table_stride;
};

// Strides count elements; a row's head_dim elements are contiguous and start at a multiple of 16 bytes.
struct Rows {
  void* data;
  int64_t token_stride, head_stride, page_stride;
};

// What the forward needs and gives. `reps` has the cache's dtype, [row][kv_head][head_dim].
struct ForwardParams {
  Shape shape;
  Batch batch;
  Rows q, k, v, reps, out;
  const uint8_t* flags;  // [token] or [page][token]; NULL: no token is punctuation
  int64_t flags_page_stride;
  const float* lambda;      // device [num_kv_heads]
  const float* sinks;       // device [num_q_heads]: scores of one more key without a value; NULL: none
  float* lse;               // [query][q_head], natural logarithm; NULL: not wanted
  int32_t* selection;       // [query][selection_heads][top_k], ascending, -1 beyond the last; NULL: Decode keeps it
  float* selection_scores;  // as selection, 0 beyond the last; NULL: not wanted
  void* workspace;
  size_t workspace_size;
};

// Copies a small table into device memory; both addresses and the size are multiples of 4. `from` may change
// afterwards.
PHSA_API cudaError_t Upload(const void* from, size_t size, void* to, cudaStream_t stream);

// Bytes of workspace that Select needs: at most kSelectWorkspace, or what keeps kSelectTiles multiprocessors busy.
inline constexpr size_t kSelectWorkspace = size_t{512} << 20;
inline constexpr int32_t kSelectTiles = 132;
PHSA_API size_t SelectWorkspaceSize(const Shape& shape, const Batch& batch);

// Writes the representatives (with parts: rows) that the batch's queries complete, or all complete ones.
cudaError_t Represent(const ForwardParams& params, bool all_blocks, cudaStream_t stream);
// Copies the representatives of all complete blocks from pages to contiguous rows, `to` [row][kv_head][head_dim], those
// of a sequence from row starts[seq] (device memory) on. Select is a quarter faster on them (32k tokens): the
// copy engine reads rows.
cudaError_t PackRepresentatives(const ForwardParams& params, const int64_t* starts, void* to, cudaStream_t stream);
// Reads q and reps, writes selection.
cudaError_t Select(const ForwardParams& params, cudaStream_t stream);
// Reads q, k, v and selection, writes out and lse.
cudaError_t Attend(const ForwardParams& params, cudaStream_t stream);

// All of that at once for one query per sequence, the last token of each: row s of q, out, lse and selection belongs to
// sequence s, and cu_q is not read. Choices are a group's (selection_heads = num_kv_heads). The arrays in device memory
// may change between replays of a graph, as long as no length passes max_kv_len; a length of 0 is no sequence, and its
// output zero. The workspace's size follows from shape and batch alone.
PHSA_API size_t DecodeWorkspaceSize(const Shape& shape, const Batch& batch);
PHSA_API cudaError_t Decode(const ForwardParams& params, cudaStream_t stream);

// Gradients for a saved selection. Contiguous, every query has a key: sequence s holds the rows cu_q[s] to
// cu_q[s + 1] - 1 of every array, and of the batch no other pointer is read.
struct BackwardParams {
  Shape shape;
  Batch batch;
  Rows q, k, v, out, d_out, d_q, d_k, d_v;
  const float* lse;          // as the forward wrote it
  const int32_t* selection;  // likewise; NULL where top_k is 0
  void* workspace;
  size_t workspace_size;
};
size_t BackwardWorkspaceSize(const Shape& shape, const Batch& batch);
cudaError_t Backward(const BackwardParams& params, cudaStream_t stream);

// Which of the two implementations runs: 0 chooses by the device, 80 the plain one, 90 the one for sm_90a. For tests.
void SetArchitecture(int32_t architecture);

}  // namespace phsa::cuda

#endif  // PHSA_ATTENTION_CUDA_CUDA_H_
