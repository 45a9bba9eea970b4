// Scores, group softmax and top-K: exact, and never queries × blocks in memory.
//
// A group's score needs every head's normaliser, so the scores are needed twice. Two kernels:
//  1. Statistics: all scores by tensor cores; keeps per row (query and head) the log-sum-exp and, per subset of four
//     neighbouring representatives, the largest weight of one, rounded up to eight bits.
//  2. Choose: those give an upper bound of a group's score at each subset. Only subsets whose bound reaches a threshold
//     are scored again, four at a time, by the warp that owns their 16 rows. The threshold is a guess from the K-th
//     largest bound; where at least K blocks are found that reach it, it was low enough, and the best K of those are
//     the best of all. Where not, which is rare, it is lowered. Where the K-th best score is hardly a number of f32 any
//     more, which is rarer still, all candidates are scored once more and ranked by the logarithms of their scores.
//
// A unit is 16 rows, the M of one tensor-core product: kPadded heads (the group rounded up to a power of two) × 16 /
// kPadded queries, row = head · queries + query. The windows of 64 representatives lie in shared memory in such an
// order that one lane of the product holds 16 neighbours of a row: their maxima and sums cost no shuffle.
//
// With parts a block has 2, 4 or 8 neighbouring representatives, and its score is their sum. Statistics goes over all
// of them; the bound of a subset is that of the best block in it (two parts), of its block (four), or of the block
// whose half it is (eight: both halves have the bound of the whole). Windows and subsets count representatives, all
// else blocks.
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
constexpr int kChooseWarps = 4;
constexpr int kBins = 128;  // of the histogram of bounds
// Head sizes that have Statistics for Hopper; the others take the plain one there too.
template <int kHeadDim>
constexpr bool kHasWgmma = kHeadDim == 64 || kHeadDim == 128;
constexpr int kCandidates = 128;  // per query, before the best K are kept; at least 64 + 16
constexpr int kList = 256;        // subsets that are scored at a time

// A code is the weight of a representative relative to a reference value of its row: exponent and two bits of a float,
// rounded up. As the upper bits of a bfloat16 it is that weight · 2^-92. The least is 4, a normal number: 2^-34.
constexpr float kMostWeight = 0x1p28f;
constexpr int kCodeBits = 5;  // of a bfloat16 that are dropped
constexpr int kCodeExponent = 92;
constexpr uint32_t kLeastCode = 4;
// Below this a group's score may miss heads that f32 has no numbers for: such blocks are ranked by logarithms.
constexpr float kLeastScore = 0x1p-90f;
constexpr float kUp = 1.0f / 64;  // bounds are larger by this: both kernels round, and bounds are sums of bfloat16

struct Group {
  int32_t size;     // heads that choose together
  int32_t padded;   // next power of two
  int32_t queries;  // of a unit
  int32_t kv_div;   // selection heads per KV head
};

struct SelectArgs {
  ForwardParams p;
  Group group;
  int32_t tile_begin, tile_end;
  int32_t windows;      // per unit in `codes`
  int32_t list_keys;    // what a query's candidates take: room for them, and neighbours begin in other banks
  uint2* codes;         // [unit][windows][32 lanes]: of rows r and r + 8, one byte a subset
  float2* units;        // [unit][32 lanes]: rows r and r + 8, log2 of the share that a weight of 1 is
  float* lse2;          // [unit][16], log2 units; +inf in rows of no head, or with nothing before the own block
  uint32_t rep_stride;  // of neighbouring representatives, in elements; 0: on pages
  bool copy_engine;     // representatives come through the tensor map
  bool all;             // score even where the candidates all fit, because the scores are wanted
};

__device__ __forceinline__ bool NeedsScores(const SelectArgs& args, int32_t b) {
  if (args.all) return !args.p.shape.Dense(b) && args.p.shape.Candidates(b) > 0;
  return !args.p.shape.ReadsAll(b);
}

// Row r of a unit whose first query is `q0` of the sequence: where its vector lies, or NULL where there is none.
template <typename T>
__device__ __forceinline__ const T* QueryRow(const SelectArgs& args, const SequenceView& view, int32_t head, int32_t q0,
                                             int32_t r) {
  const int32_t h = r / args.group.queries;
  const int32_t q = q0 + r % args.group.queries;
  if (h >= args.group.size || q >= view.q_len) return nullptr;
  return static_cast<const T*>(args.p.q.data) + (view.q_start + static_cast<int64_t>(q)) * args.p.q.token_stride +
         (static_cast<int64_t>(head) * args.group.size + h) * args.p.q.head_stride;
}

// What a lane keeps of the two rows it holds: over its own columns only, joined at the end.
struct RowPair {
  float base[2], sum[2];  // reference value (log2 units, whole), and the sum of 2^(score - it)
  int32_t b[2], end[2];   // first representatives of the own block, and of the block where the candidates end
};

template <int kParts>
__device__ __forceinline__ void InitRows(const SelectArgs& args, const SequenceView& view, int32_t q0, int r,
                                         RowPair& rows) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int32_t q = min(q0 + (r + 8 * e) % args.group.queries, view.q_len - 1);
    const int32_t b = (view.first_position() + q) / kBlock;
    rows.b[e] = b * kParts;
    rows.end[e] = args.p.shape.CandidateEnd(b) * kParts;
    rows.base[e] = -1e30f;  // below any score: the first one moves it
    rows.sum[e] = 0.0f;
  }
}

// A row's first reference value: its score at the last representative before its own block. Scores of real models may
// grow by hundreds of powers of two towards the query (where keys have a large part in common, which RoPE turns); from
// the first window on, the reference value would have to follow in most windows, and each time move the codes of all
// windows before.
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
    if (t >= 0 && fabsf(base) < INFINITY) rows.base[e] = base;
  }
}

