// Qwen3: no bias; each head's query and key is RMS-normed before RoPE, and head_dim is free of hidden / heads.
#include "io/architecture.h"

namespace phsa {

const Architecture kQwen3 = {.name = "qwen3",
                             .gguf = "qwen3",
                             .hugging_face = "qwen3",
                             .hugging_face_class = "Qwen3ForCausalLM",
                             .qkv_bias = Presence::kOptional,  // attention_bias
                             .output_bias = Presence::kOptional,
                             .qk_norm = Presence::kRequired,
                             .default_head_dim = 128,
                             .configure = ReadQwenWindows,
                             .write = WriteQwenWindows};

}  // namespace phsa
