#include "model/cuda/activations.h"

#include "base/carver.h"
#include "io/architecture.h"
#include "model/rope.h"
#include "ops/cuda/experts.h"

namespace phsa::cuda {

Activations::Activations(const ModelConfig& config, int32_t max_rows, uint8_t* memory) {
  Carver carver(memory, kDeviceAlignment);
  const LayerNames& names = ArchitectureOf(config).names;
  const bool post_norms = !names.attention_post_norm.hugging_face.empty() || !names.mlp_post_norm.hugging_face.empty();
  const auto m = static_cast<size_t>(max_rows), logit_rows = static_cast<size_t>(LogitRows(max_rows)),
             hidden = static_cast<size_t>(config.hidden), head_dim = static_cast<size_t>(config.head_dim),
             intermediate = static_cast<size_t>(config.intermediate), ropes = MakeLayerRopes(config).all.size();
  residual = carver.Take<float>(m * hidden);
  normed = carver.Take<uint16_t>(m * hidden);
  qkv = carver.Take<uint16_t>(m * static_cast<size_t>(QkvWidth(config)));
  queries = carver.Take<uint16_t>(m * static_cast<size_t>(QWidth(config)));
  gate_up = carver.Take<uint16_t>(m * 2 * intermediate);
  activated = carver.Take<uint16_t>(m * intermediate);
  projected = carver.Take<float>(post_norms ? m * hidden : 0);
  cos_sin = carver.Take<float>(ropes * m * head_dim);
  frequencies = carver.Take<double>(ropes * (head_dim / 2));
  kept = carver.Take<float>(logit_rows * hidden);
  logits = carver.Take<float>(logit_rows * static_cast<size_t>(LogitsStride(config)));
  top = carver.Take<TopLogits>(m);
  top_workspace = carver.Take<uint8_t>(TopWorkspaceSize(LogitRows(max_rows), config.vocab_size));
  if (config.num_experts > 0) {
    const auto rows = static_cast<size_t>(RoutedRows(config, max_rows)),
               experts = static_cast<size_t>(config.num_experts), width = static_cast<size_t>(config.expert_width);
    const size_t pairs = rows * static_cast<size_t>(config.experts_per_token);
    routed.logits = carver.Take<float>(rows * experts);
    routed.experts = carver.Take<int32_t>(pairs);
    routed.order = carver.Take<int32_t>(pairs);
    routed.weights = carver.Take<float>(pairs);
    routed.starts = carver.Take<int32_t>(experts + 1);
    routed.tiles =
        carver.Take<int32_t>(2 * static_cast<size_t>(MostTiles(static_cast<int32_t>(pairs), config.num_experts)));
    routed.gate_up = carver.Take<uint16_t>(pairs * 2 * width);
    routed.activated = carver.Take<uint16_t>(pairs * width);
    routed.out = carver.Take<float>(pairs * hidden);
  }
  size = carver.size();
}

}  // namespace phsa::cuda
