// The weights of a decoder in a GPU's memory: matrices in bf16, products that read the same x side by side.
#ifndef PHSA_MODEL_CUDA_DEVICE_WEIGHTS_H_
#define PHSA_MODEL_CUDA_DEVICE_WEIGHTS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "model/weights.h"
#include "ops/cuda/runtime.h"

namespace phsa::cuda {

// Matrices and the biases of bf16 products are bf16, all else is f32. Null: the model has none.
struct DeviceLayer {
  const float* attention_norm = nullptr;  // [hidden]
  const void* qkv = nullptr;              // [(heads + 2 · kv_heads) · head_dim][hidden]
  const void* qkv_bias = nullptr;
  const float *q_norm = nullptr, *k_norm = nullptr;  // [head_dim]
  const void* o = nullptr;                           // [hidden][heads · head_dim]
  const float* o_bias = nullptr;
  const float* mlp_norm = nullptr;  // [hidden]
  const void* gate_up = nullptr;    // [2 · intermediate][hidden]
  const void* gate_up_bias = nullptr;
  const void* down = nullptr;  // [hidden][intermediate]
  const float* down_bias = nullptr;
};

struct DeviceWeights {
  const void* embedding = nullptr;    // [vocab][hidden]
  const void* logits = nullptr;       // [vocab][hidden]: the lm_head, or the embedding
  const float* final_norm = nullptr;  // [hidden]
  std::vector<DeviceLayer> layers;
  DeviceBuffer memory;  // all of it
};

uint64_t DeviceWeightBytes(const ModelSource& source);

// Reads everything; an adapter is added to its matrices before they are rounded. Nothing where `progress` asked to
// stop.
std::optional<DeviceWeights> LoadDeviceWeights(const ModelSource& source, ThreadPool& threads, cudaStream_t stream,
                                               const LoadProgress& progress);

}  // namespace phsa::cuda

#endif  // PHSA_MODEL_CUDA_DEVICE_WEIGHTS_H_
