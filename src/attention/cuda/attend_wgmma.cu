// Attend for Hopper (sm_90a): one CTA per multiprocessor takes tile after tile, and each warpgroup has one part of the
// work, so that none waits for another's start-up:
//  - the planner turns a tile's band and lists into segments: which blocks each stage of four holds, and which queries
//    read them;
//  - the copiers fill a ring of stages, whose keys are given back sooner than their values;
//  - two halves of 64 rows each consume them, wgmma.
// A half skips the stages that none of its queries wants. So that the stages of a half are full, the union of the
// choices is ordered by who wants a block: both halves first, then stages for one half and for the other in turn.
// Neighbouring queries choose alike: 64 of them read about 9 K distinct blocks, 32 about 6 K.
#include <algorithm>
#include <cstddef>

#include "attention/cuda/attend.cuh"
#include "attention/cuda/wgmma.cuh"

#if PHSA_HEAD_DIM <= 128  // wider heads take the plain kernel
namespace phsa::cuda {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kCopiers = kWarpgroup;
constexpr int kPlanners = kWarpgroup;
constexpr int kConsumers = 2 * kWarpgroup;
constexpr int kConsumerWarps = kConsumers / 32;
constexpr int kThreads = kCopiers + kPlanners + kConsumers;
constexpr int kStages = 6;
constexpr int kSegments = 3;         // that the planner may be ahead
constexpr int kSegmentBlocks = 256;  // of the union, or of the band, in one segment
// Both, one half's and the other's blocks each end with a stage of their own.
constexpr int kSegmentStages = kSegmentBlocks / kStageBlocks + 3;
[[maybe_unused]] constexpr int kPlannerBarrier = 1;

// Bits of a stage's flags; the second half's are one higher.
[[maybe_unused]] constexpr uint32_t kWanted = 1;   // some row of the half reads something of the stage
[[maybe_unused]] constexpr uint32_t kPartial = 4;  // some row reads a part of a block

struct Segment {
  uint2 masks[kSegmentStages][kConsumerWarps];   // 16 bits a block: which of the warp's queries read it
  int32_t blocks[kSegmentStages][kStageBlocks];  // -1: gap
  uint8_t flags[kSegmentStages + 1];
  int32_t stages;  // -1: there is nothing more to do
  int32_t last;    // of its tile
  Tile tile;
};

// The planner's own memory; two more arrays of `words` elements follow.
struct Scratch {
  uint32_t halves[kSegmentBlocks];  // per entry of the union: which halves want it
  uint16_t place[kSegmentBlocks];   // where it lies in the segment
  int32_t sums[kPlanners / 32];
};

struct Shared {
  Segment segments[kSegments];
  Scratch scratch;
  uint64_t full[kStages], empty[2][kStages];  // empty: keys, values
  uint64_t planned[kSegments], used[kSegments];
};

// Head sizes between are multiplied as the next of these, but for the inner index of scores: what lies in the columns
// beyond reaches no column that is written.
template <int kHeadDim>
constexpr int kColumns = kHeadDim <= 64 ? 64 : 128;
template <int kHeadDim>
constexpr int kRingBytes = kStages * 2 * kStageKeys* kRowBytes<kHeadDim>;
template <int kHeadDim>
constexpr int SharedBytes(int words) {
  return kRingBytes<kHeadDim> + static_cast<int>(sizeof(Shared)) + (words * 6 + 15) / 16 * 16;
}

#ifdef PHSA_SM90A

// Place in a ring of barriers, as one side sees it.
template <int kCount>
struct Place {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Next() {
    if (++index == kCount) {
      index = 0;
      parity ^= 1;
    }
  }
};

// The planner's segments as a copier or consumer sees them.
class Segments {
 public:
  __device__ explicit Segments(Shared& shared) : shared_(shared), base_(OpaqueAddress(&shared)) {}
  // The segment that is next; waits for it.
  __device__ __forceinline__ const Segment& Next() const {
    BarrierWait(base_ + offsetof(Shared, planned) + place_.index * 8, place_.parity);
    return shared_.segments[place_.index];
  }
  __device__ __forceinline__ void Done() {
    BarrierArrive(base_ + offsetof(Shared, used) + place_.index * 8);
    place_.Next();
  }

