// Attention over init, local and chosen blocks, in one pass: no partial results, nothing to merge. Here the plain
// implementation, for sm_80 and later; attend_wgmma.cu has Hopper's.
//
// A CTA takes one tile. Four warps copy its blocks into a ring of stages of four blocks; eight warps of 16 rows each
// consume them by mma.sync; at head_dim 256 stages have two blocks, and there are four such warps: registers. What none
// of a warp's queries chose is skipped: the copies are shared by 64 queries, the arithmetic is that of 8. Neighbouring
// queries choose alike: 64 of them read about 9 K distinct blocks, 8 about 3 K.
#include "attention/cuda/attend.cuh"

namespace phsa::cuda {
namespace {

constexpr int kStages = 2;
constexpr int kProducers = 128;
constexpr int kMaxConsumers = 256;
constexpr int kSegment = 512;  // blocks of the union whose masks are in shared memory at a time

template <int kHeadDim>
struct Sizes {
  static constexpr int kBlocks = kHeadDim > 128 ? 2 : kStageBlocks;  // of a stage
  static constexpr int kKeys = kBlocks * kBlock;
  static constexpr int kConsumers = kHeadDim > 128 ? 128 : kMaxConsumers;
  static constexpr int kRows = kConsumers / 2;  // of a tile
  static constexpr int kThreads = kProducers + kConsumers;
  static constexpr uint32_t kTensor = kKeys * kRowBytes<kHeadDim>;  // the keys of a stage; the values follow
  static constexpr uint32_t kStage = 2 * kTensor;
};

// Named barriers.
constexpr int kBuiltBarrier = 1;     // the union is built: consumers arrive, producers wait
constexpr int kConsumerBarrier = 2;  // among consumers

// Shared memory beside the ring.
struct Lists {
  uint16_t* masks;   // [kSegment][8]: for each consumer warp, which of its queries read the block
  int32_t* blocks;   // [kSegment]
  int32_t* scratch;  // [8] sums of the consumer warps, then the blocks of the union
  uint32_t* bitmap;  // [words]
  uint16_t* before;  // [words]: blocks of the union in earlier words
};
constexpr int kListsFixed = kSegment * 20 + 64;
static_assert(kListsFixed % 16 == 0);

constexpr int ListsBytes(int words) { return kListsFixed + ((words * 6 + 15) / 16) * 16; }

// Sum over the consumers before this one; `total` gets the sum over all. Ends with a barrier before the next use.
template <int kConsumers>
__device__ __forceinline__ int32_t ScanConsumers(const Lists& lists, int32_t own, int thread, int32_t& total) {
  int32_t sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t x = __shfl_up_sync(~0u, sum, step);
    if (thread % 32 >= step) sum += x;
  }
  if (thread % 32 == 31) lists.scratch[thread / 32] = sum;
  SyncNamed(kConsumerBarrier, kConsumers);
  total = 0;
  int32_t before = sum - own;
#pragma unroll
  for (int w = 0; w < kConsumers / 32; ++w) {
    const int32_t x = lists.scratch[w];
    if (w < thread / 32) before += x;
    total += x;
  }
  SyncNamed(kConsumerBarrier, kConsumers);
  return before;
}

// Consumers: the bitmap of all chosen blocks of the tile and its prefix sums. Returns how many blocks there are.
template <int kConsumers>
__device__ __forceinline__ int32_t BuildUnion(const AttendArgs& args, const Tile& tile, const Lists& lists,
                                              int thread) {
  for (int i = thread; i < args.words; i += kConsumers) lists.bitmap[i] = 0;
  SyncNamed(kConsumerBarrier, kConsumers);
  EachChoice(args, tile, thread, [&](int32_t, int32_t t) { atomicOr(&lists.bitmap[t / 32], 1u << (t % 32)); });
  SyncNamed(kConsumerBarrier, kConsumers);
  const int per = (args.words + kConsumers - 1) / kConsumers;
  const int begin = min(thread * per, args.words), end = min(begin + per, args.words);
  int32_t own = 0, total;
  for (int i = begin; i < end; ++i) own += __popc(lists.bitmap[i]);
  int32_t before = ScanConsumers<kConsumers>(lists, own, thread, total);
  for (int i = begin; i < end; ++i) {
    lists.before[i] = static_cast<uint16_t>(before);
    before += __popc(lists.bitmap[i]);
  }
  if (thread == 0) lists.scratch[8] = total;
  SyncNamed(kConsumerBarrier, kConsumers);
  return total;
}

// Consumers: blocks and masks of the union's entries [begin, end).
template <int kConsumers>
__device__ __forceinline__ void BuildSegment(const AttendArgs& args, const Tile& tile, const Lists& lists,
                                             int32_t begin, int32_t end, int thread) {
  uint32_t* words = reinterpret_cast<uint32_t*>(lists.masks);
  for (int i = thread; i < kSegment; i += kConsumers) reinterpret_cast<uint4*>(lists.masks)[i] = uint4{};
  SyncNamed(kConsumerBarrier, kConsumers);
  EachChoice(args, tile, thread, [&](int32_t q, int32_t t) {
    const int32_t entry = lists.before[t / 32] + __popc(lists.bitmap[t / 32] & ((1u << (t % 32)) - 1u)) - begin;
    if (entry < 0 || entry >= end - begin) return;
    atomicExch(&lists.blocks[entry], t);  // the same from every query that chose it
    // A query's heads may lie in two warps.
    for (int w = q * args.group / 16; w <= (q * args.group + args.group - 1) / 16; ++w) {
      const int bit = q - w * 16 / args.group;
      atomicOr(&words[entry * 4 + w / 2], 1u << (w % 2 * 16 + bit));
    }
  });
  SyncNamed(kConsumerBarrier, kConsumers);
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void Produce(const AttendArgs& args, const Tile& tile, const Lists& lists, uint32_t ring,
                                        uint32_t full, uint32_t empty) {
  const int warp = threadIdx.x / 32;
  using Size = Sizes<kHeadDim>;
  using Copier = BlockCopier<T, kHeadDim, Size::kKeys>;
  // Four warps: each takes a block's keys and values, or, of stages of two blocks, one of both.
  constexpr bool kBoth = Size::kBlocks == kProducers / 32;
  const int place = warp % Size::kBlocks;
  const bool takes_keys = kBoth || warp < Size::kBlocks, takes_values = kBoth || warp >= Size::kBlocks;
  const Copier keys(args, args.p.k, tile, threadIdx.x % 32);
  const Copier values(args, args.p.v, tile, threadIdx.x % 32);
  int32_t segment_item = 0;  // of the first entry in `lists`
  int stage = 0;
  uint32_t parity = 1;
  const auto copy_stage = [&](int32_t item, int32_t end) {
    const int32_t mine = item + place;
    int32_t block = -1;
    if (mine < end) block = mine < tile.band ? tile.BandBlock(mine) : lists.blocks[mine - segment_item];
    BarrierWait(empty + stage * 8, parity);
    if (takes_keys) keys.Copy(block, ring + stage * Size::kStage, place);
    if (takes_values) values.Copy(block, ring + stage * Size::kStage + Size::kTensor, place);
    BarrierArriveAfterCopies(full + stage * 8);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  };
  // The band needs no lists: its full stages go out while the consumers build the union.
  int32_t item = 0;
  const int32_t alone = tile.choose ? tile.band / Size::kBlocks * Size::kBlocks : tile.band;
  for (; item < alone; item += Size::kBlocks) copy_stage(item, tile.band);
  if (!tile.choose) return;
  segment_item = tile.band;
  for (int32_t entry = 0;;) {
    SyncNamed(kBuiltBarrier, Size::kThreads);
    const int32_t total = lists.scratch[8];
    const int32_t end = segment_item + min(kSegment, total - entry);
    for (; item < end; item += Size::kBlocks) copy_stage(item, end);
    entry += kSegment;
    if (entry >= total) return;
    segment_item = item;
  }
}

// What a warp reads of the band, init blocks aside.
struct BandRange {
  int32_t first, last;  // blocks that some row reads
  int32_t plain, own;   // [plain, own): blocks that every row reads whole
  int32_t whole;        // of the blocks before, the window may cut some
};

// What a warp takes from a stage. Bit n of `need`: some row reads block n. Bit 2n + e of `reads`: the lane's row e
// does. `partial`: some row reads a part of a block.
struct StagePlan {
  uint32_t need, reads;
  bool partial;
};

template <int kBlocks>
__device__ __forceinline__ StagePlan PlanStage(const AttendArgs& args, const Tile& tile, const Lists& lists,
                                               const BandRange& range, const RowPair& rows, int32_t item,
                                               int32_t segment_item, int32_t end, int warp) {
  StagePlan plan{0, 0, false};
  if (item + kBlocks <= tile.band) {
    // Whole stages inside the window of every row are most of the band.
    const int32_t block = tile.BandBlock(item);
    if (block >= range.plain && block + kBlocks <= range.own && item >= tile.band_init) {
      plan.need = (1u << kBlocks) - 1;
      plan.reads = (1u << (2 * kBlocks)) - 1;
      return plan;
    }
  }
#pragma unroll 1
  for (int n = 0; n < kBlocks; ++n) {
    const int32_t at = item + n;
    if (at >= end) break;
    if (at < tile.band) {
      const int32_t block = tile.BandBlock(at);
      const bool initial = block < args.p.shape.init_blocks;
      if (block > range.last || (!initial && block < range.first)) continue;
      plan.need |= 1u << n;
      plan.partial |= block >= range.own || block < range.whole;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if ((initial || block >= rows.first[e]) && block * kBlock <= rows.position[e]) plan.reads |= 1u << (2 * n + e);
      }
    } else {
      const uint32_t mask = lists.masks[(at - segment_item) * 8 + warp];
      plan.reads |= ((mask >> rows.bit[0]) & 1) << (2 * n) | ((mask >> rows.bit[1]) & 1) << (2 * n + 1);
      if (mask != 0) plan.need |= 1u << n;
    }
  }
  return plan;
}

// One warp, kBlocks blocks of a stage. `block` is the band's block where `partial`.
template <typename T, int kHeadDim, int kBlocks>
__device__ __forceinline__ void StepMma(uint32_t stage, const int (&at)[2], const int32_t (&block)[2], uint32_t reads,
                                        bool partial, int32_t reach, const uint32_t (&q)[kHeadDim / 16][4],
                                        float (&o)[kHeadDim / 8][4], RowPair& rows, float scale2, int lane) {
  constexpr uint32_t kPanel = Sizes<kHeadDim>::kKeys * 128, kTensor = Sizes<kHeadDim>::kTensor;
  float s[2 * kBlocks][4] = {};
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      uint32_t b[4];
      const int row = at[n] * kBlock + (lane & 7) + ((lane >> 4) << 3);
      LoadMatrix(b, stage + TileOffset(row, 2 * k + ((lane >> 3) & 1), kPanel));
      Mma<T>(s[2 * n], q[k], b[0], b[1]);
      Mma<T>(s[2 * n + 1], q[k], b[2], b[3]);
    }
  }
  if (partial) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) MaskPartialBlock(s, 2 * n, block[n], rows, reach, lane % 4);
  }
  float factor[2];
  const auto row_reads = [&](int n, int e) { return ((reads >> (2 * n + e)) & 1) != 0; };
  if (!Softmax(s, row_reads, rows, scale2, factor)) Rescale(o, factor);
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    uint32_t a[4];
    PackWeights<T>(s, 2 * n, a);
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; j += 2) {
      uint32_t b[4];
      LoadMatrixTransposed(b, stage + kTensor + TileOffset(at[n] * kBlock + (lane & 15), j + (lane >> 4), kPanel));
      Mma<T>(o[j], a, b[0], b[1]);
      Mma<T>(o[j + 1], a, b[2], b[3]);
    }
  }
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void Consume(const AttendArgs& args, const Tile& tile, const Lists& lists, uint32_t ring_at,
                                        uint32_t full, uint32_t empty) {
  using Size = Sizes<kHeadDim>;
  constexpr int kConsumers = Size::kConsumers;
  const Shape& shape = args.p.shape;
  const int thread = threadIdx.x - kProducers;
  const int warp = thread / 32, lane = thread % 32;
  const float scale2 = shape.scale * kLog2e;
  const int32_t reach = Reach(shape);
  RowPair rows;
  uint4 queries[2][kRowPieces<kHeadDim>];
  LoadTileRows<T, kHeadDim>(args, tile, warp, lane, rows, queries);
  uint32_t q[kHeadDim / 16][4];
  MakeOperand(queries, lane % 4, q);

  BandRange range;
  {
    const int32_t position0 = tile.view.first_position() + tile.q0;
    const int32_t b0 = (position0 + min(warp * 16 / args.group, tile.queries - 1)) / kBlock;
    const int32_t last = position0 + min((warp * 16 + 15) / args.group, tile.queries - 1);
    const int32_t b1 = last / kBlock;
    range.first = LocalFirst(shape, b0);
    range.last = b1;
    range.whole = WholeFrom(shape, last);
    range.plain = max(LocalFirst(shape, b1), range.whole);
    range.own = b0;
  }

  int32_t total = 0, entry = 0, segment_item = tile.band, end = tile.band;
  const auto build = [&] {
    const int32_t stop = min(entry + kSegment, total);
    BuildSegment<kConsumers>(args, tile, lists, entry, stop, thread);
    end = segment_item + stop - entry;
    entry = stop;
    ArriveNamed(kBuiltBarrier, Size::kThreads);
  };
  if (tile.choose) {
    total = BuildUnion<kConsumers>(args, tile, lists, thread);
    build();
  }
  float o[kHeadDim / 8][4] = {};
  int index = 0;
  uint32_t parity = 0;
  for (int32_t item = 0;;) {
    for (; item < end; item += Size::kBlocks) {
      StagePlan plan = PlanStage<Size::kBlocks>(args, tile, lists, range, rows, item, segment_item, end, warp);
      BarrierWait(full + index * 8, parity);
      const uint32_t stage = ring_at + index * Size::kStage;
      while (plan.need != 0) {
        int at[2] = {0, 0};
        int32_t block[2] = {0, 0};
        uint32_t reads = 0;
        const bool two = __popc(plan.need) > 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (plan.need == 0) continue;
          const int n = __ffs(static_cast<int>(plan.need)) - 1;
          plan.need &= plan.need - 1;
          at[i] = n;
          reads |= ((plan.reads >> (2 * n)) & 3u) << (2 * i);
          // Chosen blocks lie before every row: no own block among them.
          block[i] = item + n < tile.band ? tile.BandBlock(item + n) : 0;
        }
        if (two) {
          StepMma<T, kHeadDim, 2>(stage, at, block, reads, plan.partial, reach, q, o, rows, scale2, lane);
        } else {
          StepMma<T, kHeadDim, 1>(stage, at, block, reads, plan.partial, reach, q, o, rows, scale2, lane);
        }
      }
      BarrierArrive(empty + index * 8);
      if (++index == kStages) {
        index = 0;
        parity ^= 1;
      }
    }
    if (entry >= total) break;
    SyncNamed(kConsumerBarrier, kConsumers);
    segment_item = item;
    build();
  }
  WriteTileRows<T, kHeadDim>(args, tile, warp, lane, rows, o);
}

