// Attention over init, local and chosen blocks, in one pass: no partial results, nothing to merge.
//
// A CTA takes 128 rows (query and head) of one KV head: 64 queries of a group of two. Its stream of blocks is the band
// (init and local blocks of all its queries), then the union of its queries' choices. Four warps copy the blocks into a
// ring of stages of four blocks; eight warps of 16 rows each, two halves, consume them. What none of a consumer's
// queries chose is skipped: the copies are shared by 64 queries, the arithmetic is that of 8 (mma.sync: a warp skips
// blocks) or 32 (wgmma: a half skips stages). Neighbouring queries choose alike: 64 of them read about 9 K distinct
// blocks, 32 about 6 K, 8 about 3 K. So that the stages of a half are full, the union is ordered by who wants a block:
// both halves first, then stages for one half and for the other in turn.
//
// A row reads all of a block or nothing of it, except in its own block, where it reads up to itself.
#include "device.cuh"
#include "wgmma.cuh"

namespace phsa::cuda {
namespace {

constexpr int kRows = 128;
constexpr int kStageBlocks = 4;
constexpr int kStageKeys = kStageBlocks * kBlock;
constexpr int kProducers = 128;
constexpr int kConsumers = 256;
constexpr int kThreads = kProducers + kConsumers;
constexpr int kSegment = 512;  // blocks of the union whose masks are in shared memory at a time

struct AttendArgs {
  ForwardParams p;
  int32_t group;         // heads that share a choice
  int32_t kv_div;        // selection heads per KV head
  int32_t tile_queries;  // kRows / group
  int32_t tiles;
  int32_t words;        // of the bitmap of blocks
  int32_t query_shift;  // consumers per query of the tile when lists are read, as a power of two
};

// Named barriers.
constexpr int kBuiltBarrier = 1;     // the union is built: consumers arrive, producers wait
constexpr int kConsumerBarrier = 2;  // among consumers

// The part of the stream that all threads can compute for themselves.
struct Tile {
  SequenceView view;
  int32_t q0, queries;  // first query inside the sequence, how many
  int32_t head, kv_head;
  int32_t band_init;   // init blocks before the local ones
  int32_t band_first;  // first local block
  int32_t band;        // blocks of the band
  bool choose;         // some query has a list to follow

