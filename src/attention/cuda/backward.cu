// Gradients of attention over a saved selection. Everything is summed in a fixed order: two runs give the same bits.
//
//   delta          rowsum(out · d_out)
//   inverse lists  for each key block the queries that chose it, ascending: count, scan, fill, order
//   dQ             query-outer. A thread block takes 128 rows (queries × heads of a group), reads the union of the
//                  blocks that its queries read, each once, and each warp skips those that none of its 16 rows reads.
//   chosen dK, dV  key-outer. One warp per key block and up to 2048 rows of its inverse list; partial sums in fp32.
//   band dK, dV    key-outer. A thread block takes 8 key blocks, one per warp, and runs over the queries that see them
//                  as local blocks, then adds the partial sums. Init blocks are seen by all later queries: those run
//                  before, split over ranges of queries.
//
// Two kernels instead of one for dQ and dK, dV cost seven products instead of five, but need neither atomics nor a
// partial dQ per chosen block (4 GB of traffic at 32k tokens).
#include <algorithm>

#include "attention/cuda/device.cuh"
#include "attention/cuda/wgmma.cuh"
#include "base/carver.h"

namespace phsa::cuda {
namespace {

constexpr int kListTile = 128;  // queries per thread block of count and fill, one a thread
constexpr int kScanThreads = 1024;
constexpr int kOrderThreads = 128;
constexpr int kOrderWindow = 32768;  // queries whose bits one pass of the ordering holds
constexpr int kItemRows = 2048;      // rows (queries × heads) per warp of the chosen part
constexpr int kChosenStages = 3;     // of 16 rows
constexpr int kKeyBlocks = 8;        // key blocks per thread block of the band, one a warp
constexpr int kBandRows = 64;        // rows per stage of the band
constexpr int kBandStages = 3;
template <int kDim>
constexpr int kPlainBandStages = kDim > 128 ? 2 : kBandStages;  // shared memory
constexpr int kInitRange = 2048;                                // queries per partial sum of the init blocks
constexpr int kQueryCopyWarps = 4;                              // warps of dQ that copy
constexpr int kQueryGroup = 4;                                  // key blocks that go together: one wait for four
constexpr int kQueryStages = 6;                                 // groups in flight
constexpr int kPlainQueryStages = 3;                            // and where shared memory is 99 KB
constexpr size_t kPartialBudget = size_t{512} << 20;  // bytes of partial sums at a time; KV heads go in passes

struct Workspace {
  float* delta;            // [token][q_head]
  int32_t* counts;         // [head][block]: queries that chose it; heads are those that choose, here and below
  int32_t* offsets;        // [head][block] + 1: where its list starts
  int32_t* cursors;        // [head][block]
  int32_t* item_starts;    // [head][block] + 1
  int32_t* item_blocks;    // [item]: head · blocks + block
  int32_t* unordered;      // [edge]: positions in their sequence
  int32_t* edges;          // [edge]: the same, ascending within a list
  float4* chosen;          // [item of the pass][dk, dv][n-tile][lane]: fragments
  float4* init;            // [range][kv_head][init tile][warp][dk, dv][n-tile][lane]
  int32_t blocks;          // block slots of the batch: sequence s starts at cu_q[s] / 16 + s
  int32_t max_items;       // of one pass
  int32_t heads_per_pass;  // KV heads
  int32_t item_edges;      // queries per item
  int32_t init_tiles;      // of kKeyBlocks
  int32_t choosers;        // heads of a KV head that choose apart: 1, or all of its query heads
  int32_t list_group;      // query heads that share a list
  uint32_t group_magic;    // division by the query heads of a KV head, see Divide
  uint32_t list_magic;     // and by those that share a list
};

uint32_t Magic(int divisor) {
  return divisor == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + divisor - 1) / divisor);
}

size_t Layout(const Shape& shape, const Batch& batch, void* memory, Workspace* w) {
  const bool chooses = shape.top_k > 0 && !shape.Dense((batch.max_kv_len - 1) / kBlock);
  const size_t heads = static_cast<size_t>(chooses ? shape.selection_heads : shape.num_kv_heads);
  w->blocks = batch.total_q / kBlock + batch.num_seqs;
  w->choosers = static_cast<int32_t>(heads) / shape.num_kv_heads;
  w->list_group = shape.Group() / w->choosers;
  w->item_edges = std::max(kItemRows / w->list_group, 1);
  w->group_magic = Magic(shape.Group());
  w->list_magic = Magic(w->list_group);
  const size_t lists = static_cast<size_t>(w->blocks) * heads;
  const size_t edges_per_head = chooses ? static_cast<size_t>(batch.total_q) * shape.top_k : 0;
  const size_t items_per_head = chooses ? w->blocks + edges_per_head / w->item_edges : 0;
  const size_t partial = size_t{2} * kBlock * shape.head_dim * sizeof(float);
  const size_t items_per_kv_head = items_per_head * w->choosers;
  w->heads_per_pass = shape.num_kv_heads;
  if (items_per_head > 0) {
    w->heads_per_pass = static_cast<int32_t>(
        std::clamp<size_t>(kPartialBudget / (items_per_kv_head * partial), 1, static_cast<size_t>(shape.num_kv_heads)));
  }
  w->max_items = static_cast<int32_t>(items_per_kv_head * w->heads_per_pass);
  const int64_t longest = BlocksFor(batch.max_kv_len, kBlock);
  w->init_tiles = static_cast<int32_t>((std::min<int64_t>(shape.init_blocks, longest) + kKeyBlocks - 1) / kKeyBlocks);
  const size_t ranges = static_cast<size_t>(batch.total_q) / kInitRange + batch.num_seqs;

  Carver carver(memory, kDeviceAlignment);
  w->delta = carver.Take<float>(static_cast<size_t>(batch.total_q) * shape.num_q_heads);
  w->counts = carver.Take<int32_t>(lists);
  w->offsets = carver.Take<int32_t>(lists + 1);
  w->cursors = carver.Take<int32_t>(lists);
  w->item_starts = carver.Take<int32_t>(lists + 1);
  w->item_blocks = carver.Take<int32_t>(items_per_head * heads);
  w->unordered = carver.Take<int32_t>(edges_per_head * heads);
  w->edges = carver.Take<int32_t>(edges_per_head * heads);
  const size_t partial_rows = partial / sizeof(float4);
  w->chosen = carver.Take<float4>(w->max_items * partial_rows);
  w->init = carver.Take<float4>(ranges * shape.num_kv_heads * w->init_tiles * kKeyBlocks * partial_rows);
  return carver.size();
}

// A stretch of one sequence.
struct Tile {
  int seq, index;     // the index-th tile of its sequence
  int start, length;  // of the sequence, in tokens
};

// The `index`-th tile when every sequence is cut into tiles of `size` tokens; false beyond the last. A warp calls it as
// one.
__device__ bool FindTile(const BackwardParams& p, int size, int index, Tile* out) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int base = 0; base < p.batch.num_seqs; base += 32) {
    const int seq = base + lane;
    const int start = seq < p.batch.num_seqs ? p.batch.cu_q[seq] : 0;
    const int length = seq < p.batch.num_seqs ? p.batch.cu_q[seq + 1] - start : 0;
    const int tiles = (length + size - 1) / size;
    int inclusive = tiles;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(kFullWarp, inclusive, offset);
      if (lane >= offset) inclusive += other;
    }
    const uint32_t reached = __ballot_sync(kFullWarp, before + inclusive > index);
    if (reached != 0) {
      const int owner = __ffs(static_cast<int>(reached)) - 1;
      out->seq = base + owner;
      out->index = index - before - __shfl_sync(kFullWarp, inclusive - tiles, owner);
      out->start = __shfl_sync(kFullWarp, start, owner);
      out->length = __shfl_sync(kFullWarp, length, owner);
      return true;
    }
    before += __shfl_sync(kFullWarp, inclusive, 31);
  }
  return false;
}

__device__ __forceinline__ int FirstBlock(int seq, int start) { return start / kBlock + seq; }

// The sequence of a block slot and the block's index in it.
__device__ void FindBlock(const BackwardParams& p, int slot, Tile* out) {
  const int lane = threadIdx.x % 32;
  int seq = -1;
  for (int base = 0; base < p.batch.num_seqs; base += 32) {
    const int s = base + lane;
    const uint32_t reached = __ballot_sync(kFullWarp, s < p.batch.num_seqs && FirstBlock(s, p.batch.cu_q[s]) <= slot);
    if (reached == 0) break;
    seq = base + 31 - __clz(static_cast<int>(reached));
  }
  out->seq = seq;
  out->start = p.batch.cu_q[seq];
  out->length = p.batch.cu_q[seq + 1] - out->start;
  out->index = slot - FirstBlock(seq, out->start);
}

