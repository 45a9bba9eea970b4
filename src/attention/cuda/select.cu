// Scores, group softmax and top-K: exact, and never queries × blocks of scores in memory, but a bound of two bytes.
//
// A group's score needs every head's normaliser, so the scores are needed twice. Two kernels:
//  1. Statistics: all scores by tensor cores; keeps per row (query and head) the log-sum-exp and, per query, item and
//     pair of heads, a weight: the sum of both heads' softmax values, each relative to a reference value of its row, in
//     bfloat16. An item is a block, or two or four neighbouring ones, of which the best one's weight is kept. Reference
//     values are log-sum-exps of what was seen so far: nearly the last ones.
//  2. Choose: once those are known, weights become bounds of a group's score at each item, from below and above. The
//     K-th largest bound from below is a threshold that K blocks are known to reach; only items whose bound from above
//     reaches it are scored again, by the warp that owns their 16 rows. Where the K-th best score is hardly a number of
//     f32 any more, which is rare, all candidates are scored once more and ranked by the logarithms of their scores.
//
// A unit of Statistics is 16 rows, the M of one tensor-core product: two heads (row / 8) of eight queries, or one head
// of sixteen where each head chooses for itself; so one lane holds both heads of a query, and no row is empty but where
// a group is odd. The windows of 64 representatives lie in shared memory in such an order that one lane of the product
// holds 16 neighbours of a row: their sums cost no shuffle. Choose's 16 rows are kPadded heads (the group rounded up to
// a power of two) × 16 / kPadded queries, row = head · queries + query.
//
// With parts a block has 2, 4 or 8 neighbouring representatives, and its score is their sum. Windows and subsets count
// representatives, all else blocks.
#include <cuda.h>

#include <algorithm>
#include <cfloat>

#include "attention/cuda/device.cuh"
#include "attention/cuda/wgmma.cuh"

namespace phsa::cuda {
namespace {

constexpr int kWindow = 64;  // representatives per window
constexpr int kSubset = 4;   // representatives per subset
constexpr int kUnits = 16;   // units per tile: four warpgroups
constexpr int kStageWindows = 2;
constexpr int kChooseWarps = 4;
constexpr int kCandidates = 128;   // per query, before the best K are kept; at least 64 + 16
constexpr int kList = 768;         // subsets that are scored at a time
constexpr int kStepSubsets = 512;  // that one step of marking adds at most

// Representatives of an item: of a subset, or of a block that is two.
__host__ __device__ constexpr int ItemReps(int parts) { return parts == 8 ? 8 : kSubset; }

// Head sizes that have Statistics for Hopper; the others take the plain one there too.
template <int kHeadDim>
constexpr bool kHasWgmma = kHeadDim == 64 || kHeadDim == 128;
// Weights from here on move a row's reference value at once.
constexpr float kMostWeight = 0x1p100f;
constexpr float kGuess = 0.7f;  // of what is no bound from below, as a threshold
// Below this a group's score may miss heads that f32 has no numbers for: such blocks are ranked by logarithms.
constexpr float kLeastScore = 0x1p-90f;
// Bounds are looser by this: both kernels round, and bounds are up to eight sums of bfloat16.
constexpr float kSlack = 1.0f / 32;

struct Group {
  int32_t size;          // heads that choose together
  int32_t padded;        // next power of two
  int32_t queries;       // of a warp of Choose
  int32_t kv_div;        // selection heads per KV head
  int32_t pairs;         // of heads: the units of the same queries
  int32_t unit_queries;  // of a unit of Statistics
  int32_t tile_units;    // of a tile, at most kUnits
  int32_t tile_queries;
};

struct SelectArgs {
  ForwardParams p;
  Group group;
  int32_t tile_begin, tile_end;
  int32_t row_items;    // of a row of `weights`
  int32_t epochs;       // of a unit in `bases`
  int32_t list_keys;    // what a query's candidates take: room for them, and neighbours begin in other banks
  bf16* weights;        // [unit][query][row_items]
  float* bases;         // [unit][epoch][16]: reference values, log2 units; +inf where one had to move in an epoch
  float* lse2;          // [unit][16], log2 units; +inf in rows of no head, or with nothing before the own block
  uint32_t rep_stride;  // of neighbouring representatives, in elements; 0: on pages
  bool copy_engine;     // representatives come through the tensor map
  bool all;             // score even where the candidates all fit, because the scores are wanted
};

// Stages, of two windows, are taken in turns: the last, which is nearest to the queries, then from the first on. The
// reference values follow before turns 1, 2, 4, 8 and so on: what lies between is an epoch.
__host__ __device__ __forceinline__ int32_t StageOfTurn(int32_t turn, int32_t stages) {
  return turn == 0 ? stages - 1 : turn - 1;
}
__device__ __forceinline__ int32_t TurnOfStage(int32_t stage, int32_t stages) {
  return stage == stages - 1 ? 0 : stage + 1;
}
__device__ __forceinline__ int32_t EpochOfTurn(int32_t turn) { return 32 - __clz(turn); }
__device__ __forceinline__ bool BeginsEpoch(int32_t turn) { return (turn & (turn - 1)) == 0; }

__device__ __forceinline__ bool NeedsScores(const SelectArgs& args, int32_t b) {
  if (args.all) return !args.p.shape.Dense(b) && args.p.shape.Candidates(b) > 0;
  return !args.p.shape.ReadsAll(b);
}

// Where the vector of a group's head `h` lies for query `q` of the sequence, or NULL where there is none.
template <typename T>
__device__ __forceinline__ const T* QueryRow(const SelectArgs& args, const SequenceView& view, int32_t head, int32_t h,
                                             int32_t q) {
  if (h >= args.group.size || q >= view.q_len) return nullptr;
  return static_cast<const T*>(args.p.q.data) + (view.q_start + static_cast<int64_t>(q)) * args.p.q.token_stride +
         (static_cast<int64_t>(head) * args.group.size + h) * args.p.q.head_stride;
}

// What a lane keeps of the two rows it holds, r and r + 8 of the unit.
struct RowPair {
  float base[2];         // reference value (log2 units); +inf in rows of no head, whose weights are zero
  float sum[2];          // of 2^(score - it), over the lane's own columns
  int32_t b[2], end[2];  // first representatives of the own block, and of the block where the candidates end
};

// Heads and queries of a unit's rows.
template <bool kPair>
struct UnitRows {
  int32_t q0, head0;
  __device__ UnitRows(const Group& group, int32_t tile_q0, int32_t unit)
      : q0(tile_q0 + unit / group.pairs * group.unit_queries), head0(unit % group.pairs * 2) {
    if (unit >= group.tile_units) head0 = group.size;  // an empty unit
  }
  __device__ int32_t query(int32_t row) const { return q0 + (kPair ? row % 8 : row); }
  __device__ int32_t head(int32_t row) const { return head0 + (kPair ? row / 8 : 0); }
};

template <int kParts, bool kPair>
__device__ __forceinline__ void InitRows(const SelectArgs& args, const SequenceView& view, const UnitRows<kPair>& unit,
                                         int r, RowPair& rows) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const bool used = unit.head0 < args.group.size;
    const int32_t b = (view.first_position() + min(unit.query(r + 8 * e), view.q_len - 1)) / kBlock;
    rows.b[e] = used ? b * kParts : 0;
    rows.end[e] = used ? args.p.shape.CandidateEnd(b) * kParts : 0;
    rows.base[e] = unit.head(r + 8 * e) < args.group.size ? 0.0f : INFINITY;
    rows.sum[e] = 0.0f;
  }
}

// A row's first reference value: its score at the last representative before its own block. Scores of real models may
// grow by hundreds of powers of two towards the query (where keys have a large part in common, which RoPE turns).
template <typename T, int kHeadDim>
__device__ __forceinline__ void GuessBases(const SelectArgs& args, const SequenceView& view, int32_t kv_head,
                                           const uint4 (&words)[2][kRowPieces<kHeadDim>], int c, float scale2,
                                           RowPair& rows) {
  const int32_t t = min(rows.b[0], rows.b[1]) - 1;  // a row of reps
  float score[2] = {};
  if (t >= 0) {
    const T* rep = static_cast<const T*>(args.p.reps.data) + kv_head * args.p.reps.head_stride +
                   RepOffset(args.p.batch, args.p.reps, args.p.shape.parts, view.seq, t) + c * 8;
#pragma unroll
    for (int i = 0; i < kRowPieces<kHeadDim>; ++i) {
      const uint4 piece = HasPiece<kHeadDim>(4 * i + c) ? *reinterpret_cast<const uint4*>(rep + i * 32) : uint4{};
      const auto add = [&](uint32_t of_rep, uint32_t of_row0, uint32_t of_row1) {
        const float2 y = Unpack<T>(of_rep), x0 = Unpack<T>(of_row0), x1 = Unpack<T>(of_row1);
        score[0] = fmaf(x0.y, y.y, fmaf(x0.x, y.x, score[0]));
        score[1] = fmaf(x1.y, y.y, fmaf(x1.x, y.x, score[1]));
      };
      add(piece.x, words[0][i].x, words[1][i].x);
      add(piece.y, words[0][i].y, words[1][i].y);
      add(piece.z, words[0][i].z, words[1][i].z);
      add(piece.w, words[0][i].w, words[1][i].w);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    score[e] += __shfl_xor_sync(~0u, score[e], 1);
    score[e] += __shfl_xor_sync(~0u, score[e], 2);
    const float base = ceilf(score[e] * scale2);
    if (t >= 0 && rows.base[e] < INFINITY && fabsf(base) < INFINITY) rows.base[e] = base;
  }
}

// The weights of a lane's items in a window, two a word: of its query, or of its two where rows are single heads.
template <int kParts, bool kPair>
struct Weights {
  static constexpr int kItems = 16 / ItemReps(kParts);
  static constexpr int kRows = kPair ? 1 : 2;
  uint32_t words[kRows][kItems / 2];
};

// The weights 2^(score - base) of a lane's scores, and their sums by row.
template <int kParts, bool kPair>
__device__ __forceinline__ void Weigh(const float (&acc)[8][4], const RowPair& rows, float scale2, float (&sum)[2],
                                      Weights<kParts, kPair>& weights) {
  constexpr int kRows = Weights<kParts, kPair>::kRows;
  float four_before[2], item_before[kRows];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float x[2][4];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[e][i] = Exp2(fmaf(acc[2 * k + i / 2][2 * e + i % 2], scale2, -rows.base[e]));
    }
    float item[kRows];
    if constexpr (kParts == 1) {
#pragma unroll
      for (int e = 0; e < kRows; ++e) {
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = kPair ? x[0][i] + x[1][i] : x[e][i];
        item[e] = fmaxf(fmaxf(y[0], y[1]), fmaxf(y[2], y[3]));
      }
    }
    float two[2][2], four[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      two[e][0] = x[e][0] + x[e][1];
      two[e][1] = x[e][2] + x[e][3];
      four[e] = two[e][0] + two[e][1];
    }
#pragma unroll
    for (int e = 0; e < kRows; ++e) {
      if constexpr (kParts == 2) {
        item[e] = kPair ? fmaxf(two[0][0] + two[1][0], two[0][1] + two[1][1]) : fmaxf(two[e][0], two[e][1]);
      } else if constexpr (kParts == 4) {
        item[e] = kPair ? four[0] + four[1] : four[e];
      }
    }
    if (k % 2 == 0) {
#pragma unroll
      for (int e = 0; e < 2; ++e) four_before[e] = four[e];
#pragma unroll
      for (int e = 0; e < kRows; ++e) {
        if constexpr (kParts < 8) item_before[e] = item[e];
      }
      continue;
    }
    const float eight[2] = {four_before[0] + four[0], four_before[1] + four[1]};
#pragma unroll
    for (int e = 0; e < kRows; ++e) {
      if constexpr (kParts < 8) {
        weights.words[e][k / 2] = Pack<bf16>(item_before[e], item[e]);
      } else if (k == 3) {
        weights.words[e][0] = kPair ? Pack<bf16>(sum[0] + sum[1], eight[0] + eight[1]) : Pack<bf16>(sum[e], eight[e]);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) sum[e] = k == 1 ? eight[e] : sum[e] + eight[e];
  }
}

