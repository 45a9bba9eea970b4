// `phsa info`: what a model's files say of it (reads the headers, not the weights), and on what models can run here.
#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/as_given.h"
#include "base/errors.h"
#include "base/memory.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "engine/attention_choice.h"
#include "engine/device_choice.h"
#include "eval/speed.h"
#include "io/model_source.h"
#include "io/model_store.h"
#include "model/cuda/cuda_backend.h"
#include "model/cuda/weight_layout.h"
#include "model/kv_cache.h"
#include "model/weights.h"

namespace phsa::cli {
namespace {

using Json = nlohmann::ordered_json;

struct InfoFlags {
  std::string model, adapter;
  bool tensors = false, metadata = false, json = false;
};

struct TypeCount {
  int64_t tensors = 0;
  uint64_t bytes = 0;
};

struct Sizes {
  int64_t parameters = 0;
  std::map<std::string, TypeCount> types;
};

int64_t Elements(const Tensor& tensor) {
  int64_t out = 1;
  for (const int64_t size : tensor.shape) out *= size;
  return out;
}

Sizes SizesOf(const ModelSource& source) {
  Sizes out;
  for (const Tensor* tensor : source.Tensors()) {
    out.parameters += Elements(*tensor);
    TypeCount& type = out.types[TensorTypeName(tensor->type)];
    ++type.tensors;
    type.bytes += tensor->bytes;
  }
  return out;
}

const char* ScalingName(RopeScaling::Kind kind) {
  switch (kind) {
    case RopeScaling::Kind::kNone: return "none";
    case RopeScaling::Kind::kLinear: return "linear";
    case RopeScaling::Kind::kLlama3: return "llama3";
    case RopeScaling::Kind::kYarn: return "yarn";
    case RopeScaling::Kind::kLongRope: return "longrope";
  }
  return "unknown";
}

std::string RopeText(const ModelConfig& config) {
  const RopeScaling& scaling = config.rope_scaling;
  std::string out = fmt::format("base {}", config.rope_base);
  if (scaling.kind == RopeScaling::Kind::kLongRope) {
    return out + fmt::format(", longrope, with other factors where the context (-c) is above {} tokens",
                             scaling.original_context);
  }
  if (scaling.kind != RopeScaling::Kind::kNone) {
    out += fmt::format(", {} scaling by {}", ScalingName(scaling.kind), scaling.factor);
    if (scaling.original_context > 0) out += fmt::format(" from {} tokens", scaling.original_context);
  }
  if (!scaling.frequency_factors.empty()) out += ", with a factor per frequency";
  return out;
}

std::string TokenizerText(const ModelSource& source) {
  if (const auto& gguf = source.gguf_tokenizer()) {
    return fmt::format("{} ({}), {} tokens, {} merges", Quoted(gguf->model), Quoted(gguf->pre), gguf->tokens.size(),
                       gguf->merges.size());
  }
  return source.tokenizer_json() ? source.tokenizer_json()->string() : "none";
}

std::string SamplingText(const ModelConfig& config) {
  std::vector<std::string> parts;
  const auto add = [&](const char* name, const auto& value) {
    if (value) parts.push_back(fmt::format("{} {}", name, *value));
  };
  add("temperature", config.temperature);
  add("top-k", config.top_k);
  add("top-p", config.top_p);
  add("min-p", config.min_p);
  add("repetition penalty", config.repetition_penalty);
  return parts.empty() ? "nothing recommended" : fmt::format("{}", fmt::join(parts, ", "));
}

// A packaged model's file may have been made from one with another name.
std::string NameText(const ModelSource& source) {
  for (const PackagedModel& model : PackagedModels()) {
    if (CachedModel(model) != source.path()) continue;
    return fmt::format("{}; its file says {}", model.description.substr(0, model.description.find(',')),
                       Quoted(source.config().name));
  }
  return Quoted(source.config().name);
}

// "K 8, lambda 0.75": what differs from `base`; all of it where there is no base.
std::string SettingsText(const Settings& settings, const Settings* base) {
  std::vector<std::string> parts;
  const auto add = [&](const char* name, const auto& value, const auto* usual) {
    if (usual == nullptr || value != *usual) parts.push_back(fmt::format("{}{}", name, value));
  };
  const auto of = [&](auto member) { return base == nullptr ? nullptr : &(base->*member); };
  const std::string policy = Name(settings.policy), usual_policy = base == nullptr ? "" : Name(base->policy);
  const std::string reduce = Name(settings.group_reduce),
                    usual_reduce = base == nullptr ? "" : Name(base->group_reduce);
  add("", policy, base == nullptr ? nullptr : &usual_policy);
  add("blocks of ", settings.block_size, of(&Settings::block_size));
  add("K ", settings.top_k, of(&Settings::top_k));
  if (settings.parts > 1 || (base != nullptr && base->parts > 1)) add("parts ", settings.parts, of(&Settings::parts));
  if (settings.parts > 1) add("survivors ", settings.survivors, of(&Settings::survivors));
  add("init ", settings.init_tokens, of(&Settings::init_tokens));
  add("local ", settings.local_tokens, of(&Settings::local_tokens));
  if (!settings.head_lambda.empty()) {
    if (base == nullptr || settings.head_lambda != base->head_lambda) {
      parts.push_back(fmt::format("lambda per KV head {}", fmt::join(settings.head_lambda, " ")));
    }
  } else if (base == nullptr || settings.lambda != base->lambda || !base->head_lambda.empty()) {
    parts.push_back(fmt::format("lambda {}", settings.lambda));
  }
  add("punctuation ", Quoted(settings.punctuation), static_cast<const std::string*>(nullptr));
  if (base != nullptr && settings.punctuation == base->punctuation) parts.pop_back();
  add("groups by ", reduce, base == nullptr ? nullptr : &usual_reduce);
  add("dense below ", settings.dense_below, of(&Settings::dense_below));
  return parts.empty() ? "as all" : fmt::format("{}", fmt::join(parts, ", "));
}

// One line for all layers, and one for each run of layers that have others in common.
std::vector<std::string> SettingsLines(const std::string& json) {
  LayerSettings all;
  try {
    all = SettingsFromJson(json);
  } catch (const Error& error) {
    return {fmt::format("{}: {}", Quoted(json), error.what())};
  }
  std::vector<std::string> lines = {SettingsText(all.base, nullptr)};
  for (auto first = all.layers.begin(); first != all.layers.end();) {
    auto last = first;
    auto next = std::next(first);
    for (; next != all.layers.end() && next->first == last->first + 1 && next->second == first->second; ++next)
      last = next;
    const std::string layers =
        first == last ? fmt::format("layer {}", first->first) : fmt::format("layers {}-{}", first->first, last->first);
    lines.push_back(fmt::format("{}: {}", layers, SettingsText(first->second, &all.base)));
    first = next;
  }
  return lines;
}

// What running the model takes, by the kinds of weights and of the cache; nothing is loaded for it.
struct Memory {
  std::vector<std::pair<WeightsMode, WeightsSize>> cpu;
  std::vector<std::pair<WeightsMode, uint64_t>> gpu;
  std::string no_gpu;  // why no GPU can run it; empty: one can
  // Of 1,000 tokens, by the type of keys and values; what --attention phsa adds is of 16 bits beside 8-bit ones.
  uint64_t cache = 0, cache_f32 = 0, cache_int8 = 0;
  uint64_t representatives = 0, representatives_f32 = 0;
};

Memory MemoryOf(const ModelSource& source) {
  const ModelConfig& config = source.config();
  Memory out;
  for (const WeightsMode mode : {WeightsMode::kAuto, WeightsMode::kInt8, WeightsMode::kBf16, WeightsMode::kF32}) {
    out.cpu.emplace_back(mode, SizeOfWeights(source, mode));
  }
  for (const WeightsMode mode : {WeightsMode::kBf16, WeightsMode::kInt8}) {
    BackendOptions options;
    options.weights = mode;
    options.kv_dtype = PHSA_BF16;
    const std::string why = cuda::UnsupportedModel(config, options);
    if (why.empty()) {
      out.gpu.emplace_back(mode, cuda::WeightLayout(source, mode, nullptr).bytes);
    } else if (mode == WeightsMode::kBf16) {
      out.no_gpu = why;
    }
  }
  const LayerSettings phsa = ResolveAttention({.policy = "phsa"}, config, config.context);
  const auto of_thousand = [](size_t page_bytes) { return uint64_t{page_bytes} * 1000 / kPageTokens; };
  const PageLayout half(config, phsa, PHSA_BF16), whole(config, phsa, PHSA_F32), codes(config, phsa, PHSA_INT8);
  out.representatives = of_thousand(half.representative_bytes);
  out.representatives_f32 = of_thousand(whole.representative_bytes);
  out.cache = of_thousand(half.page_bytes) - out.representatives;
  out.cache_f32 = of_thousand(whole.page_bytes) - out.representatives_f32;
  out.cache_int8 = of_thousand(codes.page_bytes) - of_thousand(codes.representative_bytes);
  return out;
}

template <class Line>
void MemoryLines(const ModelSource& source, const Line& line) {
  Memory memory;
  try {
    memory = MemoryOf(source);
  } catch (const Error& error) {
    return line("memory", fmt::format("unknown: {}", error.what()));
  }
  const char* name = "memory";
  for (const auto& [mode, size] : memory.cpu) {
    const std::string in_file =
        size.file_bytes == 0
            ? ""
            : fmt::format("; experts, {}, stay in the file where memory is short", BytesInWords(size.file_bytes));
    line(std::exchange(name, ""), fmt::format("weights, --weights {:<4} {:>9} ({}){}", Name(mode),
                                              BytesInWords(size.bytes), size.types, in_file));
  }
  for (const auto& [mode, bytes] : memory.gpu) {
    line("", fmt::format("on a GPU, --weights {:<4} {:>8}", Name(mode), BytesInWords(bytes)));
  }
  if (!memory.no_gpu.empty()) line("", fmt::format("on no GPU: {}", memory.no_gpu));
  line("", fmt::format("cache of 1,000 tokens {} (16 bits; f32 {}; int8, on the CPU, {})", BytesInWords(memory.cache),
                       BytesInWords(memory.cache_f32), BytesInWords(memory.cache_int8)));
  line("", fmt::format("and {} (f32 {}) with --attention phsa", BytesInWords(memory.representatives),
                       BytesInWords(memory.representatives_f32)));
}

Json MemoryJson(const ModelSource& source) {
  Memory memory;
  try {
    memory = MemoryOf(source);
  } catch (const Error&) {
    return nullptr;
  }
  Json out;
  for (const auto& [mode, size] : memory.cpu) {
    out["weights"][Name(mode)] = {{"bytes", size.bytes}, {"types", size.types}, {"experts_in_file", size.file_bytes}};
  }
  out["gpu_weights"] = Json::object();
  for (const auto& [mode, bytes] : memory.gpu) out["gpu_weights"][Name(mode)] = {{"bytes", bytes}};
  out["no_gpu"] = memory.no_gpu.empty() ? Json(nullptr) : Json(memory.no_gpu);
  out["cache_of_1000_tokens"] = {{"bf16", memory.cache}, {"f32", memory.cache_f32}, {"int8", memory.cache_int8}};
  out["representatives_of_1000_tokens"] = {
      {"bf16", memory.representatives}, {"f32", memory.representatives_f32}, {"int8", memory.representatives}};
  return out;
}

void PrintText(const ModelSource& source, const InfoFlags& flags) {
  const ModelConfig& config = source.config();
  const Sizes sizes = SizesOf(source);
  std::string out;
  const auto line = [&](const char* name, const std::string& value) { out += fmt::format("{:<14} {}\n", name, value); };
  line("path", source.path());
  line("format", fmt::format("{}, {}", source.format(), BytesInWords(source.file_bytes())));
  line("name", NameText(source));
  line("architecture", fmt::format("{}, {} layers, {} wide, feed-forward {}", config.architecture, config.num_layers,
                                   config.hidden, config.intermediate));
  line("attention",
       fmt::format("{} query heads, {} KV heads of {}", config.num_q_heads, config.num_kv_heads, config.head_dim));
  if (const std::string special = SpecialSteps(config); !special.empty()) line("with", special);
  const auto has_window = [](const LayerTraits& layer) { return layer.window > 0; };
  if (const auto first = std::find_if(config.layers.begin(), config.layers.end(), has_window);
      first != config.layers.end()) {
    line("windows", fmt::format("{} of {} layers, of {} tokens",
                                std::count_if(config.layers.begin(), config.layers.end(), has_window),
                                config.num_layers, first->window));
  }
  if (config.num_experts > 0) {
    line("experts", fmt::format("{}, of which a token takes {}, feed-forward {}", config.num_experts,
                                config.experts_per_token, config.expert_width));
  }
  line("parameters", fmt::format("{:.1f} million", static_cast<double>(sizes.parameters) / 1e6));
  line("context", fmt::format("{} tokens", config.context));
  line("RoPE", RopeText(config));
  line("vocabulary", fmt::format("{}, embeddings {}", config.vocab_size, config.tied_embeddings ? "tied" : "untied"));
  line("tokenizer", TokenizerText(source));
  line("end tokens", config.eos_ids.empty() ? "none" : fmt::format("{}", fmt::join(config.eos_ids, ", ")));
  line("chat template", source.chat_template().empty() ? "none" : Quoted(source.chat_template()));
  line("sampling", SamplingText(config));
  if (config.phsa_settings.empty()) {
    line("PHSA settings", "none");
  } else {
    const char* name = "PHSA settings";
    for (const std::string& text : SettingsLines(config.phsa_settings)) line(std::exchange(name, ""), text);
  }
  if (const auto tested = TestedTokens(config)) line("tested with", fmt::format("texts of up to {} tokens", *tested));
  if (const Adapter* const adapter = source.adapter()) {
    line("adapter", Quoted(adapter->path(), kQuotedPath));
    line("", fmt::format("{}, {}", adapter->Text(), BytesInWords(adapter->file_bytes())));
    line("", adapter->base_model().empty() ? "names no base model" : "made for " + Quoted(adapter->base_model()));
  }
  for (const auto& [type, count] : sizes.types) {
    line("tensors", fmt::format("{:<5} {:>5}, {}", type, count.tensors, BytesInWords(count.bytes)));
  }
  MemoryLines(source, line);
  if (flags.metadata) {
    out += "\n";
    for (const auto& [key, value] : source.Metadata()) out += fmt::format("{} = {}\n", Quoted(key), value);
  }
  if (flags.tensors) {
    out += "\n";
    for (const Tensor* tensor : source.Tensors()) {
      out += fmt::format("{:<5} [{}] {} at {} {}\n", TensorTypeName(tensor->type), fmt::join(tensor->shape, ", "),
                         tensor->bytes, tensor->file_offset, Quoted(tensor->name));
    }
  }
  WriteOut(out);
}

Json OrNull(const std::optional<int32_t>& value) { return value ? Json(*value) : Json(nullptr); }
Json OrNull(const std::optional<float>& value) { return value ? Json(AsGiven(*value)) : Json(nullptr); }

void PrintJson(const ModelSource& source, const InfoFlags& flags) {
  const ModelConfig& config = source.config();
  const RopeScaling& scaling = config.rope_scaling;
  const Sizes sizes = SizesOf(source);
  Json out;
  out["path"] = source.path();
  out["format"] = source.format();
  out["bytes"] = source.file_bytes();
  out["name"] = config.name;
  out["architecture"] = config.architecture;
  out["parameters"] = sizes.parameters;
  out["layers"] = config.num_layers;
  out["hidden"] = config.hidden;
  out["intermediate"] = config.intermediate;
  out["query_heads"] = config.num_q_heads;
  out["kv_heads"] = config.num_kv_heads;
  out["head_dim"] = config.head_dim;
  out["context"] = config.context;
  out["vocab_size"] = config.vocab_size;
  out["tied_embeddings"] = config.tied_embeddings;
  out["windows"] = Json::array();  // of each layer, 0: none; empty: none has one
  for (const LayerTraits& layer : config.layers) out["windows"].push_back(layer.window);
  out["experts"] = config.num_experts;
  out["rms_eps"] = AsGiven(config.rms_eps);
  out["rope"] = {{"base", AsGiven(config.rope_base)},
                 {"scaling", ScalingName(scaling.kind)},
                 {"factor", AsGiven(scaling.factor)},
                 {"original_context", scaling.original_context},
                 {"frequency_factors", !scaling.frequency_factors.empty()}};
  if (const auto& gguf = source.gguf_tokenizer()) {
    out["tokenizer"] = {
        {"model", gguf->model}, {"pre", gguf->pre}, {"tokens", gguf->tokens.size()}, {"merges", gguf->merges.size()}};
  } else {
    out["tokenizer"] = source.tokenizer_json() ? Json{{"file", source.tokenizer_json()->string()}} : Json(nullptr);
  }
  out["eos_ids"] = config.eos_ids;
  out["chat_template"] = source.chat_template().empty() ? Json(nullptr) : Json(source.chat_template());
  out["sampling"] = {{"temperature", OrNull(config.temperature)},
                     {"top_k", OrNull(config.top_k)},
                     {"top_p", OrNull(config.top_p)},
                     {"min_p", OrNull(config.min_p)},
                     {"repetition_penalty", OrNull(config.repetition_penalty)}};
  out["phsa_settings"] = config.phsa_settings.empty() ? Json(nullptr) : Json(config.phsa_settings);
  out["tested_tokens"] = OrNull(TestedTokens(config));
  if (const Adapter* const adapter = source.adapter()) {
    out["adapter"] = {{"path", adapter->path()},
                      {"base_model", adapter->base_model()},
                      {"matrices", adapter->matrices().size()},
                      {"bytes", adapter->file_bytes()}};
  } else {
    out["adapter"] = nullptr;
  }
  for (const auto& [type, count] : sizes.types) {
    out["tensor_types"][type] = {{"tensors", count.tensors}, {"bytes", count.bytes}};
  }
  out["memory"] = MemoryJson(source);
  if (flags.metadata) {
    for (const auto& [key, value] : source.Metadata()) out["metadata"][key] = value;
  }
  if (flags.tensors) {
    for (const Tensor* tensor : source.Tensors()) {
      out["tensors"].push_back({{"name", tensor->name},
                                {"type", TensorTypeName(tensor->type)},
                                {"shape", tensor->shape},
                                {"bytes", tensor->bytes},
                                {"offset", tensor->file_offset}});
    }
  }
  // What a file calls itself need not be UTF-8.
  WriteOut(out.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
}

// The devices that --device takes.
void PrintDevices(bool json) {
  const std::string cpu = CpuName(), unavailable = cuda::Unavailable();
  const uint64_t memory = AvailableMemory();
  const std::vector<cuda::Device> gpus = cuda::Devices();
  if (json) {
    Json out;
    out["version"] = PHSA_VERSION;
    out["devices"] = Json::array({{{"device", "cpu"}, {"name", cpu}, {"available_bytes", memory}}});
    for (size_t i = 0; i < gpus.size(); ++i) {
      out["devices"].push_back(
          {{"device", fmt::format("cuda:{}", i)}, {"name", gpus[i].name}, {"bytes", gpus[i].memory_bytes}});
    }
    out["cuda"] = unavailable.empty() ? Json("available") : Json(unavailable);
    WriteOut(out.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
    return;
  }
  std::string out = fmt::format("phsa {}\n{:<8} {}, {} available\n", PHSA_VERSION, "cpu", cpu, BytesInWords(memory));
  for (size_t i = 0; i < gpus.size(); ++i) {
    out += fmt::format("{:<8} {}, {}\n", fmt::format("cuda:{}", i), gpus[i].name, BytesInWords(gpus[i].memory_bytes));
  }
  if (!unavailable.empty()) out += fmt::format("{:<8} not available: {}\n", "cuda", unavailable);
  WriteOut(out);
}

}  // namespace

void AddInfoCommand(CLI::App& app) {
  const auto flags = std::make_shared<InfoFlags>();
  CLI::App* command = app.add_subcommand("info", "what a model's files say of it; without a model, the devices here");
  command->add_option("MODEL", flags->model,
                      "a .gguf file, a Hugging Face folder, or a name that `phsa models` lists; none: the devices");
  AddAdapterFlag(*command, flags->adapter);
  command->add_flag("--tensors", flags->tensors, "list the tensors");
  command->add_flag("--metadata", flags->metadata, "list the metadata");
  command->add_flag("--json", flags->json, "one JSON object");
  command->callback([flags] {
    if (flags->model.empty()) {
      if (!flags->adapter.empty() || flags->tensors || flags->metadata) {
        ThrowInvalid("info: --adapter, --tensors and --metadata are about a MODEL; give one");
      }
      return PrintDevices(flags->json);
    }
    const std::unique_ptr<ModelSource> source = OpenModel(flags->model, flags->adapter);
    flags->json ? PrintJson(*source, *flags) : PrintText(*source, *flags);
  });
}

}  // namespace phsa::cli
