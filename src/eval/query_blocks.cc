#include "eval/query_blocks.h"

#include <algorithm>

namespace phsa {
namespace {

int32_t BlocksFor(int32_t tokens, int32_t block) { return (tokens + block - 1) / block; }

int32_t TopK(const Settings& settings) { return Chooses(settings.policy) ? settings.top_k : 0; }

}  // namespace

int64_t QueryBlocks::TokensRead(int64_t chosen) const {
  const int64_t before = int64_t{position} + 1;
  if (dense || local_begin > own) return before;
  return int64_t{init_end} * block_size + before - int64_t{local_begin} * block_size + chosen * block_size;
}

QueryBlocks BlocksOf(const Settings& settings, int32_t position) {
  QueryBlocks out;
  out.position = position;
  out.block_size = settings.block_size;
  out.own = position / settings.block_size;
  out.init_end = std::min(BlocksFor(settings.init_tokens, settings.block_size), out.own + 1);
  out.local_begin = std::max(out.init_end, out.own - BlocksFor(settings.local_tokens, settings.block_size));
  out.dense = settings.policy == Policy::kDense || position < settings.dense_below;
  out.reads_all = out.dense || out.local_begin - out.init_end <= TopK(settings);
  return out;
}

double BudgetSparsity(const LayerSettings& settings, int32_t num_layers, int32_t tokens) {
  double sum = 0;
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    const Settings& s = settings.ForLayer(layer);
    if (s.policy == Policy::kDense || tokens <= s.dense_below) continue;
    const int64_t blocks =
        int64_t{BlocksFor(s.init_tokens, s.block_size)} + BlocksFor(s.local_tokens, s.block_size) + TopK(s);
    sum += std::max(0.0, 1 - static_cast<double>(blocks * s.block_size) / tokens);
  }
  return num_layers > 0 ? sum / num_layers : 0;
}

}  // namespace phsa
