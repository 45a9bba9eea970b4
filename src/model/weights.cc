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

// Every tensor of a model with its place in `weights`, whose layers are made here.
class PlaceList {
 public:
  PlaceList(const ModelSource& source, Weights& weights)
      : source_(source),
        config_(source.config()),
        architecture_(ArchitectureOf(config_)),
        names_(architecture_.names),
        reorders_(config_.interleaved_rope_rows || config_.rotary_dim > 0) {
    AddMatrix("model.embed_tokens.weight", config_.vocab_size, config_.hidden, weights.embedding);
    weights.layers.resize(static_cast<size_t>(config_.num_layers));
    for (int32_t i = 0; i < config_.num_layers; ++i) AddLayer(i, weights.layers[static_cast<size_t>(i)]);
    AddVector("model.norm.weight", config_.hidden, weights.final_norm, Presence::kRequired);
    places_.back().divisor = config_.logits_divisor;
    if (!config_.tied_embeddings) AddMatrix("lm_head.weight", config_.vocab_size, config_.hidden, weights.lm_head);
  }

  std::vector<Place> Take() { return std::move(places_); }

 private:
  static std::string TensorOf(int32_t layer, TensorName name, const char* kind) {
    return fmt::format("model.layers.{}.{}{}", layer, name.hugging_face, kind);
  }
  static std::string WeightOf(int32_t layer, TensorName name) { return TensorOf(layer, name, ".weight"); }
  static std::string BiasOf(int32_t layer, TensorName name) { return TensorOf(layer, name, ".bias"); }

  void AddMatrix(const std::string& name, int64_t rows, int64_t cols, Matrix& to, bool turned = false) {
    const Tensor* const tensor = FindChecked(source_, name, {rows, cols}, Presence::kRequired);
    places_.push_back({{name, tensor, rows, cols, 0, turned && reorders_}, &to, nullptr});
  }
  // Rows [first, first + rows) of a tensor of this shape.
  void AddPart(const std::string& name, const std::string& whole, const std::vector<int64_t>& shape, int64_t first,
               int64_t rows, Matrix& to, bool turned = false) {
    const Tensor* const tensor = FindChecked(source_, whole, shape, Presence::kRequired);
    places_.push_back({{name, tensor, rows, shape.back(), first, turned && reorders_}, &to, nullptr});
  }
  void AddVector(const std::string& name, int64_t size, Vector& to, Presence presence, bool turned = false) {
    const Tensor* const tensor = FindChecked(source_, name, {size}, presence);
    if (tensor == nullptr) return;
    const bool from_one = config_.norms_from_one && name.ends_with("norm.weight");
    places_.push_back({{name, tensor, 0, size, 0, turned && reorders_, from_one}, nullptr, &to});
  }
  // Of the families that have such a norm; the others have no name for it.
  void AddOwnNorm(int32_t i, TensorName name, Vector& to) {
    if (!name.hugging_face.empty()) AddVector(WeightOf(i, name), config_.hidden, to, Presence::kRequired);
  }

  void AddLayer(int32_t i, LayerWeights& layer) {
    AddAttention(i, layer);
    AddVector(WeightOf(i, names_.mlp_norm), config_.hidden, layer.mlp_norm, Presence::kRequired);
    if (config_.Layer(i).experts) {
      AddExperts(i, layer);
    } else {
      AddMlp(i, layer);
    }
    AddOwnNorm(i, names_.mlp_post_norm, layer.mlp_post_norm);
  }

