#include "io/architecture.h"

#include "base/errors.h"
#include "io/source.h"

namespace phsa {
namespace {

// Of several that GGUF calls the same, the first reads its files.
constexpr const Architecture* kAll[] = {&kLlama,  &kMistral, &kMinistral, &kQwen2,   &kQwen3,   &kQwen3Moe, &kSmolLm3,
                                        &kGemma3, &kPhi3,    &kGlm4,      &kGranite, &kMiniCpm, &kGptOss};

}  // namespace

std::span<const Architecture* const> Architectures() { return kAll; }

const Architecture& ArchitectureOf(const ModelConfig& config) {
  for (const Architecture* architecture : kAll) {
    if (architecture->name == config.architecture) return *architecture;
  }
  Throw(PHSA_UNSUPPORTED, "the architecture {} is not supported; supported: {}", Quoted(config.architecture),
        ArchitectureNames(&Architecture::name));
}

std::string ArchitectureNames(std::string_view Architecture::*name) {
  std::vector<std::string_view> names;
  for (const Architecture* architecture : kAll) {
    const std::string_view one = architecture->*name;
    if (!one.empty() && std::find(names.begin(), names.end(), one) == names.end()) names.push_back(one);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

void ReadExperts(const ConfigKeys& keys, const char* width, ModelConfig* config) {
  constexpr int64_t kMaxExperts = 4096;
  const auto required = [&](const char* hugging_face, const char* gguf, int64_t high) {
    const std::optional<int32_t> value = keys.Int(hugging_face, gguf, 1, high);
    if (!value) ThrowInvalid("{} is missing", keys.Where(hugging_face, gguf));
    return *value;
  };
  config->num_experts = keys.Int("num_local_experts", "", 1, kMaxExperts).value_or(0);
  if (config->num_experts == 0) config->num_experts = required("num_experts", "expert_count", kMaxExperts);
  config->experts_per_token = required("num_experts_per_tok", "expert_used_count", config->num_experts);
  config->expert_width = required(width, "expert_feed_forward_length", kMaxWidth);
  config->layers.resize(static_cast<size_t>(config->num_layers));
  for (LayerTraits& layer : config->layers) layer.experts = true;
}

void ReadQwenWindows(const ConfigKeys& keys, ModelConfig* config) {
  if (!config->layers.empty() || !keys.Bool("use_sliding_window", "").value_or(false)) return;
  const std::optional<int32_t> window = keys.Int("sliding_window", "", 1, kMaxContext);
  const int32_t first = keys.Int("max_window_layers", "", 0, kMaxLayers).value_or(28);
  if (window) SetWindows(config, *window, [&](int32_t layer) { return layer >= first; });
}

}  // namespace phsa
