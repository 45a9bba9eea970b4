// What the two implementations of attend share: tiles and their lists, copies of blocks, the softmax, and the rows' way
// in and out. A tile is 128 rows (query and head) of one KV head: 64 queries of a group of two. It reads a band (init
// and local blocks of all its queries), then the union of its queries' choices. A row reads all of a block or nothing
// of it, except in its own block, where it reads up to itself, and where its window begins.
#ifndef PHSA_ATTENTION_CUDA_ATTEND_CUH_
#define PHSA_ATTENTION_CUDA_ATTEND_CUH_

#include "attention/cuda/device.cuh"

namespace phsa::cuda {

inline constexpr int kAttendRows = 128;  // of a tile, at most
inline constexpr int kStageBlocks = 4;   // blocks are copied and multiplied four at a time
inline constexpr int kStageKeys = kStageBlocks * kBlock;

struct AttendArgs {
  ForwardParams p;
  int32_t group;         // heads that share a choice
  int32_t kv_div;        // selection heads per KV head
  int32_t tile_queries;  // kAttendRows / group
  int32_t tiles;
  int32_t words;        // of the bitmap of blocks
  int32_t head_group;   // heads whose tiles are taken in turn, by the Hopper kernel
  int32_t query_shift;  // threads per query of the tile when lists are read, as a power of two
};

// `rows` of a tile; `readers`: threads that read the lists.
inline AttendArgs MakeAttendArgs(const ForwardParams& p, int32_t rows, int32_t readers) {
  AttendArgs args{};
  args.p = p;
  args.group = p.shape.num_q_heads / p.shape.selection_heads;
  args.kv_div = p.shape.selection_heads / p.shape.num_kv_heads;
  args.tile_queries = rows / args.group;
  args.tiles = MaxTiles(p.batch, args.tile_queries);
  while ((args.tile_queries << (args.query_shift + 1)) <= readers) ++args.query_shift;
  args.words = p.shape.top_k > 0 ? (p.batch.max_kv_len / kBlock + 32) / 32 : 0;
  return args;
}

// The part of a tile's stream that all threads can compute for themselves.
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
  return shape.ReadsAll(b) ? 0 : b - shape.local_blocks;
}

// Long reads first: tile 0 is the last of the batch. Returns whether there is such a tile.
__device__ __forceinline__ bool FindAttendTile(const AttendArgs& args, int32_t index, int32_t head, Tile& tile) {
  tile.q0 = FindTile(args.p.batch, args.tiles - 1 - index, args.tile_queries, tile.view);
  if (tile.q0 < 0) return false;
  tile.queries = min(args.tile_queries, tile.view.q_len - tile.q0);
  tile.head = head;
  tile.kv_head = head / args.kv_div;
  const int32_t first = (tile.view.first_position() + tile.q0) / kBlock;
  const int32_t last = (tile.view.first_position() + tile.q0 + tile.queries - 1) / kBlock;
  // Queries that read all come first in a sequence, and the local window only moves on: the first query's is the start.
  tile.band_first = LocalFirst(args.p.shape, first);
  tile.band_init = min(args.p.shape.init_blocks, tile.band_first);
  tile.band = tile.band_init + last + 1 - tile.band_first;
  tile.choose = args.p.shape.top_k > 0 && !args.p.shape.ReadsAll(last);
  return true;
}

__device__ __forceinline__ int64_t ListOffset(const AttendArgs& args, const Tile& tile, int32_t q) {
  return ((tile.view.q_start + static_cast<int64_t>(tile.q0 + q)) * args.p.shape.selection_heads + tile.head) *
         args.p.shape.top_k;
}

// Calls take(query of the tile, block) for this reader's share of the tile's choices. Lists may come from outside: what
// lies beyond the keys is left out, so that a wrong list gives a wrong result and nothing worse.
template <typename Take>
__device__ __forceinline__ void EachChoice(const AttendArgs& args, const Tile& tile, int thread, Take&& take) {
  const Shape& shape = args.p.shape;
  const int32_t q = thread >> args.query_shift, step = 1 << args.query_shift;
  if (q >= tile.queries || shape.ReadsAll((tile.view.first_position() + tile.q0 + q) / kBlock)) return;
  const int32_t* list = args.p.selection + ListOffset(args, tile, q);
  const uint32_t blocks = static_cast<uint32_t>(tile.view.kv_len + kBlock - 1) / kBlock;
#pragma unroll 4
  for (int i = thread & (step - 1); i < shape.top_k; i += step) {
    const int32_t t = list[i];
    if (static_cast<uint32_t>(t) < blocks) take(q, t);
  }
}

