// Any file is either refused with phsa::Error or holds tensors that can be read, in order and apart.
#include "io/safetensors.h"

#include "model_file.h"
#include "phsa/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const phsa::MemoryFile memory(data, size);
  const phsa::MappedFile file(memory.path());
  std::vector<phsa::Tensor> tensors;
  try {
    tensors = phsa::ReadSafetensors(file);
  } catch (const phsa::Error&) {
    return 0;
  }
  uint64_t end = 0;
  for (const phsa::Tensor& tensor : tensors) {
    if (tensor.file_offset < end) std::abort();
    end = tensor.file_offset + tensor.bytes;
    phsa::ReadTensor(tensor, size);
  }
  return 0;
}