// Scores of columns before `begin` and from `end` on count for nothing. `first`: the lane's first column.
__device__ __forceinline__ void MaskOthers(float (&acc)[8][4], int32_t begin, const int32_t (&end)[2], int32_t first) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (first + i < begin || first + i >= end[e]) acc[i / 2][2 * e + i % 2] = -INFINITY;
    }
  }
}

// Takes in the scores of a window. The reference value of a row follows at once only where a weight passes kMostWeight;
// the weights of its epoch are then relative to two values, and no bounds: `bases`, those of the epoch, say so.
template <int kParts, bool kPair>
__device__ __forceinline__ void TakeWindow(const float (&acc)[8][4], RowPair& rows, float scale2, float* bases,
                                           int lane, Weights<kParts, kPair>& weights) {
  float sum[2];
#pragma unroll 1
  for (int attempt = 0;; ++attempt) {
    Weigh<kParts, kPair>(acc, rows, scale2, sum, weights);
    // Once is enough, unless a score is no number.
    if (__all_sync(~0u, sum[0] < kMostWeight && sum[1] < kMostWeight) || attempt == 1) break;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t over = __ballot_sync(~0u, !(sum[e] < kMostWeight)) >> (lane & ~3) & 15u;
      float top = acc[0][2 * e];
#pragma unroll
      for (int i = 1; i < 16; ++i) top = fmaxf(top, acc[i / 2][2 * e + i % 2]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      if (over == 0) continue;
      const float base = ceilf(top * scale2);
      rows.sum[e] *= Exp2(rows.base[e] - base);
      rows.base[e] = base;
      if (lane % 4 == 0) bases[lane / 4 + 8 * e] = INFINITY;
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) rows.sum[e] += sum[e];
}

// The four lanes of each row agree on its sum so far, which becomes the reference value.
__device__ __forceinline__ void BeginEpoch(RowPair& rows, float* bases, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float total = rows.sum[e];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const float base = rows.base[e] + log2f(total);
    if (total > 0.0f && fabsf(base) < INFINITY) {
      rows.sum[e] *= Exp2(rows.base[e] - base);
      rows.base[e] = base;
    }
    if (lane % 4 == 0) bases[lane / 4 + 8 * e] = rows.base[e];
  }
}

// What a warp knows about its rows' windows.
struct WindowEnds {
  int32_t none;     // windows from here on hold nothing before the own blocks
  int32_t own;      // windows that end after this hold an own block, or what follows it
  int32_t partial;  // windows that end after this hold no candidates, or not only
  __device__ explicit WindowEnds(const RowPair& rows)
      : none(__reduce_max_sync(~0u, max(rows.b[0], rows.b[1]))),
        own(__reduce_min_sync(~0u, min(rows.b[0], rows.b[1]))),
        partial(__reduce_min_sync(~0u, min(rows.end[0], rows.end[1]))) {}
};

// One window of a warp, from scores to weights, which go to `weights`: the lane's first item in its first query's row.
template <int kParts, bool kPair>
__device__ __forceinline__ void TakeScores(float (&acc)[8][4], RowPair& rows, const WindowEnds& ends, float scale2,
                                           float* bases, bf16* weights, int64_t row_items, int w, int32_t init,
                                           int lane) {
  const int32_t first = w * kWindow, end = first + kWindow, own_first = first + lane % 4 * 16;
  if (first >= ends.none) return;
  if (__builtin_expect(end > ends.own, 0)) MaskOthers(acc, 0, rows.b, own_first);
  Weights<kParts, kPair> taken;
  TakeWindow<kParts, kPair>(acc, rows, scale2, bases, lane, taken);
  if (__builtin_expect(first < init || end > ends.partial, 0)) {  // weights are of candidates alone
    MaskOthers(acc, init, rows.end, own_first);
    float sum[2];
    Weigh<kParts, kPair>(acc, rows, scale2, sum, taken);
  }
  bf16* to = weights + w * (kWindow / ItemReps(kParts));
#pragma unroll
  for (int e = 0; e < taken.kRows; ++e) {
    if constexpr (kParts == 8) {
      *reinterpret_cast<uint32_t*>(to) = taken.words[e][0];
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(taken.words[e][0], taken.words[e][1]);
    }
    to += 8 * row_items;
  }
}

// Joins the four lanes of each row and writes the unit's log-sum-exp.
__device__ __forceinline__ void FinishRows(const SelectArgs& args, const RowPair& rows, int64_t unit, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float sum = rows.sum[e];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float lse = sum > 0.0f ? rows.base[e] + log2f(sum) : INFINITY;
    if (lane % 4 == 0) args.lse2[unit * 16 + lane / 4 + 8 * e] = lse;
  }
}

// A tile as both Statistics kernels see it.
struct StatisticsTile {
  SequenceView view;
  int32_t q0;      // first query, inside the sequence
  int32_t stages;  // that hold a block before the last query's own
  int64_t unit;    // first unit, in the buffers of this chunk
  bool work;
};

__device__ __forceinline__ int32_t TileStages(const SelectArgs& args, const SequenceView& view, int32_t q0) {
  const int32_t last = min(q0 + args.group.tile_queries, view.q_len) - 1;
  const int32_t reps = (view.first_position() + last) / kBlock * args.p.shape.parts;
  return (reps + kStageWindows * kWindow - 1) / (kStageWindows * kWindow);
}

// The last tiles see the most representatives: they come first.
__device__ __forceinline__ StatisticsTile FindStatisticsTile(const SelectArgs& args, int32_t place, int32_t head) {
  StatisticsTile tile;
  const int32_t index = args.tile_end - 1 - place;
  tile.q0 = FindTile(args.p.batch, index, args.group.tile_queries, tile.view);
  tile.work = tile.q0 >= 0;
  if (!tile.work) return tile;
  const int32_t last = min(tile.q0 + args.group.tile_queries, tile.view.q_len) - 1;
  tile.work = NeedsScores(args, (tile.view.first_position() + last) / kBlock);
  tile.stages = TileStages(args, tile.view, tile.q0);
  tile.unit =
      (static_cast<int64_t>(index - args.tile_begin) * args.p.shape.selection_heads + head) * args.group.tile_units;
  return tile;
}

// Column of a window at which representative i of the window lies: lane c of a product holds columns 8j + 2c + {0, 1}.
__device__ __forceinline__ int WindowColumn(int i) { return (i % 16 / 2) * 8 + i / 16 * 2 + i % 2; }

// Copies `kRows` representatives from `first` on into a swizzled tile; rows from `end` on become zero.
template <typename T, int kHeadDim, int kRows, int kThreads>
__device__ __forceinline__ void CopyReps(const SelectArgs& args, const SequenceView& view, int32_t kv_head,
                                         int32_t first, int32_t end, uint32_t shared) {
  constexpr int kPieces = kHeadDim / 8;
  const T* reps = static_cast<const T*>(args.p.reps.data) + kv_head * args.p.reps.head_stride;
#pragma unroll
  for (int i = 0; i < (kRows * kPieces + kThreads - 1) / kThreads; ++i) {
    const int at = threadIdx.x + i * kThreads;
    if (at >= kRows * kPieces) break;
    const int row = at / kPieces;
    const int piece = at % kPieces;
    const int32_t t = min(first + row, end - 1);
    CopyAsync16(shared + TileOffset(row / kWindow * kWindow + WindowColumn(row % kWindow), piece, kRows * 128),
                reps + RepOffset(args.p.batch, args.p.reps, args.p.shape.parts, view.seq, t) + piece * 8,
                first + row < end);
  }
}

// The plain path: 8 warps of 32 rows each, mma.sync.
constexpr int kPlainThreads = kUnits / 2 * 32;
constexpr int kPlainStages = 3;

template <typename T, int kHeadDim, int kParts, bool kPair>
__global__ __launch_bounds__(kPlainThreads, 1) void StatisticsKernel(const __grid_constant__ SelectArgs args) {
  constexpr int kStages = kPlainStages;
  constexpr uint32_t kStageBytes = kWindow * kRowBytes<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const StatisticsTile tile = FindStatisticsTile(args, blockIdx.x, blockIdx.y);
  if (!tile.work) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int r = lane / 4, c = lane % 4;
  const int32_t head = blockIdx.y;
  const int32_t kv_head = head / args.group.kv_div;
  const int32_t reps_end = tile.view.kv_len / kBlock * kParts;
  const uint32_t base = SharedAddress(shared);
  const float scale2 = args.p.shape.scale * kLog2e;
  const int32_t init = args.p.shape.init_blocks * kParts;

  const int windows = tile.stages * kStageWindows;
  const auto window_of_turn = [&](int turn) {
    return StageOfTurn(turn / kStageWindows, tile.stages) * kStageWindows + turn % kStageWindows;
  };
  const auto copy = [&](int turn) {
    if (turn < windows) {
      CopyReps<T, kHeadDim, kWindow, kPlainThreads>(args, tile.view, kv_head, window_of_turn(turn) * kWindow, reps_end,
                                                    base + turn % kStages * kStageBytes);
    }
    CommitCopies();
  };
  for (int turn = 0; turn < kStages - 1; ++turn) copy(turn);

  uint32_t a[2][kHeadDim / 16][4];
  RowPair rows[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const UnitRows<kPair> unit(args.group, tile.q0, 2 * warp + m);
    uint4 words[2][kRowPieces<kHeadDim>];
    LoadRowWords<kHeadDim>(QueryRow<T>(args, tile.view, head, unit.head(r), unit.query(r)),
                           QueryRow<T>(args, tile.view, head, unit.head(r + 8), unit.query(r + 8)), c, words);
    InitRows<kParts>(args, tile.view, unit, r, rows[m]);
    GuessBases<T, kHeadDim>(args, tile.view, kv_head, words, c, scale2, rows[m]);
    MakeOperand(words, c, a[m]);
  }
  const WindowEnds ends[2] = {WindowEnds(rows[0]), WindowEnds(rows[1])};
  const int64_t unit0 = tile.unit + 2 * warp;
  const int64_t unit_weights = static_cast<int64_t>(args.group.unit_queries) * args.row_items;
  bf16* weights =
      args.weights + unit0 * unit_weights + r * static_cast<int64_t>(args.row_items) + c * (16 / ItemReps(kParts));
  float* bases = args.bases + unit0 * args.epochs * 16;

  for (int turn = 0; turn < windows; ++turn) {
    WaitCopies<kStages - 2>();
    __syncthreads();
    copy(turn + kStages - 1);
    const int stage_turn = turn / kStageWindows;
    if (turn % kStageWindows == 0 && BeginsEpoch(stage_turn)) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (2 * warp + m >= args.group.tile_units) continue;
        BeginEpoch(rows[m], bases + (m * args.epochs + EpochOfTurn(stage_turn)) * 16, lane);
      }
    }

    const uint32_t stage = base + turn % kStages * kStageBytes;
    float acc[2][8][4] = {};
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32_t b[4];
        const int row = 8 * j + (lane & 7) + ((lane >> 4) << 3);
        LoadMatrix(b, stage + TileOffset(row, 2 * k + ((lane >> 3) & 1), kWindow * 128));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          Mma<T>(acc[m][j], a[m][k], b[0], b[1]);
          Mma<T>(acc[m][j + 1], a[m][k], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      TakeScores<kParts, kPair>(acc[m], rows[m], ends[m], scale2,
                                bases + (m * args.epochs + EpochOfTurn(stage_turn)) * 16, weights + m * unit_weights,
                                args.row_items, window_of_turn(turn), init, lane);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    if (2 * warp + m < args.group.tile_units) FinishRows(args, rows[m], unit0 + m, lane);
  }
}

