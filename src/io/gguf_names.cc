#include "io/gguf_names.h"

#include <fmt/format.h>

namespace phsa {
namespace {

constexpr TensorName kModelNames[] = {
    {"model.embed_tokens.weight", "token_embd.weight"},
    {"model.norm.weight", "output_norm.weight"},
    {"lm_head.weight", "output.weight"},
};
constexpr TensorName kLayerPrefix = {"model.layers.", "blk."};

std::string Translate(const Architecture& architecture, std::string_view name, std::string_view TensorName::*from,
                      std::string_view TensorName::*to) {
  for (const TensorName& pair : kModelNames) {
    if (name == pair.*from) return std::string(pair.*to);
  }
  if (!name.starts_with(kLayerPrefix.*from)) return std::string(name);
  const std::string_view rest = name.substr((kLayerPrefix.*from).size());
  const size_t first_dot = rest.find('.');
  const size_t last_dot = rest.rfind('.');
  const TensorName& sinks = architecture.names.sinks;
  if (first_dot != std::string_view::npos && !sinks.gguf.empty()) {
    const std::string sinks_gguf = fmt::format("{}.weight", sinks.gguf);
    const TensorName whole = {sinks.hugging_face, sinks_gguf};
    if (rest.substr(first_dot + 1) == whole.*from) {
      return fmt::format("{}{}.{}", kLayerPrefix.*to, rest.substr(0, first_dot), whole.*to);
    }
  }
  if (first_dot == std::string_view::npos || last_dot <= first_dot) return std::string(name);
  const std::string_view layer = rest.substr(0, first_dot);
  const std::string_view part = rest.substr(first_dot + 1, last_dot - first_dot - 1);
  for (const TensorName& pair : architecture.names.All()) {
    if (part == pair.*from) {
      return fmt::format("{}{}.{}{}", kLayerPrefix.*to, layer, pair.*to, rest.substr(last_dot));
    }
  }
  return std::string(name);
}

}  // namespace

std::string HuggingFaceName(const Architecture& architecture, std::string_view gguf) {
  return Translate(architecture, gguf, &TensorName::gguf, &TensorName::hugging_face);
}

std::string GgufName(const Architecture& architecture, std::string_view hugging_face) {
  return Translate(architecture, hugging_face, &TensorName::hugging_face, &TensorName::gguf);
}

}  // namespace phsa
