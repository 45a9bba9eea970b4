// Scores, group softmax and top-K: exact, and never queries × blocks in memory.
//
// A group's score needs every head's normaliser, so the scores are needed twice. Two kernels:
//  1. Statistics: all scores by tensor cores; keeps per row (query and head) the log-sum-exp and, per set of 16
//     representatives, the largest score of a candidate (1/16 of the scores, as fp16 rounded up).
//  2. Choose: from those maxima, per query, a lower bound of the K-th best group score: the group's score at a set's
//     best block is at least one head's share of it, so the K-th largest of max_h p_h over the sets is such a bound.
//     Only sets whose upper bound Σ_h p_h reaches it are scored again, by the warp that owns their 16 rows, with the
//     next set's representatives under way. Four CTAs a multiprocessor: with five or six, the registers that hold those
//     spill, and the warps share less of the L1 cache.
//
// A unit is 16 rows, the M of one tensor-core product: kPadded heads (the group rounded up to a power of two) × 16 /
// kPadded queries, row = head · queries + query. A set is 16 neighbouring representatives; the windows of 64 lie in
// shared memory in such an order that one lane of the product holds a set's scores: its maximum costs no shuffle.
#include <algorithm>

#include "device.cuh"
#include "wgmma.cuh"

namespace phsa::cuda {
namespace {

constexpr int kWindow = 64;  // representatives per window
constexpr int kUnits = 16;   // units per tile: four warpgroups
constexpr int kChooseWarps = 4;
constexpr int kBins = 128;        // of the histogram of lower bounds
constexpr int kCandidates = 128;  // per query, before the best K are kept; at least 64 + 16
constexpr float kSlack = 1e-3f;   // log2 units: the two kernels round their products differently

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
  int32_t windows;    // per unit in `maxima`
  int32_t taken;      // words of one bit per set and unit, a multiple of 4
  int32_t list_keys;  // what a query's candidates take: room for them, and neighbours begin in other banks
  uint32_t* maxima;   // [unit][windows][32 lanes]: two fp16, rows r and r + 8; Choose turns them into bounds of groups
  float* lse2;        // [unit][16], log2 units; +inf in rows of no head
  uint32_t rep_stride;  // of neighbouring representatives, in elements; 0: on pages
  bool all;             // score even where the candidates all fit, because the scores are wanted
};

__device__ __forceinline__ bool NeedsScores(const SelectArgs& args, int32_t b) {
  if (args.all) return !BelowDense(args.p.shape, b) && CandidateEnd(args.p.shape, b) > args.p.shape.init_blocks;
  return !ReadsAll(args.p.shape, b);
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
  float max[2], sum[2];  // reference value (log2 units), and the sum of 2^(score - it)
  int32_t b[2], end[2];  // own block, and where the candidates end
};

__device__ __forceinline__ void InitRows(const SelectArgs& args, const SequenceView& view, int32_t q0, int r,
                                         RowPair& rows) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int32_t q = min(q0 + (r + 8 * e) % args.group.queries, view.q_len - 1);
    rows.b[e] = (view.first_position() + q) / kBlock;
    rows.end[e] = CandidateEnd(args.p.shape, rows.b[e]);
    rows.max[e] = -INFINITY;
    rows.sum[e] = 0.0f;
  }
}

