// attend on the CPU, alone or fused with the selection.
//
// A tile of queries reads keys in two ways. The band (init, local, or everything for queries that read all) is shared
// by the whole tile: chunks of kChunk keys at absolute positions, a running softmax. The chosen blocks differ from
// query to query: they are visited block by block, each packed once and multiplied with the rows that chose it.
//
// The band comes in segments of kSegment keys, and chosen blocks in windows, each with a softmax of its own; they are
// added up in order. A tile of few queries is cut there (split.h): several workers share what it reads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/cpu/backward.h"
#include "attention/cpu/band.h"
#include "attention/cpu/block_lists.h"
#include "attention/cpu/select.h"
#include "attention/cpu/split.h"
#include "base/dtype.h"

namespace phsa::cpu {
namespace {

// Keys as panels and values as words of one KV head, all tokens of a sequence; null: they are packed tile by tile.
struct PackedHead {
  const uint32_t* keys = nullptr;    // [token / 16][words][16]
  const uint32_t* values = nullptr;  // [token / per_word][head_dim]
};

class TileAttention {
 public:
  TileAttention(const Call& call, const Tile& tile, const TileScratch& scratch, const PackedHead& packed)
      : call_(call),
        plan_(call.plan),
        kv_(call.params.kv),
        products_(call.products),
        tile_(tile),
        s_(scratch),
        packed_(packed),
        seq_(plan_.seqs[tile.seq]),
        rows_((tile.end - tile.begin) * plan_.group),
        factor_(plan_.scale * kLog2E),
        panel_size_(int64_t{call.words} * kPanel) {}

  void Run() {
    LoadQueries();
    Clear(s_.total);
    for (const BandPart part : {BandPart::kInit, BandPart::kLocal}) {
      const auto [first, last] = SegmentsOf(plan_, tile_, part);
      for (int32_t segment = first; segment < last; ++segment) {
        Band(part, segment, s_.part);
        AddToTotal(s_.part);
      }
    }
    if (plan_.top_k > 0) {
      const int32_t windows = WindowsOf(LongestList(), call_.shape);
      for (int32_t window = 0; window < windows; ++window) {
        Chosen(window, s_.part);
        AddToTotal(s_.part);
      }
    }
    Store();
  }

  // The same in pieces, each with states of its own.
  void RunSegment(BandPart part, int32_t segment, const RowStates& states) {
    LoadQueries();
    Band(part, segment, states);
  }
  void RunChosen(const RowStates* states, int32_t windows) {
    LoadQueries();
    LongestList();
    if (NumLists() > 1) BlockLists::Reset(s_.block_head, s_.block_bits, call_.shape.blocks);
    for (int32_t window = 0; window < windows; ++window) Chosen(window, states[window]);
  }
  void Join(const RowStates* states, int32_t count) {
    Clear(s_.total);
    for (int32_t i = 0; i < count; ++i) AddToTotal(states[i]);
    Store();
  }

 private:
  int32_t Position(int32_t row) const { return tile_.begin + row / plan_.group; }
  int32_t Row(int32_t position) const { return (position - tile_.begin) * plan_.group; }

  int64_t QueryOffset(int32_t row, int64_t token_stride, int64_t head_stride) const {
    const int64_t query = seq_.q_start + Position(row) - seq_.first_position();
    return query * token_stride + (int64_t{tile_.kv_head} * plan_.group + row % plan_.group) * head_stride;
  }

  void LoadQueries() {
    const ForwardParams& params = call_.params;
    const int32_t d = plan_.head_dim;
    const bool in_place = plan_.dtype == PHSA_F32 || products_.per_word == 2;
    for (int32_t r = 0; r < rows_; ++r) {
      const void* q = At(params.q, plan_.dtype, QueryOffset(r, params.q_token_stride, params.q_head_stride));
      if (in_place) {
        s_.query_ptrs[r] = static_cast<const uint32_t*>(q);
      } else {
        uint32_t* dst = s_.queries + int64_t{r} * d;
        call_.kernels.to_f32(q, plan_.dtype, d, reinterpret_cast<float*>(dst));
        s_.query_ptrs[r] = dst;
      }
      s_.score_ptrs[r] = s_.scores + int64_t{r} * call_.shape.score_stride;
    }
  }

