// The weights of a product as the GPU has them. No CUDA in here: what lays weights out is tested on machines without.
#ifndef PHSA_OPS_CUDA_MATRIX_VIEW_H_
#define PHSA_OPS_CUDA_MATRIX_VIEW_H_

#include <cstdint>

namespace phsa::cuda {

// [n][k], device memory. bf16, or int8 as ops/linear.h has it: w = factor · scale · (code - 128). Codes have 128 added,
// as on the CPU: a byte in the low bits of a float is converted by one subtraction.
struct MatrixView {
  const void* data = nullptr;        // bf16 [n][k]; int8: codes [n][k], at a multiple of 16 bytes
  const uint16_t* scales = nullptr;  // int8: f16 [n][k / 32]; null: it is bf16
  const float* factors = nullptr;    // int8: [n]
  bool is_int8() const { return scales != nullptr; }
};

}  // namespace phsa::cuda

#endif  // PHSA_OPS_CUDA_MATRIX_VIEW_H_
