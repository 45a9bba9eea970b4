// From a call's dtype and head size to the kernels that were compiled for them, and what is asked of the device.
#include <atomic>

#include "attention/cuda/device.cuh"

namespace phsa::cuda {
namespace {

std::atomic<int32_t> g_architecture = 0;

// Calls `call.operator()<T, kHeadDim>()`.
template <typename Call>
cudaError_t OfShape(const Shape& shape, Call&& call) {
  const bool bf = shape.dtype == Dtype::kBf16;
  switch (shape.head_dim) {
#define PHSA_CASE(dim) \
  case dim: return bf ? call.template operator()<bf16, dim>() : call.template operator()<half, dim>();
    PHSA_CUDA_HEAD_DIMS(PHSA_CASE)
#undef PHSA_CASE
    default: return cudaErrorInvalidValue;
  }
}
template <typename Call>
auto OfHeadDim(const Shape& shape, Call&& call) -> decltype(call.template operator()<64>()) {
  switch (shape.head_dim) {
#define PHSA_CASE(dim) \
  case dim: return call.template operator()<dim>();
    PHSA_CUDA_HEAD_DIMS(PHSA_CASE)
#undef PHSA_CASE
    default: return {};
  }
}

int Attribute(cudaDeviceAttr attribute, int otherwise) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return otherwise;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : otherwise;
}

}  // namespace

void SetArchitecture(int32_t architecture) { g_architecture = architecture; }

bool Hopper() {
  const int32_t asked = g_architecture;
  return asked != 0 ? asked >= 90 : Attribute(cudaDevAttrComputeCapabilityMajor, 8) == 9;
}

unsigned Multiprocessors() { return static_cast<unsigned>(Attribute(cudaDevAttrMultiProcessorCount, 1)); }

bool LaunchesOverlap() { return Attribute(cudaDevAttrComputeCapabilityMajor, 8) >= 9; }

cudaError_t Represent(const ForwardParams& p, bool all_blocks, cudaStream_t stream) {
  return OfShape(p.shape, [&]<typename T, int kHeadDim>() { return RepresentOf<T, kHeadDim>(p, all_blocks, stream); });
}

cudaError_t PackRepresentatives(const ForwardParams& p, const int64_t* starts, void* to, cudaStream_t stream) {
  if (!HasHeadDim(p.shape.head_dim)) return cudaErrorInvalidValue;
  return OfHeadDim(p.shape, [&]<int kHeadDim>() { return PackOf<kHeadDim>(p, starts, to, stream); });
}

size_t SelectWorkspaceSize(const Shape& shape, const Batch& batch) {
  if (shape.top_k == 0) return 0;
  return OfHeadDim(shape, [&]<int kHeadDim>() { return SelectWorkspaceOf<kHeadDim>(shape, batch); });
}

cudaError_t Select(const ForwardParams& p, cudaStream_t stream) {
  if (p.shape.top_k == 0) return cudaSuccess;
  return OfShape(p.shape, [&]<typename T, int kHeadDim>() { return SelectOf<T, kHeadDim>(p, stream); });
}

cudaError_t Attend(const ForwardParams& p, cudaStream_t stream) {
  return OfShape(p.shape, [&]<typename T, int kHeadDim>() {
    if constexpr (kHeadDim <= kWidestWgmma) {
      if (Hopper()) return AttendWgmmaOf<T, kHeadDim>(p, stream);
    }
    return AttendOf<T, kHeadDim>(p, stream);
  });
}

size_t DecodeWorkspaceSize(const Shape& shape, const Batch& batch) {
  return OfHeadDim(shape, [&]<int kHeadDim>() { return DecodeWorkspaceOf<kHeadDim>(shape, batch); });
}

cudaError_t Decode(const ForwardParams& p, cudaStream_t stream) {
  return OfShape(p.shape, [&]<typename T, int kHeadDim>() { return DecodeOf<T, kHeadDim>(p, stream); });
}

size_t BackwardWorkspaceSize(const Shape& shape, const Batch& batch) {
  return OfHeadDim(shape, [&]<int kHeadDim>() { return BackwardWorkspaceOf<kHeadDim>(shape, batch); });
}

cudaError_t Backward(const BackwardParams& p, cudaStream_t stream) {
  return OfShape(p.shape, [&]<typename T, int kHeadDim>() { return BackwardOf<T, kHeadDim>(p, stream); });
}

}  // namespace phsa::cuda
