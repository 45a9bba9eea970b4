#include "model/cuda/activations.h"

#include "io/architecture.h"
#include "model/rope.h"
#include "ops/cuda/experts.h"

namespace phsa::cuda {

Activations::Activations(const ModelConfig& config, int32_t max_rows, uint8_t* memory) {
  Arena arena(memory);
  const LayerNames& names = ArchitectureOf(config).names;
  const bool post_norms = !names.attention_post_norm.hugging_face.empty() || !names.mlp_post_norm.hugging_face.empty();
  const auto m = static_cast<size_t>(max_rows), logit_rows = static_cast<size_t>(LogitRows(max_rows)),
             hidden = static_cast<size_t>(config.hidden), head_dim = static_cast<size_t>(config.head_dim),
             intermediate = static_cast<size_t>(config.intermediate), ropes = MakeLayerRopes(config).all.size();
  residual = arena.Take<float>(m * hidden);
  normed = arena.Take<uint16_t>(m * hidden);
  qkv = arena.Take<uint16_t>(m * static_cast<size_t>(QkvWidth(config)));
  queries = arena.Take<uint16_t>(m * static_cast<size_t>(QWidth(config)));
  gate_up = arena.Take<uint16_t>(m * 2 * intermediate);
  activated = arena.Take<uint16_t>(m * intermediate);
  projected = arena.Take<float>(post_norms ? m * hidden : 0);
  cos_sin = arena.Take<float>(ropes * m * head_dim);
  frequencies = arena.Take<double>(ropes * (head_dim / 2));
  kept = arena.Take<float>(logit_rows * hidden);
  logits = arena.Take<float>(logit_rows * static_cast<size_t>(LogitsStride(config)));
  top = arena.Take<TopLogits>(m);
  top_workspace = arena.Take<uint8_t>(TopWorkspaceSize(LogitRows(max_rows), config.vocab_size));
  if (config.num_experts > 0) {
    const auto rows = static_cast<size_t>(RoutedRows(config, max_rows)),
               experts = static_cast<size_t>(config.num_experts), width = static_cast<size_t>(config.expert_width);
    const size_t pairs = rows * static_cast<size_t>(config.experts_per_token);
    routed.logits = arena.Take<float>(rows * experts);
    routed.experts = arena.Take<int32_t>(pairs);
    routed.order = arena.Take<int32_t>(pairs);
    routed.weights = arena.Take<float>(pairs);
    routed.starts = arena.Take<int32_t>(experts + 1);
    routed.tiles =
        arena.Take<int32_t>(2 * static_cast<size_t>(MostTiles(static_cast<int32_t>(pairs), config.num_experts)));
    routed.gate_up = arena.Take<uint16_t>(pairs * 2 * width);
    routed.activated = arena.Take<uint16_t>(pairs * width);
    routed.out = arena.Take<float>(pairs * hidden);
  }
  size = arena.size();
}

}  // namespace phsa::cuda
