#include "eval/flops.h"

#include <algorithm>

#include "attention/policies.h"

namespace phsa {
namespace {

AttentionFlops LayerFlops(const Settings& settings, const ModelConfig& config, int32_t tokens) {
  const BlockRules rules = RulesOf(settings);
  const RepRules reps = RepRulesOf(settings);
  double read = 0, scored = 0;  // by one query head
  for (int32_t position = 0; position < tokens; ++position) {
    const int32_t b = position / settings.block_size;
    read += static_cast<double>(rules.TokensRead(position, rules.Chosen(b), settings.block_size));
    if (rules.top_k > 0 && !rules.ReadsAll(b)) scored += reps.NumRepRows(b * settings.block_size);
  }
  const double dim = config.head_dim, heads = config.num_q_heads;
  // Where blocks have bounds, both are multiplied and the larger product is added.
  const double per_channel = RowOf(settings.policy).representation == Representation::kBounds ? 3 : 2;
  AttentionFlops flops;
  flops.attention = 4 * dim * heads * read;
  flops.scores = per_channel * dim * heads * scored;
  if (rules.top_k > 0) flops.representatives = 2 * dim * config.num_kv_heads * reps.rep_span * reps.NumRepRows(tokens);
  return flops;
}

// Of a layer whose queries attend to the last `window` tokens.
AttentionFlops WindowFlops(int32_t window, const ModelConfig& config, int32_t tokens) {
  const double within = std::min(window, tokens), beyond = tokens - within;
  AttentionFlops flops;
  flops.attention = 4.0 * config.head_dim * config.num_q_heads * (within * (within + 1) / 2 + beyond * window);
  return flops;
}

}  // namespace

AttentionFlops CountAttentionFlops(const LayerSettings& attention, const ModelConfig& config, int32_t tokens) {
  AttentionFlops sum;
  const Settings* last = nullptr;
  AttentionFlops flops;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (const int32_t window = config.Layer(layer).window; window > 0) {
      sum += WindowFlops(window, config, tokens);
      continue;
    }
    const Settings& settings = attention.ForLayer(layer);
    // Neighbours are mostly alike.
    if (last == nullptr || settings != *last) flops = LayerFlops(settings, config, tokens);
    last = &settings;
    sum += flops;
  }
  return sum;
}

}  // namespace phsa