// Hopper: four warpgroups of 64 rows each consume, wgmma; a fifth copies. Exponentials (16 a clock) and products (16
// scores a clock at head_dim 128) take the same time: while one warpgroup has the tensor cores, the others' scores go
// through the softmax.
constexpr int kWgConsumers = kUnits * 32;
constexpr int kWgThreads = kWgConsumers + 128;
constexpr int kWgStages = 4;

[[maybe_unused]] __device__ __forceinline__ bool ByCopyEngine(const SelectArgs& args, int stage, int32_t reps_end) {
  return args.copy_engine && (stage + 1) * kWindow * kStageWindows <= reps_end;
}

// Copies stages of representatives, in the order of WindowColumn; `before` stages went through the ring already. The
// copy engine takes the stages that lie within the sequence: its map knows the order, but not where a sequence ends.
template <typename T, int kHeadDim>
__device__ __forceinline__ void ProduceReps(const SelectArgs& args, const CUtensorMap& map, const SequenceView& view,
                                            int32_t kv_head, int stages, uint32_t before, uint32_t ring, uint32_t full,
                                            uint32_t empty) {
  constexpr int kRows = kWindow * kStageWindows;
  constexpr int kPieces = kHeadDim / 8;
  constexpr int kAtOnce = 128 / kPieces;  // rows: 8 or 16
  const int thread = threadIdx.x - kWgConsumers;
  const int row0 = thread / kPieces, piece = thread % kPieces;
  const int32_t end = view.kv_len / kBlock * args.p.shape.parts;
  const bool paged = args.p.batch.page_size != 0;
  const int64_t stride = args.p.reps.token_stride;
  const int64_t start = paged ? 0 : args.p.batch.rep_starts[view.seq];
  const T* reps = static_cast<const T*>(args.p.reps.data) + kv_head * args.p.reps.head_stride + piece * 8;
  // Row i · kAtOnce + row0 lies at column WindowColumn(row0) + a constant whose bits below 8 are others than row0's.
  const int column = row0 / 2 * 8 + row0 % 2;
  const uint32_t base = ring + (piece >> 3) * (kRows * 128) + column * 128;
  const uint32_t swizzle = ((piece & 7) ^ (row0 % 2)) << 4;
  for (int turn = 0; turn < stages; ++turn) {
    const int s = StageOfTurn(turn, stages);
    const uint32_t slot = (before + turn) % kWgStages, round = (before + turn) / kWgStages;
    const uint32_t place = slot * (kRows * kHeadDim * 2), arrived = full + slot * 8;
    BarrierWait(empty + slot * 8, (round + 1) & 1);
    if (ByCopyEngine(args, s, end)) {
      if (thread == 0) {
        BarrierArriveExpecting(arrived, kRows * kHeadDim * 2);
#pragma unroll
        for (int i = 0; i < kStageWindows * kHeadDim / 64; ++i) {
          const int window = i % kStageWindows, panel = i / kStageWindows;
          CopyTensor5(ring + place + (panel * kRows + window * kWindow) * 128, &map, arrived,
                      kv_head * static_cast<int32_t>(args.p.reps.head_stride) + panel * 64, 0,
                      (s * kStageWindows + window) * (kWindow / 16), 0, static_cast<int32_t>(start));
        }
      } else {
        BarrierArrive(arrived);
      }
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < kRows / kAtOnce; ++i) {
      const int first = i * kAtOnce;
      const uint32_t at = base + place +
                          (first / kWindow * kWindow + first % 16 / 2 * 8 + first % kWindow / 16 * 2) * 128 +
                          (swizzle ^ ((first % kWindow / 16 * 2) << 4));
      const int32_t t = s * kRows + first + row0;
      const bool there = t < end;
      const int32_t row = there ? t : 0;
      CopyAsync16(at,
                  reps + (paged ? RepOffset(args.p.batch, args.p.reps, args.p.shape.parts, view.seq, row)
                                : (start + row) * stride),
                  there);
    }
    BarrierArriveAfterCopies(arrived);
  }
}

// One CTA per multiprocessor takes tile after tile: the copies of the next one's representatives are under way when it
// begins.
template <typename T, int kHeadDim, int kParts, bool kPair>
__global__ __launch_bounds__(kWgThreads, 1) void StatisticsWgmmaKernel(const __grid_constant__ SelectArgs args,
                                                                       const __grid_constant__ CUtensorMap map) {
#ifdef PHSA_SM90A
  constexpr int kRows = kWindow * kStageWindows;
  constexpr uint32_t kStageBytes = kRows * kRowBytes<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t barriers[2 * kWgStages];
  const uint32_t base = OpaqueAddress(shared);
  const uint32_t full = OpaqueAddress(barriers), empty = full + kWgStages * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kWgStages; ++i) {
      BarrierInit(full + i * 8, 128);
      BarrierInit(empty + i * 8, kWgConsumers / 32);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  // Calls work(tile, head, stages, stages before it) for this CTA's tiles. Neighbouring items have like lengths.
  const auto each_tile = [&](auto&& work) {
    const int32_t heads = args.p.shape.selection_heads;
    const int32_t items = (args.tile_end - args.tile_begin) * heads;
    uint32_t before = 0;
    for (int32_t turn = 0; ItemOfTurn(turn) < items; ++turn) {
      const int32_t item = ItemOfTurn(turn);
      const StatisticsTile tile = FindStatisticsTile(args, item / heads, item % heads);
      if (!tile.work) continue;
      work(tile, item % heads, tile.stages, before);
      before += tile.stages;
    }
  };
  if (threadIdx.x >= kWgConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    each_tile([&](const StatisticsTile& tile, int32_t head, int stages, uint32_t before) {
      ProduceReps<T, kHeadDim>(args, map, tile.view, head / args.group.kv_div, stages, before, base, full, empty);
    });
    WaitCopies<0>();
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");

  const int lane = OpaqueLane(), warp = OpaqueWarp();
  const int r = lane / 4, c = lane % 4;
  const float scale2 = args.p.shape.scale * kLog2e;
  const int32_t init = args.p.shape.init_blocks * kParts;
  each_tile([&](const StatisticsTile& tile, int32_t head, int stages, uint32_t before) {
    uint32_t a[kHeadDim / 16][4];
    RowPair rows;
    const UnitRows<kPair> unit(args.group, tile.q0, warp);
    uint4 words[2][kRowPieces<kHeadDim>];
    LoadRowWords<kHeadDim>(QueryRow<T>(args, tile.view, head, unit.head(r), unit.query(r)),
                           QueryRow<T>(args, tile.view, head, unit.head(r + 8), unit.query(r + 8)), c, words);
    InitRows<kParts>(args, tile.view, unit, r, rows);
    GuessBases<T, kHeadDim>(args, tile.view, head / args.group.kv_div, words, c, scale2, rows);
    MakeOperand(words, c, a);
    const WindowEnds ends(rows);
    const int32_t reps_end = tile.view.kv_len / kBlock * kParts;
    const bool used = warp < args.group.tile_units;
    const int64_t row_items = args.row_items;
    bf16* weights =
        args.weights + ((tile.unit + warp) * args.group.unit_queries + r) * row_items + c * (16 / ItemReps(kParts));
    float* bases = args.bases + (tile.unit + warp) * args.epochs * 16 - 16;
    for (int turn = 0; turn < stages; ++turn) {
      const int s = StageOfTurn(turn, stages);
      const uint32_t slot = (before + turn) % kWgStages, round = (before + turn) / kWgStages;
      if (__builtin_expect(BeginsEpoch(turn), 0)) {
        bases += 16;
        if (used) BeginEpoch(rows, bases, lane);
      }
      BarrierWait(full + slot * 8, round & 1);
      if (!ByCopyEngine(args, s, reps_end)) FenceAsyncProxy();
      // The shuffle tells the compiler that the warp agrees on it: descriptors then live in uniform registers.
      const uint64_t stage = Descriptor(__shfl_sync(~0u, base + slot * kStageBytes, 0), 16, 1024);
#pragma unroll
      for (int i = 0; i < kStageWindows; ++i) {
        float acc[8][4];
        WgmmaFence();
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
          const uint32_t at = i * (kWindow * 128) + (k / 4) * (kRows * 128) + (k % 4) * 32;
          Wgmma<T, false>(acc, a[k], DescriptorPlus(stage, at), k > 0);
        }
        WgmmaCommit();
        WgmmaWait<0>();
        Pin(acc);
        if (i + 1 == kStageWindows && lane == 0) BarrierArrive(empty + slot * 8);
        TakeScores<kParts, kPair>(acc, rows, ends, scale2, bases, weights, row_items, s * kStageWindows + i, init,
                                  lane);
      }
    }
    if (used) FinishRows(args, rows, tile.unit + warp, lane);
  });
#else
  __trap();  // compiled for another target: a wrong result must not look like one
#endif
}

// A candidate as one integer: the better score is the larger, then the lower block.
__device__ __forceinline__ uint64_t CandidateKey(float score, int32_t t) {
  return static_cast<uint64_t>(__float_as_uint(score)) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(t));
}
__device__ __forceinline__ int32_t KeyBlock(uint64_t key) {
  return static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(key));
}
__device__ __forceinline__ float KeyScore(uint64_t key) { return __uint_as_float(static_cast<uint32_t>(key >> 32)); }

// The logarithm (base 2) of a score, at most 4, as a positive number in the same order: no bit of 8 - it is lost. Those
// that are no numbers, or -inf, come last.
__device__ __forceinline__ float RankOfLog(float log_score) {
  return __uint_as_float(0x7FFFFFFFu - __float_as_uint(fminf(8.0f - log_score, FLT_MAX)));
}
__device__ __forceinline__ float LogOfRank(float rank) {
  return 8.0f - __uint_as_float(0x7FFFFFFFu - __float_as_uint(rank));
}

// One warp keeps the best `keep` of `count` (at most kCandidates) candidates, best first.
__device__ inline void KeepBest(uint64_t* candidates, int count, int keep, int lane) {
  constexpr int kPer = kCandidates / 32;
  uint64_t key[kPer];
  int rank[kPer];
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int at = j * 32 + lane;
    key[j] = at < count ? candidates[at] : 0;
    rank[j] = at < count ? 0 : kCandidates;
  }
  const int per = (count + 31) / 32;
  if (per <= 1) {
#pragma unroll 4
    for (int i = 0; i < count; ++i) rank[0] += candidates[i] > key[0];
  } else if (per <= 2) {
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      rank[0] += candidates[i] > key[0];
      rank[1] += candidates[i] > key[1];
    }
  } else {
    for (int i = 0; i < count; ++i) {
      const uint64_t other = candidates[i];
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        if (j < per) rank[j] += other > key[j];
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    if (rank[j] < keep) candidates[rank[j]] = key[j];
  }
  __syncwarp();
}

