#include "ops/cuda/ops.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "ops/cuda/device.cuh"

namespace phsa::cuda {
namespace {

using namespace ops;  // NOLINT: what all of these kernels are made of

// One thread block per row.
__global__ __launch_bounds__(kThreads) void KeepKernel(KeepParams p) {
  const int64_t to = blockIdx.x, from = p.rows[to];
  const auto copy = [&](const void* source, void* target, int64_t bytes) {
    const auto* const x = reinterpret_cast<const uint4*>(static_cast<const char*>(source) + from * bytes);
    auto* const y = reinterpret_cast<uint4*>(static_cast<char*>(target) + to * bytes);
    for (int64_t i = threadIdx.x; i < bytes / 16; i += kThreads) y[i] = x[i];
  };
  copy(p.x, p.kept_x, int64_t{p.x_dim} * 4);
  copy(p.y, p.kept_y, int64_t{p.y_dim} * 2);
}

// One thread block per row. The second pass finds the row in the cache.
enum class From { kRow, kNamedRow, kEmbedding };

constexpr int kNormThreads = 512;

template <From kFrom>
__global__ __launch_bounds__(kNormThreads) void NormKernel(NormParams p, const int32_t* rows,
                                                           const __nv_bfloat16* embedding, float factor) {
  __shared__ float shared[kNormThreads / kWarp];
  const int64_t row = blockIdx.x;
  float* const x = p.x + (kFrom == From::kNamedRow ? int64_t{rows[row]} : row) * p.dim;
  const __nv_bfloat16* const source = kFrom == From::kEmbedding ? embedding + int64_t{rows[row]} * p.dim : nullptr;
  const int step = static_cast<int>(blockDim.x) * 8;
  float values[8], sum = 0;
  for (int i = static_cast<int>(threadIdx.x) * 8; i < p.dim; i += step) {
    if constexpr (kFrom == From::kEmbedding) {
      Load(source + i, values);
#pragma unroll
      for (float& value : values) value *= factor;
      *reinterpret_cast<float4*>(x + i) = *reinterpret_cast<const float4*>(values);
      *reinterpret_cast<float4*>(x + i + 4) = *reinterpret_cast<const float4*>(values + 4);
    } else {
      Load(x + i, values);
    }
#pragma unroll
    for (const float value : values) sum += value * value;
  }
  const float scale = rsqrtf(BlockSum(sum, shared) / static_cast<float>(p.dim) + p.eps);
  for (int i = static_cast<int>(threadIdx.x) * 8; i < p.dim; i += step) {
    float weight[8];
    Load(x + i, values);
    Load(p.weight + i, weight);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = values[j] * scale * weight[j];
    Store(values, static_cast<__nv_bfloat16*>(p.out) + row * p.dim + i);
  }
}

int NormThreads(int32_t dim) { return std::clamp((dim / 8 + kWarp - 1) / kWarp * kWarp, kWarp, kNormThreads); }

template <From kFrom>
cudaError_t LaunchNorm(const NormParams& p, const int32_t* rows, const void* embedding, float factor,
                       cudaStream_t stream) {
  NormKernel<kFrom><<<static_cast<unsigned>(p.m), NormThreads(p.dim), 0, stream>>>(
      p, rows, static_cast<const __nv_bfloat16*>(embedding), factor);
  return cudaGetLastError();
}

// One thread block per row.
__global__ __launch_bounds__(kNormThreads) void AddNormKernel(AddNormParams p) {
  __shared__ float shared[kNormThreads / kWarp];
  const float* const y = p.y + int64_t{blockIdx.x} * p.dim;
  float* const x = p.x + int64_t{blockIdx.x} * p.dim;
  const int step = static_cast<int>(blockDim.x) * 8;
  float values[8], sum = 0;
  for (int i = static_cast<int>(threadIdx.x) * 8; i < p.dim; i += step) {
    Load(y + i, values);
#pragma unroll
    for (const float value : values) sum += value * value;
  }
  const float scale = rsqrtf(BlockSum(sum, shared) / static_cast<float>(p.dim) + p.eps);
  for (int i = static_cast<int>(threadIdx.x) * 8; i < p.dim; i += step) {
    float weight[8], old[8];
    Load(y + i, values);
    Load(p.weight + i, weight);
    Load(x + i, old);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[i + j] = old[j] + values[j] * scale * weight[j];
  }
}

// A warp has one row of the weights, or a row of gate and the same of up. Its first pieces are on their way while the
// thread block puts x into shared memory.
//
// int8: a piece has 16 columns, half a group; their products with the codes are added up before the scale, which costs
// one multiplication a row of x and not one a weight.
//
// Pieces of 16 bytes that a lane has on their way at a time: what rows of the usual lengths have. Fewer are fewer
// registers, and so more warps that have theirs: products that add to y have few rows of the weights, and long ones.
constexpr int RowPieces(FewRowsParams::Result result, bool int8) {
  return int8 && result != FewRowsParams::Result::kAddToF32 ? 4 : 8;
}

template <int kRows, FewRowsParams::Result kResult, bool kInt8>
__global__ __launch_bounds__(kThreads) void FewRowsKernel(FewRowsParams p) {
  using Result = FewRowsParams::Result;
  constexpr int kWarps = kThreads / kWarp, kMatrices = kResult == Result::kGateMul ? 2 : 1;
  constexpr int kPieces = RowPieces(kResult, kInt8) / kMatrices;
  constexpr int kParts = kInt8 ? 2 : 1;  // pieces of x, 8 columns each, to one of the weights
  extern __shared__ uint4 x_pieces[];    // bf16 [kRows][kParts][pieces]: lanes side by side read side by side
  __shared__ float shared[kRows][kWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int of_x = p.k / 8, pieces = of_x / kParts;
  const auto place = [&](int row, int at) { return row * of_x + at % kParts * pieces + at / kParts; };
  const int column = static_cast<int>(blockIdx.x) * kWarps + warp;
  const bool mine = column < p.n;
  const uint4* weights[kMatrices];
  const uint16_t* scales[kMatrices];
#pragma unroll
  for (int i = 0; i < kMatrices; ++i) {
    const int64_t row = int64_t{i} * p.n + (mine ? column : 0);
    weights[i] = static_cast<const uint4*>(p.weights.data) + row * pieces;
    if constexpr (kInt8) scales[i] = p.weights.scales + row * (pieces / 2);
  }
  uint4 held[kMatrices][kPieces];
  float held_scales[kMatrices][kPieces];
  const auto load = [&](int first) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int at = first + j * kWarp + lane;
#pragma unroll
      for (int i = 0; i < kMatrices; ++i) {
        held[i][j] = mine && at < pieces ? weights[i][at] : uint4{};
        if constexpr (kInt8) held_scales[i][j] = mine && at < pieces ? Scale(scales[i] + at / 2) : 0.0f;
      }
    }
  };
  load(0);
  // Lane r ends up with the sum of row r.
  float before = 0;
  if constexpr (kResult == Result::kAddToF32) {
    if (mine && lane < kRows && p.result == Result::kAddToF32) {
      before = static_cast<const float*>(p.y)[int64_t{lane} * p.n + column];
    }
  }

