// The pages of the KV cache in a GPU's memory.
#ifndef PHSA_MODEL_CUDA_DEVICE_PAGES_H_
#define PHSA_MODEL_CUDA_DEVICE_PAGES_H_

#include "model/page_memory.h"
#include "ops/cuda/runtime.h"

namespace phsa::cuda {

// In the order of the backend's stream.
class DevicePages final : public PageMemory {
 public:
  DevicePages(size_t page_bytes, int32_t num_pages, int32_t device, cudaStream_t stream)
      : page_bytes_(page_bytes),
        device_(device),
        stream_(stream),
        memory_(page_bytes * static_cast<size_t>(num_pages), "the KV cache") {
    Check(cudaMemsetAsync(memory_.data(), 0, memory_.size(), stream), kWhat);
  }
  uint8_t* data() const override { return memory_.data(); }
  bool on_host() const override { return false; }
  void Copy(int32_t from_page, int32_t to_page) override {
    Use();
    Check(cudaMemcpyAsync(At(to_page, 0), At(from_page, 0), page_bytes_, cudaMemcpyDeviceToDevice, stream_), kWhat);
  }
  void Read(int32_t page, size_t offset, std::span<uint8_t> to) const override {
    Use();
    Check(cudaMemcpyAsync(to.data(), At(page, offset), to.size(), cudaMemcpyDeviceToHost, stream_), kWhat);
    Check(cudaStreamSynchronize(stream_), kWhat);
  }
  void Write(int32_t page, size_t offset, std::span<const uint8_t> from) override {
    Use();
    Check(cudaMemcpyAsync(At(page, offset), from.data(), from.size(), cudaMemcpyHostToDevice, stream_), kWhat);
    Check(cudaStreamSynchronize(stream_), kWhat);
  }

 private:
  static constexpr const char* kWhat = "the KV cache";
  void Use() const { Check(cudaSetDevice(device_), kWhat); }
  uint8_t* At(int32_t page, size_t offset) const {
    return memory_.data() + static_cast<size_t>(page) * page_bytes_ + offset;
  }
  size_t page_bytes_;
  int32_t device_;
  cudaStream_t stream_;
  DeviceBuffer memory_;
};

}  // namespace phsa::cuda

#endif  // PHSA_MODEL_CUDA_DEVICE_PAGES_H_