// One warp drops candidates that at least `keep` others beat, of more than `keep` that all reach `threshold`; `count`
// becomes how many are left, `keep` or little more. Returns a threshold that whatever belongs to the best `keep`
// reaches.
template <int kPer>
__device__ __forceinline__ float PruneUpTo(uint64_t* candidates, int& count, int keep, float threshold, int lane) {
  uint64_t key[kPer];
  uint32_t bits[kPer], most = 0;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    key[j] = j * 32 + lane < count ? candidates[j * 32 + lane] : 0;
    bits[j] = static_cast<uint32_t>(key[j] >> 32);
    most = max(most, bits[j]);
  }
  // Scores are not negative, so their bits are ordered as they are. At least `keep` reach `low`, fewer reach `high`.
  uint32_t low = __float_as_uint(threshold), high = __reduce_max_sync(~0u, most) + 1;
  while (high - low > 1u << 15) {  // 1/256 of a power of two
    const uint32_t tried = low + (high - low) / 2;
    int reach = 0;
#pragma unroll
    for (int j = 0; j < kPer; ++j) reach += __popc(__ballot_sync(~0u, bits[j] >= tried));
    if (reach >= keep) {
      low = tried;
      if (reach == keep) break;
    } else {
      high = tried;
    }
  }
  __syncwarp();
  int kept = 0;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const bool stays = key[j] != 0 && bits[j] >= low;
    const uint32_t lanes = __ballot_sync(~0u, stays);
    if (stays) candidates[kept + __popc(lanes & ((1u << lane) - 1u))] = key[j];
    kept += __popc(lanes);
  }
  __syncwarp();
  count = kept;
  return __uint_as_float(low);
}

// `room`: how many may be left.
__device__ inline float Prune(uint64_t* candidates, int& count, int keep, int room, float threshold, int lane) {
  threshold = count <= 64 ? PruneUpTo<2>(candidates, count, keep, threshold, lane)
                          : PruneUpTo<kCandidates / 32>(candidates, count, keep, threshold, lane);
  if (count > room) {  // near-ties: the exact order decides
    KeepBest(candidates, count, keep, lane);
    count = keep;
    threshold = KeyScore(candidates[keep - 1]);
  }
  return threshold;
}

template <int kPadded>
__device__ __forceinline__ float GroupMax(float x) {
  if constexpr (kPadded >= 4) x = fmaxf(x, __shfl_xor_sync(~0u, x, 16));
  if constexpr (kPadded >= 8) x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
  if constexpr (kPadded >= 16) x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
  return x;
}
template <int kPadded>
__device__ __forceinline__ float GroupSum(float x) {
  if constexpr (kPadded >= 4) x += __shfl_xor_sync(~0u, x, 16);
  if constexpr (kPadded >= 8) x += __shfl_xor_sync(~0u, x, 8);
  if constexpr (kPadded >= 16) x += __shfl_xor_sync(~0u, x, 4);
  return x;
}

// What is done for all queries of a unit at once: `kLanes` neighbouring lanes have a query.
template <int kLanes, typename Op>
__device__ __forceinline__ auto ReduceLanes(auto x, Op&& op) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = op(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// Candidates per query, at most, that KeepBestOfAll takes.
constexpr int kAtOnce = 64;

// One warp keeps the best `keep` candidates of every query that has more. `floor`: what all candidates of the lane's
// query reach. Returns, per query, a threshold that whatever belongs to its best `keep` reaches.
template <int kLanes>
__device__ __forceinline__ float KeepBestOfAll(uint64_t* candidates, int list_keys, int* counts, int keep, float floor,
                                               int lane) {
  constexpr int kPer = kAtOnce / kLanes;
  const int query = lane / kLanes, first = lane % kLanes;
  uint64_t* list = candidates + query * list_keys;
  const int count = counts[query];
  const int rows = (__reduce_max_sync(~0u, count) + kLanes - 1) / kLanes;
  // Scores are not negative, so their bits are ordered as they are.
  uint32_t bits[kPer], high = 0;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    bits[j] = 0;
    if (j >= rows) continue;
    if (j * kLanes + first < count) bits[j] = static_cast<uint32_t>(list[j * kLanes + first] >> 32);
    high = max(high, bits[j]);
  }
  // At least `keep` reach `low`, fewer reach `high`.
  uint32_t low = __float_as_uint(floor);
  high = ReduceLanes<kLanes>(high, [](uint32_t x, uint32_t y) { return max(x, y); }) + 1;
  bool open = count > keep, tied = open;
  while (__any_sync(~0u, open)) {
    const uint32_t tried = low + (high - low) / 2;
    int reach = 0;
#pragma unroll
    for (int j = 0; j < kPer / 2; ++j) reach += bits[j] >= tried;
    if (rows > kPer / 2) {
#pragma unroll
      for (int j = kPer / 2; j < kPer; ++j) reach += bits[j] >= tried;
    }
    reach = ReduceLanes<kLanes>(reach, [](int x, int y) { return x + y; });
    if (open) {
      (reach >= keep ? low : high) = tried;
      if (reach == keep) tied = false;
      open = tied && high - low > 1;
    }
  }
  if (!__any_sync(~0u, count > keep)) return floor;
  // Rows move up, never past one that is still to be read.
  const bool drops = count > keep && !tied;
  const uint32_t own_lanes = (kLanes == 32 ? ~0u : (1u << (kLanes % 32)) - 1u) << (query * kLanes % 32);
  int kept = 0;
  for (int j = 0; j < rows; ++j) {
    const int at = j * kLanes + first;
    const uint64_t key = at < count ? list[at] : 0;
    const bool stays = at < count && static_cast<uint32_t>(key >> 32) >= low;
    const uint32_t lanes = __ballot_sync(~0u, stays) & own_lanes;
    __syncwarp();
    if (drops && stays) list[kept + __popc(lanes & ((1u << lane) - 1u))] = key;
    kept += __popc(lanes);
    __syncwarp();
  }
  if (drops && first == 0) counts[query] = keep;
  // Equal scores at the end of the best: the exact order decides.
  for (uint32_t left = __ballot_sync(~0u, tied && first == 0); left != 0; left &= left - 1) {
    const int q = (__ffs(static_cast<int>(left)) - 1) / kLanes;
    KeepBest(candidates + q * list_keys, counts[q], keep, lane);
    if (lane == 0) counts[q] = keep;
  }
  __syncwarp();
  return __uint_as_float(low);
}

// As KeepBestOfAll, but leaves a few more than `keep`, and is quicker: thresholds are bfloat16, and counted two a step.
template <int kLanes>
__device__ __forceinline__ float PruneAll(uint64_t* candidates, int list_keys, int* counts, int keep, float floor,
                                          int lane) {
  constexpr int kPairs = kAtOnce / kLanes / 2;
  const int query = lane / kLanes, first = lane % kLanes;
  uint64_t* list = candidates + query * list_keys;
  const int count = counts[query];
  __nv_bfloat162 pair[kPairs];
  uint32_t high = 0;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    uint32_t bits[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = (2 * j + i) * kLanes + first;
      bits[i] = at < count ? static_cast<uint32_t>(list[at] >> 32) : 0;
      high = max(high, bits[i]);
    }
    const uint32_t both = __byte_perm(bits[0], bits[1], 0x7632);
    pair[j] = reinterpret_cast<const __nv_bfloat162&>(both);
  }
  // At least `keep` reach `low`, fewer reach `high`; the upper halves of floats, which are not negative.
  high = (ReduceLanes<kLanes>(high, [](uint32_t x, uint32_t y) { return max(x, y); }) >> 16) + 1;
  uint32_t low = __float_as_uint(floor) >> 16;
  const bool drops = count > keep;
#pragma unroll 1
  for (int step = 0; step < 7; ++step) {
    const uint32_t tried = low + (high - low) / 2, both = tried * 0x10001u;
    __nv_bfloat162 reach = __float2bfloat162_rn(0.0f);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      reach = __hadd2(reach, __hge2(pair[j], reinterpret_cast<const __nv_bfloat162&>(both)));
    }
    const float2 two = __bfloat1622float2(reach);
    const float total = ReduceLanes<kLanes>(two.x + two.y, [](float x, float y) { return x + y; });
    if (drops && tried > low) (total >= static_cast<float>(keep) ? low : high) = tried;
  }
  if (!__any_sync(~0u, drops)) return floor;
  const float worst = fmaxf(floor, __uint_as_float(low << 16));
  // Rows move up, never past one that is still to be read.
  const uint32_t own_lanes = (kLanes == 32 ? ~0u : (1u << (kLanes % 32)) - 1u) << (query * kLanes % 32);
  const int rows = (__reduce_max_sync(~0u, count) + kLanes - 1) / kLanes;
  int kept = 0;
  for (int j = 0; j < rows; ++j) {
    const int at = j * kLanes + first;
    const uint64_t key = at < count ? list[at] : 0;
    const bool stays = at < count && KeyScore(key) >= worst;
    const uint32_t lanes = __ballot_sync(~0u, stays) & own_lanes;
    __syncwarp();
    if (drops && stays) list[kept + __popc(lanes & ((1u << lane) - 1u))] = key;
    kept += __popc(lanes);
    __syncwarp();
  }
  if (drops && first == 0) counts[query] = kept;
  __syncwarp();
  return drops ? worst : floor;
}

// A warp's shared memory: candidates (before them, the largest bounds), their counts, queries that are ranked by
// logarithms, the queries' thresholds, the subsets to score, and what makes bounds of weights.
struct ChooseShared {
  int counts, faint, thresholds, list, bounds, bytes;  // where they begin, and the end
  __host__ __device__ constexpr ChooseShared(int queries, int list_keys, int units_epochs)
      : counts(queries * list_keys * 8),
        faint(counts + 64),
        thresholds(faint + 80),
        list(thresholds + 64),
        bounds(list + (kList + 4) * 4),
        bytes(bounds + units_epochs * static_cast<int>(sizeof(uint4))) {}
};

// What makes bounds of the weights of a query's pair of heads in an epoch; the two halves of a word are the same.
struct Factors {
  uint32_t low, high;  // of the score, per weight
  uint32_t more;       // added to the bound from above: +inf where weights are no bounds
  uint32_t unused;
};

__device__ __forceinline__ __nv_bfloat162 Pair(uint32_t bits) { return reinterpret_cast<const __nv_bfloat162&>(bits); }
__device__ __forceinline__ uint32_t Bits(__nv_bfloat162 x) { return reinterpret_cast<const uint32_t&>(x); }

constexpr uint32_t kNone = 0x7FFF7FFFu;  // no numbers: a threshold that nothing reaches

// The pieces of ChooseKernel, in its order. One warp takes 16 rows. A lane (r, c) follows the query of its row r; with
// groups of one, that of row r + 8 as well.

// Where the candidates of the followed queries end, and which of them need scores; whether one does.
template <int kQueries, int kFollowed>
__device__ __forceinline__ bool FollowQueries(const SelectArgs& args, const Shape& shape, const SequenceView& view,
                                              int32_t q0, int r, int32_t (&end)[kFollowed], bool (&active)[kFollowed]) {
  bool any = false;
#pragma unroll
  for (int f = 0; f < kFollowed; ++f) {
    const int32_t q = q0 + (r + 8 * f) % kQueries;
    const int32_t b = (view.first_position() + q) / kBlock;
    end[f] = shape.CandidateEnd(b);
    active[f] = q < view.q_len && NeedsScores(args, b);
    any |= active[f];
  }
  return any;
}

