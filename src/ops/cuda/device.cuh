// What the operations' kernels are made of: loads of 16 bytes, sums over warps and thread blocks, the tensor cores'
// product, gates.
#ifndef PHSA_OPS_CUDA_DEVICE_CUH_
#define PHSA_OPS_CUDA_DEVICE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ops/cuda/ops.h"

namespace phsa::cuda::ops {

inline constexpr int kThreads = 256;
inline constexpr int kWarp = 32;
inline constexpr int kGroup = 32;  // columns of int8 weights that share a scale

inline unsigned Blocks(int64_t items, int per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

// Eight elements of 2 bytes: what a thread loads and stores at a time.
template <typename T>
struct Eight;
template <>
struct Eight<__nv_bfloat16> {
  static __device__ float2 Unpack(uint32_t x) { return __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(x)); }
  static __device__ uint32_t Pack(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
  }
};
template <>
struct Eight<__half> {
  static __device__ float2 Unpack(uint32_t x) { return __half22float2(reinterpret_cast<__half2&>(x)); }
  static __device__ uint32_t Pack(float x, float y) {
    const __half2 pair = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
  }
};

template <typename T>
__device__ __forceinline__ void Unpack(const uint4& words, float (&x)[8]) {
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = Eight<T>::Unpack(word[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

template <typename T>
__device__ __forceinline__ void Load(const T* from, float (&x)[8]) {
  Unpack<T>(*reinterpret_cast<const uint4*>(from), x);
}

__device__ __forceinline__ void Load(const float* from, float (&x)[8]) {
  *reinterpret_cast<float4*>(x) = *reinterpret_cast<const float4*>(from);
  *reinterpret_cast<float4*>(x + 4) = *reinterpret_cast<const float4*>(from + 4);
}

template <typename T>
__device__ __forceinline__ void Store(const float (&x)[8], T* to) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = Eight<T>::Pack(x[2 * i], x[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
}

// 16 codes of int8 weights, as numbers without their scale. A byte in the low bits of 2^23 is 2^23 + the byte: a
// permutation and a subtraction, where converting integers has a sixteenth of their rate.
__device__ __forceinline__ void UnpackCodes(const uint4& words, float (&x)[16]) {
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i] = __uint_as_float(__byte_perm(word[i / 4], 0x4b000000u, 0x7540u + i % 4)) - ((1 << 23) + 128);
  }
}

__device__ __forceinline__ float Scale(const uint16_t* from) {
  return __half2float(*reinterpret_cast<const __half*>(from));
}

// a · sigmoid(x).
__device__ __forceinline__ float TimesSigmoid(float a, float x) { return a / (1.0f + __expf(-x)); }

__device__ __forceinline__ float Gated(const GateParams& p, float gate, float up) {
  switch (p.kind) {
    case GateParams::Kind::kSilu: return TimesSigmoid(gate, gate) * up;
    case GateParams::Kind::kGeluTanh:
      // 1 + tanh(x) is 2 · sigmoid(2x).
      return TimesSigmoid(gate, 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate)) * up;
    case GateParams::Kind::kClampedSwiglu: {
      const float g = fminf(gate, p.limit), u = fmaxf(fminf(up, p.limit), -p.limit);
      return TimesSigmoid(g, p.alpha * g) * (u + 1.0f);
    }
  }
  return 0;
}

__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ float WarpMax(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// Over the thread block, in one order. `shared` has room for a float of each warp, and is free again after the next
// barrier.
__device__ __forceinline__ float BlockSum(float x, float* shared) {
  x = WarpSum(x);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  float sum = 0;
  for (unsigned i = 0; i < blockDim.x / kWarp; ++i) sum += shared[i];
  return sum;
}

__device__ __forceinline__ float BlockMax(float x, float* shared) {
  x = WarpMax(x);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  float most = shared[0];
  for (unsigned i = 1; i < blockDim.x / kWarp; ++i) most = fmaxf(most, shared[i]);
  return most;
}

// c += a · b, with the fragments of mma.sync.m16n8k16.
__device__ __forceinline__ void Mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace phsa::cuda::ops

#endif  // PHSA_OPS_CUDA_DEVICE_CUH_
