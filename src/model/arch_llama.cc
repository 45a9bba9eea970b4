// Llama, and what copies it (SmolLM2, Llama 3): RMS norm, grouped-query attention with RoPE, gated MLP.
#include "model/architecture.h"

namespace phsa {

const Architecture kLlama = {.name = "llama",
                             .qkv_bias = Presence::kOptional,  // attention_bias of some derivatives
                             .output_bias = Presence::kOptional,
                             .mlp_bias = Presence::kOptional,
                             .qk_norm = Presence::kAbsent};

}  // namespace phsa
