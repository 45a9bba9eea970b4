#include "model/cuda/weight_layout.h"

#include <algorithm>

#include "base/dtype.h"
#include "base/errors.h"

namespace phsa::cuda {
namespace {

constexpr size_t kAlignment = 256;  // cuBLASLt's products want it

// Of one element; int8: of its code.
size_t ElementBytes(WeightType type) {
  switch (type) {
    case WeightType::kF32: return sizeof(float);
    case WeightType::kBf16: return sizeof(uint16_t);
    default: return sizeof(uint8_t);
  }
}

}  // namespace

size_t PackedRowBytes(WeightType type, int64_t cols) {
  const auto width = static_cast<size_t>(cols);
  const size_t scales = type == WeightType::kInt8 ? width / kWeightGroup * sizeof(uint16_t) + sizeof(float) : 0;
  return width * ElementBytes(type) + scales;
}

uint8_t* WeightLayout::TakeBytes(size_t count) {
  uint8_t* const begin = memory_ != nullptr ? memory_ + bytes : nullptr;
  bytes += (count + kAlignment - 1) / kAlignment * kAlignment;
  return begin;
}

MatrixView WeightLayout::Take(const std::vector<Part>& parts, int64_t cols, WeightType type) {
  const auto exists = [&](const Part& part) { return names_.contains(part.name); };
  if (std::ranges::none_of(parts, exists)) return {};
  const auto width = static_cast<size_t>(cols), row_bytes = width * ElementBytes(type);
  size_t rows = 0;
  for (const Part& part : parts) rows += static_cast<size_t>(part.rows);
  PackedRows all;
  all.type = type;
  all.data = TakeBytes(rows * row_bytes);
  if (type == WeightType::kInt8) {
    PHSA_CHECK(width % kWeightGroup == 0);
    all.scales = reinterpret_cast<uint16_t*>(TakeBytes(rows * (width / kWeightGroup) * sizeof(uint16_t)));
    all.factors = reinterpret_cast<float*>(TakeBytes(rows * sizeof(float)));
    largest_int8 = std::max(largest_int8, rows * width);
  }
  PackedRows next = all;
  for (const Part& part : parts) {
    if (exists(part)) places[part.name] = next;
    if (memory_ == nullptr) continue;
    const auto count = static_cast<size_t>(part.rows);
    next.data += count * row_bytes;
    if (type != WeightType::kInt8) continue;
    next.scales += count * (width / kWeightGroup);
    next.factors += count;
  }
  return {all.data, all.scales, all.factors};
}

WeightLayout::WeightLayout(const ModelSource& source, WeightsMode mode, uint8_t* memory) : memory_(memory) {
  const ModelConfig& config = source.config();
  for (const ModelTensor& tensor : ModelTensors(source)) names_.insert(tensor.name);
  const int64_t hidden = config.hidden, intermediate = config.intermediate, vocab = config.vocab_size;
  const int64_t q = int64_t{config.num_q_heads} * config.head_dim, kv = int64_t{config.num_kv_heads} * config.head_dim;
  const WeightType of_layers = mode == WeightsMode::kInt8 ? WeightType::kInt8 : WeightType::kBf16;
  const auto bf16 = [&](const std::vector<Part>& parts) { return Take(parts, 1, WeightType::kBf16).data; };
  const auto f32 = [&](const std::string& name, int64_t size) {
    return static_cast<const float*>(Take({{name, size}}, 1, WeightType::kF32).data);
  };
  Take({{"model.embed_tokens.weight", vocab}}, hidden, WeightType::kBf16);
  Take({{"lm_head.weight", vocab}}, hidden, WeightType::kBf16);
  f32("model.norm.weight", hidden);
  for (int32_t i = 0; i < config.num_layers; ++i) {
    const std::string at = fmt::format("model.layers.{}.", i);
    const std::string q_proj = at + "self_attn.q_proj.", k_proj = at + "self_attn.k_proj.",
                      v_proj = at + "self_attn.v_proj.", o_proj = at + "self_attn.o_proj.",
                      gate = at + "mlp.gate_proj.", up = at + "mlp.up_proj.", down = at + "mlp.down_proj.";
    DeviceLayer layer;
    layer.attention_norm = f32(at + "input_layernorm.weight", hidden);
    layer.qkv = Take({{q_proj + "weight", q}, {k_proj + "weight", kv}, {v_proj + "weight", kv}}, hidden, of_layers);
    layer.qkv_bias = bf16({{q_proj + "bias", q}, {k_proj + "bias", kv}, {v_proj + "bias", kv}});
    layer.q_norm = f32(at + "self_attn.q_norm.weight", config.head_dim);
    layer.k_norm = f32(at + "self_attn.k_norm.weight", config.head_dim);
    layer.o = Take({{o_proj + "weight", hidden}}, q, of_layers);
    layer.o_bias = f32(o_proj + "bias", hidden);
    layer.mlp_norm = f32(at + "post_attention_layernorm.weight", hidden);
    layer.gate_up = Take({{gate + "weight", intermediate}, {up + "weight", intermediate}}, hidden, of_layers);
    layer.gate_up_bias = bf16({{gate + "bias", intermediate}, {up + "bias", intermediate}});
    layer.down = Take({{down + "weight", hidden}}, intermediate, of_layers);
    layer.down_bias = f32(down + "bias", hidden);
    layers.push_back(layer);
  }
  for (const std::string& name : names_) PHSA_CHECK(places.contains(name));
}

AdapterDelta ReadDelta(const ModelSource& source, const std::string& name) {
  const LowRankTensors* const found = source.adapter() != nullptr ? source.adapter()->Find(name) : nullptr;
  if (found == nullptr) return {};
  return {ReadLowRank(found->a), ReadLowRank(found->b), static_cast<size_t>(found->rank()), found->scale};
}

void PackRow(const ModelTensor& tensor, const ModelConfig& config, const AdapterDelta& delta, int64_t row,
             const PackedRows& to, int64_t at) {
  const TensorType type = tensor.tensor->type;
  const auto width = static_cast<size_t>(tensor.cols);
  std::vector<uint8_t> scratch;
  const uint8_t* const file = RowBlocks(tensor, config, row, scratch);
  const int64_t groups = tensor.cols / kWeightGroup;
  uint8_t* const data = to.data + static_cast<size_t>(at) * width * ElementBytes(to.type);
  std::vector<int8_t> codes;
  std::vector<float> values;
  const auto finish_int8 = [&](float factor) {
    std::ranges::transform(codes, data, [](int8_t code) { return static_cast<uint8_t>(code + 128); });
    to.factors[at] = factor;
  };
  if (to.type == WeightType::kInt8) {
    codes.resize(width);
    values.resize(static_cast<size_t>(groups));
    if (delta.rank == 0 && UnpackInt8(type, file, tensor.cols, codes.data(), values.data())) {
      finish_int8(RoundInt8Scales(values.data(), static_cast<int32_t>(groups), to.scales + at * groups));
      return;
    }
  }
  values.resize(width);
  Dequantize(type, file, tensor.cols, values.data());
  for (size_t j = 0; j < delta.rank; ++j) {
    const float factor = delta.scale * delta.b[static_cast<size_t>(row) * delta.rank + j];
    const float* const a = delta.a.data() + j * width;
    for (size_t column = 0; column < width; ++column) values[column] += factor * a[column];
  }
  if (to.type == WeightType::kInt8) {
    finish_int8(QuantizeInt8(values.data(), static_cast<int32_t>(width), codes.data(), to.scales + at * groups));
  } else {
    PHSA_CHECK(to.type == WeightType::kBf16);
    std::ranges::transform(values, reinterpret_cast<uint16_t*>(data), Bf16FromF32);
  }
}

}  // namespace phsa::cuda
