#include "eval/flops.h"

#include <algorithm>

#include "attention/plan.h"
#include "eval/query_blocks.h"

namespace phsa {
namespace {

// Tokens between the starts of two representatives, and tokens that one covers.
struct Rows {
  int32_t stride, span;
  int64_t Before(int64_t tokens) const { return tokens < span ? 0 : (tokens - span) / stride + 1; }
};

Rows RowsOf(const Settings& settings) {
  if (settings.policy == Policy::kInfllm2_64) return {kPoolStride, kPoolSize};
  return {settings.block_size, settings.block_size};
}

AttentionFlops LayerFlops(const Settings& settings, const ModelConfig& config, int32_t tokens) {
  const bool chooses = Chooses(settings.policy) && settings.top_k > 0;
  const Rows rows = RowsOf(settings);
  double read = 0, scored = 0;  // by one query head
  for (int32_t position = 0; position < tokens; ++position) {
    const QueryBlocks blocks = BlocksOf(settings, position);
    const int32_t candidates = std::max(0, blocks.local_begin - blocks.init_end);
    read += static_cast<double>(blocks.TokensRead(chooses ? std::min(settings.top_k, candidates) : 0));
    if (chooses && !blocks.reads_all)
      scored += static_cast<double>(rows.Before(int64_t{blocks.own} * blocks.block_size));
  }
  const double dim = config.head_dim, heads = config.num_q_heads;
  // Quest multiplies both bounds and adds the larger product.
  const double per_channel = settings.policy == Policy::kQuest ? 3 : 2;
  AttentionFlops flops;
  flops.attention = 4 * dim * heads * read;
  flops.scores = per_channel * dim * heads * scored;
  if (chooses) {
    flops.representatives = 2 * dim * config.num_kv_heads * rows.span * static_cast<double>(rows.Before(tokens));
  }
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
