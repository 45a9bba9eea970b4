// SmolLM3: Llama without RoPE in every fourth layer.
#include "base/errors.h"
#include "io/architecture.h"
#include "io/source.h"

namespace phsa {
namespace {

void Configure(const ConfigKeys& keys, ModelConfig* config) {
  config->layers.resize(static_cast<size_t>(config->num_layers));
  // Where the list is not there, as in GGUF, it is made of the interval.
  const auto with_rope = keys.Ints("no_rope_layers", "", 0, 1);
  if (with_rope && with_rope->size() != config->layers.size()) {
    ThrowInvalid("{} lists {} layers; the model has {}", keys.Where("no_rope_layers", ""), with_rope->size(),
                 config->num_layers);
  }
  const int32_t interval = keys.Int("no_rope_layer_interval", "", 1, kMaxLayers).value_or(4);
  for (int32_t i = 0; i < config->num_layers; ++i) {
    const auto index = static_cast<size_t>(i);
    config->layers[index].rope = with_rope ? (*with_rope)[index] != 0 : (i + 1) % interval != 0;
  }
}

void Write(const ModelConfig& config, ConfigWriter& to) {
  std::vector<int32_t> with_rope;
  for (int32_t i = 0; i < config.num_layers; ++i) with_rope.push_back(config.Layer(i).rope ? 1 : 0);
  to.Ints("no_rope_layers", "", with_rope);
}

}  // namespace

const Architecture kSmolLm3 = {.name = "smollm3",
                               .gguf = "smollm3",
                               .hugging_face = "smollm3",
                               .hugging_face_class = "SmolLM3ForCausalLM",
                               .qkv_bias = Presence::kOptional,
                               .output_bias = Presence::kOptional,
                               .mlp_bias = Presence::kOptional,
                               .gguf_interleaves_rope_rows = true,
                               .configure = Configure,
                               .write = Write};

}  // namespace phsa
