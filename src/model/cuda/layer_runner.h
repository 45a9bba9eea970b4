// What the layers of a decoder compute on a GPU beside the attention: products, norms, RoPE, MLPs and experts. The
// model's description says which of them a layer has; nothing here knows a family.
#ifndef PHSA_MODEL_CUDA_LAYER_RUNNER_H_
#define PHSA_MODEL_CUDA_LAYER_RUNNER_H_

#include "model/cuda/activations.h"
#include "model/cuda/device_weights.h"
#include "model/cuda/step_data.h"
#include "model/cuda/step_timer.h"
#include "model/rope.h"
#include "ops/cuda/linear.h"

namespace phsa::cuda {

class LayerRunner {
 public:
  LayerRunner(const ModelConfig& config, int32_t kv_dtype, int32_t max_rows, StepTimer& timer, cudaStream_t stream);
  // Bytes of device memory that it takes beside the weights.
  static size_t Bytes(const ModelConfig& config, int32_t max_rows, size_t largest_int8);
  void Load(DeviceWeights weights);

  const Activations& at() const { return at_; }
  const DeviceWeights& weights() const { return weights_; }

  // All of the first m rows of the activations; `data` is on the device. In a CUDA graph too: nothing is read there of
  // the step but addresses.
  // The residual stream, its first norm, the angles of RoPE, and flags into the cache's pages.
  void Embed(const StepData& data, const KvCache& cache, int32_t m);
  // Queries, and keys and values in the cache.
  void ProjectHeads(int32_t layer, const StepData& data, const KvCache& cache, int32_t m);
  // From what attention gave into the residual stream: at().residual, or rows that are kept of it.
  void Finish(int32_t layer, int32_t m, uint16_t* attended, float* residual);
  // at().logits of the first m rows of at().normed, and what FindTop finds in them.
  void ComputeLogits(int32_t m, TopLogits* top, const int32_t* asked);
  // The norm before them.
  void FinalNorm(int32_t m, float* residual);
  void FinalNormOfRows(int32_t m, const int32_t* rows);

 private:
  using Result = LinearParams::Result;
  const DeviceLayer& Weights(int32_t layer) const { return weights_.layers[static_cast<size_t>(layer)]; }
  void Multiply(int32_t m, const void* x, int32_t k, const MatrixView& weights, const void* bias, int32_t n, void* y,
                Result result, float scale = 1);
  // Of rows of the residual stream, which are normed first, where the result is bf16.
  void MultiplyFew(int32_t m, const void* x, int32_t k, const float* norm, const MatrixView& weights, const void* bias,
                   int32_t n, void* y, FewRowsParams::Result result, float scale = 1);
  // Whether the products of so many rows have kernels of their own; the norms are in them.
  bool AreFew(int32_t m) const;
  // A half's last product: added to the residual stream, or normed before.
  void ProjectBack(int32_t m, const uint16_t* x, int32_t k, const MatrixView& weights, const float* bias,
                   const float* post_norm, float* residual);
  void RunMlp(const DeviceLayer& w, int32_t m, float* residual);
  void RunExperts(const DeviceLayer& w, int32_t m, float* residual);
  NormParams Norm(int32_t m, float* x, const float* weight) const {
    return {m, config_.hidden, x, weight, config_.rms_eps, at_.normed};
  }

  const ModelConfig& config_;
  const int32_t kv_dtype_, max_rows_;
  const LayerRopes ropes_;
  const GateParams gate_;
  StepTimer& timer_;
  const cudaStream_t stream_;
  Linear linear_;
  DeviceWeights weights_;
  DeviceBuffer activation_memory_;
  DeviceBuffer dequantized_;  // bf16: the int8 matrix that is being multiplied with many rows
  Activations at_;
};

}  // namespace phsa::cuda

#endif  // PHSA_MODEL_CUDA_LAYER_RUNNER_H_
