// Granite: Llama with numbers that scale the embedding, what layers add, the attention and the logits.
#include "io/architecture.h"

namespace phsa {
namespace {

void Configure(const ConfigKeys& keys, ModelConfig* config) {
  const auto scale = [&](const char* hugging_face, const char* gguf) {
    return keys.Float(hugging_face, gguf, 1e-6, 1e6).value_or(1.0f);
  };
  config->attention_scale = scale("attention_multiplier", "attention.scale");
  config->embedding_scale = scale("embedding_multiplier", "embedding_scale");
  config->residual_scale = scale("residual_multiplier", "residual_scale");
  config->logits_divisor = scale("logits_scaling", "logit_scale");
}

void Write(const ModelConfig& config, ConfigWriter& to) {
  to.Float("attention_multiplier", "attention.scale", config.attention_scale);
  to.Float("embedding_multiplier", "embedding_scale", config.embedding_scale);
  to.Float("residual_multiplier", "residual_scale", config.residual_scale);
  to.Float("logits_scaling", "logit_scale", config.logits_divisor);
}

}  // namespace

const Architecture kGranite = {.name = "granite",
                               .gguf = "granite",
                               .hugging_face = "granite",
                               .hugging_face_class = "GraniteForCausalLM",
                               .qkv_bias = Presence::kOptional,
                               .output_bias = Presence::kOptional,
                               .mlp_bias = Presence::kOptional,
                               .gguf_interleaves_rope_rows = true,
                               .configure = Configure,
                               .write = Write};

}  // namespace phsa
