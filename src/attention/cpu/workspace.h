// The caller's workspace, cut into what the workers need. Sizes depend on the plan alone, never on the SIMD target, so
// that a target may be changed between planning and running.
#ifndef PHSA_ATTENTION_CPU_WORKSPACE_H_
#define PHSA_ATTENTION_CPU_WORKSPACE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention/cpu/kernels.h"
#include "attention/plan.h"
#include "base/carver.h"

namespace phsa::cpu {

// Keys per step of the running softmax in the band: 128 × 128 × 4 bytes = 64 KB of keys and as much of values stay in
// L2 beside the tile's state while every row of the tile passes over them.
inline constexpr int32_t kChunk = 128;
// Keys of the band that one softmax runs over. A row's softmaxes are added up in order; where they begin and end
// depends on positions alone, so that few queries can have each of theirs from another worker and get the bits that a
// tile of many gets.
inline constexpr int32_t kSegment = 2 * kChunk;
// Rows (query × head) of a tile. More rows share what a tile packs for itself; fewer keep its scores and sums in L2. On
// Zen 4 (1 MB) 128, 256 and 384 are within 3 % of each other at 8k.
inline constexpr int32_t kTileRows = 256;
// Rows scored together: their scores against all representatives are held at once (32 × 4096 × 4 bytes = 512 KB at
// 64k).
inline constexpr int32_t kScoreRows = 32;
// Tokens of chosen blocks whose scores a row holds at once.
inline constexpr int32_t kChosenTokens = 512;
// From this many rows on it pays to pack all representatives of a sequence once for all tiles.
inline constexpr int32_t kPackRows = 64;

// What the tiles of a plan look like.
struct TileShape {
  explicit TileShape(const PlanImpl& plan) {
    const int32_t wanted = (kTileRows + plan.group - 1) / plan.group;
    queries = (wanted + 15) / 16 * 16;
    int32_t longest = 1;
    for (const PlanSequence& seq : plan.seqs) longest = std::max(longest, seq.q_len);
    rows = std::min(queries, longest) * plan.group;
    score_queries = std::clamp(kScoreRows / plan.group, 1, 16);
    score_rows = std::min(score_queries, longest) * plan.group;
    blocks = plan.max_kv_len / plan.block + 1;
    slots = std::min(plan.top_k, blocks);
    padded_reps = plan.PartsInReps() ? 16 : (plan.NumRepRows(plan.max_kv_len) + 15) / 16 * 16 + 16;
    units = plan.num_kv_heads > 0 ? plan.selection_heads / plan.num_kv_heads : 1;
    if (plan.parts > 1) {
      const int32_t always = std::min(blocks, plan.init_blocks + plan.local_blocks);
      survivors = std::min(blocks, plan.survivors);
      fine_blocks = (std::min(blocks, always + survivors) + 15) / 16 * 16;
      padded_blocks = (blocks + 15) / 16 * 16;
    }
    chosen_slots = kChosenTokens / plan.block;
    score_stride = std::max(kChunk, std::min(chosen_slots, std::max(1, slots)) * plan.block);
  }
  int32_t window() const { return std::max(1, std::min(slots, chosen_slots)); }

