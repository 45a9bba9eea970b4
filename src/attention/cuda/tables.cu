// Small tables from host to device memory in the parameters of a kernel: nothing waits, and a CUDA graph that captures
// the launch has a copy of its own. A copy from pageable memory would give neither.
#include <algorithm>
#include <cstring>

#include "attention/cuda/cuda.h"

namespace phsa::cuda {
namespace {

constexpr size_t kPiece = 3584;  // parameters are limited to 4 KiB
constexpr int kThreads = 256;

struct Piece {
  uint32_t words[kPiece / 4];
};

__global__ __launch_bounds__(kThreads) void StoreKernel(const __grid_constant__ Piece piece, uint32_t* to, int words) {
  for (int i = threadIdx.x; i < words; i += kThreads) to[i] = piece.words[i];
}

}  // namespace

cudaError_t Upload(const void* from, size_t size, void* to, cudaStream_t stream) {
  for (size_t at = 0; at < size; at += kPiece) {
    const size_t bytes = std::min(kPiece, size - at);
    Piece piece;
    std::memcpy(&piece, static_cast<const char*>(from) + at, bytes);
    StoreKernel<<<1, kThreads, 0, stream>>>(piece, reinterpret_cast<uint32_t*>(static_cast<char*>(to) + at),
                                            static_cast<int>((bytes + 3) / 4));
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace phsa::cuda