  void AddAttention(int32_t i, LayerWeights& layer) {
    const int64_t hidden = config_.hidden;
    const int64_t q_width = int64_t{config_.num_q_heads} * config_.head_dim;
    const int64_t kv_width = int64_t{config_.num_kv_heads} * config_.head_dim;
    AddVector(WeightOf(i, names_.attention_norm), hidden, layer.attention_norm, Presence::kRequired);
    if (names_.qkv.hugging_face.empty()) {
      AddMatrix(WeightOf(i, names_.q), q_width, hidden, layer.q, true);
      AddMatrix(WeightOf(i, names_.k), kv_width, hidden, layer.k, true);
      AddMatrix(WeightOf(i, names_.v), kv_width, hidden, layer.v);
    } else {
      const std::vector<int64_t> shape = {q_width + 2 * kv_width, hidden};
      const std::string whole = WeightOf(i, names_.qkv);
      AddPart(WeightOf(i, names_.q), whole, shape, 0, q_width, layer.q, true);
      AddPart(WeightOf(i, names_.k), whole, shape, q_width, kv_width, layer.k, true);
      AddPart(WeightOf(i, names_.v), whole, shape, q_width + kv_width, kv_width, layer.v);
    }
    AddVector(BiasOf(i, names_.q), q_width, layer.q_bias, architecture_.qkv_bias, true);
    AddVector(BiasOf(i, names_.k), kv_width, layer.k_bias, architecture_.qkv_bias, true);
    AddVector(BiasOf(i, names_.v), kv_width, layer.v_bias, architecture_.qkv_bias);
    AddVector(WeightOf(i, names_.q_norm), config_.head_dim, layer.q_norm, architecture_.qk_norm);
    AddVector(WeightOf(i, names_.k_norm), config_.head_dim, layer.k_norm, architecture_.qk_norm);
    AddMatrix(WeightOf(i, names_.o), hidden, q_width, layer.o);
    AddVector(BiasOf(i, names_.o), hidden, layer.o_bias, architecture_.output_bias);
    if (!names_.sinks.hugging_face.empty()) {
      AddVector(TensorOf(i, names_.sinks, ""), config_.num_q_heads, layer.sinks, Presence::kRequired);
    }
    AddOwnNorm(i, names_.attention_post_norm, layer.attention_post_norm);
  }

  void AddMlp(int32_t i, LayerWeights& layer) {
    const int64_t hidden = config_.hidden, width = config_.intermediate;
    if (names_.gate_up.hugging_face.empty()) {
      AddMatrix(WeightOf(i, names_.gate), width, hidden, layer.gate);
      AddMatrix(WeightOf(i, names_.up), width, hidden, layer.up);
    } else {
      const std::vector<int64_t> shape = {2 * width, hidden};
      AddPart(WeightOf(i, names_.gate), WeightOf(i, names_.gate_up), shape, 0, width, layer.gate);
      AddPart(WeightOf(i, names_.up), WeightOf(i, names_.gate_up), shape, width, width, layer.up);
    }
    AddMatrix(WeightOf(i, names_.down), hidden, width, layer.down);
    AddVector(BiasOf(i, names_.gate), width, layer.gate_bias, architecture_.mlp_bias);
    AddVector(BiasOf(i, names_.up), width, layer.up_bias, architecture_.mlp_bias);
    AddVector(BiasOf(i, names_.down), hidden, layer.down_bias, architecture_.mlp_bias);
  }

  void AddExperts(int32_t i, LayerWeights& layer) {
    const int64_t hidden = config_.hidden, width = config_.expert_width;
    AddMatrix(WeightOf(i, names_.router), config_.num_experts, hidden, layer.router);
    places_.back().exact = true;
    AddVector(BiasOf(i, names_.router), config_.num_experts, layer.router_bias, architecture_.expert_bias);
    layer.experts.resize(static_cast<size_t>(config_.num_experts));
    for (int32_t e = 0; e < config_.num_experts; ++e) {
      LayerWeights::Expert& expert = layer.experts[static_cast<size_t>(e)];
      AddOfExpert({i, e, names_.expert_gate, width, hidden}, expert.gate, expert.gate_bias);
      AddOfExpert({i, e, names_.expert_up, width, hidden}, expert.up, expert.up_bias);
      AddOfExpert({i, e, names_.expert_down, hidden, width}, expert.down, expert.down_bias);
    }
  }