  int32_t queries;        // of a full tile; tiles start at multiples of it
  int32_t rows;           // the most rows of any tile
  int32_t score_queries;  // scored together
  int32_t score_rows;
  int32_t blocks;        // of the longest sequence
  int32_t slots;         // of a list that can be filled
  int32_t padded_reps;   // of the longest sequence, whole panels
  int32_t units;         // lists per query and KV head: 1, or the group's heads
  int32_t chosen_slots;  // chosen blocks whose scores are held at once
  int32_t score_stride;  // floats between two rows of scores
  // With parts:
  int32_t survivors = 0;    // the most of a query
  int32_t fine_blocks = 0;  // the most whose parts a query scores, in whole panels
  int32_t padded_blocks = 0;
};

inline int32_t NumTiles(const PlanSequence& seq, const TileShape& shape) {
  if (seq.q_len == 0) return 0;
  return (seq.kv_len - 1) / shape.queries - seq.first_position() / shape.queries + 1;
}

// Whether all keys and values of a head are packed once, for all tiles. Worth it where many tiles read most of them:
// 8 % of dense and 14 % of sparse prefill at 8k went into packing tile by tile.
inline bool PacksHeads(const PlanSequence& seq) { return seq.q_len >= 1024 && seq.q_len >= seq.kv_len / 4; }

// As few heads at a time as keep all threads busy: their packed keys and values are the largest part of the workspace.
inline int32_t HeadsAtOnce(const PlanImpl& plan, const TileShape& shape, const PlanSequence& seq) {
  const int32_t tiles = std::max(1, NumTiles(seq, shape));
  return std::clamp((4 * plan.max_threads + tiles - 1) / tiles, 1, plan.num_kv_heads);
}

// Whether a sequence's tiles are read in pieces by several workers (split.h).
inline bool SplitsTiles(const PlanImpl& plan, const PlanSequence& seq) {
  return int64_t{seq.q_len} * plan.group < kPackRows;
}

inline bool HasManyRows(const PlanImpl& plan, const PlanSequence& seq) {
  return plan.top_k > 0 && int64_t{seq.q_len} * plan.group >= kPackRows;
}
inline bool PacksReps(const PlanImpl& plan, const PlanSequence& seq) {
  return !plan.PartsInReps() && HasManyRows(plan, seq);
}
inline int32_t PaddedReps(const PlanImpl& plan, const PlanSequence& seq) {
  return (plan.NumRepRows(seq.kv_len) + 15) / 16 * 16;
}

// Whether the parts of all blocks of a sequence are packed once for all tiles. Few queries pack those of their own
// survivors, some hundred blocks for every 10 queries or so.
inline bool PacksParts(const PlanImpl& plan, const PlanSequence& seq) {
  return plan.parts > 1 && HasManyRows(plan, seq) && (plan.PartsInReps() || seq.q_len >= seq.kv_len / 256);
}
inline int32_t PaddedParts(const PlanImpl& plan, const PlanSequence& seq) {
  return (seq.kv_len / plan.block + 15) / 16 * 16 * plan.parts;
}

// Softmaxes under way, one a row.
struct RowStates {
  RowStates() = default;
  RowStates(int64_t rows, int64_t head_dim, Carver& carver)
      : max(carver.Take<float>(rows)), sum(carver.Take<float>(rows)), values(carver.Take<float>(rows * head_dim)) {}
  float* max = nullptr;     // [rows] the largest score so far
  float* sum = nullptr;     // [rows] of the exponentials beside it
  float* values = nullptr;  // [rows][head_dim] Σ p · v
};

// What one worker needs for one tile of the forward.
struct TileScratch {
  TileScratch(const PlanImpl& plan, const TileShape& shape, Carver& carver) {
    const int64_t rows = shape.rows, d = plan.head_dim;
    queries = carver.Take<uint32_t>(rows * d);
    scores = carver.Take<float>(rows * shape.score_stride);
    part = RowStates(rows, d, carver);
    total = RowStates(rows, d, carver);
    panels = carver.Take<uint32_t>(kChunk * d);
    values = carver.Take<uint32_t>(kChunk * d);
    query_ptrs = carver.Take<const uint32_t*>(rows);
    score_ptrs = carver.Take<float*>(rows);
    sum_ptrs = carver.Take<float*>(rows);
    list_queries = carver.Take<const uint32_t*>(rows);
    list_scores = carver.Take<float*>(rows);
    list_sums = carver.Take<float*>(rows);
    if (plan.top_k == 0) return;
    const int64_t lists = int64_t{shape.queries} * shape.units;
    const int64_t width = plan.rep_width;
    lists_of_tile = carver.Take<int32_t>(lists * shape.slots);
    list_counts = carver.Take<int32_t>(lists);
    block_head = carver.Take<int32_t>(shape.blocks);
    block_bits = carver.Take<uint64_t>(shape.blocks / 64 + 1);
    next_entry = carver.Take<int32_t>(lists * std::min(shape.slots, shape.chosen_slots));
    rep_queries = carver.Take<uint32_t>(shape.score_rows * width);
    rep_scores = carver.Take<float>(int64_t{shape.score_rows} * shape.padded_reps);
    rep_panels = carver.Take<uint32_t>(4 * kPanel * width);
    rep_query_ptrs = carver.Take<const uint32_t*>(shape.score_rows);
    rep_score_ptrs = carver.Take<float*>(shape.score_rows);
    rep_weights = carver.Take<float>(shape.score_rows);
    group_scores = carver.Take<float>(std::max(shape.padded_reps, shape.slots + 16));
    block_scores = carver.Take<float>(shape.blocks + 16);
    candidates = carver.Take<int32_t>(std::max(shape.blocks, shape.padded_reps) + 16);
    if (plan.parts == 1) return;
    const int64_t choosers = int64_t{shape.score_rows} / plan.rows_of_group();
    survivors = carver.Take<int32_t>(choosers * shape.survivors);
    scored_bits = carver.Take<uint64_t>(shape.blocks / 64 + 1);
    part_panels = carver.Take<uint32_t>(plan.parts * kPanel * width);
    part_rows = carver.Take<uint32_t>(kPanel * width);
    part_scores = carver.Take<float>(int64_t{shape.score_rows} * plan.parts * kPanel);
    part_score_ptrs = carver.Take<float*>(shape.score_rows);
    part_max = carver.Take<float>(int64_t{shape.score_rows} * shape.padded_blocks);
    part_sum = carver.Take<float>(int64_t{shape.score_rows} * shape.padded_blocks);
    fine_blocks = carver.Take<int32_t>(shape.fine_blocks);
    fine_max = carver.Take<float>(plan.rows_of_group() * shape.fine_blocks);
    fine_sum = carver.Take<float>(plan.rows_of_group() * shape.fine_blocks);
    fine_scores = carver.Take<float>(plan.rows_of_group() * shape.fine_blocks);
    fine_ptrs = carver.Take<float*>(plan.rows_of_group());
    fine_values = carver.Take<float>(shape.fine_blocks);
  }

