#include "io/architecture.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/errors.h"
#include "io/source.h"

namespace phsa {
namespace {

// Of several that GGUF calls the same, the first reads its files.
constexpr const Architecture* kAll[] = {&kLlama,    &kMistral, &kMinistral, &kQwen2,   &kQwen3,
                                        &kQwen3Moe, &kSmolLm3, &kGemma3,    &kPhi3,    &kGlm4,
                                        &kGranite,  &kMiniCpm, &kGptOss,    &kErnie45, &kSeedOss};

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

void WriteExperts(const ModelConfig& config, const char* count, const char* width, ConfigWriter& to) {
  to.Int(count, "expert_count", config.num_experts);
  to.Int("num_experts_per_tok", "expert_used_count", config.experts_per_token);
  to.Int(width, "expert_feed_forward_length", config.expert_width);
}

int32_t WindowOf(const ModelConfig& config) {
  int32_t window = 0;
  for (const LayerTraits& layer : config.layers) window = std::max(window, layer.window);
  return window;
}

std::string DifferenceOf(const ModelConfig& a, const ModelConfig& b) {
  const auto near = [](float x, float y) { return std::fabs(x - y) <= 1e-5f * std::fabs(x); };
  const auto same = [&](const auto& of) {
    for (int32_t i = 0; i < a.num_layers; ++i) {
      if (of(a.Layer(i)) != of(b.Layer(i))) return false;
    }
    return true;
  };
  if (!same([](const LayerTraits& layer) { return layer.window; })) return "the layers' windows";
  if (!same([](const LayerTraits& layer) { return layer.rope; })) return "layers without RoPE";
  if (!same([](const LayerTraits& layer) { return layer.experts; })) return "layers without experts";
  if (a.num_experts != b.num_experts || a.experts_per_token != b.experts_per_token ||
      a.expert_width != b.expert_width || (a.num_experts > 0 && a.normalized_experts != b.normalized_experts)) {
    return "the experts";
  }
  if (!near(a.swiglu_alpha, b.swiglu_alpha) || !near(a.swiglu_limit, b.swiglu_limit)) return "the gate's limits";
  const auto scale = [](const ModelConfig& c) {
    return c.attention_scale > 0 ? c.attention_scale : 1 / std::sqrt(static_cast<float>(c.head_dim));
  };
  if (!near(scale(a), scale(b))) return "the attention's scale";
  if (!near(a.embedding_scale, b.embedding_scale) || !near(a.residual_scale, b.residual_scale) ||
      !near(a.logits_divisor, b.logits_divisor)) {
    return "the scales";
  }
  if (WindowOf(a) > 0 && !near(a.window_rope_base.value_or(a.rope_base), b.window_rope_base.value_or(b.rope_base))) {
    return "the windows' RoPE base";
  }
  if (a.rope_scaling.truncate != b.rope_scaling.truncate && a.rope_scaling.kind == RopeScaling::Kind::kYarn) {
    return "YaRN's truncation";
  }
  return "";
}

namespace {

// What was written, to be read again.
class WrittenKeys final : public ConfigKeys, public ConfigWriter {
 public:
  explicit WrittenKeys(ConfigWriter& to, std::string path) : to_(to), path_(std::move(path)) {}
  bool gguf() const override { return to_.gguf(); }
  void Int(const char* hugging_face, const char* gguf, int32_t value) override {
    Keep(hugging_face, gguf, value);
    to_.Int(hugging_face, gguf, value);
  }
  void Float(const char* hugging_face, const char* gguf, float value) override {
    Keep(hugging_face, gguf, value);
    to_.Float(hugging_face, gguf, value);
  }
  void Bool(const char* hugging_face, const char* gguf, bool value) override {
    Keep(hugging_face, gguf, value);
    to_.Bool(hugging_face, gguf, value);
  }
  void Ints(const char* hugging_face, const char* gguf, const std::vector<int32_t>& values) override {
    if (std::string key = Key(hugging_face, gguf); !key.empty()) lists_[std::move(key)] = values;
    to_.Ints(hugging_face, gguf, values);
  }