// row / group for rows below 2^24.
__device__ __forceinline__ int Divide(int row, uint32_t magic) {
  return magic == 0 ? row : static_cast<int>(__umulhi(static_cast<uint32_t>(row), magic));
}

// Shared memory holds rows of kDim elements, kRowBytes apart; their 16-byte pieces are permuted so that both the copies
// and the loads of 8 x 8 matrices touch every bank once.
template <int kDim>
__device__ __forceinline__ uint32_t PieceOffset(int row, int piece) {
  return static_cast<uint32_t>(row * kRowBytes<kDim> + ((piece ^ (row & 7)) * 16));
}

// The right operand of a product whose columns are 16 rows in shared memory and whose inner index is the element: where
// the lane's matrix lies for the first 16 elements. Registers 0, 1: rows 0 to 7; 2, 3: rows 8 to 15.
__device__ __forceinline__ int2 ColumnsPlace() {
  const int lane = threadIdx.x % 32;
  return make_int2(lane / 16 * 8 + lane % 8, lane / 8 % 2);  // row, piece
}
// The same where the 16 rows are the inner index: for the first 16 columns, 8 a register pair.
__device__ __forceinline__ int2 InnerPlace() {
  const int lane = threadIdx.x % 32;
  return make_int2(lane / 8 % 2 * 8 + lane % 8, lane / 16);
}
// The address for the 16 elements or columns from 16·step on, given that of step 0: pieces are permuted by an exclusive
// or, so two bits of the address change. `slab` is what 64 columns are apart.
__device__ __forceinline__ uint32_t AtStep(uint32_t address, int step, int slab) {
  return (address ^ static_cast<uint32_t>(step % 4 * 32)) + static_cast<uint32_t>(step / 4 * slab);
}

// A left operand of 16 rows straight from global memory; rows at and beyond `rows` are zero.
template <typename T, int kDim>
__device__ __forceinline__ void LoadLeft(uint32_t (&a)[kDim / 16][4], const T* low, const T* high, bool low_valid,
                                         bool high_valid) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int c = step * 16 + part * 8 + column;
      a[step][part * 2] = low_valid ? *reinterpret_cast<const uint32_t*>(low + c) : 0;
      a[step][part * 2 + 1] = high_valid ? *reinterpret_cast<const uint32_t*>(high + c) : 0;
    }
  }
}

// ---- delta ----------------------------------------------------------------------------------------------------------

template <typename T, int kDim>
__global__ void __launch_bounds__(256) DeltaKernel(const __grid_constant__ BackwardParams p, Workspace w) {
  constexpr int kLanes = kRowLanes<kDim>;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x) / kLanes;
  const int piece = threadIdx.x % kLanes;
  const int64_t token = row / p.shape.num_q_heads;
  const int head = static_cast<int>(row % p.shape.num_q_heads);
  float sum = 0;
  if (token < p.batch.total_q && (kLanes * 8 == kDim || piece < kDim / 8)) {
    const uint4 a = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.out.data) + token * p.out.token_stride +
                                                    head * p.out.head_stride + piece * 8);
    const uint4 b = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.d_out.data) + token * p.d_out.token_stride +
                                                    head * p.d_out.head_stride + piece * 8);
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 u = Unpack<T>(x[i]), v = Unpack<T>(y[i]);
      sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
    }
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
  if (token < p.batch.total_q && piece == 0) w.delta[row] = sum;
}

// ---- inverse lists --------------------------------------------------------------------------------------------------

// Counts the queries of each block, or writes them into its list in any order. A thread takes a query, so that a warp's
// lanes hold neighbours, which choose alike: lanes with the same block share one atomic operation.
template <bool kFill>
__global__ void __launch_bounds__(kListTile) ListKernel(const __grid_constant__ BackwardParams p, Workspace w) {
  Tile tile;
  if (!FindTile(p, kListTile, blockIdx.x, &tile)) return;
  const int head = blockIdx.y, top_k = p.shape.top_k;
  const int query = tile.index * kListTile + threadIdx.x;
  const bool valid = query < tile.length;
  const int32_t* selection =
      p.selection + (static_cast<int64_t>(tile.start + (valid ? query : 0)) * p.shape.selection_heads + head) * top_k;
  int32_t* const to = (kFill ? w.cursors : w.counts) + head * w.blocks + FirstBlock(tile.seq, tile.start);
  const uint32_t before = (1u << (threadIdx.x % 32)) - 1;
  for (int i = 0; i < top_k; ++i) {
    const int block = valid ? selection[i] : -1;
    const uint32_t same = __match_any_sync(kFullWarp, block);
    const int leader = __ffs(static_cast<int>(same)) - 1;
    int at = 0;
    if (block >= 0 && (same & before) == 0) at = atomicAdd(to + block, __popc(same));
    if (kFill) {
      at = __shfl_sync(kFullWarp, at, leader) + __popc(same & before);
      if (block >= 0) w.unordered[at] = query;
    }
  }
}

// One thread block: where each list and its items start.
__global__ void __launch_bounds__(kScanThreads) ScanKernel(Workspace w, int lists) {
  __shared__ int2 warp_totals[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 carry = make_int2(0, 0);
  for (int base = 0; base < lists; base += kScanThreads * 4) {
    const int first = base + threadIdx.x * 4;
    int count[4], items[4];
    int2 own = make_int2(0, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      count[i] = first + i < lists ? w.counts[first + i] : 0;
      items[i] = (count[i] + w.item_edges - 1) / w.item_edges;
      own.x += count[i];
      own.y += items[i];
    }
    int2 inclusive = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int x = __shfl_up_sync(kFullWarp, inclusive.x, offset), y = __shfl_up_sync(kFullWarp, inclusive.y, offset);
      if (lane >= offset) {
        inclusive.x += x;
        inclusive.y += y;
      }
    }
    __syncthreads();
    if (lane == 31) warp_totals[warp] = inclusive;
    __syncthreads();
    const int2 totals = warp_totals[lane];
    int2 at;
    at.x = carry.x + __reduce_add_sync(kFullWarp, lane < warp ? totals.x : 0) + inclusive.x - own.x;
    at.y = carry.y + __reduce_add_sync(kFullWarp, lane < warp ? totals.y : 0) + inclusive.y - own.y;
    carry.x += __reduce_add_sync(kFullWarp, totals.x);
    carry.y += __reduce_add_sync(kFullWarp, totals.y);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i >= lists) break;
      w.offsets[first + i] = at.x;
      w.cursors[first + i] = at.x;
      w.item_starts[first + i] = at.y;
      for (int n = 0; n < items[i]; ++n) w.item_blocks[at.y + n] = first + i;
      at.x += count[i];
      at.y += items[i];
    }
  }
  if (threadIdx.x == 0) {
    w.offsets[lists] = carry.x;
    w.item_starts[lists] = carry.y;
  }
}

// Orders one list: a query is in it at most once, so a bit per query does.
__global__ void __launch_bounds__(kOrderThreads) OrderKernel(const __grid_constant__ BackwardParams p, Workspace w) {
  constexpr int kWords = kOrderWindow / 32, kPerThread = kWords / kOrderThreads;
  __shared__ uint32_t bits[kWords];
  __shared__ int warp_totals[kOrderThreads / 32];
  const int list = blockIdx.y * w.blocks + blockIdx.x;
  const int begin = w.offsets[list], end = w.offsets[list + 1];
  if (begin == end) return;
  Tile tile;
  FindBlock(p, blockIdx.x, &tile);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int at = begin;
  for (int window = tile.index * kBlock / kOrderWindow * kOrderWindow; window < tile.length; window += kOrderWindow) {
    for (int i = threadIdx.x; i < kWords; i += kOrderThreads) bits[i] = 0;
    __syncthreads();
    for (int i = begin + threadIdx.x; i < end; i += kOrderThreads) {
      const int query = w.unordered[i] - window;
      if (query >= 0 && query < kOrderWindow) atomicOr(&bits[query / 32], 1u << (query % 32));
    }
    __syncthreads();
    int own = 0;
    uint32_t mine[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      mine[i] = bits[threadIdx.x * kPerThread + i];
      own += __popc(mine[i]);
    }
    int inclusive = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(kFullWarp, inclusive, offset);
      if (lane >= offset) inclusive += other;
    }
    if (lane == 31) warp_totals[warp] = inclusive;
    __syncthreads();
    int to = at + inclusive - own, total = 0;
    for (int i = 0; i < kOrderThreads / 32; ++i) {
      if (i < warp) to += warp_totals[i];
      total += warp_totals[i];
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      uint32_t word = mine[i];
      while (word != 0) {
        w.edges[to++] = window + (threadIdx.x * kPerThread + i) * 32 + __ffs(static_cast<int>(word)) - 1;
        word &= word - 1;
      }
    }
    at += total;
    __syncthreads();
  }
}

