#include "io/adapter.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include "base/errors.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxConfigBytes = 1 << 20;
constexpr size_t kMaxSettingsBytes = size_t{16} << 20;
constexpr int64_t kMaxRank = 65536;
constexpr double kMaxAlpha = 1e9;
constexpr const char* kConfigName = "adapter_config.json";
constexpr const char* kWeightsName = "adapter_model.safetensors";

constexpr std::array<const char*, 7> kModules = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                                 "self_attn.o_proj", "mlp.gate_proj",    "mlp.up_proj",
                                                 "mlp.down_proj"};

// Keys of adapter_config.json that we read, or that say nothing about what the adapter computes. All others must be
// null, false or empty: what they would change is then not in use.
constexpr std::array<std::string_view, 30> kKnownKeys = {"alpha_pattern",
                                                         "auto_mapping",
                                                         "base_model_name_or_path",
                                                         "bias",
                                                         "corda_config",
                                                         "eva_config",
                                                         "exclude_modules",
                                                         "fan_in_fan_out",
                                                         "inference_mode",
                                                         "init_lora_weights",
                                                         "layers_pattern",
                                                         "layers_to_transform",
                                                         "loftq_config",
                                                         "lora_alpha",
                                                         "lora_dropout",
                                                         "lora_ga_config",
                                                         "megatron_core",
                                                         "peft_type",
                                                         "peft_version",
                                                         "qalora_group_size",
                                                         "r",
                                                         "rank_pattern",
                                                         "revision",
                                                         "runtime_config",
                                                         "target_modules",
                                                         "task_type",
                                                         "use_rslora",
                                                         "velora_config",
                                                         "ensure_weight_tying",
                                                         "modules_to_save"};

// Ways to begin the training that leave the model's own weights as they are; the others move a part of them into the
// adapter, which then belongs to weights that are in no file.
constexpr std::array<std::string_view, 3> kPlainStarts = {"gaussian", "eva", "orthogonal"};

bool IsUnset(const Json& value) {
  return value.is_null() || value == false || (value.is_structured() && value.empty());
}

// "a.b.c", "b.c" and "c" of "a.b.c".
std::vector<std::string_view> Endings(std::string_view module) {
  std::vector<std::string_view> endings = {module};
  for (size_t dot = module.find('.'); dot != std::string_view::npos; dot = module.find('.', dot + 1)) {
    endings.push_back(module.substr(dot + 1));
  }
  return endings;
}

// Python's re.match(pattern, text), for patterns that begin where the text does.
class NamePattern {
 public:
  NamePattern(const std::string& pattern, const std::string& where) : where_(where), text_(pattern) {
    int error = 0;
    size_t at = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                              PCRE2_ANCHORED | PCRE2_NEVER_BACKSLASH_C, &error, &at, nullptr));
    if (!code_) ThrowInvalid("{} has {}, which is no regular expression", where, Quoted(pattern));
    match_.reset(pcre2_match_data_create_from_pattern(code_.get(), nullptr));
    context_.reset(pcre2_match_context_create(nullptr));
    if (!match_ || !context_) throw std::bad_alloc();
    // A module's name takes some dozens of steps.
    pcre2_set_match_limit(context_.get(), 20'000);
    pcre2_set_heap_limit(context_.get(), 1024);
  }
  bool Matches(const std::string& text) const {
    const int result = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), 0, 0,
                                   match_.get(), context_.get());
    if (result < 0 && result != PCRE2_ERROR_NOMATCH) {
      ThrowInvalid("{} has {}, which takes too long to match {}", where_, Quoted(text_), text);
    }
    return result >= 0;
  }

 private:
  struct Free {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
    void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
    void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
  };
  std::string where_, text_;
  std::unique_ptr<pcre2_code, Free> code_;
  std::unique_ptr<pcre2_match_data, Free> match_;
  std::unique_ptr<pcre2_match_context, Free> context_;
};

// rank_pattern and alpha_pattern: a number for the modules whose names end with what an expression matches.
class NumberPattern {
 public:
  // More than any real file has; with the limit on a match it bounds the time.
  static constexpr size_t kMostPatterns = 4096;

  NumberPattern(const JsonFields& fields, const char* key, double low, double high) : where_(fields.Where(key)) {
    if (!fields.Object(key)) return;
    const Json& object = *fields.Find(key);
    if (object.size() > kMostPatterns) {
      ThrowInvalid("{} has {} entries; allowed: at most {}", where_, object.size(), kMostPatterns);
    }
    for (const auto& [name, value] : object.items()) {
      if (!value.is_number() || !(value.get<double>() >= low && value.get<double>() <= high)) {
        ThrowInvalid("{} has {} for {}; allowed: {} to {}", where_, JsonText(value), Quoted(name), low, high);
      }
      if (name.find_first_of("\\^$*+?{}[]|()") == std::string::npos) {
        plain_.emplace(name, value.get<double>());
      } else {
        patterns_.emplace_back(NamePattern("(.*\\.)?(" + name + ")$", where_), value.get<double>());
      }
    }
  }