// Copies blocks of keys, or of values, into tiles of kKeys rows in shared memory; a warp copies a block.
template <typename T, int kHeadDim, int kKeys = kStageKeys>
class BlockCopier {
 public:
  static constexpr uint32_t kPanel = kKeys * 128;
  static constexpr uint32_t kBytes = kKeys * kRowBytes<kHeadDim>;  // of a tile

  __device__ BlockCopier(const AttendArgs& args, const Rows& rows, const Tile& tile, int lane)
      : args_(args), rows_(rows), seq_(tile.view.seq), kv_len_(tile.view.kv_len), paged_(args.p.batch.page_size != 0) {
    const int piece = lane % kLanes;
    idle_ = piece >= kHeadDim / 8;
    row0_ = lane / kLanes;
    // A lane's first row of block 0; a page's or sequence's place comes on top.
    from_ = static_cast<const T*>(rows.data) + tile.kv_head * rows.head_stride + row0_ * rows.token_stride + piece * 8;
    if (!paged_) from_ += BlockOffset(args.p.batch, rows, seq_, 0);
    // TileOffset of row i · kRows + row0 is base + i · kRows · 128 + (swizzle ^ (i · kRows % 8) · 16).
    base_ = (piece >> 3) * kPanel + row0_ * 128;
    swizzle_ = ((piece & 7) ^ row0_) << 4;
  }

  // Into rows 16 · place and on of the tile `to`; zeros where `block` is below 0.
  __device__ __forceinline__ void Copy(int32_t block, uint32_t to, int place) const {
    if (kLanes * 8 != kHeadDim && idle_) return;
    const int valid = block >= 0 ? min(kBlock, kv_len_ - block * kBlock) : 0;
    block = max(block, 0);
    const T* from = from_ + (paged_ ? BlockOffset(args_.p.batch, rows_, seq_, block)
                                    : static_cast<int64_t>(block) * kBlock * rows_.token_stride);
    const int64_t step = kRows * rows_.token_stride;
    to += base_ + place * (kBlock * 128);
    if (valid == kBlock) {
#pragma unroll
      for (int i = 0; i < kBlock / kRows; ++i) {
        CopyAsync16(to + i * (kRows * 128) + (swizzle_ ^ ((i * kRows % 8) << 4)), from, true);
        from += step;
      }
    } else {
      // Rows that do not exist become zero: a weight of zero times what lay there before might not be zero. Where
      // nothing is read, the address must still be a row that exists.
      const T* first = valid == 0 ? from - row0_ * rows_.token_stride : from;
#pragma unroll
      for (int i = 0; i < kBlock / kRows; ++i) {
        const bool there = i * kRows + row0_ < valid;
        CopyAsync16(to + i * (kRows * 128) + (swizzle_ ^ ((i * kRows % 8) << 4)), there ? from : first, there);
        from += step;
      }
    }
  }

 private:
  static constexpr int kLanes = kRowLanes<kHeadDim>;
  static constexpr int kRows = 32 / kLanes;  // that a warp copies at once

  const AttendArgs& args_;
  const Rows& rows_;
  int32_t seq_, kv_len_;
  bool paged_, idle_;
  const T* from_;
  int row0_;
  uint32_t base_, swizzle_;
};

// A lane's two rows.
struct RowPair {
  int32_t position[2];  // of the query, in tokens
  int32_t first[2];     // first local block
  int32_t bit[2];       // of the query in its warp's masks
  float max[2], sum[2];
};