// The sum of 2^(score - base) over a lane's scores of row e.
__device__ __forceinline__ float SumAt(const float (&acc)[8][4], int e, float scale2, float base) {
  float sum[4] = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    sum[j % 2] += Exp2(fmaf(acc[j][2 * e], scale2, -base));
    sum[2 + j % 2] += Exp2(fmaf(acc[j][2 * e + 1], scale2, -base));
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Takes in the scores of one window; returns the sets' bounds. `kMasked`: some columns are no candidates, or lie in or
// after the row's own block. The reference value of a sum follows the maximum only when that is 2^40 above it: fp32 has
// the range, and the exponentials need not wait for the maximum.
template <bool kMasked>
__device__ __forceinline__ uint32_t TakeWindow(float (&acc)[8][4], RowPair& rows, float scale2, int32_t first,
                                               int32_t init, int c) {
  float bound[2], most[2], sum[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float set_max;
    if constexpr (kMasked) {
      set_max = -1e30f;  // far below any score, and finite
      most[e] = -INFINITY;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int32_t t = first + 16 * c + 2 * j + i;
          float& s = acc[j][2 * e + i];
          if (t >= rows.b[e]) s = -INFINITY;
          most[e] = fmaxf(most[e], s);
          if (t >= init && t < rows.end[e]) set_max = fmaxf(set_max, s);
        }
      }
    } else {
      float pair[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) pair[j] = fmaxf(acc[j][2 * e], acc[j][2 * e + 1]);
#pragma unroll
      for (int step = 4; step > 0; step /= 2) {
#pragma unroll
        for (int j = 0; j < step; ++j) pair[j] = fmaxf(pair[j], pair[j + step]);
      }
      set_max = most[e] = pair[0];
    }
    // So much up that rounding to fp16 cannot bring it below the score.
    bound[e] = fmaf(fabsf(set_max * scale2), 0x1p-10f, set_max * scale2);
    most[e] *= scale2;
    sum[e] = SumAt(acc, e, scale2, rows.max[e]);
  }
  if (__any_sync(~0u, most[0] > rows.max[0] + 40.0f || most[1] > rows.max[1] + 40.0f)) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (most[e] > rows.max[e] + 40.0f) {
        rows.sum[e] *= Exp2(rows.max[e] - most[e]);
        rows.max[e] = most[e];
      }
      sum[e] = SumAt(acc, e, scale2, rows.max[e]);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) rows.sum[e] += kMasked && rows.max[e] == -INFINITY ? 0.0f : sum[e];
  const half2 both = __floats2half2_rn(bound[0], bound[1]);
  return reinterpret_cast<const uint32_t&>(both);
}

// Joins the four lanes of each row and writes the unit's log-sum-exp.
__device__ __forceinline__ void FinishRows(const SelectArgs& args, const RowPair& rows, int64_t unit, int r, int c) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float most = rows.max[e];
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    float sum = most == -INFINITY ? 0.0f : rows.sum[e] * Exp2(rows.max[e] - most);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int row = r + 8 * e;
    const bool real = row / args.group.queries < args.group.size;
    if (c == 0) args.lse2[unit * 16 + row] = real ? most + log2f(sum) : INFINITY;
  }
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
  tile.windows = (b + kWindow - 1) / kWindow;
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
                reps + RepOffset(args.p.batch, args.p.reps, view.seq, t) + piece * 8, first + row < end);
  }
}

// The plain path: 8 warps of 32 rows each, mma.sync.
constexpr int kPlainThreads = kUnits / 2 * 32;

template <typename T, int kHeadDim>
__global__ __launch_bounds__(kPlainThreads, 1) void StatisticsKernel(const __grid_constant__ SelectArgs args) {
  constexpr int kStages = 3;
  constexpr uint32_t kStageBytes = kWindow * kHeadDim * 2;
  extern __shared__ __align__(1024) uint8_t shared[];
  const StatisticsTile tile = FindStatisticsTile(args, blockIdx.x, blockIdx.y);
  if (!tile.work) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int r = lane / 4, c = lane % 4;
  const int32_t head = blockIdx.y;
  const int32_t kv_head = head / args.group.kv_div;
  const int32_t reps_end = tile.view.kv_len / kBlock;
  const uint32_t base = SharedAddress(shared);
  const float scale2 = args.p.shape.scale * kLog2e;
  const int32_t init = args.p.shape.init_blocks;

  for (int s = 0; s < kStages - 1; ++s) {
    if (s < tile.windows) {
      CopyReps<T, kHeadDim, kWindow, kPlainThreads>(args, tile.view, kv_head, s * kWindow, reps_end,
                                                    base + s * kStageBytes);
    }
    CommitCopies();
  }

  uint32_t a[2][kHeadDim / 16][4];
  RowPair rows[2];
  int32_t fast_end = 1 << 30;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int32_t q0 = tile.q0 + (2 * warp + m) * args.group.queries;
    uint4 words[2][kHeadDim / 32];
    LoadRowWords(QueryRow<T>(args, tile.view, head, q0, r), QueryRow<T>(args, tile.view, head, q0, r + 8), c, words);
    MakeOperand(words, c, a[m]);
    InitRows(args, tile.view, q0, r, rows[m]);
    fast_end = min(fast_end, min(rows[m].end[0], rows[m].end[1]));
  }
  fast_end = __reduce_min_sync(~0u, fast_end);
  uint32_t* maxima = args.maxima + (tile.unit + 2 * warp) * args.windows * 32 + lane;

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
    const int32_t first = w * kWindow;
    const bool fast = first >= init && first + kWindow <= fast_end;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint32_t bound = fast ? TakeWindow<false>(acc[m], rows[m], scale2, first, init, c)
                                  : TakeWindow<true>(acc[m], rows[m], scale2, first, init, c);
      maxima[(static_cast<int64_t>(m) * args.windows + w) * 32] = bound;
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) FinishRows(args, rows[m], tile.unit + 2 * warp + m, r, c);
}