// ---- dK, dV ---------------------------------------------------------------------------------------------------------

// The sums of a key block's gradients, as a warp's fragments: lane l holds keys l/4 and l/4 + 8.
template <typename T, int kDim>
struct KeyGradients {
  float dk[kDim / 8][4], dv[kDim / 8][4];

  __device__ void Clear() {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dk[n][i] = dv[n][i] = 0;
    }
  }
  static constexpr int kPartial = 2 * kDim / 8 * 32;  // float4 per partial sum

  __device__ void Store(float4* partial) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      __stcs(partial + n * 32 + lane, make_float4(dk[n][0], dk[n][1], dk[n][2], dk[n][3]));
      __stcs(partial + (kDim / 8 + n) * 32 + lane, make_float4(dv[n][0], dv[n][1], dv[n][2], dv[n][3]));
    }
  }
  __device__ void AddPartial(const float4* partial) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float4 x = __ldcs(partial + n * 32 + lane), y = __ldcs(partial + (kDim / 8 + n) * 32 + lane);
      dk[n][0] += x.x;
      dk[n][1] += x.y;
      dk[n][2] += x.z;
      dk[n][3] += x.w;
      dv[n][0] += y.x;
      dv[n][1] += y.y;
      dv[n][2] += y.z;
      dv[n][3] += y.w;
    }
  }
  __device__ void Finish(const BackwardParams& p, const Tile& tile, int block, int kv_head) const {
    const int lane = threadIdx.x % 32;
    const float scale = p.shape.scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = block * kBlock + lane / 4 + half * 8;
      if (position >= tile.length) continue;
      const int64_t token = tile.start + position;
      T* d_k = static_cast<T*>(p.d_k.data) + token * p.d_k.token_stride + kv_head * p.d_k.head_stride + lane % 4 * 2;
      T* d_v = static_cast<T*>(p.d_v.data) + token * p.d_v.token_stride + kv_head * p.d_v.head_stride + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        *reinterpret_cast<uint32_t*>(d_k + n * 8) = Pack<T>(dk[n][half * 2] * scale, dk[n][half * 2 + 1] * scale);
        *reinterpret_cast<uint32_t*>(d_v + n * 8) = Pack<T>(dv[n][half * 2], dv[n][half * 2 + 1]);
      }
    }
  }
};

// One warp's key block with its keys and values as left operands.
template <typename T, int kDim>
struct KeyBlock : KeyGradients<T, kDim> {
  using KeyGradients<T, kDim>::dk;
  using KeyGradients<T, kDim>::dv;
  uint32_t k[kDim / 16][4], v[kDim / 16][4];

  __device__ void Start(const BackwardParams& p, const Tile& tile, int block, int kv_head) {
    const int low = block * kBlock + static_cast<int>(threadIdx.x) % 32 / 4, high = low + 8;
    const int64_t token = tile.start + low;
    const T* keys = static_cast<const T*>(p.k.data) + token * p.k.token_stride + kv_head * p.k.head_stride;
    const T* values = static_cast<const T*>(p.v.data) + token * p.v.token_stride + kv_head * p.v.head_stride;
    LoadLeft<T, kDim>(k, keys, keys + 8 * p.k.token_stride, low < tile.length, high < tile.length);
    LoadLeft<T, kDim>(v, values, values + 8 * p.v.token_stride, low < tile.length, high < tile.length);
    this->Clear();
  }

  // Adds 16 rows of q and d_out in shared memory. `visible(key, row)` says whether a row sees a key (0 to 15 each) and
  // is asked only where `masked`. Rows of zeros add nothing, whatever their lse.
  template <typename Visible>
  __device__ void Add(uint32_t q, uint32_t d_out, const float* lse, const float* delta, float scale_log2, bool masked,
                      Visible visible) {
    const int lane = threadIdx.x % 32;
    const uint32_t columns = PieceOffset<kDim>(ColumnsPlace().x, ColumnsPlace().y);
    const uint32_t inner = PieceOffset<kDim>(InnerPlace().x, InnerPlace().y);
    float s[2][4] = {}, d[2][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t b[4];
      LoadMatrix(b, AtStep(q + columns, step, 128));
      Mma<T>(s[0], k[step][0], k[step][1], k[step][2], k[step][3], b[0], b[1]);
      Mma<T>(s[1], k[step][0], k[step][1], k[step][2], k[step][3], b[2], b[3]);
      LoadMatrix(b, AtStep(d_out + columns, step, 128));
      Mma<T>(d[0], v[step][0], v[step][1], v[step][2], v[step][3], b[0], b[1]);
      Mma<T>(d[1], v[step][0], v[step][1], v[step][2], v[step][3], b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int row = n * 8 + lane % 4 * 2;
      const float2 sums = *reinterpret_cast<const float2*>(lse + row);
      const float2 deltas = *reinterpret_cast<const float2*>(delta + row);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x = Exp2(s[n][i] * scale_log2 - (i % 2 == 0 ? sums.x : sums.y) * kLog2e);
        if (masked && !visible(lane / 4 + i / 2 * 8, row + i % 2)) x = 0;
        s[n][i] = x;
        d[n][i] = x * (d[n][i] - (i % 2 == 0 ? deltas.x : deltas.y));
      }
    }
    const uint32_t a[4] = {Pack<T>(s[0][0], s[0][1]), Pack<T>(s[0][2], s[0][3]), Pack<T>(s[1][0], s[1][1]),
                           Pack<T>(s[1][2], s[1][3])};
    const uint32_t e[4] = {Pack<T>(d[0][0], d[0][1]), Pack<T>(d[0][2], d[0][3]), Pack<T>(d[1][0], d[1][1]),
                           Pack<T>(d[1][2], d[1][3])};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t b[4];
      LoadMatrixTransposed(b, AtStep(d_out + inner, step, 128));
      Mma<T>(dv[step * 2], a[0], a[1], a[2], a[3], b[0], b[1]);
      Mma<T>(dv[step * 2 + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      LoadMatrixTransposed(b, AtStep(q + inner, step, 128));
      Mma<T>(dk[step * 2], e[0], e[1], e[2], e[3], b[0], b[1]);
      Mma<T>(dk[step * 2 + 1], e[0], e[1], e[2], e[3], b[2], b[3]);
    }
  }
};

__device__ __forceinline__ void CopyAsync4(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

template <int kDim, int kRows>
struct RowStage {  // rows of q and d_out, and what belongs to them
  static constexpr int kQ = 0, kDOut = kRows * kRowBytes<kDim>, kLse = 2 * kDOut, kDelta = kLse + kRows * 4;
  static constexpr int kBytes = kDelta + kRows * 4;
};

// One warp per item: the queries of a list go through its key block 16 rows at a time.
template <typename T, int kDim>
__global__ void __launch_bounds__(32, 8)
    ChosenKernel(const __grid_constant__ BackwardParams p, Workspace w, int head_begin, int head_end) {
  using Stage = RowStage<kDim, 16>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int first_item = w.item_starts[head_begin * w.choosers * w.blocks];
  const int item = first_item + static_cast<int>(blockIdx.x);
  if (item >= w.item_starts[head_end * w.choosers * w.blocks]) return;
  const int list = w.item_blocks[item];
  const int chooser = list / w.blocks, kv_head = chooser / w.choosers;
  Tile tile;
  FindBlock(p, list % w.blocks, &tile);
  const int begin = w.offsets[list] + (item - w.item_starts[list]) * w.item_edges;
  const int edges = min(w.item_edges, w.offsets[list + 1] - begin);
  const int group = w.list_group;
  const int rows = edges * group, visits = (rows + 15) / 16;
  const int lane = threadIdx.x;

  KeyBlock<T, kDim> block;
  block.Start(p, tile, tile.index, kv_head);

  const uint32_t base = SharedAddress(shared);
  // Lane l copies 16-byte pieces l%4, l%4 + 4, … of rows l/4 and l/4 + 8: four lanes a row keep the addresses few, at
  // 64 bytes a request.
  struct Rows {
    int token[2], head[2];  // -1: no row
  };
  auto rows_of = [&](int visit) {
    Rows out;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = visit * 16 + lane / 4 + half * 8;
      const int edge = Divide(row, w.list_magic);
      out.token[half] = row < rows ? tile.start + w.edges[begin + edge] : -1;
      out.head[half] = chooser * group + row - edge * group;
    }
    return out;
  };
  uint32_t offsets[kRowPieces<kDim>];
#pragma unroll
  for (int j = 0; j < kRowPieces<kDim>; ++j) offsets[j] = PieceOffset<kDim>(lane / 4, lane % 4 + j * 4);
  auto load = [&](int visit, const Rows& of) {
    const uint32_t to = base + visit % kChosenStages * Stage::kBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool valid = of.token[half] >= 0;
      const int64_t token = max(of.token[half], 0);
      const T* q =
          static_cast<const T*>(p.q.data) + token * p.q.token_stride + of.head[half] * p.q.head_stride + lane % 4 * 8;
      const T* d_out = static_cast<const T*>(p.d_out.data) + token * p.d_out.token_stride +
                       of.head[half] * p.d_out.head_stride + lane % 4 * 8;
      const uint32_t row = to + half * 8 * kRowBytes<kDim>;
#pragma unroll
      for (int j = 0; j < kRowPieces<kDim>; ++j) {
        if (!HasPiece<kDim>(lane % 4 + 4 * j)) continue;
        CopyAsync16(row + Stage::kQ + offsets[j], q + j * 32, valid);
        CopyAsync16(row + Stage::kDOut + offsets[j], d_out + j * 32, valid);
      }
      if (lane % 4 < 2) {
        CopyAsync4(to + (lane % 4 == 0 ? Stage::kLse : Stage::kDelta) + (lane / 4 + half * 8) * 4,
                   (lane % 4 == 0 ? p.lse : w.delta) + token * p.shape.num_q_heads + of.head[half], valid);
      }
    }
  };
  Rows next = rows_of(0);
#pragma unroll
  for (int i = 0; i < kChosenStages - 1; ++i) {
    const Rows now = next;
    next = rows_of(i + 1);
    if (i < visits) load(i, now);
    CommitCopies();
  }
  const float scale_log2 = p.shape.scale * kLog2e;
  for (int visit = 0; visit < visits; ++visit) {
    WaitCopies<kChosenStages - 2>();
    __syncwarp();
    const int ahead = visit + kChosenStages - 1;
    const Rows now = next;
    next = rows_of(ahead + 1);
    if (ahead < visits) load(ahead, now);
    CommitCopies();
    const unsigned char* stage = shared + visit % kChosenStages * Stage::kBytes;
    const uint32_t at = base + visit % kChosenStages * Stage::kBytes;
    block.Add(at + Stage::kQ, at + Stage::kDOut, reinterpret_cast<const float*>(stage + Stage::kLse),
              reinterpret_cast<const float*>(stage + Stage::kDelta), scale_log2, false, [](int, int) { return true; });
    __syncwarp();
  }
  block.Store(w.chosen + static_cast<int64_t>(blockIdx.x) * KeyBlock<T, kDim>::kPartial);
}

