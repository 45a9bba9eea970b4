#include "model/cuda/device_weights.h"

#include <algorithm>

#include "base/dtype.h"
#include "base/errors.h"

namespace phsa::cuda {
namespace {

constexpr size_t kStaging = size_t{32} << 20;  // bytes on their way to the device; there are two such pieces
constexpr size_t kRowsOfTask = 16;

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
  // Of what was written into the last Next().
  void Send(void* to, const void* from, size_t bytes) {
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "the weights");
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

void SendMatrix(const ModelTensor& tensor, const ModelSource& source, const PackedRows& place, ThreadPool& threads,
                Staging& staging) {
  const AdapterDelta delta = ReadDelta(source, tensor.name);
  const auto rows = static_cast<size_t>(tensor.rows), cols = static_cast<size_t>(tensor.cols);
  struct Job {
    const ModelTensor& tensor;
    const ModelConfig& config;
    const AdapterDelta& delta;
    size_t first, count;
    PackedRows to;
  } job{tensor, source.config(), delta, 0, 0, {}};
  const size_t most = kStaging / PackedRowBytes(place.type, tensor.cols);
  for (; job.first < rows; job.first += job.count) {
    job.count = std::min(most, rows - job.first);
    // The factors come first: they want the larger alignment.
    uint8_t* const memory = staging.Next();
    const size_t groups = place.type == WeightType::kInt8 ? cols / kWeightGroup : 0;
    job.to.type = place.type;
    job.to.data = memory;
    if (groups > 0) {
      job.to.factors = reinterpret_cast<float*>(memory);
      job.to.scales = reinterpret_cast<uint16_t*>(job.to.factors + job.count);
      job.to.data = reinterpret_cast<uint8_t*>(job.to.scales + job.count * groups);
    }
    threads.Run(
        static_cast<int32_t>((job.count + kRowsOfTask - 1) / kRowsOfTask),
        [](void* arg, int32_t task, int32_t) {
          const Job& work = *static_cast<const Job*>(arg);
          const size_t begin = static_cast<size_t>(task) * kRowsOfTask, end = std::min(begin + kRowsOfTask, work.count);
          for (size_t i = begin; i < end; ++i) {
            PackRow(work.tensor, work.config, work.delta, static_cast<int64_t>(work.first + i), work.to,
                    static_cast<int64_t>(i));
          }
        },
        &job);
    const size_t row_bytes = groups > 0 ? cols : PackedRowBytes(place.type, tensor.cols);
    staging.Send(place.data + job.first * row_bytes, job.to.data, job.count * row_bytes);
    if (groups > 0) {
      staging.Send(place.scales + job.first * groups, job.to.scales, job.count * groups * sizeof(uint16_t));
      staging.Send(place.factors + job.first, job.to.factors, job.count * sizeof(float));
    }
  }
}

void SendVector(const ModelTensor& tensor, const ModelConfig& config, const PackedRows& place, Staging& staging) {
  std::vector<float> ours = UsedVector(tensor, config);
  for (float& value : ours) value *= place.scale;
  uint8_t* const memory = staging.Next();
  if (place.type == WeightType::kF32) {
    std::ranges::copy(ours, reinterpret_cast<float*>(memory));
  } else {
    std::ranges::transform(ours, reinterpret_cast<uint16_t*>(memory), Bf16FromF32);
  }
  staging.Send(place.data, memory, PackedRowBytes(place.type, tensor.cols));
}

}  // namespace

std::optional<DeviceWeights> LoadDeviceWeights(const ModelSource& source, WeightsMode mode, ThreadPool& threads,
                                               cudaStream_t stream, const LoadProgress& progress) {
  DeviceWeights weights;
  weights.memory = DeviceBuffer(WeightLayout(source, mode, nullptr).bytes, "the weights");
  WeightLayout layout(source, mode, weights.memory.data());
  // Parts of a bias that the model does not have are zero.
  Check(cudaMemsetAsync(weights.memory.data(), 0, weights.memory.size(), stream), "the weights");
  const std::vector<ModelTensor> tensors = ModelTensors(source);
  uint64_t total = 0, done = 0;
  for (const ModelTensor& tensor : tensors) total += tensor.tensor->bytes;
  Staging staging(stream);
  for (const ModelTensor& tensor : tensors) {
    const PackedRows& place = layout.places.at(tensor.name);
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
  weights.largest_int8 = layout.largest_int8;
  return weights;
}

}  // namespace phsa::cuda
