// dequantize TYPE < blocks > floats: what tests/e2e/test_quants.py compares with the Python package gguf.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "io/tensor.h"

int main(int argc, char** argv) {
  using phsa::TensorType;
  if (argc != 2) {
    std::fprintf(stderr, "usage: dequantize TYPE < blocks > floats\n");
    return 2;
  }
  std::vector<uint8_t> data;
  uint8_t buffer[65536];
  for (size_t count; (count = std::fread(buffer, 1, sizeof(buffer), stdin)) > 0;) {
    data.insert(data.end(), buffer, buffer + count);
  }
  for (int i = 0; i < phsa::kTensorTypes; ++i) {
    const auto type = static_cast<TensorType>(i);
    if (std::strcmp(argv[1], phsa::TensorTypeName(type)) != 0) continue;
    const size_t bytes = phsa::TensorTypeBlockBytes(type);
    if (data.size() % bytes != 0) break;
    std::vector<float> out(data.size() / bytes * static_cast<size_t>(phsa::TensorTypeBlockElements(type)));
    phsa::Dequantize(type, data.data(), static_cast<int64_t>(out.size()), out.data());
    return std::fwrite(out.data(), sizeof(float), out.size(), stdout) == out.size() ? 0 : 1;
  }
  std::fprintf(stderr, "dequantize: %zu bytes of %s: unknown type, or not whole blocks\n", data.size(), argv[1]);
  return 2;
}