// The queries of a thread block of the band.
struct BandRange {
  Tile tile;
  int key_tile;   // of kKeyBlocks blocks
  int local_end;  // queries from here on see init blocks only
  int begin, end;
};

// False where there is nothing to do. With kInit: the queries beyond local_end, a range of them per thread block.
template <bool kInit>
__device__ bool FindBand(const BackwardParams& p, BandRange* out) {
  const Shape& m = p.shape;
  if (!FindTile(p, kInit ? kInitRange : kKeyBlocks * kBlock, blockIdx.x, &out->tile)) return false;
  const Tile& tile = out->tile;
  out->key_tile = kInit ? static_cast<int>(blockIdx.z) : tile.index;
  const int64_t last_local = int64_t{m.LocalQueryEnd((out->key_tile + 1) * kKeyBlocks - 1)} * kBlock;
  out->local_end = static_cast<int>(min(static_cast<int64_t>(tile.length), last_local));
  out->begin = kInit ? max(out->local_end, tile.index * kInitRange) : out->key_tile * kKeyBlocks * kBlock;
  out->end = kInit ? min(tile.length, (tile.index + 1) * kInitRange) : out->local_end;
  return !kInit || out->begin < out->end;
}

// Adds the partial sums of a key block to its own and writes its gradients, or leaves a partial sum itself.
template <bool kInit, typename T, int kDim>
__device__ void FinishBand(const BackwardParams& p, const Workspace& w, const BandRange& range, int kv_head,
                           int head_begin, KeyGradients<T, kDim>* sums) {
  constexpr int kPartial = KeyGradients<T, kDim>::kPartial;
  const Shape& m = p.shape;
  const Tile& tile = range.tile;
  const int warp = threadIdx.x / 32, block = range.key_tile * kKeyBlocks + warp;
  auto init_partial = [&](int index) {
    const int64_t slot = tile.start / kInitRange + tile.seq + index;
    return w.init +
           (((slot * p.shape.num_kv_heads + kv_head) * w.init_tiles + range.key_tile) * kKeyBlocks + warp) * kPartial;
  };
  if (kInit) {
    sums->Store(init_partial(tile.index));
    return;
  }
  if (block < m.init_blocks) {
    for (int i = range.local_end / kInitRange; i * kInitRange < tile.length; ++i) {
      // The ranges that the launch before had queries for.
      if (max(range.local_end, i * kInitRange) < min(tile.length, (i + 1) * kInitRange)) {
        sums->AddPartial(init_partial(i));
      }
    }
  }
  if (w.max_items > 0) {
    const int first_item = w.item_starts[head_begin * w.choosers * w.blocks];
    for (int chooser = kv_head * w.choosers; chooser < (kv_head + 1) * w.choosers; ++chooser) {
      const int list = chooser * w.blocks + FirstBlock(tile.seq, tile.start) + block;
      for (int item = w.item_starts[list]; item < w.item_starts[list + 1]; ++item) {
        sums->AddPartial(w.chosen + static_cast<int64_t>(item - first_item) * kPartial);
      }
    }
  }
  sums->Finish(p, tile, block, kv_head);
}

// The band for GPUs without a warpgroup's products: as BandKernel below, with each warp's own.
template <typename T, int kDim, bool kInit>
__global__ void __launch_bounds__(kKeyBlocks * 32, 1)
    PlainBandKernel(const __grid_constant__ BackwardParams p, Workspace w, int head_begin) {
  using Stage = RowStage<kDim, kBandRows>;
  constexpr int kThreads = kKeyBlocks * 32, kLanes = kRowLanes<kDim>, kStages = kPlainBandStages<kDim>;
  extern __shared__ unsigned char shared[];
  const Shape& m = p.shape;
  const int kv_head = head_begin + blockIdx.y;
  const int tid = threadIdx.x, warp = tid / 32;
  BandRange range;
  if (!FindBand<kInit>(p, &range)) return;
  const Tile& tile = range.tile;
  const int block = range.key_tile * kKeyBlocks + warp;
  const int group = p.shape.Group();
  const int rows = (range.end - range.begin) * group, stages = (rows + kBandRows - 1) / kBandRows;
  const bool has_keys = block * kBlock < tile.length && (!kInit || block < m.init_blocks);
  KeyBlock<T, kDim> keys;
  keys.Start(p, tile, block, kv_head);

  const uint32_t base = (SharedAddress(shared) + 127) / 128 * 128;
  const unsigned char* const aligned = shared + (base - SharedAddress(shared));
  auto load = [&](int stage) {
    const uint32_t to = base + stage % kStages * Stage::kBytes;
    if (tid < 2 * kBandRows) {
      const int r = tid % kBandRows, row = stage * kBandRows + r;
      const int query = Divide(row, w.group_magic);
      const int64_t sum = static_cast<int64_t>(tile.start + range.begin + query) * p.shape.num_q_heads +
                          kv_head * group + row - query * group;
      const bool valid = row < rows;
      CopyAsync4(to + (tid < kBandRows ? Stage::kLse : Stage::kDelta) + r * 4,
                 (tid < kBandRows ? p.lse : w.delta) + (valid ? sum : 0), valid);
    }
#pragma unroll
    for (int i = 0; i < kBandRows * kLanes / kThreads; ++i) {
      const int r = tid / kLanes + i * (kThreads / kLanes), piece = tid % kLanes;
      if (kLanes * 8 != kDim && piece >= kDim / 8) break;
      const int row = stage * kBandRows + r;
      const int query = Divide(row, w.group_magic);
      const bool valid = row < rows;
      const int64_t token = valid ? tile.start + range.begin + query : 0;
      const int head = valid ? kv_head * group + row - query * group : 0;
      CopyAsync16(to + Stage::kQ + PieceOffset<kDim>(r, piece),
                  static_cast<const T*>(p.q.data) + token * p.q.token_stride + head * p.q.head_stride + piece * 8,
                  valid);
      CopyAsync16(
          to + Stage::kDOut + PieceOffset<kDim>(r, piece),
          static_cast<const T*>(p.d_out.data) + token * p.d_out.token_stride + head * p.d_out.head_stride + piece * 8,
          valid);
    }
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < stages) load(i);
    CommitCopies();
  }
  const float scale_log2 = m.scale * kLog2e;
  for (int stage = 0; stage < stages; ++stage) {
    WaitCopies<kStages - 2>();
    __syncthreads();
    if (stage + kStages - 1 < stages) load(stage + kStages - 1);
    CommitCopies();
    const unsigned char* data = aligned + stage % kStages * Stage::kBytes;
    const uint32_t at = base + stage % kStages * Stage::kBytes;
    if (!has_keys) continue;
#pragma unroll 1
    for (int visit = 0; visit < kBandRows / 16; ++visit) {
      const int row = stage * kBandRows + visit * 16;
      if (row >= rows) break;
      const int first = range.begin + Divide(row, w.group_magic);
      const int last = range.begin + Divide(min(row + 15, rows - 1), w.group_magic);
      // Does every row see the whole block, or none of it?
      const bool beyond = !m.Always(block, first / kBlock);
      if (last < block * kBlock || beyond) continue;
      const bool all = first >= block * kBlock + kBlock - 1 && m.Always(block, last / kBlock);
      keys.Add(at + Stage::kQ + visit * 16 * kRowBytes<kDim>, at + Stage::kDOut + visit * 16 * kRowBytes<kDim>,
               reinterpret_cast<const float*>(data + Stage::kLse) + visit * 16,
               reinterpret_cast<const float*>(data + Stage::kDelta) + visit * 16, scale_log2, !all,
               [&](int key, int r) {
                 const int query = range.begin + Divide(row + r, w.group_magic);
                 return block * kBlock + key <= query && m.Always(block, query / kBlock);
               });
    }
  }
  WaitCopies<0>();
  if (has_keys) FinishBand<kInit, T, kDim>(p, w, range, kv_head, head_begin, &keys);
}