  uint32_t* queries = nullptr;              // [rows][words]
  float* scores = nullptr;                  // [rows][score_stride]
  RowStates part, total;                    // of a segment, and of all that came before
  uint32_t* panels = nullptr;               // [kChunk / 16][words][16]
  uint32_t* values = nullptr;               // [kChunk / per_word][head_dim]
  const uint32_t** query_ptrs = nullptr;    // [rows] into queries, or into q itself
  float** score_ptrs = nullptr;             // [rows]
  float** sum_ptrs = nullptr;               // [rows]
  const uint32_t** list_queries = nullptr;  // [rows] those of the rows that chose one block
  float** list_scores = nullptr;
  float** list_sums = nullptr;
  int32_t* lists_of_tile = nullptr;  // [queries][units][slots]
  int32_t* list_counts = nullptr;    // [queries][units]
  int32_t* block_head = nullptr;     // [blocks] first entry of a block's list, -1 for none
  uint64_t* block_bits = nullptr;    // [blocks / 64 + 1] blocks that somebody chose
  int32_t* next_entry = nullptr;     // [queries · units · slots]
  uint32_t* rep_queries = nullptr;   // [score_rows][rep_width] as the scores want them
  float* rep_scores = nullptr;       // [score_rows][padded_reps]
  uint32_t* rep_panels = nullptr;    // [4][rep_width][16]
  const uint32_t** rep_query_ptrs = nullptr;
  float** rep_score_ptrs = nullptr;
  float* rep_weights = nullptr;   // [score_rows]
  float* group_scores = nullptr;  // [padded_reps]
  float* block_scores = nullptr;  // [blocks], infllm2-64
  int32_t* candidates = nullptr;
  // With parts:
  int32_t* survivors = nullptr;       // [queries scored together · units][shape.survivors], ascending
  uint64_t* scored_bits = nullptr;    // [blocks / 64 + 1] blocks whose parts somebody scores
  uint32_t* part_panels = nullptr;    // [parts][rep_width][16]
  uint32_t* part_rows = nullptr;      // [16][rep_width] rows of one panel
  float* part_scores = nullptr;       // [score_rows][parts][16] of 16 blocks
  float** part_score_ptrs = nullptr;  // [score_rows]
  float* part_max = nullptr;          // [score_rows][padded_blocks] the largest score of a block's parts
  float* part_sum = nullptr;          // [score_rows][padded_blocks] their exponentials beside it
  int32_t* fine_blocks = nullptr;     // [shape.fine_blocks] of one query and chooser, ascending
  float* fine_max = nullptr;          // [rows_of_group][shape.fine_blocks] theirs of part_max
  float* fine_sum = nullptr;
  float* fine_scores = nullptr;  // [rows_of_group][shape.fine_blocks] their exponentials
  float** fine_ptrs = nullptr;   // [rows_of_group] into fine_scores
  float* fine_values = nullptr;  // [shape.fine_blocks] the group's
};

// What all workers share in one forward: packed keys and values of some heads, representatives where the caller keeps
// none, and their panels.
struct SharedScratch {
  SharedScratch(const PlanImpl& plan, const TileShape& shape, Carver& carver) {
    int64_t heads = 0;
    for (const PlanSequence& seq : plan.seqs) {
      if (!PacksHeads(seq)) continue;
      heads = std::max<int64_t>(heads, HeadsAtOnce(plan, shape, seq));
      packed_head_size = std::max(packed_head_size, int64_t{seq.kv_len + 15} / 16 * 16 * plan.head_dim);
    }
    packed_keys = carver.Take<uint32_t>(heads * packed_head_size);
    packed_values = carver.Take<uint32_t>(heads * packed_head_size);
    if (plan.top_k == 0) return;
    reps = carver.Take<uint32_t>(plan.num_reps * plan.num_kv_heads * plan.rep_width);
    int64_t rows = 0;
    for (const PlanSequence& seq : plan.seqs) rows += PacksReps(plan, seq) ? PaddedReps(plan, seq) : 0;
    panels = carver.Take<uint32_t>(rows * plan.num_kv_heads * plan.rep_width);
    panel_starts = carver.Take<int64_t>(static_cast<int64_t>(plan.seqs.size()));
    if (plan.parts == 1) return;
    rows = 0;
    for (const PlanSequence& seq : plan.seqs) rows += PacksParts(plan, seq) ? PaddedParts(plan, seq) : 0;
    part_panels = carver.Take<uint32_t>(rows * plan.num_kv_heads * plan.rep_width);
    part_starts = carver.Take<int64_t>(static_cast<int64_t>(plan.seqs.size()));
  }
  uint32_t* packed_keys = nullptr;    // [heads at once][packed_head_size]
  uint32_t* packed_values = nullptr;  // [heads at once][packed_head_size]
  int64_t packed_head_size = 0;       // words, enough for f32
  void* reps = nullptr;               // [num_reps][num_kv_heads][rep_width]
  uint32_t* panels = nullptr;         // per packing sequence: [num_kv_heads][padded reps / 16][words][16]
  int64_t* panel_starts = nullptr;  // [num_seqs] words before the sequence's panels, -1 for sequences that do not pack
  uint32_t* part_panels = nullptr;  // per packing sequence: [num_kv_heads][padded parts / 16][words][16]
  int64_t* part_starts = nullptr;   // [num_seqs] as panel_starts
};

// What one worker needs for one sequence and KV head of the backward: f32 throughout.
struct BackwardScratch {
  BackwardScratch(const PlanImpl& plan, const TileShape& shape, Carver& carver) {
    const int64_t rows = shape.rows, d = plan.head_dim;
    queries = carver.Take<float>(rows * d);
    d_out = carver.Take<float>(rows * d);
    d_queries = carver.Take<float>(rows * d);
    row = carver.Take<float>(d);
    delta = carver.Take<float>(rows);
    offset = carver.Take<float>(rows);
    probabilities = carver.Take<float>(rows * kChunk);
    d_scores = carver.Take<float>(rows * kChunk);
    const int64_t padded = int64_t{plan.max_kv_len + 15} / 16 * 16;
    key_panels = carver.Take<uint32_t>(padded * d);
    value_panels = carver.Take<uint32_t>(padded * d);
    keys = carver.Take<uint32_t>(plan.dtype == PHSA_F32 ? 0 : kChunk * d);
    for (auto** ptrs : {&query_ptrs, &d_out_ptrs, &p_ptrs, &ds_ptrs, &d_query_ptrs}) *ptrs = carver.Take<float*>(rows);
    list_rows = carver.Take<int32_t>(rows);
    if (plan.dtype != PHSA_F32) {
      d_keys = carver.Take<float>(int64_t{plan.max_kv_len} * d);
      d_values = carver.Take<float>(int64_t{plan.max_kv_len} * d);
    }
    if (plan.top_k == 0) return;
    const int64_t lists = int64_t{shape.queries} * shape.units;
    block_head = carver.Take<int32_t>(shape.blocks);
    block_bits = carver.Take<uint64_t>(shape.blocks / 64 + 1);
    next_entry = carver.Take<int32_t>(lists * shape.slots);
  }

