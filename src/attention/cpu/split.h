// Tiles of few queries, cut into pieces: segments of the band, windows of the chosen blocks, and panels of the
// representatives that they are chosen by. A sequence that is decoded has one query, and its KV heads alone would keep
// few cores busy. Where the cuts are depends on shapes alone (kSegment).
#ifndef PHSA_ATTENTION_CPU_SPLIT_H_
#define PHSA_ATTENTION_CPU_SPLIT_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "attention/cpu/band.h"
#include "attention/cpu/tiles.h"
#include "attention/cpu/workspace.h"

namespace phsa::cpu {

// The segments [first, last) in which the queries of a tile read something.
inline std::pair<int32_t, int32_t> SegmentsOf(const PlanImpl& plan, const Tile& tile, BandPart part) {
  const auto [begin, end] = BandTokens(plan, tile.begin, tile.end, part);
  return {begin / kSegment, (end + kSegment - 1) / kSegment};
}

inline int32_t WindowsOf(int32_t slots, const TileShape& shape) {
  return (slots + shape.window() - 1) / shape.window();
}

// One tile, with memory for all of its pieces.
struct SplitUnit {
  Tile tile;
  int32_t init_segments, local_segments, windows;
  int32_t first_local;  // segment
  RowStates* states;    // [init segments, local segments, windows]: the order in which they are added up
  float* rep_scores;    // as in TileScratch, but for all workers
  float* part_max;
  float* part_sum;

  int32_t segments() const { return init_segments + local_segments; }
  void Lend(TileScratch* scratch) const {
    scratch->rep_scores = rep_scores;
    scratch->part_max = part_max;
    scratch->part_sum = part_sum;
  }

  // Of one call:
  int32_t score_pieces;
  bool chooses_apart;                // by a piece of its own, not at the end of the last piece of the scores
  int64_t first_score, first_other;  // tasks
  std::atomic<int32_t> scores_left, left;
};

class SplitUnits {
 public:
  SplitUnits(const PlanImpl& plan, const TileShape& shape, Carver& carver) {
    int64_t count = 0, states = 0;
    ForEachTile(plan, shape, [&](const Tile& tile) {
      ++count;
      states += Describe(plan, shape, tile).pieces();
    });
    units_ = carver.Take<SplitUnit>(count);
    auto* of_pieces = carver.Take<RowStates>(states);
    const bool counts_only = units_ == nullptr;
    ForEachTile(plan, shape, [&](const Tile& tile) {
      const Pieces pieces = Describe(plan, shape, tile);
      const int64_t rows = int64_t{tile.end - tile.begin} * plan.group;
      // What is scored in pieces is scored at once, and no more rows than are scored together at all.
      const int64_t score_rows = plan.top_k > 0 ? std::min<int64_t>(rows, shape.score_rows) : 0;
      float* const rep_scores = carver.Take<float>(score_rows * shape.padded_reps);
      float* const part_max = carver.Take<float>(score_rows * shape.padded_blocks);
      float* const part_sum = carver.Take<float>(score_rows * shape.padded_blocks);
      for (int64_t i = 0; i < pieces.pieces(); ++i) {
        const RowStates state(rows, plan.head_dim, carver);
        if (!counts_only) std::construct_at(of_pieces + i, state);
      }
      if (!counts_only) {
        SplitUnit& unit = *std::construct_at(units_ + count_);
        unit.tile = tile;
        unit.init_segments = pieces.init_segments;
        unit.local_segments = pieces.local_segments;
        unit.first_local = pieces.first_local;
        unit.windows = pieces.windows;
        unit.states = of_pieces;
        unit.rep_scores = rep_scores;
        unit.part_max = part_max;
        unit.part_sum = part_sum;
        of_pieces += pieces.pieces();
      }
      ++count_;
    });
    for (const PlanSequence& seq : plan.seqs) num_seqs_ += SplitsTiles(plan, seq) ? 1 : 0;
  }

  std::span<SplitUnit> all() const { return {units_, count_}; }
  int32_t num_seqs() const { return num_seqs_; }

  // The unit that has this one of the tasks that `first` counts.
  SplitUnit& Find(int64_t task, int64_t SplitUnit::*first) const {
    const std::span<SplitUnit> units = all();
    // The last one that begins at or before the task: of units without such tasks none follows its own begin.
    return *(std::ranges::upper_bound(units, task, {}, first) - 1);
  }

 private:
  struct Pieces {
    int32_t init_segments, local_segments, first_local, windows;
    int64_t pieces() const { return int64_t{init_segments} + local_segments + windows; }
  };
  static Pieces Describe(const PlanImpl& plan, const TileShape& shape, const Tile& tile) {
    const auto [init_begin, init_end] = SegmentsOf(plan, tile, BandPart::kInit);
    const auto [local_begin, local_end] = SegmentsOf(plan, tile, BandPart::kLocal);
    return {init_end - init_begin, local_end - local_begin, local_begin,
            plan.top_k > 0 ? WindowsOf(shape.slots, shape) : 0};
  }

  template <class Fn>
  static void ForEachTile(const PlanImpl& plan, const TileShape& shape, const Fn& fn) {
    for (int32_t s = 0; s < static_cast<int32_t>(plan.seqs.size()); ++s) {
      if (!SplitsTiles(plan, plan.seqs[static_cast<size_t>(s)])) continue;
      const int32_t num_tiles = NumTiles(plan.seqs[static_cast<size_t>(s)], shape);
      for (int32_t i = 0; i < num_tiles; ++i) {
        for (int32_t head = 0; head < plan.num_kv_heads; ++head) fn(TileOf(plan, shape, s, head, i));
      }
    }
  }

  SplitUnit* units_ = nullptr;
  size_t count_ = 0;
  int32_t num_seqs_ = 0;
};

}  // namespace phsa::cpu

#endif  // PHSA_ATTENTION_CPU_SPLIT_H_