  void Clear(const RowStates& states) {
    std::fill_n(states.max, rows_, -std::numeric_limits<float>::infinity());
    std::fill_n(states.sum, rows_, 0.0f);
    std::fill_n(states.values, int64_t{rows_} * plan_.head_dim, 0.0f);
  }

  // What follows is accumulated there.
  void Begin(const RowStates& states) {
    Clear(states);
    states_ = &states;
    for (int32_t r = 0; r < rows_; ++r) s_.sum_ptrs[r] = states.values + int64_t{r} * plan_.head_dim;
  }

  void AddToTotal(const RowStates& states) {
    const int64_t d = plan_.head_dim;
    for (int32_t r = 0; r < rows_; ++r) {
      if (states.sum[r] == 0) continue;  // the row reads nothing there
      call_.kernels.merge(states.values + r * d, states.max[r], states.sum[r], plan_.head_dim, factor_,
                          s_.total.values + r * d, &s_.total.max[r], &s_.total.sum[r]);
    }
  }

  void Band(BandPart part, int32_t segment, const RowStates& states) {
    Begin(states);
    int32_t packed_chunk = -1;
    const auto [first, end] = BandTokens(plan_, tile_.begin, tile_.end, part);
    const int32_t from = std::max(first, segment * kSegment), to = std::min(end, (segment + 1) * kSegment);
    ForEachBandRun(plan_, tile_.begin, tile_.end, part, from, to,
                   [&](int32_t chunk, int32_t query_begin, int32_t query_end, int32_t lo, int32_t hi) {
                     // The first run of a chunk begins lowest.
                     if (packed_.keys == nullptr && chunk != packed_chunk) {
                       PackChunk(lo, std::min(chunk + kChunk, to), chunk);
                       packed_chunk = chunk;
                     }
                     BandRows(Row(query_begin), Row(query_end), chunk, lo, hi);
                   });
  }

  // Whether the values of a whole chunk can be read where they lie.
  bool ValuesInPlace() const {
    return plan_.kv_dtype == PHSA_F32 && (plan_.page_size == 0 || plan_.page_size % kChunk == 0);
  }

  // Keys (and values, unless they are read in place) of tokens [lo, hi) at their places in the chunk.
  void PackChunk(int32_t lo, int32_t hi, int32_t chunk) {
    for (int32_t t = lo / kPanel * kPanel; t < hi; t += kPanel) {
      const int32_t n = std::min(kPanel, hi - t);
      PackKeys(plan_, call_.params, products_, tile_.seq, t, tile_.kv_head, n,
               s_.panels + (t - chunk) / kPanel * panel_size_);
      if (!ValuesInPlace()) {
        PackValues(plan_, call_.params, products_, tile_.seq, t, tile_.kv_head, n,
                   s_.values + int64_t{(t - chunk) / products_.per_word} * plan_.head_dim);
      }
    }
  }

  // Rows [begin, end) read tokens [lo, hi) of the chunk, each up to its own position.
  void BandRows(int32_t begin, int32_t end, int32_t chunk, int32_t lo, int32_t hi) {
    const int32_t panels = (hi - lo + kPanel - 1) / kPanel;
    const uint32_t* keys = packed_.keys != nullptr ? packed_.keys + int64_t{lo / kPanel} * panel_size_
                                                   : s_.panels + (lo - chunk) / kPanel * panel_size_;
    products_.dot(s_.query_ptrs + begin, end - begin, keys, panels, call_.words, s_.score_ptrs + begin);
    for (int32_t r = begin; r < end; ++r) {
      const int32_t seen = std::min(Position(r) + 1, hi) - lo;
      const int32_t outside = plan_.WindowBegin(Position(r)) - lo;
      if (outside >= seen) {  // all of the chunk is before the window: a softmax over nothing has no maximum
        std::fill_n(s_.score_ptrs[r], panels * kPanel, 0.0f);
        continue;
      }
      if (outside > 0) std::fill_n(s_.score_ptrs[r], outside, -std::numeric_limits<float>::infinity());
      std::fill(s_.score_ptrs[r] + seen, s_.score_ptrs[r] + panels * kPanel, -std::numeric_limits<float>::infinity());
      Softmax(r, panels * kPanel);
    }
    const int32_t words = (hi - lo + products_.per_word - 1) / products_.per_word;
    const uint32_t* values = s_.values + int64_t{(lo - chunk) / products_.per_word} * plan_.head_dim;
    int64_t stride = plan_.head_dim;
    if (packed_.values != nullptr) {
      values = packed_.values + int64_t{lo / products_.per_word} * plan_.head_dim;
    } else if (ValuesInPlace()) {
      values = static_cast<const uint32_t*>(At(kv_.v, PHSA_F32, ValueOffset(plan_, kv_, tile_.seq, lo, tile_.kv_head)));
      stride = kv_.v_token_stride;
    }
    products_.accumulate(reinterpret_cast<const uint32_t* const*>(s_.score_ptrs + begin), end - begin, words, 16,
                         values, stride, plan_.head_dim, s_.sum_ptrs + begin);
  }