  __device__ int32_t BandBlock(int32_t i) const { return i < band_init ? i : band_first + (i - band_init); }
};

// First block that a query reads without choosing it, init aside.
__device__ __forceinline__ int32_t LocalFirst(const Shape& shape, int32_t b) {
  return ReadsAll(shape, b) ? 0 : b - shape.local_blocks;
}

__device__ __forceinline__ bool FindAttendTile(const AttendArgs& args, Tile& tile) {
  // Long reads first: the last tiles.
  const int32_t index = args.tiles - 1 - static_cast<int32_t>(blockIdx.x);
  tile.q0 = FindTile(args.p.batch, index, args.tile_queries, tile.view);
  if (tile.q0 < 0) return false;
  tile.queries = min(args.tile_queries, tile.view.q_len - tile.q0);
  tile.head = blockIdx.y;
  tile.kv_head = tile.head / args.kv_div;
  const int32_t first = (tile.view.first_position() + tile.q0) / kBlock;
  const int32_t last = (tile.view.first_position() + tile.q0 + tile.queries - 1) / kBlock;
  // Queries that read all come first in a sequence, and the local window only moves on: the first query's is the start.
  tile.band_first = LocalFirst(args.p.shape, first);
  tile.band_init = min(args.p.shape.init_blocks, tile.band_first);
  tile.band = tile.band_init + last + 1 - tile.band_first;
  tile.choose = args.p.shape.top_k > 0 && !ReadsAll(args.p.shape, last);
  return true;
}

// Shared memory beside the ring.
struct Lists {
  uint16_t* masks;   // [kPlaces][8]: for each consumer warp, which of its queries read the block
  uint8_t* wanted;   // [kPlaces]: which halves do; 0 in gaps
  int32_t* blocks;   // [kPlaces], -1 where a stage has a gap
  uint16_t* place;   // [kSegment]: where an entry of the union lies in the two above
  uint32_t* bitmap;  // [words]
  uint16_t* before;  // [words]: blocks of the union in earlier words
  int32_t* scratch;  // [8] sums of the consumer warps, then the blocks of the union and the places of the segment
};
constexpr int kPlaces = kSegment + 4 * kStageBlocks;
constexpr int kListsFixed = kPlaces * 21 + kSegment * 2 + 64;
static_assert(kListsFixed % 16 == 0);

__host__ __device__ constexpr int ListsBytes(int words) { return kListsFixed + ((words * 6 + 15) / 16) * 16; }

__device__ __forceinline__ int64_t ListOffset(const AttendArgs& args, const Tile& tile, int32_t q) {
  return ((tile.view.q_start + static_cast<int64_t>(tile.q0 + q)) * args.p.shape.selection_heads + tile.head) *
         args.p.shape.top_k;
}

// Sum over the consumers before this one; `total` gets the sum over all. Ends with a barrier before the next use.
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

// Calls take(query of the tile, block) for this consumer's share of the tile's choices.
template <typename Take>
__device__ __forceinline__ void EachChoice(const AttendArgs& args, const Tile& tile, int thread, Take&& take) {
  const Shape& shape = args.p.shape;
  const int32_t q = thread >> args.query_shift, step = 1 << args.query_shift;
  if (q >= tile.queries || ReadsAll(shape, (tile.view.first_position() + tile.q0 + q) / kBlock)) return;
  const int32_t* list = args.p.selection + ListOffset(args, tile, q);
#pragma unroll 4
  for (int i = thread & (step - 1); i < shape.top_k; i += step) {
    const int32_t t = list[i];
    if (t >= 0) take(q, t);
  }
}

// Consumers: the bitmap of all chosen blocks of the tile and its prefix sums. Returns how many blocks there are.
__device__ inline int32_t BuildUnion(const AttendArgs& args, const Tile& tile, const Lists& lists, int thread) {
  for (int i = thread; i < args.words; i += kConsumers) lists.bitmap[i] = 0;
  SyncNamed(kConsumerBarrier, kConsumers);
  EachChoice(args, tile, thread, [&](int32_t, int32_t t) { atomicOr(&lists.bitmap[t / 32], 1u << (t % 32)); });
  SyncNamed(kConsumerBarrier, kConsumers);
  const int per = (args.words + kConsumers - 1) / kConsumers;
  const int begin = min(thread * per, args.words), end = min(begin + per, args.words);
  int32_t own = 0, total;
  for (int i = begin; i < end; ++i) own += __popc(lists.bitmap[i]);
  int32_t before = ScanConsumers(lists, own, thread, total);
  for (int i = begin; i < end; ++i) {
    lists.before[i] = static_cast<uint16_t>(before);
    before += __popc(lists.bitmap[i]);
  }
  if (thread == 0) lists.scratch[8] = total;
  SyncNamed(kConsumerBarrier, kConsumers);
  return total;
}

// Consumers: places, blocks and masks of the union's entries [begin, end), whose first place is item `item` of the
// stream. Returns how many places there are; the last one ends a stage.
__device__ inline int32_t BuildSegment(const AttendArgs& args, const Tile& tile, const Lists& lists, int32_t begin,
                                       int32_t end, int32_t item, int thread) {
  uint32_t* halves = reinterpret_cast<uint32_t*>(lists.masks);  // first, per entry: which halves want it
  for (int i = thread; i < kSegment; i += kConsumers) halves[i] = 0;
  for (int i = thread; i < kPlaces; i += kConsumers) {
    lists.blocks[i] = -1;
    lists.wanted[i] = 0;
  }
  SyncNamed(kConsumerBarrier, kConsumers);
  const auto each_choice = [&](auto&& take) {
    EachChoice(args, tile, thread, [&](int32_t q, int32_t t) {
      const int32_t rank = lists.before[t / 32] + __popc(lists.bitmap[t / 32] & ((1u << (t % 32)) - 1u));
      if (rank >= begin && rank < end) take(q, t, rank - begin);
    });
  };
  constexpr int kHalf = kRows / 2;
  each_choice([&](int32_t q, int32_t, int32_t entry) {
    const uint32_t wanted = (q * args.group < kHalf ? 1u : 0u) | (q * args.group + args.group > kHalf ? 2u : 0u);
    atomicOr(&halves[entry], wanted);
  });
  SyncNamed(kConsumerBarrier, kConsumers);

  // A counting sort; the three counts share one integer.
  static_assert(kSegment == 2 * kConsumers);
  const int count = end - begin;
  uint32_t who[2];
  int32_t own = 0;
  const auto one = [](uint32_t w) { return w == 3 ? 1 : w == 1 ? 1 << 10 : w == 2 ? 1 << 20 : 0; };
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    who[i] = 2 * thread + i < count ? halves[2 * thread + i] : 0;
    own += one(who[i]);
  }
  int32_t total;
  int32_t before = ScanConsumers(lists, own, thread, total);
  const int32_t both = total & 1023;
  const int32_t stages1 = ((total >> 10 & 1023) + kStageBlocks - 1) / kStageBlocks;
  const int32_t stages2 = ((total >> 20) + kStageBlocks - 1) / kStageBlocks;
  const int32_t paired = min(stages1, stages2);
  const int32_t apart = both + (-(item + both) & (kStageBlocks - 1));
  const int32_t places = apart + (stages1 + stages2) * kStageBlocks;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int32_t place = before & 1023;
    if (who[i] == 1 || who[i] == 2) {
      const int32_t index = who[i] == 1 ? before >> 10 & 1023 : before >> 20;
      const int32_t stage = index / kStageBlocks;
      const int32_t at = stage < paired ? 2 * stage + static_cast<int32_t>(who[i]) - 1 : stage + paired;
      place = apart + at * kStageBlocks + index % kStageBlocks;
    }
    if (2 * thread + i < count) {
      lists.place[2 * thread + i] = static_cast<uint16_t>(place);
      lists.wanted[place] = static_cast<uint8_t>(who[i]);
    }
    before += one(who[i]);
  }
  for (int i = thread; i < kPlaces; i += kConsumers) reinterpret_cast<uint4*>(lists.masks)[i] = uint4{};
  SyncNamed(kConsumerBarrier, kConsumers);
  uint32_t* words = reinterpret_cast<uint32_t*>(lists.masks);
  each_choice([&](int32_t q, int32_t t, int32_t entry) {
    const int32_t place = lists.place[entry];
    atomicExch(&lists.blocks[place], t);  // the same from every query that chose it
    // A query's heads may lie in two warps.
    for (int w = q * args.group / 16; w <= (q * args.group + args.group - 1) / 16; ++w) {
      const int bit = q - w * 16 / args.group;
      atomicOr(&words[place * 4 + w / 2], 1u << (w % 2 * 16 + bit));
    }
  });
  if (thread == 0) lists.scratch[9] = places;
  SyncNamed(kConsumerBarrier, kConsumers);
  return places;
}