template <int kDim>
struct BandShared {
  static constexpr int kTile = 64 * kDim * 2;                 // 64 rows
  static constexpr int kRows = 4 * kTile;                     // after the keys and values of both warpgroups: stages
  static constexpr int kStage = 2 * kTile;                    // q, d_out
  static constexpr int kSums = kRows + kBandStages * kStage;  // lse and delta of the stages
  static constexpr int kBytes = kSums + kBandStages * 2 * kBandRows * 4 + 1024;  // for alignment
};

// Eight key blocks, one per warp, against a run of queries that all of them may see. With kInit the queries beyond
// those, for init blocks only: a range of them per thread block, whose sums go to the workspace. A warpgroup multiplies
// 64 keys by 64 rows at a time; keys are the rows of its products, so that the probabilities come out as the left
// operand of the next ones and never leave the registers.
template <typename T, int kDim, bool kInit>
__global__ void __launch_bounds__(kKeyBlocks * 32, 1)
    BandKernel(const __grid_constant__ BackwardParams p, Workspace w, int head_begin) {
#ifdef PHSA_SM90A
  using Shared = BandShared<kDim>;
  constexpr int kThreads = kKeyBlocks * 32, kPieces = kDim / 8;
  extern __shared__ unsigned char shared[];
  const Shape& m = p.shape;
  const int kv_head = head_begin + blockIdx.y;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, warpgroup = tid / 128;
  BandRange range;
  if (!FindBand<kInit>(p, &range)) return;
  const Tile& tile = range.tile;
  const int key_tile = range.key_tile, query_begin = range.begin, query_end = range.end;
  const int block = key_tile * kKeyBlocks + warp;
  const int group = p.shape.Group();
  const int rows = (query_end - query_begin) * group, stages = (rows + kBandRows - 1) / kBandRows;
  const bool has_keys = block * kBlock < tile.length && (!kInit || block < m.init_blocks);

  const uint32_t base = (SharedAddress(shared) + 1023) / 1024 * 1024;
  const unsigned char* const aligned = shared + (base - SharedAddress(shared));
  const uint32_t keys = base + warpgroup * 2 * Shared::kTile, values = keys + Shared::kTile;
#pragma unroll
  for (int i = 0; i < 128 * kPieces / kThreads; ++i) {
    const int r = tid / kPieces + i * (kThreads / kPieces), piece = tid % kPieces;
    const int position = key_tile * kKeyBlocks * kBlock + r;
    const bool valid = position < tile.length;
    const int64_t token = tile.start + (valid ? position : 0);
    const uint32_t to = base + r / 64 * 2 * Shared::kTile + TileOffset(r % 64, piece, 64 * 128);
    CopyAsync16(to, static_cast<const T*>(p.k.data) + token * p.k.token_stride + kv_head * p.k.head_stride + piece * 8,
                valid);
    CopyAsync16(to + Shared::kTile,
                static_cast<const T*>(p.v.data) + token * p.v.token_stride + kv_head * p.v.head_stride + piece * 8,
                valid);
  }
  auto load = [&](int stage) {
    const uint32_t to = base + Shared::kRows + stage % kBandStages * Shared::kStage;
    if (tid < 2 * kBandRows) {
      const int r = tid % kBandRows, row = stage * kBandRows + r;
      const int query = Divide(row, w.group_magic);
      const int64_t sum = static_cast<int64_t>(tile.start + query_begin + query) * p.shape.num_q_heads +
                          kv_head * group + row - query * group;
      const bool valid = row < rows;
      CopyAsync4(base + Shared::kSums + (stage % kBandStages * 2 * kBandRows + tid) * 4,
                 (tid < kBandRows ? p.lse : w.delta) + (valid ? sum : 0), valid);
    }
#pragma unroll
    for (int i = 0; i < kBandRows * kPieces / kThreads; ++i) {
      const int r = tid / kPieces + i * (kThreads / kPieces), piece = tid % kPieces;
      const int row = stage * kBandRows + r;
      const int query = Divide(row, w.group_magic);
      const bool valid = row < rows;
      const int64_t token = valid ? tile.start + query_begin + query : 0;
      const int head = valid ? kv_head * group + row - query * group : 0;
      CopyAsync16(to + TileOffset(r, piece, 64 * 128),
                  static_cast<const T*>(p.q.data) + token * p.q.token_stride + head * p.q.head_stride + piece * 8,
                  valid);
      CopyAsync16(
          to + Shared::kTile + TileOffset(r, piece, 64 * 128),
          static_cast<const T*>(p.d_out.data) + token * p.d_out.token_stride + head * p.d_out.head_stride + piece * 8,
          valid);
    }
  };
#pragma unroll
  for (int i = 0; i < kBandStages - 1; ++i) {
    if (i < stages) load(i);
    CommitCopies();
  }
  KeyGradients<T, kDim> sums;
  sums.Clear();
  const float scale_log2 = m.scale * kLog2e;
  const int low_block = key_tile * kKeyBlocks + warpgroup * 4, high_block = low_block + 3;
  for (int stage = 0; stage < stages; ++stage) {
    const int slot = stage % kBandStages;
    WaitCopies<kBandStages - 2>();
    FenceAsyncProxy();
    __syncthreads();
    const int first = query_begin + Divide(stage * kBandRows, w.group_magic);
    const int last = query_begin + Divide(min(stage * kBandRows + kBandRows, rows) - 1, w.group_magic);
    // Is there a block of the warpgroup that some row sees?
    const bool beyond = low_block >= m.init_blocks && !m.Always(high_block, first / kBlock);
    const bool some = last >= low_block * kBlock && !beyond;
    const uint32_t q = base + Shared::kRows + slot * Shared::kStage, d_out = q + Shared::kTile;
    auto refill = [&]() {
      if (stage + kBandStages - 1 < stages) load(stage + kBandStages - 1);
      CommitCopies();
    };
    if (!some) {
      refill();
      continue;
    }
    float s[8][4], d[8][4];
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      WgmmaShared<T>(s, AlongElements(keys, step, 64 * 128), AlongElements(q, step, 64 * 128), step > 0);
    }
    WgmmaCommit();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      WgmmaShared<T>(d, AlongElements(values, step, 64 * 128), AlongElements(d_out, step, 64 * 128), step > 0);
    }
    WgmmaCommit();
    refill();  // the copies start behind the products
    const float* lse = reinterpret_cast<const float*>(aligned + Shared::kSums) + slot * 2 * kBandRows;
    const float* delta = lse + kBandRows;
    const bool all = first >= block * kBlock + kBlock - 1 && m.Always(block, last / kBlock);
    WgmmaWait<1>();
    Pin(s);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 x = *reinterpret_cast<const float2*>(lse + n * 8 + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = Exp2(s[n][i] * scale_log2 - (i % 2 == 0 ? x.x : x.y) * kLog2e);
    }
    if (!all) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int query = query_begin + Divide(stage * kBandRows + n * 8 + lane % 4 * 2 + i, w.group_magic);
          const bool near = m.Always(block, query / kBlock);
          const int key = block * kBlock + lane / 4;
          if (!near || key > query) s[n][i] = 0;
          if (!near || key + 8 > query) s[n][i + 2] = 0;
        }
      }
    }
    uint32_t a[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[step][i] = Pack<T>(s[step * 2 + i / 2][i % 2 * 2], s[step * 2 + i / 2][i % 2 * 2 + 1]);
    }
    Pin(sums.dv);
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < 4; ++step) Wgmma<T, true>(sums.dv, a[step], AlongRows(d_out, step, 64 * 128), 1);
    WgmmaCommit();
    WgmmaWait<1>();
    Pin(d);
    uint32_t e[4][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 x = *reinterpret_cast<const float2*>(delta + n * 8 + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) d[n][i] = s[n][i] * (d[n][i] - (i % 2 == 0 ? x.x : x.y));
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        e[step][i] = Pack<T>(d[step * 2 + i / 2][i % 2 * 2], d[step * 2 + i / 2][i % 2 * 2 + 1]);
    }
    Pin(sums.dk);
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < 4; ++step) Wgmma<T, true>(sums.dk, e[step], AlongRows(q, step, 64 * 128), 1);
    WgmmaCommit();
    WgmmaWait<0>();
    Pin(sums.dv);
    Pin(sums.dk);
  }

  if (has_keys) FinishBand<kInit, T, kDim>(p, w, range, kv_head, head_begin, &sums);