 private:
  Shared& shared_;
  const uint32_t base_;
  Place<kSegments> place_;
};

class Planner {
 public:
  __device__ Planner(const AttendArgs& args, Shared& shared)
      : args_(args),
        shared_(shared),
        scratch_(shared.scratch),
        bitmap_(reinterpret_cast<uint32_t*>(&shared + 1)),
        before_(reinterpret_cast<uint16_t*>(bitmap_ + args.words)),
        thread_(threadIdx.x - kCopiers) {}

  __device__ __forceinline__ void Run() {
    const int32_t heads = args_.head_group, tiles = args_.tiles;
    const int32_t items = tiles * args_.p.shape.selection_heads;
    for (int32_t turn = 0; ItemOfTurn(turn) < items; ++turn) {
      const int32_t item = ItemOfTurn(turn);
      Tile tile;
      const int32_t head = item / (tiles * heads) * heads + item % heads;
      if (!FindAttendTile(args_, item % (tiles * heads) / heads, head, tile)) continue;
      const int32_t stages = (tile.band + kStageBlocks - 1) / kStageBlocks;
      for (int32_t first = 0; first < stages; first += kSegmentStages) PlanBand(tile, first, stages);
      if (!tile.choose) continue;
      const int32_t total = BuildUnion(tile);
      for (int32_t entry = 0; entry < total; entry += kSegmentBlocks) PlanUnion(tile, entry, total);
    }
    Segment& segment = Begin();
    if (thread_ == 0) segment.stages = -1;
    End();
  }

 private:
  __device__ void Sync() const { SyncNamed(kPlannerBarrier, kPlanners); }

  __device__ Segment& Begin() const {
    BarrierWait(SharedAddress(&shared_.used[place_.index]), place_.parity ^ 1);
    return shared_.segments[place_.index];
  }
  __device__ void End() {
    BarrierArrive(SharedAddress(&shared_.planned[place_.index]));
    place_.Next();
  }

