// Phi-3 and Phi-4: Llama whose q, k and v lie in one tensor and whose gate and up in another; a window in all layers of
// some, and RoPE over a part of each head in others.
#include "io/architecture.h"
#include "io/source.h"

namespace phsa {
namespace {

void Configure(const ConfigKeys& keys, ModelConfig* config) {
  const std::optional<int32_t> window = keys.Int("sliding_window", "attention.sliding_window", 1, kMaxContext);
  if (window && config->layers.empty()) SetWindows(config, *window, [](int32_t) { return true; });
}

void Write(const ModelConfig& config, ConfigWriter& to) {
  if (WindowOf(config) > 0) to.Int("sliding_window", "attention.sliding_window", WindowOf(config));
}

}  // namespace

const Architecture kPhi3 = {.name = "phi3",
                            .gguf = "phi3",
                            .hugging_face = "phi3",
                            .hugging_face_class = "Phi3ForCausalLM",
                            .names = {.up = {"mlp.up_proj", ""},
                                      .qkv = {"self_attn.qkv_proj", "attn_qkv"},
                                      .gate_up = {"mlp.gate_up_proj", "ffn_up"}},
                            .partial_rotary = true,
                            .configure = Configure,
                            .write = Write};

}  // namespace phsa