  void Softmax(int32_t row, int32_t n) {
    const float rescale = products_.softmax(s_.score_ptrs[row], n, factor_, &states_->max[row], &states_->sum[row]);
    if (rescale != 1.0f) call_.kernels.scale(s_.sum_ptrs[row], plan_.head_dim, rescale);
  }

  // Rows of list `list`: all heads of a query that choose together.
  int32_t ListRow(int32_t list) const {
    return list / call_.shape.units * plan_.group + list % call_.shape.units * plan_.rows_of_group();
  }

  int32_t NumLists() const { return (tile_.end - tile_.begin) * call_.shape.units; }

  int32_t LongestList() {
    int32_t longest = 0;
    for (int32_t list = 0; list < NumLists(); ++list) {
      // Rows that read everything had it all in the band.
      if (plan_.ReadsAll(Position(ListRow(list)) / plan_.block)) s_.list_counts[list] = 0;
      longest = std::max(longest, s_.list_counts[list]);
    }
    return longest;
  }

  void Chosen(int32_t window_index, const RowStates& states) {
    Begin(states);
    const int32_t m = plan_.block, window = call_.shape.window();
    const int32_t first = window_index * window;
    if (NumLists() == 1) {
      ChosenOfOne(s_.lists_of_tile + first, std::min(s_.list_counts[0] - first, window));
      return;
    }
    BlockLists blocks(s_.block_head, s_.block_bits, s_.next_entry, window);
    for (int32_t list = 0; list < NumLists(); ++list) {
      const int32_t* chosen = s_.lists_of_tile + int64_t{list} * call_.shape.slots;
      const int32_t last = std::min(s_.list_counts[list], first + window);
      for (int32_t j = first; j < last; ++j) blocks.Add(list, j - first, chosen[j]);
    }
    blocks.ForEachBlock([&](int32_t block) { ScoreBlock(blocks, block); });
    for (int32_t list = 0; list < NumLists(); ++list) {
      const int32_t count = std::min(s_.list_counts[list] - first, window);
      if (count <= 0) continue;
      const int32_t row = ListRow(list);
      for (int32_t r = row; r < row + plan_.rows_of_group(); ++r) Softmax(r, count * m);
    }
    blocks.ForEachBlock([&](int32_t block) { AddBlock(blocks, block); });
    blocks.Clear();
  }

  // The same where there is one list, as in decoding: the blocks lie side by side as the keys of the band do, so that
  // products run over several at once.
  void ChosenOfOne(const int32_t* chosen, int32_t count) {
    const int32_t m = plan_.block, at_once = kChunk / m, words = m / products_.per_word;
    for (int32_t j = 0; j < count; j += at_once) {
      const int32_t n = std::min(at_once, count - j);
      for (int32_t i = 0; i < n * m; i += kPanel) {
        const int32_t token = chosen[j + i / m] * m + i % m;
        PackKeys(plan_, call_.params, products_, tile_.seq, token, tile_.kv_head, kPanel,
                 s_.panels + i / kPanel * panel_size_);
      }
      for (int32_t r = 0; r < rows_; ++r) s_.list_scores[r] = s_.score_ptrs[r] + j * m;
      products_.dot(s_.query_ptrs, rows_, s_.panels, n * m / kPanel, call_.words, s_.list_scores);
    }
    if (count > 0) {
      for (int32_t r = 0; r < rows_; ++r) Softmax(r, count * m);
    }
    for (int32_t j = 0; j < count; j += at_once) {
      const int32_t n = std::min(at_once, count - j);
      for (int32_t i = 0; i < n; ++i) {
        const int32_t token = chosen[j + i] * m;
        PackValues(plan_, call_.params, products_, tile_.seq, token, tile_.kv_head, m,
                   s_.values + int64_t{i} * words * plan_.head_dim);
      }
      for (int32_t r = 0; r < rows_; ++r) s_.list_scores[r] = s_.score_ptrs[r] + j * words;
      products_.accumulate(reinterpret_cast<const uint32_t* const*>(s_.list_scores), rows_, n * words, BlockStep(),
                           s_.values, plan_.head_dim, plan_.head_dim, s_.sum_ptrs);
    }
  }

