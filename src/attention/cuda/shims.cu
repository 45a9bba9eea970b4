// C entry points of the CUDA kernels for the tests and benchmarks, which load them with ctypes.
#include "cuda.h"

using phsa::cuda::ForwardParams;

extern "C" {

// So that the mirror of the struct on the other side can be checked.
size_t phsa_cuda_params_size() { return sizeof(ForwardParams); }
const char* phsa_cuda_unsupported(const ForwardParams* p) { return phsa::cuda::Unsupported(p->shape, p->batch); }
size_t phsa_cuda_select_workspace(const ForwardParams* p) {
  return phsa::cuda::SelectWorkspaceSize(p->shape, p->batch);
}
void phsa_cuda_set_architecture(int32_t architecture) { phsa::cuda::SetArchitecture(architecture); }
int phsa_cuda_represent(const ForwardParams* p, int all_blocks, cudaStream_t stream) {
  return phsa::cuda::Represent(*p, all_blocks != 0, stream);
}
int phsa_cuda_select(const ForwardParams* p, cudaStream_t stream) { return phsa::cuda::Select(*p, stream); }
int phsa_cuda_attend(const ForwardParams* p, cudaStream_t stream) { return phsa::cuda::Attend(*p, stream); }

}  // extern "C"