  if constexpr (kResult != Result::kAddToF32) {
    const auto* const x = static_cast<const float*>(p.x);
    float sums[kRows] = {}, values[8], scale[8];
    for (int at = thread; at < of_x; at += kThreads) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        Load(x + (int64_t{r} * of_x + at) * 8, values);
#pragma unroll
        for (const float value : values) sums[r] += value * value;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = BlockSum(sums[r], shared[r]);
    for (int at = thread; at < of_x; at += kThreads) {
      Load(p.norm + at * 8, scale);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float factor = rsqrtf(sums[r] / static_cast<float>(p.k) + p.eps);
        Load(x + (int64_t{r} * of_x + at) * 8, values);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = values[i] * factor * scale[i];
        Store(values, reinterpret_cast<__nv_bfloat16*>(x_pieces + place(r, at)));
      }
    }
  } else {
    for (int at = thread; at < kRows * of_x; at += kThreads) {
      x_pieces[kInt8 ? place(at / of_x, at % of_x) : at] = static_cast<const uint4*>(p.x)[at];
    }
  }
  __syncthreads();

  float sums[kMatrices][kRows] = {};
  for (int first = 0; first < pieces; first += kPieces * kWarp) {
    if (first > 0) load(first);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int at = first + j * kWarp + lane;
      if (at >= pieces) break;
      float w[kMatrices][8 * kParts], x[8];
#pragma unroll
      for (int i = 0; i < kMatrices; ++i) {
        if constexpr (kInt8) {
          UnpackCodes(held[i][j], w[i]);
        } else {
          Unpack<__nv_bfloat16>(held[i][j], w[i]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float parts[kMatrices] = {};
#pragma unroll
        for (int half = 0; half < kParts; ++half) {
          Unpack<__nv_bfloat16>(x_pieces[r * of_x + half * pieces + at], x);
#pragma unroll
          for (int i = 0; i < kMatrices; ++i) {
            float& sum = kInt8 ? parts[i] : sums[i][r];
#pragma unroll
            for (int e = 0; e < 8; ++e) sum = fmaf(w[i][half * 8 + e], x[e], sum);
          }
        }
        if constexpr (kInt8) {
#pragma unroll
          for (int i = 0; i < kMatrices; ++i) sums[i][r] = fmaf(parts[i], held_scales[i][j], sums[i][r]);
        }
      }
    }
  }
  float own[kMatrices] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
      const float sum = WarpSum(sums[i][r]);
      if (lane == r) own[i] = sum;
    }
  }
  if (!mine || lane >= kRows) return;
  const int64_t at = int64_t{lane} * p.n + column;
