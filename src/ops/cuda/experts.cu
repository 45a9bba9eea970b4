#include "ops/cuda/experts.h"

#include <cuda_bf16.h>

#include <algorithm>

#include "ops/cuda/device.cuh"

namespace phsa::cuda {
namespace {

using namespace ops;  // NOLINT: what all of these kernels are made of

constexpr int kWarps = kThreads / kWarp;

// A thread block has kRows rows, and each of its warps an expert. Every block of a row makes its norm; the first one of
// them writes it.
template <int kRows>
__global__ __launch_bounds__(kThreads) void RouterKernel(RouteParams p) {
  extern __shared__ float normed[];  // [kRows][dim]
  __shared__ float shared[kRows][kWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int64_t first = int64_t{blockIdx.y} * kRows;
  const int rows = static_cast<int>(min(int64_t{kRows}, p.m - first));
  float values[8], weight[8];
  for (int r = 0; r < rows; ++r) {
    const float* const x = p.x + (first + r) * p.dim;
    float sum = 0;
    for (int i = thread * 8; i < p.dim; i += kThreads * 8) {
      Load(x + i, values);
#pragma unroll
      for (const float value : values) sum += value * value;
    }
    const float scale = rsqrtf(BlockSum(sum, shared[r]) / static_cast<float>(p.dim) + p.eps);
    for (int i = thread * 8; i < p.dim; i += kThreads * 8) {
      Load(x + i, values);
      Load(p.norm + i, weight);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        values[j] = values[j] * scale * weight[j];
        normed[r * p.dim + i + j] = values[j];
      }
      if (blockIdx.x == 0) Store(values, static_cast<__nv_bfloat16*>(p.normed) + (first + r) * p.dim + i);
    }
  }
  __syncthreads();
  const int expert = static_cast<int>(blockIdx.x) * kWarps + warp;
  if (expert >= p.num_experts) return;
  const float* const router = p.router + int64_t{expert} * p.dim;
  float sums[kRows] = {};
  for (int i = lane * 4; i < p.dim; i += kWarp * 4) {
    const float4 w = *reinterpret_cast<const float4*>(router + i);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
      const float4 x = *reinterpret_cast<const float4*>(normed + r * p.dim + i);
      sums[r] = fmaf(w.x, x.x, fmaf(w.y, x.y, fmaf(w.z, x.z, fmaf(w.w, x.w, sums[r]))));
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = WarpSum(sums[r]);
    if (lane == 0 && r < rows) {
      p.logits[(first + r) * p.num_experts + expert] = sum + (p.bias != nullptr ? p.bias[expert] : 0.0f);
    }
  }
}

// A warp has a row.
__global__ __launch_bounds__(kThreads) void TakeKernel(RouteParams p) {
  constexpr int kHeld = kMaxExperts / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (row >= p.m) return;
  const float* const logits = p.logits + row * p.num_experts;
  float held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int expert = i * kWarp + lane;
    const float logit = expert < p.num_experts ? logits[expert] : -INFINITY;
    held[i] = isnan(logit) ? -INFINITY : logit;  // from damaged weights: the least likely
  }
  float largest = 0, taken_sum = 0, own = 0;
  int own_expert[kMaxTakenExperts / kWarp] = {};
  float own_value[kMaxTakenExperts / kWarp] = {};
  uint32_t used = 0;
  for (int i = 0; i < p.taken; ++i) {
    float best = -INFINITY;
    int at = kMaxExperts;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int expert = j * kWarp + lane;
      if (expert < p.num_experts && (used >> j & 1) == 0 && (at == kMaxExperts || held[j] > best)) {
        best = held[j];
        at = expert;
      }
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(~0u, best, step);
      const int other_at = __shfl_xor_sync(~0u, at, step);
      if (other_at < kMaxExperts && (at == kMaxExperts || other > best || (other == best && other_at < at))) {
        best = other;
        at = other_at;
      }
    }
    if (at % kWarp == lane) used |= 1u << (at / kWarp);
    if (i == 0) largest = best;
    const float value = __expf(best - largest);
    taken_sum += value;
#pragma unroll
    for (int j = 0; j < kMaxTakenExperts / kWarp; ++j) {
      if (i == j * kWarp + lane) {
        own_expert[j] = at;
        own_value[j] = value;
      }
    }
  }
  if (!p.normalized) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) own += j * kWarp + lane < p.num_experts ? __expf(held[j] - largest) : 0.0f;
    taken_sum = WarpSum(own);
  }