// Producers: warp w copies block w of each stage.
template <typename T, int kHeadDim, int kStages>
__device__ __forceinline__ void Produce(const AttendArgs& args, const Tile& tile, const Lists& lists, uint32_t ring,
                                        uint32_t full, uint32_t empty) {
  constexpr int kPieces = kHeadDim / 8;
  constexpr int kRowsAtOnce = 32 / kPieces;
  constexpr uint32_t kPanel = kStageKeys * 128;
  constexpr uint32_t kTensor = kStageKeys * kHeadDim * 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = lane / kPieces, piece = lane % kPieces;
  // A lane's first row of block 0; a page's or sequence's place comes on top.
  const T* k =
      static_cast<const T*>(args.p.k.data) + tile.kv_head * args.p.k.head_stride + row0 * args.p.k.token_stride;
  const T* v =
      static_cast<const T*>(args.p.v.data) + tile.kv_head * args.p.v.head_stride + row0 * args.p.v.token_stride;
  k += piece * 8;
  v += piece * 8;
  const bool paged = args.p.batch.page_size != 0;
  if (!paged) {
    k += BlockOffset(args.p.batch, args.p.k, tile.view.seq, 0);
    v += BlockOffset(args.p.batch, args.p.v, tile.view.seq, 0);
  }
  const int64_t k_step = kRowsAtOnce * args.p.k.token_stride, v_step = kRowsAtOnce * args.p.v.token_stride;
  // TileOffset of row i · kRowsAtOnce + row0 is base + i · kRowsAtOnce · 128 + (swizzle ^ (i · kRowsAtOnce % 8) · 16).
  const uint32_t base = ring + (piece >> 3) * kPanel + (warp * kBlock + row0) * 128;
  const uint32_t swizzle = ((piece & 7) ^ row0) << 4;
  int32_t segment_item = 0;  // of the first place in `lists`
  int stage = 0;
  uint32_t parity = 1;
  const auto copy_rows = [&](const T* from, int64_t step, uint32_t to, int valid) {
    if (valid == kBlock) {
#pragma unroll
      for (int i = 0; i < kBlock / kRowsAtOnce; ++i) {
        CopyAsync16(to + i * (kRowsAtOnce * 128) + (swizzle ^ ((i * kRowsAtOnce % 8) << 4)), from, true);
        from += step;
      }
    } else {
      // Rows that do not exist become zero: a weight of zero times what lay there before might not be zero.
      const T* first = from;
#pragma unroll
      for (int i = 0; i < kBlock / kRowsAtOnce; ++i) {
        const bool there = i * kRowsAtOnce + row0 < valid;
        CopyAsync16(to + i * (kRowsAtOnce * 128) + (swizzle ^ ((i * kRowsAtOnce % 8) << 4)), there ? from : first,
                    there);
        from += step;
      }
    }
  };
  const auto copy_stage = [&](int32_t item, int32_t end) {
    const int32_t mine = item + warp;
    int32_t block = -1;
    if (mine < end) block = mine < tile.band ? tile.BandBlock(mine) : lists.blocks[mine - segment_item];
    const int valid = block >= 0 ? min(kBlock, tile.view.kv_len - block * kBlock) : 0;
    block = max(block, 0);
    const T* key = k + (paged ? BlockOffset(args.p.batch, args.p.k, tile.view.seq, block)
                              : static_cast<int64_t>(block) * kBlock * args.p.k.token_stride);
    const T* value = v + (paged ? BlockOffset(args.p.batch, args.p.v, tile.view.seq, block)
                                : static_cast<int64_t>(block) * kBlock * args.p.v.token_stride);
    // Where nothing is read, the address must still be a row that exists.
    if (valid == 0) {
      key -= row0 * args.p.k.token_stride;
      value -= row0 * args.p.v.token_stride;
    }
    BarrierWait(empty + stage * 8, parity);
    copy_rows(key, k_step, base + stage * (2 * kTensor), valid);
    copy_rows(value, v_step, base + stage * (2 * kTensor) + kTensor, valid);
    BarrierArriveAfterCopies(full + stage * 8);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  };
  // The band needs no lists: its full stages go out while the consumers build the union.
  int32_t item = 0;
  const int32_t alone = tile.choose ? tile.band / kStageBlocks * kStageBlocks : tile.band;
  for (; item < alone; item += kStageBlocks) copy_stage(item, tile.band);
  if (!tile.choose) return;
  segment_item = tile.band;
  for (int32_t entry = 0;;) {
    SyncNamed(kBuiltBarrier, kThreads);
    const int32_t total = lists.scratch[8];
    const int32_t end = segment_item + lists.scratch[9];
    for (; item < end; item += kStageBlocks) copy_stage(item, end);
    entry += kSegment;
    if (entry >= total) return;
    segment_item = item;
  }
}

