// Device helpers that the kernels share: tensor-core products, asynchronous copies, barriers, and where things lie.
#ifndef PHSA_ATTENTION_CUDA_DEVICE_CUH_
#define PHSA_ATTENTION_CUDA_DEVICE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda.h"

namespace phsa::cuda {

inline constexpr int kBlock = kBlockTokens;
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

using bf16 = __nv_bfloat16;

template <typename T>
struct Convert;
template <>
struct Convert<bf16> {
  static __device__ float2 Unpack(uint32_t x) { return __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(x)); }
  static __device__ uint32_t Pack(float x, float y) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(v);
  }
};
template <>
struct Convert<half> {
  static __device__ float2 Unpack(uint32_t x) { return __half22float2(reinterpret_cast<__half2&>(x)); }
  static __device__ uint32_t Pack(float x, float y) {
    const __half2 v = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(v);
  }
};

// d += a · b, 16 × 8 × 16. Lane (r, c) = (lane / 4, lane % 4) holds rows r and r + 8, columns 2c and 2c + 1 of d.
template <typename T>
__device__ __forceinline__ void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (sizeof(T) == 2 && __is_same(T, bf16)) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ __forceinline__ void LoadMatrix(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}
__device__ __forceinline__ void LoadMatrixTransposed(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}

// Rows of words in the layout of products: lane c of four holds words c, 4 + c, … of a row. Four lanes exchange words:
// lane c gives word i to lane i, and gets its c-th from it. So a lane reads and writes 16 bytes of a row at a time, not
// four times 4. All lanes of the warp together.
__device__ __forceinline__ uint4 ExchangeWords(uint4 w, int c) {
  const bool odd = (c & 1) != 0, high = (c & 2) != 0;
  const uint32_t x = __shfl_xor_sync(~0u, odd ? w.x : w.y, 1), y = __shfl_xor_sync(~0u, odd ? w.z : w.w, 1);
  const uint4 v = odd ? make_uint4(x, w.y, y, w.w) : make_uint4(w.x, x, w.z, y);
  const uint32_t s = __shfl_xor_sync(~0u, high ? v.x : v.z, 2), t = __shfl_xor_sync(~0u, high ? v.y : v.w, 2);
  return high ? make_uint4(s, t, v.z, v.w) : make_uint4(v.x, v.y, s, t);
}

// A of products for rows r and r + 8, in the plain order of k; zeros where there is no row. In two steps, so that
// something else may be done while the rows are under way.
template <typename T, int kPieces>
__device__ __forceinline__ void LoadRowWords(const T* row0, const T* row1, int c, uint4 (&words)[2][kPieces]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const T* row = e == 0 ? row0 : row1;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      words[e][i] = row ? *reinterpret_cast<const uint4*>(row + (4 * i + c) * 8) : uint4{};
    }
  }
}
template <int kPieces>
__device__ __forceinline__ void MakeOperand(const uint4 (&words)[2][kPieces], int c, uint32_t (&a)[2 * kPieces][4]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 w = ExchangeWords(words[e][i], c);
      a[2 * i][e] = w.x;
      a[2 * i][2 + e] = w.y;
      a[2 * i + 1][e] = w.z;
      a[2 * i + 1][2 + e] = w.w;
    }
  }
}

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Values that the compiler keeps: left alone it reads the special registers behind them anew at every use, which takes
// longer than an arithmetic instruction. All lanes of the warp together.
__device__ __forceinline__ uint32_t OpaqueAddress(const void* p) { return __shfl_sync(~0u, SharedAddress(p), 0); }
__device__ __forceinline__ int OpaqueWarp() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }
__device__ __forceinline__ int OpaqueLane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// 16 bytes from global to shared memory; zeros where `valid` is false (then nothing is read).
__device__ __forceinline__ void CopyAsync16(uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void BarrierInit(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(barrier) : "memory");
}
// Makes initialised barriers visible to the copy engine; __syncthreads does the rest.
__device__ __forceinline__ void FenceBarrierInit() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Arrives once the calling thread's asynchronous copies so far have landed.
__device__ __forceinline__ void BarrierArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool BarrierTest(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p;\n"
#if __CUDA_ARCH__ >= 900
      "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
      "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// All lanes of the warp together: lanes may leave the loop apart, and what follows may want them converged.
__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  while (!BarrierTest(barrier, parity)) {
  }
  __syncwarp();
}

