#include <algorithm>

#include "attention/cuda/limits.h"
#include "base/dtype.h"
#include "base/errors.h"
#include "io/architecture.h"
#include "model/cuda/cuda_backend.h"
#include "ops/cuda/limits.h"

namespace phsa::cuda {

std::string UnsupportedModel(const ModelConfig& config, const BackendOptions& options) {
  if (std::ranges::find(kHeadDims, config.head_dim) == std::end(kHeadDims)) {
    return fmt::format("heads of {} elements; the GPU takes {}", config.head_dim, fmt::join(kHeadDims, ", "));
  }
  if (config.num_q_heads / config.num_kv_heads > kMaxGroup) {
    return fmt::format("{} query heads a KV head; the GPU takes up to {}", config.num_q_heads / config.num_kv_heads,
                       kMaxGroup);
  }
  if (config.hidden % 8 != 0 || config.intermediate % 8 != 0 || config.expert_width % 8 != 0) {
    const int32_t odd = config.intermediate % 8 != 0 ? config.intermediate : config.expert_width;
    return fmt::format("rows of {} and {} elements; the GPU takes multiples of 8", config.hidden, odd);
  }
  if (config.num_experts > kMaxExperts || config.experts_per_token > kMaxTakenExperts ||
      (config.num_experts > 0 && config.hidden > kMaxRoutedDim)) {
    return fmt::format("{} of {} experts for rows of {} elements; the GPU takes up to {}, {} and {}",
                       config.experts_per_token, config.num_experts, config.hidden, kMaxTakenExperts, kMaxExperts,
                       kMaxRoutedDim);
  }
  if (config.vocab_size > kMaxTopVocab) {
    return fmt::format("a vocabulary of {}; the GPU takes up to {}", config.vocab_size, kMaxTopVocab);
  }
  if (options.weights == WeightsMode::kF32) {
    return fmt::format("{}; the GPU takes auto, bf16 and int8", Option{"weights", Name(options.weights)});
  }
  if (options.weights == WeightsMode::kInt8 && config.num_experts > 0) {
    return fmt::format("{} with experts; the GPU takes {}", Option{"weights", "int8"}, Option{"weights", "bf16"});
  }
  const int32_t q_width = config.num_q_heads * config.head_dim;
  if (options.weights == WeightsMode::kInt8 &&
      (config.hidden % kWeightGroup != 0 || config.intermediate % kWeightGroup != 0 || q_width % kWeightGroup != 0)) {
    return fmt::format("{} with rows of {}, {} and {} elements; the GPU takes multiples of {}, or {}",
                       Option{"weights", "int8"}, config.hidden, q_width, config.intermediate, kWeightGroup,
                       Option{"weights", "bf16"});
  }
  if (options.kv_dtype != PHSA_BF16 && options.kv_dtype != PHSA_F16) {
    return fmt::format("{}; the GPU takes bf16 and f16", Option{"kv_type", DtypeName(options.kv_dtype)});
  }
  return "";
}

}  // namespace phsa::cuda
