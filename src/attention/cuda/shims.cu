// C entry points of the CUDA kernels for the tests and benchmarks, which load them with ctypes.
#include "attention/cuda/cuda.h"

using phsa::cuda::BackwardParams;
using phsa::cuda::ForwardParams;

extern "C" {

// So that the mirrors of the structs on the other side can be checked.
size_t phsa_cuda_params_size() { return sizeof(ForwardParams); }
size_t phsa_cuda_backward_params_size() { return sizeof(BackwardParams); }
const char* phsa_cuda_unsupported(const ForwardParams* p) {
  return phsa::cuda::Unsupported(p->shape, p->batch.max_kv_len);
}
void phsa_cuda_set_architecture(int32_t architecture) { phsa::cuda::SetArchitecture(architecture); }

size_t phsa_cuda_select_workspace(const ForwardParams* p) {
  return phsa::cuda::SelectWorkspaceSize(p->shape, p->batch);
}
int phsa_cuda_represent(const ForwardParams* p, int all_blocks, cudaStream_t stream) {
  return phsa::cuda::Represent(*p, all_blocks != 0, stream);
}
int phsa_cuda_select(const ForwardParams* p, cudaStream_t stream) { return phsa::cuda::Select(*p, stream); }
int phsa_cuda_attend(const ForwardParams* p, cudaStream_t stream) { return phsa::cuda::Attend(*p, stream); }

size_t phsa_cuda_decode_workspace(const ForwardParams* p) {
  return phsa::cuda::DecodeWorkspaceSize(p->shape, p->batch);
}
int phsa_cuda_decode(const ForwardParams* p, cudaStream_t stream) { return phsa::cuda::Decode(*p, stream); }

size_t phsa_cuda_backward_workspace(const BackwardParams* p) {
  return phsa::cuda::BackwardWorkspaceSize(p->shape, p->batch);
}
int phsa_cuda_backward(const BackwardParams* p, cudaStream_t stream) { return phsa::cuda::Backward(*p, stream); }

}  // extern "C"