  // Stages [first, …) of the band.
  __device__ __forceinline__ void PlanBand(const Tile& tile, int32_t first, int32_t all) {
    Segment& segment = Begin();
    const int32_t stages = min(kSegmentStages, all - first);
    // Eight neighbouring threads plan a stage, each for one warp of the consumers.
    const int warp = thread_ % kConsumerWarps;
    const Shape& shape = args_.p.shape;
    const int32_t q0 = warp * 16 / args_.group;
    const int32_t count = min((warp * 16 + 15) / args_.group + 1, tile.queries) - q0;  // of the warp's queries
    const int32_t position = tile.view.first_position() + tile.q0 + q0;
    const int32_t b0 = position / kBlock, b1 = (position + max(count, 1) - 1) / kBlock;
    const int32_t local0 = LocalFirst(shape, b0), local1 = LocalFirst(shape, b1);
    const int32_t whole = WholeFrom(shape, position + max(count, 1) - 1);
    for (int32_t base = 0; base < stages; base += kPlanners / kConsumerWarps) {
      const int32_t stage = base + thread_ / kConsumerWarps;
      uint32_t mask[kStageBlocks] = {};
      bool partial = false;
      if (stage < stages && count > 0) {
#pragma unroll
        for (int n = 0; n < kStageBlocks; ++n) {
          const int32_t i = (first + stage) * kStageBlocks + n;
          if (i >= tile.band) continue;
          const int32_t t = tile.BandBlock(i);
          const bool initial = t < shape.init_blocks;
          if (t > b1 || (!initial && t < local0)) continue;
          if (t <= b0 && (initial || t >= local1)) {
            mask[n] = 0xFFFF;
          } else {
            for (int q = 0; q < count; ++q) {
              const int32_t b = (position + q) / kBlock;
              if (t <= b && (initial || t >= LocalFirst(shape, b))) mask[n] |= 1u << q;
            }
          }
          partial |= t >= b0 || t < whole;
        }
      }
      const bool wanted = (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
      const int shift = thread_ % 32 / kConsumerWarps * kConsumerWarps;
      const uint32_t all_wanted = __ballot_sync(~0u, wanted) >> shift;
      const uint32_t all_partial = __ballot_sync(~0u, partial) >> shift;
      if (stage < stages) {
        segment.masks[stage][warp] = make_uint2(mask[0] | mask[1] << 16, mask[2] | mask[3] << 16);
        if (warp < kStageBlocks) {
          const int32_t i = (first + stage) * kStageBlocks + warp;
          segment.blocks[stage][warp] = i < tile.band ? tile.BandBlock(i) : -1;
        }
        if (warp == 0) {
          segment.flags[stage] = static_cast<uint8_t>(
              ((all_wanted & 0x0F) != 0 ? kWanted : 0) | ((all_wanted & 0xF0) != 0 ? kWanted << 1 : 0) |
              ((all_partial & 0x0F) != 0 ? kPartial : 0) | ((all_partial & 0xF0) != 0 ? kPartial << 1 : 0));
        }
      }
    }
    if (thread_ == 0) {
      segment.stages = stages;
      segment.last = !tile.choose && first + stages == all;
      segment.tile = tile;
    }
    End();
  }

  // Sum over the planners before this one; `total` gets the sum over all.
  __device__ __forceinline__ int32_t Scan(int32_t own, int32_t& total) const {
    int32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t x = __shfl_up_sync(~0u, sum, step);
      if (thread_ % 32 >= step) sum += x;
    }
    if (thread_ % 32 == 31) scratch_.sums[thread_ / 32] = sum;
    Sync();
    total = 0;
    int32_t before = sum - own;
#pragma unroll
    for (int w = 0; w < kPlanners / 32; ++w) {
      const int32_t x = scratch_.sums[w];
      if (w < thread_ / 32) before += x;
      total += x;
    }
    Sync();
    return before;
  }

  __device__ __forceinline__ int32_t Rank(int32_t t) const {
    return before_[t / 32] + __popc(bitmap_[t / 32] & ((1u << (t % 32)) - 1u));
  }

  // The words of the bitmap that this thread counts.
  struct Range {
    int32_t begin, end;
  };
  __device__ Range OwnWords() const {
    const int per = (args_.words + kPlanners - 1) / kPlanners;
    const int begin = min(thread_ * per, args_.words);
    return {begin, min(begin + per, args_.words)};
  }

  // The bitmap of all chosen blocks of the tile and its prefix sums. Returns how many blocks there are.
  __device__ __forceinline__ int32_t BuildUnion(const Tile& tile) const {
    Sync();  // the tile before is planned
    for (int i = thread_; i < args_.words; i += kPlanners) bitmap_[i] = 0;
    Sync();
    EachChoice(args_, tile, thread_, [&](int32_t, int32_t t) { atomicOr(&bitmap_[t / 32], 1u << (t % 32)); });
    Sync();
    const Range words = OwnWords();
    int32_t own = 0, total;
    for (int i = words.begin; i < words.end; ++i) own += __popc(bitmap_[i]);
    int32_t before = Scan(own, total);
    for (int i = words.begin; i < words.end; ++i) {
      before_[i] = static_cast<uint16_t>(before);
      before += __popc(bitmap_[i]);
    }
    Sync();
    return total;
  }

