// gpt-oss: a window in every other layer, a sink in each head's softmax, experts with biases and a clamped gate.
#include "io/architecture.h"
#include "io/source.h"

namespace phsa {
namespace {

void Configure(const ConfigKeys& keys, ModelConfig* config) {
  if (config->layers.empty()) {
    const int32_t window = keys.Int("sliding_window", "attention.sliding_window", 1, kMaxContext).value_or(128);
    SetWindows(config, window, [](int32_t layer) { return layer % 2 == 0; });
  }
  ReadExperts(keys, "intermediate_size", config);
  // GGUF has no keys for these; all models of the family have the same.
  config->swiglu_alpha = keys.Float("swiglu_alpha", "", 1e-3, 1e3).value_or(1.702f);
  config->swiglu_limit = keys.Float("swiglu_limit", "", 1e-3, 1e6).value_or(7.0f);
  if (keys.gguf()) config->rope_scaling.truncate = false;
}

void Write(const ModelConfig& config, ConfigWriter& to) {
  to.Int("sliding_window", "attention.sliding_window", WindowOf(config));
  WriteExperts(config, "num_local_experts", "intermediate_size", to);
  to.Float("swiglu_alpha", "", config.swiglu_alpha);
  to.Float("swiglu_limit", "", config.swiglu_limit);
}

}  // namespace

const Architecture kGptOss = {.name = "gpt_oss",
                              .gguf = "gpt-oss",
                              .hugging_face = "gpt_oss",
                              .hugging_face_class = "GptOssForCausalLM",
                              .names = {.mlp_norm = {"post_attention_layernorm", "post_attention_norm"},
                                        .router = {"mlp.router", "ffn_gate_inp"},
                                        .expert_gate = {"mlp.experts.gate_proj", "ffn_gate_exps"},
                                        .expert_up = {"mlp.experts.up_proj", "ffn_up_exps"},
                                        .expert_down = {"mlp.experts.down_proj", "ffn_down_exps"},
                                        .expert_gate_up = {"mlp.experts.gate_up_proj", ""},
                                        .sinks = {"self_attn.sinks", "attn_sinks"}},
                              .qkv_bias = Presence::kOptional,
                              .output_bias = Presence::kOptional,
                              .expert_bias = Presence::kRequired,
                              .gate = Gate::kClampedSwiglu,
                              .default_head_dim = 64,
                              .default_rope_base = 150000,
                              .configure = Configure,
                              .write = Write};

}  // namespace phsa