// The weights 2^(score - base) of a lane's scores of row e: their sum, and that of the best block in each subset (of
// the block that a subset is a part of).
template <int kParts>
__device__ __forceinline__ float Weigh(const float (&acc)[8][4], int e, float scale2, float base, float (&most)[4]) {
  float sum[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = Exp2(fmaf(acc[2 * k + i / 2][2 * e + i % 2], scale2, -base));
    if constexpr (kParts == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = k == 0 ? x[i] : sum[i] + x[i];
      most[k] = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    } else {
      const float first = x[0] + x[1], second = x[2] + x[3];
      sum[k] = first + second;
      most[k] = kParts == 2 ? fmaxf(first, second) : sum[k];
    }
    asm volatile("" : "+f"(most[k]));  // now, while exponentials are under way: else all weights are kept for later
  }
  if constexpr (kParts == 8) {
    most[0] = most[1] = sum[0] + sum[1];
    most[2] = most[3] = sum[2] + sum[3];
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// The codes of four subsets, in the order 0, 2, 1, 3: the cheapest to pack and to unpack.
__device__ __forceinline__ uint32_t Encode(const float (&most)[4]) {
  constexpr uint32_t kShift = static_cast<uint16_t>((1 - kCodeExponent * 4) * (1 << kCodeBits)) * 0x10001u;
  constexpr uint32_t kLeast = (kLeastCode << kCodeBits) * 0x10001u;
  const uint32_t low = __byte_perm(__float_as_uint(most[0]), __float_as_uint(most[1]), 0x7632);
  const uint32_t high = __byte_perm(__float_as_uint(most[2]), __float_as_uint(most[3]), 0x7632);
  const uint32_t x = __viaddmax_s16x2(low, kShift, kLeast), y = __viaddmax_s16x2(high, kShift, kLeast);
  return (x >> kCodeBits & 0x00FF00FFu) | (y << (8 - kCodeBits) & 0xFF00FF00u);
}
__device__ __forceinline__ constexpr uint32_t CodeByte(int subset) {
  return 0xFFu << (subset == 1 ? 16 : subset == 2 ? 8 : 8 * subset);
}
// Two codes as bfloat16: of subsets 0 and 1, or of 2 and 3.
__device__ __forceinline__ __nv_bfloat162 Decode(uint32_t codes, int half) {
  const uint32_t bits = (half == 0 ? codes << kCodeBits : codes >> (8 - kCodeBits)) & (0x00FF00FFu << kCodeBits);
  return reinterpret_cast<const __nv_bfloat162&>(bits);
}

// Scores in or after a row's own block count for nothing. `first`: the lane's first column.
__device__ __forceinline__ void MaskOwn(float (&acc)[8][4], const RowPair& rows, int32_t first) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (first + i >= rows.b[e]) acc[i / 2][2 * e + i % 2] = -INFINITY;
    }
  }
}

// The codes of subsets without a candidate become 0: no bound.
__device__ __forceinline__ uint2 MaskCodes(uint2 codes, const RowPair& rows, int32_t first, int32_t init) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int32_t t = first + kSubset * k;
    if (t + kSubset <= init || t >= rows.end[0]) codes.x &= ~CodeByte(k);
    if (t + kSubset <= init || t >= rows.end[1]) codes.y &= ~CodeByte(k);
  }
  return codes;
}