// A lane's two rows.
struct RowPair {
  int32_t position[2];  // of the query, in tokens
  int32_t first[2];     // first local block
  int32_t bit[2];       // of the query in its warp's masks
  float max[2], sum[2];
};

// What a consumer (a warp, or with wgmma a half of the CTA) reads of the band, init blocks aside.
struct BandRange {
  int32_t first, last;  // blocks that some row reads
  int32_t plain, own;   // [plain, own): blocks that every row reads whole
};

// What a consumer takes from a stage. Bit n of `need`: some row reads block n. Bit 2n + e of `reads`: the lane's row e
// does. `partial`: some row's own block is there.
struct StagePlan {
  uint32_t need, reads;
  bool partial;
};

template <bool kWgmma>
__device__ __forceinline__ StagePlan PlanStage(const AttendArgs& args, const Tile& tile, const Lists& lists,
                                               const BandRange& range, const RowPair& rows, int32_t item,
                                               int32_t segment_item, int32_t end, int warp) {
  StagePlan plan{0, 0, false};
  if (item + kStageBlocks <= tile.band) {
    // Whole stages inside the window of every row are most of the band.
    const int32_t block = tile.BandBlock(item);
    if (block >= range.plain && block + kStageBlocks <= range.own && item >= tile.band_init) {
      plan.need = (1u << kStageBlocks) - 1;
      plan.reads = (1u << (2 * kStageBlocks)) - 1;
      return plan;
    }
  } else if (item >= tile.band) {
    const int32_t place = item - segment_item;
#pragma unroll
    for (int n = 0; n < kStageBlocks; ++n) {
      const uint32_t mask = lists.masks[(place + n) * 8 + warp];
      plan.reads |= ((mask >> rows.bit[0]) & 1) << (2 * n) | ((mask >> rows.bit[1]) & 1) << (2 * n + 1);
      const bool wanted = kWgmma ? (lists.wanted[place + n] >> (warp / 4)) & 1 : mask != 0;
      if (wanted) plan.need |= 1u << n;
    }
    return plan;
  }
#pragma unroll 1
  for (int n = 0; n < kStageBlocks; ++n) {
    const int32_t at = item + n;
    if (at >= end) break;
    if (at < tile.band) {
      const int32_t block = tile.BandBlock(at);
      const bool initial = block < args.p.shape.init_blocks;
      if (block > range.last || (!initial && block < range.first)) continue;
      plan.need |= 1u << n;
      plan.partial |= block >= range.own;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if ((initial || block >= rows.first[e]) && block * kBlock <= rows.position[e]) plan.reads |= 1u << (2 * n + e);
      }
    } else {
      const int32_t place = at - segment_item;
      const uint32_t mask = lists.masks[place * 8 + warp];
      plan.reads |= ((mask >> rows.bit[0]) & 1) << (2 * n) | ((mask >> rows.bit[1]) & 1) << (2 * n + 1);
      const bool wanted = kWgmma ? (lists.wanted[place] >> (warp / 4)) & 1 : mask != 0;
      if (wanted) plan.need |= 1u << n;
    }
  }
  return plan;
}

