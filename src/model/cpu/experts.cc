#include "model/cpu/experts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace phsa {

std::vector<ExpertRows> RouteToExperts(const ModelConfig& config, const float* logits, int32_t m) {
  const auto count = static_cast<size_t>(config.num_experts), taken = static_cast<size_t>(config.experts_per_token);
  std::vector<ExpertRows> out(count);
  std::vector<int32_t> order(count);
  for (int32_t row = 0; row < m; ++row) {
    const float* const of_row = logits + static_cast<size_t>(row) * count;
    std::iota(order.begin(), order.end(), 0);
    // What is no number, from damaged weights, is the least likely.
    const auto value = [&](int32_t expert) {
      const float logit = of_row[expert];
      return std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit;
    };
    std::sort(order.begin(), order.end(),
              [&](int32_t a, int32_t b) { return value(a) != value(b) ? value(a) > value(b) : a < b; });
    const float largest = of_row[order[0]];
    float sum = 0;
    for (size_t i = 0; i < (config.normalized_experts ? taken : count); ++i)
      sum += std::exp(of_row[order[i]] - largest);
    for (size_t i = 0; i < taken; ++i) {
      ExpertRows& expert = out[static_cast<size_t>(order[i])];
      expert.rows.push_back(row);
      expert.weights.push_back(std::exp(of_row[order[i]] - largest) / sum);
    }
  }
  return out;
}

}  // namespace phsa