  float* queries = nullptr;          // [rows][head_dim]
  float* d_out = nullptr;            // [rows][head_dim]
  float* d_queries = nullptr;        // [rows][head_dim]
  float* row = nullptr;              // [head_dim]
  float* delta = nullptr;            // [rows] out · d_out
  float* offset = nullptr;           // [rows] log-sum-exp in base 2
  float* probabilities = nullptr;    // [rows][kChunk]
  float* d_scores = nullptr;         // [rows][kChunk]
  uint32_t* key_panels = nullptr;    // [token / 16][head_dim][16]
  uint32_t* value_panels = nullptr;  // [token / 16][head_dim][16]
  uint32_t* keys = nullptr;          // [kChunk][head_dim] where the keys are not f32
  float** query_ptrs = nullptr;
  float** d_out_ptrs = nullptr;
  float** p_ptrs = nullptr;
  float** ds_ptrs = nullptr;
  float** d_query_ptrs = nullptr;
  int32_t* list_rows = nullptr;
  float* d_keys = nullptr;    // [max_kv_len][head_dim] where the gradients are not f32
  float* d_values = nullptr;  // [max_kv_len][head_dim]
  int32_t* block_head = nullptr;
  uint64_t* block_bits = nullptr;
  int32_t* next_entry = nullptr;
};

size_t ForwardWorkspaceSize(const PlanImpl& plan);
size_t BackwardWorkspaceSize(const PlanImpl& plan);

}  // namespace phsa::cpu

#endif  // PHSA_ATTENTION_CPU_WORKSPACE_H_
