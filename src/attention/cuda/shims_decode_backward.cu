// C entry points for tests and benchmarks that drive the kernels without the library around them.
#include "attention/cuda/decode_backward.h"

extern "C" {

size_t phsa_cuda_decode_workspace(const phsa::cuda::DecodeParams* params) {
  return phsa::cuda::DecodeWorkspaceSize(*params);
}
int phsa_cuda_decode(const phsa::cuda::DecodeParams* params, void* stream) {
  return phsa::cuda::Decode(*params, static_cast<cudaStream_t>(stream));
}
size_t phsa_cuda_backward_workspace(const phsa::cuda::BackwardParams* params) {
  return phsa::cuda::BackwardWorkspaceSize(*params);
}
int phsa_cuda_backward(const phsa::cuda::BackwardParams* params, void* stream) {
  return phsa::cuda::Backward(*params, static_cast<cudaStream_t>(stream));
}
void phsa_cuda_set_plain_backward(int plain) { phsa::cuda::SetPlainBackward(plain != 0); }
// Sizes of the structs, so that a caller that mirrors them can check its layout.
size_t phsa_cuda_decode_params_size() { return sizeof(phsa::cuda::DecodeParams); }
size_t phsa_cuda_backward_params_size() { return sizeof(phsa::cuda::BackwardParams); }

}  // extern "C"
