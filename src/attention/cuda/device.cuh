// Device helpers that the kernels share: tensor-core products, asynchronous copies, barriers, and where things lie.
#ifndef PHSA_ATTENTION_CUDA_DEVICE_CUH_
#define PHSA_ATTENTION_CUDA_DEVICE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/cuda/cuda.h"

namespace phsa::cuda {

inline constexpr int kBlock = kBlockTokens;
inline constexpr unsigned kFullWarp = 0xffffffffu;
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

using bf16 = __nv_bfloat16;

// Pairs of elements; the first is the lower half.
template <typename T>
__device__ __forceinline__ uint32_t Pack(float x, float y) {
  uint32_t out;
  if constexpr (__is_same(T, bf16)) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(y), "f"(x));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(y), "f"(x));
  }
  return out;
}
template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t pair) {
  if constexpr (__is_same(T, bf16)) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
}
template <typename T>
__device__ __forceinline__ float ToFloat(T x) {
  if constexpr (__is_same(T, bf16)) {
    return __bfloat162float(x);
  } else {
    return __half2float(x);
  }
}
template <typename T>
__device__ __forceinline__ T FromFloat(float x) {
  if constexpr (__is_same(T, bf16)) {
    return __float2bfloat16_rn(x);
  } else {
    return __float2half_rn(x);
  }
}

// d += a · b, 16 × 8 × 16. Lane (r, c) = (lane / 4, lane % 4) holds rows r and r + 8 of a and d, columns 2c and 2c + 1
// of d, column r of b; of the inner index pairs at 2c and 2c + 8. A product does not care in which order the 16 inner
// indices come, as long as a and b agree: several loads use that to read 16 bytes at a time.
template <typename T>
__device__ __forceinline__ void Mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  if constexpr (__is_same(T, bf16)) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}
template <typename T>
__device__ __forceinline__ void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Mma<T>(d, a[0], a[1], a[2], a[3], b0, b1);
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

// A row as the four lanes of a product's row hold it: lane c has the 16-byte pieces c, 4 + c, … of it. Where head_dim
// is no multiple of 32 the last lanes' last piece is zero.
template <int kHeadDim>
inline constexpr int kRowPieces = (kHeadDim + 31) / 32;
template <int kHeadDim>
__device__ __forceinline__ bool HasPiece(int piece) {
  return kHeadDim % 32 == 0 || piece < kHeadDim / 8;
}
// Bytes of `rows` rows in a shared-memory tile (TileOffset), and how many lanes a row takes that reads or writes 16
// bytes a lane: a power of two, of which the last are idle where head_dim is none.
template <int kHeadDim>
inline constexpr int kRowBytes = (kHeadDim + 63) / 64 * 128;
template <int kHeadDim>
inline constexpr int kRowLanes = kHeadDim <= 64    ? 8
                                 : kHeadDim <= 128 ? 16
                                                   : 32;

// A of products for rows r and r + 8, in the plain order of k; zeros where there is no row. In two steps, so that
// something else may be done while the rows are under way.
template <int kHeadDim, typename T>
__device__ __forceinline__ void LoadRowWords(const T* row0, const T* row1, int c,
                                             uint4 (&words)[2][kRowPieces<kHeadDim>]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const T* row = e == 0 ? row0 : row1;
#pragma unroll
    for (int i = 0; i < kRowPieces<kHeadDim>; ++i) {
      words[e][i] =
          row && HasPiece<kHeadDim>(4 * i + c) ? *reinterpret_cast<const uint4*>(row + (4 * i + c) * 8) : uint4{};
    }
  }
}
template <int kPieces, int kSteps>
__device__ __forceinline__ void MakeOperand(const uint4 (&words)[2][kPieces], int c, uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 w = ExchangeWords(words[e][i], c);
      a[2 * i][e] = w.x;
      a[2 * i][2 + e] = w.y;
      if (2 * i + 1 < kSteps) {
        a[2 * i + 1][e] = w.z;
        a[2 * i + 1][2 + e] = w.w;
      }
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

// A sink joins a row whose log-sum-exp (log2 units) is `lse2`: one more key without a value. Returns the new
// log-sum-exp, and takes its share from `inverse`, which the row's sums are multiplied by.
__device__ __forceinline__ float JoinSink(float lse2, float sink, float& inverse) {
  const float sink2 = sink * kLog2e, top = fmaxf(lse2, sink2);
  if (top == -INFINITY) return top;
  const float joined = top + log2f(Exp2(lse2 - top) + Exp2(sink2 - top));
  inverse *= Exp2(lse2 - joined);
  return joined;
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

// Tiles of `tile` queries that a batch has at most; the device arrays alone know the exact number.
inline int32_t MaxTiles(const Batch& batch, int32_t tile) {
  if (batch.num_seqs == 1) return (batch.total_q + tile - 1) / tile;
  const int64_t most = batch.total_q / tile + static_cast<int64_t>(batch.num_seqs);
  return static_cast<int32_t>(most);
}

// Of the current device.
bool Hopper();           // whether the kernels for sm_90a are to run
bool LaunchesOverlap();  // whether a kernel may start before the one before it has ended, as sm_90 and later can
unsigned Multiprocessors();

inline constexpr int kWidestWgmma = 128;  // head_dim; wider heads take the plain kernel for attend

// The stages for one dtype and head size: each source defines its own, is compiled once for every size, and dispatch.cu
// chooses.
template <typename T, int kHeadDim>
cudaError_t RepresentOf(const ForwardParams& p, bool all_blocks, cudaStream_t stream);
template <int kHeadDim>
cudaError_t PackOf(const ForwardParams& p, const int64_t* starts, void* to, cudaStream_t stream);
template <int kHeadDim>
size_t SelectWorkspaceOf(const Shape& shape, const Batch& batch);
template <typename T, int kHeadDim>
cudaError_t SelectOf(const ForwardParams& p, cudaStream_t stream);
template <typename T, int kHeadDim>
cudaError_t AttendOf(const ForwardParams& p, cudaStream_t stream);
template <typename T, int kHeadDim>
cudaError_t AttendWgmmaOf(const ForwardParams& p, cudaStream_t stream);
template <int kHeadDim>
size_t DecodeWorkspaceOf(const Shape& shape, const Batch& batch);
template <typename T, int kHeadDim>
cudaError_t DecodeOf(const ForwardParams& p, cudaStream_t stream);
template <int kHeadDim>
size_t BackwardWorkspaceOf(const Shape& shape, const Batch& batch);
template <typename T, int kHeadDim>
cudaError_t BackwardOf(const BackwardParams& p, cudaStream_t stream);

}  // namespace phsa::cuda

#endif  // PHSA_ATTENTION_CUDA_DEVICE_CUH_