// Writes the lists of a warp's queries that need no scores: none below dense_below, all candidates elsewhere.
template <int kQueries>
__device__ __forceinline__ void ListUnscored(const SelectArgs& args, const Shape& shape, const SequenceView& view,
                                             int32_t q0, int32_t top_k, int32_t init, int64_t list0,
                                             int64_t list_stride, bool all, int lane) {
  for (int q = 0; !all && q < kQueries && q0 + q < view.q_len; ++q) {
    const int32_t b = (view.first_position() + q0 + q) / kBlock;
    if (NeedsScores(args, b)) continue;
    const int32_t count = shape.Dense(b) ? 0 : shape.Candidates(b);
    for (int i = lane; i < top_k; i += 32) {
      args.p.selection[list0 + q * list_stride + i] = i < count ? init + i : -1;
      if (args.p.selection_scores) args.p.selection_scores[list0 + q * list_stride + i] = 0.0f;
    }
  }
}

// What makes bounds of weights. factors: [query][pair][epoch]
template <int kQueries>
__device__ __forceinline__ void MakeFactors(const SelectArgs& args, const Shape& shape, int64_t unit0, int32_t row0,
                                            int pairs, int32_t epochs, int lane, Factors* factors) {
  for (int i = lane; i < kQueries * pairs * epochs; i += 32) {
    const int epoch = i % epochs, pair = i / epochs % pairs, query = i / epochs / pairs;
    float low = INFINITY, high = 0.0f, more = 0.0f;
    for (int h = 2 * pair; h < min(2 * pair + 2, args.group.size); ++h) {
      const int row = row0 + query + h % 2 * 8;
      const float base = args.bases[((unit0 + pair) * args.epochs + epoch) * 16 + row];
      const float factor = Exp2(base - args.lse2[(unit0 + pair) * 16 + row]);
      low = fminf(low, factor);
      high = fmaxf(high, factor);
      if (!(base < INFINITY)) more = INFINITY;
    }
    if (more > 0.0f) low = high = 0.0f;
    low *= (1.0f - kSlack) / (shape.group_max ? args.group.size : 1);
    high *= 1.0f + kSlack;
    factors[i] = {Pack<bf16>(low, low), Pack<bf16>(high, high), Pack<bf16>(more, more), 0};
  }
}

// The weights of a lane's next vectors: of several queries and all pairs of heads.
template <int kAhead, int kJoint, int kMostPairs>
__device__ __forceinline__ void LoadWeights(const auto& row_weights, int first, int v0, int vectors, int pairs,
                                            uint4 (&weights)[kAhead][kJoint][kMostPairs]) {
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
#pragma unroll
    for (int k = 0; k < kJoint; ++k) {
#pragma unroll
      for (int pair = 0; pair < kMostPairs; ++pair) {
        const bool there = v0 + 32 * i < vectors && (kMostPairs == 1 || pair < pairs);
        weights[i][k][pair] = there ? row_weights(first + k, pair)[v0 + 32 * i] : uint4{};
      }
    }
  }
}

// Writes a lane's largest bounds of a query, which it has of four pairs of items.
__device__ __forceinline__ void StoreMaxima(const __nv_bfloat162 (&most)[4], int set_words, uint32_t* own, int lane) {
  // Neighbouring items are in different sets: they are often alike.
  if (set_words == 2) {
    *reinterpret_cast<uint2*>(own + 2 * lane) =
        make_uint2(Bits(__hmax2(most[0], most[2])), Bits(__hmax2(most[1], most[3])));
  } else {
    *reinterpret_cast<uint4*>(own + 4 * lane) = make_uint4(Bits(most[0]), Bits(most[1]), Bits(most[2]), Bits(most[3]));
  }
}

// Of the lane's query, the K-th of the largest bounds, hardly less: the bits of a bf16.
template <int kLanes>
__device__ __forceinline__ uint32_t FindThreshold(const uint32_t* maxima, int list_keys, int set_words, int32_t top_k,
                                                  bool guesses, int lane) {
  // kLanes lanes search for a query. Bounds are not negative: upper halves of floats, ordered as they are.
  const uint4* own = reinterpret_cast<const uint4*>(maxima + lane / kLanes * 2 * list_keys);
  const auto each = [&](auto&& take) {
#pragma unroll 4
    for (int i = lane % kLanes; i < 32 / 4 * set_words; i += kLanes) {
      const uint4 x = own[i];
      take(Pair(x.x));
      take(Pair(x.y));
      take(Pair(x.z));
      take(Pair(x.w));
    }
  };
  __nv_bfloat162 most = Pair(0);
  each([&](__nv_bfloat162 x) { most = __hmax2(most, x); });
  // At least K reach `low`, fewer reach `high`.
  uint32_t low = 0, high = max(Bits(most) & 0xFFFFu, Bits(most) >> 16) + 1;
  high = ReduceLanes<kLanes>(high, [](uint32_t x, uint32_t y) { return max(x, y); });
  constexpr uint32_t kNear = 8 << 7;  // powers of two below the largest
  uint32_t tried = high > kNear ? high - kNear : high / 2;
  bool open = high > 1;
#pragma unroll 1
  while (__any_sync(~0u, open)) {
    __nv_bfloat162 reach = Pair(0);
    each([&](__nv_bfloat162 x) { reach = __hadd2(reach, __hge2(x, Pair(tried * 0x10001u))); });
    const float2 two = __bfloat1622float2(reach);
    const int count = static_cast<int>(ReduceLanes<kLanes>(two.x + two.y, [](float x, float y) { return x + y; }));
    if (open) {
      (count >= top_k ? low : high) = tried;
      open = count != top_k && high - low > 4;
    }
    tried = low + (high - low) / 2;
  }
  if (guesses) low = __float_as_uint(kGuess * __uint_as_float(low << 16)) >> 16;
  // So small a one that bounds themselves may be zero: all candidates are looked at.
  if (__uint_as_float(low << 16) < 2.0f * kLeastScore) low = 0;
  return low;
}

// Hands a query's threshold to the lanes that follow it, and to shared memory.
template <int kQueries, int kFollowed>
__device__ __forceinline__ void FollowThresholds(uint32_t low, const bool (&active)[kFollowed], uint32_t* thresholds,
                                                 float (&threshold)[kFollowed], int r, int c) {
  constexpr int kLanes = 32 / kQueries;
#pragma unroll
  for (int f = 0; f < kFollowed; ++f) {
    const int query = (r + 8 * f) % kQueries;
    const uint32_t found = __shfl_sync(~0u, low, query * kLanes);
    const bool follows = active[f] && r + 8 * f < kQueries;
    threshold[f] = follows ? __uint_as_float(found << 16) : INFINITY;
    if (follows && c == 0) thresholds[query] = found * 0x10001u;
  }
}

// The pieces that a lane (r, c) has of rows r and r + 8.
template <typename T, int kHeadDim, int kPadded>
__device__ __forceinline__ void LoadQueryRows(const SelectArgs& args, const SequenceView& view, int32_t head,
                                              int32_t q0, int lane, uint4 (&a0)[kRowPieces<kHeadDim>],
                                              uint4 (&a1)[kRowPieces<kHeadDim>]) {
  constexpr int kQueries = 16 / kPadded;
  constexpr int kLoads = kRowPieces<kHeadDim>;
  const int r = lane / 4, c = lane % 4;
  const T* first = QueryRow<T>(args, view, head, r / kQueries, q0 + r % kQueries);
  const T* second = QueryRow<T>(args, view, head, (r + 8) / kQueries, q0 + (r + 8) % kQueries);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const bool there = HasPiece<kHeadDim>(i * 4 + c);
    a0[i] = first && there ? *reinterpret_cast<const uint4*>(first + (i * 4 + c) * 8) : uint4{};
    a1[i] = second && there ? *reinterpret_cast<const uint4*>(second + (i * 4 + c) * 8) : uint4{};
  }
}

// The best K of every query, or few more. Returns what all that is left of the lane's query reaches.
template <int kLanes, int kFollowed>
__device__ __forceinline__ float KeepBestOfQueries(uint64_t* candidates, int list_keys, int* counts, int32_t top_k,
                                                   const float (&threshold)[kFollowed], bool exactly, int lane) {
  const int own = lane / kLanes;
  float floor = __shfl_sync(~0u, threshold[0], own % 8 * 4);
  if constexpr (kFollowed == 2) {
    const float second = __shfl_sync(~0u, threshold[1], own % 8 * 4);
    if (own >= 8) floor = second;
  }
  const float worst = exactly ? KeepBestOfAll<kLanes>(candidates, list_keys, counts, top_k, floor, lane)
                              : PruneAll<kLanes>(candidates, list_keys, counts, top_k, floor, lane);
  return worst;
}

// Two products of a warp's 16 rows with 8 representatives each, in two sums: half the latency.
template <typename T, int kLoads>
__device__ __forceinline__ void Multiply(const uint4 (&a0)[kLoads], const uint4 (&a1)[kLoads],
                                         const uint4 (&b)[2][kLoads], float (&acc)[2][4], float (&more)[2][4]) {
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const uint32_t even[4] = {a0[k].x, a1[k].x, a0[k].y, a1[k].y};
    const uint32_t odd[4] = {a0[k].z, a1[k].z, a0[k].w, a1[k].w};
#pragma unroll
    for (int i = 0; i < 2; ++i) Mma<T>(acc[i], even, b[i][k].x, b[i][k].y);
#pragma unroll
    for (int i = 0; i < 2; ++i) Mma<T>(more[i], odd, b[i][k].z, b[i][k].w);
  }
}