// Hopper: four warpgroups of 64 rows each consume, wgmma; a fifth copies. Exponentials (16 a clock) and products (16
// scores a clock at head_dim 128) take the same time: while one warpgroup has the tensor cores, the others' scores go
// through the softmax. The copies have their own warps: the fence before a product compiles to a memory barrier, which
// seems to wait for its thread's copies under way.
constexpr int kWgConsumers = kUnits * 32;
constexpr int kWgThreads = kWgConsumers + 128;
constexpr int kWgStageWindows = 2;
constexpr int kWgStages = 4;

// Copies stages of representatives, in the order of WindowColumn; `before` stages went through the ring already.
template <typename T, int kHeadDim>
__device__ __forceinline__ void ProduceReps(const SelectArgs& args, const SequenceView& view, int32_t kv_head,
                                            int stages, uint32_t before, uint32_t ring, uint32_t full, uint32_t empty) {
  constexpr int kRows = kWindow * kWgStageWindows;
  constexpr int kPieces = kHeadDim / 8;
  constexpr int kAtOnce = 128 / kPieces;  // rows: 8 or 16
  const int thread = threadIdx.x - kWgConsumers;
  const int row0 = thread / kPieces, piece = thread % kPieces;
  const int32_t end = view.kv_len / kBlock;
  const bool paged = args.p.batch.page_size != 0;
  const int64_t stride = args.p.reps.token_stride;
  const T* reps = static_cast<const T*>(args.p.reps.data) + kv_head * args.p.reps.head_stride + piece * 8;
  const T* from = reps + (paged ? 0 : (args.p.batch.rep_starts[view.seq] + row0) * stride);
  // Row i · kAtOnce + row0 lies at column WindowColumn(row0) + a constant whose bits below 8 are others than row0's.
  const int column = row0 / 2 * 8 + row0 % 2;
  const uint32_t base = ring + (piece >> 3) * (kRows * 128) + column * 128;
  const uint32_t swizzle = ((piece & 7) ^ (row0 % 2)) << 4;
  for (int s = 0; s < stages; ++s) {
    const uint32_t slot = (before + s) % kWgStages, round = (before + s) / kWgStages;
    const uint32_t to = base + slot * (kRows * kHeadDim * 2);
    BarrierWait(empty + slot * 8, (round + 1) & 1);
#pragma unroll
    for (int i = 0; i < kRows / kAtOnce; ++i) {
      const int first = i * kAtOnce;
      const uint32_t at = to + (first / kWindow * kWindow + first % 16 / 2 * 8 + first % kWindow / 16 * 2) * 128 +
                          (swizzle ^ ((first % kWindow / 16 * 2) << 4));
      const int32_t t = s * kRows + first + row0;
      const bool there = t < end;
      const T* row = there ? from : reps;
      if (paged && there) row = reps + RepOffset(args.p.batch, args.p.reps, view.seq, t);
      CopyAsync16(at, row, there);
      from += kAtOnce * stride;
    }
    BarrierArriveAfterCopies(full + slot * 8);
  }
}

