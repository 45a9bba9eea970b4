// Gradients of attend for a saved selection, in f32.
//
// One task is one sequence and KV head: it alone writes that head's gradients of keys and values, tile after tile, so
// the sums have one order and no thread waits for another.
#include "attention/cpu/backward.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/cpu/band.h"
#include "attention/cpu/block_lists.h"
#include "attention/cpu/kernels.h"
#include "attention/cpu/tiles.h"
#include "attention/cpu/workspace.h"
#include "base/dtype.h"

namespace phsa::cpu {
namespace {

class HeadGradients {
 public:
  HeadGradients(const PlanImpl& plan, const TileShape& shape, const Kernels& kernels, const BackwardParams& params,
                int32_t seq, int32_t kv_head, const BackwardScratch& scratch)
      : plan_(plan),
        shape_(shape),
        kernels_(kernels),
        params_(params),
        kv_(params.kv),
        seq_(plan.seqs[seq]),
        seq_index_(seq),
        kv_head_(kv_head),
        s_(scratch) {
    d_keys_ = s_.d_keys;
    d_values_ = s_.d_values;
    d_key_stride_ = d_value_stride_ = plan.head_dim;
    if (plan.dtype == PHSA_F32) {  // f32 gradients grow where they will stay
      d_keys_ = static_cast<float*>(DKey(0));
      d_values_ = static_cast<float*>(DValue(0));
      d_key_stride_ = params.d_k_token_stride;
      d_value_stride_ = params.d_v_token_stride;
    }
  }

  void Run() {
    const int32_t d = plan_.head_dim;
    for (int32_t t = 0; t < seq_.kv_len; ++t) {
      std::fill_n(d_keys_ + t * d_key_stride_, d, 0.0f);
      std::fill_n(d_values_ + t * d_value_stride_, d, 0.0f);
    }
    for (int32_t t = 0; t < seq_.kv_len; t += kPanel) {
      const int32_t count = std::min(kPanel, seq_.kv_len - t);
      PackPanel(kernels_.f32, Key(t), kv_.k_token_stride, plan_.dtype, count, d, s_.key_panels + int64_t{t} * d);
      PackPanel(kernels_.f32, At(kv_.v, plan_.dtype, ValueOffset(plan_, kv_, seq_index_, t, kv_head_)),
                kv_.v_token_stride, plan_.dtype, count, d, s_.value_panels + int64_t{t} * d);
    }
    for (int32_t begin = 0; begin < seq_.kv_len; begin += shape_.queries) {
      begin_ = begin;
      end_ = std::min(seq_.kv_len, begin + shape_.queries);
      rows_ = (end_ - begin_) * plan_.group;
      LoadTile();
      Band(BandPart::kInit);
      Band(BandPart::kLocal);
      if (plan_.top_k > 0) Chosen();
      StoreTile();
    }
    if (plan_.dtype == PHSA_F32) return;
    for (int32_t t = 0; t < seq_.kv_len; ++t) {
      kernels_.from_f32(d_keys_ + t * d_key_stride_, plan_.dtype, d, DKey(t));
      kernels_.from_f32(d_values_ + t * d_value_stride_, plan_.dtype, d, DValue(t));
    }
  }

 private:
  const void* Key(int32_t token) const {
    return At(kv_.k, plan_.dtype, KeyOffset(plan_, kv_, seq_index_, token, kv_head_));
  }
  void* DKey(int32_t token) const {
    return At(params_.d_k, plan_.dtype,
              (seq_.kv_start + token) * params_.d_k_token_stride + kv_head_ * params_.d_k_head_stride);
  }
  void* DValue(int32_t token) const {
    return At(params_.d_v, plan_.dtype,
              (seq_.kv_start + token) * params_.d_v_token_stride + kv_head_ * params_.d_v_head_stride);
  }
  int32_t Position(int32_t row) const { return begin_ + row / plan_.group; }
  int64_t Offset(int32_t row, int64_t token_stride, int64_t head_stride) const {
    return (seq_.q_start + Position(row)) * token_stride +
           (int64_t{kv_head_} * plan_.group + row % plan_.group) * head_stride;
  }

