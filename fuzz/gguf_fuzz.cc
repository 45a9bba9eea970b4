// Any file is either refused with phsa::Error or opens as a model whose every tensor and metadata entry can be read.
#include "io/model_source.h"
#include "model_file.h"
#include "phsa/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const phsa::MemoryFile file(data, size);
  std::unique_ptr<phsa::ModelSource> source;
  try {
    source = phsa::ModelSource::Open(file.path());
  } catch (const phsa::Error&) {
    return 0;
  }
  // From here on nothing may throw.
  for (const phsa::Tensor* tensor : source->Tensors()) {
    phsa::ReadTensor(*tensor, size);
    source->Release(*tensor);
  }
  source->Metadata();
  const phsa::ModelConfig& config = source->config();
  if (config.num_layers < 1 || config.head_dim < 1 || config.num_q_heads % config.num_kv_heads != 0) std::abort();
  return 0;
}
