// Qwen2 and Qwen2.5: Llama with a bias on q, k and v.
#include "io/architecture.h"

namespace phsa {

const Architecture kQwen2 = {.name = "qwen2",
                             .gguf = "qwen2",
                             .hugging_face = "qwen2",
                             .hugging_face_class = "Qwen2ForCausalLM",
                             .qkv_bias = Presence::kRequired,
                             .configure = ReadQwenWindows,
                             .write = WriteQwenWindows};

}  // namespace phsa
