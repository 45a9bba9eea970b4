#include "model/cuda/device_weights.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "base/dtype.h"
#include "base/errors.h"

namespace phsa::cuda {
namespace {

constexpr size_t kAlignment = 256;             // cuBLASLt's products want it
constexpr size_t kStaging = size_t{32} << 20;  // bytes on their way to the device; there are two such pieces
constexpr size_t kRowsOfTask = 16;

// Where a tensor goes.
struct Place {
  uint8_t* data = nullptr;
  bool f32 = false;  // else bf16
};

// The memory of all weights: where each tensor of the model has its place.
class Layout {
 public:
  // `memory`: null where nothing but the size is wanted.
  Layout(const ModelSource& source, uint8_t* memory);

  std::map<std::string, Place> places;
  std::vector<DeviceLayer> layers;
  size_t bytes = 0;

 private:
  // Memory for these tensors, `sizes` elements each, one behind the other; null where the model has none of them.
  uint8_t* Take(const std::vector<std::string>& names, const std::vector<int64_t>& sizes, bool f32);

  uint8_t* memory_;
  std::set<std::string> names_;  // of the tensors that the model has
};

uint8_t* Layout::Take(const std::vector<std::string>& names, const std::vector<int64_t>& sizes, bool f32) {
  const auto exists = [&](const std::string& name) { return names_.contains(name); };
  if (std::none_of(names.begin(), names.end(), exists)) return nullptr;
  const auto address = [&](size_t offset) { return memory_ != nullptr ? memory_ + offset : nullptr; };
  uint8_t* const begin = address(bytes);
  for (size_t i = 0; i < names.size(); ++i) {
    if (exists(names[i])) places[names[i]] = {address(bytes), f32};
    bytes += static_cast<size_t>(sizes[i]) * (f32 ? sizeof(float) : sizeof(uint16_t));
  }
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return begin;
}

Layout::Layout(const ModelSource& source, uint8_t* memory) : memory_(memory) {
  const ModelConfig& config = source.config();
  for (const ModelTensor& tensor : ModelTensors(source)) names_.insert(tensor.name);
  const int64_t hidden = config.hidden, intermediate = config.intermediate, vocab = config.vocab_size;
  const int64_t q = int64_t{config.num_q_heads} * config.head_dim, kv = int64_t{config.num_kv_heads} * config.head_dim;
  const auto bf16 = [&](const std::vector<std::string>& names, const std::vector<int64_t>& sizes) {
    return Take(names, sizes, false);
  };
  const auto f32 = [&](const std::string& name, int64_t size) {
    return reinterpret_cast<const float*>(Take({name}, {size}, true));
  };
  bf16({"model.embed_tokens.weight"}, {vocab * hidden});
  bf16({"lm_head.weight"}, {vocab * hidden});
  f32("model.norm.weight", hidden);
  for (int32_t i = 0; i < config.num_layers; ++i) {
    const std::string at = fmt::format("model.layers.{}.", i);
    const std::string q_proj = at + "self_attn.q_proj.", k_proj = at + "self_attn.k_proj.",
                      v_proj = at + "self_attn.v_proj.", o_proj = at + "self_attn.o_proj.",
                      gate = at + "mlp.gate_proj.", up = at + "mlp.up_proj.", down = at + "mlp.down_proj.";
    DeviceLayer layer;
    layer.attention_norm = f32(at + "input_layernorm.weight", hidden);
    layer.qkv = bf16({q_proj + "weight", k_proj + "weight", v_proj + "weight"}, {q * hidden, kv * hidden, kv * hidden});
    layer.qkv_bias = bf16({q_proj + "bias", k_proj + "bias", v_proj + "bias"}, {q, kv, kv});
    layer.q_norm = f32(at + "self_attn.q_norm.weight", config.head_dim);
    layer.k_norm = f32(at + "self_attn.k_norm.weight", config.head_dim);
    layer.o = bf16({o_proj + "weight"}, {hidden * q});
    layer.o_bias = f32(o_proj + "bias", hidden);
    layer.mlp_norm = f32(at + "post_attention_layernorm.weight", hidden);
    layer.gate_up = bf16({gate + "weight", up + "weight"}, {intermediate * hidden, intermediate * hidden});
    layer.gate_up_bias = bf16({gate + "bias", up + "bias"}, {intermediate, intermediate});
    layer.down = bf16({down + "weight"}, {hidden * intermediate});
    layer.down_bias = f32(down + "bias", hidden);
    layers.push_back(layer);
  }
  for (const std::string& name : names_) PHSA_CHECK(places.contains(name));
}

// Pieces of pinned memory on their way to the device, in turn.
class Staging {
 public:
  explicit Staging(cudaStream_t stream) : stream_(stream) {
    for (Piece& piece : pieces_) piece.memory = PinnedBuffer(kStaging);
  }
  // Memory that is free to be written.
  uint8_t* Next() {
    current_ ^= 1;
    Check(cudaEventSynchronize(pieces_[current_].sent.get()), "the weights");
    return pieces_[current_].memory.data();
  }
  // What was written into the last Next().
  void Send(void* to, size_t bytes) {
    Check(cudaMemcpyAsync(to, pieces_[current_].memory.data(), bytes, cudaMemcpyHostToDevice, stream_), "the weights");
    Check(cudaEventRecord(pieces_[current_].sent.get(), stream_), "the weights");
  }