  // Entries [begin, …) of the union.
  __device__ __forceinline__ void PlanUnion(const Tile& tile, int32_t begin, int32_t all) {
    const int32_t count = min(kSegmentBlocks, all - begin);
    for (int i = thread_; i < kSegmentBlocks; i += kPlanners) scratch_.halves[i] = 0;
    Sync();
    const auto each_choice = [&](auto&& take) {
      EachChoice(args_, tile, thread_, [&](int32_t q, int32_t t) {
        const int32_t entry = Rank(t) - begin;
        if (entry >= 0 && entry < count) take(q, entry);
      });
    };
    constexpr int kHalf = kAttendRows / 2;
    each_choice([&](int32_t q, int32_t entry) {
      const uint32_t wanted = (q * args_.group < kHalf ? 1u : 0u) | (q * args_.group + args_.group > kHalf ? 2u : 0u);
      atomicOr(&scratch_.halves[entry], wanted);
    });
    Sync();

    // A counting sort; the three counts share one integer.
    constexpr int kPer = kSegmentBlocks / kPlanners;
    uint32_t who[kPer];
    int32_t own = 0;
    const auto one = [](uint32_t w) { return w == 3 ? 1 : w == 1 ? 1 << 10 : w == 2 ? 1 << 20 : 0; };
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      who[i] = scratch_.halves[kPer * thread_ + i];
      own += one(who[i]);
    }
    int32_t total;
    int32_t before = Scan(own, total);
    const auto ceil = [](int32_t blocks) { return (blocks + kStageBlocks - 1) / kStageBlocks; };
    const int32_t stages0 = ceil(total & 1023), stages1 = ceil(total >> 10 & 1023), stages2 = ceil(total >> 20);
    const int32_t paired = min(stages1, stages2), stages = stages0 + stages1 + stages2;
    Segment& segment = Begin();
    for (int i = thread_; i < stages * kConsumerWarps; i += kPlanners) (&segment.masks[0][0])[i] = uint2{};
    for (int i = thread_; i < stages * kStageBlocks; i += kPlanners) (&segment.blocks[0][0])[i] = -1;
    for (int i = thread_; i < stages; i += kPlanners) {
      const int32_t apart = i - stages0;
      const uint32_t only = apart < 2 * paired ? 1u << (apart & 1) : stages1 > stages2 ? 1u : 2u;
      segment.flags[i] = static_cast<uint8_t>((apart < 0 ? 3u : only) * kWanted);
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      int32_t place = before & 1023;
      if (who[i] == 1 || who[i] == 2) {
        const int32_t index = who[i] == 1 ? before >> 10 & 1023 : before >> 20;
        const int32_t stage = index / kStageBlocks;
        const int32_t at = stage < paired ? 2 * stage + static_cast<int32_t>(who[i]) - 1 : stage + paired;
        place = (stages0 + at) * kStageBlocks + index % kStageBlocks;
      }
      if (who[i] != 0) scratch_.place[kPer * thread_ + i] = static_cast<uint16_t>(place);
      before += one(who[i]);
    }
    Sync();
    uint32_t* words = reinterpret_cast<uint32_t*>(&segment.masks[0][0]);
    each_choice([&](int32_t q, int32_t entry) {
      const int32_t place = scratch_.place[entry];
      const int32_t stage = place / kStageBlocks, n = place % kStageBlocks;
      // A query's heads may lie in two warps.
      for (int w = q * args_.group / 16; w <= (q * args_.group + args_.group - 1) / 16; ++w) {
        const int bit = q - w * 16 / args_.group;
        atomicOr(&words[(stage * kConsumerWarps + w) * 2 + n / 2], 1u << (n % 2 * 16 + bit));
      }
    });
    const Range own_words = OwnWords();
    for (int i = own_words.begin; i < own_words.end; ++i) {
      int32_t entry = before_[i] - begin;
      for (uint32_t bits = bitmap_[i]; bits != 0; bits &= bits - 1, ++entry) {
        if (entry < 0 || entry >= count) continue;
        (&segment.blocks[0][0])[scratch_.place[entry]] = i * 32 + __ffs(static_cast<int>(bits)) - 1;
      }
    }
    if (thread_ == 0) {
      segment.stages = stages;
      segment.last = begin + count == all;
      segment.tile = tile;
    }
    Sync();  // the scratch memory is free again
    End();
  }

