// Decode: one query per sequence against a cache of any length. Three launches:
//   Scores   each warp scores 64 representatives for all heads of a group and leaves the softmax's partial sums, and
//            of a block with parts the logarithm of the sum over them;
//   TopK     one thread block per sequence and KV head merges the sums and picks the K best blocks, exactly;
//   Attend   each warp reads one or a few of the init, chosen and local blocks; the last thread block to finish merges.
// On Hopper, where few sequences and KV heads would leave most of the GPU idle, the last two are one:
//   Join     a cluster of thread blocks per sequence and KV head: each warp reads its init or local block while scores
//            are on their way; each thread block ranks its share of the candidates and hands its best to the others;
//            other warps read a chosen block each, and the cluster merges.
// All are bound by memory, so operands go from global memory straight to registers in the order the matrix instructions
// want them: nothing is staged in shared memory. Splits depend on shapes alone, never on the batch, and merges run in a
// fixed order, the same in both ways: the result of a sequence has the same bits in any batch.
// Where nothing is chosen (dense, windows, streaming) Stream takes the place of them all.
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>

#include "attention/cuda/device.cuh"
#include "base/carver.h"

namespace phsa::cuda {
namespace {

constexpr int kWarps = 4;       // of Scores and Attend
constexpr int kScoreTiles = 4;  // of 16 representatives, per warp (2 measured 15 % slower at a batch of 16)
constexpr int kWarpReps = kScoreTiles * 16;
constexpr int kTopKThreads = 1024;
constexpr int kMaxSplits = 128;       // of Attend
constexpr int kStreamBlocks = 128;    // thread blocks of a sequence where nothing is chosen
constexpr int kCachedScores = 32768;  // candidates whose scores TopK keeps in shared memory (128 KiB)
constexpr int kDigitBits = 11;
// Below this a group's score may miss heads that f32 has no numbers for: such blocks are ranked by logarithms.
constexpr float kLeastScore = 0x1p-90f;

struct Workspace {
  float* scores;         // [seq][kv_head][group][score_stride]: of blocks, times log2(e)
  float2* sums;          // [seq][kv_head][group][sum_stride]: maximum and sum of exponentials
  uint32_t* group;       // [seq][kv_head][score_stride], where shared memory has no room for a group's scores
  int32_t* selection;    // [seq][kv_head][top_k]
  float* partial;        // [seq][kv_head][split][group][head_dim]
  float2* partial_sums;  // [seq][kv_head][split][group]
  int32_t* finished;     // [seq][kv_head]
  int32_t score_stride;
  int32_t sum_stride;  // warps of Scores
  int32_t splits;
  int32_t blocks_per_warp;
  int64_t reads;  // blocks that a query reads, at most
};

bool Chooses(const Shape& shape, const Batch& batch) {
  const int last = (batch.max_kv_len - 1) / kBlock;
  return shape.top_k > 0 && !shape.Dense(last) && shape.Candidates(last) > 0;
}

size_t Layout(const Shape& shape, const Batch& batch, void* memory, Workspace* w) {
  const int group = shape.Group();
  const size_t pairs = static_cast<size_t>(batch.num_seqs) * shape.num_kv_heads;
  const int64_t all_blocks = BlocksFor(batch.max_kv_len, kBlock);
  int64_t read = std::min<int64_t>(all_blocks, int64_t{shape.init_blocks} + shape.local_blocks + 1 + shape.top_k);
  read = std::max<int64_t>({read, std::min<int64_t>(all_blocks, shape.dense_blocks), 1});
  w->reads = read;
  w->blocks_per_warp = static_cast<int32_t>((read + kWarps * kMaxSplits - 1) / (kWarps * kMaxSplits));
  if (shape.top_k == 0) {
    // A sequence alone is to fill the multiprocessors once; more splits only make the merge longer.
    const int64_t splits = std::clamp(kStreamBlocks / shape.num_kv_heads, 8, kMaxSplits);
    w->blocks_per_warp = static_cast<int32_t>((read + kWarps * splits - 1) / (kWarps * splits));
  }
  w->splits = static_cast<int32_t>((read + kWarps * w->blocks_per_warp - 1) / (kWarps * w->blocks_per_warp));
  w->score_stride = static_cast<int32_t>((all_blocks + kWarpReps - 1) / kWarpReps * kWarpReps);
  w->sum_stride = w->score_stride * shape.parts / kWarpReps;
  Carver carver(memory, kDeviceAlignment);
  const size_t score_rows = Chooses(shape, batch) ? pairs * group : 0;
  w->scores = carver.Take<float>(score_rows * w->score_stride);
  w->sums = carver.Take<float2>(score_rows * w->sum_stride);
  const size_t group_rows = score_rows > 0 && all_blocks > kCachedScores ? pairs : 0;
  w->group = carver.Take<uint32_t>(group_rows * w->score_stride);
  w->selection = carver.Take<int32_t>(pairs * shape.top_k);
  w->partial = carver.Take<float>(pairs * w->splits * group * shape.head_dim);
  w->partial_sums = carver.Take<float2>(pairs * w->splits * group);
  w->finished = carver.Take<int32_t>(pairs);
  return carver.size();
}

// Programmatic dependent launch: the next kernel of the three may start while this one runs, and waits for its end
// before it reads. Worth about a microsecond a launch. Every thread of a waiting kernel waits, so that its end implies
// the end of the one before. GPUs before sm_90 run one after the other.
__device__ __forceinline__ void LetNextStart() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void WaitForPrevious() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Which blocks the query of a sequence reads: [0, init_end), chosen ones of the candidates, [local_begin, own].
struct Reach {
  int length, own, init_end, local_begin;
  int chosen;      // blocks of its list
  int window;      // the first token that it may read
  bool takes_all;  // nothing to rank: every candidate is taken, or there is no choice at all

  __device__ Reach(const ForwardParams& p, int seq) {
    const BlockRules& rules = p.shape;
    length = p.batch.kv_lens[seq];
    own = length > 0 ? (length - 1) / kBlock : 0;
    init_end = rules.InitEnd(own);
    local_begin = rules.LocalBegin(own);
    chosen = length > 0 ? rules.Chosen(own) : 0;
    window = rules.WindowBegin(max(length - 1, 0));
    takes_all = length <= 0 || rules.ReadsAll(own);
  }
  __device__ int candidates() const { return local_begin - init_end; }
};

template <typename T>
__device__ __forceinline__ const T* RepRow(const ForwardParams& p, int seq, int kv_head, int row) {
  return static_cast<const T*>(p.reps.data) + kv_head * p.reps.head_stride +
         RepOffset(p.batch, p.reps, p.shape.parts, seq, row);
}

// The queries of a group as the left operand: rows are heads, zero beyond the group. Lane l holds the 16 bytes
// 8(l%4) … of every 32 elements of its two rows; keys are loaded in the same order.
template <typename T, int kDim, bool kWide>
struct Queries {
  static constexpr int kPieces = kRowPieces<kDim>;
  uint4 low[kPieces];
  uint4 high[kWide ? kPieces : 1];