  // What one expert has of gate, up or down.
  struct OfExpert {
    int32_t layer, expert;
    TensorName name;
    int64_t rows, cols;
  };
  // A tensor of its own, or a part of one that all experts share, of which gate and up may share one again.
  void AddOfExpert(const OfExpert& part, Matrix& to, Vector& to_bias) {
    const std::string shared = TensorOf(part.layer, part.name, "");
    const bool own_name = source_.Find(shared + ".weight") != nullptr;
    if (own_name || names_.expert_gate_up.hugging_face.empty()) {
      AddSeparate(part, own_name, to, to_bias);
    } else {
      AddFused(part, to, to_bias);
    }
  }
  void AddSeparate(const OfExpert& part, bool shared_by_experts, Matrix& to, Vector& to_bias) {
    const std::string own = ExpertTensor(part.layer, part.expert, part.name);
    const std::string shared = TensorOf(part.layer, part.name, "");
    const int64_t experts = config_.num_experts, first = part.expert * part.rows;
    if (shared_by_experts) {
      AddPart(own + ".weight", shared + ".weight", {experts, part.rows, part.cols}, first, part.rows, to);
    } else {
      AddMatrix(own + ".weight", part.rows, part.cols, to);
    }
    places_.back().expert = true;
    const Tensor* const tensor =
        FindChecked(source_, shared + ".bias", {experts, part.rows}, architecture_.expert_bias);
    if (tensor != nullptr) places_.push_back({{own + ".bias", tensor, 0, part.rows, first}, nullptr, &to_bias});
  }
  void AddFused(const OfExpert& part, Matrix& to, Vector& to_bias) {
    const std::string own = ExpertTensor(part.layer, part.expert, part.name);
    const int64_t experts = config_.num_experts, rows = part.rows, cols = part.cols;
    const bool down = part.name.hugging_face == names_.expert_down.hugging_face;
    const int64_t step = down ? 1 : 2, other = part.name.hugging_face == names_.expert_up.hugging_face ? 1 : 0;
    const std::string whole = TensorOf(part.layer, down ? part.name : names_.expert_gate_up, "");
    const Tensor* const found = source_.Find(whole);
    const bool across = found == nullptr || TensorTypeBlockElements(found->type) == 1;
    const std::vector<int64_t> shape =
        across ? std::vector{experts, cols, step * rows} : std::vector{experts, step * rows, cols};
    const int64_t first = part.expert * step * rows + other;
    places_.push_back({{own + ".weight", FindChecked(source_, whole, shape, Presence::kRequired), rows, cols, first,
                        false, false, step, across ? step * rows : 0},
                       &to,
                       nullptr});
    places_.back().expert = true;
    const Tensor* const tensor =
        FindChecked(source_, whole + "_bias", {experts, step * rows}, architecture_.expert_bias);
    if (tensor == nullptr) return;
    places_.push_back({{own + ".bias", tensor, 0, rows, first, false, false, step}, nullptr, &to_bias});
  }

  const ModelSource& source_;
  const ModelConfig& config_;
  const Architecture& architecture_;
  const LayerNames& names_;
  bool reorders_;
  std::vector<Place> places_;
};

std::vector<Place> Places(const ModelSource& source, Weights& weights) { return PlaceList(source, weights).Take(); }

// Memory for a row's codes and scales.
struct RowScratch {
  std::vector<float> values, scales;
  std::vector<uint8_t> codes, small_scales;
  std::vector<uint16_t> factors;
};