  // The order of the entries decides in PEFT, and JSON has none: where two differ, neither is taken.
  std::optional<double> Find(const std::string& module) const {
    std::optional<double> found;
    const auto take = [&](double value) {
      if (found && *found != value) {
        ThrowInvalid("{} has {} and {} for {}; leave one of them out", where_, *found, value, module);
      }
      found = value;
    };
    // A name without special characters is one of the endings. A dot in it stands for any character in PEFT; module
    // names differ by more than that.
    for (const std::string_view ending : Endings(module)) {
      if (const auto it = plain_.find(ending); it != plain_.end()) take(it->second);
    }
    for (const auto& [pattern, value] : patterns_) {
      if (pattern.Matches(module)) take(value);
    }
    return found;
  }

 private:
  std::string where_;
  std::map<std::string, double, std::less<>> plain_;
  std::vector<std::pair<NamePattern, double>> patterns_;
};

// Which modules the adapter says that it changes; nothing where that cannot be told without PEFT.
class Targets {
 public:
  explicit Targets(const JsonFields& fields) : where_(fields.Where("target_modules")) {
    for (const char* key : {"exclude_modules", "layers_to_transform"}) {
      if (const Json* value = fields.Find(key); value != nullptr && !IsUnset(*value)) return;
    }
    const Json* value = fields.Find("target_modules");
    if (value == nullptr) return;
    if (value->is_string()) {
      const auto& text = value->get_ref<const std::string&>();
      if (text == "all-linear") {
        all_ = true;
      } else {
        pattern_.emplace("(?:" + text + ")\\z", where_);
      }
      return;
    }
    if (!value->is_array()) ThrowInvalid("{} is {}; allowed: a list or a string", where_, JsonText(*value));
    for (const Json& item : *value) {
      if (!item.is_string()) ThrowInvalid("{} holds {}; allowed: names", where_, JsonText(item));
      names_.insert(item.get<std::string>());
    }
  }
  bool Has(const std::string& module) const {
    if (all_) return true;
    if (pattern_) return pattern_->Matches(module);
    const std::vector<std::string_view> endings = Endings(module);
    return std::any_of(endings.begin(), endings.end(),
                       [&](std::string_view ending) { return names_.contains(ending); });
  }
  const std::string& where() const { return where_; }

 private:
  std::string where_;
  bool all_ = false;
  std::optional<NamePattern> pattern_;
  std::set<std::string, std::less<>> names_;
};

void RefuseWhatWeDoNotCompute(const Json& json, const JsonFields& fields) {
  if (const std::string type = fields.String("peft_type").value_or(""); type != "LORA") {
    ThrowInvalid("{} is {}; allowed: LORA", fields.Where("peft_type"), Quoted(type));
  }
  if (const std::string task = fields.String("task_type").value_or("CAUSAL_LM"); task != "CAUSAL_LM") {
    ThrowInvalid("{} is {}; allowed: CAUSAL_LM", fields.Where("task_type"), Quoted(task));
  }
  if (const std::string bias = fields.String("bias").value_or("none"); bias != "none") {
    ThrowInvalid("{} is {}; allowed: none", fields.Where("bias"), Quoted(bias));
  }
  if (fields.Bool("fan_in_fan_out").value_or(false)) {
    ThrowInvalid("{} is true; allowed: false, as the model's layers are linear ones", fields.Where("fan_in_fan_out"));
  }
  if (const Json* modules = fields.Find("modules_to_save"); modules != nullptr && !IsUnset(*modules)) {
    ThrowInvalid("{} names whole layers that were trained; allowed: none. Merge them into the model with PEFT",
                 fields.Where("modules_to_save"));
  }
  if (const Json* start = fields.Find("init_lora_weights"); start != nullptr && !start->is_boolean()) {
    const bool plain = start->is_string() && std::find(kPlainStarts.begin(), kPlainStarts.end(),
                                                       start->get_ref<const std::string&>()) != kPlainStarts.end();
    if (!plain) {
      ThrowInvalid(
          "{} is {}, which also changes the model's own weights; convert the adapter with PEFT "
          "(path_initial_model_for_weight_conversion) to a plain one",
          fields.Where("init_lora_weights"), JsonText(*start));
    }
  }
  for (const auto& [key, value] : json.items()) {
    if (std::find(kKnownKeys.begin(), kKnownKeys.end(), key) != kKnownKeys.end() || IsUnset(value)) continue;
    ThrowInvalid("{} is {}, which is not supported; supported: plain LoRA on linear layers",
                 fields.Where(Quoted(key).c_str()), JsonText(value));
  }
}