  __device__ void Load(const ForwardParams& p, int seq, int kv_head, int group, int lane) {
    const int row = lane / 4;
    const T* q = static_cast<const T*>(p.q.data) + seq * p.q.token_stride + lane % 4 * 8;
    const int64_t first = static_cast<int64_t>(kv_head) * group;
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const bool there = HasPiece<kDim>(4 * j + lane % 4);
      low[j] =
          there && row < group ? *reinterpret_cast<const uint4*>(q + (first + row) * p.q.head_stride + j * 32) : zero;
      if (kWide) {
        high[j] = there && row + 8 < group
                      ? *reinterpret_cast<const uint4*>(q + (first + row + 8) * p.q.head_stride + j * 32)
                      : zero;
      }
    }
  }
  // c += q · keys for the 32 elements j.
  __device__ void Multiply(float (&c)[4], int j, uint4 keys) const {
    const uint4 h = kWide ? high[kWide ? j : 0] : make_uint4(0, 0, 0, 0);
    Mma<T>(c, low[j].x, h.x, low[j].y, h.y, keys.x, keys.y);
    Mma<T>(c, low[j].z, h.z, low[j].w, h.w, keys.z, keys.w);
  }
};

template <typename T, int kDim, bool kWide, int kParts>
__global__ void __launch_bounds__(kWarps * 32) ScoresKernel(const __grid_constant__ ForwardParams p, Workspace w) {
  LetNextStart();
  const int seq = blockIdx.z, kv_head = blockIdx.y;
  const int lane = threadIdx.x % 32;
  const int part = blockIdx.x * kWarps + threadIdx.x / 32;
  const Reach reach(p, seq);
  const int visible = reach.own * kParts;  // rows of the complete blocks before the own one
  const int begin = part * kWarpReps;
  if (reach.takes_all || begin >= visible) return;
  const int group = p.shape.Group();

  Queries<T, kDim, kWide> q;
  q.Load(p, seq, kv_head, group, lane);
  // One tile of loads is in flight while another is multiplied.
  uint4 keys[2][2][kRowPieces<kDim>];
  auto load = [&](int tile) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int at = min(begin + tile * 16 + n * 8 + lane / 4, visible - 1);
      const T* row = RepRow<T>(p, seq, kv_head, at) + lane % 4 * 8;
#pragma unroll
      for (int j = 0; j < kRowPieces<kDim>; ++j) {
        keys[tile % 2][n][j] = HasPiece<kDim>(4 * j + lane % 4) ? __ldcs(reinterpret_cast<const uint4*>(row + j * 32))
                                                                : make_uint4(0, 0, 0, 0);
      }
    }
  };
  load(0);
  float s[kScoreTiles][2][4];
  const float scale = p.shape.scale * kLog2e;
#pragma unroll
  for (int tile = 0; tile < kScoreTiles; ++tile) {
    if (tile + 1 < kScoreTiles && begin + (tile + 1) * 16 < visible) load(tile + 1);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[tile][n][i] = 0;
      if (begin + tile * 16 < visible) {
#pragma unroll
        for (int j = 0; j < kRowPieces<kDim>; ++j) q.Multiply(s[tile][n], j, keys[tile % 2][n][j]);
      }
    }
  }

  const int64_t pair = static_cast<int64_t>(seq) * p.shape.num_kv_heads + kv_head;
#pragma unroll
  for (int half = 0; half < (kWide ? 2 : 1); ++half) {
    const int head = lane / 4 + half * 8;
    float* row = w.scores + (pair * group + head) * w.score_stride + begin / kParts;
    float maximum = -INFINITY;
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int column = tile * 16 + n * 8 + lane % 4 * 2;
        float x = s[tile][n][half * 2] * scale, y = s[tile][n][half * 2 + 1] * scale;
        if (begin + column >= visible) x = -INFINITY;
        if (begin + column + 1 >= visible) y = -INFINITY;
        s[tile][n][half * 2] = x;
        s[tile][n][half * 2 + 1] = y;
        if (kParts == 1 && head < group) *reinterpret_cast<float2*>(row + column) = make_float2(x, y);
        maximum = fmaxf(maximum, fmaxf(x, y));
      }
    }
    maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, 2));
    float sum = 0;
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float x = s[tile][n][half * 2], y = s[tile][n][half * 2 + 1];
        const float both = Exp2(x - maximum) + Exp2(y - maximum);
        sum += both;
        if constexpr (kParts > 1) {
          // A block's own maximum: beside that of 64 representatives a small block's weights would be zeros.
          float top = fmaxf(x, y);
          if (kParts >= 4) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
          if (kParts >= 8) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
          top = fmaxf(top, -FLT_MAX);
          float block = Exp2(x - top) + Exp2(y - top);
          if (kParts >= 4) block += __shfl_xor_sync(kFullWarp, block, 1);
          if (kParts >= 8) block += __shfl_xor_sync(kFullWarp, block, 2);
          constexpr int kLanes = kParts / 2;  // that share a block
          if (lane % kLanes == 0 && head < group) {
            row[(tile * 16 + n * 8 + lane % 4 * 2) / kParts] = top + log2f(block);
          }
        }
      }
    }
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    if (lane % 4 == 0 && head < group) {
      w.sums[(pair * group + head) * w.sum_stride + part] = make_float2(maximum, sum);
    }
  }
}

// Sum over the thread block of the values of lower threads; all threads must call it.
__device__ int ExclusiveScan(int value, int* warp_totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kFullWarp, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  __syncthreads();  // the totals of the call before have been read
  if (lane == 31) warp_totals[warp] = inclusive;
  __syncthreads();
  const int totals = lane < blockDim.x / 32 ? warp_totals[lane] : 0;
  const int before = __reduce_add_sync(kFullWarp, lane < warp ? totals : 0);
  return before + inclusive - value;
}

// An integer that orders logarithms of scores; those that are no numbers come last.
__device__ __forceinline__ uint32_t OrderedBits(float log_score) {
  const uint32_t bits = __float_as_uint(fmaxf(log_score, -FLT_MAX));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// One thread block per sequence and KV head. Group scores are sums of softmax values, so they are not negative and
// their bits order them: a radix search over the bits finds the K-th best, and only blocks with exactly that score need
// the tie rule. Where the K-th best is too small a number to trust, the search runs again over logarithms.
__global__ void __launch_bounds__(kTopKThreads, 1) TopKKernel(const __grid_constant__ ForwardParams p, Workspace w) {
  constexpr int kBins = 1 << kDigitBits;
  static_assert(kBins == 2 * kTopKThreads);
  extern __shared__ uint32_t cached[];
  __shared__ int histogram[kBins];
  __shared__ int warp_totals[32];
  __shared__ float log_sums[kMaxGroup];
  __shared__ int digit, digit_count, still_needed, taken;
  __shared__ int found[kMaxTopK];
  LetNextStart();
  WaitForPrevious();
  const int kv_head = blockIdx.x, seq = blockIdx.y;
  const int64_t pair = static_cast<int64_t>(seq) * p.shape.num_kv_heads + kv_head;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int top_k = p.shape.top_k;
  const Reach reach(p, seq);
  int32_t* const out = (p.selection ? p.selection : w.selection) + pair * top_k;
  if (tid == 0) w.finished[pair] = 0;

  if (reach.takes_all) {
    if (tid < top_k) out[tid] = tid < reach.chosen ? reach.init_end + tid : -1;
    return;
  }

  const int group = p.shape.Group();
  const int count = reach.candidates();
  const float* const scores = w.scores + pair * group * w.score_stride + reach.init_end;
  // Raw scores of four heads and eight candidates a thread at a time: one latency for all. The first do not wait for
  // the sums.
  constexpr int kHeads = 4, kAtOnce = 8;
  float x[kHeads][kAtOnce];
  const auto load = [&](int base, int h0) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float* row = scores + static_cast<int64_t>(min(h0 + h, group - 1)) * w.score_stride;
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int i = base + n * kTopKThreads;
        x[h][n] = i < count ? row[i] : 0;
      }
    }
  };
  load(tid, 0);

  const int warps = (reach.own * p.shape.parts + kWarpReps - 1) / kWarpReps;  // of Scores
  if (warp < group) {
    const float2* sums = w.sums + (pair * group + warp) * w.sum_stride;
    constexpr int kInFlight = 4;  // per lane
    float maximum = -INFINITY, sum = 0;
    for (int base = lane; base < warps; base += 32 * kInFlight) {
      float2 part[kInFlight];
      float top = maximum;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        part[i] = base + 32 * i < warps ? sums[base + 32 * i] : make_float2(-INFINITY, 0);
        top = fmaxf(top, part[i].x);
      }
      sum *= Exp2(maximum - top);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) sum += part[i].y * Exp2(part[i].x - top);
      maximum = top;
    }
    float top = maximum;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, offset));
    sum *= Exp2(maximum - top);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    if (lane == 0) log_sums[warp] = top + log2f(sum);
  }
  if (tid == 0) taken = 0;
  __syncthreads();

  // A thread reads back only what it wrote itself.
  uint32_t* const values = count <= kCachedScores ? cached : w.group + pair * w.score_stride;
  for (int base = tid; base < count; base += kAtOnce * kTopKThreads) {
    float total[kAtOnce] = {};
    for (int h0 = 0; h0 < group; h0 += kHeads) {
      if (base != tid || h0 != 0) load(base, h0);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h0 + h >= group) break;
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          const float y = Exp2(x[h][n] - log_sums[h0 + h]);
          total[n] = p.shape.group_max ? fmaxf(total[n], y) : total[n] + y;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (base + n * kTopKThreads < count) values[base + n * kTopKThreads] = __float_as_uint(total[n]);
    }
  }

  uint32_t prefix, mask;
  int need;
  bool whole_digit;