  const AttendArgs& args_;
  Shared& shared_;
  Scratch& scratch_;
  uint32_t* bitmap_;
  uint16_t* before_;
  const int thread_;
  Place<kSegments> place_;
};

// Copies the blocks of all segments: two warps the keys, two the values, each two blocks of a stage.
template <typename T, int kHeadDim>
__device__ __forceinline__ void Copy(const AttendArgs& args, Shared& shared, uint32_t ring) {
  const int warp = OpaqueWarp(), lane = OpaqueLane();
  const int tensor = warp / 2, first = warp % 2 * 2;
  const Rows& rows = tensor == 0 ? args.p.k : args.p.v;
  const uint32_t full = OpaqueAddress(shared.full), empty = OpaqueAddress(shared.empty[tensor]);
  constexpr uint32_t kTile = BlockCopier<T, kHeadDim>::kBytes;
  ring += tensor * kTile;
  Place<kStages> stage;
  Segments segments(shared);
  while (segments.Next().stages >= 0) {
    const BlockCopier<T, kHeadDim> copier(args, rows, segments.Next().tile, lane);
    for (bool last = false; !last; segments.Done()) {
      const Segment& segment = segments.Next();
      const int32_t stages = segment.stages;
      last = segment.last != 0;
      for (int32_t i = 0; i < stages; ++i) {
        const int2 blocks = *reinterpret_cast<const int2*>(&segment.blocks[i][first]);
        const uint32_t to = ring + stage.index * (2 * kTile);
        BarrierWait(empty + stage.index * 8, stage.parity ^ 1);
        copier.Copy(blocks.x, to, first);
        copier.Copy(blocks.y, to, first + 1);
        BarrierArriveAfterCopies(full + stage.index * 8);
        stage.Next();
      }
    }
  }
  WaitCopies<0>();
}

// The scores of one warp's rows against a stage's keys, by mma.sync.
template <typename T, int kHeadDim>
__device__ __forceinline__ void ScoresOfWarp(uint32_t keys, const uint32_t (&q)[kHeadDim / 16][4], float (&s)[8][4],
                                             int lane) {
  asm volatile("" : "+r"(lane));  // addresses that depend on it are not kept in registers for this rare call
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
    for (int n = 0; n < kStageBlocks; ++n) {
      uint32_t b[4];
      const int row = n * kBlock + (lane & 7) + ((lane >> 4) << 3);
      LoadMatrix(b, keys + TileOffset(row, 2 * k + ((lane >> 3) & 1), BlockCopier<T, kHeadDim>::kPanel));
      Mma<T>(s[2 * n], q[k], b[0], b[1]);
      Mma<T>(s[2 * n + 1], q[k], b[2], b[3]);
    }
  }
}

