#include "model/weights.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "base/errors.h"
#include "io/architecture.h"

namespace phsa {
namespace {

// Where a tensor goes: into a matrix or a vector.
struct Place : ModelTensor {
  Matrix* matrix = nullptr;
  Vector* vector = nullptr;
  bool exact = false;   // a matrix that stays f32: a router's small differences decide
  bool expert = false;  // a matrix that few tokens need: it may stay in the file
  // In the file.
  uint64_t bytes() const {
    const int64_t elements = std::max<int64_t>(rows, 1) * cols;
    return static_cast<uint64_t>(elements / TensorTypeBlockElements(tensor->type)) * TensorTypeBlockBytes(tensor->type);
  }
};

const Tensor* FindChecked(const ModelSource& source, const std::string& name, const std::vector<int64_t>& expected,
                          Presence presence) {
  if (presence == Presence::kAbsent) return nullptr;
  const Tensor* const tensor = source.Find(name);
  if (tensor == nullptr) {
    if (presence == Presence::kOptional) return nullptr;
    ThrowInvalid("{}: the tensor {} is missing; the file is not a whole {} model", source.path(), name,
                 source.config().architecture);
  }
  if (tensor->shape != expected) {
    ThrowInvalid("{}: tensor {} at offset {} has the shape [{}]; the model's configuration asks for [{}]", tensor->file,
                 Quoted(tensor->name), tensor->file_offset, fmt::join(tensor->shape, ", "), fmt::join(expected, ", "));
  }
  return tensor;
}

// Every tensor of the model with its place in `weights`, whose layers are made here.
std::vector<Place> Places(const ModelSource& source, Weights& weights) {
  const ModelConfig& config = source.config();
  const Architecture& architecture = ArchitectureOf(config);
  std::vector<Place> places;
  const bool reorders = config.interleaved_rope_rows || config.rotary_dim > 0;
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols, Matrix& to, bool turned = false) {
    const Tensor* const tensor = FindChecked(source, name, {rows, cols}, Presence::kRequired);
    places.push_back({{name, tensor, rows, cols, 0, turned && reorders}, &to, nullptr});
  };
  // Rows [first, first + rows) of a tensor of this shape.
  const auto part = [&](const std::string& name, const std::string& whole, const std::vector<int64_t>& shape,
                        int64_t first, int64_t rows, Matrix& to, bool turned = false) {
    const Tensor* const tensor = FindChecked(source, whole, shape, Presence::kRequired);
    places.push_back({{name, tensor, rows, shape.back(), first, turned && reorders}, &to, nullptr});
  };
  const auto vector = [&](const std::string& name, int64_t size, Vector& to, Presence presence, bool turned = false) {
    if (const Tensor* const tensor = FindChecked(source, name, {size}, presence)) {
      const bool from_one = config.norms_from_one && name.ends_with("norm.weight");
      places.push_back({{name, tensor, 0, size, 0, turned && reorders, from_one}, nullptr, &to});
    }
  };
  const LayerNames& names = architecture.names;
  const int64_t hidden = config.hidden, intermediate = config.intermediate;
  const int64_t q_width = int64_t{config.num_q_heads} * config.head_dim;
  const int64_t kv_width = int64_t{config.num_kv_heads} * config.head_dim;