  // Words of a chosen block that are added up before they join the rest, whether blocks come one by one or together.
  int BlockStep() const { return std::min(16, plan_.block / products_.per_word); }

  // scores of the block's keys with the rows that chose it, each at its place in its row.
  void ScoreBlock(const BlockLists& blocks, int32_t block) {
    const int32_t m = plan_.block;
    const uint32_t* keys = s_.panels;
    if (packed_.keys != nullptr) {
      keys = packed_.keys + int64_t{block} * (m / kPanel) * panel_size_;
    } else {
      for (int32_t p = 0; p < m / kPanel; ++p) {
        PackKeys(plan_, call_.params, products_, tile_.seq, block * m + p * kPanel, tile_.kv_head, kPanel,
                 s_.panels + p * panel_size_);
      }
    }
    int32_t n = 0;
    blocks.ForEachList(block, [&](int32_t list, int32_t slot) {
      const int32_t row = ListRow(list);
      for (int32_t r = row; r < row + plan_.rows_of_group(); ++r, ++n) {
        s_.list_queries[n] = s_.query_ptrs[r];
        s_.list_scores[n] = s_.score_ptrs[r] + slot * m;
      }
    });
    products_.dot(s_.list_queries, n, keys, m / kPanel, call_.words, s_.list_scores);
  }

  void AddBlock(const BlockLists& blocks, int32_t block) {
    const int32_t m = plan_.block;
    const int32_t words = m / products_.per_word;
    const uint32_t* values = s_.values;
    int64_t stride = plan_.head_dim;
    if (packed_.values != nullptr) {
      values = packed_.values + int64_t{block} * words * plan_.head_dim;
    } else if (plan_.kv_dtype == PHSA_F32) {
      values = static_cast<const uint32_t*>(
          At(kv_.v, PHSA_F32, ValueOffset(plan_, kv_, tile_.seq, block * m, tile_.kv_head)));
      stride = kv_.v_token_stride;
    } else {
      PackValues(plan_, call_.params, products_, tile_.seq, block * m, tile_.kv_head, m, s_.values);
    }
    int32_t n = 0;
    blocks.ForEachList(block, [&](int32_t list, int32_t slot) {
      const int32_t row = ListRow(list);
      for (int32_t r = row; r < row + plan_.rows_of_group(); ++r, ++n) {
        s_.list_scores[n] = s_.score_ptrs[r] + slot * words;
        s_.list_sums[n] = s_.sum_ptrs[r];
      }
    });
    products_.accumulate(reinterpret_cast<const uint32_t* const*>(s_.list_scores), n, words, BlockStep(), values,
                         stride, plan_.head_dim, s_.list_sums);
  }

  void Store() {
    const ForwardParams& params = call_.params;
    for (int32_t r = 0; r < rows_; ++r) {
      float* const values = s_.total.values + int64_t{r} * plan_.head_dim;
      const auto [sum, lse] = Denominator(r);
      call_.kernels.scale(values, plan_.head_dim, 1.0f / sum);
      call_.kernels.from_f32(
          values, plan_.dtype, plan_.head_dim,
          At(params.out, plan_.dtype, QueryOffset(r, params.out_token_stride, params.out_head_stride)));
      if (params.lse != nullptr) params.lse[QueryOffset(r, plan_.num_q_heads, 1)] = lse;
    }
  }

  // What a row's values are divided by, and the logarithm of all its softmax adds up.
  struct Division {
    float sum, lse;
  };
  Division Denominator(int32_t row) const {
    const float largest = s_.total.max[row] * plan_.scale, sum = s_.total.sum[row];
    if (call_.params.sinks == nullptr) return {sum, largest + std::log(sum)};
    // A sink is one more key, without a value; it joins when all else has, so that no cut of the keys changes a bit.
    const float sink = call_.params.sinks[int64_t{tile_.kv_head} * plan_.group + row % plan_.group];
    if (sink <= largest) {
      const float with = sum + std::exp(sink - largest);
      return {with, largest + std::log(with)};
    }
    const float beside = 1 + sum * std::exp(largest - sink);  // beside the sink's own 1
    return {beside * std::exp(sink - largest), sink + std::log(beside)};
  }

