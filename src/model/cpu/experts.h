// Which tokens of a step go to which experts of a layer.
#ifndef PHSA_MODEL_CPU_EXPERTS_H_
#define PHSA_MODEL_CPU_EXPERTS_H_

#include <cstdint>
#include <vector>

#include "io/model_config.h"

namespace phsa {

// The rows of one expert, ascending, and what its result for each counts.
struct ExpertRows {
  std::vector<int32_t> rows;
  std::vector<float> weights;
};

// A token takes the experts_per_token experts of the largest softmax values of its router's logits ([m][num_experts]),
// ties to the lower one. Returns [num_experts].
std::vector<ExpertRows> RouteToExperts(const ModelConfig& config, const float* logits, int32_t m);

}  // namespace phsa

#endif  // PHSA_MODEL_CPU_EXPERTS_H_