#pragma unroll
  for (int j = 0; j < kMaxTakenExperts / kWarp; ++j) {
    const int i = j * kWarp + lane;
    if (i >= p.taken) break;
    p.experts[row * p.taken + i] = own_expert[j];
    p.weights[row * p.taken + i] = own_value[j] / taken_sum;
  }
}

// One thread block. Where a pair comes among those of its expert is left to chance: no result depends on it.
__global__ __launch_bounds__(kMaxExperts) void GroupKernel(GroupParams p, int tile_rows, int max_tiles) {
  __shared__ int32_t counts[kMaxExperts];
  __shared__ int2 before[2][kMaxExperts];  // pairs and tiles of this expert and those before it
  const int thread = static_cast<int>(threadIdx.x);
  counts[thread] = 0;
  __syncthreads();
  for (int i = thread; i < p.pairs; i += kMaxExperts) atomicAdd(&counts[p.experts[i]], 1);
  __syncthreads();
  const int own = counts[thread], own_tiles = (own + tile_rows - 1) / tile_rows;
  int2 sum = {own, own_tiles};
  before[0][thread] = sum;
  __syncthreads();
  int from = 0;
  for (int step = 1; step < kMaxExperts; step *= 2, from ^= 1) {
    if (thread >= step) {
      const int2 other = before[from][thread - step];
      sum = {sum.x + other.x, sum.y + other.y};
    }
    before[from ^ 1][thread] = sum;
    __syncthreads();
  }
  const int start = sum.x - own;
  if (thread < p.num_experts) p.starts[thread] = start;
  if (thread == p.num_experts) p.starts[thread] = p.pairs;
  if (p.num_experts == kMaxExperts && thread == 0) p.starts[kMaxExperts] = p.pairs;
  for (int i = 0; i < own_tiles; ++i) {
    p.tiles[2 * (sum.y - own_tiles + i)] = thread;
    p.tiles[2 * (sum.y - own_tiles + i) + 1] = start + i * tile_rows;
  }
  for (int i = before[from][kMaxExperts - 1].y + thread; i < max_tiles; i += kMaxExperts) p.tiles[2 * i] = -1;
  counts[thread] = start;
  __syncthreads();
  for (int i = thread; i < p.pairs; i += kMaxExperts) p.order[atomicAdd(&counts[p.experts[i]], 1)] = i;
}

__device__ __forceinline__ void CopyAsync(uint4* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(there ? 16 : 0));
}

__device__ __forceinline__ void LoadMatrices(const uint4* from, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))));
}

// A thread block has a tile of kM pairs and kN columns; 64 columns of x and of the weights are a step of its loop, and
// kStages of them are on their way. A step's row is 8 pieces of 16 bytes, whose places are exchanged by the row, so that
// the 8 rows of a matrix that the tensor cores load lie in different banks.
template <int kM, int kN, int kWarpsM, int kWarpsN, int kStages>
struct Tile {
  static constexpr int kPieces = 8, kStep = kPieces * 8;
  static constexpr int kBlock = kWarpsM * kWarpsN * kWarp;
  static constexpr int kOfM = kM / kWarpsM / 16, kOfN = kN / kWarpsN / 8;  // products of a warp
  static constexpr int kRows = kM + kN;
  static constexpr size_t kShared = sizeof(uint4) * kStages * kRows * kPieces;
  static_assert(kOfN % 2 == 0);

  static __device__ int At(int row, int piece) { return row * kPieces + (piece ^ (row % kPieces)); }

