// MiniCPM, to its fourth version: Llama with scales for the embedding, for what layers add and for the logits.
#include <cmath>

#include "io/architecture.h"

namespace phsa {
namespace {

void Configure(const ConfigKeys& keys, ModelConfig* config) {
  const auto number = [&](const char* hugging_face, const char* gguf, float otherwise) {
    return keys.Float(hugging_face, gguf, 1e-6, 1e9).value_or(otherwise);
  };
  config->embedding_scale = number("scale_emb", "embedding_scale", 1);
  if (keys.gguf()) {
    config->residual_scale = number("", "residual_scale", 1);
    config->logits_divisor = number("", "logit_scale", 1);
    return;
  }
  const auto hidden = static_cast<float>(config->hidden), layers = static_cast<float>(config->num_layers);
  config->residual_scale = number("scale_depth", "", std::sqrt(layers)) / std::sqrt(layers);
  config->logits_divisor = hidden / number("dim_model_base", "", hidden);
}

void Write(const ModelConfig& config, ConfigWriter& to) {
  to.Float("scale_emb", "embedding_scale", config.embedding_scale);
  to.Float("", "residual_scale", config.residual_scale);
  to.Float("", "logit_scale", config.logits_divisor);
  to.Float("scale_depth", "", config.residual_scale * std::sqrt(static_cast<float>(config.num_layers)));
  to.Float("dim_model_base", "", static_cast<float>(config.hidden) / config.logits_divisor);
}

}  // namespace

const Architecture kMiniCpm = {.name = "minicpm",
                               .gguf = "minicpm",
                               .hugging_face = "minicpm",
                               .hugging_face_class = "MiniCPMForCausalLM",
                               .qkv_bias = Presence::kOptional,
                               .output_bias = Presence::kOptional,
                               .gguf_interleaves_rope_rows = true,
                               .infllm2 = true,
                               .configure = Configure,
                               .write = Write};

}  // namespace phsa