#else
  __trap();  // never launched there
#endif
}

// ---- dQ -------------------------------------------------------------------------------------------------------------

// A ring of groups of four key blocks, in two slabs of keys (or, at head_dim 64, one) and as many of values: a group is
// one tile of 64 rows to a warpgroup's product.
template <int kDim, bool kHopper>
struct QueryShared {
  static_assert(kQueryGroup == kQueryCopyWarps && kQueryGroup * kBlock == 64);
  static constexpr int kStages = kHopper ? kQueryStages : kDim > 128 ? 2 : kPlainQueryStages;
  static constexpr int kWarps = kDim > 128 ? 4 : 8;  // that multiply
  static constexpr int kThreads = (kWarps + kQueryCopyWarps) * 32;
  static constexpr int kRows = kStages * kQueryGroup * kBlock;
  static constexpr int kPanel = kRows * 128;
  static constexpr int kV = kRows * kRowBytes<kDim>;
  static constexpr int kBarriers = 2 * kV;                             // full, then empty
  static constexpr int kBlockIds = kBarriers + 2 * kStages * 8;        // of the groups
  static constexpr int kBits = kBlockIds + kStages * kQueryGroup * 4;  // one per block of the sequence
  static constexpr int kAlignment = 1024;
};

// What a place in a group holds beside a block's index.
constexpr int kPlaceBand = 1 << 30;  // with the index: a block of the band; all of a group are
constexpr int kPlaceEmpty = -2;
constexpr int kPlaceEnd = -1;  // in a group's first place

// A warp's 16 rows of dQ: row r is query r / group of the warp, head r % group.
template <typename T, int kDim, bool kHopper>
struct QueryRows {
  using Shared = QueryShared<kDim, kHopper>;
  uint32_t q[kDim / 16][4], d_out[kDim / 16][4];
  float dq[kDim / 8][4];
  // Of the lane's two rows: position, lse times log2(e), delta.
  int position[2];
  float lse[2], delta[2];
  uint32_t columns, inner;  // where the lane's matrices lie in a stage

  __device__ void Start() {
    columns = TileOffset(ColumnsPlace().x, ColumnsPlace().y, Shared::kPanel);
    inner = TileOffset(InnerPlace().x, InnerPlace().y, Shared::kPanel);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dq[n][i] = 0;
    }
  }

  // Adds kCount blocks at once: with two, eight chains of products hide each other's latency, with one only four.
  // Bit 2·i + half of `visible` says whether block i is read by that row. Where `diagonal` a row may lie inside the
  // first block, whose first key is at `first_key`.
  template <int kCount>
  __device__ void Add(const uint32_t (&k)[kCount], uint32_t visible, float scale_log2, bool diagonal = false,
                      int first_key = 0) {
    float s[kCount][2][4] = {}, d[kCount][2][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t b[4];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        LoadMatrix(b, AtStep(k[i] + columns, step, Shared::kPanel));
        Mma<T>(s[i][0], q[step][0], q[step][1], q[step][2], q[step][3], b[0], b[1]);
        Mma<T>(s[i][1], q[step][0], q[step][1], q[step][2], q[step][3], b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        LoadMatrix(b, AtStep(k[i] + columns, step, Shared::kPanel) + Shared::kV);
        Mma<T>(d[i][0], d_out[step][0], d_out[step][1], d_out[step][2], d_out[step][3], b[0], b[1]);
        Mma<T>(d[i][1], d_out[step][0], d_out[step][1], d_out[step][2], d_out[step][3], b[2], b[3]);
      }
    }
    uint32_t a[kCount][4];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // A row that does not read the block has an infinite sum there: its probabilities are zero.
      const float sums[2] = {(visible >> (2 * i) & 1) != 0 ? lse[0] : INFINITY,
                             (visible >> (2 * i + 1) & 1) != 0 ? lse[1] : INFINITY};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float probability = Exp2(s[i][n][e] * scale_log2 - sums[e / 2]);
          if (diagonal && first_key + n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + e % 2 > position[e / 2]) {
            probability = 0;
          }
          d[i][n][e] = probability * (d[i][n][e] - delta[e / 2]);
        }
        a[i][n * 2] = Pack<T>(d[i][n][0], d[i][n][1]);
        a[i][n * 2 + 1] = Pack<T>(d[i][n][2], d[i][n][3]);
      }
    }
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        uint32_t b[4];
        LoadMatrixTransposed(b, AtStep(k[i] + inner, step, Shared::kPanel));
        Mma<T>(dq[step * 2], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
        Mma<T>(dq[step * 2 + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
      }
    }
  }

#ifdef PHSA_SM90A
  // Adds a group of four blocks with the whole warpgroup's products: 64 rows by 64 keys. Where `diagonal` a
  // row may lie inside a block; `first_key[i]` is the position of block i's first key.
  __device__ void AddBand(uint32_t k, uint32_t visible, bool diagonal, const int (&first_key)[4], float scale_log2) {
    const int lane = threadIdx.x % 32;
    float s[8][4], d[8][4];
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      Wgmma<T, false>(s, q[step], AlongElements(k, step, Shared::kPanel), step > 0);
    }
    WgmmaCommit();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      Wgmma<T, false>(d, d_out[step], AlongElements(k + Shared::kV, step, Shared::kPanel), step > 0);
    }
    WgmmaCommit();
    WgmmaWait<1>();
    Pin(s);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = (visible >> (n / 2 * 2 + e / 2) & 1) != 0 ? lse[e / 2] : INFINITY;
        s[n][e] = Exp2(s[n][e] * scale_log2 - sum);
      }
    }
    if (diagonal) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (first_key[n / 2] + n % 2 * 8 + lane % 4 * 2 + e % 2 > position[e / 2]) s[n][e] = 0;
        }
      }
    }
    WgmmaWait<0>();
    Pin(d);
    uint32_t a[4][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) d[n][e] = s[n][e] * (d[n][e] - delta[e / 2]);
      a[n / 2][n % 2 * 2] = Pack<T>(d[n][0], d[n][1]);
      a[n / 2][n % 2 * 2 + 1] = Pack<T>(d[n][2], d[n][3]);
    }
    Pin(dq);
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < 4; ++i) Wgmma<T, true>(dq, a[i], AlongRows(k, i, Shared::kPanel), 1);
    WgmmaCommit();
    WgmmaWait<0>();
    Pin(dq);
  }
#endif
};