// A tensor's name taken apart: "base_model.model." + module + ".lora_A.weight".
struct AdapterTensorName {
  std::string module;
  bool is_a = false;
};

AdapterTensorName ParseName(const Tensor& tensor) {
  constexpr std::string_view kPrefix = "base_model.model.", kA = ".lora_A.weight", kB = ".lora_B.weight";
  std::string_view name = tensor.name;
  for (const auto& [part, what] : {std::pair("lora_magnitude_vector", "DoRA"),
                                   {"lora_embedding", "LoRA on embeddings"},
                                   {"modules_to_save", "modules_to_save"},
                                   {".bias", "trained biases"}}) {
    if (name.find(part) != std::string_view::npos) {
      ThrowInvalid("{}: the tensor {} belongs to {}, which is not supported; supported: plain LoRA on linear layers",
                   tensor.file, Quoted(name), what);
    }
  }
  if (!name.starts_with(kPrefix) || !(name.ends_with(kA) || name.ends_with(kB))) {
    ThrowInvalid(
        "{}: the tensor {} is not one of PEFT's LoRA; allowed: base_model.model.MODULE.lora_A.weight and "
        ".lora_B.weight",
        tensor.file, Quoted(name));
  }
  const bool is_a = name.ends_with(kA);
  name.remove_prefix(kPrefix.size());
  name.remove_suffix(kA.size());
  return {std::string(name), is_a};
}

bool IsKnownModule(std::string_view module) {
  constexpr std::string_view kPrefix = "model.layers.";
  if (!module.starts_with(kPrefix)) return false;
  module.remove_prefix(kPrefix.size());
  const size_t dot = module.find('.');
  return dot != std::string_view::npos &&
         std::find(kModules.begin(), kModules.end(), module.substr(dot + 1)) != kModules.end();
}

std::string ShapeText(const Tensor& tensor) { return fmt::format("[{}]", fmt::join(tensor.shape, ", ")); }

}  // namespace

std::vector<float> ReadLowRank(const Tensor& tensor) {
  const int64_t count = tensor.shape[0] * tensor.shape[1];
  std::vector<float> out(static_cast<size_t>(count));
  Dequantize(tensor.type, tensor.data, count, out.data());
  return out;
}

bool IsAdapterFolder(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / kConfigName, ignored);
}

std::unique_ptr<Adapter> Adapter::Open(const fs::path& folder, const Base& base) {
  std::error_code ignored;
  std::unique_ptr<Adapter> adapter(new Adapter);
  adapter->path_ = folder.string();
  if (!fs::is_directory(folder, ignored)) {
    ThrowInvalid("{} is {}, which is no folder; give the folder that holds {}", Option{"adapter"},
                 Quoted(adapter->path_, kQuotedPath), kConfigName);
  }
  if (!IsAdapterFolder(folder)) {
    ThrowInvalid("{}: has no {}: give the folder of a LoRA adapter in PEFT's form", adapter->path_, kConfigName);
  }
  if (!fs::exists(folder / kWeightsName, ignored)) {
    const bool old = fs::exists(folder / "adapter_model.bin", ignored);
    ThrowInvalid("{}: has no {}{}", adapter->path_, kWeightsName,
                 old ? ", only adapter_model.bin: save it again with a PEFT of today" : ": fetch it");
  }
  const std::string config_path = (folder / kConfigName).string();
  const Json json = ReadJsonFile(config_path, kMaxConfigBytes);
  const JsonFields fields(json, config_path);
  RefuseWhatWeDoNotCompute(json, fields);
  adapter->base_model_ = fields.String("base_model_name_or_path").value_or("");
  adapter->file_ = std::make_unique<MappedFile>(folder / kWeightsName);
  adapter->ReadTensors(base);

  const int32_t rank = fields.Int("r", 1, kMaxRank).value_or(8);
  const double alpha = fields.Float("lora_alpha", 0, kMaxAlpha).value_or(8);
  const bool root = fields.Bool("use_rslora").value_or(false);
  const NumberPattern ranks(fields, "rank_pattern", 1, static_cast<double>(kMaxRank));
  const NumberPattern alphas(fields, "alpha_pattern", 0, kMaxAlpha);
  for (auto& [name, matrix] : adapter->matrices_) {
    const std::string module = name.substr(0, name.size() - std::string_view(".weight").size());
    const double expected = ranks.Find(module).value_or(rank);
    if (static_cast<double>(matrix.rank()) != expected) {
      ThrowInvalid("{}: the tensor {} at offset {} has the rank {}; {} says {}", matrix.a.file, Quoted(matrix.a.name),
                   matrix.a.file_offset, matrix.rank(), kConfigName, expected);
    }
    const double strength = alphas.Find(module).value_or(alpha);
    const auto width = static_cast<double>(matrix.rank());
    matrix.scale = static_cast<float>(strength / (root ? std::sqrt(width) : width));
  }
  // An adapter of a model with fewer layers has the right shapes and would change only the first of ours.
  const Targets targets(fields);
  for (int32_t layer = 0; layer < base.num_layers; ++layer) {
    for (const char* part : kModules) {
      const std::string module = fmt::format("model.layers.{}.{}", layer, part);
      if (targets.Has(module) && adapter->Find(module + ".weight") == nullptr) {
        ThrowInvalid("{} covers {}, but {} has no tensors for it: it is cut, or of another model than {}",
                     targets.where(), module, kWeightsName, base.path);
      }
    }
  }
  if (fs::exists(folder / "phsa.json", ignored)) {
    adapter->phsa_settings_ = ReadTextFile(folder / "phsa.json", kMaxSettingsBytes);
    if (adapter->phsa_settings_.empty()) {
      ThrowInvalid("{}: is empty; remove it, or write the attention's settings into it",
                   (folder / "phsa.json").string());
    }
  }
  return adapter;
}

