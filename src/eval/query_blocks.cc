#include "eval/query_blocks.h"

#include <algorithm>

namespace phsa {

double BudgetSparsity(const LayerSettings& settings, int32_t num_layers, int32_t tokens) {
  double sum = 0;
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    const Settings& s = settings.ForLayer(layer);
    if (IsDense(s) || tokens <= s.dense_below) continue;
    const BlockRules rules = RulesOf(s);
    const int64_t blocks = int64_t{rules.init_blocks} + rules.local_blocks + rules.top_k;
    sum += std::max(0.0, 1 - static_cast<double>(blocks * s.block_size) / tokens);
  }
  return num_layers > 0 ? sum / num_layers : 0;
}

}  // namespace phsa