// Named barriers of a part of the CTA, whole warps; 0 is __syncthreads'. The forms that do not ask for converged warps:
// the compiler may copy inline assembly into the branches before it.
__device__ __forceinline__ void SyncNamed(int id, int threads) {
  __syncwarp();
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
  __syncwarp();
}
__device__ __forceinline__ void ArriveNamed(int id, int threads) {
  __syncwarp();
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Shared-memory tiles: rows of 128 bytes (64 elements) in which the 16-byte piece i of row r lies at i ^ (r % 8), the
// 128-byte swizzle of wgmma. A head of 128 elements is two such panels, `panel_bytes` apart.
__device__ __forceinline__ uint32_t TileOffset(int row, int piece, uint32_t panel_bytes) {
  return (piece >> 3) * panel_bytes + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
}

// One sequence of the batch as a kernel sees it.
struct SequenceView {
  int32_t seq;
  int32_t q_start, q_len, kv_len;
  __device__ int32_t first_position() const { return kv_len - q_len; }
};

// Finds the sequence of a tile when every sequence is cut into tiles of `tile` queries: each `tile` value's CTA walks
// the (few) sequences. Returns the tile's first query inside its sequence, or -1 beyond the last tile.
__device__ inline int32_t FindTile(const Batch& batch, int32_t index, int32_t tile, SequenceView& view) {
  for (int32_t s = 0; s < batch.num_seqs; ++s) {
    const int32_t start = batch.cu_q[s];
    const int32_t len = batch.cu_q[s + 1] - start;
    const int32_t tiles = (len + tile - 1) / tile;
    if (index < tiles) {
      view = {s, start, len, batch.kv_lens[s]};
      return index * tile;
    }
    index -= tiles;
  }
  return -1;
}

// Items of falling length go to the CTAs in turn, there and back: none gets the longer of every turn. The numbers of a
// CTA's items grow with the turn.
__device__ __forceinline__ int32_t ItemOfTurn(int32_t turn) {
  const uint32_t place = turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  return static_cast<int32_t>(static_cast<uint32_t>(turn) * gridDim.x + place);
}

// Offset, in elements, of the first token of a block; a block never crosses a page.
__device__ __forceinline__ int64_t BlockOffset(const Batch& batch, const Rows& rows, int32_t seq, int32_t block) {
  if (batch.page_size == 0) {
    const int64_t start = batch.kv_starts ? batch.kv_starts[seq] : batch.cu_q[seq];
    return (start + static_cast<int64_t>(block) * kBlock) * rows.token_stride;
  }
  const int32_t blocks = batch.page_size / kBlock;
  const int64_t page = batch.page_table[seq * batch.page_table_stride + block / blocks];
  return page * rows.page_stride + static_cast<int64_t>(block % blocks) * kBlock * rows.token_stride;
}
// The same of a row of reps; a block has `parts` of them.
__device__ __forceinline__ int64_t RepOffset(const Batch& batch, const Rows& rows, int32_t parts, int32_t seq,
                                             int32_t row) {
  if (batch.page_size == 0) return (batch.rep_starts[seq] + row) * rows.token_stride;
  const int32_t on_page = batch.page_size / kBlock * parts;
  const int64_t page = batch.page_table[seq * batch.page_table_stride + row / on_page];
  return page * rows.page_stride + static_cast<int64_t>(row % on_page) * rows.token_stride;
}

// The block arithmetic of a query; the same as the plan's.
__device__ __forceinline__ int32_t CandidateEnd(const Shape& shape, int32_t b) {
  return max(shape.init_blocks, b - shape.local_blocks);
}
__device__ __forceinline__ bool BelowDense(const Shape& shape, int32_t b) { return b * kBlock < shape.dense_below; }
__device__ __forceinline__ bool ReadsAll(const Shape& shape, int32_t b) {
  return BelowDense(shape, b) || CandidateEnd(shape, b) - shape.init_blocks <= shape.top_k;
}

// Tiles of `tile` queries that a batch has at most; the device arrays alone know the exact number.
inline int32_t MaxTiles(const Batch& batch, int32_t tile) {
  if (batch.num_seqs == 1) return (batch.total_q + tile - 1) / tile;
  const int64_t most = batch.total_q / tile + static_cast<int64_t>(batch.num_seqs);
  return static_cast<int32_t>(most);
}

int32_t DeviceArchitecture();  // 80 or 90
unsigned Multiprocessors();    // of the current device

}  // namespace phsa::cuda

#endif  // PHSA_ATTENTION_CUDA_DEVICE_CUH_