#pragma unroll
  for (int i = 0; i < kMatrices; ++i) {
    if constexpr (kInt8) own[i] *= p.weights.factors[i * p.n + column];
  }
  if constexpr (kResult == Result::kAddToF32) {
    own[0] *= p.scale;
    if (p.bias != nullptr) own[0] += static_cast<const float*>(p.bias)[column];
    static_cast<float*>(p.y)[at] = before + own[0];
  } else {
    if (p.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kMatrices; ++i) {
        own[i] += __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[i * p.n + column]);
      }
    }
    float result = own[0];
    if constexpr (kResult == Result::kGateMul) {
      // Rounded as the halves are where they are written between two kernels.
      const float gate = __bfloat162float(__float2bfloat16_rn(own[0]));
      result = Gated(p.gate, gate, __bfloat162float(__float2bfloat16_rn(own[1])));
    }
    static_cast<__nv_bfloat16*>(p.y)[at] = __float2bfloat16_rn(result);
  }
}

template <FewRowsParams::Result kResult, bool kInt8>
cudaError_t LaunchFewRows(const FewRowsParams& p, cudaStream_t stream) {
  const unsigned blocks = Blocks(p.n, kThreads / kWarp);
  const size_t bytes = static_cast<size_t>(p.m) * static_cast<size_t>(p.k) * sizeof(__nv_bfloat16);
  switch (p.m) {
    case 1: FewRowsKernel<1, kResult, kInt8><<<blocks, kThreads, bytes, stream>>>(p); break;
    case 2: FewRowsKernel<2, kResult, kInt8><<<blocks, kThreads, bytes, stream>>>(p); break;
    case 3: FewRowsKernel<3, kResult, kInt8><<<blocks, kThreads, bytes, stream>>>(p); break;
    case 4: FewRowsKernel<4, kResult, kInt8><<<blocks, kThreads, bytes, stream>>>(p); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

template <FewRowsParams::Result kResult>
cudaError_t LaunchFewRows(const FewRowsParams& p, cudaStream_t stream) {
  if (!p.weights.is_int8()) return LaunchFewRows<kResult, false>(p, stream);
  return p.k % kGroup == 0 ? LaunchFewRows<kResult, true>(p, stream) : cudaErrorInvalidValue;
}

// Codes 2 · pair and 2 · pair + 1 of a word as bf16, which holds them exactly: 128 plus the low 7 bits, less 128 or
// 256.
__device__ __forceinline__ uint32_t Bf16Codes(uint32_t word, int pair) {
  const uint32_t codes = __byte_perm(word, 0, pair == 0 ? 0x4140u : 0x4342u);
  const uint32_t low = (codes & 0x007f007fu) | 0x43004300u, less = (codes & 0x00800080u) ^ 0xc380c380u;
  const __nv_bfloat162 sum =
      __hadd2(reinterpret_cast<const __nv_bfloat162&>(low), reinterpret_cast<const __nv_bfloat162&>(less));
  return reinterpret_cast<const uint32_t&>(sum);
}

// A thread block has kTiles times 8 rows of the weights, and its warps share the columns, 32 at a time: group g is warp
// g % kWarps's. Nothing of x is read twice by a block, so it comes straight from the L2 cache.
//
// Which column is which of the tensor cores' 16 is free as long as x and the weights agree. Lane (row r, quarter q) has
// columns 8q to 8q + 7 of the group, of rows r and r + 8 of x and of row r of the weights: one load each. The first
// product takes the first four of them, the second one the others.
template <int kTiles>
__global__ __launch_bounds__(kTiles == 1 ? 512 : 256) void SomeRowsKernel(SomeRowsParams p) {
  // Few rows of weights have long columns, and more warps to share them.
  constexpr int kWarps = kTiles == 1 ? 16 : 8;
  constexpr int kHeld = 4;  // groups on their way
  __shared__ float shared[kWarps][kTiles][16][8];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int row = lane / 4, quarter = lane % 4, groups = p.k / kGroup;
  const int first = static_cast<int>(blockIdx.x) * kTiles * 8;
  const auto* const x = static_cast<const uint4*>(p.x);
  // What lies beyond the last row is a copy of it, and is not written.
  const auto inside = [&](int weight_row) { return int64_t{min(weight_row, p.n - 1)}; };
  const uint2* weights[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    weights[t] = static_cast<const uint2*>(p.weights.data) + inside(first + t * 8 + row) * groups * 4 + quarter;
  }
  float sums[kTiles][4] = {};
  for (int begin = warp; begin < groups; begin += kHeld * kWarps) {
    uint2 held[kHeld][kTiles];
    float scales[kHeld][kTiles][2];
    uint4 of_x[kHeld][2];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int group = begin + j * kWarps;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        held[j][t] = group < groups ? weights[t][group * 4] : uint2{};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // Of the columns of the result that this lane has.
          const int64_t scale = inside(first + t * 8 + quarter * 2 + i) * groups + group;
          scales[j][t][i] = group < groups ? Scale(p.weights.scales + scale) : 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int x_row = row + 8 * i;
        of_x[j][i] = group < groups && x_row < p.m ? x[(int64_t{x_row} * groups + group) * 4 + quarter] : uint4{};
      }
    }
    __syncwarp();  // else the compiler moves the loads down to where they are used, to save registers
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const uint32_t a[2][4] = {{of_x[j][0].x, of_x[j][1].x, of_x[j][0].y, of_x[j][1].y},
                                {of_x[j][0].z, of_x[j][1].z, of_x[j][0].w, of_x[j][1].w}};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint2& w = held[j][t];
        float part[4] = {};
        Mma(a[0], Bf16Codes(w.x, 0), Bf16Codes(w.x, 1), part);
        Mma(a[1], Bf16Codes(w.y, 0), Bf16Codes(w.y, 1), part);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[t][i] = fmaf(part[i], scales[j][t][i % 2], sums[t][i]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) shared[warp][t][row + i / 2 * 8][quarter * 2 + i % 2] = sums[t][i];
  }
  __syncthreads();
  if (thread >= kTiles * 128) return;
  const int tile = thread / 128, y_row = thread % 128 / 8, column = first + tile * 8 + thread % 8;
  if (y_row >= p.m || column >= p.n) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += shared[i][tile][y_row][thread % 8];
  sum *= p.weights.factors[column];
  const int64_t at = int64_t{y_row} * p.n + column;
  using Result = SomeRowsParams::Result;
  if (p.result != Result::kBf16) {
    sum *= p.scale;
    if (p.bias != nullptr) sum += static_cast<const float*>(p.bias)[column];
    float& y = static_cast<float*>(p.y)[at];
    y = p.result == Result::kAddToF32 ? y + sum : sum;
  } else {
    if (p.bias != nullptr) sum += __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[column]);
    static_cast<__nv_bfloat16*>(p.y)[at] = __float2bfloat16_rn(sum);
  }
}