// The rows of a consumer warp and their queries, for MakeOperand. Rows of no query repeat the last one and are not
// written.
template <typename T, int kHeadDim>
__device__ __forceinline__ void LoadTileRows(const AttendArgs& args, const Tile& tile, int warp, int lane,
                                             RowPair& rows, uint4 (&words)[2][kRowPieces<kHeadDim>]) {
  const int r = lane / 4, c = lane % 4;
  const T* from[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = warp * 16 + r + 8 * e;
    const int32_t query = min(row / args.group, tile.queries - 1);
    rows.position[e] = tile.view.first_position() + tile.q0 + query;
    rows.first[e] = LocalFirst(args.p.shape, rows.position[e] / kBlock);
    rows.bit[e] = max(query - warp * 16 / args.group, 0);  // 0: a warp of no query, whose masks are empty
    rows.max[e] = -INFINITY;
    rows.sum[e] = 0.0f;
    from[e] = static_cast<const T*>(args.p.q.data) +
              (tile.view.q_start + static_cast<int64_t>(tile.q0 + query)) * args.p.q.token_stride +
              (static_cast<int64_t>(tile.head) * args.group + row % args.group) * args.p.q.head_stride;
  }
  LoadRowWords<kHeadDim>(from[0], from[1], c, words);
}

// Blocks that a row reads in part: nothing after the row itself, nothing before its window. `reach`: tokens before a
// query that it may read (Reach).
template <int kCount>
__device__ __forceinline__ void MaskPartialBlock(float (&s)[kCount][4], int at, int32_t block, const RowPair& rows,
                                                 int32_t reach, int c) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t before = rows.position[i / 2] - (block * kBlock + 8 * j + 2 * c + i % 2);
      if (static_cast<uint32_t>(before) > static_cast<uint32_t>(reach)) s[at + j][i] = -INFINITY;
    }
  }
}
__device__ __forceinline__ int32_t Reach(const Shape& shape) { return shape.window > 0 ? shape.window - 1 : INT32_MAX; }
// First block that the queries up to `position` read whole, as far as their window goes.
__device__ __forceinline__ int32_t WholeFrom(const Shape& shape, int32_t position) {
  return (shape.WindowBegin(position) + kBlock - 1) / kBlock;
}

// The weights of new scores, two tiles of 8 a block, at the rows' reference values, in place of the scores; they are
// added to the rows' sums. `reads(n, e)`: the lane's row e reads block n. Returns whether the weights of the warp
// stayed below 2^12, which costs no precision; else nothing is added, and the scores must be computed again, for
// Softmax.
template <int kCount, typename Reads>
__device__ __forceinline__ bool SoftmaxAt(float (&s)[kCount][4], const Reads& reads, RowPair& rows, float scale2) {
  float sum[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float sums[4] = {};
#pragma unroll
    for (int n = 0; n < kCount / 2; ++n) {
      const float shift = reads(n, e) ? -rows.max[e] : -INFINITY;
#pragma unroll
      for (int j = 2 * n; j < 2 * n + 2; ++j) {
        s[j][2 * e] = Exp2(fmaf(s[j][2 * e], scale2, shift));
        s[j][2 * e + 1] = Exp2(fmaf(s[j][2 * e + 1], scale2, shift));
        sums[j % 2 * 2] += s[j][2 * e];
        sums[j % 2 * 2 + 1] += s[j][2 * e + 1];
      }
    }
    sum[e] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  // A row that has read nothing has -inf for a reference value; then the sum is infinite or not a number.
  const bool low = __all_sync(~0u, sum[0] < 0x1p12f && sum[1] < 0x1p12f) != 0;
  rows.sum[0] += low ? sum[0] : 0.0f;
  rows.sum[1] += low ? sum[1] : 0.0f;
  return low;
}

// Online softmax over new scores, two tiles of 8 a block: s becomes the weights. `reads(n, e)`: the lane's row e reads
// block n. The reference value follows the maximum only when that is 2^8 above it: weights stay below 2^8, which costs
// no precision, and neither the maxima of the four lanes of a row nor a rescaling of the sums are needed most of the
// time. Returns whether they are not; else earlier sums must be multiplied by `factor`.
template <int kCount, typename Reads>
__device__ __forceinline__ bool Softmax(float (&s)[kCount][4], const Reads& reads, RowPair& rows, float scale2,
                                        float (&factor)[2]) {
  float most[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float x[kCount / 2];
#pragma unroll
    for (int n = 0; n < kCount / 2; ++n) {
      x[n] = fmaxf(fmaxf(s[2 * n][2 * e], s[2 * n][2 * e + 1]), fmaxf(s[2 * n + 1][2 * e], s[2 * n + 1][2 * e + 1]));
      x[n] = reads(n, e) ? x[n] : -INFINITY;
    }
#pragma unroll
    for (int step = kCount / 4; step > 0; step /= 2) {
#pragma unroll
      for (int n = 0; n < step; ++n) x[n] = fmaxf(x[n], x[n + step]);
    }
    most[e] = x[0] * scale2;
  }
  const bool keep = __all_sync(~0u, most[0] <= rows.max[0] + 8.0f && most[1] <= rows.max[1] + 8.0f) != 0;
  if (!keep) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      most[e] = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], 1));
      most[e] = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], 2));
      const float old = rows.max[e];
      if (most[e] > old + 8.0f) rows.max[e] = most[e];
      factor[e] = rows.max[e] == -INFINITY ? 1.0f : Exp2(old - rows.max[e]);
      rows.sum[e] *= factor[e];
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float base = rows.max[e] == -INFINITY ? 0.0f : rows.max[e];
    float sum[4] = {};
