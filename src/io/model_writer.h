// The headers of model files that this program writes; the tensors' data follow in the given order.
#ifndef PHSA_IO_MODEL_WRITER_H_
#define PHSA_IO_MODEL_WRITER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/tensor.h"

namespace phsa {

struct OutputTensor {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;  // outermost first
  uint64_t bytes() const;
};

// f32, f16, bf16 or q8_0, as llama.cpp rounds to it; `count` is a whole number of blocks. False where a finite number
// is beyond what the type holds.
bool Quantize(TensorType type, const float* values, int64_t count, uint8_t* out);

// Without gaps between the tensors.
std::string SafetensorsHeader(const std::vector<OutputTensor>& tensors);

// Each tensor's data begin at a multiple of this, counted from the end of the header.
inline constexpr uint64_t kGgufAlignment = 32;

class GgufHeader {
 public:
  void AddInteger(std::string_view key, uint32_t value);
  void AddFloat(std::string_view key, float value);
  void AddBool(std::string_view key, bool value);
  void AddText(std::string_view key, std::string_view value);
  void AddTexts(std::string_view key, const std::vector<std::string>& values);
  void AddIntegers(std::string_view key, const std::vector<int32_t>& values);
  void AddFloats(std::string_view key, const std::vector<float>& values);
  void AddBytes(std::string_view key, std::string_view bytes);         // an array of them
  std::string Finish(const std::vector<OutputTensor>& tensors) const;  // whole, up to where the data begin

 private:
  void Begin(std::string_view key, uint32_t type);
  std::string metadata_;
  uint64_t count_ = 0;
};

}  // namespace phsa

#endif  // PHSA_IO_MODEL_WRITER_H_