cudaError_t LaunchSomeRows(const SomeRowsParams& p, cudaStream_t stream) {
  constexpr int32_t kManyBlocks = 132;  // what a large GPU has multiprocessors
  if (p.n >= 16 * kManyBlocks) {
    SomeRowsKernel<2><<<Blocks(p.n, 16), 256, 0, stream>>>(p);
  } else {
    SomeRowsKernel<1><<<Blocks(p.n, 8), 512, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

__global__ __launch_bounds__(kThreads) void RowsKernel(RowsParams p) {
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row = item / p.half;
  if (row >= p.m) return;
  const int i = static_cast<int>(item % p.half);
  double sine, cosine;
  sincos(p.positions[row] * p.frequencies[i], &sine, &cosine);
  float* const to = p.cos_sin + row * 2 * p.half;
  const double factor = p.frequencies[i] == 0 ? 1 : double{p.factor};  // 0: a pair that is not turned
  to[i] = static_cast<float>(cosine * factor);
  to[p.half + i] = static_cast<float>(sine * factor);
  if (i == 0 && p.flags != nullptr && p.flag_rows[row] >= 0) p.pages[p.flag_rows[row]] = p.flags[row];
}

// The threads of a head, some of them idle where its size is no power of two: a warp has whole heads.
constexpr int HeadLanes(int dim) {
  int lanes = 1;
  while (lanes * 16 < dim) lanes *= 2;
  return lanes;
}

// A thread has 8 elements of a head's first half and the 8 that they turn with: kDim / 16 threads to a head.
template <typename T, int kDim>
__global__ __launch_bounds__(kThreads) void HeadsKernel(HeadsParams p) {
  constexpr int kLanes = HeadLanes(kDim), kHalf = kDim / 2;
  const int heads = p.num_q_heads + 2 * p.num_kv_heads;
  const int64_t items = int64_t{p.m} * heads * kLanes;
  const int64_t mine = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  // Threads beyond the end take part in the sums below.
  const int64_t item = mine < items ? mine : items - 1;
  const bool idle = mine >= items || item % kLanes >= kDim / 16;
  const int lane = item % kLanes < kDim / 16 ? static_cast<int>(item % kLanes) : 0;
  const int64_t row = item / kLanes / heads;
  const int head = static_cast<int>(item / kLanes - row * heads);
  const auto* const x = static_cast<const __nv_bfloat16*>(p.qkv) + (row * heads + head) * kDim + lane * 8;
  float low[8], high[8];
  Load(x, low);
  Load(x + kHalf, high);

  const bool is_query = head < p.num_q_heads, is_value = head >= p.num_q_heads + p.num_kv_heads;
  const float* const norm = is_query ? p.q_norm : is_value ? nullptr : p.k_norm;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += low[i] * low[i] + high[i] * high[i];
  if (idle && mine < items) sum = 0;
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (norm != nullptr) {
    const float scale = rsqrtf(sum / kDim + p.eps);
    float weight[8];
    Load(norm + lane * 8, weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) low[i] = low[i] * scale * weight[i];
    Load(norm + kHalf + lane * 8, weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) high[i] = high[i] * scale * weight[i];
  }
  if (!is_value) {
    const float* const turn = p.cos_sin + row * kDim + lane * 8;
    float cosine[8], sine[8];
    Load(turn, cosine);
    Load(turn + kHalf, sine);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = low[i], b = high[i];
      low[i] = a * cosine[i] - b * sine[i];
      high[i] = b * cosine[i] + a * sine[i];
    }
  }
  if (idle) return;
  T* to;
  if (is_query) {
    to = static_cast<T*>(p.queries) + (row * p.num_q_heads + head) * kDim;
  } else {
    const int64_t at = p.cache_rows[row];
    if (at < 0) return;
    const int kv_head = (head - p.num_q_heads) % p.num_kv_heads;
    to = static_cast<T*>(is_value ? p.values : p.keys) + at + kv_head * p.cache_head_stride;
  }
  Store(low, to + lane * 8);
  Store(high, to + kHalf + lane * 8);
}

template <typename T, int kDim>
cudaError_t LaunchHeadsOf(const HeadsParams& p, cudaStream_t stream) {
  const int64_t items = int64_t{p.m} * (p.num_q_heads + 2 * p.num_kv_heads) * HeadLanes(kDim);
  HeadsKernel<T, kDim><<<Blocks(items, kThreads), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchHeads(const HeadsParams& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 64: return LaunchHeadsOf<T, 64>(p, stream);
    case 80: return LaunchHeadsOf<T, 80>(p, stream);
    case 96: return LaunchHeadsOf<T, 96>(p, stream);
    case 128: return LaunchHeadsOf<T, 128>(p, stream);
    case 256: return LaunchHeadsOf<T, 256>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

__global__ __launch_bounds__(kThreads) void Bf16FromF16Kernel(void* x, int64_t count) {
  const int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * 8;
  if (at >= count) return;
  float values[8];
  Load(static_cast<const __half*>(x) + at, values);
  Store(values, static_cast<__nv_bfloat16*>(x) + at);
}

__global__ __launch_bounds__(kThreads) void Bf16FromInt8Kernel(MatrixView weights, int64_t items, int pieces,
                                                               __nv_bfloat16* out) {
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;  // 16 columns
  if (item >= items) return;
  float values[16];
  UnpackCodes(static_cast<const uint4*>(weights.data)[item], values);
  const float scale = Scale(weights.scales + item / 2) * weights.factors[item / pieces];
  float half[8];
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int i = 0; i < 8; ++i) half[i] = values[part * 8 + i] * scale;
    Store(half, out + item * 16 + part * 8);
  }
}

__global__ __launch_bounds__(kThreads) void GateMulKernel(GateParams p, const __nv_bfloat16* gate_up, int64_t items,
                                                          int dim, __nv_bfloat16* out) {
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= items) return;
  const int64_t row = item / (dim / 8);
  const int64_t at = (item - row * (dim / 8)) * 8;
  float gate[8], up[8];
  Load(gate_up + row * 2 * dim + at, gate);
  Load(gate_up + row * 2 * dim + dim + at, up);
#pragma unroll
  for (int i = 0; i < 8; ++i) gate[i] = Gated(p, gate[i], up[i]);
  Store(gate, out + row * dim + at);
}

