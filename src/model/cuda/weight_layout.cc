#include "model/cuda/weight_layout.h"

#include <algorithm>

#include "base/dtype.h"
#include "base/errors.h"
#include "io/architecture.h"

namespace phsa::cuda {
namespace {

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

MatrixView WeightLayout::Take(const std::vector<Part>& parts, int64_t cols, WeightType type) {
  const auto exists = [&](const Part& part) { return names_.contains(part.name); };
  if (std::ranges::none_of(parts, exists)) return {};
  const auto width = static_cast<size_t>(cols), row_bytes = width * ElementBytes(type);
  size_t rows = 0;
  for (const Part& part : parts) rows += static_cast<size_t>(part.rows);
  PackedRows all;
  all.type = type;
  all.data = carver_.Take<uint8_t>(static_cast<int64_t>(rows * row_bytes));
  if (type == WeightType::kInt8) {
    PHSA_CHECK(width % kWeightGroup == 0);
    all.scales = carver_.Take<uint16_t>(static_cast<int64_t>(rows * (width / kWeightGroup)));
    all.factors = carver_.Take<float>(static_cast<int64_t>(rows));
    largest_int8 = std::max(largest_int8, rows * width);
  }
  PackedRows next = all;
  for (const Part& part : parts) {
    if (exists(part)) places[part.name] = next;
    if (all.data == nullptr) continue;
    const auto count = static_cast<size_t>(part.rows);
    next.data += count * row_bytes;
    if (type != WeightType::kInt8) continue;
    next.scales += count * (width / kWeightGroup);
    next.factors += count;
  }
  return {all.data, all.scales, all.factors};
}

DeviceLayer::Experts WeightLayout::TakeExperts(const ModelConfig& config, int32_t layer) {
  const LayerNames& names = ArchitectureOf(config).names;
  const int64_t hidden = config.hidden, width = config.expert_width;
  std::vector<Part> gate_up, gate_up_bias, down, down_bias;
  for (int32_t e = 0; e < config.num_experts; ++e) {
    for (const TensorName& half : {names.expert_gate, names.expert_up}) {
      gate_up.push_back({ExpertTensor(layer, e, half) + ".weight", width});
      gate_up_bias.push_back({ExpertTensor(layer, e, half) + ".bias", width});
    }
    down.push_back({ExpertTensor(layer, e, names.expert_down) + ".weight", hidden});
    down_bias.push_back({ExpertTensor(layer, e, names.expert_down) + ".bias", hidden});
  }
  const std::string router = fmt::format("model.layers.{}.{}", layer, names.router.hugging_face);
  const auto vector = [&](const std::vector<Part>& parts) {
    return static_cast<const float*>(Take(parts, 1, WeightType::kF32).data);
  };
  DeviceLayer::Experts experts;
  experts.router =
      static_cast<const float*>(Take({{router + ".weight", config.num_experts}}, hidden, WeightType::kF32).data);
  experts.router_bias = vector({{router + ".bias", config.num_experts}});
  experts.gate_up = Take(gate_up, hidden, WeightType::kBf16).data;
  experts.gate_up_bias = vector(gate_up_bias);
  experts.down = Take(down, width, WeightType::kBf16).data;
  experts.down_bias = vector(down_bias);
  return experts;
}

float HalfScale(const ModelConfig& config, const float* post_norm) {
  return post_norm != nullptr ? 1.0f : config.residual_scale;
}

WeightLayout::WeightLayout(const ModelSource& source, WeightsMode mode, uint8_t* memory)
    : carver_(memory, kDeviceAlignment) {
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
  const LayerNames& names = ArchitectureOf(config).names;
  for (int32_t i = 0; i < config.num_layers; ++i) {
    const auto weight = [&](TensorName name) { return fmt::format("model.layers.{}.{}.weight", i, name.hugging_face); };
    const auto bias = [&](TensorName name) { return fmt::format("model.layers.{}.{}.bias", i, name.hugging_face); };
    const auto scaled = [&](const std::string& name, float scale) {
      if (const auto found = places.find(name); found != places.end()) found->second.scale = scale;
    };
    DeviceLayer layer;
    layer.attention_norm = f32(weight(names.attention_norm), hidden);
    layer.qkv = Take({{weight(names.q), q}, {weight(names.k), kv}, {weight(names.v), kv}}, hidden, of_layers);
    layer.qkv_bias = bf16({{bias(names.q), q}, {bias(names.k), kv}, {bias(names.v), kv}});
    layer.q_norm = f32(weight(names.q_norm), config.head_dim);
    layer.k_norm = f32(weight(names.k_norm), config.head_dim);
    layer.o = Take({{weight(names.o), hidden}}, q, of_layers);
    layer.o_bias = f32(bias(names.o), hidden);
    layer.sinks = f32(fmt::format("model.layers.{}.{}", i, names.sinks.hugging_face), config.num_q_heads);
    layer.attention_post_norm = f32(weight(names.attention_post_norm), hidden);
    layer.mlp_norm = f32(weight(names.mlp_norm), hidden);
    if (config.Layer(i).experts) {
      layer.experts = TakeExperts(config, i);
    } else {
      layer.gate_up = Take({{weight(names.gate), intermediate}, {weight(names.up), intermediate}}, hidden, of_layers);
      layer.gate_up_bias = bf16({{bias(names.gate), intermediate}, {bias(names.up), intermediate}});
      layer.down = Take({{weight(names.down), hidden}}, intermediate, of_layers);
      layer.down_bias = f32(bias(names.down), hidden);
    }
    layer.mlp_post_norm = f32(weight(names.mlp_post_norm), hidden);
    // The sum is scaled with its bias.
    const bool attention_normed = names_.contains(weight(names.attention_post_norm)),
               mlp_normed = names_.contains(weight(names.mlp_post_norm));
    scaled(attention_normed ? weight(names.attention_post_norm) : bias(names.o), config.residual_scale);
    scaled(mlp_normed ? weight(names.mlp_post_norm) : bias(names.down), config.residual_scale);
    layers.push_back(layer);
  }
  bytes = carver_.size();
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
  const size_t of_b = delta.rank > 0 ? static_cast<size_t>(HuggingFaceRow(config, tensor.name, row)) : 0;
  for (size_t j = 0; j < delta.rank; ++j) {
    const float factor = delta.scale * delta.b[of_b * delta.rank + j];
    const float* const a = delta.a.data() + j * width;
    for (size_t column = 0; column < width; ++column) values[column] += factor * a[column];
  }
  if (to.type == WeightType::kF32) {
    std::ranges::copy(values, reinterpret_cast<float*>(data));
  } else if (to.type == WeightType::kInt8) {
    finish_int8(QuantizeInt8(values.data(), static_cast<int32_t>(width), codes.data(), to.scales + at * groups));
  } else {
    PHSA_CHECK(to.type == WeightType::kBf16);
    std::ranges::transform(values, reinterpret_cast<uint16_t*>(data), Bf16FromF32);
  }
}

}  // namespace phsa::cuda
