// A build without CUDA.
#include "base/errors.h"
#include "model/cuda/cuda_backend.h"

namespace phsa::cuda {
namespace {

constexpr const char* kNoCuda = "this build has no CUDA (`cmake --preset release -DPHSA_CUDA=ON` makes one that has)";

}  // namespace

std::vector<Device> Devices() { return {}; }
std::string Unavailable() { return kNoCuda; }
std::string Unsupported(const ModelSource&, const BackendOptions&) { return kNoCuda; }
BackendSizes Sizes(const ModelSource&, const BackendOptions&) { Throw(PHSA_UNSUPPORTED, "{}", kNoCuda); }
std::unique_ptr<ModelBackend> MakeBackend(const ModelSource&, const BackendOptions&, ThreadPool&, const LoadProgress&) {
  Throw(PHSA_UNSUPPORTED, "{}", kNoCuda);
}

}  // namespace phsa::cuda