#pragma unroll 1
  for (bool logs = false;; logs = true) {
    prefix = mask = 0;
    need = top_k;
    whole_digit = false;
    for (int shift = 32 - kDigitBits; !whole_digit && mask != 0xffffffffu; shift = max(0, shift - kDigitBits)) {
      const uint32_t digit_mask = mask == 0 ? 0xffffffffu << shift : ~mask & (0xffffffffu << shift);
      histogram[tid] = 0;
      histogram[tid + kTopKThreads] = 0;
      __syncthreads();
      for (int i = tid; i < count; i += kTopKThreads) {
        const uint32_t value = values[i];
        if ((value & mask) == prefix) atomicAdd(&histogram[(value & digit_mask) >> shift], 1);
      }
      __syncthreads();
      const int upper = histogram[kBins - 1 - 2 * tid], lower = histogram[kBins - 2 - 2 * tid];
      const int above = ExclusiveScan(upper + lower, warp_totals);
      if (above < need && need <= above + upper + lower) {
        const bool in_upper = need <= above + upper;
        digit = kBins - 1 - 2 * tid - (in_upper ? 0 : 1);
        digit_count = in_upper ? upper : lower;
        still_needed = need - above - (in_upper ? 0 : upper);
      }
      __syncthreads();
      prefix |= static_cast<uint32_t>(digit) << shift;
      mask |= digit_mask;
      need = still_needed;
      whole_digit = digit_count == need;
    }
    // The K-th best score is at least the prefix.
    if (logs || prefix >= __float_as_uint(kLeastScore)) break;
    for (int i = tid; i < count; i += kTopKThreads) {
      float top = -INFINITY, sum = 0;
      for (int h = 0; h < group; ++h)
        top = fmaxf(top, scores[h * static_cast<int64_t>(w.score_stride) + i] - log_sums[h]);
      for (int h = 0; h < group; ++h)
        sum += Exp2(scores[h * static_cast<int64_t>(w.score_stride) + i] - log_sums[h] - top);
      values[i] = OrderedBits(p.shape.group_max ? top : top + log2f(sum));
    }
  }

  for (int i = tid; i < count; i += kTopKThreads) {
    const uint32_t value = values[i] & mask;
    if (value > prefix || (value == prefix && whole_digit)) found[atomicAdd(&taken, 1)] = i;
  }
  if (!whole_digit) {  // more blocks with the K-th score than places left: the lowest
    int equal_before = 0;
    for (int base = 0; base < count && equal_before < need; base += kTopKThreads) {
      const int i = base + tid;
      const int equal = i < count && values[i] == prefix;
      const int rank = equal_before + ExclusiveScan(equal, warp_totals);
      if (equal && rank < need) found[atomicAdd(&taken, 1)] = i;
      equal_before += __syncthreads_count(equal);
    }
  }
  __syncthreads();
  if (tid < top_k) {
    int rank = 0;
    for (int i = 0; i < top_k; ++i) rank += found[i] < found[tid];
    out[rank] = reach.init_end + found[tid];
  }
}

// The row of reps that the new token completes, if it does.
template <typename T, int kDim, int kParts>
__device__ void WriteRepresentative(const ForwardParams& p, int seq, int kv_head, int length) {
  constexpr int kSpan = kBlock / kParts;  // keys of a row
  if (p.reps.data == nullptr || length <= 0 || length % kSpan != 0) return;
  const int block = (length - 1) / kBlock, first = (length - kSpan) % kBlock;  // in the block
  uint32_t flagged = 0;
  if (p.flags != nullptr) {
    const Rows rows{nullptr, 1, 0, p.flags_page_stride};
    const uint8_t* flags = p.flags + BlockOffset(p.batch, rows, seq, block) + first;
    for (int i = 0; i < kSpan; ++i) flagged |= (flags[i] != 0 ? 1u : 0u) << i;
  }
  const float lambda = flagged == 0 ? 1 : p.lambda[kv_head];
  const float mean_weight = lambda / kSpan;
  const float flag_weight = flagged == 0 ? 0 : (1 - lambda) / static_cast<float>(__popc(flagged));
  const T* k = static_cast<const T*>(p.k.data) + BlockOffset(p.batch, p.k, seq, block) + first * p.k.token_stride +
               kv_head * p.k.head_stride;
  T* rep = const_cast<T*>(RepRow<T>(p, seq, kv_head, length / kSpan - 1));
  for (int c = threadIdx.x; c < kDim; c += blockDim.x) {
    float keys[kSpan];
#pragma unroll
    for (int i = 0; i < kSpan; ++i) keys[i] = ToFloat(k[i * p.k.token_stride + c]);
    // The order of the sums is that of the prefill's kernel, so that both give the same bits.
    constexpr int kSums = std::min(32 / kRowLanes<kDim>, kSpan);
    float sum[kSums] = {};
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      sum[i % kSums] = fmaf(mean_weight + (flagged >> i & 1 ? flag_weight : 0.f), keys[i], sum[i % kSums]);
    }
#pragma unroll
    for (int step = 1; step < kSums; step *= 2) {
#pragma unroll
      for (int i = 0; i < kSums; i += 2 * step) sum[i] += sum[i + step];
    }
    rep[c] = FromFloat<T>(sum[0]);
  }
}

template <typename T, int kDim>
__device__ void WriteRepresentative(const ForwardParams& p, int seq, int kv_head, int length) {
  switch (p.shape.parts) {
    case 1: return WriteRepresentative<T, kDim, 1>(p, seq, kv_head, length);
    case 2: return WriteRepresentative<T, kDim, 2>(p, seq, kv_head, length);
    case 4: return WriteRepresentative<T, kDim, 4>(p, seq, kv_head, length);
    default: return WriteRepresentative<T, kDim, 8>(p, seq, kv_head, length);
  }
}

// What a thread block's warps have summed, and then what the thread blocks of a query have: always in the same order.
template <int kDim, bool kWide>
struct Merge {
  static constexpr int kRows = kWide ? 16 : 8;
  float2 sums[kWarps][kRows];
  bool last;
};
template <int kDim, bool kWide>
constexpr int kMergeBytes = kWarps* Merge<kDim, kWide>::kRows* kDim* static_cast<int>(sizeof(float));
template <int kDim, bool kWide>
constexpr int kWeightBytes = kMaxSplits* Merge<kDim, kWide>::kRows* static_cast<int>(sizeof(float));

// The sums of the warps of a split, in their order.
struct SplitSums {
  float value, top, total;
};
template <int kRows, int kDim>
__device__ __forceinline__ SplitSums MergeWarps(const float (*merged)[kRows][kDim], const float2 (*sums)[kRows],
                                                int row, int c) {
  float top = sums[0][row].x;
#pragma unroll
  for (int n = 1; n < kWarps; ++n) top = fmaxf(top, sums[n][row].x);
  const float base = top == -INFINITY ? 0 : top;
  float value = 0, total = 0;
#pragma unroll
  for (int n = 0; n < kWarps; ++n) {
    const float weight = Exp2(sums[n][row].x - base);
    value += weight * merged[n][row][c];
    total += weight * sums[n][row].y;
  }
  return {value, top, total};
}