// Takes in the scores of window w; returns its codes. The reference value of a row follows its scores only when the
// weights of a window pass kMostWeight: fp32 has the range, and the exponentials need not wait for a maximum. The codes
// of the windows before `codes` are moved with it.
template <int kParts>
__device__ __forceinline__ uint2 TakeWindow(const float (&acc)[8][4], RowPair& rows, float scale2, uint2* codes,
                                            int w) {
  float most[2][4], sum[2];
#pragma unroll 1
  for (int attempt = 0;; ++attempt) {
#pragma unroll
    for (int e = 0; e < 2; ++e) sum[e] = Weigh<kParts>(acc, e, scale2, rows.base[e], most[e]);
    // Once is enough, unless a score is no number.
    if (__all_sync(~0u, sum[0] < kMostWeight && sum[1] < kMostWeight) || attempt == 1) break;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float top = acc[0][2 * e];
#pragma unroll
      for (int i = 1; i < 16; ++i) top = fmaxf(top, acc[i / 2][2 * e + i % 2]);
      if (sum[e] < kMostWeight) continue;
      const float base = ceilf(top * scale2);
      const uint32_t steps = static_cast<uint32_t>(fminf(4.0f * (base - rows.base[e]), 255.0f));
#pragma unroll 1
      for (int i = 1; i <= w; ++i) {
        uint32_t& word = e == 0 ? codes[-32 * i].x : codes[-32 * i].y;
        word = __vmaxu4(__vsubus4(word, steps * 0x01010101u), __vminu4(word, kLeastCode * 0x01010101u));
      }
      rows.sum[e] *= Exp2(rows.base[e] - base);
      rows.base[e] = base;
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) rows.sum[e] += sum[e];
  return make_uint2(Encode(most[0]), Encode(most[1]));
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

// One window of a warp, from scores to codes, which go to `codes`. `c`: the lane's place among the four of a row.
template <int kParts>
__device__ __forceinline__ void TakeScores(float (&acc)[8][4], RowPair& rows, const WindowEnds& ends, float scale2,
                                           uint2* codes, int w, int32_t init, int c) {
  const int32_t first = w * kWindow, end = first + kWindow;
  if (first >= ends.none) return;
  if (__builtin_expect(end > ends.own, 0)) MaskOwn(acc, rows, first + 16 * c);
  uint2 taken = TakeWindow<kParts>(acc, rows, scale2, codes, w);
  if (__builtin_expect(first < init || end > ends.partial, 0)) taken = MaskCodes(taken, rows, first + 16 * c, init);
  *codes = taken;
}

// Joins the four lanes of each row and writes the unit's log-sum-exp.
__device__ __forceinline__ void FinishRows(const SelectArgs& args, const RowPair& rows, int64_t unit, int lane) {
  float share[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float most = rows.base[e];
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    float sum = rows.sum[e] * Exp2(rows.base[e] - most);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int row = lane / 4 + 8 * e;
    const bool real = row / args.group.queries < args.group.size;
    const float lse = real && sum > 0.0f ? most + log2f(sum) : INFINITY;
    if (lane % 4 == 0) args.lse2[unit * 16 + row] = lse;
    share[e] = rows.base[e] - lse;
  }
  args.units[unit * 32 + lane] = make_float2(share[0], share[1]);
}

// A tile as both Statistics kernels see it.
struct StatisticsTile {
  SequenceView view;
  int32_t q0;       // first query, inside the sequence
  int32_t windows;  // that hold a block before the last query's own
  int64_t unit;     // first unit, in the buffers of this chunk
  bool work;
};

// The last tiles see the most representatives: they come first.
__device__ __forceinline__ StatisticsTile FindStatisticsTile(const SelectArgs& args, int32_t place, int32_t head) {
  StatisticsTile tile;
  const int32_t index = args.tile_end - 1 - place;
  const int32_t queries = kUnits * args.group.queries;
  tile.q0 = FindTile(args.p.batch, index, queries, tile.view);
  tile.work = tile.q0 >= 0;
  if (!tile.work) return tile;
  const int32_t last = min(tile.q0 + queries, tile.view.q_len) - 1;
  const int32_t b = (tile.view.first_position() + last) / kBlock;
  tile.work = NeedsScores(args, b);
  tile.windows = (b * args.p.shape.parts + kWindow - 1) / kWindow;
  tile.unit = (static_cast<int64_t>(index - args.tile_begin) * args.p.shape.selection_heads + head) * kUnits;
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

template <typename T, int kHeadDim, int kParts>
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

  for (int s = 0; s < kStages - 1; ++s) {
    if (s < tile.windows) {
      CopyReps<T, kHeadDim, kWindow, kPlainThreads>(args, tile.view, kv_head, s * kWindow, reps_end,
                                                    base + s * kStageBytes);
    }
    CommitCopies();
  }

  uint32_t a[2][kHeadDim / 16][4];
  RowPair rows[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int32_t q0 = tile.q0 + (2 * warp + m) * args.group.queries;
    uint4 words[2][kRowPieces<kHeadDim>];
    LoadRowWords<kHeadDim>(QueryRow<T>(args, tile.view, head, q0, r), QueryRow<T>(args, tile.view, head, q0, r + 8), c,
                           words);
    InitRows<kParts>(args, tile.view, q0, r, rows[m]);
    GuessBases<T, kHeadDim>(args, tile.view, kv_head, words, c, scale2, rows[m]);
    MakeOperand(words, c, a[m]);
  }
  const WindowEnds ends[2] = {WindowEnds(rows[0]), WindowEnds(rows[1])};
  uint2* codes = args.codes + (tile.unit + 2 * warp) * args.windows * 32 + lane;

  for (int w = 0; w < tile.windows; ++w) {
    WaitCopies<kStages - 2>();
    __syncthreads();
    const int next = w + kStages - 1;
    if (next < tile.windows) {
      CopyReps<T, kHeadDim, kWindow, kPlainThreads>(args, tile.view, kv_head, next * kWindow, reps_end,
                                                    base + next % kStages * kStageBytes);
    }
    CommitCopies();

    const uint32_t stage = base + w % kStages * kStageBytes;
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
      TakeScores<kParts>(acc[m], rows[m], ends[m], scale2, codes + (static_cast<int64_t>(m) * args.windows + w) * 32, w,
                         init, c);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) FinishRows(args, rows[m], tile.unit + 2 * warp + m, lane);
}

// Hopper: four warpgroups of 64 rows each consume, wgmma; a fifth copies. Exponentials (16 a clock) and products (16
// scores a clock at head_dim 128) take the same time: while one warpgroup has the tensor cores, the others' scores go
// through the softmax.
constexpr int kWgConsumers = kUnits * 32;
constexpr int kWgThreads = kWgConsumers + 128;
constexpr int kWgStageWindows = 2;
constexpr int kWgStages = 4;

[[maybe_unused]] __device__ __forceinline__ bool ByCopyEngine(const SelectArgs& args, int stage, int32_t reps_end) {
  return args.copy_engine && (stage + 1) * kWindow * kWgStageWindows <= reps_end;
}

// Copies stages of representatives, in the order of WindowColumn; `before` stages went through the ring already. The
// copy engine takes the stages that lie within the sequence: its map knows the order, but not where a sequence ends.
template <typename T, int kHeadDim>
__device__ __forceinline__ void ProduceReps(const SelectArgs& args, const CUtensorMap& map, const SequenceView& view,
                                            int32_t kv_head, int stages, uint32_t before, uint32_t ring, uint32_t full,
                                            uint32_t empty) {
  constexpr int kRows = kWindow * kWgStageWindows;
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
  for (int s = 0; s < stages; ++s) {
    const uint32_t slot = (before + s) % kWgStages, round = (before + s) / kWgStages;
    const uint32_t place = slot * (kRows * kHeadDim * 2), arrived = full + slot * 8;
    BarrierWait(empty + slot * 8, (round + 1) & 1);
    if (ByCopyEngine(args, s, end)) {
      if (thread == 0) {
        BarrierArriveExpecting(arrived, kRows * kHeadDim * 2);
#pragma unroll
        for (int i = 0; i < kWgStageWindows * kHeadDim / 64; ++i) {
          const int window = i % kWgStageWindows, panel = i / kWgStageWindows;
          CopyTensor5(ring + place + (panel * kRows + window * kWindow) * 128, &map, arrived,
                      kv_head * static_cast<int32_t>(args.p.reps.head_stride) + panel * 64, 0,
                      (s * kWgStageWindows + window) * (kWindow / 16), 0, static_cast<int32_t>(start));
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
template <typename T, int kHeadDim, int kParts>
__global__ __launch_bounds__(kWgThreads, 1) void StatisticsWgmmaKernel(const __grid_constant__ SelectArgs args,
                                                                       const __grid_constant__ CUtensorMap map) {
#ifdef PHSA_SM90A
  constexpr int kRows = kWindow * kWgStageWindows;
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
      const int stages = (tile.windows + kWgStageWindows - 1) / kWgStageWindows;
      work(tile, item % heads, stages, before);
      before += stages;
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
    const int32_t q0 = tile.q0 + warp * args.group.queries;
    uint4 words[2][kRowPieces<kHeadDim>];
    LoadRowWords<kHeadDim>(QueryRow<T>(args, tile.view, head, q0, r), QueryRow<T>(args, tile.view, head, q0, r + 8), c,
                           words);
    InitRows<kParts>(args, tile.view, q0, r, rows);
    GuessBases<T, kHeadDim>(args, tile.view, head / args.group.kv_div, words, c, scale2, rows);
    MakeOperand(words, c, a);
    const WindowEnds ends(rows);
    const int32_t reps_end = tile.view.kv_len / kBlock * kParts;
    uint2* codes = args.codes + (tile.unit + warp) * args.windows * 32 + lane;
    for (int s = 0; s < stages; ++s) {
      const uint32_t slot = (before + s) % kWgStages, round = (before + s) / kWgStages;
      BarrierWait(full + slot * 8, round & 1);
      if (!ByCopyEngine(args, s, reps_end)) FenceAsyncProxy();
      // The shuffle tells the compiler that the warp agrees on it: descriptors then live in uniform registers.
      const uint64_t stage = Descriptor(__shfl_sync(~0u, base + slot * kStageBytes, 0), 16, 1024);
#pragma unroll
      for (int i = 0; i < kWgStageWindows; ++i) {
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
        if (i + 1 == kWgStageWindows && lane == 0) BarrierArrive(empty + slot * 8);
        TakeScores<kParts>(acc, rows, ends, scale2, codes, s * kWgStageWindows + i, init, c);
        codes += 32;
      }
    }
    FinishRows(args, rows, tile.unit + warp, lane);
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

// A warp's shared memory: candidates (before them, the histogram), their counts, queries that are ranked by logarithms,
// the subsets to score, and which were.
struct ChooseShared {
  int counts, faint, list, taken, bytes;  // where they begin, and the end
  __host__ __device__ constexpr ChooseShared(int queries, int list_keys, int windows)
      : counts(queries * list_keys * 8 > 32 * (kBins / (32 / queries) + 4) * 4 ? queries * list_keys * 8
                                                                               : 32 * (kBins / (32 / queries) + 4) * 4),
        faint(counts + 64),
        list(faint + 80),
        taken(list + (kList + 4) * 4),
        bytes(taken + (windows + 7) / 8 * 16) {}
};

__device__ __forceinline__ uint32_t Bits(__nv_bfloat162 x) { return reinterpret_cast<const uint32_t&>(x); }

// What bounds are compared with, rounded down.
__device__ __forceinline__ __nv_bfloat162 PackThreshold(float x) {
  const uint32_t both = Pack<bf16>(x * (1.0f - 0x1p-8f), x * (1.0f - 0x1p-8f));
  return reinterpret_cast<const __nv_bfloat162&>(both);
}

// Upper bounds of a lane's query's scores at its four subsets of a window, two a register.
template <int kPadded>
struct Bounds {
  static constexpr int kFollowed = kPadded == 1 ? 2 : 1;
  __nv_bfloat162 pair[kFollowed][2];

  __device__ __forceinline__ Bounds(uint2 codes, const __nv_bfloat162 (&unit)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const __nv_bfloat162 x = __hmul2(Decode(codes.x, half), unit[0]);
      if constexpr (kPadded == 1) {
        pair[0][half] = x;
        pair[kFollowed - 1][half] = __hmul2(Decode(codes.y, half), unit[1]);
      } else {
        __nv_bfloat162 sum = __hfma2(Decode(codes.y, half), unit[1], x);
        if constexpr (kPadded >= 4) sum = __hadd2(sum, __shfl_xor_sync(~0u, sum, 16));
        if constexpr (kPadded >= 8) sum = __hadd2(sum, __shfl_xor_sync(~0u, sum, 8));
        if constexpr (kPadded >= 16) sum = __hadd2(sum, __shfl_xor_sync(~0u, sum, 4));
        pair[0][half] = sum;
      }
    }
  }
  // Bits 0 and 2 of the low half and 1 and 3 of the high half: subsets whose bound reaches a threshold.
  __device__ __forceinline__ uint32_t Reach(const __nv_bfloat162 (&thresholds)[kFollowed]) const {
    uint32_t reached = 0;
#pragma unroll
    for (int f = 0; f < kFollowed; ++f) {
      reached |= (__hge2_mask(pair[f][0], thresholds[f]) & 0x00020001u) |
                 (__hge2_mask(pair[f][1], thresholds[f]) & 0x00080004u);
    }
    return reached;
  }
};

// Bins of bounds: halves of a power of two, from 2^6 down to 2^-58. Bounds below give no threshold: all is scored.
constexpr int kBinBits = 22;  // of a float that are dropped
constexpr int kTopBin = (127 + 6) * 2 - 1;
__device__ __forceinline__ float BinEnd(int bin) {
  return __uint_as_float(static_cast<uint32_t>(kTopBin - bin) << kBinBits);
}

// One warp a unit. A lane (r, c) follows the query of its row r; with groups of one, that of row r + 8 as well.
template <typename T, int kHeadDim, int kPadded>
__global__ __launch_bounds__(kChooseWarps * 32, 4) void ChooseKernel(const __grid_constant__ SelectArgs args) {
  constexpr int kQueries = 16 / kPadded;
  constexpr int kFollowed = kPadded == 1 ? 2 : 1;
  constexpr int kLanes = 32 / kQueries;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int r = lane / 4, c = lane % 4;
  const int list_keys = args.list_keys;
  const ChooseShared layout(kQueries, list_keys, args.windows);
  uint8_t* own_shared = shared + warp * layout.bytes;
  uint64_t* candidates = reinterpret_cast<uint64_t*>(own_shared);
  int* counts = reinterpret_cast<int*>(own_shared + layout.counts);
  // [query]: whether its K-th best score is too small to trust; and whether this is the last try, in which such queries
  // rank by logarithms: kept in a register, that would spill.
  int* faint = reinterpret_cast<int*>(own_shared + layout.faint);
  volatile int* by_logs = faint + 16;
  int32_t* list = reinterpret_cast<int32_t*>(own_shared + layout.list);
  uint32_t* taken = reinterpret_cast<uint32_t*>(own_shared + layout.taken);

  const Shape& shape = args.p.shape;
  const int32_t index = args.tile_end - 1 - static_cast<int32_t>(blockIdx.x) / (kUnits / kChooseWarps);
  const int unit_in_tile = static_cast<int>(blockIdx.x) % (kUnits / kChooseWarps) * kChooseWarps + warp;
  const int32_t head = blockIdx.y;
  SequenceView view;
  const int32_t tile_q0 = FindTile(args.p.batch, index, kUnits * kQueries, view);
  if (tile_q0 < 0) return;
  const int32_t q0 = tile_q0 + unit_in_tile * kQueries;
  if (q0 >= view.q_len) return;
  const int64_t unit =
      (static_cast<int64_t>(index - args.tile_begin) * shape.selection_heads + head) * kUnits + unit_in_tile;
  const int32_t top_k = shape.top_k, init = shape.init_blocks;
  const int64_t list0 = ((view.q_start + static_cast<int64_t>(q0)) * shape.selection_heads + head) * top_k;
  const int64_t list_stride = static_cast<int64_t>(shape.selection_heads) * top_k;

  int32_t end[kFollowed];
  bool active[kFollowed];
  bool any = false;
#pragma unroll
  for (int f = 0; f < kFollowed; ++f) {
    const int32_t q = q0 + (r + 8 * f) % kQueries;
    const int32_t b = (view.first_position() + q) / kBlock;
    end[f] = shape.CandidateEnd(b);
    active[f] = q < view.q_len && NeedsScores(args, b);
    any |= active[f];
  }
  bool all = active[0] && active[kFollowed - 1];
  any = __any_sync(~0u, any);
  all = __all_sync(~0u, all);

  // Lists that need no scores: none below dense_below, all candidates elsewhere.
  for (int q = 0; !all && q < kQueries && q0 + q < view.q_len; ++q) {
    const int32_t b = (view.first_position() + q0 + q) / kBlock;
    if (NeedsScores(args, b)) continue;
    const int32_t count = shape.Dense(b) ? 0 : shape.Candidates(b);
    for (int i = lane; i < top_k; i += 32) {
      args.p.selection[list0 + q * list_stride + i] = i < count ? init + i : -1;
      if (args.p.selection_scores) args.p.selection_scores[list0 + q * list_stride + i] = 0.0f;
    }
  }
  if (!any) return;

  const int32_t last = min(q0 + kQueries, view.q_len) - 1;
  const int shift = 31 - __clz(shape.parts);  // from representatives to blocks
  const int32_t reps_end = shape.CandidateEnd((view.first_position() + last) / kBlock) << shift;
  const int w_begin = (init << shift) / kWindow, windows = (reps_end + kWindow - 1) / kWindow - w_begin;
  const uint2* codes = args.codes + (unit * args.windows + w_begin) * 32 + lane;
  __nv_bfloat162 share[2];
  {
    const float2 log_share = args.units[unit * 32 + lane];
    share[0] = __float2bfloat162_rn(Exp2(log_share.x + kCodeExponent) * (1.0f + kUp));
    share[1] = __float2bfloat162_rn(Exp2(log_share.y + kCodeExponent) * (1.0f + kUp));
  }
  // Calls take(first of two windows, bounds of the one and of the other); windows beyond the last have codes of 0.
  constexpr int kBatch = 8;  // windows whose codes are under way
  const auto load_codes = [&](int w0, uint2(&batch)[kBatch]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) batch[i] = w0 + i < windows ? codes[(w0 + i) * 32] : uint2{};
  };
  // Goes on from window w0, while take() returns true.
  const auto each_pair = [&](int& w0, auto&& take) {
    uint2 next[kBatch];
    load_codes(w0, next);
    for (bool more = true; more && w0 < windows; w0 += kBatch) {
      uint2 batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) batch[i] = next[i];
      load_codes(w0 + kBatch, next);
#pragma unroll
      for (int i = 0; i < kBatch; i += 2) {
        if (i == 0 || w0 + i < windows) {
          more = take(w0 + i, Bounds<kPadded>(batch[i], share), Bounds<kPadded>(batch[i + 1], share));
        }
      }
    }
  };

  // Pass 1: a histogram of the bounds; of single subsets, or where there are many of the best of 16 neighbours.
  constexpr int kChunk = kBins / kLanes;  // bins that a lane will count; padded, so that the lanes' are in other banks
  uint32_t* histogram = reinterpret_cast<uint32_t*>(own_shared);
  for (int i = lane; i < 32 * (kChunk + 4) / 4; i += 32) reinterpret_cast<uint4*>(histogram)[i] = uint4{};
  __syncwarp();
  constexpr uint32_t kQueryWords = kLanes * (kChunk + 4);
  const auto count = [&](int f, uint32_t bits) {
    // What lies below the last bin, and what is no number, goes into the padding.
    const uint32_t bin = kTopBin - (bits >> (kBinBits - 16));
    uint32_t at = min(bin + bin / kChunk * 4, kQueryWords - 1);
    if (kPadded >= 4 && r >= kQueries) at = kQueryWords - 1;
    atomicAdd(&histogram[(r + 8 * f) % kQueries * kQueryWords + at], 1u);
  };
  const bool fine = windows <= 16;
  {
    int w0 = 0;
    each_pair(w0, [&](int, const Bounds<kPadded>& x, const Bounds<kPadded>& y) {
#pragma unroll
      for (int f = 0; f < kFollowed; ++f) {
        if (fine) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            count(f, Bits(x.pair[f][half]) & 0xFFFFu);
            count(f, Bits(x.pair[f][half]) >> 16);
            count(f, Bits(y.pair[f][half]) & 0xFFFFu);
            count(f, Bits(y.pair[f][half]) >> 16);
          }
        } else {
          const uint32_t p = Bits(__hmax2(x.pair[f][0], x.pair[f][1]));
          const uint32_t q = Bits(__hmax2(y.pair[f][0], y.pair[f][1]));
          count(f, max(p & 0xFFFFu, p >> 16));
          count(f, max(q & 0xFFFFu, q >> 16));
        }
      }
      return true;
    });
  }
  __syncwarp();
  // The K-th largest bound is a guess at the K-th score, a little lower as bounds are higher than scores. A larger
  // bound, that fewer reach, says which subsets are scored first: they hold most of the best K.
  float guess[kFollowed], first_threshold[kFollowed];
  {
    const uint4* own = reinterpret_cast<const uint4*>(histogram + lane * (kChunk + 4));
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i) sum += own[i].x + own[i].y + own[i].z + own[i].w;
    uint32_t total = sum;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const uint32_t x = __shfl_up_sync(~0u, total, step, kLanes);
      if (lane % kLanes >= step) total += x;
    }
    total -= sum;
    // The bins up to which fewer bounds lie than wanted; with eight parts a block has two where single ones are
    // counted.
    const int bounds = fine && shift == 3 ? 2 * top_k : top_k;
    int bin = 0, first_bin = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint4 four = own[i / 4];
      total += i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
      bin += total < static_cast<uint32_t>(bounds);
      first_bin += total < static_cast<uint32_t>((5 * bounds + 7) / 8);
    }
    const auto add = [](int x, int y) { return x + y; };
    bin = ReduceLanes<kLanes>(bin, add);
    first_bin = ReduceLanes<kLanes>(first_bin, add);
    // Too high a guess costs another try, too low a one too many candidates; with a small K there is room for those.
    // From four parts on a bound is that of one block, at most 1.28 times its score (a code's step, and kUp).
    constexpr float kLow = kPadded <= 2 ? 0.75f : kPadded <= 8 ? 0.65f : 0.55f;
    const float part_of_bound = shift >= 2 ? 0.78f : kLow * (top_k <= 8 ? 0.65f : 1.0f);
    const float low = part_of_bound * (shape.group_max ? 0.5f : 1.0f);
    const float found = bin < kBins ? low * BinEnd(bin) : 0.0f;
    const float first_found = first_bin < kBins ? fmaxf(BinEnd(first_bin), found) : 0.0f;
    // Lanes that follow no query have thresholds that nothing reaches.
#pragma unroll
    for (int f = 0; f < kFollowed; ++f) {
      const int from = (r + 8 * f) % kQueries * kLanes;
      const bool follows = active[f] && r + 8 * f < kQueries;
      const float x = __shfl_sync(~0u, found, from), y = __shfl_sync(~0u, first_found, from);
      guess[f] = follows ? x : INFINITY;
      first_threshold[f] = follows ? y : INFINITY;
    }
  }

  // A in an order of k that lets every lane load 16 bytes at once; B is loaded in the same order.
  constexpr int kLoads = kRowPieces<kHeadDim>;
  uint4 a0[kLoads], a1[kLoads];
  {
    const T* row0 = QueryRow<T>(args, view, head, q0, r);
    const T* row1 = QueryRow<T>(args, view, head, q0, r + 8);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool there = HasPiece<kHeadDim>(i * 4 + c);
      a0[i] = row0 && there ? *reinterpret_cast<const uint4*>(row0 + (i * 4 + c) * 8) : uint4{};
      a1[i] = row1 && there ? *reinterpret_cast<const uint4*>(row1 + (i * 4 + c) * 8) : uint4{};
    }
  }
  const float lse0 = args.lse2[unit * 16 + r], lse1 = args.lse2[unit * 16 + r + 8];
  const float scale2 = shape.scale * kLog2e;
  const T* reps = static_cast<const T*>(args.p.reps.data) + head / args.group.kv_div * args.p.reps.head_stride + c * 8;
  // Rows at a fixed stride, as they mostly are, cost one multiplication.
  const uint32_t stride = args.rep_stride;
  if (stride != 0) reps += args.p.batch.rep_starts[view.seq] * args.p.reps.token_stride;

  float threshold[kFollowed];