template <typename T, int kHeadDim>
__global__ __launch_bounds__(Sizes<kHeadDim>::kThreads, 1) void AttendKernel(const __grid_constant__ AttendArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  Tile tile;
  if (!FindAttendTile(args, blockIdx.x, blockIdx.y, tile)) return;
  uint8_t* at = shared + kStages * Sizes<kHeadDim>::kStage;
  Lists lists;
  lists.masks = reinterpret_cast<uint16_t*>(at);
  lists.blocks = reinterpret_cast<int32_t*>(at + kSegment * 16);
  lists.scratch = reinterpret_cast<int32_t*>(at + kSegment * 20);
  lists.bitmap = reinterpret_cast<uint32_t*>(at + kListsFixed);
  lists.before = reinterpret_cast<uint16_t*>(lists.bitmap + args.words);
  __shared__ uint64_t barriers[2 * kStages];
  const uint32_t full = SharedAddress(barriers), empty = full + kStages * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(full + i * 8, kProducers);
      BarrierInit(empty + i * 8, Sizes<kHeadDim>::kConsumers);  // every thread for what it read
    }
  }
  __syncthreads();
  if (threadIdx.x < kProducers) {
    // Copies must land before the CTA's memory is given away; consumers wait for all of them.
    Produce<T, kHeadDim>(args, tile, lists, SharedAddress(shared), full, empty);
  } else {
    Consume<T, kHeadDim>(args, tile, lists, SharedAddress(shared), full, empty);
  }
}

}  // namespace

template <typename T, int kHeadDim>
cudaError_t AttendOf(const ForwardParams& p, cudaStream_t stream) {
  using Size = Sizes<kHeadDim>;
  const AttendArgs args = MakeAttendArgs(p, Size::kRows, Size::kConsumers);
  if (args.tiles == 0) return cudaSuccess;
  const int shared = kStages * static_cast<int>(Size::kStage) + ListsBytes(args.words);
  const cudaError_t error =
      cudaFuncSetAttribute(AttendKernel<T, kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const dim3 grid(args.tiles, p.shape.selection_heads);
  AttendKernel<T, kHeadDim><<<grid, Size::kThreads, shared, stream>>>(args);
  return cudaGetLastError();
}

template cudaError_t AttendOf<bf16, PHSA_HEAD_DIM>(const ForwardParams&, cudaStream_t);
template cudaError_t AttendOf<half, PHSA_HEAD_DIM>(const ForwardParams&, cudaStream_t);

}  // namespace phsa::cuda