// `values` [warp][row][kDim] and `weights` [split][row] are in shared memory; all have been written but the weights.
template <typename T, int kDim, bool kWide>
__device__ __forceinline__ void MergeSplits(const ForwardParams& p, const Workspace& w, int seq, int kv_head, int split,
                                            int splits, Merge<kDim, kWide>& merge, float* values,
                                            float* weight_memory) {
  constexpr int kRows = Merge<kDim, kWide>::kRows;
  auto& merged = *reinterpret_cast<float(*)[kWarps][kRows][kDim]>(values);
  auto& weights = *reinterpret_cast<float(*)[kMaxSplits][kRows]>(weight_memory);
  auto& merged_sums = merge.sums;
  bool& last = merge.last;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int group = p.shape.Group();
  const int64_t pair = static_cast<int64_t>(seq) * p.shape.num_kv_heads + kv_head;
  T* const out = static_cast<T*>(p.out.data) + seq * p.out.token_stride +
                 static_cast<int64_t>(kv_head) * group * p.out.head_stride;
  __syncthreads();
  const int64_t slot = pair * w.splits + split;
  for (int i = tid; i < group * kDim; i += kWarps * 32) {
    const int row = i / kDim, c = i % kDim;
    const auto [value, top, total] = MergeWarps<kRows, kDim>(merged, merged_sums, row, c);
    if (splits <= 1) {
      float lse = top + log2f(total), share = 1;
      const int head = kv_head * group + row;
      if (p.sinks != nullptr) lse = JoinSink(lse, p.sinks[head], share);
      out[row * p.out.head_stride + c] = FromFloat<T>(total > 0 ? value / total * share : 0);
      if (c == 0 && p.lse != nullptr) p.lse[static_cast<int64_t>(seq) * p.shape.num_q_heads + head] = lse * kLn2;
    } else {
      w.partial[slot * group * kDim + i] = value;
      if (c == 0) w.partial_sums[slot * group + row] = make_float2(top, total);
    }
  }
  if (splits <= 1) return;

  // The thread block that finishes last merges all, always in the order of the splits.
  __threadfence();
  __syncthreads();
  if (tid == 0) last = atomicAdd(w.finished + pair, 1) == splits - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int row = warp; row < group; row += kWarps) {
    float top = -INFINITY;
    for (int i = lane; i < splits; i += 32) {
      top = fmaxf(top, __ldcg(&w.partial_sums[(pair * w.splits + i) * group + row]).x);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, offset));
    float total = 0;
    for (int i = lane; i < splits; i += 32) {
      const float2 part = __ldcg(&w.partial_sums[(pair * w.splits + i) * group + row]);
      const float weight = Exp2(part.x - top);
      weights[i][row] = weight;
      total += weight * part.y;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(kFullWarp, total, offset);
    __syncwarp();
    float lse = top + log2f(total), share = 1;
    const int head = kv_head * group + row;
    if (p.sinks != nullptr) lse = JoinSink(lse, p.sinks[head], share);
    for (int i = lane; i < splits; i += 32) weights[i][row] = weights[i][row] / total * share;
    if (lane == 0 && p.lse != nullptr) p.lse[static_cast<int64_t>(seq) * p.shape.num_q_heads + head] = lse * kLn2;
  }
  __syncthreads();
  // Four elements a thread and all splits' loads in flight: this is the end of a chain of latencies.
  const float4* partial = reinterpret_cast<const float4*>(w.partial + pair * w.splits * group * kDim);
  for (int i = tid; i < group * kDim / 4; i += kWarps * 32) {
    const int row = i / (kDim / 4);
    float4 value = make_float4(0, 0, 0, 0);
#pragma unroll 16
    for (int n = 0; n < splits; ++n) {
      const float4 x = __ldcg(partial + n * (group * kDim / 4) + i);
      const float weight = weights[n][row];
      value.x = fmaf(weight, x.x, value.x);
      value.y = fmaf(weight, x.y, value.y);
      value.z = fmaf(weight, x.z, value.z);
      value.w = fmaf(weight, x.w, value.w);
    }
    *reinterpret_cast<uint2*>(out + row * p.out.head_stride + i % (kDim / 4) * 4) =
        make_uint2(Pack<T>(value.x, value.y), Pack<T>(value.z, value.w));
  }
}

// Columns of 64 that a lane's values are loaded in, eight elements each; the last are not all there.
template <int kDim>
constexpr int kSlabs = (kDim + 63) / 64;
template <int kDim>
__device__ __forceinline__ bool InSlab(int slab, int column) {
  return kDim % 64 == 0 || slab * 64 + column < kDim;
}

// What a warp has read so far: sums over blocks, relative to the rows' maxima.
template <typename T, int kDim, bool kWide>
struct Attention {
  static constexpr int kHalves = kWide ? 2 : 1, kRows = kHalves * 8;
  float o[kSlabs<kDim>][8][4];
  float maximum[kHalves], sum[kHalves];

  __device__ __forceinline__ Attention() : o{} {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      maximum[half] = -INFINITY;
      sum[half] = 0;
    }
  }

  __device__ __forceinline__ void Take(const ForwardParams& p, const Queries<T, kDim, kWide>& q, int seq, int kv_head,
                                       const Reach& reach, int block, int lane) {
    const float scale = p.shape.scale * kLog2e;
    const int tokens = min(kBlock, reach.length - block * kBlock);
    const int before = reach.window - block * kBlock;  // tokens of the block before the window
    const T* k = static_cast<const T*>(p.k.data) + BlockOffset(p.batch, p.k, seq, block) + kv_head * p.k.head_stride +
                 lane % 4 * 8;
    const T* v = static_cast<const T*>(p.v.data) + BlockOffset(p.batch, p.v, seq, block) + kv_head * p.v.head_stride +
                 lane / 4 * 8;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 keys[2][kRowPieces<kDim>];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int token = n * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < kRowPieces<kDim>; ++j) {
        keys[n][j] = token < tokens && HasPiece<kDim>(4 * j + lane % 4)
                         ? __ldcs(reinterpret_cast<const uint4*>(k + token * p.k.token_stride + j * 32))
                         : zero;
      }
    }
    // Lane l takes the tokens whose probabilities it will hold, 8 elements from 8(l/4) on: element e of them is column
    // l/4 of the e-th product, so that a lane ends up with runs of 8 output elements.
    uint4 values[kSlabs<kDim>][4];
    const auto load_values = [&] {
#pragma unroll
      for (int i4 = 0; i4 < 4; ++i4) {
        const int token = lane % 4 * 2 + i4 % 2 + i4 / 2 * 8;
#pragma unroll
        for (int c = 0; c < kSlabs<kDim>; ++c) {
          values[c][i4] = token < tokens && InSlab<kDim>(c, lane / 4 * 8)
                              ? __ldcs(reinterpret_cast<const uint4*>(v + token * p.v.token_stride + c * 64))
                              : zero;
        }
      }
    };
    // At head_dim 256 there are no registers for both.
    if (kDim <= 128) load_values();
    float s[2][4] = {};
#pragma unroll
    for (int j = 0; j < kRowPieces<kDim>; ++j) {
      q.Multiply(s[0], j, keys[0][j]);
      q.Multiply(s[1], j, keys[1][j]);
    }
    if (kDim > 128) load_values();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = n * 8 + lane % 4 * 2 + e % 2;
        s[n][e] = token < tokens && token >= before ? s[n][e] * scale : -INFINITY;
      }
    }
    uint32_t probabilities[4] = {};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float top = fmaxf(fmaxf(s[0][half * 2], s[0][half * 2 + 1]), fmaxf(s[1][half * 2], s[1][half * 2 + 1]));
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
      top = fmaxf(top, maximum[half]);
      const float base = top == -INFINITY ? 0 : top;  // a block that the window leaves nothing of
      const float shrink = Exp2(maximum[half] - base);
      maximum[half] = top;
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = Exp2(s[e / 2][half * 2 + e % 2] - base);
      sum[half] = sum[half] * shrink + (x[0] + x[1]) + (x[2] + x[3]);
      probabilities[half] = Pack<T>(x[0], x[1]);
      probabilities[half + 2] = Pack<T>(x[2], x[3]);
