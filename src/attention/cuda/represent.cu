// Representatives: one weighted sum of each block's 16 keys. Bound by memory: every key is read once, 1/16 is written.
#include "attention/cuda/device.cuh"

namespace phsa::cuda {
namespace {

constexpr int kThreads = 256;

// One half-warp reads every second key of a (block, head): 16 bytes a lane, a whole row a half-warp at head_dim 80 to
// 128 (the last lanes idle below 128). At head_dim 64 a quarter-warp does, at 256 a warp. Heads are the fastest index,
// so that a CTA reads whole token rows. With parts a block has one row of reps for each run of kBlock / kParts keys,
// and those of a block that is not complete are written as their last keys come.
template <typename T, int kHeadDim, int kParts>
__global__ __launch_bounds__(kThreads) void RepresentKernel(const __grid_constant__ ForwardParams p, bool all_blocks) {
  constexpr int kLanes = kRowLanes<kHeadDim>;  // lanes that hold one row
  constexpr int kRows = 32 / kLanes;           // rows a warp reads at once
  constexpr int kReads = kBlock / kRows;       // times it does
  constexpr int kSpan = kBlock / kParts;       // keys of a part
  const int seq = blockIdx.y;
  const int lane = threadIdx.x % 32;
  const int kv_heads = p.shape.num_kv_heads;
  const int kv_len = p.batch.kv_lens[seq];
  const int q_len = p.batch.cu_q[seq + 1] - p.batch.cu_q[seq];
  const int before = all_blocks ? 0 : kv_len - q_len;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int block = before / kBlock + static_cast<int>(item / kv_heads);
  const int head = static_cast<int>(item % kv_heads);
  const int row_begin = before / kSpan, row_end = kv_len / kSpan;
  if (block * kParts >= row_end) return;

  const T* k = static_cast<const T*>(p.k.data) + BlockOffset(p.batch, p.k, seq, block) + head * p.k.head_stride;
  const int piece = lane % kLanes;
  const bool has_piece = kLanes * 8 == kHeadDim || piece < kHeadDim / 8;
  const int row0 = lane / kLanes;
  const int tokens = kv_len - block * kBlock;  // of the block, and behind it
  uint4 key[kReads];
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int token = i * kRows + row0;
    key[i] = has_piece && (kParts == 1 || token < tokens)
                 ? *reinterpret_cast<const uint4*>(k + token * p.k.token_stride + piece * 8)
                 : uint4{};
  }

  uint32_t flags = 0;
  if (p.flags != nullptr) {
    Rows rows{nullptr, 1, 0, p.flags_page_stride};
    const uint8_t* f = p.flags + BlockOffset(p.batch, rows, seq, block);
    flags = __ballot_sync(~0u, lane < min(kBlock, tokens) && f[lane % kBlock] != 0);
  }
  const float head_lambda = p.lambda[head];