// Own blocks: nothing after the row itself.
template <int kCount>
__device__ __forceinline__ void MaskOwnBlock(float (&s)[kCount][4], int at, int32_t block, const RowPair& rows, int c) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (block * kBlock + 8 * j + 2 * c + i % 2 > rows.position[i / 2]) s[at + j][i] = -INFINITY;
    }
  }
}

// Online softmax over new scores, two tiles of 8 a block: s becomes the weights, `factor` what earlier sums must be
// multiplied by. The reference value follows the maximum only when that is 2^8 above it: weights stay below 2^8, which
// costs no precision, and the sums are rarely rescaled.
template <int kCount>
__device__ __forceinline__ void Softmax(float (&s)[kCount][4], uint32_t reads, RowPair& rows, float scale2,
                                        float (&factor)[2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < kCount / 2; ++n) {
      const float x =
          fmaxf(fmaxf(s[2 * n][2 * e], s[2 * n][2 * e + 1]), fmaxf(s[2 * n + 1][2 * e], s[2 * n + 1][2 * e + 1]));
      most = fmaxf(most, (reads >> (2 * n + e)) & 1 ? x : -INFINITY);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float old = rows.max[e];
    const float now = most * scale2 > old + 8.0f ? most * scale2 : old;
    const float base = now == -INFINITY ? 0.0f : now;
    factor[e] = Exp2(old - base);
    rows.max[e] = now;
    float sum[4] = {};
#pragma unroll
    for (int n = 0; n < kCount / 2; ++n) {
      const float shift = (reads >> (2 * n + e)) & 1 ? -base : -INFINITY;
#pragma unroll
      for (int j = 2 * n; j < 2 * n + 2; ++j) {
        s[j][2 * e] = Exp2(fmaf(s[j][2 * e], scale2, shift));
        s[j][2 * e + 1] = Exp2(fmaf(s[j][2 * e + 1], scale2, shift));
        sum[j % 2 * 2] += s[j][2 * e];
        sum[j % 2 * 2 + 1] += s[j][2 * e + 1];
      }
    }
    rows.sum[e] = fmaf(rows.sum[e], factor[e], (sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
}

template <int kCount>
__device__ __forceinline__ void Rescale(float (&o)[kCount][4], const float (&factor)[2]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    o[j][0] *= factor[0];
    o[j][1] *= factor[0];
    o[j][2] *= factor[1];
    o[j][3] *= factor[1];
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void PackWeights(const float (&s)[kCount][4], int at, uint32_t (&a)[4]) {
  a[0] = Convert<T>::Pack(s[at][0], s[at][1]);
  a[1] = Convert<T>::Pack(s[at][2], s[at][3]);
  a[2] = Convert<T>::Pack(s[at + 1][0], s[at + 1][1]);
  a[3] = Convert<T>::Pack(s[at + 1][2], s[at + 1][3]);
}

// mma.sync: one warp, kBlocks blocks of a stage. `block` is the band's block where `partial`.
template <typename T, int kHeadDim, int kBlocks>
__device__ __forceinline__ void StepMma(uint32_t stage, const int (&at)[2], const int32_t (&block)[2], uint32_t reads,
                                        bool partial, const uint32_t (&q)[kHeadDim / 16][4],
                                        float (&o)[kHeadDim / 8][4], RowPair& rows, float scale2, int lane) {
  constexpr uint32_t kPanel = kStageKeys * 128;
  constexpr uint32_t kTensor = kStageKeys * kHeadDim * 2;
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
    for (int n = 0; n < kBlocks; ++n) MaskOwnBlock(s, 2 * n, block[n], rows, lane % 4);
  }
  float factor[2];
  Softmax(s, reads, rows, scale2, factor);
  if (!__all_sync(~0u, factor[0] == 1.0f && factor[1] == 1.0f)) Rescale(o, factor);
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

// The ring as a consumer warp sees it.
template <int kStages>
struct Ring {
  uint32_t full, empty;
  int index = 0;
  uint32_t parity = 0;
  __device__ void Wait() const { BarrierWait(full + index * 8, parity); }
  __device__ void Next() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
  __device__ void Release(int at, int lane) const {
    __syncwarp();
    if (lane == 0) BarrierArrive(empty + at * 8);
  }
};

template <typename T, int kHeadDim, int kStages, bool kWgmma>
__device__ __forceinline__ void Consume(const AttendArgs& args, const Tile& tile, const Lists& lists, uint32_t ring_at,
                                        uint32_t full, uint32_t empty) {
  constexpr uint32_t kStageBytes = 2 * kStageKeys * kHeadDim * 2;
  const Shape& shape = args.p.shape;
  const int thread = threadIdx.x - kProducers;
  const int warp = thread / 32, lane = thread % 32;
  const int r = lane / 4, c = lane % 4;
  const float scale2 = shape.scale * kLog2e;

  // Rows of no query repeat the last one and are not written.
  RowPair rows;
  const int32_t position0 = tile.view.first_position() + tile.q0;
  uint32_t q[kHeadDim / 16][4];
  const T* from[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = warp * 16 + r + 8 * e;
    const int32_t query = min(row / args.group, tile.queries - 1);
    rows.position[e] = position0 + query;
    rows.first[e] = LocalFirst(shape, rows.position[e] / kBlock);
    rows.bit[e] = max(query - warp * 16 / args.group, 0);  // 0: a warp of no query, whose masks are empty
    rows.max[e] = -INFINITY;
    rows.sum[e] = 0.0f;
    from[e] = static_cast<const T*>(args.p.q.data) +
              (tile.view.q_start + static_cast<int64_t>(tile.q0 + query)) * args.p.q.token_stride +
              (static_cast<int64_t>(tile.head) * args.group + row % args.group) * args.p.q.head_stride;
  }
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[k][i] = *reinterpret_cast<const uint32_t*>(from[i % 2] + k * 16 + 2 * c + i / 2 * 8);
  }

  BandRange range;
  {
    constexpr int kUnitRows = kWgmma ? 64 : 16;
    const int32_t row = warp * 16 / kUnitRows * kUnitRows;
    const int32_t b0 = (position0 + min(row / args.group, tile.queries - 1)) / kBlock;
    const int32_t b1 = (position0 + min((row + kUnitRows - 1) / args.group, tile.queries - 1)) / kBlock;
    range.first = LocalFirst(shape, b0);
    range.last = b1;
    range.plain = LocalFirst(shape, b1);
    range.own = b0;
  }

  int32_t total = 0, entry = 0, segment_item = tile.band, end = tile.band;
  const auto build = [&] {
    const int32_t stop = min(entry + kSegment, total);
    end = segment_item + BuildSegment(args, tile, lists, entry, stop, segment_item, thread);
    entry = stop;
    ArriveNamed(kBuiltBarrier, kThreads);
  };
  if (tile.choose) {
    total = BuildUnion(args, tile, lists, thread);
    build();
  }
  float o[kHeadDim / 8][4] = {};
  Ring<kStages> ring{full, empty};
  int32_t item = 0;  // the stage that the ring stands at
  StagePlan plan{0, 0, false};
  // The first stage from `start` on, in this segment, that this consumer needs; `plan` is then its plan.
  const auto find = [&](int32_t start) {
    for (; start < end; start += kStageBlocks) {
      plan = PlanStage<kWgmma>(args, tile, lists, range, rows, start, segment_item, end, warp);
      if (plan.need != 0) break;
    }
    return start;
  };
  const auto skip_to = [&](int32_t target, auto&& before_wait) {
    for (; item < target; item += kStageBlocks) {
      before_wait();
      ring.Wait();
      ring.Release(ring.index, lane);
      ring.Next();
    }
  };
  const auto next_segment = [&] {
    SyncNamed(kConsumerBarrier, kConsumers);
    segment_item = item;
    build();
  };

  if constexpr (kWgmma) {
#ifdef PHSA_SM90A
    constexpr uint32_t kPanel = kStageKeys * 128;
    constexpr uint32_t kTensor = kStageKeys * kHeadDim * 2;
    float s[8][4];
    uint32_t a[4][4];
    float factor[2];
    // The shuffles tell the compiler that the warp agrees on the address: descriptors then live in uniform registers.
    const auto issue_scores = [&](int index) {
      const uint64_t k0 = Descriptor(__shfl_sync(~0u, ring_at + index * kStageBytes, 0), 16, 1024);
      FenceAsyncProxy();
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        Wgmma<T, false>(s, q[k], DescriptorPlus(k0, (k / 4) * kPanel + (k % 4) * 32), k > 0);
      }
      WgmmaCommit();
    };
    const auto issue_values = [&](int index) {
      const uint64_t v0 = Descriptor(__shfl_sync(~0u, ring_at + index * kStageBytes + kTensor, 0), kPanel, 1024);
#pragma unroll
      for (int n = 0; n < 4; ++n) Wgmma<T, true>(o, a[n], DescriptorPlus(v0, n * (kBlock * 128)), 1);
      WgmmaCommit();
    };
    // Returns whether the sums so far keep their scale.
    const auto softmax = [&](const StagePlan& now, int32_t at) {
      Pin(s);
      if (now.partial) {
#pragma unroll
        for (int n = 0; n < kStageBlocks; ++n) {
          if (at + n < tile.band) MaskOwnBlock(s, 2 * n, tile.BandBlock(at + n), rows, c);
        }
      }
      Softmax(s, now.reads, rows, scale2, factor);
      return __all_sync(~0u, factor[0] == 1.0f && factor[1] == 1.0f) != 0;
    };

    // The products with the values of a stage are queued behind the scores of the next, so that they could run under
    // its softmax; ptxas 13.0 moves the wait for them up before the softmax all the same. The stage is held so long;
    // where that would keep the ring from turning, because the stages after it are the other half's, it is ended early.
    bool pending = false;
    int current = 0, distance = 0;
    const auto finish = [&] {
      Pin(o);
      WgmmaFence();
      issue_values(current);
      WgmmaWait<0>();
      Pin(o);
      pending = false;
      ring.Release(current, lane);
    };
    const auto before_wait = [&] {
      if (++distance >= kStages && pending) finish();
    };
    for (;;) {
      int32_t target = find(item);
      while (target < end) {
        skip_to(target, before_wait);
        before_wait();
        ring.Wait();
        const StagePlan now = plan;
        const int32_t at = target;
        const int index = ring.index;
        item += kStageBlocks;
        ring.Next();
        bool keep;
        if (pending) {
          issue_scores(index);
          issue_values(current);
          WgmmaWait<1>();
          keep = softmax(now, at);
          WgmmaWait<0>();
          Pin(o);
          ring.Release(current, lane);
        } else {
          issue_scores(index);
          WgmmaWait<0>();
          keep = softmax(now, at);
        }
        if (!keep) Rescale(o, factor);
        target = find(item);
#pragma unroll
        for (int n = 0; n < 4; ++n) PackWeights<T>(s, 2 * n, a[n]);
        pending = true;
        distance = 0;
        current = index;
      }
      skip_to(end, before_wait);
      if (pending) finish();
      if (entry >= total) break;
      next_segment();
    }
#endif
  } else {
    for (;;) {
      for (int32_t target = find(item); target < end; target = find(item)) {
        skip_to(target, [] {});
        ring.Wait();
        const uint32_t stage = ring_at + ring.index * kStageBytes;
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
            StepMma<T, kHeadDim, 2>(stage, at, block, reads, plan.partial, q, o, rows, scale2, lane);
          } else {
            StepMma<T, kHeadDim, 1>(stage, at, block, reads, plan.partial, q, o, rows, scale2, lane);
          }
        }
        ring.Release(ring.index, lane);
        item += kStageBlocks;
        ring.Next();
      }
      skip_to(end, [] {});
      if (entry >= total) break;
      next_segment();
    }
  }

#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float sum = rows.sum[e];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int row = warp * 16 + r + 8 * e;
    const int32_t query = row / args.group;
    if (query >= tile.queries) continue;
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    const int64_t at = tile.view.q_start + static_cast<int64_t>(tile.q0 + query);
    const int64_t head = static_cast<int64_t>(tile.head) * args.group + row % args.group;
    T* out = static_cast<T*>(args.p.out.data) + at * args.p.out.token_stride + head * args.p.out.head_stride + 2 * c;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      *reinterpret_cast<uint32_t*>(out + j * 8) = Convert<T>::Pack(o[j][2 * e] * inverse, o[j][2 * e + 1] * inverse);
    }
    if (args.p.lse != nullptr && c == 0) {
      args.p.lse[at * shape.num_q_heads + head] = sum > 0.0f ? (rows.max[e] + log2f(sum)) * kLn2 : -INFINITY;
    }
  }
}

