// For fuzzers of model files: the input as a file, and everything that can be read from a model, read.
#ifndef PHSA_FUZZ_MODEL_FILE_H_
#define PHSA_FUZZ_MODEL_FILE_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "io/tensor.h"

namespace phsa {

// A file in memory: a path is what the library takes.
class MemoryFile {
 public:
  MemoryFile(const uint8_t* data, size_t size) : descriptor_(memfd_create("fuzz", 0)) {
    if (descriptor_ < 0 || write(descriptor_, data, size) != static_cast<ssize_t>(size)) std::abort();
  }
  ~MemoryFile() { close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

// The sanitizer checks that each byte is there; we, that the sizes agree and do not exceed the file.
inline void ReadTensor(const Tensor& tensor, size_t file_size) {
  int64_t elements = 1;
  for (const int64_t size : tensor.shape) elements *= size;
  const auto blocks = static_cast<uint64_t>(elements / TensorTypeBlockElements(tensor.type));
  if (blocks * TensorTypeBlockBytes(tensor.type) != tensor.bytes || tensor.bytes > file_size) std::abort();
  std::vector<float> out(static_cast<size_t>(elements));
  Dequantize(tensor.type, tensor.data, elements, out.data());
}

}  // namespace phsa

#endif  // PHSA_FUZZ_MODEL_FILE_H_