// The largest logits, in two stages: each thread block finds those of one part of a row, then one those of the row.
// A logit and its token are one number, so that no two are equal and larger means "comes first".
constexpr int kItems = 16;
constexpr int kPart = kThreads * kItems;
constexpr int kBins = 256;
static_assert(kBins == kThreads);

__device__ __forceinline__ uint64_t KeyOf(float logit, int32_t token) {
  const uint32_t bits = __float_as_uint(logit);
  // What is no number comes last, and is none again in LogitOf.
  const uint32_t ordered = isnan(logit) ? 1u : (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}

__device__ __forceinline__ int32_t TokenOf(uint64_t key) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key));
}

__device__ __forceinline__ float LogitOf(uint64_t key) {
  const auto ordered = static_cast<uint32_t>(key >> 32);
  return __uint_as_float((ordered >> 31) != 0 ? ordered & 0x7fffffffu : ~ordered);
}

struct TopShared {
  uint32_t bins[kBins];
  uint32_t warps[kThreads / kWarp];
  uint32_t digit, before, within, found;
  uint64_t keys[kTopLogits];
};

// The `want` largest of the thread block's keys, in any order, into shared.keys. Keys of 0 are none; there are `want`
// others at least.
__device__ void SelectTop(const uint64_t (&keys)[kItems], uint32_t want, TopShared& shared) {
  const unsigned thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  uint64_t prefix = 0, known = 0;
  if (thread == 0) shared.found = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    shared.bins[thread] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (keys[i] != 0 && (keys[i] & known) == prefix) atomicAdd(&shared.bins[keys[i] >> shift & 0xff], 1u);
    }
    __syncthreads();
    // Thread t counts the keys whose digit is 255 - t or larger.
    const uint32_t own = shared.bins[kBins - 1 - thread];
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= static_cast<unsigned>(step)) sum += other;
    }
    if (lane == kWarp - 1) shared.warps[warp] = sum;
    __syncthreads();
    for (unsigned i = 0; i < warp; ++i) sum += shared.warps[i];
    if (sum >= want && sum - own < want) {
      shared.digit = kBins - 1 - thread;
      shared.before = sum - own;
      shared.within = own;
    }
    __syncthreads();
    prefix |= uint64_t{shared.digit} << shift;
    known |= uint64_t{0xff} << shift;
    want -= shared.before;
    if (want == shared.within) break;  // all keys with this prefix
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (keys[i] != 0 && keys[i] >= prefix) shared.keys[atomicAdd(&shared.found, 1u)] = keys[i];
  }
  __syncthreads();
}

