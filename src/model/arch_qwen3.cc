// Qwen3: no bias; each head's query and key is RMS-normed before RoPE, and head_dim is free of hidden / heads.
#include "model/architecture.h"

namespace phsa {

const Architecture kQwen3 = {.name = "qwen3",
                             .qkv_bias = Presence::kOptional,  // attention_bias
                             .output_bias = Presence::kOptional,
                             .mlp_bias = Presence::kAbsent,
                             .qk_norm = Presence::kRequired};

}  // namespace phsa