#pragma unroll
      for (int c = 0; c < kSlabs<kDim>; ++c) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          o[c][e][half * 2] *= shrink;
          o[c][e][half * 2 + 1] *= shrink;
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kSlabs<kDim>; ++c) {
      const uint32_t* a = reinterpret_cast<const uint32_t*>(&values[c][0]);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const uint32_t pick = e % 2 == 0 ? 0x5410 : 0x7632;
        const uint32_t b0 = __byte_perm(a[e / 2], a[4 + e / 2], pick);
        const uint32_t b1 = __byte_perm(a[8 + e / 2], a[12 + e / 2], pick);
        Mma<T>(o[c][e], probabilities[0], probabilities[1], probabilities[2], probabilities[3], b0, b1);
      }
    }
  }

  __device__ __forceinline__ void Store(float (&merged)[kRows][kDim], float2 (&sums)[kRows], int lane) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      sum[half] += __shfl_xor_sync(kFullWarp, sum[half], 1);
      sum[half] += __shfl_xor_sync(kFullWarp, sum[half], 2);
      const int row = lane / 4 + half * 8;
      if (lane % 4 == 0) sums[row] = make_float2(maximum[half], sum[half]);
#pragma unroll
      for (int c = 0; c < kSlabs<kDim>; ++c) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          if (!InSlab<kDim>(c, lane % 4 * 16 + column * 8)) continue;
          float4* to = reinterpret_cast<float4*>(&merged[row][c * 64 + lane % 4 * 16 + column * 8]);
          const int e = half * 2 + column;
          to[0] = make_float4(o[c][0][e], o[c][1][e], o[c][2][e], o[c][3][e]);
          to[1] = make_float4(o[c][4][e], o[c][5][e], o[c][6][e], o[c][7][e]);
        }
      }
    }
  }
};

template <typename T, int kDim, bool kWide>
__global__ void __launch_bounds__(kWarps * 32, kDim <= 64    ? (kWide ? 4 : 5)
                                               : kDim <= 128 ? 3
                                                             : 2)
    AttendKernel(const __grid_constant__ ForwardParams p, Workspace w) {
  constexpr int kRows = kWide ? 16 : 8;
  extern __shared__ __align__(16) float merge_memory[];
  auto& merged = *reinterpret_cast<float(*)[kWarps][kRows][kDim]>(merge_memory);
  __shared__ Merge<kDim, kWide> merge;
  __shared__ float weights[kMaxSplits][kRows];
  const int seq = blockIdx.z, kv_head = blockIdx.y, split = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Reach reach(p, seq);
  if (split == gridDim.x - 1) {
    WriteRepresentative<T, kDim>(p, seq, kv_head, reach.length);
    WaitForPrevious();
    return;
  }
  const int group = p.shape.Group();
  const int64_t pair = static_cast<int64_t>(seq) * p.shape.num_kv_heads + kv_head;
  T* const out = static_cast<T*>(p.out.data) + seq * p.out.token_stride +
                 static_cast<int64_t>(kv_head) * group * p.out.head_stride;

  const int init = reach.init_end, chosen = reach.chosen, local_begin = reach.local_begin;
  const int blocks = reach.length <= 0 ? 0 : init + chosen + reach.own + 1 - local_begin;
  const int splits = (blocks + kWarps * w.blocks_per_warp - 1) / (kWarps * w.blocks_per_warp);
  if (split >= max(splits, 1)) {
    WaitForPrevious();
    return;
  }
  Queries<T, kDim, kWide> q;
  q.Load(p, seq, kv_head, group, lane);

  Attention<T, kDim, kWide> attention;
  const int32_t* const selection = (p.selection ? p.selection : w.selection) + pair * p.shape.top_k;
  const int first = (split * kWarps + warp) * w.blocks_per_warp;
  for (int i = first; i < min(first + w.blocks_per_warp, blocks); ++i) {
    int block = i;
    if (i >= init + chosen) {
      block = local_begin + i - init - chosen;
    } else if (i >= init) {
      WaitForPrevious();  // init and local blocks do not wait for the choice
      block = __ldcg(selection + i - init);
    }
    attention.Take(p, q, seq, kv_head, reach, block, lane);
  }

  WaitForPrevious();  // for the counter below, which it cleared

  attention.Store(merged[warp], merge.sums[warp], lane);
  MergeSplits<T>(p, w, seq, kv_head, split, splits, merge, merge_memory, &weights[0][0]);
}

// Where nothing is chosen a query may read a long stretch. Each warp copies its blocks into a ring of its own, two or
// three blocks of 16 tokens, and multiplies them from there: no warp waits for another, and the copies of 8 warps that
// a multiprocessor holds, 100 KB, keep its memory busy while they multiply.
template <int kDim>
struct StreamRing {
  static constexpr int kStages = kDim > 128 ? 2 : 3;
  static constexpr int kPanel = kBlock * 128;
  static constexpr int kTensor = kBlock * kRowBytes<kDim>;  // keys; the values follow
  static constexpr int kBytes = kWarps * kStages * 2 * kTensor;
};

