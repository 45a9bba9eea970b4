// CUDA graphs of decode steps: one token a sequence, all read in the same way.
#ifndef PHSA_MODEL_CUDA_DECODE_GRAPHS_H_
#define PHSA_MODEL_CUDA_DECODE_GRAPHS_H_

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "model/backend.h"
#include "ops/cuda/runtime.h"

namespace phsa::cuda {

class GraphExec {
 public:
  GraphExec() = default;
  ~GraphExec() {
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
  }
  GraphExec(GraphExec&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)) {}
  GraphExec& operator=(GraphExec&& other) noexcept {
    std::swap(exec_, other.exec_);
    return *this;
  }
  cudaGraphExec_t get() const { return exec_; }
  cudaGraphExec_t* out() { return &exec_; }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// A decode step of up to `num_seqs` sequences of up to `max_kv_len` tokens. The first such step runs kernel by kernel,
// so that all of them are loaded; the second one is captured, and replayed from then on.
struct DecodeGraph {
  int32_t num_seqs = 0, max_kv_len = 0;
  LayerSettings settings;
  int64_t page_table_stride() const { return static_cast<int64_t>(PagesFor(static_cast<size_t>(max_kv_len))); }

  std::vector<Plan> plans;  // one for each of the settings that the layers have
  std::vector<size_t> plan_of_layer;
  DeviceBuffer lambdas;  // [plan][kv head]
  bool possible = true;  // for the decode kernels
  size_t workspace = 0;  // that they take
  bool has_run = false;
  GraphExec exec;
  uint64_t last_used = 0;

  // Runs what `enqueue` queues on the stream, in whichever of those three ways is its turn.
  void Run(cudaStream_t stream, const std::function<void()>& enqueue);
};

// Numbers of sequences that graphs are made for: 1, 2, 4, 8, then multiples of 8; and lengths.
int32_t SequencesBucket(int32_t count);
int32_t LengthBucket(int32_t length);

// Those that were used last.
class DecodeGraphs {
 public:
  explicit DecodeGraphs(cudaStream_t stream) : stream_(stream) {}
  void Clear() { graphs_.clear(); }
  // The graph for such a step, made by `make` where there is none; good until the next call.
  DecodeGraph& Find(int32_t num_seqs, int32_t max_kv_len, const LayerSettings& settings,
                    const std::function<void(DecodeGraph& graph)>& make);

 private:
  cudaStream_t stream_;
  std::vector<DecodeGraph> graphs_;
  uint64_t uses_ = 0;
};

}  // namespace phsa::cuda

#endif  // PHSA_MODEL_CUDA_DECODE_GRAPHS_H_