  std::optional<int32_t> Int(const char* hugging_face, const char* gguf, int64_t, int64_t) const override {
    const std::optional<double> found = Find(hugging_face, gguf);
    return found ? std::optional(static_cast<int32_t>(*found)) : std::nullopt;
  }
  std::optional<float> Float(const char* hugging_face, const char* gguf, double, double) const override {
    const std::optional<double> found = Find(hugging_face, gguf);
    return found ? std::optional(static_cast<float>(*found)) : std::nullopt;
  }
  std::optional<bool> Bool(const char* hugging_face, const char* gguf) const override {
    const std::optional<double> found = Find(hugging_face, gguf);
    return found ? std::optional(*found != 0) : std::nullopt;
  }
  std::optional<std::vector<int32_t>> Ints(const char* hugging_face, const char* gguf, int64_t,
                                           int64_t) const override {
    const auto found = lists_.find(Key(hugging_face, gguf));
    return found == lists_.end() ? std::nullopt : std::optional(found->second);
  }
  std::string Where(const char* hugging_face, const char* gguf) const override {
    return path_ + ": " + Key(hugging_face, gguf);
  }

 private:
  std::string Key(const char* hugging_face, const char* gguf) const { return to_.gguf() ? gguf : hugging_face; }
  void Keep(const char* hugging_face, const char* gguf, double value) {
    if (std::string key = Key(hugging_face, gguf); !key.empty()) numbers_[std::move(key)] = value;
  }
  std::optional<double> Find(const char* hugging_face, const char* gguf) const {
    const auto found = numbers_.find(Key(hugging_face, gguf));
    return found == numbers_.end() ? std::nullopt : std::optional(found->second);
  }
  ConfigWriter& to_;
  const std::string path_;
  std::map<std::string, double> numbers_;
  std::map<std::string, std::vector<int32_t>> lists_;
};

// The architecture that reads what this one writes: GGUF calls some of them the same.
const Architecture& ReaderOf(const Architecture& written, bool gguf) {
  const auto reads = [&](const Architecture* one) { return one->gguf == written.gguf; };
  return gguf ? **std::find_if(std::begin(kAll), std::end(kAll), reads) : written;
}

}  // namespace

void WriteConfig(const ModelConfig& config, const std::string& path, ConfigWriter& to) {
  const Architecture& architecture = ArchitectureOf(config);
  if (to.gguf() && architecture.gguf.empty()) {
    Throw(PHSA_UNSUPPORTED, "{}: GGUF has no {} models; safetensors can be written", path, config.architecture);
  }
  WrittenKeys keys(to, path);
  if (architecture.write != nullptr) architecture.write(config, keys);
  // What neither kind of file says in keys of a family's own.
  ModelConfig again;
  again.num_layers = config.num_layers;
  again.hidden = config.hidden;
  again.num_q_heads = config.num_q_heads;
  again.head_dim = config.head_dim;
  again.rope_base = config.rope_base;
  again.rope_scaling.kind = config.rope_scaling.kind;
  if (!to.gguf()) {
    again.layers = config.layers;  // layer_types
    again.rope_scaling.truncate = config.rope_scaling.truncate;
  }
  const Architecture& reader = ReaderOf(architecture, to.gguf());
  if (reader.configure != nullptr) reader.configure(keys, &again);
  const std::string difference = DifferenceOf(config, again);
  if (difference.empty()) return;
  Throw(PHSA_UNSUPPORTED, "{}: {} are not what {} files of {} models can say; {} can", path, difference,
        to.gguf() ? "GGUF" : "Hugging Face's", to.gguf() ? reader.gguf : reader.name,
        to.gguf() ? "safetensors" : "GGUF");
}

void ReadQwenWindows(const ConfigKeys& keys, ModelConfig* config) {
  if (!config->layers.empty() || !keys.Bool("use_sliding_window", "").value_or(false)) return;
  const std::optional<int32_t> window = keys.Int("sliding_window", "", 1, kMaxContext);
  const int32_t first = keys.Int("max_window_layers", "", 0, kMaxLayers).value_or(28);
  if (window) SetWindows(config, *window, [&](int32_t layer) { return layer >= first; });
}

void WriteQwenWindows(const ModelConfig& config, ConfigWriter& to) {
  const int32_t window = WindowOf(config);
  to.Bool("use_sliding_window", "", window > 0);
  if (window > 0) to.Int("sliding_window", "", window);
}

}  // namespace phsa
