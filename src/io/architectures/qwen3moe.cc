// Qwen3 with experts: each token takes some of many small MLPs, as a router weighs them.
#include "base/errors.h"
#include "io/architecture.h"
#include "io/source.h"

namespace phsa {
namespace {

constexpr int64_t kMaxExperts = 4096;

void Configure(const ConfigKeys& keys, ModelConfig* config) {
  ReadQwenWindows(keys, config);
  const auto required = [&](const char* hugging_face, const char* gguf, int64_t high) {
    const std::optional<int32_t> value = keys.Int(hugging_face, gguf, 1, high);
    if (!value) ThrowInvalid("{} is missing", keys.Where(hugging_face, gguf));
    return *value;
  };
  config->num_experts = keys.Int("num_local_experts", "", 1, kMaxExperts).value_or(0);
  if (config->num_experts == 0) config->num_experts = required("num_experts", "expert_count", kMaxExperts);
  config->experts_per_token = required("num_experts_per_tok", "expert_used_count", config->num_experts);
  config->expert_width = required("moe_intermediate_size", "expert_feed_forward_length", kMaxWidth);
  config->normalized_experts = keys.Bool("norm_topk_prob", "").value_or(keys.gguf());
  const int32_t step = keys.Int("decoder_sparse_step", "", 0, kMaxLayers).value_or(1);
  const std::vector<int32_t> plain = keys.Ints("mlp_only_layers", "", 0, kMaxLayers).value_or(std::vector<int32_t>());
  config->layers.resize(static_cast<size_t>(config->num_layers));
  for (int32_t i = 0; i < config->num_layers; ++i) {
    const bool listed = std::find(plain.begin(), plain.end(), i) != plain.end();
    config->layers[static_cast<size_t>(i)].experts = !listed && step > 0 && (i + 1) % step == 0;
  }
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
                                .configure = Configure};

}  // namespace phsa