  void LoadTile() {
    const int32_t d = plan_.head_dim;
    for (int32_t r = 0; r < rows_; ++r) {
      float* q = s_.queries + int64_t{r} * d;
      float* d_out = s_.d_out + int64_t{r} * d;
      kernels_.to_f32(At(params_.q, plan_.dtype, Offset(r, params_.q_token_stride, params_.q_head_stride)), plan_.dtype,
                      d, q);
      kernels_.to_f32(At(params_.d_out, plan_.dtype, Offset(r, params_.d_out_token_stride, params_.d_out_head_stride)),
                      plan_.dtype, d, d_out);
      kernels_.to_f32(At(params_.out, plan_.dtype, Offset(r, params_.out_token_stride, params_.out_head_stride)),
                      plan_.dtype, d, s_.row);
      s_.delta[r] = kernels_.dot_product(s_.row, d_out, d);
      s_.offset[r] = params_.lse[Offset(r, plan_.num_q_heads, 1)] * kLog2E;
    }
    std::fill_n(s_.d_queries, int64_t{rows_} * d, 0.0f);
  }

  void StoreTile() {
    for (int32_t r = 0; r < rows_; ++r) {
      kernels_.from_f32(s_.d_queries + int64_t{r} * plan_.head_dim, plan_.dtype, plan_.head_dim,
                        At(params_.d_q, plan_.dtype, Offset(r, params_.d_q_token_stride, params_.d_q_head_stride)));
    }
  }

  void Band(BandPart part) {
    const auto [first_token, last_token] = BandTokens(plan_, begin_, end_, part);
    ForEachBandRun(plan_, begin_, end_, part, first_token, last_token,
                   [&](int32_t /*chunk*/, int32_t query_begin, int32_t query_end, int32_t lo, int32_t hi) {
                     const int32_t first = (query_begin - begin_) * plan_.group;
                     const int32_t n = (query_end - query_begin) * plan_.group;
                     for (int32_t i = 0; i < n; ++i) s_.list_rows[i] = first + i;
                     Keys(lo, hi, n);
                   });
  }

  void Chosen() {
    const int32_t units = shape_.units, heads = plan_.rows_of_group();
    BlockLists blocks(s_.block_head, s_.block_bits, s_.next_entry, shape_.slots);
    for (int32_t list = 0; list < (end_ - begin_) * units; ++list) {
      const int32_t position = begin_ + list / units;
      if (plan_.ReadsAll(position / plan_.block)) continue;
      const int32_t* chosen =
          params_.selection +
          ((seq_.q_start + position) * plan_.selection_heads + int64_t{kv_head_} * units + list % units) * plan_.top_k;
      for (int32_t j = 0; j < shape_.slots && chosen[j] >= 0; ++j) blocks.Add(list, j, chosen[j]);
    }
    blocks.ForEachBlock([&](int32_t block) {
      int32_t n = 0;
      blocks.ForEachList(block, [&](int32_t list, int32_t /*slot*/) {
        const int32_t row = list / units * plan_.group + list % units * heads;
        for (int32_t r = row; r < row + heads; ++r) s_.list_rows[n++] = r;
      });
      // The sums over rows must have one order: that of the rows, not that in which lists were entered.
      std::sort(s_.list_rows, s_.list_rows + n);
      Keys(block * plan_.block, (block + 1) * plan_.block, n);
    });
    blocks.Clear();
  }