struct TopPart {
  float largest, sum;  // of e^(logit - largest)
  int32_t finite;
  uint64_t keys[kTopLogits];
};

int32_t Parts(int32_t vocab) { return (vocab + kPart - 1) / kPart; }

__global__ __launch_bounds__(kThreads) void TopOfPartsKernel(TopParams p, TopPart* parts) {
  __shared__ TopShared shared;
  __shared__ float sums[2][kThreads / kWarp];
  const int first = static_cast<int>(blockIdx.x) * kPart;
  const float* const logits = p.logits + blockIdx.y * p.logits_stride;
  uint64_t keys[kItems];
  float largest = -INFINITY;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int token = first + i * kThreads + static_cast<int>(threadIdx.x);
    keys[i] = token < p.vocab ? KeyOf(logits[token], token) : 0;
    if (keys[i] == 0) continue;
    largest = fmaxf(largest, LogitOf(keys[i]));
    finite = finite && isfinite(LogitOf(keys[i]));
  }
  finite = __syncthreads_and(finite ? 1 : 0) != 0;
  largest = BlockMax(largest, sums[0]);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) sum += keys[i] != 0 ? expf(LogitOf(keys[i]) - largest) : 0.0f;
  sum = BlockSum(sum, sums[1]);
  const auto want = static_cast<uint32_t>(min(kTopLogits, p.vocab - first));
  SelectTop(keys, want, shared);
  TopPart& part = parts[blockIdx.y * gridDim.x + blockIdx.x];
  if (threadIdx.x == 0) {
    part.largest = largest;
    part.sum = sum;
    part.finite = finite ? 1 : 0;
  }
  if (threadIdx.x < kTopLogits) part.keys[threadIdx.x] = threadIdx.x < want ? shared.keys[threadIdx.x] : 0;
}