template <typename T, int kDim, bool kWide>
__global__ void __launch_bounds__(kWarps * 32, kDim <= 128 ? 2 : 1)
    StreamKernel(const __grid_constant__ ForwardParams p, Workspace w) {
  using Ring = StreamRing<kDim>;
  constexpr int kHalves = kWide ? 2 : 1, kStages = Ring::kStages;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ Merge<kDim, kWide> merge;
  static_assert(kMergeBytes<kDim, kWide> + kWeightBytes<kDim, kWide> <= Ring::kBytes);
  const int seq = blockIdx.z, kv_head = blockIdx.y, split = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane % 4;
  const Reach reach(p, seq);
  if (split == gridDim.x - 1) {
    WriteRepresentative<T, kDim>(p, seq, kv_head, reach.length);
    WaitForPrevious();
    return;
  }
  const int init = reach.init_end;
  const int blocks = reach.length <= 0 ? 0 : init + reach.own + 1 - reach.local_begin;
  const int splits = (blocks + kWarps * w.blocks_per_warp - 1) / (kWarps * w.blocks_per_warp);
  if (split >= max(splits, 1)) {
    WaitForPrevious();
    return;
  }
  const int first = (split * kWarps + warp) * w.blocks_per_warp, end = min(first + w.blocks_per_warp, blocks);

  // A lane copies one 16-byte piece of every second row, or as many rows as a warp reads at once.
  constexpr int kLanes = kRowLanes<kDim>, kRows = 32 / kLanes;
  const int piece = lane % kLanes, row0 = lane / kLanes;
  const bool copies = kLanes * 8 == kDim || piece < kDim / 8;
  const uint32_t ring = SharedAddress(shared) + warp * kStages * 2 * Ring::kTensor;
  const T* const k = static_cast<const T*>(p.k.data) + kv_head * p.k.head_stride + piece * 8;
  const T* const v = static_cast<const T*>(p.v.data) + kv_head * p.v.head_stride + piece * 8;
  const auto block_at = [&](int i) { return i < init ? i : reach.local_begin + i - init; };
  const auto copy = [&](int i) {
    if (i < end && copies) {
      const int block = block_at(i), tokens = reach.length - block * kBlock;
      const T* from_k = k + BlockOffset(p.batch, p.k, seq, block);
      const T* from_v = v + BlockOffset(p.batch, p.v, seq, block);
      const uint32_t to = ring + (i - first) % kStages * (2 * Ring::kTensor);
#pragma unroll
      for (int j = 0; j < kBlock / kRows; ++j) {
        const int row = j * kRows + row0;
        const bool there = row < tokens;  // what is not becomes zero
        const uint32_t at = to + TileOffset(row, piece, Ring::kPanel);
        CopyAsync16(at, from_k + (there ? row * p.k.token_stride : 0), there);
        CopyAsync16(at + Ring::kTensor, from_v + (there ? row * p.v.token_stride : 0), there);
      }
    }
    CommitCopies();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) copy(first + i);

  const int group = p.shape.Group();
  uint32_t q[kDim / 16][4];
  {
    const T* const rows = static_cast<const T*>(p.q.data) + seq * p.q.token_stride +
                          static_cast<int64_t>(kv_head) * group * p.q.head_stride;
    const int low = lane / 4, high = low + 8;
    uint4 words[2][kRowPieces<kDim>];
    LoadRowWords<kDim>(low < group ? rows + low * p.q.head_stride : nullptr,
                       kWide && high < group ? rows + high * p.q.head_stride : nullptr, c, words);
    MakeOperand(words, c, q);
  }
  float o[kDim / 8][4] = {};
  float maximum[kHalves], sum[kHalves];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    maximum[half] = -INFINITY;
    sum[half] = 0;
  }
  const float scale = p.shape.scale * kLog2e;
  const int key_row = (lane & 7) + (lane >> 4) * 8, key_piece = lane >> 3 & 1;
  for (int i = first; i < end; ++i) {
    WaitCopies<kStages - 2>();
    __syncwarp();
    copy(i + kStages - 1);
    const uint32_t keys = ring + (i - first) % kStages * (2 * Ring::kTensor), values = keys + Ring::kTensor;
    float s[2][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t b[4];
      LoadMatrix(b, keys + TileOffset(key_row, 2 * step + key_piece, Ring::kPanel));
      Mma<T>(s[0], q[step], b[0], b[1]);
      Mma<T>(s[1], q[step], b[2], b[3]);
    }
    const int block = block_at(i);
    const int tokens = reach.length - block * kBlock, before = reach.window - block * kBlock;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = n * 8 + c * 2 + e % 2;
        s[n][e] = token < tokens && token >= before ? s[n][e] * scale : -INFINITY;
      }
    }
    uint32_t probabilities[4] = {};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float top = fmaxf(fmaxf(s[0][half * 2], s[0][half * 2 + 1]), fmaxf(s[1][half * 2], s[1][half * 2 + 1]));
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
      top = fmaxf(top, maximum[half]);
      if (__any_sync(kFullWarp, top > maximum[half])) {
        const float shrink = top == -INFINITY ? 1 : Exp2(maximum[half] - top);
        sum[half] *= shrink;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          o[n][half * 2] *= shrink;
          o[n][half * 2 + 1] *= shrink;
        }
        maximum[half] = top;
      }
      const float base = top == -INFINITY ? 0 : top;  // a block that the window leaves nothing of
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = Exp2(s[e / 2][half * 2 + e % 2] - base);
      sum[half] += (x[0] + x[1]) + (x[2] + x[3]);
      probabilities[half] = Pack<T>(x[0], x[1]);
      probabilities[half + 2] = Pack<T>(x[2], x[3]);
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      uint32_t b[4];
      LoadMatrixTransposed(b, values + TileOffset(lane & 15, n + (lane >> 4), Ring::kPanel));
      Mma<T>(o[n], probabilities, b[0], b[1]);
      Mma<T>(o[n + 1], probabilities, b[2], b[3]);
    }
  }
  WaitCopies<0>();
  WaitForPrevious();  // for the counter of the merge, which it clears
  __syncthreads();    // the ring becomes the memory of the merge
  auto& merged = *reinterpret_cast<float(*)[kWarps][Merge<kDim, kWide>::kRows][kDim]>(shared);
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    sum[half] += __shfl_xor_sync(kFullWarp, sum[half], 1);
    sum[half] += __shfl_xor_sync(kFullWarp, sum[half], 2);
    const int row = lane / 4 + half * 8;
    if (c == 0) merge.sums[warp][row] = make_float2(maximum[half], sum[half]);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<float2*>(&merged[warp][row][n * 8 + 2 * c]) = make_float2(o[n][half * 2], o[n][half * 2 + 1]);
    }
  }
  MergeSplits<T>(p, w, seq, kv_head, split, splits, merge, reinterpret_cast<float*>(shared),
                 reinterpret_cast<float*>(shared + kMergeBytes<kDim, kWide>));
}

// Clears the counters of the merge. A kernel, not a memset: the next one may start beside it.
__global__ void ClearKernel(Workspace w, int pairs) {
  LetNextStart();
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) w.finished[i] = 0;
}

// The cluster. A thread block's best candidates go to all others, then its partial sums.
constexpr int kCluster = 8;
constexpr int kBlockSplits = 2;  // splits of a thread block
constexpr int kJoinWarps = kBlockSplits * kWarps;
constexpr int kJoinThreads = kJoinWarps * 32;
constexpr int kJoinSplits = kBlockSplits * kCluster;
constexpr int kLeftKeys = 256;                     // of a thread block, when its candidates are pruned
constexpr int kMostJoined = kJoinSplits * kWarps;  // blocks read, at most: one a warp
constexpr unsigned kMostClusters = 8;              // more are slower than three launches
constexpr int kWidestJoin = 128;                   // head_dim: wider heads have no room for their sums
constexpr int kKeyRoom = kCluster * kLeftKeys;
static_assert(kLeftKeys >= 2 * kMaxTopK);

template <int kDim, bool kWide>
struct JoinShared {
  static constexpr int kRows = kWide ? 16 : 8;
  uint64_t keys[kKeyRoom];
  uint64_t fewer[kKeyRoom / 4];
  uint64_t left[kLeftKeys];  // what the others read
  uint64_t maxima[kJoinThreads];
  float part[kBlockSplits][kRows][kDim];  // what the others read
  float2 part_sums[kBlockSplits][kRows];
  float2 merged_sums[kJoinWarps][kRows];
  float weights[kJoinSplits][kRows];
  float log_sums[16];
  int32_t best[kMaxTopK], chosen[kMaxTopK];  // by score; ascending
  int32_t count, left_count;
  uint32_t worst;  // bits of the K-th best score
  int32_t unused;

  union Large {
    float merged[kJoinWarps][kRows][kDim];
    uint32_t values[1];  // of the thread block's share of the candidates
  };
  static int Bytes(int score_stride) {
    const int values = (score_stride + kCluster - 1) / kCluster * static_cast<int>(sizeof(uint32_t));
    return static_cast<int>(sizeof(JoinShared)) + std::max(static_cast<int>(sizeof(Large)), values);
  }
  __device__ Large& large() { return *reinterpret_cast<Large*>(this + 1); }
};

// A candidate as one integer, never 0: the better score is the larger, then the lower block.
__device__ __forceinline__ uint64_t CandidateKey(uint32_t score, int block) {
  return static_cast<uint64_t>(score) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(block));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ int ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
// A barrier of all threads of the cluster; what they wrote to shared memory is then visible to all.
__device__ __forceinline__ void SyncCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same place in the shared memory of another thread block of the cluster.
template <typename X>
__device__ __forceinline__ const X* OfRank(const X* here, int rank) {
  const X* there;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
  return there;
}

// The K-th largest of 256 different values, of which a lane has eight: as many reach what it returns; 0 where there are
// fewer. Every warp for itself.
__device__ __forceinline__ uint64_t KthOfMaxima(const uint64_t* maxima, int k, int lane) {
  constexpr int kMine = kJoinThreads / 32;
  uint64_t mine[kMine], most = 0;
#pragma unroll
  for (int j = 0; j < kMine; ++j) {
    mine[j] = maxima[j * 32 + lane];
    most = mine[j] > most ? mine[j] : most;
  }
  const uint32_t upper = __reduce_max_sync(kFullWarp, static_cast<uint32_t>(most >> 32));
  // At least K reach `low`, or it is 0; fewer reach `high`.
  uint64_t low = 0, high = (static_cast<uint64_t>(upper) + 1) << 32;
  while (high - low > 1) {
    const uint64_t tried = low + (high - low) / 2;
    int reach = 0;
#pragma unroll
    for (int j = 0; j < kMine; ++j) reach += mine[j] >= tried;
    reach = __reduce_add_sync(kFullWarp, reach);
    (reach >= k ? low : high) = tried;
    if (reach == k) break;
  }
  return low;
}