#pragma unroll
  for (int f = 0; f < kFollowed; ++f) threshold[f] = guess[f];
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
    const int own = lane / kLanes;
    float floor = __shfl_sync(~0u, threshold[0], own % 8 * 4);
    if constexpr (kFollowed == 2) {
      const float second = __shfl_sync(~0u, threshold[1], own % 8 * 4);
      if (own >= 8) floor = second;
    }
    const float worst = exactly ? KeepBestOfAll<kLanes>(candidates, list_keys, counts, top_k, floor, lane)
                                : PruneAll<kLanes>(candidates, list_keys, counts, top_k, floor, lane);
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
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const uint32_t even[4] = {a0[k].x, a1[k].x, a0[k].y, a1[k].y};
        const uint32_t odd[4] = {a0[k].z, a1[k].z, a0[k].w, a1[k].w};
#pragma unroll
        for (int i = 0; i < 2; ++i) Mma<T>(acc[i], even, b[i][k].x, b[i][k].y);
#pragma unroll
        for (int i = 0; i < 2; ++i) Mma<T>(more[i], odd, b[i][k].z, b[i][k].w);
      }
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
      const bool logs = *by_logs != 0;
      // What a group makes of its heads' weights, or of their logarithms: of rows r and r + 8 of this lane.
      const auto join = [&](int m, float x0, float x1) {
        if (__builtin_expect(logs, 0)) {
          if constexpr (kPadded == 1) {
            scores[0][m] = RankOfLog(x0);
            scores[kFollowed - 1][m] = RankOfLog(x1);
          } else {
            const float top = GroupMax<kPadded>(fmaxf(x0, x1));
            const float sum = GroupSum<kPadded>(Exp2(x0 - top) + Exp2(x1 - top));
            scores[0][m] = RankOfLog(shape.group_max ? top : top + log2f(sum));
          }
        } else if constexpr (kPadded == 1) {
          scores[0][m] = x0;
          scores[kFollowed - 1][m] = x1;
        } else {
          scores[0][m] = shape.group_max ? GroupMax<kPadded>(fmaxf(x0, x1)) : GroupSum<kPadded>(x0 + x1);
        }
      };
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
      if (shift == 0) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float x0 = log_weight(m / 2, m % 2, 0), x1 = log_weight(m / 2, m % 2, 1);
          join(m, logs ? x0 : Exp2(x0), logs ? x1 : Exp2(x1));
          look(m, blocks[m / 2] + m % 2, true);
        }
      } else {
        const bool own = (c & ((1 << (shift - 1)) - 1)) == 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float x[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float first = log_weight(i, 0, e), second = log_weight(i, 1, e);
            float top = 0.0f;
            if (__builtin_expect(logs, 0)) {
              top = fmaxf(first, second);
              if (shift >= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
              if (shift >= 3) top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
              top = fmaxf(top, -FLT_MAX);
            }
            float sum = Exp2(first - top) + Exp2(second - top);
            if (shift >= 2) sum += __shfl_xor_sync(~0u, sum, 1);
            if (shift >= 3) sum += __shfl_xor_sync(~0u, sum, 2);
            x[e] = logs ? top + log2f(sum) : sum;
          }
          join(2 * i, x[0], x[1]);
          look(2 * i, blocks[i], own);
        }
      }
      if (__any_sync(~0u, found != 0)) {
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
      if (done >= n) break;
    }
    __syncwarp();
  };

  // Pass 2: score the subsets that may hold one of a query's best K. Two sweeps: the first takes those of the best
  // bounds, so that the second has a threshold near the K-th score and leaves most of the others out.
  __syncwarp();
  if (lane < kQueries) counts[lane] = faint[lane] = 0;
  if (lane == 0) *by_logs = 0;
  __syncwarp();