// Ranks by logarithms what the four columns of a lane hold; adds to `found`.
template <int kFollowed>
__device__ __forceinline__ void RankByLogs(const auto& log_weight, const auto& join_logs, int shift, bool own,
                                           const int32_t (&blocks)[2], int32_t init, const int32_t (&end)[kFollowed],
                                           const float (&threshold)[kFollowed], float (&scores)[kFollowed][4],
                                           uint32_t& found) {
#pragma unroll 1
  for (int m = 0; m < 4; ++m) {
    // Constants alone index the registers.
    const auto pick = [&](int j, int e) {
      return m < 2 ? (j == 0 ? log_weight(0, 0, e) : log_weight(0, 1, e))
                   : (j == 0 ? log_weight(1, 0, e) : log_weight(1, 1, e));
    };
    float x[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float first = pick(shift == 0 ? m % 2 : 0, e), second = shift == 0 ? -INFINITY : pick(1, e);
      float top = fmaxf(first, second);
      if (shift >= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      if (shift >= 3) top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(top, -FLT_MAX);
      float sum = Exp2(first - top) + Exp2(second - top);
      if (shift >= 2) sum += __shfl_xor_sync(~0u, sum, 1);
      if (shift >= 3) sum += __shfl_xor_sync(~0u, sum, 2);
      x[e] = shift == 0 ? first : top + log2f(sum);
    }
    const bool counts_here = shift == 0 || (m % 2 == 0 && own);
    const int32_t block = (m < 2 ? blocks[0] : blocks[1]) + m % 2;
    float ranks[kFollowed];
    const auto keep = [&](int at) {
      join_logs(at, x[0], x[1]);
#pragma unroll
      for (int f = 0; f < kFollowed; ++f) ranks[f] = scores[f][at];
    };
    if (m == 0) keep(0);
    if (m == 1) keep(1);
    if (m == 2) keep(2);
    if (m == 3) keep(3);
#pragma unroll
    for (int f = 0; f < kFollowed; ++f) {
      const bool candidate = counts_here && block >= init && block < end[f];
      if (candidate && ranks[f] >= threshold[f]) found |= 1u << (4 * f + m);
    }
  }
}

// What a group makes of its heads' weights, of rows r and r + 8 of this lane: score m of each followed query.
template <int kPadded, int kFollowed>
__device__ __forceinline__ void JoinWeights(const Shape& shape, int m, float x0, float x1,
                                            float (&scores)[kFollowed][4]) {
  if constexpr (kPadded == 1) {
    scores[0][m] = x0;
    scores[kFollowed - 1][m] = x1;
  } else {
    scores[0][m] = shape.group_max ? GroupMax<kPadded>(fmaxf(x0, x1)) : GroupSum<kPadded>(x0 + x1);
  }
}
// The same of their logarithms, as ranks.
template <int kPadded, int kFollowed>
__device__ __forceinline__ void JoinLogs(const Shape& shape, int m, float x0, float x1, float (&scores)[kFollowed][4]) {
  if constexpr (kPadded == 1) {
    scores[0][m] = RankOfLog(x0);
    scores[kFollowed - 1][m] = RankOfLog(x1);
  } else {
    const float top = GroupMax<kPadded>(fmaxf(x0, x1));
    const float sum = GroupSum<kPadded>(Exp2(x0 - top) + Exp2(x1 - top));
    scores[0][m] = RankOfLog(shape.group_max ? top : top + log2f(sum));
  }
}

// The sum of a block's parts, of which neighbouring lanes have two each. All lanes exchange, whoever shares a block.
__device__ __forceinline__ float SumOfParts(float x, int shift) {
  const float next = __shfl_xor_sync(~0u, x, 1);
  x += shift >= 2 ? next : 0.0f;
  const float far = __shfl_xor_sync(~0u, x, 2);
  x += shift >= 3 ? far : 0.0f;
  return x;
}

// Appends what a lane found to its queries' candidates. found: bit 4 f + m for score m of followed query f.
template <int kFollowed>
__device__ __forceinline__ void KeepFound(uint32_t found, const float (&scores)[kFollowed][4],
                                          const int32_t (&blocks)[2], uint64_t* candidates, int list_keys, int* counts,
                                          int room, int r, const auto& prune) {
  uint32_t full[kFollowed];
#pragma unroll
  for (int f = 0; f < kFollowed; ++f) {
    const uint32_t own = found >> (4 * f) & 15u;
    bool over = false;
    if (own != 0) {
      const int query = r + 8 * f;
      const int at = atomicAdd(&counts[query], __popc(own));
      over = at + __popc(own) > room;
      uint64_t* to = candidates + query * list_keys + at;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        if (own >> m & 1) to[__popc(own & ((1u << m) - 1u))] = CandidateKey(scores[f][m], blocks[m / 2] + m % 2);
      }
    }
    full[f] = __ballot_sync(~0u, over);
  }
  __syncwarp();
  // A product adds at most 16 candidates to a query: make room where the next one might not fit.
#pragma unroll
  for (int f = 0; f < kFollowed; ++f) {
    for (; full[f] != 0; full[f] &= full[f] - 1) {
      const int q = (__ffs(static_cast<int>(full[f])) - 1) / 4 + 8 * f;
      if (counts[q] > room) prune(q);
    }
  }
}

// Lists the subsets of the lanes' reached items behind `n` others. Returns how many there are then.
__device__ __forceinline__ int ListReached(int32_t* list, int n, int v, uint32_t reached, int subset_shift, int lane) {
  const uint32_t items = (reached | reached >> 16) & 0xFFu;
  if (__any_sync(~0u, items != 0)) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const bool wanted = (items >> j & 1) != 0;
      const uint32_t lanes = __ballot_sync(~0u, wanted);
      const int at = n + (__popc(lanes & ((1u << lane) - 1u)) << subset_shift);
      const int32_t subset = (8 * v + j) << subset_shift;
      if (wanted) list[at] = subset;
      if (wanted && subset_shift != 0) list[at + 1] = subset + 1;
      n += __popc(lanes) << subset_shift;
    }
  }
  return n;
}

// Whether a followed query has too few candidates; such a one gets a lower threshold, the others are done.
template <int kQueries, int kFollowed>
__device__ __forceinline__ bool LowerThresholds(int* counts, uint32_t* thresholds, int* faint, int32_t top_k,
                                                int32_t init, int pairs, bool guesses, int attempt, int r,
                                                float (&threshold)[kFollowed], int32_t (&end)[kFollowed]) {
  bool missing = false;
#pragma unroll
  for (int f = 0; f < kFollowed; ++f) {
    const int query = (r + 8 * f) % kQueries;
    const bool follows = threshold[f] > 0.0f && threshold[f] < INFINITY;
    if (follows && counts[query] < min(top_k, end[f] - init)) {
      missing = true;
      const float tried = __uint_as_float(thresholds[query] << 16);
      threshold[f] = guesses && attempt == 0 ? tried / (kGuess * static_cast<float>(pairs)) : 0.0f;
    } else {
      if (threshold[f] < kLeastScore && end[f] - init > top_k) faint[query] = 1;
      end[f] = 0;
    }
  }
  return missing;
}

// What the next attempt looks for; queries that are done look for nothing.
template <int kQueries, int kFollowed>
__device__ __forceinline__ void SetThresholds(int* counts, uint32_t* thresholds, const float (&threshold)[kFollowed],
                                              const int32_t (&end)[kFollowed], int r, int c) {
#pragma unroll
  for (int f = 0; f < kFollowed; ++f) {
    const int query = (r + 8 * f) % kQueries;
    if (c != 0 || r + 8 * f >= kQueries) continue;
    if (end[f] != 0) counts[query] = 0;
    thresholds[query] = end[f] != 0 ? (__float_as_uint(threshold[f]) >> 16) * 0x10001u : kNone;
  }
}

// Writes the queries' lists, ascending: `kLanes` lanes one of them.
template <int kLanes>
__device__ __forceinline__ void StoreBest(const SelectArgs& args, const SequenceView& view, int32_t q0, int64_t list0,
                                          int64_t list_stride, uint64_t* candidates, int list_keys, int* counts,
                                          int* faint, int32_t top_k, int lane) {
  const int query = lane / kLanes;
  const bool writes = q0 + query < view.q_len && NeedsScores(args, (view.first_position() + q0 + query) / kBlock);
  const uint64_t* best = candidates + query * list_keys;
  const int kept = writes ? counts[query] : 0;
  int32_t* selection = args.p.selection + list0 + query * list_stride;
  constexpr int kMine = 4;
  for (int base = lane % kLanes; base < top_k; base += kMine * kLanes) {
    uint32_t mine[kMine];
    int place[kMine] = {};
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int at = base + j * kLanes;
      mine[j] = at < kept ? static_cast<uint32_t>(best[at]) : 0;  // the lower block has the larger word
    }
    for (int i = 0; i < kept; ++i) {
      const uint32_t other = static_cast<uint32_t>(best[i]);
#pragma unroll
      for (int j = 0; j < kMine; ++j) place[j] += other > mine[j];
    }
    if (!writes) continue;
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int at = base + j * kLanes;
      if (at >= top_k) continue;
      const int to = at < kept ? place[j] : at;
      selection[to] = at < kept ? KeyBlock(best[at]) : -1;
      if (args.p.selection_scores) {
        const float score = at >= kept ? 0.0f : faint[query] ? Exp2(LogOfRank(KeyScore(best[at]))) : KeyScore(best[at]);
        args.p.selection_scores[list0 + query * list_stride + to] = score;
      }
    }
  }
}

