#include "ops/cuda/runtime.h"

#include "base/cuda_error.h"
#include "base/errors.h"

namespace phsa::cuda {
namespace {

uint64_t Megabytes(uint64_t bytes) { return (bytes + 999999) / 1000000; }

}  // namespace

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // some errors would be reported again by the next call
  if (error == cudaErrorMemoryAllocation) {
    Throw(PHSA_OUT_OF_MEMORY,
          "{}: the GPU has not enough memory; end other programs that use it, or ask for a smaller {}, fewer "
          "sequences or {}",
          what, Option{"context"}, Option{"device", "cpu"});
  }
  if (DeviceFailed(error)) {
    Throw(PHSA_IO, "{}: the GPU failed ({}); start phsa again, or run with {}", what, cudaGetErrorString(error),
          Option{"device", "cpu"});
  }
  Throw(PHSA_INTERNAL, "{}: CUDA: {}", what, cudaGetErrorString(error));
}

DeviceBuffer::DeviceBuffer(size_t bytes, const char* what) : size_(bytes) {
  if (bytes == 0) return;
  const cudaError_t error = cudaMalloc(&data_, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free_bytes = 0, total = 0;
    cudaMemGetInfo(&free_bytes, &total);
    Throw(PHSA_OUT_OF_MEMORY,
          "{}: {} MB of GPU memory are needed and {} of {} are free; end other programs that use it, or ask for a "
          "smaller {}, fewer sequences or {}",
          what, Megabytes(bytes), Megabytes(free_bytes), Megabytes(total), Option{"context"}, Option{"device", "cpu"});
  }
  Check(error, what);
}

PinnedBuffer::PinnedBuffer(size_t bytes) : size_(bytes) {
  if (bytes > 0) Check(cudaMallocHost(&data_, bytes), "memory that host and GPU share");
}

Stream::Stream() { Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }

Event::Event(bool timed) {
  Check(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming), "an event");
}

}  // namespace phsa::cuda
