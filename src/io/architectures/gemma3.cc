// Gemma 3: a window in five layers of six, with a RoPE base of their own; norms before and after attention and MLP, and
// of each head's query and key; a gate of GELU; the embedding times √hidden.
#include <cmath>

#include "base/errors.h"
#include "io/architecture.h"
#include "io/source.h"

namespace phsa {
namespace {

void Configure(const ConfigKeys& keys, ModelConfig* config) {
  for (const char* name : {"attn_logit_softcapping", "final_logit_softcapping"}) {
    const char* const gguf = name[0] == 'a' ? "attn_logit_softcapping" : "final_logit_softcapping";
    if (keys.Float(name, gguf, 0, 1e9).value_or(0) != 0) {
      ThrowInvalid("{} is given; allowed: none", keys.Where(name, gguf));
    }
  }
  if (config->layers.empty()) {
    const int32_t window = keys.Int("sliding_window", "attention.sliding_window", 1, kMaxContext).value_or(0);
    const int32_t pattern = keys.Int("sliding_window_pattern", "", 1, kMaxLayers).value_or(6);
    SetWindows(config, window, [&](int32_t layer) { return (layer + 1) % pattern != 0; });
  }
  if (!config->window_rope_base) {
    config->window_rope_base =
        keys.Float("rope_local_base_freq", "rope.freq_base_swa", 1, kMaxRopeBase).value_or(10000.0f);
  }
  // The largest model alone divides by the root of something else than a head's size, and GGUF has no key for that.
  constexpr int32_t kLayersOfLargest = 62;
  const auto of_gguf = static_cast<float>(config->num_layers == kLayersOfLargest ? config->hidden / config->num_q_heads
                                                                                 : config->head_dim);
  const float scalar = keys.Float("query_pre_attn_scalar", "", 1e-3, 1e9).value_or(keys.gguf() ? of_gguf : 256.0f);
  config->attention_scale = 1.0f / std::sqrt(scalar);
  config->embedding_scale = std::sqrt(static_cast<float>(config->hidden));
}

void Write(const ModelConfig& config, ConfigWriter& to) {
  to.Int("sliding_window", "attention.sliding_window", WindowOf(config));
  to.Float("rope_local_base_freq", "rope.freq_base_swa", config.window_rope_base.value_or(10000.0f));
  to.Int("query_pre_attn_scalar", "", static_cast<int32_t>(std::lround(std::pow(config.attention_scale, -2.0f))));
}

}  // namespace

const Architecture kGemma3 = {.name = "gemma3",
                              .gguf = "gemma3",
                              .hugging_face = "gemma3_text",
                              .hugging_face_class = "Gemma3ForCausalLM",
                              .names = {.attention_post_norm = {"post_attention_layernorm", "post_attention_norm"},
                                        .mlp_norm = {"pre_feedforward_layernorm", "ffn_norm"},
                                        .mlp_post_norm = {"post_feedforward_layernorm", "post_ffw_norm"}},
                              .qkv_bias = Presence::kOptional,
                              .output_bias = Presence::kOptional,
                              .qk_norm = Presence::kRequired,
                              .gate = Gate::kGeluTanh,
                              .norms_from_one = true,
                              .default_head_dim = 256,
                              .default_rope_base = 1e6f,
                              .configure = Configure,
                              .write = Write};

}  // namespace phsa