__global__ __launch_bounds__(kThreads) void TopOfRowKernel(TopParams p, const TopPart* parts, int num_parts) {
  __shared__ TopShared shared;
  const TopPart* const mine = parts + int64_t{blockIdx.x} * num_parts;
  uint64_t keys[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    keys[i] = at < num_parts * kTopLogits ? mine[at / kTopLogits].keys[at % kTopLogits] : 0;
  }
  const int want = min(kTopLogits, p.vocab);
  SelectTop(keys, static_cast<uint32_t>(want), shared);
  TopLogits& out = p.out[blockIdx.x];
  if (static_cast<int>(threadIdx.x) < want) {
    const uint64_t key = shared.keys[threadIdx.x];
    int rank = 0;
    for (int i = 0; i < want; ++i) rank += shared.keys[i] > key ? 1 : 0;
    out.top[rank] = {TokenOf(key), LogitOf(key)};
  }
  if (threadIdx.x == kThreads - 1) {
    float largest = -INFINITY;
    int32_t finite = 1;
    for (int i = 0; i < num_parts; ++i) {
      largest = fmaxf(largest, mine[i].largest);
      finite &= mine[i].finite;
    }
    double sum = 0;
    for (int i = 0; i < num_parts; ++i) {
      sum += static_cast<double>(mine[i].sum) * exp(static_cast<double>(mine[i].largest) - largest);
    }
    out.log_sum_exp = largest + log(sum);
    out.finite = finite;
    out.count = want;
    const int32_t asked = p.asked[blockIdx.x];
    out.asked = asked >= 0 ? p.logits[blockIdx.x * p.logits_stride + asked] : 0.0f;
  }
}

}  // namespace

cudaError_t KernelsRun() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, GateMulKernel);
}

cudaError_t RmsNorm(const NormParams& params, cudaStream_t stream) {
  return LaunchNorm<From::kRow>(params, nullptr, nullptr, 1, stream);
}