// One half of the rows. The products with the values of a stage are queued behind the scores of the next wanted stage
// and run while that one's softmax does.
template <typename T, int kHeadDim>
__device__ __forceinline__ void Consume(const AttendArgs& args, Shared& shared, uint32_t ring) {
  constexpr uint32_t kPanel = BlockCopier<T, kHeadDim>::kPanel;
  constexpr uint32_t kTile = BlockCopier<T, kHeadDim>::kBytes;
  const int warp = OpaqueWarp() - (kCopiers + kPlanners) / 32, lane = OpaqueLane();
  const int half = warp / 4;
  const float scale2 = args.p.shape.scale * kLog2e;
  const int32_t reach = Reach(args.p.shape);
  const uint32_t full = OpaqueAddress(shared.full);
  const uint32_t empty_k = OpaqueAddress(shared.empty[0]), empty_v = empty_k + kStages * 8;
  Place<kStages> stage;
  Segments segments(shared);
  if (segments.Next().stages < 0) return;
  Tile tile = segments.Next().tile;
  RowPair rows;
  uint4 queries[2][kRowPieces<kHeadDim>];
  LoadTileRows<T, kHeadDim>(args, tile, warp, lane, rows, queries);
  for (bool more = true; more;) {
    uint32_t q[kHeadDim / 16][4];
    MakeOperand(queries, lane % 4, q);
    float o[kColumns<kHeadDim> / 8][4] = {};
    float s[8][4];
    uint32_t a[kStageBlocks][4];

    // The shuffle tells the compiler that the warp agrees on the address: descriptors then live in uniform registers.
    const auto place = [&](int index) { return __shfl_sync(~0u, ring + index * (2 * kTile), 0); };
    const auto issue_scores = [&](uint32_t at) {
      const uint64_t k0 = Descriptor(at, 16, 1024);
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        Wgmma<T, false>(s, q[k], DescriptorPlus(k0, (k / 4) * kPanel + (k % 4) * 32), k > 0);
      }
      WgmmaCommit();
    };
    const auto issue_values = [&](uint32_t at) {
      const uint64_t v0 = Descriptor(at + kTile, kPanel, 1024);
#pragma unroll
      for (int n = 0; n < kStageBlocks; ++n) Wgmma<T, true>(o, a[n], DescriptorPlus(v0, n * (kBlock * 128)), 1);
      WgmmaCommit();
    };
    // Keys may have been read by every lane (ScoresOfWarp), values by the tensor cores alone.
    const auto release_keys = [&](int index) { BarrierArrive(empty_k + index * 8); };
    const auto release_values = [&](int index) {
      if (lane == 0) BarrierArrive(empty_v + index * 8);
    };
    const auto mask_own = [&](const Segment& segment, int32_t at, uint32_t flags) {
      Pin(s);
      if ((flags & kPartial) == 0) return;
#pragma unroll
      for (int n = 0; n < kStageBlocks; ++n) MaskPartialBlock(s, 2 * n, segment.blocks[at][n], rows, reach, lane % 4);
    };

    const auto softmax = [&](const auto& reads) {
      float factor[2];
      if (!Softmax(s, reads, rows, scale2, factor)) Rescale(o, factor);
    };

    // A stage's values are held until they are multiplied. Where that would keep the ring from turning, because the
    // stages after it are the other half's, that is done early.
    bool pending = false;
    int current = 0, distance = 0;
    const auto finish = [&] {
      Pin(o);
      WgmmaFence();
      issue_values(place(current));
      WgmmaWait<0>();
      Pin(o);
      pending = false;
      release_values(current);
    };
    for (bool last = false; !last; segments.Done()) {
      const Segment& segment = segments.Next();
      const int32_t stages = segment.stages;
      last = segment.last != 0;
      for (int32_t i = 0; i < stages; ++i, stage.Next()) {
        // What the products need is at hand before the wait: their way is the longest.
        const uint32_t flags = segment.flags[i] >> half;
        const uint2 masks = segment.masks[i][warp];
        const uint32_t here = place(stage.index), before = place(current);
        if (++distance >= kStages && pending) finish();
        BarrierWait(full + stage.index * 8, stage.parity);
        if ((flags & kWanted) == 0) {
          release_keys(stage.index);
          release_values(stage.index);
          continue;
        }
        const uint32_t words[2][2] = {{masks.x >> rows.bit[0], masks.y >> rows.bit[0]},
                                      {masks.x >> rows.bit[1], masks.y >> rows.bit[1]}};
        const auto reads = [&](int n, int e) { return (words[e][n / 2] >> (n % 2 * 16) & 1) != 0; };
        FenceAsyncProxy();
        if (pending) {
          issue_scores(here);
          issue_values(before);
          WgmmaWait<1>();
          mask_own(segment, i, flags);
          const bool usual = SoftmaxAt(s, reads, rows, scale2);
          WgmmaWaitAfter(usual);
          Pin(o);
          release_values(current);
          // Rare, and for this warp alone: the other three of the half go on.
          if (!usual) {
            ScoresOfWarp<T, kHeadDim>(here, q, s, lane);
            mask_own(segment, i, flags);
            softmax(reads);
          }
        } else {
          issue_scores(here);
          WgmmaWait<0>();
          mask_own(segment, i, flags);
          softmax(reads);
        }
        release_keys(stage.index);
#pragma unroll
        for (int n = 0; n < kStageBlocks; ++n) PackWeights<T>(s, 2 * n, a[n]);
        pending = true;
        distance = 0;
        current = stage.index;
      }
    }
    // The next tile's queries are under way while this one's results are written.
    more = segments.Next().stages >= 0;
    const Tile next_tile = more ? segments.Next().tile : tile;
    RowPair next_rows;
    LoadTileRows<T, kHeadDim>(args, next_tile, warp, lane, next_rows, queries);
    if (pending) finish();
    WriteTileRows<T, kHeadDim>(args, tile, warp, lane, rows, o);
    tile = next_tile;
    rows = next_rows;
  }
}

