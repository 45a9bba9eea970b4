// Qwen2 and Qwen2.5: Llama with a bias on q, k and v.
#include "model/architecture.h"

namespace phsa {

const Architecture kQwen2 = {.name = "qwen2",
                             .qkv_bias = Presence::kRequired,
                             .output_bias = Presence::kAbsent,
                             .mlp_bias = Presence::kAbsent,
                             .qk_norm = Presence::kAbsent};

}  // namespace phsa