// Warps 0 to 7 hold 16 rows each: 16 / group queries with all heads of the group. The others copy blocks into a ring,
// each one place of every group: first the init blocks, then the union of what the queries chose, ascending, then the
// blocks that are local to a query of the tile. Init and local blocks go through a warpgroup's products, four at a
// time; a chosen block through those of the warps that have a row which chose it. A lane per query follows its list,
// which is ascending too, so no masks are stored. Three warpgroups, so that setmaxnreg can move registers from the
// copying one.
template <typename T, int kDim, bool kHopper>
__global__ void __launch_bounds__(QueryShared<kDim, kHopper>::kThreads, 1)
    QueryKernel(const __grid_constant__ BackwardParams p, Workspace w) {
  using Shared = QueryShared<kDim, kHopper>;
  constexpr int kStages = Shared::kStages;
  extern __shared__ unsigned char shared[];
  const Shape& m = p.shape;
  const int chooser = blockIdx.y, kv_head = chooser / w.choosers;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int group = w.list_group;
  const int warp_queries = 16 / group, tile_queries = Shared::kWarps * warp_queries;
  Tile tile;
  // Late queries first: they have the most to read.
  if (!FindTile(p, tile_queries, gridDim.x - 1 - blockIdx.x, &tile)) return;
  const int first = tile.index * tile_queries, last = min(first + tile_queries, tile.length) - 1;
  const int first_block = first / kBlock, last_block = last / kBlock;
  const uint32_t base = (SharedAddress(shared) + Shared::kAlignment - 1) / Shared::kAlignment * Shared::kAlignment;
  unsigned char* const aligned = shared + (base - SharedAddress(shared));
  const uint32_t full = base + Shared::kBarriers, empty = full + kStages * 8;
  auto* block_ids = reinterpret_cast<volatile int32_t*>(aligned + Shared::kBlockIds);
  auto* bits = reinterpret_cast<uint32_t*>(aligned + Shared::kBits);
  // Chosen blocks lie before local_begin, except those that are local to another query of the tile.
  const int local_begin = m.Dense(first_block) ? 0 : max(0, first_block - m.local_blocks);
  const int init_end = min(m.init_blocks, local_begin);
  const int words = local_begin / 32 + 1;

  for (int i = tid; i < words; i += Shared::kThreads) bits[i] = 0;
  if (tid == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(full + i * 8, kQueryCopyWarps * 33);  // all lanes, and each warp's first again for the block's index
      BarrierInit(empty + i * 8, Shared::kWarps * 32);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  const int32_t* const lists =
      p.selection + (static_cast<int64_t>(tile.start + first) * m.selection_heads + chooser) * m.top_k;
  const int64_t list_stride = static_cast<int64_t>(m.selection_heads) * m.top_k;
  for (int i = tid; i < (last - first + 1) * m.top_k; i += Shared::kThreads) {
    const int block = lists[i / m.top_k * list_stride + i % m.top_k];
    if (block >= 0 && block < local_begin) atomicOr(&bits[block / 32], 1u << (block % 32));
  }
  __syncthreads();

  if (warp >= Shared::kWarps) {
#ifdef PHSA_SM90A
    if constexpr (kHopper) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
    constexpr int kLanes = kRowLanes<kDim>, kSteps = kBlock * kLanes / 32;
    const int row0 = lane / kLanes, piece = lane % kLanes;
    const bool copies = kLanes * 8 == kDim || piece < kDim / 8;
    const int64_t k_step = 32 / kLanes * p.k.token_stride, v_step = 32 / kLanes * p.v.token_stride;
    const T* k = static_cast<const T*>(p.k.data) + (tile.start + row0) * p.k.token_stride + kv_head * p.k.head_stride +
                 piece * 8;
    const T* v = static_cast<const T*>(p.v.data) + (tile.start + row0) * p.v.token_stride + kv_head * p.v.head_stride +
                 piece * 8;
    const int place = warp - Shared::kWarps;
    int turn = 0;
    auto next_place = [&](int id) {
      const int stage = turn / kQueryGroup % kStages, round = turn / (kQueryGroup * kStages);
      if (turn++ % kQueryGroup != place) return;
      if (round > 0) BarrierWait(empty + stage * 8, (round - 1) & 1);
      if (id != kPlaceEnd && copies) {
        const uint32_t to = base + (stage * kQueryGroup + place) * kBlock * 128;
        const int block = id & ~kPlaceBand;
        if (id >= 0 && (block + 1) * kBlock <= tile.length) {
          const T* from_k = k + block * kBlock * p.k.token_stride;
          const T* from_v = v + block * kBlock * p.v.token_stride;
#pragma unroll
          for (int i = 0; i < kSteps; ++i) {
            const uint32_t offset = TileOffset(row0 + i * (32 / kLanes), piece, Shared::kPanel);
            CopyAsync16(to + offset, from_k, true);
            CopyAsync16(to + Shared::kV + offset, from_v, true);
            from_k += k_step;
            from_v += v_step;
          }
        } else {  // zeros beyond the sequence, and where there is no block
#pragma unroll 1
          for (int i = 0; i < kSteps; ++i) {
            const int row = row0 + i * (32 / kLanes);
            const uint32_t offset = TileOffset(row, piece, Shared::kPanel);
            const bool valid = id >= 0 && block * kBlock + row < tile.length;
            CopyAsync16(to + offset, valid ? k + (block * kBlock + row - row0) * p.k.token_stride : k, valid);
            CopyAsync16(to + Shared::kV + offset, valid ? v + (block * kBlock + row - row0) * p.v.token_stride : v,
                        valid);
          }
        }
      }
      BarrierArriveAfterCopies(full + stage * 8);
      if (lane == 0) {
        block_ids[stage * kQueryGroup + place] = id;
        BarrierArrive(full + stage * 8);
      }
    };
    auto fill_group = [&]() {
      while (turn % kQueryGroup != 0) next_place(kPlaceEmpty);
    };
    for (int block = 0; block < init_end; ++block) next_place(block | kPlaceBand);
    fill_group();
    for (int i = 0; i < words; ++i) {
      uint32_t word = bits[i];
      while (word != 0) {
        next_place(i * 32 + __ffs(static_cast<int>(word)) - 1);
        word &= word - 1;
      }
    }
    fill_group();
    for (int block = local_begin; block <= last_block; ++block) next_place(block | kPlaceBand);
    fill_group();
    next_place(kPlaceEnd);
    fill_group();
    CommitCopies();
    WaitCopies<0>();
  } else {
#ifdef PHSA_SM90A
    if constexpr (kHopper) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
    QueryRows<T, kDim, kHopper> rows;
    int own[2];  // block of the lane's rows, -1 where a row is empty
    int query_bit[2];
    {
      const T* q_rows[2];
      const T* d_rows[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = lane / 4 + half * 8;
        const int query = Divide(r, w.list_magic), head = chooser * group + r - query * group;
        const int position = first + warp * warp_queries + query;
        const bool valid = query < warp_queries && position <= last;
        const int64_t token = tile.start + (valid ? position : first);
        rows.position[half] = position;
        own[half] = valid ? position / kBlock : -1;
        rows.lse[half] = valid ? p.lse[token * p.shape.num_q_heads + head] * kLog2e : 0;
        rows.delta[half] = valid ? w.delta[token * p.shape.num_q_heads + head] : 0;
        q_rows[half] = static_cast<const T*>(p.q.data) + token * p.q.token_stride + head * p.q.head_stride;
        d_rows[half] = static_cast<const T*>(p.d_out.data) + token * p.d_out.token_stride + head * p.d_out.head_stride;
        query_bit[half] = min(query, 15);
      }
      LoadLeft<T, kDim>(rows.q, q_rows[0], q_rows[1], own[0] >= 0, own[1] >= 0);
      LoadLeft<T, kDim>(rows.d_out, d_rows[0], d_rows[1], own[0] >= 0, own[1] >= 0);
      rows.Start();
    }
    // Lane i follows the list of the warp's query i, one entry ahead.
    const bool follows = lane < warp_queries && first + warp * warp_queries + lane <= last && m.top_k > 0;
    const int32_t* list = lists + static_cast<int64_t>(follows ? warp * warp_queries + lane : 0) * list_stride;
    int current = follows ? list[0] : -1, following = follows && m.top_k > 1 ? list[1] : -1, taken = 2;
    // Bits of the lane's rows that read a block; moves the lists on.
    auto visible_of = [&](int block) {
      const bool hit = current == block;
      const uint32_t hits = __ballot_sync(kFullWarp, hit);
      if (hit) {
        current = following;
        following = taken < m.top_k ? list[taken] : -1;
        ++taken;
      }
      uint32_t visible = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool band = m.Always(block, own[half]);
        if (block <= own[half] && (band || (hits >> query_bit[half] & 1) != 0)) visible |= 1u << half;
      }
      return visible;
    };

    const float scale_log2 = m.scale * kLog2e;
    const int warp_block = (first + warp * warp_queries) / kBlock;
    for (int stage = 0, round = 0;;) {
      BarrierWait(full + stage * 8, round & 1);
      int ids[kQueryGroup];
#pragma unroll
      for (int i = 0; i < kQueryGroup; ++i) ids[i] = block_ids[stage * kQueryGroup + i];
      if (ids[0] == kPlaceEnd) break;
      const uint32_t group_base = base + stage * kQueryGroup * kBlock * 128;
      uint32_t visible = 0;  // two bits a block
#pragma unroll
      for (int i = 0; i < kQueryGroup; ++i) {
        if (ids[i] >= 0) visible |= visible_of(ids[i] & ~kPlaceBand) << (2 * i);
      }
      if ((ids[0] & kPlaceBand) != 0) {
        int first_key[kQueryGroup];
        bool diagonal = false;
#pragma unroll
        for (int i = 0; i < kQueryGroup; ++i) {
          first_key[i] = (ids[i] & ~kPlaceBand) * kBlock;
          diagonal |= ids[i] >= 0 && (ids[i] & ~kPlaceBand) >= warp_block;
        }
#ifdef PHSA_SM90A
        if constexpr (kHopper) {
          FenceAsyncProxy();
          rows.AddBand(group_base, visible, diagonal, first_key, scale_log2);
        }
#endif
        if constexpr (!kHopper) {
#pragma unroll 1
          for (int i = 0; i < kQueryGroup; ++i) {
            const uint32_t at[1] = {group_base + i * kBlock * 128};
            if (__any_sync(kFullWarp, (visible >> 2 * i & 3) != 0)) {
              rows.template Add<1>(at, visible >> 2 * i & 3, scale_log2, diagonal,
                                   block_ids[stage * kQueryGroup + i] % kPlaceBand * kBlock);
            }
          }
        }
      } else {
        uint32_t read = __reduce_or_sync(kFullWarp, visible);
        read = (read | read >> 1) & 0x55;  // one bit a block that some row reads
        while (read != 0) {
          const int i = __ffs(static_cast<int>(read)) - 1;
          read &= read - 1;
          if (kHopper && read != 0) {
            const int j = __ffs(static_cast<int>(read)) - 1;
            read &= read - 1;
            const uint32_t at[2] = {group_base + i / 2 * kBlock * 128, group_base + j / 2 * kBlock * 128};
            rows.template Add<2>(at, (visible >> i & 3) | (visible >> j & 3) << 2, scale_log2);
          } else {
            const uint32_t at[1] = {group_base + i / 2 * kBlock * 128};
            rows.template Add<1>(at, visible >> i & 3, scale_log2);
          }
        }
      }
      BarrierArrive(empty + stage * 8);  // every lane for itself: racecheck does not see one arrive for its warp
      if (++stage == kStages) {
        stage = 0;
        ++round;
      }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (own[half] < 0) continue;
      const int r = lane / 4 + half * 8;
      const int query = Divide(r, w.list_magic), head = chooser * group + r - query * group;
      T* to = static_cast<T*>(p.d_q.data) + (tile.start + rows.position[half]) * p.d_q.token_stride +
              head * p.d_q.head_stride + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        *reinterpret_cast<uint32_t*>(to + n * 8) =
            Pack<T>(rows.dq[n][half * 2] * m.scale, rows.dq[n][half * 2 + 1] * m.scale);
      }
    }
  }
}