// One CTA per multiprocessor takes tile after tile: the copies of the next one's representatives are under way when it
// begins.
template <typename T, int kHeadDim>
__global__ __launch_bounds__(kWgThreads, 1) void StatisticsWgmmaKernel(const __grid_constant__ SelectArgs args) {
#ifdef PHSA_SM90A
  constexpr int kRows = kWindow * kWgStageWindows;
  constexpr uint32_t kStageBytes = kRows * kHeadDim * 2;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t barriers[2 * kWgStages];
  const uint32_t base = OpaqueAddress(shared);
  const uint32_t full = OpaqueAddress(barriers), empty = full + kWgStages * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kWgStages; ++i) {
      BarrierInit(full + i * 8, 128);
      BarrierInit(empty + i * 8, kWgConsumers / 32);
    }
  }
  __syncthreads();
  // Calls work(tile, head, stages, stages before it) for this CTA's tiles. Neighbouring items have like lengths.
  const auto each_tile = [&](auto&& work) {
    const int32_t heads = args.p.shape.selection_heads;
    const int32_t items = (args.tile_end - args.tile_begin) * heads;
    uint32_t before = 0;
    for (int32_t item = blockIdx.x; item < items; item += gridDim.x) {
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
      ProduceReps<T, kHeadDim>(args, tile.view, head / args.group.kv_div, stages, before, base, full, empty);
    });
    WaitCopies<0>();
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");

  const int lane = OpaqueLane(), warp = OpaqueWarp();
  const int r = lane / 4, c = lane % 4;
  const float scale2 = args.p.shape.scale * kLog2e;
  const int32_t init = args.p.shape.init_blocks;
  each_tile([&](const StatisticsTile& tile, int32_t head, int stages, uint32_t before) {
    uint32_t a[kHeadDim / 16][4];
    RowPair rows;
    const int32_t q0 = tile.q0 + warp * args.group.queries;
    uint4 words[2][kHeadDim / 32];
    LoadRowWords(QueryRow<T>(args, tile.view, head, q0, r), QueryRow<T>(args, tile.view, head, q0, r + 8), c, words);
    MakeOperand(words, c, a);
    InitRows(args, tile.view, q0, r, rows);
    const int32_t fast_end = __reduce_min_sync(~0u, min(rows.end[0], rows.end[1]));
    uint32_t* maxima = args.maxima + (tile.unit + warp) * args.windows * 32 + lane;
    for (int s = 0; s < stages; ++s) {
      const uint32_t slot = (before + s) % kWgStages, round = (before + s) / kWgStages;
      BarrierWait(full + slot * 8, round & 1);
      FenceAsyncProxy();
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
        const int32_t first = (s * kWgStageWindows + i) * kWindow;
        const bool fast = first >= init && first + kWindow <= fast_end;
        *maxima = fast ? TakeWindow<false>(acc, rows, scale2, first, init, c)
                       : TakeWindow<true>(acc, rows, scale2, first, init, c);
        maxima += 32;
      }
    }
    FinishRows(args, rows, tile.unit + warp, r, c);
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

// A warp's shared memory: candidates (before them, the histogram), their counts, and which sets are scored.
struct ChooseShared {
  int counts, taken, bytes;  // where the latter begin, and the end
  __host__ __device__ constexpr ChooseShared(int queries, int list_keys, int taken_words)
      : counts(queries * list_keys * 8 > 32 * (kBins / (32 / queries) + 4) * 4 ? queries * list_keys * 8
                                                                               : 32 * (kBins / (32 / queries) + 4) * 4),
        taken(counts + 64),
        bytes(taken + taken_words * 4) {}
};

// Two bounds as bf16, rounded up, and what they are compared with, rounded down.
__device__ __forceinline__ uint32_t PackBounds(float x, float y) {
  return Convert<bf16>::Pack(x * (1.0f + 0x1p-8f), y * (1.0f + 0x1p-8f));
}
__device__ __forceinline__ uint32_t PackThresholds(float x, float y) {
  return Convert<bf16>::Pack(x * (1.0f - 0x1p-8f), y * (1.0f - 0x1p-8f));
}
__device__ __forceinline__ uint32_t Reached(uint32_t bounds, uint32_t thresholds) {
  return __hge2_mask(reinterpret_cast<const __nv_bfloat162&>(bounds),
                     reinterpret_cast<const __nv_bfloat162&>(thresholds));
}

// Bins of lower bounds 2^x: quarters of a power of two down to 2^-16, whole ones down to 2^-80.
__device__ __forceinline__ uint32_t BinOf(float x) { return __float2uint_rz(fminf(-4.0f * x, 48.0f - x)); }
__device__ __forceinline__ float BinEnd(int bin) {
  const float end = static_cast<float>(bin + 1);
  return fminf(-0.25f * end, 48.0f - end);
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
  const ChooseShared layout(kQueries, list_keys, args.taken);
  uint8_t* own_shared = shared + warp * layout.bytes;
  uint64_t* candidates = reinterpret_cast<uint64_t*>(own_shared);
  int* counts = reinterpret_cast<int*>(own_shared + layout.counts);
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
    end[f] = CandidateEnd(shape, b);
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
    const int32_t count = BelowDense(shape, b) ? 0 : CandidateEnd(shape, b) - init;
    for (int i = lane; i < top_k; i += 32) {
      args.p.selection[list0 + q * list_stride + i] = i < count ? init + i : -1;
      if (args.p.selection_scores) args.p.selection_scores[list0 + q * list_stride + i] = 0.0f;
    }
  }
  if (!any) return;

  const float lse0 = args.lse2[unit * 16 + r], lse1 = args.lse2[unit * 16 + r + 8];
  const int32_t last = min(q0 + kQueries, view.q_len) - 1;
  const int32_t end_all = CandidateEnd(shape, (view.first_position() + last) / kBlock);
  const int w_begin = init / kWindow, w_end = (end_all + kWindow - 1) / kWindow;
  uint32_t* maxima = args.maxima + (unit * args.windows + w_begin) * 32 + lane;

  // Pass 1 over the maxima: the K-th largest lower bound, by bins. A lane's maxima give way to upper bounds of its
  // query's scores: of two windows a word, or of one window and two queries.
  constexpr int kBatch = 8;  // windows: one bit a set
  constexpr int kWords = kFollowed == 1 ? kBatch / 2 : kBatch;
  constexpr int kChunk = kBins / kLanes;  // bins that a lane will count; padded, so that the lanes' are in other banks
  uint32_t* histogram = reinterpret_cast<uint32_t*>(own_shared);
  for (int i = lane; i < 32 * (kChunk + 4) / 4; i += 32) reinterpret_cast<uint4*>(histogram)[i] = uint4{};
  __syncwarp();
  const auto count_bound = [&](int query, float bound, bool owner) {
    // Below the last bin nothing is counted: the threshold is 0 then.
    const uint32_t bin = BinOf(bound);
    if (owner && bin < kBins) atomicAdd(&histogram[query * (kLanes * (kChunk + 4)) + bin + bin / kChunk * 4], 1u);
  };
  {
    const auto load = [&](int w0, uint32_t(&packed)[kBatch]) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) packed[i] = w0 + i < w_end - w_begin ? maxima[(w0 + i) * 32] : 0xFC00FC00u;
    };
    const float least_lse0 = lse0 - kSlack, least_lse1 = lse1 - kSlack;
    uint32_t next[kBatch];
    load(0, next);
    for (int w0 = 0; w0 < w_end - w_begin; w0 += kBatch) {
      uint32_t packed[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) packed[i] = next[i];
      load(w0 + kBatch, next);
      float upper[kBatch][kFollowed];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float2 most = __half22float2(reinterpret_cast<const half2&>(packed[i]));
        const float p0 = Exp2(most.x - least_lse0), p1 = Exp2(most.y - least_lse1);
        const float x0 = most.x - fabsf(most.x) * 0x1p-9f - kSlack - lse0;
        const float x1 = most.y - fabsf(most.y) * 0x1p-9f - kSlack - lse1;
        if constexpr (kPadded == 1) {
          count_bound(r, x0, active[0]);
          count_bound(r + 8, x1, active[1]);
          upper[i][0] = p0;
          upper[i][1] = p1;
        } else {
          count_bound(r, GroupMax<kPadded>(fmaxf(x0, x1)), active[0] && r < kQueries);
          upper[i][0] = shape.group_max ? GroupMax<kPadded>(fmaxf(p0, p1)) : GroupSum<kPadded>(p0 + p1);
        }
      }
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        if constexpr (kFollowed == 1) {
          if (w0 + 2 * j >= w_end - w_begin) continue;
          const bool both = w0 + 2 * j + 1 < w_end - w_begin;
          maxima[(w0 / 2 + j) * 32] = PackBounds(upper[2 * j][0], both ? upper[2 * j + 1][0] : -1.0f);
        } else {
          if (w0 + j < w_end - w_begin) maxima[(w0 + j) * 32] = PackBounds(upper[j][0], upper[j][1]);
        }
      }
    }
  }
  __syncwarp();
  // Also the bound that half as many sets reach: those are scored first.
  float threshold[kFollowed], first_threshold[kFollowed];
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
    // The bins up to which fewer bounds lie than wanted.
    int bin = 0, first_bin = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint4 four = own[i / 4];
      total += i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
      bin += total < static_cast<uint32_t>(top_k);
      first_bin += total < static_cast<uint32_t>((top_k + 1) / 2);
    }
    const auto add = [](int x, int y) { return x + y; };
    bin = ReduceLanes<kLanes>(bin, add);
    first_bin = ReduceLanes<kLanes>(first_bin, add);
    const float found = bin < kBins ? Exp2(BinEnd(bin)) : 0.0f;
    const float first_found = first_bin < kBins ? Exp2(BinEnd(first_bin)) : 0.0f;
    // Lanes that follow no query have thresholds that nothing reaches.
