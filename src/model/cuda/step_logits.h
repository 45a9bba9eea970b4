// The logits of a step on a GPU: they stay there, and what is asked of them comes to the host.
#ifndef PHSA_MODEL_CUDA_STEP_LOGITS_H_
#define PHSA_MODEL_CUDA_STEP_LOGITS_H_

#include <functional>
#include <span>
#include <vector>

#include "model/cuda/layer_runner.h"

namespace phsa::cuda {

class StepLogits {
 public:
  StepLogits(const ModelConfig& config, int32_t max_rows, LayerRunner& runner, StepTimer& timer, cudaStream_t stream);

  void Begin(const StepRows& rows);
  // How the step ends: with rows of the residual stream that were kept (all wanted ones, in order), or with the logits
  // of all its rows made (rows.wanted names them).
  void SetKept() { kept_ = true; }
  void SetDecoded() { decoded_ = true; }
  // As ModelBackend::Logits. `data` is on the device.
  void Use(const StepData& data, const std::function<void(size_t wanted, const LogitsRow& logits)>& use);

  // For a row of logits.
  float Logit(size_t wanted, int32_t token);
  std::span<const float> All(size_t wanted);

 private:
  // The logits of the wanted rows from piece · LogitRows on.
  void ComputePiece(size_t piece);
  const float* Row(size_t wanted);

  const ModelConfig& config_;
  const size_t piece_rows_;
  LayerRunner& runner_;
  StepTimer& timer_;
  const cudaStream_t stream_;
  PinnedBuffer host_top_;  // TopLogits [max_rows]
  const StepRows* rows_ = nullptr;
  StepData data_;
  bool kept_ = false, decoded_ = false;
  static constexpr size_t kNoPiece = ~size_t{0};
  size_t current_piece_ = kNoPiece;  // whose logits are on the device
  std::vector<float> all_;
};

}  // namespace phsa::cuda

#endif  // PHSA_MODEL_CUDA_STEP_LOGITS_H_
