#include "io/gguf_names.h"

#include <fmt/format.h>

namespace phsa {
namespace {

struct NamePair {
  std::string_view gguf, hugging_face;
};
constexpr NamePair kModelNames[] = {
    {"token_embd.weight", "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {"output.weight", "lm_head.weight"},
};
// After "blk.N." and "model.layers.N."; each may have a weight and a bias.
constexpr NamePair kLayerNames[] = {
    {"attn_norm", "input_layernorm"},    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},      {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"}, {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"}, {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
};

constexpr NamePair kLayerPrefix = {"blk.", "model.layers."};

std::string Translate(std::string_view name, std::string_view NamePair::*from, std::string_view NamePair::*to) {
  for (const NamePair& pair : kModelNames) {
    if (name == pair.*from) return std::string(pair.*to);
  }
  if (!name.starts_with(kLayerPrefix.*from)) return std::string(name);
  const std::string_view rest = name.substr((kLayerPrefix.*from).size());
  const size_t first_dot = rest.find('.');
  const size_t last_dot = rest.rfind('.');
  if (first_dot == std::string_view::npos || last_dot <= first_dot) return std::string(name);
  const std::string_view layer = rest.substr(0, first_dot);
  const std::string_view part = rest.substr(first_dot + 1, last_dot - first_dot - 1);
  for (const NamePair& pair : kLayerNames) {
    if (part == pair.*from) {
      return fmt::format("{}{}.{}{}", kLayerPrefix.*to, layer, pair.*to, rest.substr(last_dot));
    }
  }
  return std::string(name);
}

}  // namespace

std::string HuggingFaceName(std::string_view gguf) { return Translate(gguf, &NamePair::gguf, &NamePair::hugging_face); }

std::string GgufName(std::string_view hugging_face) {
  return Translate(hugging_face, &NamePair::hugging_face, &NamePair::gguf);
}

}  // namespace phsa