template <typename T, int kHeadDim, int kPadded>
__global__ __launch_bounds__(kChooseWarps * 32, 4) void ChooseKernel(const __grid_constant__ SelectArgs args) {
  constexpr int kQueries = 16 / kPadded;
  constexpr int kFollowed = kPadded == 1 ? 2 : 1;
  constexpr int kLanes = 32 / kQueries;
  constexpr int kMostPairs = kPadded <= 2 ? 1 : kPadded / 2;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int r = lane / 4, c = lane % 4;
  const int list_keys = args.list_keys, pairs = args.group.pairs;
  const ChooseShared layout(kQueries, list_keys, kQueries * pairs * args.epochs);
  uint8_t* own_shared = shared + warp * layout.bytes;
  uint64_t* candidates = reinterpret_cast<uint64_t*>(own_shared);
  int* counts = reinterpret_cast<int*>(own_shared + layout.counts);
  // [query]: whether its K-th best score is too small to trust; and whether this is the last try, in which such queries
  // rank by logarithms: kept in a register, that would spill.
  int* faint = reinterpret_cast<int*>(own_shared + layout.faint);
  volatile int* by_logs = faint + 16;
  uint32_t* thresholds = reinterpret_cast<uint32_t*>(own_shared + layout.thresholds);
  int32_t* list = reinterpret_cast<int32_t*>(own_shared + layout.list);
  Factors* factors = reinterpret_cast<Factors*>(own_shared + layout.bounds);  // [query][pair][epoch]

  const Shape& shape = args.p.shape;
  const int32_t tile_blocks = args.group.tile_queries / (kQueries * kChooseWarps);  // CTAs
  const int32_t index = args.tile_end - 1 - static_cast<int32_t>(blockIdx.x) / tile_blocks;
  const int32_t head = blockIdx.y;
  SequenceView view;
  const int32_t tile_q0 = FindTile(args.p.batch, index, args.group.tile_queries, view);
  if (tile_q0 < 0) return;
  const int32_t in_tile = (static_cast<int32_t>(blockIdx.x) % tile_blocks * kChooseWarps + warp) * kQueries;
  const int32_t q0 = tile_q0 + in_tile;
  if (q0 >= view.q_len) return;
  // All queries of a warp are in the same units of Statistics, one for each pair of heads.
  const int64_t unit0 =
      (static_cast<int64_t>(index - args.tile_begin) * shape.selection_heads + head) * args.group.tile_units +
      in_tile / args.group.unit_queries * pairs;
  const int32_t row0 = in_tile % args.group.unit_queries;
  const int32_t top_k = shape.top_k, init = shape.init_blocks;
  const int64_t list0 = ((view.q_start + static_cast<int64_t>(q0)) * shape.selection_heads + head) * top_k;
  const int64_t list_stride = static_cast<int64_t>(shape.selection_heads) * top_k;

  int32_t end[kFollowed];
  bool active[kFollowed];
  bool any = FollowQueries<kQueries, kFollowed>(args, shape, view, q0, r, end, active);
  bool all = active[0] && active[kFollowed - 1];
  any = __any_sync(~0u, any);
  all = __all_sync(~0u, all);

  ListUnscored<kQueries>(args, shape, view, q0, top_k, init, list0, list_stride, all, lane);
  if (!any) return;

  const int32_t last = min(q0 + kQueries, view.q_len) - 1;
  const int shift = 31 - __clz(shape.parts);  // from representatives to blocks
  const int32_t last_end = shape.CandidateEnd((view.first_position() + last) / kBlock), reps_end = last_end << shift;
  const int32_t stages = TileStages(args, view, tile_q0);
  const int32_t epochs = EpochOfTurn(stages - 1) + 1;
  if (lane < kQueries) thresholds[lane] = kNone;
  MakeFactors<kQueries>(args, shape, unit0, row0, pairs, epochs, lane, factors);
  __syncwarp();

  // Weights of eight items: vector v of a row; and what goes with them.
  const int item_reps = ItemReps(shape.parts), vectors = (reps_end + 8 * item_reps - 1) / (8 * item_reps);
  const int stage_shift = shift == 3 ? 1 : 2;  // from vectors to stages
  const auto row_weights = [&](int q, int pair) {
    return reinterpret_cast<const uint4*>(args.weights + ((unit0 + pair) * args.group.unit_queries + row0 + q) *
                                                             static_cast<int64_t>(args.row_items));
  };
  const auto epoch_of = [&](int v) { return EpochOfTurn(TurnOfStage(v >> stage_shift, stages)); };

  // Where an item is several blocks and a group several pairs of heads, the pairs may mean different blocks: the sum of
  // their weights is then no bound from below, but that divided by their number is. A guess between the two mostly
  // does.
  const bool guesses = pairs > 1 && shape.parts < 4;
  // Pass 1: of every query, the K-th largest bound from below. That of the largest ones of 128 disjoint sets (256, for
  // a large K) is hardly less. At least K blocks reach it, so it is a threshold, never too high.
  const int set_words = top_k <= 16 ? 2 : 4;  // of a lane; two sets a word
  uint32_t* maxima = reinterpret_cast<uint32_t*>(own_shared);
  // Eight vectors of a lane are under way: of several queries, since a row has few at 32k and below.
  constexpr int kJoint = kMostPairs <= 2 ? std::min(4, kQueries) : std::max(1, 8 / kMostPairs);
  constexpr int kAhead = 8 / (kJoint * kMostPairs);
#pragma unroll 1
  for (int first = 0; first < kQueries; first += kJoint) {
    __nv_bfloat162 most[kJoint][4];
#pragma unroll
    for (int k = 0; k < kJoint; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) most[k][j] = Pair(0);
    }
#pragma unroll 1
    for (int v0 = lane; v0 < vectors; v0 += 32 * kAhead) {
      uint4 weights[kAhead][kJoint][kMostPairs];
      LoadWeights(row_weights, first, v0, vectors, pairs, weights);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (v0 + 32 * i >= vectors) break;
        const int epoch = epoch_of(v0 + 32 * i);
#pragma unroll
        for (int k = 0; k < kJoint; ++k) {
          __nv_bfloat162 low[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) low[j] = Pair(0);
#pragma unroll
          for (int pair = 0; pair < kMostPairs; ++pair) {
            if (kMostPairs > 1 && pair >= pairs) break;
            const __nv_bfloat162 factor = Pair(factors[((first + k) * pairs + pair) * epochs + epoch].low);
            const uint4 x = weights[i][k][pair];
            low[0] = __hfma2(Pair(x.x), factor, low[0]);
            low[1] = __hfma2(Pair(x.y), factor, low[1]);
            low[2] = __hfma2(Pair(x.z), factor, low[2]);
            low[3] = __hfma2(Pair(x.w), factor, low[3]);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) most[k][j] = __hmax2(most[k][j], low[j]);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kJoint; ++k) {
      StoreMaxima(most[k], set_words, maxima + (first + k) * 2 * list_keys, lane);
    }
  }
  __syncwarp();
  float threshold[kFollowed];
  {
    const uint32_t low = FindThreshold<kLanes>(maxima, list_keys, set_words, top_k, guesses, lane);
    FollowThresholds<kQueries, kFollowed>(low, active, thresholds, threshold, r, c);
  }
  __syncwarp();

  // A in an order of k that lets every lane load 16 bytes at once; B is loaded in the same order.
  constexpr int kLoads = kRowPieces<kHeadDim>;
  uint4 a0[kLoads], a1[kLoads];
  LoadQueryRows<T, kHeadDim, kPadded>(args, view, head, q0, lane, a0, a1);
  const auto row_lse = [&](int row) {
    const int h = row / kQueries;
    if (h >= args.group.size) return INFINITY;
    return args.lse2[(unit0 + h / 2) * 16 + row0 + row % kQueries + h % 2 * 8];
  };
  const float lse0 = row_lse(r), lse1 = row_lse(r + 8);
  const float scale2 = shape.scale * kLog2e;
  const T* reps = static_cast<const T*>(args.p.reps.data) + head / args.group.kv_div * args.p.reps.head_stride + c * 8;
  // Rows at a fixed stride, as they mostly are, cost one multiplication.
  const uint32_t stride = args.rep_stride;
  if (stride != 0) reps += args.p.batch.rep_starts[view.seq] * args.p.reps.token_stride;

  const int room = list_keys - 2 - 16;
  const auto raise = [&](int f, float worst) {
    if (threshold[f] < INFINITY) threshold[f] = fmaxf(threshold[f], worst);
  };
  const auto prune = [&](int q) {
    int kept = counts[q];
    const float known = __shfl_sync(~0u, q < 8 ? threshold[0] : threshold[kFollowed - 1], q % 8 * 4);
    const float worst = Prune(candidates + q * list_keys, kept, top_k, room, known, lane);
#pragma unroll
    for (int f = 0; f < kFollowed; ++f) {
      if (r + 8 * f == q) raise(f, worst);
    }
    if (lane == 0) counts[q] = kept;
    __syncwarp();
  };
  const auto most_candidates = [&] { return __reduce_max_sync(~0u, counts[lane % kQueries]); };
  // The best K of every query, or few more, and thresholds that follow; where there are too many, fewer candidates.
  const auto keep_best = [&](bool exactly) {
    if (most_candidates() > kAtOnce) {
      for (int q = 0; q < kQueries; ++q) {
        if (counts[q] > top_k) prune(q);
      }
      if (most_candidates() > kAtOnce) return;
    }
    const float worst =
        KeepBestOfQueries<kLanes, kFollowed>(candidates, list_keys, counts, top_k, threshold, exactly, lane);
#pragma unroll
    for (int f = 0; f < kFollowed; ++f) raise(f, __shfl_sync(~0u, worst, (r + 8 * f) % kQueries * kLanes));
  };
  // Scores the first `n` subsets of the list; blocks that reach their query's threshold become candidates.
  const auto score = [&](int n) {
    uint4 b[2][kLoads];
    const auto load = [&](int4 subsets) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t subset = i == 0 ? (r < 4 ? subsets.x : subsets.y) : (r < 4 ? subsets.z : subsets.w);
        const int32_t t = min(subset * kSubset + r % 4, reps_end - 1);
        const T* rep = reps;
        if (__builtin_expect(stride != 0, 1)) {
          rep += static_cast<uint64_t>(static_cast<uint32_t>(t)) * stride;
        } else {
          rep += RepOffset(args.p.batch, args.p.reps, args.p.shape.parts, view.seq, t);
        }
#pragma unroll
        for (int k = 0; k < kLoads; ++k) {
          b[i][k] = HasPiece<kHeadDim>(4 * k + c) ? *reinterpret_cast<const uint4*>(rep + k * 32) : uint4{};
        }
      }
    };
    const int4* four = reinterpret_cast<const int4*>(list);
    int4 subsets = four[0];
    load(subsets);
    for (int done = 4;; done += 4) {
      float acc[2][4] = {}, more[2][4] = {};  // two sums: half the latency
      Multiply<T>(a0, a1, b, acc, more);
      // Blocks of the lane's columns: two of each product, or one (with parts), which other lanes may have too.
      const int32_t blocks[2] = {((c < 2 ? subsets.x : subsets.y) * kSubset + c % 2 * 2) >> shift,
                                 ((c < 2 ? subsets.z : subsets.w) * kSubset + c % 2 * 2) >> shift};
      // The next subsets' representatives are under way while these scores are looked at.
      if (done < n) {
        subsets = four[done / 4];
        load(subsets);
      }
      uint32_t found = 0;
      float scores[kFollowed][4];  // [followed query][product · 2 + column]
      const auto join = [&](int m, float x0, float x1) { JoinWeights<kPadded, kFollowed>(shape, m, x0, x1, scores); };
      const auto join_logs = [&](int m, float x0, float x1) { JoinLogs<kPadded, kFollowed>(shape, m, x0, x1, scores); };
      const auto look = [&](int m, int32_t block, bool own) {
#pragma unroll
        for (int f = 0; f < kFollowed; ++f) {
          const bool candidate = own && block >= init && block < end[f];
          if (candidate && scores[f][m] >= threshold[f]) found |= 1u << (4 * f + m);
        }
      };
      const auto log_weight = [&](int i, int j, int e) {
        return fmaf(acc[i][2 * e + j] + more[i][2 * e + j], scale2, e == 0 ? -lse0 : -lse1);
      };
      const bool own = (c & ((1 << max(shift - 1, 0)) - 1)) == 0;
      if (__builtin_expect(*by_logs != 0, 0)) {
        RankByLogs<kFollowed>(log_weight, join_logs, shift, own, blocks, init, end, threshold, scores, found);
      } else if (shift == 0) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          join(m, Exp2(log_weight(m / 2, m % 2, 0)), Exp2(log_weight(m / 2, m % 2, 1)));
          look(m, blocks[m / 2] + m % 2, true);
        }
      } else {
        // All lanes exchange, whoever shares a block: no branches.
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float x[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            x[e] = SumOfParts(Exp2(log_weight(i, 0, e)) + Exp2(log_weight(i, 1, e)), shift);
          }
          join(2 * i, x[0], x[1]);
          look(2 * i, blocks[i], own);
        }
      }
      if (__any_sync(~0u, found != 0))
        KeepFound<kFollowed>(found, scores, blocks, candidates, list_keys, counts, room, r, prune);
      if (done >= n) break;
    }
    __syncwarp();
  };

  // Pass 2: score the items whose bound from above reaches a query's threshold.
  if (lane < kQueries) counts[lane] = faint[lane] = 0;
  if (lane == 0) *by_logs = 0;
  __syncwarp();
  const int subset_shift = shift == 3 ? 1 : 0;  // from items to subsets
#pragma unroll 1
  for (int attempt = 0;; ++attempt) {
    int n = 0;
#pragma unroll 1
    for (int v0 = 0; v0 < vectors; v0 += 32) {
      const int v = v0 + lane;
      uint32_t reached = 0;  // bits 0, 2, 4, 6, and 16 more than 1, 3, 5, 7
      if (v < vectors) {
        const int epoch = epoch_of(v);
#pragma unroll 4
        for (int q = 0; q < kQueries; ++q) {
          const __nv_bfloat162 least = Pair(thresholds[q]);
          __nv_bfloat162 high[4], more = Pair(0);
#pragma unroll
          for (int j = 0; j < 4; ++j) high[j] = more;
#pragma unroll
          for (int pair = 0; pair < kMostPairs; ++pair) {
            if (kMostPairs > 1 && pair >= pairs) break;
            const Factors f = factors[(q * pairs + pair) * epochs + epoch];
            const uint4 x = row_weights(q, pair)[v];
            high[0] = __hfma2(Pair(x.x), Pair(f.high), high[0]);
            high[1] = __hfma2(Pair(x.y), Pair(f.high), high[1]);
            high[2] = __hfma2(Pair(x.z), Pair(f.high), high[2]);
            high[3] = __hfma2(Pair(x.w), Pair(f.high), high[3]);
            more = __hadd2(more, Pair(f.more));
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) high[j] = __hadd2(high[j], more);
#pragma unroll
          for (int j = 0; j < 4; ++j) reached |= __hge2_mask(high[j], least) & (0x00020001u << (2 * j));
        }
      }
      n = ListReached(list, n, v, reached, subset_shift, lane);
      if (n == 0 || (n <= kList - kStepSubsets && v0 + 32 < vectors)) continue;
      if (lane < 3) list[n + lane] = 1 << 28;  // none: beyond all candidates
      __syncwarp();
      score(n);
      n = 0;
    }
    __syncwarp();
    if (attempt == 0) keep_best(false);
    // A query with enough blocks that reach its threshold is done. The others try a lower one, in the end 0.
    const bool missing = LowerThresholds<kQueries, kFollowed>(counts, thresholds, faint, top_k, init, pairs, guesses,
                                                              attempt, r, threshold, end);
    __syncwarp();
    if (!__any_sync(~0u, missing)) {
      if (*by_logs != 0 || !__any_sync(~0u, faint[lane % kQueries])) break;
      __syncwarp();
      if (lane == 0) *by_logs = 1;
#pragma unroll
      for (int f = 0; f < kFollowed; ++f) {
        if (r + 8 * f >= kQueries || faint[r + 8 * f] == 0) continue;
        end[f] = shape.CandidateEnd((view.first_position() + q0 + (r + 8 * f) % kQueries) / kBlock);
        threshold[f] = 0.0f;
      }
    }
    __syncwarp();
    SetThresholds<kQueries, kFollowed>(counts, thresholds, threshold, end, r, c);
    __syncwarp();
  }

  // The best K, ascending.
  keep_best(true);
  if (most_candidates() > top_k) {  // rare: more than KeepBestOfAll takes
    for (int q = 0; q < kQueries; ++q) {
      if (counts[q] <= top_k) continue;
      KeepBest(candidates + q * list_keys, counts[q], top_k, lane);
      if (lane == 0) counts[q] = top_k;
      __syncwarp();
    }
  }
  StoreBest<kLanes>(args, view, q0, list0, list_stride, candidates, list_keys, counts, faint, top_k, lane);
}