  template <bool kF32>
  static __device__ void Run(const GroupedParams& p, uint4* memory, int32_t* pairs) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int expert = p.groups.tiles[2 * blockIdx.y];
    if (expert < 0) return;
    const int first = p.groups.tiles[2 * blockIdx.y + 1], end = p.groups.starts[expert + 1];
    for (int i = thread; i < kM; i += kBlock) pairs[i] = first + i < end ? p.groups.order[first + i] : -1;
    __syncthreads();
    const int column = static_cast<int>(blockIdx.x) * kN;
    const auto* const x = static_cast<const __nv_bfloat16*>(p.x);
    const auto* const weights = static_cast<const __nv_bfloat16*>(p.weights) + int64_t{expert} * p.n * p.k;
    const auto load = [&](int step) {
      uint4* const to = memory + step % kStages * kRows * kPieces;
      for (int i = thread; i < kRows * kPieces; i += kBlock) {
        const int row = i / kPieces, at = step * kStep + i % kPieces * 8;
        const bool of_x = row < kM;
        const int64_t from = of_x ? pairs[row] / p.pairs_of_row : column + row - kM;
        const bool there = at < p.k && (of_x ? pairs[row] >= 0 : from < p.n);
        CopyAsync(to + At(row, i % kPieces), (of_x ? x : weights) + (there ? from * p.k + at : 0), there);
      }
    };
    const int steps = (p.k + kStep - 1) / kStep;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < steps) load(i);
      asm volatile("cp.async.commit_group;");
    }
    const int first_row = warp / kWarpsN * kOfM * 16, first_column = warp % kWarpsN * kOfN * 8;
    float sums[kOfM][kOfN][4] = {};
    for (int step = 0; step < steps; ++step) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
      __syncthreads();
      if (step + kStages - 1 < steps) load(step + kStages - 1);
      asm volatile("cp.async.commit_group;");
      const uint4* const of_x = memory + step % kStages * kRows * kPieces;
#pragma unroll
      for (int k = 0; k < kPieces; k += 2) {
        uint32_t a[kOfM][4], b[kOfN / 2][4];
#pragma unroll
        for (int i = 0; i < kOfM; ++i) LoadMatrices(of_x + At(first_row + i * 16 + lane % 16, k + lane / 16), a[i]);
#pragma unroll
        for (int i = 0; i < kOfN / 2; ++i) {
          const int row = kM + first_column + i * 16 + lane / 16 * 8 + lane % 8;
          LoadMatrices(of_x + At(row, k + lane / 8 % 2), b[i]);
        }
#pragma unroll
        for (int i = 0; i < kOfM; ++i) {
#pragma unroll
          for (int j = 0; j < kOfN; ++j) Mma(a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], sums[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kOfM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t pair = pairs[first_row + i * 16 + half * 8 + lane / 4];
        if (pair < 0) continue;
#pragma unroll
        for (int j = 0; j < kOfN; ++j) {
          const int at = column + first_column + j * 8 + lane % 4 * 2;
          if (at >= p.n) continue;
          float2 y = {sums[i][j][half * 2], sums[i][j][half * 2 + 1]};
          if (p.bias != nullptr) {
            y.x += p.bias[int64_t{expert} * p.n + at];
            y.y += p.bias[int64_t{expert} * p.n + at + 1];
          }
          if constexpr (kF32) {
            *reinterpret_cast<float2*>(static_cast<float*>(p.y) + pair * p.n + at) = y;
          } else {
            *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.y) + pair * p.n + at) =
                __floats2bfloat162_rn(y.x, y.y);
          }
        }
      }
    }
  }

  template <bool kF32>
  static cudaError_t Launch(const GroupedParams& p, cudaStream_t stream);
};

template <class T, int kM, bool kF32>
__global__ __launch_bounds__(T::kBlock) void GroupedKernel(GroupedParams p) {
  extern __shared__ uint4 memory[];
  __shared__ int32_t pairs[kM];
  T::template Run<kF32>(p, memory, pairs);
}

template <int kM, int kN, int kWarpsM, int kWarpsN, int kStages>
template <bool kF32>
cudaError_t Tile<kM, kN, kWarpsM, kWarpsN, kStages>::Launch(const GroupedParams& p, cudaStream_t stream) {
  const auto kernel = GroupedKernel<Tile, kM, kF32>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (error != cudaSuccess) return error;
  const dim3 grid(Blocks(p.n, kN), static_cast<unsigned>(MaxTiles(p.groups.pairs, p.groups.num_experts)));
  kernel<<<grid, kBlock, kShared, stream>>>(p);
  return cudaGetLastError();
}