  // Tokens [lo, hi), at most kChunk of them, read by the n rows of list_rows, each up to its own position.
  void Keys(int32_t lo, int32_t hi, int32_t n) {
    const int32_t d = plan_.head_dim;
    const int32_t panels = (hi - lo + kPanel - 1) / kPanel;
    const uint32_t* keys = static_cast<const uint32_t*>(Key(lo));
    int64_t key_stride = kv_.k_token_stride;
    if (plan_.dtype != PHSA_F32) {
      kernels_.f32.pack_values(Key(lo), kv_.k_token_stride, plan_.dtype, hi - lo, d, s_.keys);
      keys = s_.keys;
      key_stride = d;
    }
    for (int32_t i = 0; i < n; ++i) {
      const int64_t row = s_.list_rows[i];
      s_.query_ptrs[i] = s_.queries + row * d;
      s_.d_out_ptrs[i] = s_.d_out + row * d;
      s_.d_query_ptrs[i] = s_.d_queries + row * d;
      s_.p_ptrs[i] = s_.probabilities + int64_t{i} * kChunk;
      s_.ds_ptrs[i] = s_.d_scores + int64_t{i} * kChunk;
    }
    kernels_.f32.dot(reinterpret_cast<const uint32_t* const*>(s_.query_ptrs), n, s_.key_panels + int64_t{lo} * d,
                     panels, d, s_.p_ptrs);
    kernels_.f32.dot(reinterpret_cast<const uint32_t* const*>(s_.d_out_ptrs), n, s_.value_panels + int64_t{lo} * d,
                     panels, d, s_.ds_ptrs);
    for (int32_t i = 0; i < n; ++i) {
      const int32_t row = s_.list_rows[i];
      const int32_t seen = std::min(Position(row) + 1, hi) - lo;
      std::fill(s_.p_ptrs[i] + seen, s_.p_ptrs[i] + panels * kPanel, -std::numeric_limits<float>::infinity());
      kernels_.softmax_gradient(s_.p_ptrs[i], s_.ds_ptrs[i], panels * kPanel, plan_.scale * kLog2E, s_.offset[row],
                                s_.delta[row], plan_.scale);
    }
    kernels_.f32.accumulate(reinterpret_cast<const uint32_t* const*>(s_.ds_ptrs), n, hi - lo, 1, keys, key_stride, d,
                            s_.d_query_ptrs);
    kernels_.accumulate_transposed(s_.ds_ptrs, s_.query_ptrs, n, hi - lo, d, d_keys_ + lo * d_key_stride_,
                                   d_key_stride_);
    kernels_.accumulate_transposed(s_.p_ptrs, s_.d_out_ptrs, n, hi - lo, d, d_values_ + lo * d_value_stride_,
                                   d_value_stride_);
  }

  const PlanImpl& plan_;
  const TileShape& shape_;
  const Kernels& kernels_;
  const BackwardParams& params_;
  const KeyValues& kv_;
  const PlanSequence& seq_;
  const int32_t seq_index_, kv_head_;
  const BackwardScratch& s_;
  float *d_keys_, *d_values_;
  int64_t d_key_stride_, d_value_stride_;
  int32_t begin_ = 0, end_ = 0, rows_ = 0;
};

}  // namespace

void Backward(const PlanImpl& plan, const BackwardParams& params) {
  const Kernels& kernels = ActiveKernels();
  const TileShape shape(plan);
  Carver counter(nullptr);
  BackwardScratch(plan, shape, counter);
  const auto scratch_of = [&](int32_t worker) {
    Carver own(static_cast<std::byte*>(params.workspace) + static_cast<size_t>(worker) * counter.size());
    return BackwardScratch(plan, shape, own);
  };
  if (plan.top_k > 0) {
    const int32_t workers = params.executor.run == nullptr ? 1 : params.executor.num_threads;
    for (int32_t w = 0; w < workers; ++w) {
      const BackwardScratch scratch = scratch_of(w);
      BlockLists::Reset(scratch.block_head, scratch.block_bits, shape.blocks);
    }
  }
  const int32_t heads = plan.num_kv_heads;
  ParallelFor(params.executor, static_cast<int64_t>(plan.seqs.size()) * heads, [&](int32_t task, int32_t worker) {
    const BackwardScratch scratch = scratch_of(worker);
    HeadGradients(plan, shape, kernels, params, task / heads, task % heads, scratch).Run();
  });
}

size_t BackwardWorkspaceSize(const PlanImpl& plan) {
  Carver carver(nullptr);
  BackwardScratch(plan, TileShape(plan), carver);
  return carver.size() * static_cast<size_t>(plan.max_threads);
}

}  // namespace phsa::cpu
