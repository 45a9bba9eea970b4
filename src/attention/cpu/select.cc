#include "attention/cpu/select.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/dtype.h"

namespace phsa::cpu {
namespace {

// Below this a group's score may miss heads that f32 has no numbers for: such blocks are ranked by logarithms.
constexpr float kLeastScore = 0x1p-90f;

// weight_i = lambda / m + (1 - lambda) · flag_i / count; 1 / m for a block without punctuation, to the bit what mean
// pooling gives.
void BlockWeights(const uint8_t* flags, int32_t m, float lambda, float* weight) {
  int32_t count = 0;
  if (flags != nullptr) {
    for (int32_t i = 0; i < m; ++i) count += flags[i] != 0;
  }
  const float mean = 1.0f / static_cast<float>(m);
  if (count == 0 || lambda == 1.0f) {
    std::fill_n(weight, m, mean);
    return;
  }
  const float plain = lambda * mean;
  const float punctuation = (1.0f - lambda) / static_cast<float>(count);
  for (int32_t i = 0; i < m; ++i) weight[i] = flags[i] != 0 ? plain + punctuation : plain;
}

// Keys of neighbouring tokens in the plan's dtype.
struct KeyRows {
  const void* first;
  int64_t stride;  // elements
};

// The most keys of a representative, in any dtype.
struct KeyScratch {
  alignas(64) uint32_t words[64 * 256];
};

// Copies the keys of tokens [token, token + rows), which lie in one page, to rows [at, at + rows) of scratch.
void CopyKeys(const PlanImpl& plan, const Kernels& kernels, const ForwardParams& params, int32_t seq, int32_t token,
              int32_t kv_head, int32_t rows, int32_t at, KeyScratch& scratch) {
  const KeyValues& kv = params.kv;
  const int32_t d = plan.head_dim;
  const void* const keys = At(kv.k, plan.kv_dtype, KeyOffset(plan, kv, seq, token, kv_head));
  float scales[64];
  if (plan.kv_dtype == PHSA_INT8) LoadScales(plan, params, params.kv_scales.k, seq, token, kv_head, rows, scales);
  for (int32_t i = 0; i < rows; ++i) {
    const void* const from = At(keys, plan.kv_dtype, i * kv.k_token_stride);
    void* const to = At(static_cast<void*>(scratch.words), plan.dtype, int64_t{at + i} * d);
    if (plan.kv_dtype == PHSA_INT8) {
      kernels.from_codes(static_cast<const int8_t*>(from), scales[i], plan.dtype, d, to);
    } else {
      std::memcpy(to, from, DtypeSize(plan.dtype) * static_cast<size_t>(d));
    }
  }
}

// The keys of tokens [token, token + rows), which lie in one page: where they are, or what codes stand for in
// `scratch`.
KeyRows KeysOf(const PlanImpl& plan, const Kernels& kernels, const ForwardParams& params, int32_t seq, int32_t token,
               int32_t kv_head, int32_t rows, KeyScratch& scratch) {
  const KeyValues& kv = params.kv;
  if (plan.kv_dtype != PHSA_INT8) {
    return {At(kv.k, plan.kv_dtype, KeyOffset(plan, kv, seq, token, kv_head)), kv.k_token_stride};
  }
  CopyKeys(plan, kernels, params, seq, token, kv_head, rows, 0, scratch);
  return {scratch.words, plan.head_dim};
}

void RepresentRow(const PlanImpl& plan, const Kernels& kernels, const ForwardParams& params, int32_t seq,
                  int32_t kv_head, int32_t row, void* dst) {
  const KeyValues& kv = params.kv;
  const int32_t d = plan.head_dim;
  const int32_t token = row * plan.rep_stride;
  KeyScratch scratch;
  switch (plan.representation) {
    case Representation::kNone: return;
    case Representation::kMixedMean: {
      float weight[64];
      const uint8_t* flags = kv.flags == nullptr ? nullptr : kv.flags + FlagOffset(plan, kv, seq, token);
      BlockWeights(flags, plan.rep_span, plan.lambda[kv_head], weight);
      const KeyRows keys = KeysOf(plan, kernels, params, seq, token, kv_head, plan.rep_span, scratch);
      kernels.weighted_sum(keys.first, keys.stride, plan.dtype, plan.rep_span, d, weight, dst);
      return;
    }
    case Representation::kBounds: {
      const KeyRows keys = KeysOf(plan, kernels, params, seq, token, kv_head, plan.block, scratch);
      kernels.bounds(keys.first, keys.stride, plan.dtype, plan.block, d, dst);
      return;
    }
    case Representation::kPooled: {
      float weight[kPoolSize];
      std::fill_n(weight, kPoolSize, 1.0f / kPoolSize);
      // The 32 keys may lie on two pages: they are brought together first.
      for (int32_t at = 0; at < kPoolSize; at += kPoolStride) {
        CopyKeys(plan, kernels, params, seq, token + at, kv_head, kPoolStride, at, scratch);
      }
      kernels.weighted_sum(scratch.words, d, plan.dtype, kPoolSize, d, weight, dst);
      return;
    }
  }
}

// Panel p of a sequence's representatives: rows 16 p and on, those that exist.
void PackRepPanel(const Call& call, int32_t seq, int32_t kv_head, int32_t panel, uint32_t* dst) {
  const PlanImpl& plan = call.plan;
  const int32_t first = panel * kPanel;
  const int32_t count = std::min(kPanel, plan.NumRepRows(plan.seqs[seq].kv_len) - first);
  const void* rows[kPanel];
  for (int32_t i = 0; i < count; ++i) rows[i] = call.reps.Row(seq, first + i, kv_head);
  call.products.pack_panel(rows, plan.dtype, count, plan.rep_width, dst);
}

// quest: Σ_c max(q_c · hi_c, q_c · lo_c) is the dot product of (hi, lo) with (q where positive, q where negative).
void SplitSigns(const PlanImpl& plan, const void* q, int32_t per_word, void* dst) {
  const int32_t d = plan.head_dim;
  if (per_word == 2) {  // bf16 stays bf16
    const auto* in = static_cast<const uint16_t*>(q);
    auto* out = static_cast<uint16_t*>(dst);
    for (int32_t c = 0; c < d; ++c) {
      const bool negative = (in[c] & 0x8000u) != 0;
      out[c] = negative ? 0 : in[c];
      out[d + c] = negative ? in[c] : 0;
    }
    return;
  }
  auto* out = static_cast<float*>(dst);
  for (int32_t c = 0; c < d; ++c) {
    const float x = out[c];
    out[d + c] = x < 0 ? x : 0.0f;
    out[c] = x < 0 ? 0.0f : x;
  }
}

// Part `part` of block `block`, from the keys.
void MakePart(const Call& call, int32_t seq, int32_t kv_head, int32_t block, int32_t part, void* dst) {
  const PlanImpl& plan = call.plan;
  const KeyValues& kv = call.params.kv;
  const int32_t m = plan.block / plan.parts, token = block * plan.block + part * m;
  const uint8_t* flags = kv.flags == nullptr ? nullptr : kv.flags + FlagOffset(plan, kv, seq, token);
  float weight[64];
  BlockWeights(flags, m, plan.lambda[kv_head], weight);
  KeyScratch scratch;
  const KeyRows keys = KeysOf(plan, call.kernels, call.params, seq, token, kv_head, m, scratch);
  call.kernels.weighted_sum(keys.first, keys.stride, plan.dtype, m, plan.head_dim, weight, dst);
}

// The parts of `count` blocks, at most 16: a panel has one part of each. rows_scratch: for parts that are kept nowhere.
void PackParts(const Call& call, int32_t seq, int32_t kv_head, const int32_t* blocks, int32_t count,
               uint32_t* rows_scratch, uint32_t* dst) {
  const PlanImpl& plan = call.plan;
  const void* rows[kPanel];
  for (int32_t p = 0; p < plan.parts; ++p) {
    for (int32_t i = 0; i < count; ++i) {
      if (plan.PartsInReps()) {  // a block's parts are neighbours
        rows[i] = p == 0 ? call.reps.Row(seq, blocks[i] * plan.parts, kv_head)
                         : At(rows[i], plan.dtype, call.reps.row_stride());
        continue;
      }
      void* const row = At(static_cast<void*>(rows_scratch), plan.dtype, int64_t{i} * plan.rep_width);
      MakePart(call, seq, kv_head, blocks[i], p, row);
      rows[i] = row;
    }
    call.products.pack_panel(rows, plan.dtype, count, plan.rep_width, dst + int64_t{p} * call.rep_words * kPanel);
  }
}

// The rows of q as the scores want them: words, of rep_width elements.
void RepQuery(const Call& call, const void* q, uint32_t* dst, const uint32_t** row) {
  const PlanImpl& plan = call.plan;
  const bool in_place = plan.dtype == PHSA_F32 || call.products.per_word == 2;
  if (plan.representation != Representation::kBounds && in_place) {
    *row = static_cast<const uint32_t*>(q);
    return;
  }
  *row = dst;
  if (call.products.per_word == 1) call.kernels.to_f32(q, plan.dtype, plan.head_dim, reinterpret_cast<float*>(dst));
  if (plan.representation == Representation::kBounds) SplitSigns(plan, q, call.products.per_word, dst);
}

// infllm2-64: block B takes the best of entries 4B - 1 … 4B + 3 that the query sees: [first, end).
std::pair<int32_t, int32_t> PooledEntries(int32_t block, int32_t visible, int32_t per_block) {
  return {std::max(0, per_block * block - 1), std::min(visible, per_block * (block + 1))};
}
void PoolOntoBlocks(const float* entries, int32_t visible, int32_t begin, int32_t end, int32_t per_block,
                    float* blocks) {
  for (int32_t b = begin; b < end; ++b) {
    const auto [from, to] = PooledEntries(b, visible, per_block);
    float best = -HUGE_VALF;
    for (int32_t j = from; j < to; ++j) best = std::max(best, entries[j]);
    blocks[b] = best;
  }
}

int32_t PanelsOf(int32_t visible) { return (visible + kPanel - 1) / kPanel; }

// Raw scores of rows [first, first + rows) of scratch.rep_query_ptrs over panels [begin, end) of the representatives;
// scratch.rep_score_ptrs says where they lie.
void ScoreRows(const Call& call, const Tile& tile, const TileScratch& scratch, int32_t first, int32_t rows,
               int32_t begin, int32_t end) {
  const PlanImpl& plan = call.plan;
  const PlanSequence& seq = plan.seqs[tile.seq];
  const int64_t panel_size = int64_t{call.rep_words} * kPanel;
  const int64_t packed = call.shared.panel_starts[tile.seq];
  for (int32_t p = begin; p < end; p += 4) {
    const int32_t n = std::min(4, end - p);
    const uint32_t* source = scratch.rep_panels;
    if (packed >= 0) {
      source = call.shared.panels + packed + (int64_t{tile.kv_head} * PaddedReps(plan, seq) / kPanel + p) * panel_size;
    } else {
      for (int32_t i = 0; i < n; ++i) {
        PackRepPanel(call, tile.seq, tile.kv_head, p + i, scratch.rep_panels + i * panel_size);
      }
    }
    for (int32_t r = first; r < first + rows; ++r) {
      scratch.rep_score_ptrs[r] = scratch.rep_scores + int64_t{r} * call.shape.padded_reps + p * kPanel;
    }
    call.products.dot(scratch.rep_query_ptrs + first, rows, source, n, call.rep_words, scratch.rep_score_ptrs + first);
  }
  for (int32_t r = first; r < first + rows; ++r) {
    scratch.rep_score_ptrs[r] = scratch.rep_scores + int64_t{r} * call.shape.padded_reps;
  }
}

// The logarithms (base 2) of a head's softmax values from its raw scores s[0, n); weight: 1 over the sum of their
// exponentials.
void ToLogs(float* s, int32_t n, double factor, float weight) {
  const double lse = *std::max_element(s, s + n) * factor - std::log2(double{weight});
  for (int32_t t = 0; t < n; ++t) s[t] = static_cast<float>(s[t] * factor - lse);
}

// Chooses `count` of the candidates [first, last) by the logarithms (base 2) of the heads' softmax values of `visible`
// entries, log_rows[h][t]: blocks, or what is pooled onto them. Returns the scores by block, right for what is chosen.
// Rare: their exponentials were too small for f32. largest: [visible].
const float* ChooseByLogs(const Call& call, const TileScratch& scratch, const float* const* log_rows, int32_t heads,
                          int32_t visible, bool pooled, int32_t first, int32_t last, int32_t count, float* largest,
                          int32_t* out) {
  const PlanImpl& plan = call.plan;
  const int32_t per_block = plan.block / kPoolStride;
  // A block's score is at least its largest head's, and at most `heads` times that.
  std::fill_n(largest, visible, -HUGE_VALF);
  for (int32_t h = 0; h < heads; ++h) {
    for (int32_t t = 0; t < visible; ++t) {
      if (log_rows[h][t] > largest[t]) largest[t] = log_rows[h][t];
    }
  }
  float* values = largest;
  if (pooled) {
    values = scratch.block_scores;
    PoolOntoBlocks(largest, visible, first, last, per_block, values);
  }
  const auto choose = [&] {
    call.kernels.top_k(values, first, last, count, scratch.candidates, out);
    float least = values[out[0]];
    for (int32_t j = 1; j < count; ++j) least = std::min(least, values[out[j]]);
    return least;
  };
  float base = choose();
  if (heads > 1 && plan.settings.group_reduce != GroupReduce::kMax && base > -HUGE_VALF) {
    // Of what may still be among the best, the sums over the heads; relative to the worst of the first choice, so that
    // no bit is lost.
    const float reach = base - std::log2(static_cast<float>(heads)) - 0.01f;
    const auto sum = [&](int32_t t) {
      double top = -HUGE_VAL, total = 0;
      for (int32_t h = 0; h < heads; ++h) top = std::max(top, double{log_rows[h][t]});
      for (int32_t h = 0; h < heads; ++h) total += std::exp2(log_rows[h][t] - top);
      return top + std::log2(total);
    };
    for (int32_t t = first; t < last; ++t) {
      if (values[t] < reach) {
        values[t] = -HUGE_VALF;
        continue;
      }
      double best = -HUGE_VAL;
      if (pooled) {
        const auto [begin, end] = PooledEntries(t, visible, per_block);
        for (int32_t j = begin; j < end; ++j) {
          if (largest[j] >= reach) best = std::max(best, sum(j));
        }
      } else {
        best = sum(t);
      }
      values[t] = best > -HUGE_VAL ? static_cast<float>(best - base) : -HUGE_VALF;  // no number: the last
    }
    choose();
  } else {
    base = 0;
  }
  for (int32_t j = 0; j < count; ++j) values[out[j]] = std::exp2(values[out[j]] + base);
  return values;
}

// The smallest of the values that are listed.
float Least(const float* values, const int32_t* list, int32_t count) {
  float least = values[list[0]];
  for (int32_t j = 1; j < count; ++j) least = std::min(least, values[list[j]]);
  return least;
}

// What the queries of one block b have in common.
struct Candidates {
  Candidates(const PlanImpl& plan, int32_t own_block)
      : b(own_block), first(plan.init_blocks), last(plan.CandidateEnd(b)), visible(plan.VisibleRepRows(b)) {}
  int32_t b;
  int32_t first, last;  // blocks [first, last)
  int32_t visible;      // rows of reps
};

// The `count` best candidates by the rows of reps, for the heads in rows [row, row + heads), whose exponentials are in
// scratch.rep_score_ptrs: the choice itself, or with parts the survivors. Returns the scores by block; with `count` 0,
// or as many as there are candidates, they are all that is wanted.
const float* ChooseByReps(const Call& call, const Tile& tile, const TileScratch& scratch, const Candidates& blocks,
                          int32_t row, int32_t heads, int32_t count, int32_t* out) {
  const PlanImpl& plan = call.plan;
  const bool pooled = plan.representation == Representation::kPooled;
  const int32_t visible = blocks.visible, first = blocks.first, last = blocks.last;
  call.kernels.group_scores(scratch.rep_score_ptrs + row, scratch.rep_weights + row, heads,
                            plan.settings.group_reduce == GroupReduce::kMax, pooled ? 0 : first,
                            pooled ? visible : last, scratch.group_scores);
  const float* scores = scratch.group_scores;
  if (pooled) {
    PoolOntoBlocks(scratch.group_scores, visible, first, last, plan.block / kPoolStride, scratch.block_scores);
    scores = scratch.block_scores;
  }
  if (last - first <= count) return scores;
  call.kernels.top_k(scores, first, last, count, scratch.candidates, out);
  if (Least(scores, out, count) >= kLeastScore) return scores;
  ScoreRows(call, tile, scratch, row, heads, 0, PanelsOf(visible));
  for (int32_t h = row; h < row + heads; ++h) {
    ToLogs(scratch.rep_score_ptrs[h], visible, plan.scale * kLog2E, scratch.rep_weights[h]);
  }
  return ChooseByLogs(call, scratch, scratch.rep_score_ptrs + row, heads, visible, pooled, first, last, count,
                      scratch.group_scores, out);
}

// Marks blocks [begin, end), begin a multiple of 16, for scoring; what else of their words is marked does not count.
void MarkAll(const TileScratch& scratch, int32_t begin, int32_t end) {
  if (begin < end) std::fill(scratch.scored_bits + begin / 64, scratch.scored_bits + (end - 1) / 64 + 1, ~uint64_t{0});
}

// Which blocks' parts are scored: those of all blocks, or, where there are more candidates than survivors, of what some
// chooser has among its own. Then the scores of reps are in scratch.rep_score_ptrs.
void Survive(const Call& call, const Tile& tile, const TileScratch& scratch, const Candidates& blocks, int32_t choosers,
             int32_t heads) {
  uint64_t* bits = scratch.scored_bits;
  const int32_t count = call.shape.survivors;
  if (blocks.last - blocks.first <= count) {
    std::fill_n(bits, blocks.b / 64, ~uint64_t{0});
    bits[blocks.b / 64] = (uint64_t{1} << (blocks.b % 64)) - 1;
    return;
  }
  const auto mark = [bits](int32_t t) { bits[t / 64] |= uint64_t{1} << (t % 64); };
  std::fill_n(bits, blocks.b / 64 + 1, uint64_t{0});
  for (int32_t t = 0; t < blocks.first; ++t) mark(t);
  for (int32_t t = blocks.last; t < blocks.b; ++t) mark(t);
  for (int32_t c = 0; c < choosers; ++c) {
    int32_t* out = scratch.survivors + int64_t{c} * count;
    ChooseByReps(call, tile, scratch, blocks, c * heads, heads, count, out);
    for (int32_t j = 0; j < count; ++j) mark(out[j]);
  }
}

// Scores of all rows over the parts of the marked blocks among [begin, end), into scratch.part_max and part_sum. begin
// is a multiple of 16.
void ScoreParts(const Call& call, const Tile& tile, const TileScratch& scratch, int32_t begin, int32_t end,
                int32_t rows) {
  const PlanImpl& plan = call.plan;
  const int64_t columns = int64_t{plan.parts} * kPanel, stride = call.shape.padded_blocks;
  const float factor = static_cast<float>(plan.scale * kLog2E);
  for (int32_t r = 0; r < rows; ++r) scratch.part_score_ptrs[r] = scratch.part_scores + r * columns;
  const auto dot = [&](const uint32_t* panels) {
    call.products.dot(scratch.rep_query_ptrs, rows, panels, plan.parts, call.rep_words, scratch.part_score_ptrs);
  };

  const int64_t packed = call.shared.part_starts[tile.seq];
  if (packed >= 0) {
    const int64_t panels_of_head = PaddedParts(plan, plan.seqs[tile.seq]) / kPanel;
    for (int32_t t = begin; t < end; t += kPanel) {
      if ((scratch.scored_bits[t / 64] >> (t % 64) & 0xffff) == 0) continue;
      const int64_t panel = tile.kv_head * panels_of_head + int64_t{t} / kPanel * plan.parts;
      dot(call.shared.part_panels + packed + panel * call.rep_words * kPanel);
      for (int32_t r = 0; r < rows; ++r) {
        call.kernels.sum_parts(scratch.part_score_ptrs[r], plan.parts, end - t, factor,
                               scratch.part_max + r * stride + t, scratch.part_sum + r * stride + t);
      }
    }
    return;
  }
  int32_t blocks[kPanel], count = 0;
  const auto score = [&] {
    PackParts(call, tile.seq, tile.kv_head, blocks, count, scratch.part_rows, scratch.part_panels);
    dot(scratch.part_panels);
    for (int32_t r = 0; r < rows; ++r) {
      float max[kPanel], sum[kPanel];
      call.kernels.sum_parts(scratch.part_score_ptrs[r], plan.parts, count, factor, max, sum);
      for (int32_t i = 0; i < count; ++i) {
        scratch.part_max[r * stride + blocks[i]] = max[i];
        scratch.part_sum[r * stride + blocks[i]] = sum[i];
      }
    }
    count = 0;
  };
  for (int32_t t = begin; t < end; t += kPanel) {
    for (uint64_t bits = scratch.scored_bits[t / 64] >> (t % 64) & 0xffff; bits != 0; bits &= bits - 1) {
      const int32_t block = t + __builtin_ctzll(bits);
      if (block >= end) break;
      blocks[count++] = block;
      if (count == kPanel) score();
    }
  }
  if (count > 0) score();
}

// The `count` best of a chooser's survivors by their parts, for the heads in rows [row, row + heads). Returns the
// scores of what is listed, by place in the list.
const float* ChooseByParts(const Call& call, const TileScratch& scratch, const Candidates& blocks, int32_t chooser,
                           int32_t row, int32_t heads, int32_t count, int32_t* out) {
  const PlanImpl& plan = call.plan;
  const int32_t candidates = blocks.last - blocks.first, num_survivors = std::min(candidates, call.shape.survivors);
  const bool all = num_survivors == candidates;
  const int32_t first = std::min(blocks.first, blocks.b);
  int32_t n = blocks.b;
  if (!all) {
    const int32_t* survivors = scratch.survivors + int64_t{chooser} * call.shape.survivors;
    n = 0;
    for (int32_t t = 0; t < first; ++t) scratch.fine_blocks[n++] = t;
    for (int32_t j = 0; j < num_survivors; ++j) scratch.fine_blocks[n++] = survivors[j];
    for (int32_t t = blocks.last; t < blocks.b; ++t) scratch.fine_blocks[n++] = t;
  }

  const double factor = plan.scale * kLog2E;
  float* weights = scratch.rep_weights + row;
  // Where every block is scored they stand in their order already.
  const auto of_head = [&](int32_t h, const float* of_blocks, float* gathered) -> const float* {
    const float* from = of_blocks + int64_t{row + h} * call.shape.padded_blocks;
    if (all) return from;
    float* to = gathered + int64_t{h} * call.shape.fine_blocks;
    for (int32_t i = 0; i < n; ++i) to[i] = from[scratch.fine_blocks[i]];
    return to;
  };
  for (int32_t h = 0; h < heads; ++h) {
    scratch.fine_ptrs[h] = scratch.fine_scores + int64_t{h} * call.shape.fine_blocks;
    const float* max = of_head(h, scratch.part_max, scratch.fine_max);
    const float* sum = of_head(h, scratch.part_sum, scratch.fine_sum);
    weights[h] = 1.0f / call.kernels.join_parts(max, sum, n, static_cast<float>(factor), scratch.fine_ptrs[h]);
  }
  call.kernels.group_scores(scratch.fine_ptrs, weights, heads, plan.settings.group_reduce == GroupReduce::kMax, 0, n,
                            scratch.fine_values);
  const float* scores = scratch.fine_values;
  if (num_survivors > count) {
    call.kernels.top_k(scores, first, first + num_survivors, count, scratch.candidates, out);
    if (Least(scores, out, count) < kLeastScore) {
      for (int32_t h = 0; h < heads; ++h) {
        const float* max = of_head(h, scratch.part_max, scratch.fine_max);
        const float* sum = of_head(h, scratch.part_sum, scratch.fine_sum);
        const double lse = *std::max_element(max, max + n) * factor - std::log2(double{weights[h]});
        for (int32_t i = 0; i < n; ++i) {
          scratch.fine_ptrs[h][i] = static_cast<float>(max[i] * factor + std::log2(double{sum[i]}) - lse);
        }
      }
      scores = ChooseByLogs(call, scratch, scratch.fine_ptrs, heads, n, false, first, first + num_survivors, count,
                            scratch.fine_values, out);
    }
  } else {
    for (int32_t j = 0; j < count; ++j) out[j] = first + j;
  }
  float* listed = scratch.group_scores;
  for (int32_t j = 0; j < count; ++j) {
    listed[j] = scores[out[j]];
    if (!all) out[j] = scratch.fine_blocks[out[j]];
  }
  return listed;
}

// Queries [begin, end) of a tile, all in one block.
struct Queries {
  Queries(const Call& call, int32_t query_begin, int32_t query_end)
      : begin(query_begin), end(query_end), blocks(call.plan, query_begin / call.plan.block) {
    const PlanImpl& plan = call.plan;
    candidates = blocks.last - blocks.first;
    count = plan.Chosen(blocks.b);
    choose = count > 0 && candidates > plan.top_k;
    score = choose || (count > 0 && call.params.selection_scores != nullptr);
    coarse = plan.parts == 1 || candidates > call.shape.survivors;
    rows = (end - begin) * plan.group;
  }
  int32_t begin, end;
  Candidates blocks;
  int32_t candidates = 0, count = 0, rows = 0;
  bool choose = false, score = false;
  bool coarse = false;  // by the rows of reps; else by the parts of all blocks
};

void LoadRepQueries(const Call& call, const Tile& tile, const TileScratch& scratch, const Queries& queries) {
  const PlanImpl& plan = call.plan;
  const ForwardParams& params = call.params;
  const PlanSequence& seq = plan.seqs[tile.seq];
  for (int32_t r = 0; r < queries.rows; ++r) {
    const int64_t query = seq.q_start + queries.begin - seq.first_position() + r / plan.group;
    const int64_t head = int64_t{tile.kv_head} * plan.group + r % plan.group;
    const void* q = At(params.q, plan.dtype, query * params.q_token_stride + head * params.q_head_stride);
    RepQuery(call, q, scratch.rep_queries + int64_t{r} * plan.rep_width, &scratch.rep_query_ptrs[r]);
  }
}

// `scored`: the first scores, coarse or not, are there.
void SelectQueries(const Call& call, const Tile& tile, const TileScratch& scratch, const Queries& queries,
                   bool scored) {
  const PlanImpl& plan = call.plan;
  const ForwardParams& params = call.params;
  const TileShape& shape = call.shape;
  const PlanSequence& seq = plan.seqs[tile.seq];
  const Candidates& blocks = queries.blocks;
  const int32_t begin = queries.begin, end = queries.end, count = queries.count, rows = queries.rows;
  const bool choose = queries.choose, score = queries.score;
  const int32_t heads = plan.rows_of_group();

  if (score) {
    LoadRepQueries(call, tile, scratch, queries);
    if (queries.coarse) {
      ScoreRows(call, tile, scratch, 0, rows, 0, scored ? 0 : PanelsOf(blocks.visible));
      for (int32_t r = 0; r < rows; ++r) {
        scratch.rep_weights[r] =
            1.0f / call.kernels.exponentials(scratch.rep_score_ptrs[r], blocks.visible, plan.scale * kLog2E);
      }
    }
    if (plan.parts > 1) {
      Survive(call, tile, scratch, blocks, (end - begin) * shape.units, heads);
      if (queries.coarse || !scored) ScoreParts(call, tile, scratch, 0, blocks.b, rows);
    }
  }

  for (int32_t query = begin; query < end; ++query) {
    for (int32_t unit = 0; unit < shape.units; ++unit) {
      const int64_t list = int64_t{query - tile.begin} * shape.units + unit;
      int32_t* out = scratch.lists_of_tile + list * shape.slots;
      scratch.list_counts[list] = count;
      const int32_t row = (query - begin) * plan.group + unit * heads;
      const float* scores = nullptr;
      if (score && plan.parts > 1) {
        scores = ChooseByParts(call, scratch, blocks, (query - begin) * shape.units + unit, row, heads, count, out);
      } else if (score) {
        scores = ChooseByReps(call, tile, scratch, blocks, row, heads, count, out);
      }
      if (!choose) {
        for (int32_t j = 0; j < count; ++j) out[j] = blocks.first + j;
      }

      const int64_t at = ((seq.q_start + query - seq.first_position()) * plan.selection_heads +
                          int64_t{tile.kv_head} * shape.units + unit) *
                         plan.top_k;
      if (params.selection != nullptr) {
        std::copy_n(out, count, params.selection + at);
        std::fill_n(params.selection + at + count, plan.top_k - count, -1);
      }
      if (params.selection_scores != nullptr) {
        for (int32_t j = 0; j < count; ++j) {
          params.selection_scores[at + j] = scores[plan.parts > 1 ? j : out[j]];
        }
        std::fill_n(params.selection_scores + at + count, plan.top_k - count, 0.0f);
      }
    }
  }
}

}  // namespace

void RepresentRows(const PlanImpl& plan, const Kernels& kernels, const ForwardParams& params, const RepView& reps) {
  constexpr int32_t kRowsPerTask = 64;
  const auto range = [&](const PlanSequence& seq) {
    const int32_t first = reps.packed() ? 0 : plan.NumRepRows(seq.first_position());
    return std::pair(first, plan.NumRepRows(seq.kv_len));
  };
  const auto tasks_of = [&](const PlanSequence& seq) {
    const auto [first, last] = range(seq);
    return int64_t{(last - first + kRowsPerTask - 1) / kRowsPerTask} * plan.num_kv_heads;
  };
  int64_t tasks = 0;
  for (const PlanSequence& seq : plan.seqs) tasks += tasks_of(seq);
  ParallelFor(params.executor, tasks, [&](int64_t task, int32_t /*worker*/) {
    int32_t s = 0;
    for (; task >= tasks_of(plan.seqs[s]); ++s) task -= tasks_of(plan.seqs[s]);
    const auto [first, last] = range(plan.seqs[s]);
    const int32_t begin = first + static_cast<int32_t>(task / plan.num_kv_heads) * kRowsPerTask;
    for (int32_t row = begin; row < std::min(last, begin + kRowsPerTask); ++row) {
      const int32_t kv_head = static_cast<int32_t>(task % plan.num_kv_heads);
      RepresentRow(plan, kernels, params, s, kv_head, row, reps.Row(s, row, kv_head));
    }
  });
}

void PackReps(const Call& call) {
  const PlanImpl& plan = call.plan;
  constexpr int32_t kPanelsPerTask = 16;
  int64_t start = 0, tasks = 0;
  const auto tasks_of = [&](int32_t s) {
    if (call.shared.panel_starts[s] < 0) return int64_t{0};
    return int64_t{(PaddedReps(plan, plan.seqs[s]) / kPanel + kPanelsPerTask - 1) / kPanelsPerTask} * plan.num_kv_heads;
  };
  for (int32_t s = 0; s < static_cast<int32_t>(plan.seqs.size()); ++s) {
    call.shared.panel_starts[s] = PacksReps(plan, plan.seqs[s]) ? start : -1;
    if (call.shared.panel_starts[s] < 0) continue;
    start += int64_t{PaddedReps(plan, plan.seqs[s])} * plan.num_kv_heads * call.rep_words;
    tasks += tasks_of(s);
  }
  ParallelFor(call.params.executor, tasks, [&](int64_t task, int32_t /*worker*/) {
    int32_t s = 0;
    for (; task >= tasks_of(s); ++s) task -= tasks_of(s);
    const int32_t kv_head = static_cast<int32_t>(task % plan.num_kv_heads);
    const int32_t panels = PaddedReps(plan, plan.seqs[s]) / kPanel;
    const int32_t begin = static_cast<int32_t>(task / plan.num_kv_heads) * kPanelsPerTask;
    for (int32_t p = begin; p < std::min(panels, begin + kPanelsPerTask); ++p) {
      PackRepPanel(
          call, s, kv_head, p,
          call.shared.panels + call.shared.panel_starts[s] + (int64_t{kv_head} * panels + p) * call.rep_words * kPanel);
    }
  });
}

void PackAllParts(const Call& call) {
  const PlanImpl& plan = call.plan;
  if (plan.parts == 1) return;
  for (int32_t s = 0; s < static_cast<int32_t>(plan.seqs.size()); ++s) call.shared.part_starts[s] = -1;
  int64_t start = 0;
  for (int32_t s = 0; s < static_cast<int32_t>(plan.seqs.size()); ++s) {
    const PlanSequence& seq = plan.seqs[s];
    if (!PacksParts(plan, seq)) continue;
    const int32_t blocks = seq.kv_len / plan.block, tasks = (blocks + kPanel - 1) / kPanel;
    const int64_t size = int64_t{plan.parts} * call.rep_words * kPanel;
    call.shared.part_starts[s] = start;
    ParallelFor(call.params.executor, int64_t{tasks} * plan.num_kv_heads, [&](int64_t task, int32_t /*worker*/) {
      alignas(64) uint32_t rows[16 * 256];
      const int32_t kv_head = static_cast<int32_t>(task / tasks), first = static_cast<int32_t>(task % tasks) * kPanel;
      int32_t list[kPanel];
      const int32_t count = std::min(kPanel, blocks - first);
      for (int32_t i = 0; i < count; ++i) list[i] = first + i;
      PackParts(call, s, kv_head, list, count, rows, call.shared.part_panels + start + task * size);
    });
    start += tasks * plan.num_kv_heads * size;
  }
}

namespace {

// The end of the queries that are scored together with the one at `begin`.
int32_t ScoredTogether(const Call& call, const Tile& tile, int32_t begin) {
  const int32_t block_end = (begin / call.plan.block + 1) * call.plan.block;
  return std::min({tile.end, block_end, begin + call.shape.score_queries});
}

// Panels of a piece of the scores: some microseconds of work, as many as it takes to hand it over.
constexpr int32_t kPanelsPerPiece = 16;

// Blocks of 16 (panels of reps; or 16 blocks' parts) in a piece, and of all.
struct ScoreCut {
  ScoreCut(const Call& call, const Queries& queries)
      : each(queries.coarse ? kPanelsPerPiece : std::max(1, kPanelsPerPiece / call.plan.parts)),
        all(PanelsOf(queries.coarse ? queries.blocks.visible : queries.blocks.b)) {}
  int32_t each, all;
};

}  // namespace

void SelectTile(const Call& call, const Tile& tile, const TileScratch& scratch, bool scored) {
  for (int32_t begin = tile.begin; begin < tile.end;) {
    const int32_t end = ScoredTogether(call, tile, begin);
    SelectQueries(call, tile, scratch, Queries(call, begin, end), scored);
    begin = end;
  }
}

int32_t ScorePieces(const Call& call, const Tile& tile) {
  if (call.plan.top_k == 0 || ScoredTogether(call, tile, tile.begin) != tile.end) return 0;
  const Queries queries(call, tile.begin, tile.end);
  if (!queries.score) return 0;
  const ScoreCut cut(call, queries);
  return cut.all <= cut.each ? 0 : (cut.all + cut.each - 1) / cut.each;
}

void ScorePiece(const Call& call, const Tile& tile, const TileScratch& scratch, int32_t piece) {
  const Queries queries(call, tile.begin, tile.end);
  const ScoreCut cut(call, queries);
  const int32_t begin = piece * cut.each, end = std::min(cut.all, begin + cut.each);
  LoadRepQueries(call, tile, scratch, queries);
  if (queries.coarse) {
    ScoreRows(call, tile, scratch, 0, queries.rows, begin, end);
    return;
  }
  const int32_t first = begin * kPanel, last = std::min(queries.blocks.b, end * kPanel);
  MarkAll(scratch, first, last);
  ScoreParts(call, tile, scratch, first, last, queries.rows);
}

}  // namespace phsa::cpu