template <typename T, int kHeadDim, int kStages, bool kWgmma>
__device__ __forceinline__ void AttendBody(const AttendArgs& args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  Tile tile;
  if (!FindAttendTile(args, tile)) return;
  constexpr int kRing = kStages * 2 * kStageKeys * kHeadDim * 2;
  uint8_t* at = shared + kRing;
  Lists lists;
  lists.masks = reinterpret_cast<uint16_t*>(at);
  lists.blocks = reinterpret_cast<int32_t*>(at + kPlaces * 16);
  lists.scratch = reinterpret_cast<int32_t*>(at + kPlaces * 20);
  lists.place = reinterpret_cast<uint16_t*>(at + kPlaces * 20 + 64);
  lists.wanted = at + kPlaces * 20 + 64 + kSegment * 2;
  lists.bitmap = reinterpret_cast<uint32_t*>(at + kListsFixed);
  lists.before = reinterpret_cast<uint16_t*>(lists.bitmap + args.words);
  __shared__ uint64_t barriers[2 * kStages];
  const uint32_t full = SharedAddress(barriers), empty = full + kStages * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(full + i * 8, kProducers);
      BarrierInit(empty + i * 8, kConsumers / 32);
    }
  }
  __syncthreads();
  if (threadIdx.x < kProducers) {
#ifdef PHSA_SM90A
    if constexpr (kWgmma) asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
#endif
    Produce<T, kHeadDim, kStages>(args, tile, lists, SharedAddress(shared), full, empty);
    // Copies must land before the CTA's memory is given away; consumers wait for all of them.
  } else {
#ifdef PHSA_SM90A
    if constexpr (kWgmma) asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
#endif
    Consume<T, kHeadDim, kStages, kWgmma>(args, tile, lists, SharedAddress(shared), full, empty);
  }
}