#pragma unroll
    for (int f = 0; f < kFollowed; ++f) {
      const int from = (r + 8 * f) % kQueries * kLanes;
      const bool follows = active[f] && r + 8 * f < kQueries;
      const float x = __shfl_sync(~0u, found, from), y = __shfl_sync(~0u, first_found, from);
      threshold[f] = follows ? x : INFINITY;
      first_threshold[f] = follows ? y : INFINITY;
    }
  }
  __syncwarp();
  if (lane < kQueries) counts[lane] = 0;
  __syncwarp();

  // A in an order of k that lets every lane load 16 bytes at once; B is loaded in the same order.
  constexpr int kLoads = kHeadDim / 32;
  uint4 a0[kLoads], a1[kLoads];
  {
    const T* row0 = QueryRow<T>(args, view, head, q0, r);
    const T* row1 = QueryRow<T>(args, view, head, q0, r + 8);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      a0[i] = row0 ? *reinterpret_cast<const uint4*>(row0 + (i * 4 + c) * 8) : uint4{};
      a1[i] = row1 ? *reinterpret_cast<const uint4*>(row1 + (i * 4 + c) * 8) : uint4{};
    }
  }
  const float scale2 = shape.scale * kLog2e;
  const T* reps = static_cast<const T*>(args.p.reps.data) + head / args.group.kv_div * args.p.reps.head_stride + c * 8;
  // Rows at a fixed stride, as they mostly are, cost one multiplication.
  const uint32_t stride = args.rep_stride;
  if (stride != 0) reps += args.p.batch.rep_starts[view.seq] * args.p.reps.token_stride;

  // Pass 2: score the sets that may hold one of a query's best K. Two sweeps: the first takes the sets of the best
  // bounds, which hold most of the best K, so that the second finds a threshold near the K-th score and leaves most of
  // the others out.
  int32_t end_first = end_all;
