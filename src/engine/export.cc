#include "engine/export.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include "base/errors.h"
#include "base/mapped_file.h"
#include "base/new_file.h"
#include "engine/attention_choice.h"
#include "engine/engine.h"
#include "io/architecture.h"
#include "io/gguf.h"
#include "io/gguf_names.h"
#include "io/hf_config.h"
#include "io/json.h"
#include "io/model_store.h"
#include "io/model_writer.h"
#include "model/rope.h"
#include "model/weights.h"
#include "phsa/punctuation.h"
#include "tokenizer/convert.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxJsonBytes = size_t{512} << 20;
constexpr int64_t kStripBytes = int64_t{16} << 20;  // of f32 in memory at once

// A GGUF file's texts need not be UTF-8.
std::string JsonFileText(const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"; }

// A tensor of the output, and the one of the model that it is made of.
struct Item {
  OutputTensor output;
  const ModelTensor* from = nullptr;  // null: `values`
  std::vector<float> values;
};

// The numbers of one matrix or vector in Hugging Face's order, with the adapter's part in them.
class MergedRows {
 public:
  MergedRows(const ModelTensor& tensor, const ModelSource& source) : tensor_(tensor), config_(source.config()) {
    const Adapter* const adapter = source.adapter();
    const LowRankTensors* const found = adapter != nullptr ? adapter->Find(tensor.name) : nullptr;
    if (found == nullptr) return;
    rank_ = found->rank();
    a_ = ReadLowRank(found->a);
    b_ = ReadLowRank(found->b);
    for (float& value : b_) value *= found->scale;
  }

  // out: [cols] of Hugging Face's row `row`.
  void Read(int64_t row, float* out) const {
    const Tensor& file = *tensor_.tensor;
    const int64_t cols = tensor_.cols;
    if (tensor_.rows == 0) {
      std::vector<float> values(static_cast<size_t>(cols));
      Dequantize(file.type, file.data, cols, values.data());
      for (int64_t i = 0; i < cols; ++i) out[i] = values[static_cast<size_t>(FileRow(tensor_, config_, i))];
      return;
    }
    const auto row_bytes =
        static_cast<int64_t>(TensorTypeBlockBytes(file.type)) * (cols / TensorTypeBlockElements(file.type));
    Dequantize(file.type, file.data + FileRow(tensor_, config_, row) * row_bytes, cols, out);
    for (int64_t k = 0; k < rank_; ++k) {
      const float factor = b_[static_cast<size_t>(row * rank_ + k)];
      const float* const a = a_.data() + k * cols;
      for (int64_t c = 0; c < cols; ++c) out[c] += factor * a[c];
    }
  }

 private:
  const ModelTensor& tensor_;
  const ModelConfig& config_;
  int64_t rank_ = 0;
  std::vector<float> a_, b_;
};

// GGUF stores q and k of Llama and its like for RoPE over neighbours: the inverse of FileRow.
int64_t RowForGguf(const ModelTensor& tensor, const ModelConfig& config, int64_t row) {
  const bool turned =
      ArchitectureOf(config).gguf_interleaves_rope_rows &&
      (tensor.name.find("q_proj") != std::string::npos || tensor.name.find("k_proj") != std::string::npos);
  if (!turned) return row;
  const int64_t half = config.head_dim / 2, head = row / config.head_dim, i = row % config.head_dim;
  return head * config.head_dim + i / 2 + (i % 2) * half;
}

// Settings as a model carries them: complete, and with the ids in place of a file of punctuation.
std::string Carriable(const ModelSource& source, const std::string& settings) {
  SettingsFromJson(settings);  // judges it
  Json json = Json::parse(settings);
  const std::vector<std::string> sets = PunctuationSetNames();
  const auto name = json.find("punctuation");
  if (name != json.end() && name->is_string() &&
      std::find(sets.begin(), sets.end(), name->get<std::string>()) == sets.end()) {
    *name = PunctuationOf(LoadTokenizer(source), name->get<std::string>()).Ids();
  }
  ModelConfig config = source.config();
  config.phsa_settings = json.dump();
  return CarriedSettings(config);
}

// As phsa.hf.enable leaves them: with the ids of the punctuation, so that no tokenizer is needed.
template <class AnyJson>
void AddToConfig(const ModelSource& source, const std::string& carried, AnyJson* config) {
  AnyJson settings = AnyJson::parse(carried);
  config->erase("phsa_punctuation_ids");
  if (settings["punctuation"].is_array()) {
    (*config)["phsa_punctuation_ids"] = std::exchange(settings["punctuation"], "custom");
  } else if (source.gguf_tokenizer() || source.tokenizer_json()) {
    (*config)["phsa_punctuation_ids"] =
        PunctuationOf(LoadTokenizer(source), settings["punctuation"].template get<std::string>()).Ids();
  }
  (*config)["phsa"] = std::move(settings);
}

class Exporter {
 public:
  Exporter(const ModelSource& source, const ExportOptions& options, ThreadPool& threads)
      : source_(source), config_(source.config()), options_(options), threads_(threads) {
    tensors_ = ModelTensors(source);
    const TensorType own = tensors_.front().tensor->type;  // the embedding's
    const bool plain = own == TensorType::kF32 || own == TensorType::kF16 || own == TensorType::kBf16;
    type_ = options.type.value_or(plain ? own : TensorType::kF16);
    carried_ = options.settings.empty() ? CarriedSettings(config_) : Carriable(source, options.settings);
  }

  bool ToFolder(const fs::path& out) {
    CheckPlace(out, options_.replace);
    NewFolder folder(out, options_.replace);
    const auto write = [&](const char* name, const std::string& text) {
      NewFile file(folder.place() / name);
      file.Write(text);
      file.Keep();
    };
    const fs::path own = source_.path();
    const bool from_folder = fs::is_directory(own);
    write("config.json", JsonFileText(ConfigJson(from_folder)));
    if (from_folder) {
      for (const char* name :
           {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
            "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"}) {
        if (fs::exists(own / name)) write(name, ReadTextFile(own / name, kMaxJsonBytes));
      }
    } else {
      const BpeVocabulary vocabulary = GgufVocabulary(source_);
      write("generation_config.json", JsonFileText(MakeHfGenerationConfig(config_, vocabulary.bos)));
      write("tokenizer.json", TokenizerJson(vocabulary, source_.path()));
      write("tokenizer_config.json", JsonFileText(TokenizerConfigJson(vocabulary)));
    }
    std::vector<Item> items;
    for (const ModelTensor& tensor : tensors_)
      items.push_back({{tensor.name, type_, tensor.tensor->shape}, &tensor, {}});
    NewFile file(folder.place() / "model.safetensors");
    file.Write(SafetensorsHeader(Outputs(items)));
    if (!WriteData(file, items, 1)) return false;
    file.Keep();
    folder.Keep();
    return true;
  }

  bool ToGguf(const fs::path& out) {
    if (fs::exists(out) && !options_.replace) ThrowInvalid("{}: is there already; --force replaces it", out.string());
    const std::string architecture(ArchitectureOf(config_).gguf);
    GgufHeader header;
    header.AddText("general.architecture", architecture);
    header.AddText("general.type", "model");
    header.AddText("general.name", config_.name);
    header.AddInteger("general.file_type", FileType());
    header.AddInteger("general.quantization_version", 2);
    AddConfig(header);
    AddTokenizer(header);
    if (!carried_.empty()) header.AddText("phsa.settings", carried_);

    std::vector<Item> items;
    const std::vector<float> divisors = FrequencyDivisors();
    if (!divisors.empty()) {
      const auto size = static_cast<int64_t>(divisors.size());
      items.push_back({{"rope_freqs.weight", TensorType::kF32, {size}}, nullptr, divisors});
    }
    for (const ModelTensor& tensor : tensors_) {
      // llama.cpp wants vectors in f32, and keeps what has no whole blocks in f16.
      TensorType type = tensor.rows == 0 ? TensorType::kF32 : type_;
      if (tensor.cols % TensorTypeBlockElements(type) != 0) type = TensorType::kF16;
      items.push_back({{GgufName(ArchitectureOf(config_), tensor.name), type, tensor.tensor->shape}, &tensor, {}});
    }
    NewFile file(out);
    file.Write(header.Finish(Outputs(items)));
    if (!WriteData(file, items, kGgufAlignment)) return false;
    file.Keep();
    return true;
  }

 private:
  // --force replaces a model, and not somebody's folder of something else.
  static void CheckPlace(const fs::path& out, bool replace) {
    if (!fs::exists(out) || !fs::is_directory(out)) return;
    if (!replace) ThrowInvalid("{}: is there already; --force replaces it", out.string());
    if (!fs::is_empty(out) && !fs::exists(out / "config.json")) {
      ThrowInvalid("{}: is a folder without config.json, and not a model that could be replaced; give another place",
                   out.string());
    }
  }

  static std::vector<OutputTensor> Outputs(const std::vector<Item>& items) {
    std::vector<OutputTensor> outputs;
    for (const Item& item : items) outputs.push_back(item.output);
    return outputs;
  }

  bool WriteData(NewFile& file, const std::vector<Item>& items, uint64_t alignment) {
    uint64_t total = 0, done = 0;
    for (const Item& item : items) total += item.output.bytes();
    for (const Item& item : items) {
      if (item.from == nullptr) {
        file.Write(item.values.data(), item.values.size() * sizeof(float));
      } else if (!WriteTensor(file, item, [&](uint64_t bytes) {
                   done += bytes;
                   return !options_.progress ||
                          options_.progress(static_cast<double>(done) / static_cast<double>(total));
                 })) {
        return false;
      }
      const uint64_t rest = item.output.bytes() % alignment;
      if (rest != 0) file.Write(std::string(alignment - rest, '\0'));
    }
    return true;
  }

  template <class Progress>
  bool WriteTensor(NewFile& file, const Item& item, const Progress& progress) {
    const ModelTensor& tensor = *item.from;
    const MergedRows merged(tensor, source_);
    const int64_t rows = std::max<int64_t>(tensor.rows, 1), cols = tensor.cols;
    const TensorType type = item.output.type;
    const int64_t row_bytes = cols / TensorTypeBlockElements(type) * static_cast<int64_t>(TensorTypeBlockBytes(type));
    const int64_t strip = std::clamp<int64_t>(kStripBytes / (cols * int64_t{sizeof(float)}), 1, rows);
    std::vector<uint8_t> bytes(static_cast<size_t>(strip * row_bytes));
    for (int64_t first = 0; first < rows; first += strip) {
      const int64_t count = std::min(strip, rows - first);
      struct Job {
        const Exporter& exporter;
        const ModelTensor& tensor;
        const MergedRows& merged;
        TensorType type;
        int64_t first, count, row_bytes;
        uint8_t* out;
        std::atomic<bool> fits = true;
      } job{*this, tensor, merged, type, first, count, row_bytes, bytes.data()};
      constexpr int64_t kRows = 64;
      threads_.Run(
          static_cast<int32_t>((count + kRows - 1) / kRows),
          [](void* arg, int32_t task, int32_t) {
            Job& work = *static_cast<Job*>(arg);
            work.exporter.Convert(work.tensor, work.merged, work.type, work.first, task * kRows,
                                  std::min(work.count, (task + 1) * kRows), work.row_bytes, work.out, work.fits);
          },
          &job);
      if (!job.fits) {
        Throw(PHSA_UNSUPPORTED, "{} has a number that {} cannot hold; --type bf16 or f32 can", tensor.name,
              TensorTypeName(type));
      }
      file.Write(bytes.data(), static_cast<size_t>(count * row_bytes));
      if (!progress(static_cast<uint64_t>(count * row_bytes))) return false;
    }
    source_.Release(*tensor.tensor);
    return true;
  }

  void Convert(const ModelTensor& tensor, const MergedRows& merged, TensorType type, int64_t first, int64_t begin,
               int64_t end, int64_t row_bytes, uint8_t* out, std::atomic<bool>& fits) const {
    const bool gguf = options_.format == ExportFormat::kGguf;
    std::vector<float> values(static_cast<size_t>(tensor.cols)), turned;
    for (int64_t row = begin; row < end; ++row) {
      if (tensor.rows > 0) {
        merged.Read(gguf ? RowForGguf(tensor, config_, first + row) : first + row, values.data());
      } else {
        turned.resize(values.size());
        merged.Read(0, turned.data());
        for (int64_t i = 0; i < tensor.cols; ++i) {
          values[static_cast<size_t>(i)] = turned[static_cast<size_t>(gguf ? RowForGguf(tensor, config_, i) : i)];
        }
      }
      if (!Quantize(type, values.data(), tensor.cols, out + row * row_bytes)) fits = false;
    }
  }

  bool Has(const char* part) const {
    return std::any_of(tensors_.begin(), tensors_.end(),
                       [&](const ModelTensor& tensor) { return tensor.name.ends_with(part); });
  }

  Json ConfigJson(bool from_folder) const {
    Json json;
    if (from_folder) {
      json = ReadJsonFile(fs::path(source_.path()) / "config.json", kMaxJsonBytes);
    } else {
      const bool some = Has("q_proj.bias") || Has("o_proj.bias");
      if (some && ArchitectureOf(config_).qkv_bias == Presence::kOptional &&
          !(Has("q_proj.bias") && Has("o_proj.bias"))) {
        Throw(PHSA_UNSUPPORTED,
              "{}: has a bias on some of q, k, v and o, for which config.json has no word; a GGUF file can be written",
              source_.path());
      }
      json = MakeHfConfig(config_, some, Has("down_proj.bias"));
    }
    json.erase("dtype");
    json["torch_dtype"] = type_ == TensorType::kF32 ? "float32" : type_ == TensorType::kF16 ? "float16" : "bfloat16";
    if (carried_.empty()) return json;
    AddToConfig(source_, carried_, &json);
    return json;
  }

  Json TokenizerConfigJson(const BpeVocabulary& vocabulary) const {
    Json json = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                 {"clean_up_tokenization_spaces", false},
                 {"add_bos_token", vocabulary.add_bos},
                 {"model_max_length", config_.context}};
    const GgufTokenizer& gguf = *source_.gguf_tokenizer();
    const auto token = [&](const char* key, int32_t id) {
      if (id >= 0 && static_cast<size_t>(id) < gguf.tokens.size()) json[key] = gguf.tokens[static_cast<size_t>(id)];
    };
    token("bos_token", gguf.bos);
    token("eos_token", gguf.eos);
    token("unk_token", gguf.unknown);
    token("pad_token", gguf.padding >= 0 ? gguf.padding : gguf.eos);
    if (!source_.chat_template().empty()) json["chat_template"] = source_.chat_template();
    return json;
  }

  uint32_t FileType() const {  // llama.cpp's numbers
    switch (type_) {
      case TensorType::kF32: return 0;
      case TensorType::kF16: return 1;
      case TensorType::kQ8_0: return 7;
      default: return 32;  // bf16
    }
  }

  // What GGUF divides the frequencies by: the file's own, or Llama 3's scaling, for which it has no key.
  std::vector<float> FrequencyDivisors() const {
    if (config_.rope_scaling.kind != RopeScaling::Kind::kLlama3) return config_.rope_scaling.frequency_factors;
    ModelConfig plain = config_;
    plain.rope_scaling = {};
    const std::vector<double> usual = MakeRope(plain).frequencies, scaled = MakeRope(config_).frequencies;
    std::vector<float> divisors;
    for (size_t i = 0; i < usual.size(); ++i) divisors.push_back(static_cast<float>(usual[i] / scaled[i]));
    return divisors;
  }

  void AddConfig(GgufHeader& header) const {
    const auto key = [&](const char* name) { return fmt::format("{}.{}", ArchitectureOf(config_).gguf, name); };
    const auto integer = [&](const char* name, int32_t value) {
      header.AddInteger(key(name), static_cast<uint32_t>(value));
    };
    integer("vocab_size", config_.vocab_size);
    integer("context_length", config_.context);
    integer("embedding_length", config_.hidden);
    integer("block_count", config_.num_layers);
    integer("feed_forward_length", config_.intermediate);
    integer("attention.head_count", config_.num_q_heads);
    integer("attention.head_count_kv", config_.num_kv_heads);
    integer("attention.key_length", config_.head_dim);
    integer("attention.value_length", config_.head_dim);
    integer("rope.dimension_count", config_.head_dim);
    header.AddFloat(key("attention.layer_norm_rms_epsilon"), config_.rms_eps);
    header.AddFloat(key("rope.freq_base"), config_.rope_base);
    const RopeScaling& scaling = config_.rope_scaling;
    if (scaling.kind == RopeScaling::Kind::kLinear) {
      header.AddText(key("rope.scaling.type"), "linear");
      header.AddFloat(key("rope.scaling.factor"), scaling.factor);
    }
    if (scaling.kind == RopeScaling::Kind::kYarn) {
      if (!scaling.truncate || scaling.mscale.value_or(0) != 0) {
        Throw(PHSA_UNSUPPORTED, "{}: YaRN with mscale or without truncation, for which GGUF has no key",
              source_.path());
      }
      header.AddText(key("rope.scaling.type"), "yarn");
      header.AddFloat(key("rope.scaling.factor"), scaling.factor);
      integer("rope.scaling.original_context_length", scaling.original_context);
      header.AddFloat(key("rope.scaling.yarn_beta_fast"), scaling.beta_fast);
      header.AddFloat(key("rope.scaling.yarn_beta_slow"), scaling.beta_slow);
      // On top of YaRN's own there, in its place here.
      if (scaling.attention_factor) {
        header.AddFloat(key("rope.scaling.attn_factor"),
                        *scaling.attention_factor / (0.1f * std::log(scaling.factor) + 1));
      }
    }
    const auto number = [&](const char* name, const std::optional<float>& value) {
      if (value) header.AddFloat(name, *value);
    };
    number("general.sampling.temp", config_.temperature);
    number("general.sampling.top_p", config_.top_p);
    number("general.sampling.min_p", config_.min_p);
    number("general.sampling.penalty_repeat", config_.repetition_penalty);
    if (config_.top_k) header.AddInteger("general.sampling.top_k", static_cast<uint32_t>(*config_.top_k));
  }

  void AddTokenizer(GgufHeader& header) const {
    BpeVocabulary vocabulary;
    std::vector<int32_t> ends = config_.eos_ids;
    int32_t unknown = -1, padding = -1;
    if (const auto& gguf = source_.gguf_tokenizer()) {
      vocabulary = GgufVocabulary(source_);
      unknown = gguf->unknown;
      padding = gguf->padding;
      if (gguf->eos >= 0) ends = {gguf->eos};
      ends.insert(ends.end(), gguf->end_of_turn.begin(), gguf->end_of_turn.end());
    } else {
      if (!source_.tokenizer_json()) {
        ThrowInvalid("{}: there is no tokenizer.json in the folder, and a GGUF file holds a tokenizer", source_.path());
      }
      const fs::path& path = *source_.tokenizer_json();
      vocabulary = VocabularyFromJson(ReadTextFile(path, kMaxJsonBytes), source_.tokenizer_config(), config_.vocab_size,
                                      path.string());
      if (ends.empty() && vocabulary.eos >= 0) ends = {vocabulary.eos};
    }
    header.AddText("tokenizer.ggml.model", vocabulary.model);
    header.AddText("tokenizer.ggml.pre", vocabulary.pre);
    header.AddTexts("tokenizer.ggml.tokens", vocabulary.tokens);
    if (!vocabulary.token_types.empty()) header.AddIntegers("tokenizer.ggml.token_type", vocabulary.token_types);
    header.AddTexts("tokenizer.ggml.merges", vocabulary.merges);
    const auto id = [&](const char* key, int32_t value) {
      if (value >= 0) header.AddInteger(key, static_cast<uint32_t>(value));
    };
    id("tokenizer.ggml.bos_token_id", vocabulary.bos);
    constexpr const char* kEnds[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                     "tokenizer.ggml.eom_token_id"};
    for (size_t i = 0; i < std::min(ends.size(), std::size(kEnds)); ++i) id(kEnds[i], ends[i]);
    id("tokenizer.ggml.unknown_token_id", unknown);
    id("tokenizer.ggml.padding_token_id", padding);
    header.AddBool("tokenizer.ggml.add_bos_token", vocabulary.add_bos);
    if (!source_.chat_template().empty()) header.AddText("tokenizer.chat_template", source_.chat_template());
  }

  const ModelSource& source_;
  const ModelConfig& config_;
  const ExportOptions& options_;
  ThreadPool& threads_;
  std::vector<ModelTensor> tensors_;
  TensorType type_ = TensorType::kF16;
  std::string carried_;  // the attention's settings, complete
};

}  // namespace