Group MakeGroup(const Shape& shape) {
  Group group;
  group.size = shape.num_q_heads / shape.selection_heads;
  group.padded = 1;
  while (group.padded < group.size) group.padded *= 2;
  group.queries = 16 / group.padded;
  group.kv_div = shape.selection_heads / shape.num_kv_heads;
  group.pairs = (group.size + 1) / 2;
  group.unit_queries = group.size == 1 ? 16 : 8;
  group.tile_units = kUnits / group.pairs * group.pairs;
  group.tile_queries = kUnits / group.pairs * group.unit_queries;
  return group;
}

int32_t RoundUp(int32_t x, int32_t unit) { return (x + unit - 1) / unit * unit; }

// Of the queries of the tiles before `tile_end`: what their rows of weights hold. Whole windows are written.
int32_t RowItems(const Shape& shape, const Batch& batch, int32_t tile_end) {
  int64_t tokens = batch.max_kv_len;
  if (batch.num_seqs == 1) {
    tokens = std::min<int64_t>(tokens, tokens - batch.total_q + int64_t{tile_end} * MakeGroup(shape).tile_queries);
  }
  const int64_t reps = (std::max<int64_t>(tokens, 1) + kBlock - 1) / kBlock * shape.parts;
  return RoundUp(static_cast<int32_t>((reps + kWindow - 1) / kWindow) * (kWindow / ItemReps(shape.parts)), kWindow);
}

int32_t Epochs(const Shape& shape, const Batch& batch) {
  constexpr int32_t kReps = kStageWindows * kWindow;
  const int32_t stages = (batch.max_kv_len / kBlock * shape.parts + kReps - 1) / kReps;
  int32_t epochs = 1;
  while ((int64_t{1} << (epochs - 1)) < std::max(stages, 1)) ++epochs;
  return epochs;
}

size_t TileBytes(const Shape& shape, const Batch& batch, int32_t row_items) {
  const Group group = MakeGroup(shape);
  const size_t unit = static_cast<size_t>(group.unit_queries) * row_items * sizeof(bf16) +
                      (Epochs(shape, batch) + 1) * 16 * sizeof(float);
  return static_cast<size_t>(shape.selection_heads) * group.tile_units * unit;
}

size_t LeastTiles(const Shape& shape) { return (kSelectTiles + shape.selection_heads - 1) / shape.selection_heads; }

// The end of the chunk of tiles that begins at `begin`: as many as there is room for, at least one, and where that is
// not all, whole rounds for the multiprocessors.
int32_t ChunkEnd(const Shape& shape, const Batch& batch, size_t bytes, int32_t begin, int32_t tiles, int32_t round) {
  int32_t end = begin + 1;
  while (end < tiles && (end + 1 - begin) * TileBytes(shape, batch, RowItems(shape, batch, end + 1)) <= bytes) ++end;
  const int32_t items = (end - begin) * shape.selection_heads;
  if (end < tiles && items >= round) end = begin + std::max(1, items / round * round / shape.selection_heads);
  return end;
}

// Representatives as the copy engine sees them: element of a row, then rows in the order of WindowColumn (row % 2, row
// / 16, row % 16 / 2), then the first row of a sequence. Returns whether there is such a map.
bool MakeRepsMap(const ForwardParams& p, CUtensorMap* map) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  const int64_t elements = (p.shape.num_kv_heads - 1) * p.reps.head_stride + p.shape.head_dim;
  if (encode == nullptr || elements > INT32_MAX || p.reps.token_stride > INT32_MAX) return false;
  const cuuint64_t row = static_cast<cuuint64_t>(p.reps.token_stride) * 2;
  const cuuint64_t sizes[5] = {
      static_cast<cuuint64_t>(elements), 2,
      static_cast<cuuint64_t>(RoundUp(p.batch.max_kv_len / kBlock * p.shape.parts, 16)) / 16 + 8, 8,
      cuuint64_t{1} << 31};
  const cuuint64_t strides[4] = {row, 16 * row, 2 * row, row};
  const cuuint32_t box[5] = {64, 2, kWindow / 16, 8, 1}, steps[5] = {1, 1, 1, 1, 1};
  const auto type = p.shape.dtype == Dtype::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(map, type, 5, p.reps.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <typename T, int kHeadDim, int kPadded>
cudaError_t LaunchChoose(const SelectArgs& args, cudaStream_t stream) {
  const auto kernel = ChooseKernel<T, kHeadDim, kPadded>;
  const int units = args.group.queries * args.group.pairs;
  const int bytes = kChooseWarps * ChooseShared(16 / kPadded, args.list_keys, units * args.epochs).bytes;
  if (bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  const int32_t tile_blocks = args.group.tile_queries / (args.group.queries * kChooseWarps);
  const dim3 grid((args.tile_end - args.tile_begin) * tile_blocks, args.p.shape.selection_heads);
  kernel<<<grid, kChooseWarps * 32, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <typename T, int kHeadDim, int kParts, bool kPair>
cudaError_t LaunchStatisticsOf(const SelectArgs& args, const CUtensorMap& map, cudaStream_t stream) {
  const dim3 grid(args.tile_end - args.tile_begin, args.p.shape.selection_heads);
  const auto launch = [&](auto kernel, dim3 blocks, int threads, int stages, auto... map_of) {
    const int shared = stages * kWindow * kRowBytes<kHeadDim>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    kernel<<<blocks, threads, shared, stream>>>(args, map_of...);
    return cudaGetLastError();
  };
  if constexpr (kHasWgmma<kHeadDim>) {
    if (Hopper()) {
      return launch(StatisticsWgmmaKernel<T, kHeadDim, kParts, kPair>, std::min(grid.x * grid.y, Multiprocessors()),
                    kWgThreads, kWgStages * kStageWindows, map);
    }
  }
  return launch(StatisticsKernel<T, kHeadDim, kParts, kPair>, grid, kPlainThreads, kPlainStages);
}

template <typename T, int kHeadDim, int kParts>
cudaError_t LaunchStatistics(const SelectArgs& args, const CUtensorMap& map, cudaStream_t stream) {
  return args.group.size == 1 ? LaunchStatisticsOf<T, kHeadDim, kParts, false>(args, map, stream)
                              : LaunchStatisticsOf<T, kHeadDim, kParts, true>(args, map, stream);
}

}  // namespace

template <int kHeadDim>
size_t SelectWorkspaceOf(const Shape& shape, const Batch& batch) {
  const size_t tiles = static_cast<size_t>(MaxTiles(batch, MakeGroup(shape).tile_queries));
  const size_t tile = TileBytes(shape, batch, RowItems(shape, batch, INT32_MAX >> 10));
  const size_t room = std::max(kSelectWorkspace / tile, LeastTiles(shape));
  return std::min(tiles, room) * tile;
}

template <typename T, int kHeadDim>
cudaError_t SelectOf(const ForwardParams& p, cudaStream_t stream) {
  SelectArgs args{};
  args.p = p;
  args.group = MakeGroup(p.shape);
  args.epochs = Epochs(p.shape, p.batch);
  const bool paged = p.batch.page_size != 0;
  args.rep_stride = !paged && p.reps.token_stride < int64_t{1} << 31 ? static_cast<uint32_t>(p.reps.token_stride) : 0;
  args.list_keys = (p.shape.top_k <= 16 ? kAtOnce : kCandidates) + 2;
  args.all = p.selection_scores != nullptr;
  const int32_t tiles = MaxTiles(p.batch, args.group.tile_queries);
  if (tiles == 0) return cudaSuccess;
  if (p.workspace_size < SelectWorkspaceOf<kHeadDim>(p.shape, p.batch)) return cudaErrorInvalidValue;
  CUtensorMap map{};
  args.copy_engine = !paged && kHasWgmma<kHeadDim> && Hopper() && MakeRepsMap(p, &map);
  const int32_t round = static_cast<int32_t>(Multiprocessors()), heads = p.shape.selection_heads;
  for (args.tile_begin = 0; args.tile_begin < tiles; args.tile_begin = args.tile_end) {
    args.tile_end = ChunkEnd(p.shape, p.batch, p.workspace_size, args.tile_begin, tiles, round);
    args.row_items = RowItems(p.shape, p.batch, args.tile_end);
    const size_t units = static_cast<size_t>(args.tile_end - args.tile_begin) * heads * args.group.tile_units;
    args.weights = static_cast<bf16*>(p.workspace);
    args.bases = reinterpret_cast<float*>(args.weights + units * args.group.unit_queries * args.row_items);
    args.lse2 = args.bases + units * args.epochs * 16;
    cudaError_t error = cudaSuccess;
    switch (p.shape.parts) {
      case 1: error = LaunchStatistics<T, kHeadDim, 1>(args, map, stream); break;
      case 2: error = LaunchStatistics<T, kHeadDim, 2>(args, map, stream); break;
      case 4: error = LaunchStatistics<T, kHeadDim, 4>(args, map, stream); break;
      default: error = LaunchStatistics<T, kHeadDim, 8>(args, map, stream); break;
    }
    if (error != cudaSuccess) return error;
    switch (args.group.padded) {
      case 1: error = LaunchChoose<T, kHeadDim, 1>(args, stream); break;
      case 2: error = LaunchChoose<T, kHeadDim, 2>(args, stream); break;
      case 4: error = LaunchChoose<T, kHeadDim, 4>(args, stream); break;
      case 8: error = LaunchChoose<T, kHeadDim, 8>(args, stream); break;
      default: error = LaunchChoose<T, kHeadDim, 16>(args, stream); break;
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template size_t SelectWorkspaceOf<PHSA_HEAD_DIM>(const Shape&, const Batch&);
template cudaError_t SelectOf<bf16, PHSA_HEAD_DIM>(const ForwardParams&, cudaStream_t);
template cudaError_t SelectOf<half, PHSA_HEAD_DIM>(const ForwardParams&, cudaStream_t);

}  // namespace phsa::cuda