#pragma unroll
    for (int n = 0; n < kCount / 2; ++n) {
      const float shift = reads(n, e) ? -base : -INFINITY;
#pragma unroll
      for (int j = 2 * n; j < 2 * n + 2; ++j) {
        s[j][2 * e] = Exp2(fmaf(s[j][2 * e], scale2, shift));
        s[j][2 * e + 1] = Exp2(fmaf(s[j][2 * e + 1], scale2, shift));
        sum[j % 2 * 2] += s[j][2 * e];
        sum[j % 2 * 2 + 1] += s[j][2 * e + 1];
      }
    }
    rows.sum[e] += (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
  return keep;
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
  a[0] = Pack<T>(s[at][0], s[at][1]);
  a[1] = Pack<T>(s[at][2], s[at][3]);
  a[2] = Pack<T>(s[at + 1][0], s[at + 1][1]);
  a[3] = Pack<T>(s[at + 1][2], s[at + 1][3]);
}

// Writes out and lse of a consumer warp's rows.
template <typename T, int kHeadDim, int kTiles>
__device__ __forceinline__ void WriteTileRows(const AttendArgs& args, const Tile& tile, int warp, int lane,
                                              const RowPair& rows, const float (&o)[kTiles][4]) {
  const int r = lane / 4, c = lane % 4;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float sum = rows.sum[e];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int row = warp * 16 + r + 8 * e;
    const int32_t query = row / args.group;
    const bool writes = query < tile.queries;
    const int64_t at = tile.view.q_start + static_cast<int64_t>(tile.q0 + query);
    const int64_t head = static_cast<int64_t>(tile.head) * args.group + row % args.group;
    float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    float lse = sum > 0.0f ? rows.max[e] + log2f(sum) : -INFINITY;
    if (args.p.sinks != nullptr) {
      lse = JoinSink(lse, args.p.sinks[head], inverse);
    }
    T* out = static_cast<T*>(args.p.out.data) + at * args.p.out.token_stride + head * args.p.out.head_stride + 8 * c;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = min(j + i, kHeadDim / 8 - 1);  // beyond the row: not written
        words[i] = Pack<T>(o[n][2 * e] * inverse, o[n][2 * e + 1] * inverse);
      }
      const uint4 piece = ExchangeWords(make_uint4(words[0], words[1], words[2], words[3]), c);
      if (writes && HasPiece<kHeadDim>(j + c)) *reinterpret_cast<uint4*>(out + j * 8) = piece;
    }
    if (writes && args.p.lse != nullptr && c == 0) {
      args.p.lse[at * args.p.shape.num_q_heads + head] = lse * kLn2;
    }
  }
}

}  // namespace phsa::cuda

#endif  // PHSA_ATTENTION_CUDA_ATTEND_CUH_
