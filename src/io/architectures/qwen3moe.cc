// Qwen3 with experts: each token takes some of many small MLPs, as a router weighs them.
#include "io/architecture.h"
#include "io/source.h"

namespace phsa {
namespace {

void Configure(const ConfigKeys& keys, ModelConfig* config) {
  ReadQwenWindows(keys, config);
  ReadExperts(keys, "moe_intermediate_size", config);
  config->normalized_experts = keys.Bool("norm_topk_prob", "").value_or(keys.gguf());
  const int32_t step = keys.Int("decoder_sparse_step", "", 0, kMaxLayers).value_or(1);
  const std::vector<int32_t> plain = keys.Ints("mlp_only_layers", "", 0, kMaxLayers).value_or(std::vector<int32_t>());
  for (int32_t i = 0; i < config->num_layers; ++i) {
    const bool listed = std::find(plain.begin(), plain.end(), i) != plain.end();
    config->layers[static_cast<size_t>(i)].experts = !listed && step > 0 && (i + 1) % step == 0;
  }
}

void Write(const ModelConfig& config, ConfigWriter& to) {
  WriteQwenWindows(config, to);
  WriteExperts(config, "num_experts", "moe_intermediate_size", to);
  to.Bool("norm_topk_prob", "", config.normalized_experts);
  std::vector<int32_t> plain;
  for (int32_t i = 0; i < config.num_layers; ++i) {
    if (!config.Layer(i).experts) plain.push_back(i);
  }
  to.Ints("mlp_only_layers", "", plain);
}

}  // namespace

const Architecture kQwen3Moe = {.name = "qwen3moe",
                                .gguf = "qwen3moe",
                                .hugging_face = "qwen3_moe",
                                .hugging_face_class = "Qwen3MoeForCausalLM",
                                .names = {.router = {"mlp.gate", "ffn_gate_inp"},
                                          .expert_gate = {"mlp.experts.gate_proj", "ffn_gate_exps"},
                                          .expert_up = {"mlp.experts.up_proj", "ffn_up_exps"},
                                          .expert_down = {"mlp.experts.down_proj", "ffn_down_exps"}},
                                .qkv_bias = Presence::kOptional,
                                .output_bias = Presence::kOptional,
                                .qk_norm = Presence::kRequired,
                                .default_head_dim = 128,
                                .configure = Configure,
                                .write = Write};

}  // namespace phsa