 private:
  struct Piece {
    PinnedBuffer memory;
    Event sent;
  };
  cudaStream_t stream_;
  Piece pieces_[2];
  size_t current_ = 0;
};

void Store(const float* from, int64_t count, bool f32, void* to) {
  if (f32) {
    std::copy_n(from, count, static_cast<float*>(to));
  } else {
    std::transform(from, from + count, static_cast<uint16_t*>(to), [](float value) { return Bf16FromF32(value); });
  }
}

// What an adapter adds to a matrix.
struct Delta {
  std::vector<float> a, b;  // [rank][cols], [rows][rank]
  size_t rank = 0;
  float scale = 0;
};

Delta ReadDelta(const ModelSource& source, const std::string& name) {
  const LowRankTensors* const found = source.adapter() != nullptr ? source.adapter()->Find(name) : nullptr;
  if (found == nullptr) return {};
  return {ReadLowRank(found->a), ReadLowRank(found->b), static_cast<size_t>(found->rank()), found->scale};
}

void SendMatrix(const ModelTensor& tensor, const ModelSource& source, const Place& place, ThreadPool& threads,
                Staging& staging) {
  const Delta delta = ReadDelta(source, tensor.name);
  const auto cols = static_cast<size_t>(tensor.cols);
  const size_t row_bytes = cols * sizeof(uint16_t);
  struct Job {
    const ModelTensor& tensor;
    const ModelConfig& config;
    const Delta& delta;
    size_t first, count;
    uint8_t* to;
  } job{tensor, source.config(), delta, 0, 0, nullptr};
  for (; job.first < static_cast<size_t>(tensor.rows); job.first += job.count) {
    job.count = std::min(kStaging / row_bytes, static_cast<size_t>(tensor.rows) - job.first);
    job.to = staging.Next();
    threads.Run(
        static_cast<int32_t>((job.count + kRowsOfTask - 1) / kRowsOfTask),
        [](void* arg, int32_t task, int32_t) {
          const Job& work = *static_cast<const Job*>(arg);
          const Tensor& file = *work.tensor.tensor;
          const auto width = static_cast<size_t>(work.tensor.cols);
          const size_t file_row_bytes =
              TensorTypeBlockBytes(file.type) * (width / static_cast<size_t>(TensorTypeBlockElements(file.type)));
          std::vector<float> values(width);
          const size_t begin = static_cast<size_t>(task) * kRowsOfTask, end = std::min(begin + kRowsOfTask, work.count);
          for (size_t i = begin; i < end; ++i) {
            const size_t row = work.first + i;
            const auto file_row = static_cast<size_t>(FileRow(work.tensor, work.config, static_cast<int64_t>(row)));
            Dequantize(file.type, file.data + file_row * file_row_bytes, work.tensor.cols, values.data());
            for (size_t j = 0; j < work.delta.rank; ++j) {
              const float factor = work.delta.scale * work.delta.b[row * work.delta.rank + j];
              const float* const a = work.delta.a.data() + j * width;
              for (size_t column = 0; column < width; ++column) values[column] += factor * a[column];
            }
            Store(values.data(), work.tensor.cols, false, work.to + i * width * sizeof(uint16_t));
          }
        },
        &job);
    staging.Send(place.data + job.first * row_bytes, job.count * row_bytes);
  }
}

void SendVector(const ModelTensor& tensor, const ModelConfig& config, const Place& place, Staging& staging) {
  std::vector<float> file(static_cast<size_t>(tensor.cols)), ours(file.size());
  Dequantize(tensor.tensor->type, tensor.tensor->data, tensor.cols, file.data());
  for (int64_t i = 0; i < tensor.cols; ++i) {
    ours[static_cast<size_t>(i)] = file[static_cast<size_t>(FileRow(tensor, config, i))];
  }
  Store(ours.data(), tensor.cols, place.f32, staging.Next());
  staging.Send(place.data, ours.size() * (place.f32 ? sizeof(float) : sizeof(uint16_t)));
}

}  // namespace

uint64_t DeviceWeightBytes(const ModelSource& source) { return Layout(source, nullptr).bytes; }

std::optional<DeviceWeights> LoadDeviceWeights(const ModelSource& source, ThreadPool& threads, cudaStream_t stream,
                                               const LoadProgress& progress) {
  DeviceWeights weights;
  weights.memory = DeviceBuffer(DeviceWeightBytes(source), "the weights");
  Layout layout(source, weights.memory.data());
  // Parts of a bias that the model does not have are zero.
  Check(cudaMemsetAsync(weights.memory.data(), 0, weights.memory.size(), stream), "the weights");
  const std::vector<ModelTensor> tensors = ModelTensors(source);
  uint64_t total = 0, done = 0;
  for (const ModelTensor& tensor : tensors) total += tensor.tensor->bytes;
  Staging staging(stream);
  for (const ModelTensor& tensor : tensors) {
    const Place& place = layout.places.at(tensor.name);
    if (tensor.rows > 0) {
      SendMatrix(tensor, source, place, threads, staging);
    } else {
      SendVector(tensor, source.config(), place, staging);
    }
    source.Release(*tensor.tensor);
    done += tensor.tensor->bytes;
    if (!progress(static_cast<double>(done) / static_cast<double>(total))) return std::nullopt;
  }
  if (source.adapter() != nullptr) source.adapter()->Release();
  Check(cudaStreamSynchronize(stream), "the weights");
  weights.embedding = layout.places.at("model.embed_tokens.weight").data;
  weights.logits = source.config().tied_embeddings ? weights.embedding : layout.places.at("lm_head.weight").data;
  weights.final_norm = reinterpret_cast<const float*>(layout.places.at("model.norm.weight").data);
  weights.layers = std::move(layout.layers);
  return weights;
}

}  // namespace phsa::cuda
