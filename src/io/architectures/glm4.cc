// GLM-4: RoPE over neighbours in the first half of each head, norms before and after attention and MLP, a bias on q, k
// and v, and gate and up in one tensor.
#include "io/architecture.h"

namespace phsa {

const Architecture kGlm4 = {.name = "glm4",
                            .gguf = "glm4",
                            .hugging_face = "glm4",
                            .hugging_face_class = "Glm4ForCausalLM",
                            .names = {.attention_post_norm = {"post_self_attn_layernorm", "post_attention_norm"},
                                      .up = {"mlp.up_proj", ""},
                                      .mlp_post_norm = {"post_mlp_layernorm", "post_ffw_norm"},
                                      .gate_up = {"mlp.gate_up_proj", "ffn_up"}},
                            .qkv_bias = Presence::kOptional,
                            .interleaved_rope = true,
                            .partial_rotary = true,
                            .default_head_dim = 128};

}  // namespace phsa