// ---- host -----------------------------------------------------------------------------------------------------------

unsigned Tiles(const BackwardParams& p, int size) {
  return static_cast<unsigned>(p.batch.total_q / size + p.batch.num_seqs);
}

template <typename Kernel>
cudaError_t AllowShared(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <typename T, int kDim, bool kHopper>
cudaError_t Run(const BackwardParams& p, const Workspace& w, cudaStream_t stream) {
  const auto choosers = static_cast<unsigned>(p.shape.num_kv_heads * w.choosers);
  const int64_t delta_threads = static_cast<int64_t>(p.batch.total_q) * p.shape.num_q_heads * kRowLanes<kDim>;
  DeltaKernel<T, kDim><<<static_cast<unsigned>((delta_threads + 255) / 256), 256, 0, stream>>>(p, w);
  const bool chooses = w.max_items > 0;
  cudaError_t status;
  if (chooses) {
    const int lists = w.blocks * static_cast<int>(choosers);
    status = cudaMemsetAsync(w.counts, 0, static_cast<size_t>(lists) * sizeof(int32_t), stream);
    if (status != cudaSuccess) return status;
    ListKernel<false><<<dim3(Tiles(p, kListTile), choosers), kListTile, 0, stream>>>(p, w);
    ScanKernel<<<1, kScanThreads, 0, stream>>>(w, lists);
    ListKernel<true><<<dim3(Tiles(p, kListTile), choosers), kListTile, 0, stream>>>(p, w);
    OrderKernel<<<dim3(static_cast<unsigned>(w.blocks), choosers), kOrderThreads, 0, stream>>>(p, w);
  }

  using QueryShape = QueryShared<kDim, kHopper>;
  const int query_shared = QueryShape::kBits + (p.batch.max_kv_len / kBlock / 32 + 1) * 4 + QueryShape::kAlignment;
  const auto query = QueryKernel<T, kDim, kHopper>;
  status = AllowShared(query, query_shared);
  if (status != cudaSuccess) return status;
  query<<<dim3(Tiles(p, QueryShape::kWarps * (16 / w.list_group)), choosers), QueryShape::kThreads, query_shared,
          stream>>>(p, w);

  constexpr int kChosenShared = RowStage<kDim, 16>::kBytes * kChosenStages;
  constexpr int kBandShared =
      kHopper ? BandShared<kDim>::kBytes : RowStage<kDim, kBandRows>::kBytes * kPlainBandStages<kDim> + 128;
  auto band = PlainBandKernel<T, kDim, false>, band_init = PlainBandKernel<T, kDim, true>;
  if constexpr (kHopper) {
    band = BandKernel<T, kDim, false>;
    band_init = BandKernel<T, kDim, true>;
  }
  status = AllowShared(ChosenKernel<T, kDim>, kChosenShared);
  if (status == cudaSuccess) status = AllowShared(band, kBandShared);
  if (status == cudaSuccess) status = AllowShared(band_init, kBandShared);
  if (status != cudaSuccess) return status;
  for (int head = 0; head < p.shape.num_kv_heads; head += w.heads_per_pass) {
    const int end = std::min(head + w.heads_per_pass, p.shape.num_kv_heads);
    const auto count = static_cast<unsigned>(end - head);
    if (w.init_tiles > 0) {
      const dim3 grid(Tiles(p, kInitRange), count, static_cast<unsigned>(w.init_tiles));
      band_init<<<grid, kKeyBlocks * 32, kBandShared, stream>>>(p, w, head);
    }
    if (chooses) {
      ChosenKernel<T, kDim><<<static_cast<unsigned>(w.max_items), 32, kChosenShared, stream>>>(p, w, head, end);
    }
    band<<<dim3(Tiles(p, kKeyBlocks * kBlock), count), kKeyBlocks * 32, kBandShared, stream>>>(p, w, head);
  }
  return cudaGetLastError();
}

// Head sizes that have kernels for Hopper; the others take the plain ones there too.
template <int kHeadDim>
constexpr bool kHasWgmma = kHeadDim == 64 || kHeadDim == 128;

}  // namespace

template <int kHeadDim>
size_t BackwardWorkspaceOf(const Shape& shape, const Batch& batch) {
  Workspace w;
  return Layout(shape, batch, nullptr, &w);
}

template <typename T, int kHeadDim>
cudaError_t BackwardOf(const BackwardParams& p, cudaStream_t stream) {
  if (p.batch.total_q == 0) return cudaSuccess;
  Workspace w;
  if (Layout(p.shape, p.batch, p.workspace, &w) > p.workspace_size) return cudaErrorInvalidValue;
  if constexpr (kHasWgmma<kHeadDim>) {
    if (Hopper()) return Run<T, kHeadDim, true>(p, w, stream);
  }
  return Run<T, kHeadDim, false>(p, w, stream);
}

template size_t BackwardWorkspaceOf<PHSA_HEAD_DIM>(const Shape&, const Batch&);
template cudaError_t BackwardOf<bf16, PHSA_HEAD_DIM>(const BackwardParams&, cudaStream_t);
template cudaError_t BackwardOf<half, PHSA_HEAD_DIM>(const BackwardParams&, cudaStream_t);

}  // namespace phsa::cuda