bool ExportModel(const ModelSource& source, const fs::path& out, const ExportOptions& options, ThreadPool& threads) {
  if (options.format == ExportFormat::kSafetensors && options.type == TensorType::kQ8_0) {
    ThrowInvalid("--type is q8_0; allowed for safetensors: f32, f16, bf16");
  }
  // The keys that say this are not written yet.
  if (const std::string special = SpecialSteps(source.config()); !special.empty()) {
    Throw(PHSA_UNSUPPORTED, "{}: {} models have {}, which export cannot write yet", source.path(),
          source.config().architecture, special);
  }
  Exporter exporter(source, options, threads);
  return options.format == ExportFormat::kGguf ? exporter.ToGguf(out) : exporter.ToFolder(out);
}

void CheckInstall(const ModelSource& source) {
  if (source.adapter() != nullptr) return;
  for (const PackagedModel& model : PackagedModels()) {
    std::error_code ignored;
    const fs::path cached = CachedModel(model);
    if (cached.empty() || !fs::equivalent(cached, source.path(), ignored)) continue;
    ThrowInvalid(
        "{}: is the packaged model {}, whose file is checked by its sum; write the settings into a copy of it, or give "
        "them by file",
        source.path(), model.name);
  }
}

namespace {

void InstallIntoGguf(const fs::path& path, const std::string& carried) {
  const GgufFile model{MappedFile(path)};
  NewFile file(path);
  file.Write(model.HeaderWithText("phsa.settings", carried));
  const uint64_t begin = std::min<uint64_t>(model.data_start(), model.file().size());
  file.Write(model.file().data() + begin, model.file().size() - begin);
  file.Keep();
}

}  // namespace

void InstallSettings(const ModelSource& source, const std::string& settings) {
  CheckInstall(source);
  const std::string carried = Carriable(source, settings);
  if (source.adapter() == nullptr && !fs::is_directory(source.path())) {
    InstallIntoGguf(source.path(), carried);
    return;
  }
  const bool adapter = source.adapter() != nullptr;
  const fs::path path =
      adapter ? fs::path(source.adapter()->path()) / "phsa.json" : fs::path(source.path()) / "config.json";
  nlohmann::ordered_json json;
  if (adapter) {
    json = nlohmann::ordered_json::parse(carried);
  } else {
    json = nlohmann::ordered_json::parse(ReadTextFile(path, kMaxJsonBytes));
    AddToConfig(source, carried, &json);
  }
  NewFile file(path);
  file.Write(json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
  file.Keep();
}

}  // namespace phsa