  const Call& call_;
  const PlanImpl& plan_;
  const KeyValues& kv_;
  const Products& products_;
  const Tile& tile_;
  const TileScratch& s_;
  const PackedHead& packed_;
  const PlanSequence& seq_;
  const RowStates* states_ = nullptr;
  const int32_t rows_;
  const float factor_;
  const int64_t panel_size_;
};

// The lists of the tile from the caller's selection.
void ReadLists(const Call& call, const Tile& tile, const TileScratch& scratch) {
  const PlanImpl& plan = call.plan;
  const PlanSequence& seq = plan.seqs[tile.seq];
  for (int32_t query = tile.begin; query < tile.end; ++query) {
    for (int32_t unit = 0; unit < call.shape.units; ++unit) {
      const int64_t list = int64_t{query - tile.begin} * call.shape.units + unit;
      const int32_t* from =
          call.params.selection + ((seq.q_start + query - seq.first_position()) * plan.selection_heads +
                                   int64_t{tile.kv_head} * call.shape.units + unit) *
                                      plan.top_k;
      int32_t count = 0;
      while (count < call.shape.slots && from[count] >= 0) ++count;
      std::copy_n(from, count, scratch.lists_of_tile + list * call.shape.slots);
      scratch.list_counts[list] = count;
    }
  }
}

// Packs keys and values of heads [head_begin, head_begin + heads) of one sequence into the shared scratch.
void PackHeads(const Call& call, int32_t seq, int32_t head_begin, int32_t heads) {
  const PlanImpl& plan = call.plan;
  const int32_t kv_len = plan.seqs[seq].kv_len, d = plan.head_dim;
  constexpr int32_t kTokensPerTask = 256;
  const int32_t tasks = (kv_len + kTokensPerTask - 1) / kTokensPerTask;
  ParallelFor(call.params.executor, int64_t{tasks} * heads, [&](int32_t task, int32_t /*worker*/) {
    const int32_t slot = task / tasks, kv_head = head_begin + slot, begin = task % tasks * kTokensPerTask;
    uint32_t* keys = call.shared.packed_keys + slot * call.shared.packed_head_size;
    uint32_t* values = call.shared.packed_values + slot * call.shared.packed_head_size;
    for (int32_t t = begin; t < std::min(kv_len, begin + kTokensPerTask); t += kPanel) {
      const int32_t n = std::min(kPanel, kv_len - t);
      PackKeys(plan, call.params, call.products, seq, t, kv_head, n, keys + int64_t{t} * call.words);
      PackValues(plan, call.params, call.products, seq, t, kv_head, n,
                 values + int64_t{t / call.products.per_word} * d);
    }
  });
}

// What a call computes.
struct Stages {
  bool represent, select, attend;
};

// Runs the tiles of a call, each in the scratch of the worker that has it.
class TileRuns {
 public:
  // tiles: the scratch of all workers.
  TileRuns(const Call& call, const Stages& stages, std::byte* tiles) : call_(call), stages_(stages), tiles_(tiles) {
    Carver counter(nullptr);
    TileScratch(call.plan, call.shape, counter);
    tile_size_ = counter.size();
  }

  TileScratch ScratchOf(int32_t worker) const {
    Carver own(tiles_ + static_cast<size_t>(worker) * tile_size_);
    return TileScratch(call_.plan, call_.shape, own);
  }

  void ResetLists() const {
    const Executor& executor = call_.params.executor;
    const int32_t workers = executor.run == nullptr ? 1 : executor.num_threads;
    for (int32_t w = 0; w < workers; ++w) {
      const TileScratch scratch = ScratchOf(w);
      BlockLists::Reset(scratch.block_head, scratch.block_bits, call_.shape.blocks);
    }
  }