#pragma unroll
  for (int f = 0; f < kFollowed; ++f) {
    if (active[f]) end_first = min(end_first, end[f]);
  }
  end_first = __reduce_min_sync(~0u, end_first);
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
  // The best K of every query, and thresholds that follow; where there are too many, fewer candidates.
  const auto keep_best = [&] {
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
    const float worst = KeepBestOfAll<kLanes>(candidates, list_keys, counts, top_k, floor, lane);
#pragma unroll
    for (int f = 0; f < kFollowed; ++f) raise(f, __shfl_sync(~0u, worst, (r + 8 * f) % kQueries * kLanes));
  };
#pragma unroll 1
  for (int sweep = 0; sweep < 2; ++sweep) {
    for (int w0 = 0; w0 < w_end - w_begin; w0 += kBatch) {
      const uint32_t least = sweep == 0 ? PackThresholds(first_threshold[0], first_threshold[kFollowed - 1])
                                        : PackThresholds(threshold[0], threshold[kFollowed - 1]);
      uint32_t bounds[kWords];
      // Bit of window i and set c: 16 (i % 2) + 4 (i / 2) + c.
      uint32_t sets = 0;
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const int at = kFollowed == 1 ? w0 / 2 + j : w0 + j;
        const bool there = (kFollowed == 1 ? w0 + 2 * j : w0 + j) < w_end - w_begin;
        bounds[j] = there ? maxima[at * 32] : 0xBF80BF80u;  // -1
      }
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const uint32_t reached = Reached(bounds[j], least);
        if constexpr (kFollowed == 1) {
          sets |= reached & (0x00010001u << (4 * j));
        } else {
          sets |= reached != 0 ? 1u << (j % 2 * 16 + j / 2 * 4) : 0u;
        }
      }
      sets = __reduce_or_sync(~0u, sets << c);
      if (sweep == 0) {
        if (lane == 0) taken[w0 / kBatch] = sets;
      } else {
        sets &= ~taken[w0 / kBatch];
      }
      if (sets == 0) continue;
      uint4 b[2][kLoads];
      const auto first_of = [&](uint32_t some) {
        const int bit = __ffs(static_cast<int>(some)) - 1;
        return (w_begin + w0) * kWindow + (bit & 12) * (2 * kWindow / 4) + (bit >> 4) * kWindow + (bit & 3) * 16;
      };
      const auto load = [&](int32_t first) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int32_t t = min(first + 8 * i + r, end_all - 1);
          const T* rep = reps;
          if (stride != 0) {
            rep += static_cast<uint64_t>(static_cast<uint32_t>(t)) * stride;
          } else {
            rep += RepOffset(args.p.batch, args.p.reps, view.seq, t);
          }