  // What lanes add up together: all of a block's rows, or, where a part has fewer than a warp reads at once, those of
  // a part.
  constexpr int kJoined = kSpan < kRows ? kSpan : kRows;
  constexpr int kReadsOfPart = kSpan > kRows ? kSpan / kRows : 1;
#pragma unroll
  for (int i0 = 0; i0 < kReads; i0 += kReadsOfPart) {
    const int part = (i0 * kRows + row0) / kSpan;
    const uint32_t own = flags >> (part * kSpan) & ((1u << kSpan) - 1u);
    const int count = __popc(own);
    const float lambda = count > 0 ? head_lambda : 1.0f;
    const float plain = lambda / kSpan;
    const float extra = count > 0 ? (1.0f - lambda) / count : 0.0f;
    float sum[8] = {};
#pragma unroll
    for (int i = i0; i < i0 + kReadsOfPart; ++i) {
      const float weight = plain + ((flags >> (i * kRows + row0)) & 1 ? extra : 0.0f);
      const uint32_t* words = reinterpret_cast<const uint32_t*>(&key[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = Unpack<T>(words[j]);
        sum[2 * j] = fmaf(weight, x.x, sum[2 * j]);
        sum[2 * j + 1] = fmaf(weight, x.y, sum[2 * j + 1]);
      }
    }
#pragma unroll
    for (int step = kLanes; step < kLanes * kJoined; step *= 2) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += __shfl_xor_sync(~0u, sum[j], step);
    }
    const int row = block * kParts + part;
    if (has_piece && row0 % kJoined == 0 && row >= row_begin && row < row_end) {
      T* out = static_cast<T*>(p.reps.data) + RepOffset(p.batch, p.reps, kParts, seq, row) + head * p.reps.head_stride;
      uint4 packed;
      packed.x = Pack<T>(sum[0], sum[1]);
      packed.y = Pack<T>(sum[2], sum[3]);
      packed.z = Pack<T>(sum[4], sum[5]);
      packed.w = Pack<T>(sum[6], sum[7]);
      *reinterpret_cast<uint4*>(out + piece * 8) = packed;
    }
  }
}

// A thread copies 16 bytes.
template <int kHeadDim>
__global__ __launch_bounds__(kThreads) void PackKernel(const __grid_constant__ ForwardParams p, const int64_t* starts,
                                                       uint4* to) {
  const int seq = blockIdx.y;
  constexpr int kHeadPieces = kHeadDim / 8;
  const int row_pieces = p.shape.num_kv_heads * kHeadPieces;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int row = static_cast<int>(item / row_pieces), piece = static_cast<int>(item % row_pieces);
  if (row >= p.batch.kv_lens[seq] / kBlock * p.shape.parts) return;
  const auto* from = static_cast<const uint16_t*>(p.reps.data) + RepOffset(p.batch, p.reps, p.shape.parts, seq, row) +
                     piece / kHeadPieces * p.reps.head_stride + piece % kHeadPieces * 8;
  to[(starts[seq] + row) * row_pieces + piece] = *reinterpret_cast<const uint4*>(from);
}

}  // namespace

template <typename T, int kHeadDim>
cudaError_t RepresentOf(const ForwardParams& p, bool all_blocks, cudaStream_t stream) {
  const int64_t blocks = all_blocks ? (p.batch.max_kv_len + kBlock - 1) / kBlock : p.batch.max_q_len / kBlock + 2;
  const int64_t items = blocks * p.shape.num_kv_heads;
  const dim3 grid(static_cast<unsigned>((items + kThreads / 32 - 1) / (kThreads / 32)), p.batch.num_seqs);
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  switch (p.shape.parts) {
    case 1: RepresentKernel<T, kHeadDim, 1><<<grid, kThreads, 0, stream>>>(p, all_blocks); break;
    case 2: RepresentKernel<T, kHeadDim, 2><<<grid, kThreads, 0, stream>>>(p, all_blocks); break;
    case 4: RepresentKernel<T, kHeadDim, 4><<<grid, kThreads, 0, stream>>>(p, all_blocks); break;
    default: RepresentKernel<T, kHeadDim, 8><<<grid, kThreads, 0, stream>>>(p, all_blocks); break;
  }
  return cudaGetLastError();
}

template <int kHeadDim>
cudaError_t PackOf(const ForwardParams& p, const int64_t* starts, void* to, cudaStream_t stream) {
  const int64_t pieces =
      static_cast<int64_t>(p.batch.max_kv_len / kBlock) * p.shape.parts * p.shape.num_kv_heads * (kHeadDim / 8);
  const dim3 grid(static_cast<unsigned>((pieces + kThreads - 1) / kThreads), p.batch.num_seqs);
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  PackKernel<kHeadDim><<<grid, kThreads, 0, stream>>>(p, starts, static_cast<uint4*>(to));
  return cudaGetLastError();
}

template cudaError_t RepresentOf<bf16, PHSA_HEAD_DIM>(const ForwardParams&, bool, cudaStream_t);
template cudaError_t RepresentOf<half, PHSA_HEAD_DIM>(const ForwardParams&, bool, cudaStream_t);
template cudaError_t PackOf<PHSA_HEAD_DIM>(const ForwardParams&, const int64_t*, void*, cudaStream_t);

}  // namespace phsa::cuda