// For decoding, which reads weights and little else; for short prompts; and for chunks of prefill.
constexpr int kFewPairs = 16, kSomePairs = 64, kManyPairs = 128;
using FewTile = Tile<kFewPairs, 64, 1, 4, 4>;
using SomeTile = Tile<kSomePairs, 128, 2, 4, 3>;
using ManyTile = Tile<kManyPairs, 128, 2, 4, 3>;

template <bool kF32>
cudaError_t LaunchGrouped(const GroupedParams& p, cudaStream_t stream) {
  switch (TileRows(p.groups.pairs, p.groups.num_experts)) {
    case kFewPairs: return FewTile::Launch<kF32>(p, stream);
    case kSomePairs: return SomeTile::Launch<kF32>(p, stream);
    default: return ManyTile::Launch<kF32>(p, stream);
  }
}

__global__ __launch_bounds__(kThreads) void CombineKernel(CombineParams p, int64_t items) {
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;  // 8 columns of a row
  if (item >= items) return;
  const int pieces = p.dim / 8;
  const int64_t row = item / pieces, at = item % pieces * 8;
  float sum[8] = {}, x[8];
  for (int i = 0; i < p.taken; ++i) {
    const float weight = p.weights[row * p.taken + i];
    Load(p.x + (row * p.taken + i) * p.dim + at, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = fmaf(weight, x[j], sum[j]);
  }
  float* const y = p.y + row * p.dim + at;
#pragma unroll
  for (int j = 0; j < 8; ++j) y[j] = p.add ? fmaf(p.scale, sum[j], y[j]) : p.scale * sum[j];
}

template <int kRows>
cudaError_t LaunchRouter(const RouteParams& p, cudaStream_t stream) {
  const dim3 grid(Blocks(p.num_experts, kWarps), Blocks(p.m, kRows));
  const auto bytes = static_cast<size_t>(kRows) * static_cast<size_t>(p.dim) * sizeof(float);
  RouterKernel<kRows><<<grid, kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t Route(const RouteParams& params, cudaStream_t stream) {
  constexpr size_t kShared = 48000;  // of the 48 KiB that every kernel may have
  static_assert(kMaxRoutedDim * sizeof(float) <= 49152 - sizeof(float) * kWarps);
  if (params.dim > kMaxRoutedDim || params.num_experts > kMaxExperts || params.taken > kMaxTakenExperts) {
    return cudaErrorInvalidValue;
  }
  const size_t row = static_cast<size_t>(params.dim) * sizeof(float);
  cudaError_t error = cudaSuccess;
  if (params.m >= 4 && 4 * row <= kShared) {
    error = LaunchRouter<4>(params, stream);
  } else if (params.m >= 2 && 2 * row <= kShared) {
    error = LaunchRouter<2>(params, stream);
  } else {
    error = LaunchRouter<1>(params, stream);
  }
  if (error != cudaSuccess) return error;
  TakeKernel<<<Blocks(params.m, kWarps), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

int32_t TileRows(int32_t pairs, int32_t num_experts) {
  const int32_t each = pairs / num_experts;
  return each <= kFewPairs ? kFewPairs : each <= kSomePairs ? kSomePairs : kManyPairs;
}

int32_t MaxTiles(int32_t pairs, int32_t num_experts) {
  return std::min(pairs, num_experts) + pairs / TileRows(pairs, num_experts);
}

int32_t MostTiles(int32_t pairs, int32_t num_experts) { return std::min(pairs, num_experts) + pairs / kFewPairs; }

cudaError_t GroupByExpert(const GroupParams& params, cudaStream_t stream) {
  GroupKernel<<<1, kMaxExperts, 0, stream>>>(params, TileRows(params.pairs, params.num_experts),
                                             MaxTiles(params.pairs, params.num_experts));
  return cudaGetLastError();
}

cudaError_t MultiplyGrouped(const GroupedParams& params, cudaStream_t stream) {
  if (params.n % 8 != 0 || params.k % 8 != 0) return cudaErrorInvalidValue;
  return params.f32 ? LaunchGrouped<true>(params, stream) : LaunchGrouped<false>(params, stream);
}

cudaError_t CombineExperts(const CombineParams& params, cudaStream_t stream) {
  const int64_t items = int64_t{params.m} * (params.dim / 8);
  CombineKernel<<<Blocks(items, kThreads), kThreads, 0, stream>>>(params, items);
  return cudaGetLastError();
}

}  // namespace phsa::cuda
