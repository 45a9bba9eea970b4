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
