// Llama, and what copies it (SmolLM2, Llama 3): RMS norm, grouped-query attention with RoPE, gated MLP.
#include "io/architecture.h"

namespace phsa {

const Architecture kLlama = {.name = "llama",
                             .gguf = "llama",
                             .hugging_face = "llama",
                             .hugging_face_class = "LlamaForCausalLM",
                             .qkv_bias = Presence::kOptional,  // attention_bias of some derivatives
                             .output_bias = Presence::kOptional,
                             .mlp_bias = Presence::kOptional,
                             .gguf_interleaves_rope_rows = true};

}  // namespace phsa
