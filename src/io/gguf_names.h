// What tensors are called in GGUF files and in Hugging Face's.
#ifndef PHSA_IO_GGUF_NAMES_H_
#define PHSA_IO_GGUF_NAMES_H_

#include <string>
#include <string_view>

#include "io/architecture.h"

namespace phsa {

// "model.layers.3.self_attn.q_proj.weight" for "blk.3.attn_q.weight", and back; a name that is not known stays as it
// is.
std::string HuggingFaceName(const Architecture& architecture, std::string_view gguf);
std::string GgufName(const Architecture& architecture, std::string_view hugging_face);

}  // namespace phsa

#endif  // PHSA_IO_GGUF_NAMES_H_
