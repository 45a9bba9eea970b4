// The weights of a decoder in a GPU's memory.
#ifndef PHSA_MODEL_CUDA_DEVICE_WEIGHTS_H_
#define PHSA_MODEL_CUDA_DEVICE_WEIGHTS_H_

#include <optional>
#include <vector>

#include "model/cuda/weight_layout.h"
#include "ops/cuda/runtime.h"

namespace phsa::cuda {

struct DeviceWeights {
  const void* embedding = nullptr;    // bf16 [vocab][hidden]
  const void* logits = nullptr;       // bf16 [vocab][hidden]: the lm_head, or the embedding
  const float* final_norm = nullptr;  // [hidden]
  std::vector<DeviceLayer> layers;
  size_t largest_int8 = 0;  // elements of the largest int8 matrix; 0: there is none
  DeviceBuffer memory;      // all of it
};

// Reads everything; an adapter is added to its matrices before they are rounded. Nothing where `progress` asked to
// stop.
std::optional<DeviceWeights> LoadDeviceWeights(const ModelSource& source, WeightsMode mode, ThreadPool& threads,
                                               cudaStream_t stream, const LoadProgress& progress);

}  // namespace phsa::cuda

#endif  // PHSA_MODEL_CUDA_DEVICE_WEIGHTS_H_