#endif  // PHSA_SM90A

template <typename T, int kHeadDim>
__global__ __launch_bounds__(kThreads, 1) void AttendWgmmaKernel(const __grid_constant__ AttendArgs args) {
#ifdef PHSA_SM90A
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory + kRingBytes<kHeadDim>);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(SharedAddress(&shared.full[i]), kCopiers);
      BarrierInit(SharedAddress(&shared.empty[0][i]), kConsumers);
      BarrierInit(SharedAddress(&shared.empty[1][i]), kConsumerWarps);
    }
    for (int i = 0; i < kSegments; ++i) {
      BarrierInit(SharedAddress(&shared.planned[i]), kPlanners);
      BarrierInit(SharedAddress(&shared.used[i]), kCopiers + kConsumers);
    }
  }
  __syncthreads();
  if (threadIdx.x < kCopiers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    Copy<T, kHeadDim>(args, shared, OpaqueAddress(memory));
  } else if (threadIdx.x < kCopiers + kPlanners) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    Planner(args, shared).Run();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
    Consume<T, kHeadDim>(args, shared, OpaqueAddress(memory));
  }
#else
  __trap();  // compiled for another target: a wrong result must not look like one
#endif
}

// Tiles of several heads in turn end more evenly; of one head after the other, they read keys that are still in the L2
// cache. As many heads as about half of it holds.
int32_t HeadGroup(const ForwardParams& p) {
  constexpr int64_t kCache = int64_t{36} << 20;
  const int64_t head_bytes = int64_t{4} * p.batch.max_kv_len * p.batch.num_seqs * p.shape.head_dim;
  int32_t heads = 1;
  while (p.shape.selection_heads % (2 * heads) == 0 && 2 * heads * head_bytes <= kCache) heads *= 2;
  return heads;
}

}  // namespace

template <typename T, int kHeadDim>
cudaError_t AttendWgmmaOf(const ForwardParams& p, cudaStream_t stream) {
  AttendArgs args = MakeAttendArgs(p, kAttendRows, kPlanners);
  if (args.tiles == 0) return cudaSuccess;
  args.head_group = HeadGroup(p);
  const int shared = SharedBytes<kHeadDim>(args.words);
  const auto kernel = AttendWgmmaKernel<T, kHeadDim>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const unsigned items = static_cast<unsigned>(args.tiles) * static_cast<unsigned>(p.shape.selection_heads);
  kernel<<<std::min(items, Multiprocessors()), kThreads, shared, stream>>>(args);
  return cudaGetLastError();
}

template cudaError_t AttendWgmmaOf<bf16, PHSA_HEAD_DIM>(const ForwardParams&, cudaStream_t);
template cudaError_t AttendWgmmaOf<half, PHSA_HEAD_DIM>(const ForwardParams&, cudaStream_t);

}  // namespace phsa::cuda
#endif
