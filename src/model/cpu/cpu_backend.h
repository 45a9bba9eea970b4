// The decoder on the CPU: packed weights, f32 activations.
#ifndef PHSA_MODEL_CPU_CPU_BACKEND_H_
#define PHSA_MODEL_CPU_CPU_BACKEND_H_

#include <memory>

#include "io/model_source.h"
#include "model/backend.h"
#include "model/weights.h"
#include "phsa/threads.h"

namespace phsa {

BackendSizes CpuBackendSizes(const ModelSource& source, const BackendOptions& options, int32_t num_threads);
// Reads and packs the weights. Null where `progress` asked to stop. Throws phsa::Error for missing tensors and wrong
// shapes. `source` and `threads` must live as long as the backend.
std::unique_ptr<ModelBackend> MakeCpuBackend(const ModelSource& source, const BackendOptions& options,
                                             ThreadPool& threads, const LoadProgress& progress);

}  // namespace phsa

#endif  // PHSA_MODEL_CPU_CPU_BACKEND_H_