#pragma unroll
          for (int k = 0; k < kLoads; ++k) b[i][k] = *reinterpret_cast<const uint4*>(rep + k * 32);
        }
      };
      int32_t first = first_of(sets);
      load(first);
      while (true) {
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
        // The next set's representatives are under way while this one's scores are looked at.
        const int32_t scored = first;
        sets &= sets - 1;
        if (sets != 0) {
          first = first_of(sets);
          load(first);
        }
        float score[kFollowed][4];  // [followed query][8-block half · 2 + column]
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float p0 = Exp2(fmaf(acc[i][j] + more[i][j], scale2, -lse0));
            const float p1 = Exp2(fmaf(acc[i][2 + j] + more[i][2 + j], scale2, -lse1));
            if constexpr (kPadded == 1) {
              score[0][2 * i + j] = p0;
              score[kFollowed - 1][2 * i + j] = p1;
            } else {
              score[0][2 * i + j] = shape.group_max ? GroupMax<kPadded>(fmaxf(p0, p1)) : GroupSum<kPadded>(p0 + p1);
            }
          }
        }
        if (scored < init || scored + 16 > end_first) {
#pragma unroll
          for (int f = 0; f < kFollowed; ++f) {
#pragma unroll
            for (int m = 0; m < 4; ++m) {
              const int32_t t = scored + m / 2 * 8 + 2 * c + m % 2;
              if (t < init || t >= end[f]) score[f][m] = -1.0f;
            }
          }
        }
        uint32_t found = 0;
#pragma unroll
        for (int f = 0; f < kFollowed; ++f) {
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            if (score[f][m] >= threshold[f]) found |= 1u << (4 * f + m);
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
                if (own >> m & 1) *to++ = CandidateKey(score[f][m], scored + m / 2 * 8 + 2 * c + m % 2);
              }
            }
            full[f] = __ballot_sync(~0u, over);
          }
          __syncwarp();
          // A set adds at most 16 candidates to a query: make room where the next one might not fit.
