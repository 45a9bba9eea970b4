// Seed-OSS: Llama with a bias on q, k and v.
#include "io/architecture.h"

namespace phsa {

const Architecture kSeedOss = {.name = "seed_oss",
                               .gguf = "seed_oss",
                               .hugging_face = "seed_oss",
                               .hugging_face_class = "SeedOssForCausalLM",
                               .names = {.mlp_norm = {"post_attention_layernorm", "post_attention_norm"}},
                               .qkv_bias = Presence::kOptional,
                               .output_bias = Presence::kOptional,
                               .mlp_bias = Presence::kOptional,
                               .output_bias_key = "attention_out_bias",
                               .default_head_dim = 128};

}  // namespace phsa
