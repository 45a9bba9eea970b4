// Mistral: Llama whose first version has a window in every layer. Ministral: windows in some, listed in config.json.
#include "io/architecture.h"
#include "io/source.h"

namespace phsa {
namespace {

void Configure(const ConfigKeys& keys, ModelConfig* config) {
  const std::optional<int32_t> window = keys.Int("sliding_window", "", 1, kMaxContext);
  if (window && config->layers.empty()) SetWindows(config, *window, [](int32_t) { return true; });
}

}  // namespace

// GGUF files of both say llama, and are read as that.
const Architecture kMistral = {.name = "mistral",
                               .gguf = "llama",
                               .hugging_face = "mistral",
                               .hugging_face_class = "MistralForCausalLM",
                               .gguf_interleaves_rope_rows = true,
                               .configure = Configure};

const Architecture kMinistral = {.name = "ministral",
                                 .gguf = "llama",
                                 .hugging_face = "ministral",
                                 .hugging_face_class = "MinistralForCausalLM",
                                 .gguf_interleaves_rope_rows = true,
                                 .configure = Configure};

}  // namespace phsa