constexpr int kPlainStages = 2;
constexpr int kWgStages = 5;

template <typename T, int kHeadDim>
__global__ __launch_bounds__(kThreads, 1) void AttendKernel(const __grid_constant__ AttendArgs args) {
  AttendBody<T, kHeadDim, kPlainStages, false>(args);
}
template <typename T, int kHeadDim>
__global__ __launch_bounds__(kThreads, 1) void AttendWgmmaKernel(const __grid_constant__ AttendArgs args) {
#ifdef PHSA_SM90A
  AttendBody<T, kHeadDim, kWgStages, true>(args);
#else
  __trap();  // compiled for another target: a wrong result must not look like one
#endif
}

template <typename T, int kHeadDim>
cudaError_t Launch(const ForwardParams& p, cudaStream_t stream) {
  AttendArgs args{};
  args.p = p;
  args.group = p.shape.num_q_heads / p.shape.selection_heads;
  args.kv_div = p.shape.selection_heads / p.shape.num_kv_heads;
  args.tile_queries = kRows / args.group;
  args.tiles = MaxTiles(p.batch, args.tile_queries);
  while ((args.tile_queries << (args.query_shift + 1)) <= kConsumers) ++args.query_shift;
  args.words = p.shape.top_k > 0 ? (p.batch.max_kv_len / kBlock + 32) / 32 : 0;
  if (args.tiles == 0) return cudaSuccess;
  const bool hopper = DeviceArchitecture() >= 90;
  const auto kernel = hopper ? AttendWgmmaKernel<T, kHeadDim> : AttendKernel<T, kHeadDim>;
  const int shared = (hopper ? kWgStages : kPlainStages) * 2 * kStageKeys * kHeadDim * 2 + ListsBytes(args.words);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const dim3 grid(args.tiles, p.shape.selection_heads);
  kernel<<<grid, kThreads, shared, stream>>>(args);
  return cudaGetLastError();
}

