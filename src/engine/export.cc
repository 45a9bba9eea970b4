#include "engine/export.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
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

// The numbers of one matrix or vector in our order, with the adapter's part in them.
class MergedRows {
 public:
  // `from_one`: what is added to a norm, because one kind of file has the 1 in it and the other has not.
  MergedRows(const ModelTensor& tensor, const ModelSource& source, float from_one)
      : tensor_(tensor), config_(source.config()), from_one_(tensor.name.ends_with("norm.weight") ? from_one : 0) {
    const Adapter* const adapter = source.adapter();
    const LowRankTensors* const found = adapter != nullptr ? adapter->Find(tensor.name) : nullptr;
    if (found == nullptr) return;
    rank_ = found->rank();
    a_ = ReadLowRank(found->a);
    b_ = ReadLowRank(found->b);
    for (float& value : b_) value *= found->scale;
  }

  // out: [cols] of our row `row`.
  void Read(int64_t row, float* out) const {
    const int64_t cols = tensor_.cols;
    if (tensor_.rows == 0) {
      std::ranges::transform(ReadVector(tensor_, config_), out, [&](float value) { return value + from_one_; });
      return;
    }
    std::vector<uint8_t> scratch;
    Dequantize(tensor_.tensor->type, RowBlocks(tensor_, config_, row, scratch), cols, out);
    if (rank_ == 0) return;
    const int64_t of_b = HuggingFaceRow(config_, tensor_.name, row);
    for (int64_t k = 0; k < rank_; ++k) {
      const float factor = b_[static_cast<size_t>(of_b * rank_ + k)];
      const float* const a = a_.data() + k * cols;
      for (int64_t c = 0; c < cols; ++c) out[c] += factor * a[c];
    }
  }

 private:
  const ModelTensor& tensor_;
  const ModelConfig& config_;
  const float from_one_;
  int64_t rank_ = 0;
  std::vector<float> a_, b_;
};

// A tensor of the output, and those of the model that it is made of: their rows one behind the other, or the matrices
// of an expert the other way round, their rows by turns.
struct Item {
  OutputTensor output;
  std::vector<const ModelTensor*> parts;  // none: `values`
  int32_t by_turns = 0;                   // parts of an expert whose rows are columns here; 0: rows are rows
  std::vector<float> values;
};

// Our row that is row `row` of a file of the target: the inverse of FileRow.
class TargetRows {
 public:
  TargetRows(const ModelConfig& config, bool gguf) {
    const Architecture& architecture = ArchitectureOf(config);
    ModelConfig target = config;
    target.interleaved_rope_rows = architecture.interleaved_rope || (gguf && architecture.gguf_interleaves_rope_rows);
    ModelTensor tensor;
    tensor.turned_heads = target.interleaved_rope_rows || target.rotary_dim > 0;
    ours_.resize(static_cast<size_t>(config.head_dim));
    for (int64_t i = 0; i < config.head_dim; ++i) ours_[static_cast<size_t>(FileRow(tensor, target, i))] = i;
  }
  int64_t Of(const ModelTensor& tensor, int64_t row) const {
    if (tensor.name.find("q_proj") == std::string::npos && tensor.name.find("k_proj") == std::string::npos) return row;
    const auto size = static_cast<int64_t>(ours_.size());
    return row / size * size + ours_[static_cast<size_t>(row % size)];
  }

 private:
  std::vector<int64_t> ours_;  // of a head
};

// GGUF's metadata.
class GgufWriter final : public ConfigWriter {
 public:
  GgufWriter(GgufHeader& header, std::string_view architecture) : header_(header), architecture_(architecture) {}
  bool gguf() const override { return true; }
  void Int(const char*, const char* name, int32_t value) override {
    if (*name != '\0') header_.AddInteger(Key(name), static_cast<uint32_t>(value));
  }
  void Float(const char*, const char* name, float value) override {
    if (*name != '\0') header_.AddFloat(Key(name), value);
  }
  void Bool(const char*, const char* name, bool value) override {
    if (*name != '\0') header_.AddBool(Key(name), value);
  }
  void Ints(const char*, const char* name, const std::vector<int32_t>& values) override {
    if (*name != '\0') header_.AddIntegers(Key(name), values);
  }