void PackRow(TensorType type, const uint8_t* data, int64_t cols, int32_t row, Matrix& matrix, RowScratch& scratch) {
  const size_t groups = static_cast<size_t>((cols + kWeightGroup - 1) / kWeightGroup);
  const size_t supers = static_cast<size_t>((cols + kSuperGroup - 1) / kSuperGroup);
  scratch.codes.resize(static_cast<size_t>(cols));
  scratch.scales.resize(2 * groups);        // and minima
  scratch.small_scales.resize(2 * groups);  // and minima; int6: one for each 16 columns
  scratch.factors.resize(2 * supers);       // of scales and of minima
  std::vector<uint8_t>& codes = scratch.codes;
  std::vector<float>& scales = scratch.scales;
  switch (matrix.type()) {
    case WeightType::kInt4:
    case WeightType::kInt5:
      PHSA_CHECK(UnpackCodes(type, data, cols, codes.data(), scales.data(), scales.data() + groups));
      matrix.SetRowCodes(row, codes.data(), scales.data(), scales.data() + groups);
      return;
    case WeightType::kInt4K:
    case WeightType::kInt5K: {
      uint16_t* const factors = scratch.factors.data();
      uint8_t* const small = scratch.small_scales.data();
      PHSA_CHECK(UnpackSuper(type, data, cols, codes.data(), factors, factors + supers, small, small + groups));
      matrix.SetRowCodes(row, codes.data(), {factors, factors + supers, small, small + groups});
      return;
    }
    case WeightType::kInt6: {
      auto* const small = reinterpret_cast<int8_t*>(scratch.small_scales.data());
      PHSA_CHECK(UnpackInt6(type, data, cols, codes.data(), scratch.factors.data(), small));
      matrix.SetRowInt6(row, codes.data(), scratch.factors.data(), small);
      return;
    }
    default: break;
  }
  auto* const signed_codes = reinterpret_cast<int8_t*>(codes.data());
  if (matrix.type() == WeightType::kInt8 && UnpackInt8(type, data, cols, signed_codes, scales.data())) {
    matrix.SetRowInt8(row, signed_codes, scales.data());
    return;
  }
  scratch.values.resize(static_cast<size_t>(cols));
  Dequantize(type, data, cols, scratch.values.data());
  matrix.SetRow(row, scratch.values.data());
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
        RowScratch scratch;
        std::vector<uint8_t> blocks;
        const int64_t end = std::min<int64_t>(work.place.rows, int64_t{task + 1} * kRows);
        for (int64_t row = int64_t{task} * kRows; row < end; ++row) {
          PackRow(work.place.tensor->type, RowBlocks(work.place, work.config, row, blocks), work.place.cols,
                  static_cast<int32_t>(row), work.matrix, scratch);
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
    case TensorType::kQ4_1: return WeightType::kInt4;
    case TensorType::kQ4_K: return WeightType::kInt4K;
    case TensorType::kQ5_0:
    case TensorType::kQ5_1: return FastProducts().odd_bits ? WeightType::kInt5 : WeightType::kInt8;
    case TensorType::kQ5_K: return FastProducts().odd_bits ? WeightType::kInt5K : WeightType::kInt8;
    case TensorType::kQ6_K: return FastProducts().odd_bits ? WeightType::kInt6 : WeightType::kInt8;
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

WeightsSize SizeOfWeights(const ModelSource& source, WeightsMode mode, bool experts_in_file) {
  Weights weights;
  WeightsSize size;
  std::set<std::string> types;
  for (const Place& place : Places(source, weights)) {
    if (place.vector != nullptr) {
      size.bytes += static_cast<uint64_t>(place.cols) * sizeof(float);
      continue;
    }
    const WeightType type = PackedType(place, mode);
    types.insert(WeightTypeName(type));
    if (MayStayInFile(place, mode)) {
      size.file_bytes += place.bytes();
      if (experts_in_file) continue;
    }
    size.bytes += Matrix::Bytes(type, static_cast<int32_t>(place.rows), static_cast<int32_t>(place.cols));
  }
  size.types = fmt::format("{}", fmt::join(types, ", "));
  if (experts_in_file && size.file_bytes > 0) {
    size.types += fmt::format("; experts stay in the file, {:.2f} GB", static_cast<double>(size.file_bytes) / 1e9);
  }
  if (const Adapter* const adapter = source.adapter()) {
    size.adapter = SizesOf(*adapter, weights.layers.size());
    size.bytes += AdapterBytes(*adapter, mode, weights.layers.size());
    size.types += fmt::format("; adapter {}", WeightTypeName(AdapterType(mode)));
  }
  return size;
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
