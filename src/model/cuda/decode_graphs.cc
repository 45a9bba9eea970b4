#include "model/cuda/decode_graphs.h"

#include <algorithm>
#include <bit>

#include "model/cuda/step_timer.h"

namespace phsa::cuda {
namespace {

constexpr size_t kMaxGraphs = 32;
constexpr int32_t kShortestBucket = 1024;

void Capture(cudaStream_t stream, const std::function<void()>& enqueue, GraphExec& exec) {
  cudaGraph_t captured = nullptr;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), kStep);
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(stream, &captured);
    if (captured != nullptr) cudaGraphDestroy(captured);
    throw;
  }
  Check(cudaStreamEndCapture(stream, &captured), kStep);
  const cudaError_t error = cudaGraphInstantiate(exec.out(), captured, 0);
  cudaGraphDestroy(captured);
  Check(error, kStep);
}

}  // namespace

void DecodeGraph::Run(cudaStream_t stream, const std::function<void()>& enqueue) {
  if (!has_run) {
    enqueue();
    has_run = true;
    return;
  }
  if (exec.get() == nullptr) Capture(stream, enqueue, exec);
  Check(cudaGraphLaunch(exec.get(), stream), kStep);
}

int32_t SequencesBucket(int32_t count) {
  if (count <= 8) return static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(count)));
  return (count + 7) / 8 * 8;
}

int32_t LengthBucket(int32_t length) {
  return std::max(kShortestBucket, static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(length))));
}

DecodeGraph& DecodeGraphs::Find(int32_t num_seqs, int32_t max_kv_len, const LayerSettings& settings,
                                const std::function<void(DecodeGraph& graph)>& make) {
  ++uses_;
  for (DecodeGraph& graph : graphs_) {
    if (graph.num_seqs == num_seqs && graph.max_kv_len == max_kv_len && graph.settings == settings) {
      graph.last_used = uses_;
      return graph;
    }
  }
  DecodeGraph made;
  made.num_seqs = num_seqs;
  made.max_kv_len = max_kv_len;
  made.settings = settings;
  made.last_used = uses_;
  make(made);
  if (graphs_.size() < kMaxGraphs) return graphs_.emplace_back(std::move(made));
  const auto oldest = std::ranges::min_element(graphs_, {}, &DecodeGraph::last_used);
  Check(cudaStreamSynchronize(stream_), kStep);
  *oldest = std::move(made);
  return *oldest;
}

}  // namespace phsa::cuda