void Adapter::ReadTensors(const Base& base) {
  struct Pair {
    std::optional<Tensor> a, b;
  };
  std::map<std::string, Pair> pairs;
  for (Tensor& tensor : ReadSafetensors(*file_)) {
    const AdapterTensorName name = ParseName(tensor);
    if (!IsKnownModule(name.module)) {
      ThrowInvalid("{}: the tensor {} changes {}; supported: {} of model.layers.N", tensor.file, Quoted(tensor.name),
                   Quoted(name.module), fmt::join(kModules, ", "));
    }
    if (tensor.shape.size() != 2 || tensor.shape[name.is_a ? 0 : 1] > kMaxRank) {
      ThrowInvalid("{}: the tensor {} at offset {} has the shape {}; allowed: two dimensions, a rank of at most {}",
                   tensor.file, Quoted(tensor.name), tensor.file_offset, ShapeText(tensor), kMaxRank);
    }
    Pair& pair = pairs[name.module];
    (name.is_a ? pair.a : pair.b) = std::move(tensor);
  }
  if (pairs.empty()) ThrowInvalid("{}: has no tensors", file_->path());
  for (auto& [module, pair] : pairs) {
    if (!pair.a || !pair.b) {
      const Tensor& there = pair.a ? *pair.a : *pair.b;
      ThrowInvalid("{}: has the tensor {}, but not its other half, lora_{}: the file is not whole", there.file,
                   Quoted(there.name), pair.a ? "B" : "A");
    }
    const std::string name = module + ".weight";
    const std::vector<int64_t> wanted = base.shape(name);
    if (wanted.empty()) {
      ThrowInvalid("{}: changes {}, which the model {} does not have: the adapter is of another model", file_->path(),
                   Quoted(module), base.path);
    }
    const int64_t rank = pair.a->shape[0];
    if (wanted.size() != 2 || pair.a->shape[1] != wanted[1] || pair.b->shape != std::vector<int64_t>{wanted[0], rank}) {
      ThrowInvalid(
          "{}: the tensors of {} have the shapes {} and {}; they do not fit the model's [{}]: the adapter is of "
          "another model than {}",
          file_->path(), Quoted(module), ShapeText(*pair.a), ShapeText(*pair.b), fmt::join(wanted, ", "), base.path);
    }
    matrices_.emplace(name, LowRankTensors{std::move(*pair.a), std::move(*pair.b)});
  }
}

const LowRankTensors* Adapter::Find(std::string_view name) const {
  const auto found = matrices_.find(name);
  return found == matrices_.end() ? nullptr : &found->second;
}

std::string Adapter::Text() const {
  std::set<int64_t> ranks;
  std::set<std::string> types;
  for (const auto& [name, matrix] : matrices_) {
    ranks.insert(matrix.rank());
    types.insert(TensorTypeName(matrix.a.type));
    types.insert(TensorTypeName(matrix.b.type));
  }
  return fmt::format("LoRA, rank {}, {} matrices, {}", fmt::join(ranks, ", "), matrices_.size(),
                     fmt::join(types, ", "));
}

}  // namespace phsa