  // Sequences with many queries pack each head's keys and values once, a few heads at a time.
  void RunPacked() const {
    const PlanImpl& plan = call_.plan;
    const SharedScratch& shared = call_.shared;
    for (int32_t s = 0; s < static_cast<int32_t>(plan.seqs.size()); ++s) {
      const PlanSequence& seq = plan.seqs[s];
      if (!Packs(seq)) continue;
      const int32_t num_tiles = NumTiles(seq, call_.shape), at_once = HeadsAtOnce(plan, call_.shape, seq);
      for (int32_t head = 0; head < plan.num_kv_heads; head += at_once) {
        const int32_t heads = std::min(at_once, plan.num_kv_heads - head);
        PackHeads(call_, s, head, heads);
        ParallelFor(call_.params.executor, int64_t{num_tiles} * heads, [&](int32_t task, int32_t worker) {
          const int32_t slot = task / num_tiles;
          const PackedHead packed{shared.packed_keys + slot * shared.packed_head_size,
                                  shared.packed_values + slot * shared.packed_head_size};
          RunTile(TileOf(plan, call_.shape, s, head + slot, task % num_tiles), worker, packed);
        });
      }
    }
  }

  // All others run together and pack what each tile needs; those with few queries in pieces, which RunSplit does.
  void RunOthers() const {
    const PlanImpl& plan = call_.plan;
    int64_t all = 0;
    for (const PlanSequence& seq : plan.seqs) all += Tasks(seq);
    ParallelFor(call_.params.executor, all, [&](int64_t task, int32_t worker) {
      for (int32_t s = 0;; ++s) {
        const int64_t tasks = Tasks(plan.seqs[s]);
        if (task >= tasks) {
          task -= tasks;
          continue;
        }
        // A task below `tasks` has a tile; the analyzer does not see that.
        const int32_t num_tiles = NumTiles(plan.seqs[s], call_.shape);
        const auto head = static_cast<int32_t>(task / num_tiles);  // NOLINT(clang-analyzer-core.DivideZero)
        RunTile(TileOf(plan, call_.shape, s, head, static_cast<int32_t>(task % num_tiles)), worker, PackedHead{});
        return;
      }
    });
  }

 private:
  bool Packs(const PlanSequence& seq) const {
    return stages_.attend && !SplitsTiles(call_.plan, seq) && PacksHeads(seq);
  }
  // Of RunOthers.
  int64_t Tasks(const PlanSequence& seq) const {
    if (SplitsTiles(call_.plan, seq) || Packs(seq)) return 0;
    return int64_t{NumTiles(seq, call_.shape)} * call_.plan.num_kv_heads;
  }

  void RunTile(const Tile& tile, int32_t worker, const PackedHead& packed) const {
    const TileScratch scratch = ScratchOf(worker);
    if (stages_.select) {
      SelectTile(call_, tile, scratch, false);
    } else if (call_.plan.top_k > 0) {
      ReadLists(call_, tile, scratch);
    }
    if (stages_.attend) TileAttention(call_, tile, scratch, packed).Run();
  }

