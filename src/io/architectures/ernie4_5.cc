// ERNIE 4.5: Llama whose RoPE turns neighbours, in all kinds of files.
#include "base/errors.h"
#include "io/architecture.h"

namespace phsa {
namespace {

void Configure(const ConfigKeys& keys, ModelConfig*) {
  if (keys.Bool("use_bias", "").value_or(false)) ThrowInvalid("{} is true; allowed: false", keys.Where("use_bias", ""));
}

}  // namespace

const Architecture kErnie45 = {.name = "ernie4_5",
                               .gguf = "ernie4_5",
                               .hugging_face = "ernie4_5",
                               .hugging_face_class = "Ernie4_5ForCausalLM",
                               .interleaved_rope = true,
                               .default_head_dim = 128,
                               .default_rope_base = 500000,
                               .configure = Configure};

}  // namespace phsa