  // What one expert has of gate, up or down: a tensor of its own, or a part of one that all experts share.
  const auto expert_part = [&](int32_t layer, int32_t e, TensorName name, int64_t rows, int64_t cols, Matrix& to,
                               Vector& to_bias) {
    const std::string at = fmt::format("model.layers.{}.", layer), own = ExpertTensor(layer, e, name);
    const std::string shared = fmt::format("{}{}", at, name.hugging_face);
    const int64_t experts = config.num_experts;
    if (source.Find(shared + ".weight") != nullptr || names.expert_gate_up.hugging_face.empty()) {
      if (source.Find(shared + ".weight") == nullptr) {
        matrix(own + ".weight", rows, cols, to);
      } else {
        part(own + ".weight", shared + ".weight", {experts, rows, cols}, e * rows, rows, to);
      }
      places.back().expert = true;
      const Tensor* const tensor = FindChecked(source, shared + ".bias", {experts, rows}, architecture.expert_bias);
      if (tensor != nullptr) places.push_back({{own + ".bias", tensor, 0, rows, e * rows}, nullptr, &to_bias});
      return;
    }
    const bool down = name.hugging_face == names.expert_down.hugging_face;
    const int64_t step = down ? 1 : 2, other = name.hugging_face == names.expert_up.hugging_face ? 1 : 0;
    const std::string whole = down ? shared : fmt::format("{}{}", at, names.expert_gate_up.hugging_face);
    const Tensor* const found = source.Find(whole);
    const bool across = found == nullptr || TensorTypeBlockElements(found->type) == 1;
    const std::vector<int64_t> shape =
        across ? std::vector{experts, cols, step * rows} : std::vector{experts, step * rows, cols};
    const int64_t first = e * step * rows + other;
    places.push_back({{own + ".weight", FindChecked(source, whole, shape, Presence::kRequired), rows, cols, first,
                       false, false, step, across ? step * rows : 0},
                      &to,
                      nullptr});
    places.back().expert = true;
    const Tensor* const tensor = FindChecked(source, whole + "_bias", {experts, step * rows}, architecture.expert_bias);
    if (tensor == nullptr) return;
    places.push_back({{own + ".bias", tensor, 0, rows, first, false, false, step}, nullptr, &to_bias});
  };

