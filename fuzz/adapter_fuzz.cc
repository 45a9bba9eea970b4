// Any adapter is either refused with phsa::Error or holds pairs that fit the model. The input: adapter_config.json, a
// zero byte, adapter_model.safetensors.
#include "io/adapter.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#include "model_file.h"
#include "phsa/error.h"

namespace {

// Removed when the fuzzer ends.
struct Folder {
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "phsa-fuzz-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) std::abort();
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

void Write(const std::filesystem::path& path, const uint8_t* begin, const uint8_t* end) {
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(begin), end - begin);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  const uint8_t* const end = data + size;
  const uint8_t* const zero = std::find(data, end, 0);
  Write(folder.path / "adapter_config.json", data, zero);
  Write(folder.path / "adapter_model.safetensors", zero == end ? end : zero + 1, end);
  phsa::Adapter::Base base{"model", 2, {}};
  base.shape = [](const std::string&) { return std::vector<int64_t>{4, 4}; };
  try {
    const auto adapter = phsa::Adapter::Open(folder.path, base);
    for (const auto& [name, matrix] : adapter->matrices()) {
      if (matrix.a.shape[1] != 4 || matrix.b.shape[0] != 4 || matrix.b.shape[1] != matrix.rank()) std::abort();
      if (!std::isfinite(matrix.scale)) std::abort();
      phsa::ReadTensor(matrix.a, size);
      phsa::ReadTensor(matrix.b, size);
    }
  } catch (const phsa::Error&) {
  }
  return 0;
}