cudaError_t KeepRows(const KeepParams& params, cudaStream_t stream) {
  KeepKernel<<<static_cast<unsigned>(params.m), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t RmsNormOfRows(const NormParams& params, const int32_t* rows, cudaStream_t stream) {
  return LaunchNorm<From::kNamedRow>(params, rows, nullptr, 1, stream);
}

cudaError_t EmbedAndNorm(const NormParams& params, const void* embedding, float scale, const int32_t* tokens,
                         cudaStream_t stream) {
  return LaunchNorm<From::kEmbedding>(params, tokens, embedding, scale, stream);
}

cudaError_t AddRmsNorm(const AddNormParams& params, cudaStream_t stream) {
  AddNormKernel<<<static_cast<unsigned>(params.m), NormThreads(params.dim), 0, stream>>>(params);
  return cudaGetLastError();
}

bool IsForFewRows(int32_t m, int32_t k) {
  constexpr size_t kShared = 44 << 10;  // of the 48 KiB that every kernel may have
  return m <= kFewRows && static_cast<size_t>(m) * static_cast<size_t>(k) * sizeof(__nv_bfloat16) <= kShared;
}

cudaError_t MultiplyFewRows(const FewRowsParams& params, cudaStream_t stream) {
  using Result = FewRowsParams::Result;
  switch (params.result) {
    case Result::kBf16: return LaunchFewRows<Result::kBf16>(params, stream);
    case Result::kGateMul: return LaunchFewRows<Result::kGateMul>(params, stream);
    case Result::kF32:
    case Result::kAddToF32: return LaunchFewRows<Result::kAddToF32>(params, stream);
  }
  return cudaErrorInvalidValue;
}

bool IsForSomeRows(const SomeRowsParams& params) {
  return params.weights.is_int8() && params.m <= kSomeRows && params.k % kGroup == 0;
}

cudaError_t MultiplySomeRows(const SomeRowsParams& params, cudaStream_t stream) {
  return IsForSomeRows(params) ? LaunchSomeRows(params, stream) : cudaErrorInvalidValue;
}

cudaError_t PrepareRows(const RowsParams& params, cudaStream_t stream) {
  RowsKernel<<<Blocks(int64_t{params.m} * params.half, kThreads), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t RopeAndAppend(const HeadsParams& params, cudaStream_t stream) {
  return params.f16 ? LaunchHeads<__half>(params, stream) : LaunchHeads<__nv_bfloat16>(params, stream);
}

cudaError_t Bf16FromF16(void* x, int64_t count, cudaStream_t stream) {
  Bf16FromF16Kernel<<<Blocks(count / 8, kThreads), kThreads, 0, stream>>>(x, count);
  return cudaGetLastError();
}

cudaError_t Bf16FromInt8(const MatrixView& weights, int32_t n, int32_t k, void* out, cudaStream_t stream) {
  if (k % kGroup != 0) return cudaErrorInvalidValue;
  const int64_t items = int64_t{n} * (k / 16);
  Bf16FromInt8Kernel<<<Blocks(items, kThreads), kThreads, 0, stream>>>(weights, items, k / 16,
                                                                       static_cast<__nv_bfloat16*>(out));
  return cudaGetLastError();
}

cudaError_t GateMul(const GateParams& gate, const void* gate_up, int64_t m, int32_t dim, void* out,
                    cudaStream_t stream) {
  const int64_t items = m * (dim / 8);
  GateMulKernel<<<Blocks(items, kThreads), kThreads, 0, stream>>>(gate, static_cast<const __nv_bfloat16*>(gate_up),
                                                                  items, dim, static_cast<__nv_bfloat16*>(out));
  return cudaGetLastError();
}

size_t TopWorkspaceSize(int32_t m, int32_t vocab) {
  return static_cast<size_t>(m) * static_cast<size_t>(Parts(vocab)) * sizeof(TopPart);
}

cudaError_t FindTop(const TopParams& params, cudaStream_t stream) {
  static_assert(kMaxTopVocab == kPart * (kPart / kTopLogits));
  if (params.vocab > kMaxTopVocab) return cudaErrorInvalidValue;
  auto* const parts = static_cast<TopPart*>(params.workspace);
  const int32_t num_parts = Parts(params.vocab);
  const dim3 grid(static_cast<unsigned>(num_parts), static_cast<unsigned>(params.m));
  TopOfPartsKernel<<<grid, kThreads, 0, stream>>>(params, parts);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  TopOfRowKernel<<<static_cast<unsigned>(params.m), kThreads, 0, stream>>>(params, parts, num_parts);
  return cudaGetLastError();
}

}  // namespace phsa::cuda
