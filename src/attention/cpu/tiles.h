// A batch cut into tiles of queries, and the executor that runs over them.
#ifndef PHSA_ATTENTION_CPU_TILES_H_
#define PHSA_ATTENTION_CPU_TILES_H_

#include <cstddef>
#include <cstdint>

#include "attention/cpu/workspace.h"
#include "attention/plan.h"
#include "base/dtype.h"

namespace phsa::cpu {

inline constexpr float kLog2E = 1.44269504f;  // exponentials are powers of 2 here

// Runs fn(task, worker) for every task on the executor's threads, or here.
template <class Fn>
void ParallelFor(const Executor& executor, int64_t tasks, Fn&& fn) {
  if (tasks <= 0) return;
  if (executor.run == nullptr || tasks == 1) {
    for (int64_t task = 0; task < tasks; ++task) fn(static_cast<int32_t>(task), 0);
    return;
  }
  executor.run(
      executor.context, static_cast<int32_t>(tasks),
      [](void* arg, int32_t task, int32_t worker) { (*static_cast<std::remove_reference_t<Fn>*>(arg))(task, worker); },
      &fn);
}

inline const void* At(const void* base, int32_t dtype, int64_t offset) {
  return static_cast<const std::byte*>(base) + offset * static_cast<int64_t>(DtypeSize(dtype));
}
inline void* At(void* base, int32_t dtype, int64_t offset) {
  return static_cast<std::byte*>(base) + offset * static_cast<int64_t>(DtypeSize(dtype));
}

// Rows that lie `stride` elements apart as a panel.
inline void PackPanel(const Products& products, const void* src, int64_t stride, int32_t dtype, int32_t rows,
                      int32_t elements, uint32_t* dst) {
  const void* at[kPanel];
  for (int32_t i = 0; i < rows; ++i) at[i] = At(src, dtype, i * stride);
  products.pack_panel(at, dtype, rows, elements, dst);
}

// The scales of `rows` tokens from `token` on, which lie in one page.
inline void LoadScales(const PlanImpl& plan, const ForwardParams& params, const uint16_t* scales, int32_t seq,
                       int32_t token, int32_t kv_head, int32_t rows, float* dst) {
  const uint16_t* const from = scales + ScaleOffset(plan, params, seq, token, kv_head);
  for (int32_t i = 0; i < rows; ++i) dst[i] = F32FromBf16(from[i * params.kv_scales.token_stride]);
}

// The keys of these tokens, at most 16, as a panel.
inline void PackKeys(const PlanImpl& plan, const ForwardParams& params, const Products& products, int32_t seq,
                     int32_t token, int32_t kv_head, int32_t rows, uint32_t* dst) {
  const KeyValues& kv = params.kv;
  const void* const keys = At(kv.k, plan.kv_dtype, KeyOffset(plan, kv, seq, token, kv_head));
  if (plan.kv_dtype != PHSA_INT8) {
    PackPanel(products, keys, kv.k_token_stride, plan.kv_dtype, rows, plan.head_dim, dst);
    return;
  }
  const int8_t* at[kPanel];
  float scales[kPanel];
  for (int32_t i = 0; i < rows; ++i) at[i] = static_cast<const int8_t*>(keys) + i * kv.k_token_stride;
  LoadScales(plan, params, params.kv_scales.k, seq, token, kv_head, rows, scales);
  products.pack_panel_codes(at, scales, plan.dtype, rows, plan.head_dim, dst);
}

// The values of these tokens, at most 64, as words.
inline void PackValues(const PlanImpl& plan, const ForwardParams& params, const Products& products, int32_t seq,
                       int32_t token, int32_t kv_head, int32_t rows, uint32_t* dst) {
  const KeyValues& kv = params.kv;
  const void* const values = At(kv.v, plan.kv_dtype, ValueOffset(plan, kv, seq, token, kv_head));
  if (plan.kv_dtype != PHSA_INT8) {
    products.pack_values(values, kv.v_token_stride, plan.kv_dtype, rows, plan.head_dim, dst);
    return;
  }
  float scales[64];
  LoadScales(plan, params, params.kv_scales.v, seq, token, kv_head, rows, scales);
  products.pack_values_codes(static_cast<const int8_t*>(values), kv.v_token_stride, scales, plan.dtype, rows,
                             plan.head_dim, dst);
}

// One tile: queries at positions [begin, end) of a sequence, all heads of one KV head. Tiles start at multiples of
// TileShape::queries, so that a block of queries is never split more than the caller's chunks split it.
struct Tile {
  int32_t seq, kv_head, begin, end;
};

// Tile `index` of a sequence and head, the longest first.
inline Tile TileOf(const PlanImpl& plan, const TileShape& shape, int32_t s, int32_t kv_head, int32_t index) {
  const PlanSequence& seq = plan.seqs[s];
  const int32_t t = seq.first_position() / shape.queries + NumTiles(seq, shape) - 1 - index;
  return {s, kv_head, std::max(seq.first_position(), t * shape.queries), std::min(seq.kv_len, (t + 1) * shape.queries)};
}

}  // namespace phsa::cpu

#endif  // PHSA_ATTENTION_CPU_TILES_H_
