#include "io/model_writer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/dtype.h"
#include "base/errors.h"
#include "io/gguf.h"
#include "io/json.h"

namespace phsa {
namespace {

template <class T>
void Append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void AppendText(std::string& out, std::string_view text) {
  Append(out, uint64_t{text.size()});
  out += text;
}

bool QuantizeQ8(const float* values, int64_t count, uint8_t* out) {
  constexpr int64_t kBlock = 32;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const float* const x = values + begin;
    float largest = 0;
    for (int64_t i = 0; i < kBlock; ++i) largest = std::max(largest, std::fabs(x[i]));
    const float scale = largest / 127.0f;
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    const uint16_t stored = F16FromF32(scale);
    if (std::isinf(F32FromF16(stored)) || !std::isfinite(largest)) return false;
    std::memcpy(out, &stored, sizeof(stored));
    out += sizeof(stored);
    for (int64_t i = 0; i < kBlock; ++i) *out++ = static_cast<uint8_t>(static_cast<int8_t>(std::round(x[i] * inverse)));
  }
  return true;
}

const char* SafetensorsType(TensorType type) {
  switch (type) {
    case TensorType::kF32: return "F32";
    case TensorType::kF16: return "F16";
    case TensorType::kBf16: return "BF16";
    default: PHSA_CHECK(!"a type of safetensors"); return "";
  }
}

}  // namespace

uint64_t OutputTensor::bytes() const {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return static_cast<uint64_t>(elements / TensorTypeBlockElements(type)) * TensorTypeBlockBytes(type);
}

bool Quantize(TensorType type, const float* values, int64_t count, uint8_t* out) {
  bool fits = true;
  switch (type) {
    case TensorType::kF32: std::memcpy(out, values, static_cast<size_t>(count) * sizeof(float)); return true;
    case TensorType::kF16:
    case TensorType::kBf16:
      for (int64_t i = 0; i < count; ++i) {
        const bool half = type == TensorType::kF16;
        const uint16_t bits = half ? F16FromF32(values[i]) : Bf16FromF32(values[i]);
        std::memcpy(out + 2 * i, &bits, sizeof(bits));
        fits &= std::isfinite(half ? F32FromF16(bits) : F32FromBf16(bits)) || !std::isfinite(values[i]);
      }
      return fits;
    case TensorType::kQ8_0: return QuantizeQ8(values, count, out);
    default: PHSA_CHECK(!"a type that is written"); return false;
  }
}

std::string SafetensorsHeader(const std::vector<OutputTensor>& tensors) {
  nlohmann::ordered_json json;
  json["__metadata__"] = {{"format", "pt"}};
  uint64_t at = 0;
  for (const OutputTensor& tensor : tensors) {
    json[tensor.name] = {
        {"dtype", SafetensorsType(tensor.type)}, {"shape", tensor.shape}, {"data_offsets", {at, at + tensor.bytes()}}};
    at += tensor.bytes();
  }
  std::string text = json.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string out;
  Append(out, uint64_t{text.size()});
  return out + text;
}

void GgufHeader::Begin(std::string_view key, uint32_t type) {
  AppendText(metadata_, key);
  Append(metadata_, type);
  ++count_;
}

void GgufHeader::AddInteger(std::string_view key, uint32_t value) {
  Begin(key, static_cast<uint32_t>(GgufType::kUint32));
  Append(metadata_, value);
}

void GgufHeader::AddFloat(std::string_view key, float value) {
  Begin(key, static_cast<uint32_t>(GgufType::kFloat32));
  Append(metadata_, value);
}

void GgufHeader::AddBool(std::string_view key, bool value) {
  Begin(key, static_cast<uint32_t>(GgufType::kBool));
  Append(metadata_, uint8_t{value});
}

void GgufHeader::AddText(std::string_view key, std::string_view value) {
  Begin(key, static_cast<uint32_t>(GgufType::kString));
  AppendText(metadata_, value);
}

void GgufHeader::AddTexts(std::string_view key, const std::vector<std::string>& values) {
  Begin(key, static_cast<uint32_t>(GgufType::kArray));
  Append(metadata_, static_cast<uint32_t>(GgufType::kString));
  Append(metadata_, uint64_t{values.size()});
  for (const std::string& value : values) AppendText(metadata_, value);
}

void GgufHeader::AddIntegers(std::string_view key, const std::vector<int32_t>& values) {
  Begin(key, static_cast<uint32_t>(GgufType::kArray));
  Append(metadata_, static_cast<uint32_t>(GgufType::kInt32));
  Append(metadata_, uint64_t{values.size()});
  for (const int32_t value : values) Append(metadata_, value);
}

void GgufHeader::AddFloats(std::string_view key, const std::vector<float>& values) {
  Begin(key, static_cast<uint32_t>(GgufType::kArray));
  Append(metadata_, static_cast<uint32_t>(GgufType::kFloat32));
  Append(metadata_, uint64_t{values.size()});
  for (const float value : values) Append(metadata_, value);
}

void GgufHeader::AddBytes(std::string_view key, std::string_view bytes) {
  Begin(key, static_cast<uint32_t>(GgufType::kArray));
  Append(metadata_, static_cast<uint32_t>(GgufType::kUint8));
  Append(metadata_, uint64_t{bytes.size()});
  metadata_ += bytes;
}

std::string GgufHeader::Finish(const std::vector<OutputTensor>& tensors) const {
  std::string out = "GGUF";
  Append(out, uint32_t{3});
  Append(out, uint64_t{tensors.size()});
  Append(out, count_);
  out += metadata_;
  const auto padded = [](uint64_t bytes) { return (bytes + kGgufAlignment - 1) / kGgufAlignment * kGgufAlignment; };
  uint64_t at = 0;
  for (const OutputTensor& tensor : tensors) {
    AppendText(out, tensor.name);
    Append(out, static_cast<uint32_t>(tensor.shape.size()));
    for (auto size = tensor.shape.rbegin(); size != tensor.shape.rend(); ++size) {
      Append(out, static_cast<uint64_t>(*size));
    }
    Append(out, GgufTypeNumber(tensor.type));
    Append(out, at);
    at += padded(tensor.bytes());
  }
  out.resize(padded(out.size()), '\0');
  return out;
}

}  // namespace phsa