  const Call& call_;
  const Stages stages_;
  std::byte* const tiles_;
  size_t tile_size_;
};

void FinishPiece(const Call& call, SplitUnit& unit, const TileScratch& scratch, const Stages& stages) {
  if (unit.left.fetch_sub(1, std::memory_order_acq_rel) != 1 || !stages.attend) return;
  TileAttention(call, unit.tile, scratch, {}).Join(unit.states, unit.segments() + unit.windows);
}

void ChooseAndRead(const Call& call, SplitUnit& unit, const TileScratch& scratch, const Stages& stages) {
  if (stages.select) {
    SelectTile(call, unit.tile, scratch, unit.score_pieces > 0);
  } else {
    ReadLists(call, unit.tile, scratch);
  }
  if (stages.attend) TileAttention(call, unit.tile, scratch, {}).RunChosen(unit.states + unit.segments(), unit.windows);
  FinishPiece(call, unit, scratch, stages);
}

// Tiles of few queries in pieces. The scores of representatives come first; who has the last of a unit chooses by them
// and reads what was chosen, while others read the band. Who has the last piece of a unit adds them up. No worker waits
// for another, and which one does what changes no bit.
void RunSplit(const Call& call, const SplitUnits& units, const Stages& stages, const TileRuns& runs) {
  const bool chooses = call.plan.top_k > 0;
  int64_t scores = 0, others = 0;
  for (SplitUnit& unit : units.all()) {
    const int32_t segments = stages.attend ? unit.segments() : 0;
    unit.score_pieces = stages.select ? ScorePieces(call, unit.tile) : 0;
    unit.chooses_apart = chooses && unit.score_pieces == 0;
    unit.first_score = scores;
    unit.first_other = others;
    scores += unit.score_pieces;
    others += segments + (unit.chooses_apart ? 1 : 0);
    unit.scores_left.store(unit.score_pieces, std::memory_order_relaxed);
    unit.left.store(segments + (chooses ? 1 : 0), std::memory_order_relaxed);
  }
  ParallelFor(call.params.executor, scores + others, [&](int64_t task, int32_t worker) {
    TileScratch scratch = runs.ScratchOf(worker);
    if (task < scores) {
      SplitUnit& unit = units.Find(task, &SplitUnit::first_score);
      unit.Lend(&scratch);
      ScorePiece(call, unit.tile, scratch, static_cast<int32_t>(task - unit.first_score));
      if (unit.scores_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        ChooseAndRead(call, unit, scratch, stages);
      }
      return;
    }
    SplitUnit& unit = units.Find(task - scores, &SplitUnit::first_other);
    const auto piece = static_cast<int32_t>(task - scores - unit.first_other) - (unit.chooses_apart ? 1 : 0);
    if (piece < 0) {
      ChooseAndRead(call, unit, scratch, stages);
      return;
    }
    const bool init = piece < unit.init_segments;
    TileAttention(call, unit.tile, scratch, {})
        .RunSegment(init ? BandPart::kInit : BandPart::kLocal,
                    init ? piece : unit.first_local + piece - unit.init_segments, unit.states[piece]);
    FinishPiece(call, unit, scratch, stages);
  });
}

void RunStages(const PlanImpl& plan, const ForwardParams& params, Stages stages) {
  const Kernels& kernels = ActiveKernels();
  const Products& products = ProductsFor(kernels, plan.dtype == PHSA_BF16);
  const TileShape shape(plan);
  Carver carver(params.workspace);
  const SharedScratch shared(plan, shape, carver);
  const RepView reps = params.kv.reps == nullptr ? RepView(plan, shared.reps) : RepView(plan, params.kv);
  const Call call{plan,
                  shape,
                  kernels,
                  products,
                  params,
                  shared,
                  reps,
                  plan.head_dim / products.per_word,
                  plan.rep_width / products.per_word};
  stages.select = stages.select && plan.top_k > 0;
  // Representatives that the caller keeps are written even at K = 0: a later call may read the cache with another K.
  if (plan.representation != Representation::kNone && (reps.packed() ? stages.select : stages.represent)) {
    RepresentRows(plan, kernels, params, reps);
  }
  if (stages.select) {
    PackReps(call);
    PackAllParts(call);
  }

  const SplitUnits split(plan, shape, carver);
  const TileRuns runs(call, stages, static_cast<std::byte*>(params.workspace) + carver.size());
  if (plan.top_k > 0 && split.num_seqs() < static_cast<int32_t>(plan.seqs.size())) runs.ResetLists();
  runs.RunPacked();
  runs.RunOthers();
  if (stages.attend || stages.select) RunSplit(call, split, stages, runs);
}

void RepresentStage(const PlanImpl& plan, const ForwardParams& params) {
  RepresentRows(plan, ActiveKernels(), params, RepView(plan, params.kv));
}
void SelectStage(const PlanImpl& plan, const ForwardParams& params) { RunStages(plan, params, {false, true, false}); }
void AttendStage(const PlanImpl& plan, const ForwardParams& params) { RunStages(plan, params, {false, false, true}); }
void Forward(const PlanImpl& plan, const ForwardParams& params) { RunStages(plan, params, {true, true, true}); }

}  // namespace

size_t ForwardWorkspaceSize(const PlanImpl& plan) {
  const TileShape shape(plan);
  Carver carver(nullptr);
  SharedScratch(plan, shape, carver);
  SplitUnits(plan, shape, carver);
  Carver tile(nullptr);
  TileScratch(plan, shape, tile);
  return carver.size() + tile.size() * static_cast<size_t>(plan.max_threads);
}

}  // namespace phsa::cpu

namespace phsa {

const Backend& CpuBackend() {
  static constexpr Backend backend = {&cpu::RepresentStage, &cpu::SelectStage, &cpu::AttendStage, &cpu::Forward,
                                      &cpu::Backward};
  return backend;
}

}  // namespace phsa