  matrix("model.embed_tokens.weight", config.vocab_size, hidden, weights.embedding);
  weights.layers.resize(static_cast<size_t>(config.num_layers));
  for (int32_t i = 0; i < config.num_layers; ++i) {
    LayerWeights& layer = weights.layers[static_cast<size_t>(i)];
    const auto weight = [&](TensorName name) { return fmt::format("model.layers.{}.{}.weight", i, name.hugging_face); };
    const auto bias = [&](TensorName name) { return fmt::format("model.layers.{}.{}.bias", i, name.hugging_face); };
    // Of the families that have such a norm; the others have no name for it.
    const auto own_norm = [&](TensorName name, Vector& to) {
      if (!name.hugging_face.empty()) vector(weight(name), hidden, to, Presence::kRequired);
    };
    vector(weight(names.attention_norm), hidden, layer.attention_norm, Presence::kRequired);
    if (names.qkv.hugging_face.empty()) {
      matrix(weight(names.q), q_width, hidden, layer.q, true);
      matrix(weight(names.k), kv_width, hidden, layer.k, true);
      matrix(weight(names.v), kv_width, hidden, layer.v);
    } else {
      const std::vector<int64_t> shape = {q_width + 2 * kv_width, hidden};
      part(weight(names.q), weight(names.qkv), shape, 0, q_width, layer.q, true);
      part(weight(names.k), weight(names.qkv), shape, q_width, kv_width, layer.k, true);
      part(weight(names.v), weight(names.qkv), shape, q_width + kv_width, kv_width, layer.v);
    }
    vector(bias(names.q), q_width, layer.q_bias, architecture.qkv_bias, true);
    vector(bias(names.k), kv_width, layer.k_bias, architecture.qkv_bias, true);
    vector(bias(names.v), kv_width, layer.v_bias, architecture.qkv_bias);
    vector(weight(names.q_norm), config.head_dim, layer.q_norm, architecture.qk_norm);
    vector(weight(names.k_norm), config.head_dim, layer.k_norm, architecture.qk_norm);
    matrix(weight(names.o), hidden, q_width, layer.o);
    vector(bias(names.o), hidden, layer.o_bias, architecture.output_bias);
    if (!names.sinks.hugging_face.empty()) {
      vector(fmt::format("model.layers.{}.{}", i, names.sinks.hugging_face), config.num_q_heads, layer.sinks,
             Presence::kRequired);
    }
    own_norm(names.attention_post_norm, layer.attention_post_norm);
    vector(weight(names.mlp_norm), hidden, layer.mlp_norm, Presence::kRequired);
    if (config.Layer(i).experts) {
      matrix(weight(names.router), config.num_experts, hidden, layer.router);
      places.back().exact = true;
      vector(bias(names.router), config.num_experts, layer.router_bias, architecture.expert_bias);
      layer.experts.resize(static_cast<size_t>(config.num_experts));
      for (int32_t e = 0; e < config.num_experts; ++e) {
        LayerWeights::Expert& expert = layer.experts[static_cast<size_t>(e)];
        expert_part(i, e, names.expert_gate, config.expert_width, hidden, expert.gate, expert.gate_bias);
        expert_part(i, e, names.expert_up, config.expert_width, hidden, expert.up, expert.up_bias);
        expert_part(i, e, names.expert_down, hidden, config.expert_width, expert.down, expert.down_bias);
      }
      own_norm(names.mlp_post_norm, layer.mlp_post_norm);
      continue;
    }
    if (names.gate_up.hugging_face.empty()) {
      matrix(weight(names.gate), intermediate, hidden, layer.gate);
      matrix(weight(names.up), intermediate, hidden, layer.up);
    } else {
      const std::vector<int64_t> shape = {2 * intermediate, hidden};
      part(weight(names.gate), weight(names.gate_up), shape, 0, intermediate, layer.gate);
      part(weight(names.up), weight(names.gate_up), shape, intermediate, intermediate, layer.up);
    }
    matrix(weight(names.down), hidden, intermediate, layer.down);
    vector(bias(names.gate), intermediate, layer.gate_bias, architecture.mlp_bias);
    vector(bias(names.up), intermediate, layer.up_bias, architecture.mlp_bias);
    vector(bias(names.down), hidden, layer.down_bias, architecture.mlp_bias);
    own_norm(names.mlp_post_norm, layer.mlp_post_norm);
  }
  vector("model.norm.weight", hidden, weights.final_norm, Presence::kRequired);
  places.back().divisor = config.logits_divisor;
  if (!config.tied_embeddings) matrix("lm_head.weight", config.vocab_size, hidden, weights.lm_head);
  return places;
}

void PackRow(TensorType type, const uint8_t* data, int64_t cols, int32_t row, Matrix& matrix,
             std::vector<float>& values, std::vector<uint8_t>& codes, std::vector<float>& scales) {
  const size_t groups = static_cast<size_t>((cols + kWeightGroup - 1) / kWeightGroup);
  codes.resize(static_cast<size_t>(cols));
  scales.resize(2 * groups);  // int4: and minima; int6: one for each 16 columns
  if (matrix.type() == WeightType::kInt4) {
    PHSA_CHECK(UnpackInt4(type, data, cols, codes.data(), scales.data(), scales.data() + groups));
    matrix.SetRowInt4(row, codes.data(), scales.data(), scales.data() + groups);
    return;
  }
  if (matrix.type() == WeightType::kInt6) {
    PHSA_CHECK(UnpackInt6(type, data, cols, codes.data(), scales.data()));
    matrix.SetRowInt6(row, codes.data(), scales.data());
    return;
  }
  auto* const signed_codes = reinterpret_cast<int8_t*>(codes.data());
  if (matrix.type() == WeightType::kInt8 && UnpackInt8(type, data, cols, signed_codes, scales.data())) {
    matrix.SetRowInt8(row, signed_codes, scales.data());
    return;
  }
  values.resize(static_cast<size_t>(cols));
  Dequantize(type, data, cols, values.data());
  matrix.SetRow(row, values.data());
}

WeightType PackedType(const Place& place, WeightsMode mode) {
  return place.exact ? WeightType::kF32 : PackedType(place.tensor->type, mode);
}

// Whether the matrix is an expert's, and lies in the file as it is multiplied, row behind row.
bool MayStayInFile(const Place& place, WeightsMode mode) {
  if (!place.expert || place.across != 0 || place.row_step != 1 || place.turned_heads) return false;
  const WeightType type = PackedType(place, mode);
  return (type == WeightType::kF32 && place.tensor->type == TensorType::kF32) ||
         (type == WeightType::kBf16 && place.tensor->type == TensorType::kBf16);
}

void LoadMatrix(const Place& place, const ModelConfig& config, WeightsMode mode, ThreadPool& threads, bool in_file) {
  Matrix& matrix = *place.matrix;
  if (in_file) {
    const uint64_t row_bytes = place.bytes() / static_cast<uint64_t>(place.rows);
    matrix = Matrix::OfFile(PackedType(place, mode), static_cast<int32_t>(place.rows), static_cast<int32_t>(place.cols),
                            place.tensor->data + static_cast<uint64_t>(place.first_row) * row_bytes);
    return;
  }
  matrix = Matrix(PackedType(place, mode), static_cast<int32_t>(place.rows), static_cast<int32_t>(place.cols));
  struct Job {
    const Place& place;
    const ModelConfig& config;
    Matrix& matrix;
  } job{place, config, matrix};
  constexpr int32_t kRows = 8 * kPanelRows;
  const auto tasks = static_cast<int32_t>((place.rows + kRows - 1) / kRows);
  threads.Run(
      tasks,
      [](void* arg, int32_t task, int32_t) {
        const Job& work = *static_cast<const Job*>(arg);
        std::vector<float> values, scales;
        std::vector<uint8_t> codes, blocks;
        const int64_t end = std::min<int64_t>(work.place.rows, int64_t{task + 1} * kRows);
        for (int64_t row = int64_t{task} * kRows; row < end; ++row) {
          PackRow(work.place.tensor->type, RowBlocks(work.place, work.config, row, blocks), work.place.cols,
                  static_cast<int32_t>(row), work.matrix, values, codes, scales);
        }
      },
      &job);
}

// The products of a layer by what they read, and what an adapter adds to them.
struct AdapterGroup {
  std::vector<const char*> names;  // after "model.layers.N.", in the order of LowRank::Part::output
  LowRank LayerWeights::*adapter;
};
const std::vector<AdapterGroup>& AdapterGroups() {
  static const std::vector<AdapterGroup> groups = {
      {{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, &LayerWeights::qkv_adapter},
      {{"self_attn.o_proj"}, &LayerWeights::o_adapter},
      {{"mlp.gate_proj", "mlp.up_proj"}, &LayerWeights::gate_up_adapter},
      {{"mlp.down_proj"}, &LayerWeights::down_adapter}};
  return groups;
}

// An adapter is small, and rounding it to 8 bits would save nothing.
WeightType AdapterType(WeightsMode mode) {
  return PackedType(TensorType::kF32, mode == WeightsMode::kInt8 ? WeightsMode::kAuto : mode);
}

// Calls `use` with each matrix of the adapter that a group of a layer has, and where it is in the group.
template <class Use>
void ForEachOf(const Adapter& adapter, const AdapterGroup& group, size_t layer, const Use& use) {
  for (size_t i = 0; i < group.names.size(); ++i) {
    const LowRankTensors* const found = adapter.Find(fmt::format("model.layers.{}.{}.weight", layer, group.names[i]));
    if (found != nullptr) use(*found, i);
  }
}

int32_t RowsOf(const Adapter& adapter, const AdapterGroup& group, size_t layer) {
  int64_t rows = 0;
  ForEachOf(adapter, group, layer, [&](const LowRankTensors& one, size_t) { rows += one.rank(); });
  return static_cast<int32_t>(rows);
}

AdapterSizes SizesOf(const Adapter& adapter, size_t num_layers) {
  AdapterSizes sizes;
  for (size_t layer = 0; layer < num_layers; ++layer) {
    for (const AdapterGroup& group : AdapterGroups()) {
      sizes.rows = std::max(sizes.rows, RowsOf(adapter, group, layer));
      ForEachOf(adapter, group, layer,
                [&](const LowRankTensors& one, size_t) { sizes.ranks.insert(static_cast<int32_t>(one.rank())); });
    }
  }
  return sizes;
}

}  // namespace

uint64_t AdapterBytes(const Adapter& adapter, WeightsMode mode, size_t num_layers) {
  const WeightType type = AdapterType(mode);
  uint64_t bytes = 0;
  for (size_t layer = 0; layer < num_layers; ++layer) {
    for (const AdapterGroup& group : AdapterGroups()) {
      ForEachOf(adapter, group, layer, [&](const LowRankTensors& one, size_t) {
        const auto rank = static_cast<int32_t>(one.rank());
        // The rows of A lie together and fill one panel more at most, as they do here.
        bytes += Matrix::Bytes(type, rank, static_cast<int32_t>(one.a.shape[1])) +
                 Matrix::Bytes(type, static_cast<int32_t>(one.b.shape[0]), rank);
      });
    }
  }
  return bytes;
}

Weights ReadAdapter(const Adapter& adapter, const ModelConfig& config, WeightsMode mode) {
  const auto num_layers = static_cast<size_t>(config.num_layers);
  const WeightType type = AdapterType(mode);
  Weights weights;
  weights.layers.resize(num_layers);
  weights.adapter = SizesOf(adapter, num_layers);
  for (size_t layer = 0; layer < weights.layers.size(); ++layer) {
    for (const AdapterGroup& group : AdapterGroups()) {
      const int32_t rows = RowsOf(adapter, group, layer);
      if (rows == 0) continue;
      LowRank& to = weights.layers[layer].*group.adapter;
      int32_t first = 0;
      ForEachOf(adapter, group, layer, [&](const LowRankTensors& one, size_t output) {
        const auto rank = static_cast<int32_t>(one.rank()), cols = static_cast<int32_t>(one.a.shape[1]);
        const std::vector<float> a = ReadLowRank(one.a);
        std::vector<float> b = ReadLowRank(one.b);
        for (float& value : b) value *= one.scale;
        if (first == 0) to.a = Matrix(type, rows, cols);
        for (int32_t row = 0; row < rank; ++row) to.a.SetRow(first + row, a.data() + int64_t{row} * cols);
        LowRank::Part part{output, first, Matrix(type, static_cast<int32_t>(one.b.shape[0]), rank)};
        for (int32_t row = 0; row < part.b.rows(); ++row) {
          part.b.SetRow(row, b.data() + HuggingFaceRow(config, group.names[output], row) * rank);
        }
        to.parts.push_back(std::move(part));
        first += rank;
      });
    }
  }
  adapter.Release();
  return weights;
}

namespace {

Activations ChooseActivations(WeightsMode mode) {
  constexpr auto kF32 = ActivationType::kF32, kBf16 = ActivationType::kBf16, kInt8 = ActivationType::kInt8;
  const ProductSupport fast = FastProducts();
  switch (mode) {
    case WeightsMode::kF32:
    case WeightsMode::kBf16: return {};  // all weights have activations of their own type
    case WeightsMode::kInt8: return {kInt8, kInt8, kInt8, kInt8, kInt8};
    case WeightsMode::kAuto:
      if (fast.bf16) return {kBf16, fast.int8 ? kInt8 : kBf16, kBf16, kBf16, fast.int8 ? kInt8 : kBf16};
      if (fast.int8) return {kF32, kInt8, kF32, kF32, kInt8};
      return {};
  }
  return {};
}

}  // namespace

WeightsMode WeightsModeFromName(std::string_view name) {
  for (const WeightsMode mode : {WeightsMode::kAuto, WeightsMode::kF32, WeightsMode::kBf16, WeightsMode::kInt8}) {
    if (name == Name(mode)) return mode;
  }
  ThrowInvalid("{} is {}; allowed: auto, f32, bf16, int8", Option{"weights"}, Quoted(name));
}

const char* Name(WeightsMode mode) {
  switch (mode) {
    case WeightsMode::kAuto: return "auto";
    case WeightsMode::kF32: return "f32";
    case WeightsMode::kBf16: return "bf16";
    case WeightsMode::kInt8: return "int8";
  }
  return "";
}

WeightType PackedType(TensorType file, WeightsMode mode) {
  if (mode == WeightsMode::kF32) return WeightType::kF32;
  if (mode == WeightsMode::kBf16) return WeightType::kBf16;
  switch (file) {
    case TensorType::kQ4_0:
    case TensorType::kQ4_1:
    case TensorType::kQ4_K: return WeightType::kInt4;
    case TensorType::kQ6_K: return FastProducts().int6 ? WeightType::kInt6 : WeightType::kInt8;
    case TensorType::kQ5_0:
    case TensorType::kQ5_1:
    case TensorType::kQ5_K:
    case TensorType::kQ8_0:
    case TensorType::kQ2_K:
    case TensorType::kQ3_K:
    case TensorType::kIq4Nl:
    case TensorType::kIq4Xs:
    case TensorType::kMxfp4: return WeightType::kInt8;
    case TensorType::kF16:
    case TensorType::kBf16: return mode == WeightsMode::kInt8 ? WeightType::kInt8 : WeightType::kBf16;
    case TensorType::kF32:
      if (mode == WeightsMode::kInt8) return WeightType::kInt8;
      return FastProducts().bf16 ? WeightType::kBf16 : WeightType::kF32;
    case TensorType::kU8: break;  // a source refuses it
  }
  PHSA_CHECK(!"tensor type");
  return WeightType::kF32;
}

std::string SpecialSteps(const ModelConfig& config) {
  const Architecture& architecture = ArchitectureOf(config);
  std::vector<std::string_view> special;
  const auto any = [&](const auto& has) { return std::any_of(config.layers.begin(), config.layers.end(), has); };
  if (any([](const LayerTraits& layer) { return layer.window > 0; })) special.emplace_back("sliding windows");
  if (any([](const LayerTraits& layer) { return !layer.rope; })) special.emplace_back("layers without RoPE");
  if (!architecture.names.attention_post_norm.hugging_face.empty()) special.emplace_back("norms behind the attention");
  if (any([](const LayerTraits& layer) { return layer.experts; })) special.emplace_back("experts");
  if (!architecture.names.gate_up.hugging_face.empty()) special.emplace_back("several weights in one tensor");
  if (config.rotary_dim > 0) special.emplace_back("heads that RoPE turns in part");
  if (!architecture.names.sinks.hugging_face.empty()) special.emplace_back("attention sinks");
  if (architecture.gate == Gate::kGeluTanh) special.emplace_back("GELU");
  if (architecture.gate == Gate::kClampedSwiglu) special.emplace_back("a clamped gate");
  if (config.embedding_scale != 1 || config.residual_scale != 1 || config.logits_divisor != 1) {
    special.emplace_back("scales");
  }
  return fmt::format("{}", fmt::join(special, ", "));
}

std::string ExpertTensor(int32_t layer, int32_t expert, TensorName name) {
  constexpr std::string_view kPrefix = "mlp.experts.";
  PHSA_CHECK(name.hugging_face.starts_with(kPrefix));
  return fmt::format("model.layers.{}.{}{}.{}", layer, kPrefix, expert, name.hugging_face.substr(kPrefix.size()));
}

std::vector<ModelTensor> ModelTensors(const ModelSource& source) {
  Weights weights;
  const std::vector<Place> places = Places(source, weights);
  return {places.begin(), places.end()};
}

int64_t FileRow(const ModelTensor& tensor, const ModelConfig& config, int64_t row) {
  if (!tensor.turned_heads) return tensor.first_row + row * tensor.row_step;
  // Our head: the first of all pairs, then the second of all pairs; the pairs that RoPE turns come first.
  const int64_t half = config.head_dim / 2, turned = (config.rotary_dim > 0 ? config.rotary_dim : config.head_dim) / 2;
  const int64_t head = row / config.head_dim, pair = row % config.head_dim % half,
                second = row % config.head_dim / half;
  int64_t in_head = 2 * turned + (pair - turned) + second * (half - turned);
  if (pair < turned) in_head = config.interleaved_rope_rows ? 2 * pair + second : pair + second * turned;
  return tensor.first_row + head * config.head_dim + in_head;
}

const uint8_t* RowBlocks(const ModelTensor& tensor, const ModelConfig& config, int64_t row,
                         std::vector<uint8_t>& scratch) {
  const int64_t file_row = FileRow(tensor, config, row), cols = tensor.cols;
  if (tensor.across == 0) return Blocks(*tensor.tensor, file_row * cols, cols, scratch);
  const size_t bytes = TensorTypeBlockBytes(tensor.tensor->type);
  const int64_t matrix = file_row / tensor.across, column = file_row % tensor.across;
  const uint8_t* const from = tensor.tensor->data + static_cast<size_t>(matrix * tensor.across * cols + column) * bytes;
  scratch.resize(static_cast<size_t>(cols) * bytes);
  for (size_t c = 0; c < static_cast<size_t>(cols); ++c) {
    std::memcpy(scratch.data() + c * bytes, from + c * static_cast<size_t>(tensor.across) * bytes, bytes);
  }
  return scratch.data();
}

std::vector<float> ReadVector(const ModelTensor& tensor, const ModelConfig& config) {
  const TensorType type = tensor.tensor->type;
  const int64_t block = TensorTypeBlockElements(type);
  const int64_t begin = tensor.first_row / block * block,
                end = (tensor.first_row + (tensor.cols - 1) * tensor.row_step + block) / block * block;
  std::vector<uint8_t> scratch;
  std::vector<float> file(static_cast<size_t>(end - begin)), out(static_cast<size_t>(tensor.cols));
  Dequantize(type, Blocks(*tensor.tensor, begin, end - begin, scratch), end - begin, file.data());
  for (int64_t i = 0; i < tensor.cols; ++i) {
    out[static_cast<size_t>(i)] = file[static_cast<size_t>(FileRow(tensor, config, i) - begin)];
  }
  return out;
}

std::vector<float> UsedVector(const ModelTensor& tensor, const ModelConfig& config) {
  std::vector<float> out = ReadVector(tensor, config);
  for (float& value : out) value = (tensor.from_one ? value + 1.0f : value) / tensor.divisor;
  return out;
}

int64_t HuggingFaceRow(const ModelConfig& config, std::string_view name, int64_t row) {
  if (name.find("q_proj") == std::string_view::npos && name.find("k_proj") == std::string_view::npos) return row;
  ModelConfig own = config;
  own.interleaved_rope_rows = ArchitectureOf(config).interleaved_rope;
  ModelTensor tensor;
  tensor.turned_heads = own.interleaved_rope_rows || own.rotary_dim > 0;
  return FileRow(tensor, own, row);
}

WeightsPlan PlanWeights(const ModelSource& source, WeightsMode mode, bool experts_in_file) {
  Weights weights;
  WeightsPlan plan;
  std::set<std::string> types;
  for (const Place& place : Places(source, weights)) {
    if (place.vector != nullptr) {
      plan.bytes += static_cast<uint64_t>(place.cols) * sizeof(float);
      continue;
    }
    const WeightType type = PackedType(place, mode);
    types.insert(WeightTypeName(type));
    if (MayStayInFile(place, mode)) {
      plan.file_bytes += place.bytes();
      if (experts_in_file) continue;
    }
    plan.bytes += Matrix::Bytes(type, static_cast<int32_t>(place.rows), static_cast<int32_t>(place.cols));
  }
  plan.types = fmt::format("{}", fmt::join(types, ", "));
  if (experts_in_file && plan.file_bytes > 0) {
    plan.types += fmt::format("; experts stay in the file, {:.2f} GB", static_cast<double>(plan.file_bytes) / 1e9);
  }
  if (const Adapter* const adapter = source.adapter()) {
    plan.adapter = SizesOf(*adapter, weights.layers.size());
    plan.bytes += AdapterBytes(*adapter, mode, weights.layers.size());
    plan.types += fmt::format("; adapter {}", WeightTypeName(AdapterType(mode)));
  }
  return plan;
}

Weights LoadWeights(const ModelSource& source, WeightsMode mode, ThreadPool& threads, const LoadProgress& progress,
                    bool experts_in_file) {
  Weights weights;
  const auto places = Places(source, weights);
  weights.activations = ChooseActivations(mode);
  uint64_t total = 0, done = 0;
  for (const Place& place : places) total += place.bytes();
  for (const Place& place : places) {
    const bool in_file = experts_in_file && place.matrix != nullptr && MayStayInFile(place, mode);
    if (place.matrix != nullptr) {
      LoadMatrix(place, source.config(), mode, threads, in_file);
    } else {
      *place.vector = UsedVector(place, source.config());
    }
    // What was repacked is not read again: without this, file and packed weights would both stay in memory.
    if (!in_file) source.Release(*place.tensor);
    done += place.bytes();
    if (!progress(static_cast<double>(done) / static_cast<double>(total))) return {};
  }
  SetAdapter(source, mode, weights);
  return weights;
}

void SetAdapter(const ModelSource& source, WeightsMode mode, Weights& weights) {
  Weights read;  // first all of it, so that nothing is changed where something goes wrong
  read.layers.resize(weights.layers.size());
  if (source.adapter() != nullptr) read = ReadAdapter(*source.adapter(), source.config(), mode);
  weights.adapter = std::move(read.adapter);
  for (size_t layer = 0; layer < weights.layers.size(); ++layer) {
    for (const AdapterGroup& group : AdapterGroups()) {
      weights.layers[layer].*group.adapter = std::move(read.layers[layer].*group.adapter);
    }
  }
}

}  // namespace phsa