 private:
  std::string Key(const char* name) const { return fmt::format("{}.{}", architecture_, name); }
  GgufHeader& header_;
  std::string_view architecture_;
};

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
      : source_(source),
        config_(source.config()),
        options_(options),
        threads_(threads),
        gguf_(options.format == ExportFormat::kGguf),
        target_rows_(config_, gguf_) {
    tensors_ = ModelTensors(source);
    // In its files, and in ours, a norm may be what is added to 1.
    const bool to_from_one = !gguf_ && ArchitectureOf(config_).norms_from_one;
    from_one_ = static_cast<float>(config_.norms_from_one) - static_cast<float>(to_from_one);
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
    const std::vector<Item> items = Items();
    NewFile file(folder.place() / "model.safetensors");
    file.Write(SafetensorsHeader(Outputs(items)));
    if (!WriteData(file, items, 1)) return false;
    file.Keep();
    folder.Keep();
    return true;
  }

  bool ToGguf(const fs::path& out) {
    if (fs::exists(out) && !options_.replace) RefuseToReplace(out);
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
    const auto add = [&](const char* name, const std::vector<float>& values) {
      if (values.empty()) return;
      const auto size = static_cast<int64_t>(values.size());
      items.push_back({{name, TensorType::kF32, {size}}, {}, 0, values});
    };
    if (config_.rope_scaling.kind == RopeScaling::Kind::kLongRope) {
      add("rope_factors_long.weight", config_.rope_scaling.long_factors);
      add("rope_factors_short.weight", config_.rope_scaling.short_factors);
    } else {
      add("rope_freqs.weight", FrequencyDivisors());
    }
    for (Item& item : Items()) items.push_back(std::move(item));
    NewFile file(out);
    file.Write(header.Finish(Outputs(items)));
    if (!WriteData(file, items, kGgufAlignment)) return false;
    file.Keep();
    return true;
  }

 private:
  [[noreturn]] static void RefuseToReplace(const fs::path& out) {
    ThrowInvalid("{}: is there already; {} replaces it", out.string(), Option{"force"});
  }
  // A model is replaced, and not somebody's folder of something else.
  static void CheckPlace(const fs::path& out, bool replace) {
    if (!fs::exists(out) || !fs::is_directory(out)) return;
    if (!replace) RefuseToReplace(out);
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

  // What the target's file calls a tensor of ours; several of ours may go into one.
  std::string OutputName(const ModelTensor& tensor) const {
    const Architecture& architecture = ArchitectureOf(config_);
    const LayerNames& names = architecture.names;
    const std::string_view name = tensor.name;
    const size_t layer_end = name.find('.', std::string_view("model.layers.").size());
    if (!name.starts_with("model.layers.") || layer_end == std::string_view::npos) return TargetName(tensor.name);
    const std::string_view layer = name.substr(0, layer_end + 1), rest = name.substr(layer_end + 1);
    constexpr std::string_view kExperts = "mlp.experts.";
    if (rest.starts_with(kExperts)) {
      // mlp.experts.E.gate_proj.weight
      const size_t dot = rest.find('.', kExperts.size());
      const std::string part(rest.substr(dot + 1));
      const bool bias = part.ends_with(".bias");
      if (gguf_) return TargetName(fmt::format("{}{}{}", layer, kExperts, part));
      if (names.expert_gate_up.hugging_face.empty()) return tensor.name;
      const bool down = part.starts_with("down");
      return fmt::format("{}{}{}", layer, (down ? names.expert_down : names.expert_gate_up).hugging_face,
                         bias ? "_bias" : "");
    }
    const auto is = [&](const TensorName& one) { return rest == fmt::format("{}.weight", one.hugging_face); };
    const auto joined = [&](const TensorName& whole) {
      return TargetName(fmt::format("{}{}.weight", layer, whole.hugging_face));
    };
    if (!names.qkv.hugging_face.empty() && (is(names.q) || is(names.k) || is(names.v))) return joined(names.qkv);
    if (!names.gate_up.hugging_face.empty() && (is(names.gate) || is(names.up))) return joined(names.gate_up);
    return TargetName(tensor.name);
  }
  std::string TargetName(const std::string& name) const {
    return gguf_ ? GgufName(ArchitectureOf(config_), name) : name;
  }

  std::vector<Item> Items() const {
    std::vector<Item> items;
    std::map<std::string, size_t> by_name;
    for (const ModelTensor& tensor : tensors_) {
      const std::string name = OutputName(tensor);
      const auto [found, is_new] = by_name.try_emplace(name, items.size());
      if (is_new) items.push_back({{name, type_, {}}, {}, 0, {}});
      items[found->second].parts.push_back(&tensor);
    }
    const bool shares_experts = !ArchitectureOf(config_).names.expert_gate_up.hugging_face.empty();
    for (Item& item : items) {
      const ModelTensor& first = *item.parts.front();
      const bool expert = first.name.find("mlp.experts.") != std::string::npos;
      const auto count = static_cast<int64_t>(item.parts.size());
      const int64_t experts = expert && (gguf_ || shares_experts) ? config_.num_experts : 0;
      std::vector<int64_t>& shape = item.output.shape;
      int64_t rows = 0;
      for (const ModelTensor* part : item.parts) rows += std::max<int64_t>(part->rows, 1);
      if (experts > 0 && !gguf_) item.by_turns = static_cast<int32_t>(count / experts);
      if (experts == 0) {
        shape = first.rows > 0 ? std::vector{rows, first.cols} : std::vector{first.cols};
      } else if (first.rows == 0) {
        shape = {experts, count / experts * first.cols};
      } else if (gguf_) {
        shape = {experts, first.rows, first.cols};
      } else {
        shape = {experts, first.cols, count / experts * first.rows};
      }
      if (!gguf_) continue;
      // llama.cpp wants vectors in f32, and a router too, and keeps what has no whole blocks in f16.
      const bool router =
          first.name.ends_with(fmt::format("{}.weight", ArchitectureOf(config_).names.router.hugging_face));
      if (first.rows == 0 || (config_.num_experts > 0 && router)) item.output.type = TensorType::kF32;
      if (first.cols % TensorTypeBlockElements(item.output.type) != 0) item.output.type = TensorType::kF16;
    }
    return items;
  }

  bool WriteData(NewFile& file, const std::vector<Item>& items, uint64_t alignment) {
    uint64_t total = 0, done = 0;
    for (const Item& item : items) total += item.output.bytes();
    for (const Item& item : items) {
      const auto progress = [&](uint64_t bytes) {
        done += bytes;
        return !options_.progress || options_.progress(static_cast<double>(done) / static_cast<double>(total));
      };
      if (item.parts.empty()) {
        file.Write(item.values.data(), item.values.size() * sizeof(float));
      } else if (!(item.by_turns > 0 ? WriteByTurns(file, item, progress) : WriteRows(file, item, progress))) {
        return false;
      }
      const uint64_t rest = item.output.bytes() % alignment;
      if (rest != 0) file.Write(std::string(alignment - rest, '\0'));
    }
    return true;
  }

  // Rows [begin, begin + count) of the target, [count][width] f32, made by `fill(row, out)` on all threads, as the
  // output's type into the file.
  template <class Fill>
  void WriteStrip(NewFile& file, const Item& item, int64_t begin, int64_t count, int64_t width, const Fill& fill) {
    const TensorType type = item.output.type;
    const int64_t row_bytes = width / TensorTypeBlockElements(type) * static_cast<int64_t>(TensorTypeBlockBytes(type));
    std::vector<uint8_t> bytes(static_cast<size_t>(count * row_bytes));
    struct Job {
      const Fill& fill;
      TensorType type;
      int64_t begin, count, width, row_bytes;
      uint8_t* out;
      std::atomic<bool> fits = true;
    } job{fill, type, begin, count, width, row_bytes, bytes.data()};
    constexpr int64_t kRows = 64;
    threads_.Run(
        static_cast<int32_t>((count + kRows - 1) / kRows),
        [](void* arg, int32_t task, int32_t) {
          Job& work = *static_cast<Job*>(arg);
          std::vector<float> values(static_cast<size_t>(work.width));
          for (int64_t row = task * kRows; row < std::min(work.count, (task + 1) * kRows); ++row) {
            work.fill(work.begin + row, values.data());
            if (!Quantize(work.type, values.data(), work.width, work.out + row * work.row_bytes)) work.fits = false;
          }
        },
        &job);
    if (!job.fits) {
      Throw(PHSA_UNSUPPORTED, "{} has a number that {} cannot hold; {} or f32 can", item.output.name,
            TensorTypeName(type), Option{"type", "bf16"});
    }
    file.Write(bytes.data(), bytes.size());
  }

  template <class Progress>
  bool WriteRows(NewFile& file, const Item& item, const Progress& progress) {
    for (const ModelTensor* part : item.parts) {
      const ModelTensor& tensor = *part;
      const MergedRows merged(tensor, source_, from_one_);
      const int64_t rows = std::max<int64_t>(tensor.rows, 1), cols = tensor.cols;
      const int64_t strip = std::clamp<int64_t>(kStripBytes / (cols * int64_t{sizeof(float)}), 1, rows);
      for (int64_t first = 0; first < rows; first += strip) {
        const int64_t count = std::min(strip, rows - first);
        WriteStrip(file, item, first, count, cols, [&](int64_t row, float* out) {
          if (tensor.rows > 0) return merged.Read(target_rows_.Of(tensor, row), out);
          std::vector<float> ours(static_cast<size_t>(cols));
          merged.Read(0, ours.data());
          for (int64_t i = 0; i < cols; ++i) out[i] = ours[static_cast<size_t>(target_rows_.Of(tensor, i))];
        });
        if (!progress(static_cast<uint64_t>(count) * (item.output.bytes() / static_cast<uint64_t>(AllRows(item))))) {
          return false;
        }
      }
      source_.Release(*tensor.tensor);
    }
    return true;
  }
  static int64_t AllRows(const Item& item) {
    int64_t rows = 0;
    for (const ModelTensor* part : item.parts) rows += std::max<int64_t>(part->rows, 1);
    return rows;
  }

  // Experts whose matrices lie the other way round, gates and ups by turns.
  template <class Progress>
  bool WriteByTurns(NewFile& file, const Item& item, const Progress& progress) {
    const auto turns = static_cast<size_t>(item.by_turns);
    const ModelTensor& shape = *item.parts.front();
    const int64_t rows = std::max<int64_t>(shape.rows, 1), cols = shape.cols;
    const size_t experts = item.parts.size() / turns;
    for (size_t e = 0; e < experts; ++e) {
      std::vector<float> values(turns * static_cast<size_t>(rows * cols));  // [turn][row][column]
      for (size_t turn = 0; turn < turns; ++turn) {
        const MergedRows merged(*item.parts[e * turns + turn], source_, 0);
        float* const to = values.data() + turn * static_cast<size_t>(rows * cols);
        for (int64_t row = 0; row < rows; ++row) merged.Read(row, to + row * cols);
      }
      // A bias is one row of all columns by turns; a matrix has a row for each of our columns.
      const int64_t lines = shape.rows > 0 ? cols : 1, of_line = shape.rows > 0 ? rows : cols;
      const int64_t step = shape.rows > 0 ? cols : 1;
      WriteStrip(file, item, 0, lines, of_line * static_cast<int64_t>(turns), [&](int64_t line, float* out) {
        for (int64_t i = 0; i < of_line; ++i) {
          for (size_t turn = 0; turn < turns; ++turn) {
            *out++ = values[turn * static_cast<size_t>(rows * cols) + static_cast<size_t>(i * step + line)];
          }
        }
      });
      if (!progress(item.output.bytes() / experts)) return false;
    }
    source_.Release(*shape.tensor);
    return true;
  }

  bool Has(const char* part) const {
    return std::any_of(tensors_.begin(), tensors_.end(),
                       [&](const ModelTensor& tensor) { return tensor.name.ends_with(part); });
  }

  Json ConfigJson(bool from_folder) const {
    Json json;
    if (from_folder) {
      json = ReadJsonFile(fs::path(source_.path()) / "config.json", kMaxJsonBytes);
      json.erase("quantization_config");  // of experts in MXFP4, which are written as the others
    } else {
      json = MakeHfConfig(config_, source_.path(), {Has("q_proj.bias"), Has("o_proj.bias"), Has("mlp.down_proj.bias")});
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
    integer("rope.dimension_count", config_.rotary_dim > 0 ? config_.rotary_dim : config_.head_dim);
    header.AddFloat(key("attention.layer_norm_rms_epsilon"), config_.rms_eps);
    header.AddFloat(key("rope.freq_base"), config_.rope_base);
    const RopeScaling& scaling = config_.rope_scaling;
    if (scaling.kind == RopeScaling::Kind::kLinear) {
      header.AddText(key("rope.scaling.type"), "linear");
      header.AddFloat(key("rope.scaling.factor"), scaling.factor);
    }
    if (scaling.kind == RopeScaling::Kind::kYarn) {
      if (scaling.mscale.value_or(0) != 0) {
        Throw(PHSA_UNSUPPORTED, "{}: YaRN with mscale, for which GGUF has no key", source_.path());
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
    if (scaling.kind == RopeScaling::Kind::kLongRope) {
      header.AddText(key("rope.scaling.type"), "longrope");
      integer("rope.scaling.original_context_length", scaling.original_context);
      header.AddFloat(key("rope.scaling.attn_factor"), scaling.attention_factor.value_or(1));
    }
    GgufWriter own(header, ArchitectureOf(config_).gguf);
    WriteConfig(config_, source_.path(), own);
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
    if (vocabulary.model == "gpt2") {
      header.AddTexts("tokenizer.ggml.merges", vocabulary.merges);
    } else {
      header.AddFloats("tokenizer.ggml.scores", vocabulary.scores);
      header.AddBool("tokenizer.ggml.add_space_prefix", vocabulary.add_space_prefix);
      if (vocabulary.one_space) header.AddBool("tokenizer.ggml.remove_extra_whitespaces", true);
      if (!vocabulary.charsmap.empty()) header.AddBytes("tokenizer.ggml.precompiled_charsmap", vocabulary.charsmap);
    }
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
  const bool gguf_;
  const TargetRows target_rows_;
  std::vector<ModelTensor> tensors_;
  float from_one_ = 0;  // what norms differ by in the source's files and the target's
  TensorType type_ = TensorType::kF16;
  std::string carried_;  // the attention's settings, complete
};

}  // namespace

bool ExportModel(const ModelSource& source, const fs::path& out, const ExportOptions& options, ThreadPool& threads) {
  if (options.format == ExportFormat::kSafetensors && options.type == TensorType::kQ8_0) {
    ThrowInvalid("{} is q8_0; allowed for safetensors: f32, f16, bf16", Option{"type"});
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
