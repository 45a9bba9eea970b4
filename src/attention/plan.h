// What a plan knows: the batch's shapes after validation, and the block arithmetic that every backend shares.
#ifndef PHSA_ATTENTION_PLAN_H_
#define PHSA_ATTENTION_PLAN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/blocks.h"
#include "attention/policies.h"
#include "phsa/attention.h"

namespace phsa {

// With parts, a block is chosen in two levels. Coarse: the rows of reps, as without parts, leave the best `survivors`
// candidates. Fine: a head's softmax runs over the parts of init, local and surviving blocks, and a block's value is
// the sum over its parts. Parts are mixed means of runs of block / parts keys, rounded to the cache's type as rows of
// reps are; they are made from the keys when they are needed, and live in no cache.

// Limits far above any model; they keep all block arithmetic inside 32 bits.
inline constexpr int32_t kMaxHeads = 4096;
inline constexpr int32_t kMaxThreads = 1024;
inline constexpr int32_t kMaxTokens = 1 << 30;

struct PlanSequence {
  int32_t q_len, kv_len;
  int64_t q_start;           // row of q, out, lse, selection
  int64_t kv_start;          // row of k, v, flags (contiguous layout)
  int64_t rep_start;         // row of reps (contiguous layout)
  int64_t packed_rep_start;  // row of reps when they live in the workspace
  int32_t first_position() const { return kv_len - q_len; }
};

struct PlanImpl : BlockRules, RepRules {
  Settings settings;
  Representation representation = Representation::kNone;
  int32_t dtype = PHSA_F32;
  int32_t kv_dtype = PHSA_F32;  // of k and v: dtype, or PHSA_INT8
  int32_t num_q_heads = 0, num_kv_heads = 0, group = 0, head_dim = 0;
  int32_t page_size = 0;
  float scale = 0;
  int32_t max_threads = 1;
  int32_t device = PHSA_DEVICE_CPU;
  std::vector<PlanSequence> seqs;
  int64_t num_queries = 0, num_reps = 0;
  int32_t max_kv_len = 0;
  bool self_attention = true;  // q_len = kv_len everywhere

  int32_t block = 16;     // tokens per selection block
  int32_t parts = 1;      // representatives of a block by which it is chosen
  int32_t survivors = 0;  // with parts: blocks that the rows of reps leave for them, at least top_k
  int32_t rep_width = 0;  // elements of a row and KV head
  int32_t selection_heads = 0;
  std::vector<float> lambda;  // [num_kv_heads]

  size_t workspace_size = 0, backward_workspace_size = 0;
  std::vector<char> device_tables;  // what the CUDA kernels read of this plan

  // Whether the rows of reps are the blocks' parts. Else parts are made from the keys of what survives.
  bool PartsInReps() const { return parts > 1 && rep_span < block; }
  int32_t rows_of_group() const { return num_q_heads / selection_heads; }  // query heads that share a choice
  // Rows of reps that a query of block b may see: those whose last token lies before block b.
  int32_t VisibleRepRows(int32_t b) const { return NumRepRows(b * block); }
};

// Where things lie. Blocks never cross a page. Elements are counted: of keys and values in the plan's kv_dtype.
inline int64_t TokenOffset(const PlanImpl& plan, const KeyValues& kv, int32_t seq, int32_t token, int64_t token_stride,
                           int64_t page_stride) {
  if (plan.page_size == 0) return (plan.seqs[seq].kv_start + token) * token_stride;
  const int64_t page = kv.page_table[seq * kv.page_table_stride + token / plan.page_size];
  return page * page_stride + (token % plan.page_size) * token_stride;
}
inline int64_t KeyOffset(const PlanImpl& plan, const KeyValues& kv, int32_t seq, int32_t token, int32_t kv_head) {
  return TokenOffset(plan, kv, seq, token, kv.k_token_stride, kv.k_page_stride) + kv_head * kv.k_head_stride;
}
inline int64_t ValueOffset(const PlanImpl& plan, const KeyValues& kv, int32_t seq, int32_t token, int32_t kv_head) {
  return TokenOffset(plan, kv, seq, token, kv.v_token_stride, kv.v_page_stride) + kv_head * kv.v_head_stride;
}
inline int64_t ScaleOffset(const PlanImpl& plan, const ForwardParams& params, int32_t seq, int32_t token,
                           int32_t kv_head) {
  const KvScales& scales = params.kv_scales;
  return TokenOffset(plan, params.kv, seq, token, scales.token_stride, scales.page_stride) +
         kv_head * scales.head_stride;
}
inline int64_t FlagOffset(const PlanImpl& plan, const KeyValues& kv, int32_t seq, int32_t token) {
  return TokenOffset(plan, kv, seq, token, 1, kv.flags_page_stride);
}
inline int64_t RepOffset(const PlanImpl& plan, const KeyValues& kv, int32_t seq, int32_t row, int32_t kv_head) {
  const int64_t head = kv_head * kv.rep_head_stride;
  if (plan.page_size == 0) return (plan.seqs[seq].rep_start + row) * kv.rep_row_stride + head;
  const int32_t rows = plan.page_size / plan.rep_stride;
  const int64_t page = kv.page_table[seq * kv.page_table_stride + row / rows];
  return page * kv.rep_page_stride + (row % rows) * kv.rep_row_stride + head;
}

// The stages of one backend. `Plan` checks pointers and sizes before it calls them.
struct Backend {
  void (*represent)(const PlanImpl& plan, const ForwardParams& params);
  void (*select)(const PlanImpl& plan, const ForwardParams& params);
  void (*attend)(const PlanImpl& plan, const ForwardParams& params);
  void (*forward)(const PlanImpl& plan, const ForwardParams& params);
  void (*backward)(const PlanImpl& plan, const BackwardParams& params);
};

// Throws phsa::Error where a list leaves the candidates.
void CheckSelection(const PlanImpl& plan, const int32_t* selection, const char* where);

const Backend& ReferenceBackend();  // reference_backend.cc: double precision, one thread, no workspace
const Backend& CpuBackend();        // cpu/

}  // namespace phsa

#endif  // PHSA_ATTENTION_PLAN_H_