// All threads: of the keys that key(i) gives for i < n, those that may be among the K largest go to `to`, at most
// K · ⌈n / threads⌉ where n is larger than the thread block. Returns how many.
template <typename Shared, typename Key>
__device__ __forceinline__ int PruneKeys(Shared& shared, int n, int k, uint64_t* to, Key&& key) {
  const int tid = threadIdx.x;
  uint64_t most = 0;
  for (int i = tid; i < n; i += kJoinThreads) {
    const uint64_t x = key(i);
    most = x > most ? x : most;
  }
  shared.maxima[tid] = most;
  if (tid == 0) shared.count = 0;
  __syncthreads();
  const uint64_t least = KthOfMaxima(shared.maxima, k, tid % 32);
  if (most != 0 && most >= least) {
    for (int i = tid; i < n; i += kJoinThreads) {
      const uint64_t x = key(i);
      if (x >= least) to[atomicAdd(&shared.count, 1)] = x;
    }
  }
  __syncthreads();
  const int count = shared.count;
  __syncthreads();
  return count;
}

// As often as it takes to leave at most `room`; `keys` has the first result. Returns where the keys are.
template <typename Shared>
__device__ __forceinline__ uint64_t* PruneTo(Shared& shared, int& n, int k, int room) {
  uint64_t* keys = shared.keys;
  while (n > room) {
    uint64_t* to = keys == shared.keys ? shared.fewer : shared.keys;
    const uint64_t* from = keys;
    n = PruneKeys(shared, n, k, to, [&](int i) { return from[i]; });
    keys = to;
  }
  return keys;
}
#endif

template <typename T, int kDim, bool kWide>
__global__ void __launch_bounds__(kJoinThreads, 1) JoinKernel(const __grid_constant__ ForwardParams p, Workspace w) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Shared = JoinShared<kDim, kWide>;
  extern __shared__ __align__(16) uint8_t join_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(join_memory);
  const int seq = blockIdx.z, kv_head = blockIdx.y, rank = ClusterRank();
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const Reach reach(p, seq);
  const int group = p.shape.Group(), top_k = p.shape.top_k;
  const int64_t pair = static_cast<int64_t>(seq) * p.shape.num_kv_heads + kv_head;

  // Warps and blocks as Attend has them, a block a warp; neighbouring splits are on other multiprocessors.
  const int split = rank + kCluster * (warp / kWarps), place = split * kWarps + warp % kWarps;
  Queries<T, kDim, kWide> q;
  q.Load(p, seq, kv_head, group, lane);
  Attention<T, kDim, kWide> attention;
  const int init = reach.init_end, chosen = reach.chosen;
  const int blocks = reach.length <= 0 ? 0 : init + chosen + reach.own + 1 - reach.local_begin;
  const bool chosen_place = place >= init && place < init + chosen;
  if (place < blocks && !chosen_place) {
    const int block = place < init ? place : reach.local_begin + place - init - chosen;
    attention.Take(p, q, seq, kv_head, reach, block, lane);
  }
  if (rank == kCluster - 1) WriteRepresentative<T, kDim>(p, seq, kv_head, reach.length);
  WaitForPrevious();

  if (reach.takes_all) {
    for (int i = tid; i < top_k; i += kJoinThreads) shared.chosen[i] = i < chosen ? init + i : -1;
  } else {
    const int count = reach.candidates(), share = (count + kCluster - 1) / kCluster;
    const int begin = rank * share, mine = max(0, min(share, count - begin));
    const float* const scores = w.scores + pair * group * w.score_stride + reach.init_end + begin;
    // Scores of four heads and four candidates a thread at a time; the first do not wait for the sums.
    constexpr int kHeads = 4, kAtOnce = 4;
    float x[kHeads][kAtOnce];
    const auto load = [&](int base, int h0) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float* row = scores + static_cast<int64_t>(min(h0 + h, group - 1)) * w.score_stride;
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          const int i = base + n * kJoinThreads;
          x[h][n] = i < mine ? row[i] : 0;
        }
      }
    };
    load(tid, 0);
    const int sums_of_head = (reach.own * p.shape.parts + kWarpReps - 1) / kWarpReps;  // warps of Scores
    for (int head = warp; head < group; head += kJoinWarps) {
      const float2* sums = w.sums + (pair * group + head) * w.sum_stride;
      constexpr int kSteps = 4, kAtOnceSums = 4;  // under way: all; added up: as TopK does
      float maximum = -INFINITY, sum = 0;
      for (int base = lane; base < sums_of_head; base += 32 * kSteps * kAtOnceSums) {
        float2 part[kSteps][kAtOnceSums];
#pragma unroll
        for (int i = 0; i < kSteps * kAtOnceSums; ++i) {
          part[i / kAtOnceSums][i % kAtOnceSums] =
              base + 32 * i < sums_of_head ? sums[base + 32 * i] : make_float2(-INFINITY, 0);
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (base + 32 * step * kAtOnceSums >= sums_of_head) break;
          float top = maximum;
#pragma unroll
          for (int i = 0; i < kAtOnceSums; ++i) top = fmaxf(top, part[step][i].x);
          sum *= Exp2(maximum - top);
#pragma unroll
          for (int i = 0; i < kAtOnceSums; ++i) sum += part[step][i].y * Exp2(part[step][i].x - top);
          maximum = top;
        }
      }
      float top = maximum;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, offset));
      sum *= Exp2(maximum - top);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
      if (lane == 0) shared.log_sums[head] = top + log2f(sum);
    }
    __syncthreads();

    // A thread reads back only what it wrote itself.
    uint32_t* const values = shared.large().values;
    for (int base = tid; base < mine; base += kAtOnce * kJoinThreads) {
      float total[kAtOnce] = {};
      for (int h0 = 0; h0 < group; h0 += kHeads) {
        if (base != tid || h0 != 0) load(base, h0);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          if (h0 + h >= group) break;
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n) {
            const float y = Exp2(x[h][n] - shared.log_sums[h0 + h]);
            total[n] = p.shape.group_max ? fmaxf(total[n], y) : total[n] + y;
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (base + n * kJoinThreads < mine) values[base + n * kJoinThreads] = __float_as_uint(total[n]);
      }
    }