#pragma unroll
          for (int f = 0; f < kFollowed; ++f) {
            for (; full[f] != 0; full[f] &= full[f] - 1) {
              const int q = (__ffs(static_cast<int>(full[f])) - 1) / 4 + 8 * f;
              if (counts[q] > room) prune(q);
            }
          }
        }
        if (sets == 0) break;
      }
    }
    __syncwarp();
    if (sweep == 0) keep_best();
  }

  // The best K, ascending.
  keep_best();
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
  const uint64_t* list = candidates + query * list_keys;
  const int count = writes ? counts[query] : 0;
  int32_t* selection = args.p.selection + list0 + query * list_stride;
  constexpr int kMine = 4;
  for (int base = lane % kLanes; base < top_k; base += kMine * kLanes) {
    uint32_t mine[kMine];
    int place[kMine] = {};
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int at = base + j * kLanes;
      mine[j] = at < count ? static_cast<uint32_t>(list[at]) : 0;  // the lower block has the larger word
    }
    for (int i = 0; i < count; ++i) {
      const uint32_t other = static_cast<uint32_t>(list[i]);
#pragma unroll
      for (int j = 0; j < kMine; ++j) place[j] += other > mine[j];
    }
    if (!writes) continue;
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int at = base + j * kLanes;
      if (at >= top_k) continue;
      const int to = at < count ? place[j] : at;
      selection[to] = at < count ? KeyBlock(list[at]) : -1;
      if (args.p.selection_scores) {
        args.p.selection_scores[list0 + query * list_stride + to] = at < count ? KeyScore(list[at]) : 0.0f;
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

// Windows are processed in pairs on Hopper: one spare.
int32_t Windows(const Batch& batch) { return (batch.max_kv_len / kBlock + kWindow - 1) / kWindow + 1; }

size_t TileBytes(const Shape& shape, const Batch& batch) {
  return static_cast<size_t>(shape.selection_heads) * kUnits * (Windows(batch) * 128 + 16 * sizeof(float));
}

int32_t ChunkTiles(const Shape& shape, const Batch& batch) {
  const int32_t tiles = MaxTiles(batch, kUnits * MakeGroup(shape).queries);
  const size_t most = std::max<size_t>(1, kSelectWorkspace / TileBytes(shape, batch));
  // Chunks of equal size: the last one is no short tail.
  const size_t chunks = (static_cast<size_t>(tiles) + most - 1) / most;
  return chunks == 0 ? 0 : static_cast<int32_t>((static_cast<size_t>(tiles) + chunks - 1) / chunks);
}

template <typename T, int kHeadDim, int kPadded>
cudaError_t LaunchChoose(const SelectArgs& args, cudaStream_t stream) {
  const int bytes = kChooseWarps * ChooseShared(16 / kPadded, args.list_keys, args.taken).bytes;
  if (bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(ChooseKernel<T, kHeadDim, kPadded>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  const dim3 grid((args.tile_end - args.tile_begin) * (kUnits / kChooseWarps), args.p.shape.selection_heads);
  ChooseKernel<T, kHeadDim, kPadded><<<grid, kChooseWarps * 32, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <typename T, int kHeadDim>
cudaError_t Launch(const ForwardParams& p, cudaStream_t stream) {
  const bool hopper = DeviceArchitecture() >= 90;
  const auto statistics = hopper ? StatisticsWgmmaKernel<T, kHeadDim> : StatisticsKernel<T, kHeadDim>;
  const int shared = kWindow * kHeadDim * 2 * (hopper ? kWgStages * kWgStageWindows : 3);
  const int threads = hopper ? kWgThreads : kPlainThreads;
  const unsigned processors = Multiprocessors();
  cudaError_t error = cudaFuncSetAttribute(statistics, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;

  SelectArgs args{};
  args.p = p;
  args.group = MakeGroup(p.shape);
  args.windows = Windows(p.batch);
  args.taken = (args.windows + 31) / 32 * 4;
  const bool strided = p.batch.page_size == 0 && p.reps.token_stride < int64_t{1} << 31;
  args.rep_stride = strided ? static_cast<uint32_t>(p.reps.token_stride) : 0;
  args.list_keys = (p.shape.top_k <= 16 ? kAtOnce : kCandidates) + 2;
  args.all = p.selection_scores != nullptr;
  const int32_t tiles = MaxTiles(p.batch, kUnits * args.group.queries);
  const int32_t chunk = ChunkTiles(p.shape, p.batch);
  if (tiles == 0) return cudaSuccess;
  if (p.workspace_size < SelectWorkspaceSize(p.shape, p.batch)) return cudaErrorInvalidValue;
  args.maxima = static_cast<uint32_t*>(p.workspace);
  args.lse2 = reinterpret_cast<float*>(args.maxima + static_cast<size_t>(chunk) * p.shape.selection_heads * kUnits *
                                                         args.windows * 32);
  for (int32_t begin = 0; begin < tiles; begin += chunk) {
    args.tile_begin = begin;
    args.tile_end = std::min(tiles, begin + chunk);
    dim3 grid(args.tile_end - begin, p.shape.selection_heads);
    if (hopper) grid = dim3(std::min<unsigned>(grid.x * grid.y, processors));
    statistics<<<grid, threads, shared, stream>>>(args);
    error = cudaGetLastError();
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

}  // namespace

size_t SelectWorkspaceSize(const Shape& shape, const Batch& batch) {
  if (shape.top_k == 0) return 0;
  return static_cast<size_t>(ChunkTiles(shape, batch)) * TileBytes(shape, batch);
}

cudaError_t Select(const ForwardParams& p, cudaStream_t stream) {
  if (p.shape.top_k == 0) return cudaSuccess;
  const bool bf = p.shape.dtype == Dtype::kBf16;
  if (p.shape.head_dim == 128) return bf ? Launch<bf16, 128>(p, stream) : Launch<half, 128>(p, stream);
  return bf ? Launch<bf16, 64>(p, stream) : Launch<half, 64>(p, stream);
}

}  // namespace phsa::cuda