int32_t g_architecture = 0;

}  // namespace

void SetArchitecture(int32_t architecture) { g_architecture = architecture; }

int32_t DeviceArchitecture() {
  if (g_architecture != 0) return g_architecture;
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 80;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return 80;
  return major == 9 ? 90 : 80;
}

const char* Unsupported(const Shape& shape, const Batch& batch) {
  if (shape.dtype != Dtype::kBf16 && shape.dtype != Dtype::kF16) return "dtype: the CUDA kernels take bf16 and fp16";
  if (shape.head_dim != 64 && shape.head_dim != 128) return "head_dim: the CUDA kernels take 64 and 128";
  if (shape.num_kv_heads <= 0 || shape.num_q_heads % shape.num_kv_heads != 0)
    return "num_kv_heads must divide num_q_heads";
  if (shape.num_q_heads / shape.num_kv_heads > 16) return "group: the CUDA kernels take up to 16 query heads a KV head";
  if (shape.top_k < 0 || shape.top_k > 64) return "top_k: the CUDA kernels take 0 to 64";
  if (batch.max_kv_len > 1 << 20) return "kv_len: the CUDA kernels take up to 1048576 tokens";
  return nullptr;
}

cudaError_t Attend(const ForwardParams& p, cudaStream_t stream) {
  const bool bf = p.shape.dtype == Dtype::kBf16;
  if (p.shape.head_dim == 128) return bf ? Launch<bf16, 128>(p, stream) : Launch<half, 128>(p, stream);
  return bf ? Launch<bf16, 64>(p, stream) : Launch<half, 64>(p, stream);
}

}  // namespace phsa::cuda