#pragma unroll 1
    for (bool logs = false;; logs = true) {
      int n =
          PruneKeys(shared, mine, top_k, shared.keys, [&](int i) { return CandidateKey(values[i], init + begin + i); });
      const uint64_t* left = PruneTo(shared, n, top_k, kLeftKeys);
      for (int i = tid; i < n; i += kJoinThreads) shared.left[i] = left[i];
      if (tid == 0) shared.left_count = n;
      SyncCluster();
      // All thread blocks find the same K best.
      n = 0;
#pragma unroll 1
      for (int from = 0; from < kCluster; ++from) {
        const int more = *OfRank(&shared.left_count, from);
        const uint64_t* theirs = OfRank(&shared.left[0], from);
        for (int i = tid; i < more; i += kJoinThreads) shared.keys[n + i] = theirs[i];
        n += more;
      }
      __syncthreads();
      left = PruneTo(shared, n, top_k, kJoinThreads);
      if (tid < n) {
        const uint64_t key = left[tid];
        int above = 0;
#pragma unroll 8
        for (int i = 0; i < n; ++i) above += left[i] > key;
        if (above < top_k) shared.best[above] = static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(key));
        if (above == top_k - 1) shared.worst = static_cast<uint32_t>(key >> 32);
      }
      __syncthreads();
      if (logs || shared.worst >= __float_as_uint(kLeastScore)) break;
      SyncCluster();  // what the others read is read
      for (int i = tid; i < mine; i += kJoinThreads) {
        float top = -INFINITY, sum = 0;
        for (int h = 0; h < group; ++h)
          top = fmaxf(top, scores[h * static_cast<int64_t>(w.score_stride) + i] - shared.log_sums[h]);
        for (int h = 0; h < group; ++h)
          sum += Exp2(scores[h * static_cast<int64_t>(w.score_stride) + i] - shared.log_sums[h] - top);
        values[i] = OrderedBits(p.shape.group_max ? top : top + log2f(sum));
      }
      __syncthreads();
    }
  }
  if (tid < top_k && !reach.takes_all) {
    const int block = shared.best[tid];
    int before = 0;
    for (int i = 0; i < top_k; ++i) before += shared.best[i] < block;
    shared.chosen[before] = block;
  }
  __syncthreads();
  if (p.selection != nullptr && rank == 0 && tid < top_k) p.selection[pair * top_k + tid] = shared.chosen[tid];
  if (chosen_place) attention.Take(p, q, seq, kv_head, reach, shared.chosen[place - init], lane);

  // The sums of each split, then of all, in the order in which Attend adds them up.
  auto& merged = shared.large().merged;
  attention.Store(merged[warp], shared.merged_sums[warp], lane);
  __syncthreads();
  for (int i = tid; i < kBlockSplits * group * kDim; i += kJoinThreads) {
    const int half = i / (group * kDim), row = i / kDim % group, c = i % kDim;
    const auto [value, top, total] =
        MergeWarps<Shared::kRows, kDim>(&merged[half * kWarps], &shared.merged_sums[half * kWarps], row, c);
    shared.part[half][row][c] = value;
    if (c == 0) shared.part_sums[half][row] = make_float2(top, total);
  }
  SyncCluster();
  const int splits = (blocks + kWarps - 1) / kWarps;
  for (int row = warp; row < group; row += kJoinWarps) {
    const bool used = lane < max(splits, 1);
    const float2 part =
        used ? *OfRank(&shared.part_sums[lane / kCluster][row], lane % kCluster) : make_float2(-INFINITY, 0);
    float top = part.x;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, offset));
    const float weight = splits > 1 ? Exp2(part.x - top) : 1.0f;
    float total = used ? weight * part.y : 0.0f;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(kFullWarp, total, offset);
    float lse = top + log2f(total), share = 1;
    const int head = kv_head * group + row;
    if (p.sinks != nullptr) lse = JoinSink(lse, p.sinks[head], share);
    if (splits > 1) {
      if (lane < kJoinSplits) shared.weights[lane][row] = weight / total * share;
    } else if (lane == 0) {
      shared.weights[0][row] = total;
      shared.weights[1][row] = share;
    }
    if (rank == 0 && lane == 0 && p.lse != nullptr) {
      p.lse[static_cast<int64_t>(seq) * p.shape.num_q_heads + head] = lse * kLn2;
    }
  }
  __syncthreads();
  T* const out = static_cast<T*>(p.out.data) + seq * p.out.token_stride +
                 static_cast<int64_t>(kv_head) * group * p.out.head_stride;
  for (int i = rank * kJoinThreads + tid; i < group * kDim; i += kCluster * kJoinThreads) {
    const int row = i / kDim, c = i % kDim;
    float value = 0;
    if (splits <= 1) {
      const float total = shared.weights[0][row], share = shared.weights[1][row];
      value = total > 0 ? *OfRank(&shared.part[0][row][c], 0) / total * share : 0;
    } else {
#pragma unroll
      for (int n = 0; n < kJoinSplits; ++n) {
        if (n < splits) {
          value = fmaf(shared.weights[n][row], *OfRank(&shared.part[n / kCluster][row][c], n % kCluster), value);
        }
      }
    }
    out[row * p.out.head_stride + c] = FromFloat<T>(value);
  }
  SyncCluster();  // no thread block ends while others read its shared memory
#else
  __trap();
#endif
}

template <typename... Args>
cudaError_t Launch(void (*kernel)(Args...), dim3 grid, int threads, size_t shared, bool overlap, int cluster,
                   cudaStream_t stream, Args... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (overlap) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, args...);
}

template <typename T, int kDim, bool kWide>
cudaError_t Run(const ForwardParams& p, const Workspace& w, cudaStream_t stream) {
  const auto heads = static_cast<unsigned>(p.shape.num_kv_heads), seqs = static_cast<unsigned>(p.batch.num_seqs);
  const bool can_overlap = LaunchesOverlap(), chooses = Chooses(p.shape, p.batch);
  cudaError_t status;
  if (p.shape.top_k == 0) {
    status = Launch(ClearKernel, dim3(1), 256, 0, false, 1, stream, w, p.batch.num_seqs * p.shape.num_kv_heads);
    if (status != cudaSuccess) return status;
    constexpr int kShared = StreamRing<kDim>::kBytes;
    const auto kernel = StreamKernel<T, kDim, kWide>;
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (status != cudaSuccess) return status;
    return Launch(kernel, dim3(static_cast<unsigned>(w.splits) + 1, heads, seqs), kWarps * 32, kShared, can_overlap, 1,
                  stream, p, w);
  }
  if (chooses) {
    const dim3 grid(static_cast<unsigned>(w.sum_stride + kWarps - 1) / kWarps, heads, seqs);
    const auto scores = p.shape.parts == 1   ? ScoresKernel<T, kDim, kWide, 1>
                        : p.shape.parts == 2 ? ScoresKernel<T, kDim, kWide, 2>
                        : p.shape.parts == 4 ? ScoresKernel<T, kDim, kWide, 4>
                                             : ScoresKernel<T, kDim, kWide, 8>;
    status = Launch(scores, grid, kWarps * 32, 0, false, 1, stream, p, w);
    if (status != cudaSuccess) return status;
  }
  if constexpr (kDim <= kWidestJoin) {
    if (Hopper() && w.reads <= kMostJoined && heads * seqs <= kMostClusters) {
      const int bytes = JoinShared<kDim, kWide>::Bytes(w.score_stride);
      status = cudaFuncSetAttribute(JoinKernel<T, kDim, kWide>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      if (status != cudaSuccess) return status;
      return Launch(JoinKernel<T, kDim, kWide>, dim3(kCluster, heads, seqs), kJoinThreads, bytes,
                    chooses && can_overlap, kCluster, stream, p, w);
    }
  }
  if (chooses) {
    const size_t shared = std::min(w.score_stride, kCachedScores) * sizeof(uint32_t);
    status = cudaFuncSetAttribute(TopKKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(kCachedScores * sizeof(uint32_t)));
    if (status != cudaSuccess) return status;
    status = Launch(TopKKernel, dim3(heads, seqs), kTopKThreads, shared, can_overlap, 1, stream, p, w);
  } else {  // short sequences still list their candidates; this clears the counters too
    status = Launch(TopKKernel, dim3(heads, seqs), kTopKThreads, 0, false, 1, stream, p, w);
  }
  if (status != cudaSuccess) return status;
  constexpr int kShared = kMergeBytes<kDim, kWide>;
  if (kShared > 40 * 1024) {  // 48 KiB with what is declared
    status = cudaFuncSetAttribute(AttendKernel<T, kDim, kWide>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (status != cudaSuccess) return status;
  }
  return Launch(AttendKernel<T, kDim, kWide>, dim3(static_cast<unsigned>(w.splits) + 1, heads, seqs), kWarps * 32,
                kShared, can_overlap, 1, stream, p, w);
}

}  // namespace

template <int kHeadDim>
size_t DecodeWorkspaceOf(const Shape& shape, const Batch& batch) {
  Workspace w;
  return Layout(shape, batch, nullptr, &w);
}

template <typename T, int kHeadDim>
cudaError_t DecodeOf(const ForwardParams& p, cudaStream_t stream) {
  if (p.shape.selection_heads != p.shape.num_kv_heads || p.batch.num_seqs > 65535) return cudaErrorInvalidValue;
  Workspace w;
  if (Layout(p.shape, p.batch, p.workspace, &w) > p.workspace_size) return cudaErrorInvalidValue;
  return p.shape.Group() > 8 ? Run<T, kHeadDim, true>(p, w, stream) : Run<T, kHeadDim, false>(p, w, stream);
}

template size_t DecodeWorkspaceOf<PHSA_HEAD_DIM>(const Shape&, const Batch&);
template cudaError_t DecodeOf<bf16, PHSA_HEAD_DIM>(const ForwardParams&, cudaStream_t);
template cudaError_t DecodeOf<half, PHSA_HEAD_DIM>(const ForwardParams&, cudaStream_t);

}  // namespace phsa::cuda
