#include "io/model_source.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "base/errors.h"
#include "io/gguf.h"
#include "io/model_store.h"
#include "io/source.h"

namespace phsa {

int32_t CheckedInt(const std::string& where, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) ThrowInvalid("{} is {}; allowed: {} to {}", where, value, low, high);
  return static_cast<int32_t>(value);
}

float CheckedFloat(const std::string& where, double value, double low, double high) {
  // Written so that NaN fails too.
  if (!(value >= low && value <= high)) ThrowInvalid("{} is {}; allowed: {} to {}", where, value, low, high);
  return static_cast<float>(value);
}

float LongRopeMagnitude(float growth, int32_t original_context) {
  if (growth <= 1 || original_context <= 1) return 1;
  return static_cast<float>(std::sqrt(1 + std::log(double{growth}) / std::log(original_context)));
}

void CheckConfig(const std::string& path, const ModelConfig& config) {
  if (config.num_q_heads % config.num_kv_heads != 0) {
    ThrowInvalid("{}: {} query heads cannot share {} KV heads evenly", path, config.num_q_heads, config.num_kv_heads);
  }
  if (config.head_dim % 2 != 0) ThrowInvalid("{}: the head size is {}; allowed: even numbers", path, config.head_dim);
  for (const int32_t id : config.eos_ids) {
    if (id < 0 || id >= config.vocab_size) {
      ThrowInvalid("{}: the end token is {}; allowed: 0 to {}", path, id, config.vocab_size - 1);
    }
  }
  const RopeScaling& scaling = config.rope_scaling;
  const bool longrope = scaling.kind == RopeScaling::Kind::kLongRope;
  const int32_t pairs = (config.rotary_dim > 0 ? config.rotary_dim : config.head_dim) / 2;
  const std::pair<const char*, const std::vector<float>*> lists[] = {
      {longrope ? "longrope" : "rope_freqs.weight", &scaling.frequency_factors},
      {"longrope's list for short texts", &scaling.short_factors},
      {"longrope's list for long texts", &scaling.long_factors}};
  for (const auto& [name, factors] : lists) {
    if (!factors->empty() && factors->size() != static_cast<size_t>(pairs)) {
      ThrowInvalid("{}: {} has {} elements; allowed for heads of {}: {}", path, name, factors->size(), config.head_dim,
                   pairs);
    }
    if (!std::all_of(factors->begin(), factors->end(), [](float f) { return std::isfinite(f) && f > 0; })) {
      ThrowInvalid("{}: {} holds a number that is not above 0: the file is damaged; fetch it again", path, name);
    }
  }
}

void CheckEmbedding(const ModelSource& source, std::string_view name_in_file) {
  const Tensor* embedding = source.Find(kEmbeddingName);
  if (embedding == nullptr) {
    ThrowInvalid("{}: has no tensor {}: this is not a whole language model", source.path(), name_in_file);
  }
  const std::vector<int64_t> wanted = {source.config().vocab_size, source.config().hidden};
  if (embedding->shape != wanted) {
    ThrowInvalid("{}: the tensor {} at offset {} has the shape [{}], the configuration says [{}]", embedding->file,
                 Quoted(embedding->name), embedding->file_offset, fmt::join(embedding->shape, ", "),
                 fmt::join(wanted, ", "));
  }
}

namespace {

std::unique_ptr<ModelSource> OpenAlone(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return OpenHuggingFace(path);
  MappedFile file(path);
  const std::string extension = path.extension().string();
  if (!HasGgufMagic(file) && (extension == ".safetensors" || extension == ".json")) {
    ThrowInvalid("{}: is one file of a Hugging Face model: give the folder that it is in", file.path());
  }
  return OpenGguf(std::move(file));
}

}  // namespace

std::unique_ptr<ModelSource> ModelSource::Open(const std::filesystem::path& path,
                                               const std::filesystem::path& adapter) {
  std::unique_ptr<ModelSource> source = OpenAlone(path);
  if (const PackagedModel* model = PackagedModelOf(path); model != nullptr && source->config_.phsa_settings.empty()) {
    source->config_.phsa_settings = model->settings;
  }
  if (!adapter.empty()) source->SetAdapter(adapter);
  return source;
}

std::unique_ptr<Adapter> ModelSource::OpenAdapter(const std::filesystem::path& folder) const {
  Adapter::Base base{path_, config_.num_layers, {}};
  base.shape = [&](const std::string& name) {
    const Tensor* const tensor = Find(name);
    return tensor != nullptr ? tensor->shape : std::vector<int64_t>();
  };
  return Adapter::Open(folder, base);
}

ModelConfig ModelSource::ConfigWith(const Adapter& adapter) const {
  ModelConfig config = config_;
  const std::string& own = adapter_ == nullptr ? config_.phsa_settings : own_settings_;
  config.phsa_settings = adapter.phsa_settings().empty() ? own : adapter.phsa_settings();
  return config;
}

void ModelSource::SetAdapter(const std::filesystem::path& folder) {
  std::unique_ptr<Adapter> adapter = folder.empty() ? nullptr : OpenAdapter(folder);
  if (adapter_ == nullptr) own_settings_ = config_.phsa_settings;
  config_.phsa_settings = adapter != nullptr ? ConfigWith(*adapter).phsa_settings : own_settings_;
  adapter_ = std::move(adapter);
}

}  // namespace phsa
