// Matrix products on the GPU, by cuBLASLt. The library is opened when it is first needed, so that a program with CUDA
// in it starts on machines without.
#ifndef PHSA_OPS_CUDA_LINEAR_H_
#define PHSA_OPS_CUDA_LINEAR_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

namespace phsa::cuda {

// Why there is no cuBLASLt, in half a sentence that says what to do; empty: it is there.
std::string LinearUnavailable();

// y = scale · x · weightsᵀ + bias, or y += that. All addresses are multiples of 256, k one of 8.
struct LinearParams {
  int32_t m = 0, n = 0, k = 0;
  const void* x = nullptr;        // bf16 [m][k]
  const void* weights = nullptr;  // bf16 [n][k]
  const void* bias = nullptr;     // [n] in the type of y, or null
  void* y = nullptr;              // [m][y_stride]
  int64_t y_stride = 0;
  float scale = 1;
  enum class Result : uint8_t { kBf16, kF32, kAddToF32 } result = Result::kBf16;
};

// For one device and one stream. What cuBLASLt recommends for a shape is asked once.
class Linear {
 public:
  explicit Linear(cudaStream_t stream);  // on the current device; throws phsa::Error where there is no cuBLASLt
  ~Linear();
  void Multiply(const LinearParams& params);

  static constexpr size_t kWorkspace = size_t{32} << 20;  // bytes that it takes: what Hopper's products ask for

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phsa::cuda

#endif  // PHSA_OPS_CUDA_LINEAR_H_
