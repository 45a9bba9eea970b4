// Warpgroup products of Hopper (sm_90a): A in registers or, like B, in shared memory under the 128-byte swizzle.
#ifndef PHSA_ATTENTION_CUDA_WGMMA_CUH_
#define PHSA_ATTENTION_CUDA_WGMMA_CUH_

#include "attention/cuda/device.cuh"

// The instructions exist in the sm_90a target alone; kernels that use them are empty in any other.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PHSA_SM90A 1
#endif

namespace phsa::cuda {

// The copy engine: arrives, and `bytes` more must land before the barrier completes; and a box of a tensor, one thread.
__device__ __forceinline__ void BarrierArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void CopyTensor5(uint32_t shared, const void* map, uint32_t barrier, int32_t c0, int32_t c1,
                                            int32_t c2, int32_t c3, int32_t c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], "
      "[%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

#ifdef PHSA_SM90A

__device__ __forceinline__ void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void WgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Waits for all products, but not before `value`, mostly true, is known: ptxas would otherwise move the wait up before
// the arithmetic that is to hide it. An instruction that it does not move ties the two together.
__device__ __forceinline__ void WgmmaWaitAfter(bool value) {
  asm volatile("{ .reg .pred p; setp.eq.s32 p, %0, 0; @p nanosleep.u32 0; wgmma.wait_group.sync.aligned 0; }" ::"r"(
                   static_cast<int>(value))
               : "memory");
}
// Shared memory written by ordinary stores or cp.async becomes visible to wgmma.
__device__ __forceinline__ void FenceAsyncProxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Keeps the compiler from moving reads of accumulators above a wait.
template <int kCount>
__device__ __forceinline__ void Pin(float (&x)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(x[i][j])::"memory");
  }
}

// Descriptor of a B operand with the 128-byte swizzle. K-major (rows are n, 64 k elements each): `stride` is the
// distance of 8-row groups. MN-major (rows are k, 64 n elements each): `stride` is the distance of groups of 8 k,
// `leading` that of panels of 64 n.
__device__ __forceinline__ uint64_t Descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return (static_cast<uint64_t>((address & 0x3FFFF) >> 4)) | (static_cast<uint64_t>(leading >> 4) << 16) |
         (static_cast<uint64_t>(stride >> 4) << 32) | (uint64_t{1} << 62);
}

// The same, `bytes` on. Shared addresses fit the low word: no carry.
__device__ __forceinline__ uint64_t DescriptorPlus(uint64_t descriptor, uint32_t bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + (bytes >> 4);
  return (descriptor & 0xFFFFFFFF00000000ull) | low;
}

// Tiles of TileOffset, `panel` bytes a panel of 64 columns. The 16 elements from 16 · step on of every row as the inner
// index; or the 16 rows from 16 · step on, all columns.
__device__ __forceinline__ uint64_t AlongElements(uint32_t tile, int step, uint32_t panel) {
  return Descriptor(tile + step / 4 * panel + step % 4 * 32, 16, 1024);
}
__device__ __forceinline__ uint64_t AlongRows(uint32_t tile, int step, uint32_t panel) {
  return Descriptor(tile + step * 2048, panel, 1024);
}

#define PHSA_WG_ACC4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define PHSA_WG_ACC32(d, o)                                                                                           \
  PHSA_WG_ACC4(d, o), PHSA_WG_ACC4(d, o + 1), PHSA_WG_ACC4(d, o + 2), PHSA_WG_ACC4(d, o + 3), PHSA_WG_ACC4(d, o + 4), \
      PHSA_WG_ACC4(d, o + 5), PHSA_WG_ACC4(d, o + 6), PHSA_WG_ACC4(d, o + 7)
#define PHSA_WG_A(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define PHSA_WG_N16 "{%0,%1,%2,%3,%4,%5,%6,%7}"
#define PHSA_WG_N64                                                                                                  \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%" \
  "30,%31}"
#define PHSA_WG_N128                                                                                                  \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%"  \
  "30,%31,"                                                                                                           \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%" \
  "60,%61,%62,%63}"

// d (64 × 8·kCount) = or += a (64 × 16) · b. `kTransposed`: b is MN-major. Lane layout of d and a as for Mma, each warp
// of the warpgroup holding 16 rows.
template <typename T, bool kTransposed>
__device__ __forceinline__ void Wgmma(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  if constexpr (__is_same(T, bf16)) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %13, 0;\n wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 " PHSA_WG_N16
        ", {%8,%9,%10,%11}, %12, p, 1, 1, %14; }"
        : PHSA_WG_ACC4(d, 0), PHSA_WG_ACC4(d, 1)
        : PHSA_WG_A(a), "l"(b), "r"(accumulate), "n"(kTransposed ? 1 : 0));
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %13, 0;\n wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 " PHSA_WG_N16
        ", {%8,%9,%10,%11}, %12, p, 1, 1, %14; }"
        : PHSA_WG_ACC4(d, 0), PHSA_WG_ACC4(d, 1)
        : PHSA_WG_A(a), "l"(b), "r"(accumulate), "n"(kTransposed ? 1 : 0));
  }
}
template <typename T, bool kTransposed>
__device__ __forceinline__ void Wgmma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  if constexpr (__is_same(T, bf16)) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " PHSA_WG_N64
        ", {%32,%33,%34,%35}, %36, p, 1, 1, %38; }"
        : PHSA_WG_ACC32(d, 0)
        : PHSA_WG_A(a), "l"(b), "r"(accumulate), "n"(kTransposed ? 1 : 0));
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " PHSA_WG_N64
        ", {%32,%33,%34,%35}, %36, p, 1, 1, %38; }"
        : PHSA_WG_ACC32(d, 0)
        : PHSA_WG_A(a), "l"(b), "r"(accumulate), "n"(kTransposed ? 1 : 0));
  }
}
template <typename T, bool kTransposed>
__device__ __forceinline__ void Wgmma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  if constexpr (__is_same(T, bf16)) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0;\n wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " PHSA_WG_N128
        ", {%64,%65,%66,%67}, %68, p, 1, 1, %70; }"
        : PHSA_WG_ACC32(d, 0), PHSA_WG_ACC32(d, 8)
        : PHSA_WG_A(a), "l"(b), "r"(accumulate), "n"(kTransposed ? 1 : 0));
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0;\n wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " PHSA_WG_N128
        ", {%64,%65,%66,%67}, %68, p, 1, 1, %70; }"
        : PHSA_WG_ACC32(d, 0), PHSA_WG_ACC32(d, 8)
        : PHSA_WG_A(a), "l"(b), "r"(accumulate), "n"(kTransposed ? 1 : 0));
  }
}

// The same with a (64 rows) in shared memory, both operands with the inner index along their rows.
template <typename T>
__device__ __forceinline__ void WgmmaShared(float (&d)[8][4], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (__is_same(T, bf16)) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " PHSA_WG_N64
        ", %32, %33, p, 1, 1, 0, 0; }"
        : PHSA_WG_ACC32(d, 0)
        : "l"(a), "l"(b), "r"(accumulate));
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " PHSA_WG_N64
        ", %32, %33, p, 1, 1, 0, 0; }"
        : PHSA_WG_ACC32(d, 0)
        : "l"(a), "l"(b), "r"(accumulate));
  }
}

#endif  // PHSA_SM90A

}  // namespace phsa::cuda

#endif  // PHSA_ATTENTION_CUDA_WGMMA_CUH_