#pragma unroll 1
  for (float factor = 0.5f;; factor = factor == 0.5f ? 0.1f : 0.0f) {
#pragma unroll 1
    for (int sweep = 0; sweep < 2; ++sweep) {
      int w0 = 0;
      while (w0 < windows) {
        __nv_bfloat162 least[kFollowed];
#pragma unroll
        for (int f = 0; f < kFollowed; ++f) {
          least[f] = PackThreshold(end[f] == 0 ? INFINITY : sweep == 0 ? first_threshold[f] : threshold[f]);
        }
        int n = 0;
        each_pair(w0, [&](int w, const Bounds<kPadded>& x, const Bounds<kPadded>& y) {
          // Bit 16 (window % 2) + 4 c + subset.
          const uint32_t first = __reduce_or_sync(~0u, x.Reach(least) << (4 * c));
          const uint32_t second = __reduce_or_sync(~0u, y.Reach(least) << (4 * c));
          uint32_t subsets = __byte_perm(first | first >> 16, second | second >> 16, 0x5410);
          if (sweep == 0) {
            if (lane == 0) taken[w / 2] = subsets;
          } else {
            subsets &= ~taken[w / 2];
          }
          if (subsets != 0) {
            if (subsets >> lane & 1) {
              list[n + __popc(subsets & ((1u << lane) - 1u))] = (w_begin + w) * (kWindow / kSubset) + lane;
            }
            n += __popc(subsets);
          }
          return n <= kList - 16 * kBatch;
        });
        if (n == 0) continue;
        if (lane < 3) list[n + lane] = 1 << 28;  // none: beyond all candidates
        __syncwarp();
        score(n);
      }
      __syncwarp();
      if (sweep == 0) keep_best(false);
    }
    // A query with enough blocks that reach its threshold is done: that was not too high. The others try a lower one.
    bool missing = false;
#pragma unroll
    for (int f = 0; f < kFollowed; ++f) {
      const int query = (r + 8 * f) % kQueries;
      const bool follows = threshold[f] > 0.0f && threshold[f] < INFINITY;
      if (follows && counts[query] < min(top_k, end[f] - init)) {
        missing = true;
        threshold[f] = guess[f] * factor;
      } else {
        if (threshold[f] < kLeastScore && end[f] - init > top_k) faint[query] = 1;
        end[f] = 0;
      }
    }
    __syncwarp();
    if (!__any_sync(~0u, missing)) {
      if (*by_logs != 0 || !__any_sync(~0u, faint[lane % kQueries])) break;
      __syncwarp();
      if (lane == 0) *by_logs = 1;
#pragma unroll
      for (int f = 0; f < kFollowed; ++f) {
        if (r + 8 * f >= kQueries || faint[r + 8 * f] == 0) continue;
        end[f] = shape.CandidateEnd((view.first_position() + q0 + (r + 8 * f) % kQueries) / kBlock);
        threshold[f] = first_threshold[f] = 0.0f;
      }
    }
    __syncwarp();
#pragma unroll
    for (int f = 0; f < kFollowed; ++f) {
      if (c == 0 && end[f] != 0) counts[(r + 8 * f) % kQueries] = 0;
    }
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

Group MakeGroup(const Shape& shape) {
  Group group;
  group.size = shape.num_q_heads / shape.selection_heads;
  group.padded = 1;
  while (group.padded < group.size) group.padded *= 2;
  group.queries = 16 / group.padded;
  group.kv_div = shape.selection_heads / shape.num_kv_heads;
  return group;
}

// Windows are processed in pairs: one spare.
int32_t Windows(const Shape& shape, const Batch& batch) {
  return (batch.max_kv_len / kBlock * shape.parts + kWindow - 1) / kWindow + 1;
}

constexpr size_t kUnitBytes = 16 * sizeof(float) + 32 * sizeof(float2);
size_t TileBytes(const Shape& shape, const Batch& batch) {
  return static_cast<size_t>(shape.selection_heads) * kUnits *
         (Windows(shape, batch) * 32 * sizeof(uint2) + kUnitBytes);
}

// Tiles whose statistics the workspace has room for.
int32_t RoomTiles(const Shape& shape, const Batch& batch, size_t bytes) {
  const size_t tiles = static_cast<size_t>(MaxTiles(batch, kUnits * MakeGroup(shape).queries));
  return static_cast<int32_t>(std::min(tiles, std::max<size_t>(1, bytes / TileBytes(shape, batch))));
}
size_t LeastTiles(const Shape& shape) { return (kSelectTiles + shape.selection_heads - 1) / shape.selection_heads; }

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
  const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(elements), 2,
                               static_cast<cuuint64_t>(Windows(p.shape, p.batch)) * 4, 8, cuuint64_t{1} << 31};
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
  const int bytes = kChooseWarps * ChooseShared(16 / kPadded, args.list_keys, args.windows).bytes;
  if (bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  const dim3 grid((args.tile_end - args.tile_begin) * (kUnits / kChooseWarps), args.p.shape.selection_heads);
  kernel<<<grid, kChooseWarps * 32, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <typename T, int kHeadDim, int kParts>
cudaError_t LaunchStatistics(const SelectArgs& args, const CUtensorMap& map, cudaStream_t stream) {
  const dim3 grid(args.tile_end - args.tile_begin, args.p.shape.selection_heads);
  const bool hopper = kHasWgmma<kHeadDim> && Hopper();
  const int shared = (hopper ? kWgStages * kWgStageWindows : kPlainStages) * kWindow * kRowBytes<kHeadDim>;
  const auto set_shared = [&](auto kernel) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  };
  if constexpr (kHasWgmma<kHeadDim>) {
    if (hopper) {
      const cudaError_t error = set_shared(StatisticsWgmmaKernel<T, kHeadDim, kParts>);
      if (error != cudaSuccess) return error;
      const unsigned tiles = std::min(grid.x * grid.y, Multiprocessors());
      StatisticsWgmmaKernel<T, kHeadDim, kParts><<<tiles, kWgThreads, shared, stream>>>(args, map);
      return cudaGetLastError();
    }
  }
  const cudaError_t error = set_shared(StatisticsKernel<T, kHeadDim, kParts>);
  if (error != cudaSuccess) return error;
  StatisticsKernel<T, kHeadDim, kParts><<<grid, kPlainThreads, shared, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

template <int kHeadDim>
size_t SelectWorkspaceOf(const Shape& shape, const Batch& batch) {
  const size_t tile = TileBytes(shape, batch);
  return RoomTiles(shape, batch, std::max(kSelectWorkspace, LeastTiles(shape) * tile)) * tile;
}

template <typename T, int kHeadDim>
cudaError_t SelectOf(const ForwardParams& p, cudaStream_t stream) {
  SelectArgs args{};
  args.p = p;
  args.group = MakeGroup(p.shape);
  args.windows = Windows(p.shape, p.batch);
  const bool paged = p.batch.page_size != 0;
  args.rep_stride = !paged && p.reps.token_stride < int64_t{1} << 31 ? static_cast<uint32_t>(p.reps.token_stride) : 0;
  args.list_keys = (p.shape.top_k <= 16 ? kAtOnce : kCandidates) + 2;
  args.all = p.selection_scores != nullptr;
  const int32_t tiles = MaxTiles(p.batch, kUnits * args.group.queries);
  if (tiles == 0) return cudaSuccess;
  if (p.workspace_size < SelectWorkspaceOf<kHeadDim>(p.shape, p.batch)) return cudaErrorInvalidValue;
  int32_t chunk = RoomTiles(p.shape, p.batch, p.workspace_size);
  // Where one chunk is not enough, each has whole rounds of tiles for the multiprocessors.
  const int32_t round = static_cast<int32_t>(Multiprocessors()), heads = p.shape.selection_heads;
  if (chunk < tiles && chunk * heads >= round) chunk = std::max(1, chunk * heads / round * round / heads);
  CUtensorMap map{};
  args.copy_engine = !paged && kHasWgmma<kHeadDim> && Hopper() && MakeRepsMap(p, &map);
  const size_t units = static_cast<size_t>(chunk) * heads * kUnits;
  args.codes = static_cast<uint2*>(p.workspace);
  args.units = reinterpret_cast<float2*>(args.codes + units * args.windows * 32);
  args.lse2 = reinterpret_cast<float*>(args.units + units * 32);
  for (int32_t begin = 0; begin < tiles; begin += chunk) {
    args.tile_begin = begin;
    args.tile_end = std::min(tiles, begin + chunk);
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
