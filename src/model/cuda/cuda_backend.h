// The decoder on an NVIDIA GPU. Without CUDA in the build, ../no_cuda.cc has the same functions: there is no device,
// and it says why.
#ifndef PHSA_MODEL_CUDA_CUDA_BACKEND_H_
#define PHSA_MODEL_CUDA_CUDA_BACKEND_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/model_source.h"
#include "model/backend.h"
#include "model/weights.h"
#include "phsa/threads.h"

namespace phsa::cuda {

struct Device {
  std::string name;  // "NVIDIA H200"
  uint64_t memory_bytes = 0;
};

// The GPUs that the driver shows, by their index. None where CUDA is not in the build or has no driver.
std::vector<Device> Devices();
// Why no GPU can be used, in half a sentence ("this build has no CUDA; …", "CUDA finds no GPU: …", "libcublasLt.so is
// not there; …"); empty: Devices()[0] can be.
std::string Unavailable();
// Why this model cannot run with these options, in half a sentence that says what can; empty: it can. What depends on
// the attention's settings is not judged here: plans for CUDA do that. Asks no device.
std::string Unsupported(const ModelSource& source, const BackendOptions& options);

// The same of the shapes alone; in builds without CUDA, too.
std::string UnsupportedModel(const ModelConfig& config, const BackendOptions& options);

// Bytes of device memory; `available` is what the device has now. The workspace counts what the attention takes at most
// with the longest texts that the kernels read.
BackendSizes Sizes(const ModelSource& source, const BackendOptions& options);
// Reads the weights into the device's memory. Null where `progress` asked to stop. Throws phsa::Error where something
// is missing, unsupported, does not fit, or the device fails. `threads` read; they must live as long as the backend.
std::unique_ptr<ModelBackend> MakeBackend(const ModelSource& source, const BackendOptions& options, ThreadPool& threads,
                                          const LoadProgress& progress);

}  // namespace phsa::cuda

#endif  // PHSA_MODEL_CUDA_CUDA_BACKEND_H_
