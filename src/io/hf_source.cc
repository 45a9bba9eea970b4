// A model in a Hugging Face folder: config.json, safetensors in one file or several, and what its tokenizer is made of.
#include <algorithm>
#include <map>
#include <utility>

#include "base/errors.h"
#include "io/hf_config.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "io/source.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxConfigBytes = 1 << 20;
constexpr size_t kMaxIndexBytes = 16 << 20;
constexpr size_t kMaxTokenizerConfigBytes = 16 << 20;  // lists the added tokens

bool Exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// "model" of "some/model/" and of "." inside it; "org/model" of a snapshot in the Hugging Face cache, whose own name is
// a hash.
std::string FolderName(const fs::path& folder) {
  std::error_code ignored;
  const fs::path absolute = fs::absolute(folder, ignored).lexically_normal();
  const fs::path whole = absolute.has_filename() ? absolute : absolute.parent_path();
  std::string repository = whole.parent_path().parent_path().filename().string();
  constexpr std::string_view kPrefix = "models--";
  if (whole.parent_path().filename() != "snapshots" || !repository.starts_with(kPrefix))
    return whole.filename().string();
  repository.erase(0, kPrefix.size());
  if (const size_t slash = repository.find("--"); slash != std::string::npos) repository.replace(slash, 2, "/");
  return repository;
}

// A .gguf file in the folder, for the message to whoever gave the folder instead.
std::string GgufIn(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".gguf") return it->path().string();
  }
  return "";
}

class HfSource final : public ModelSource {
 public:
  explicit HfSource(const fs::path& folder) : folder_(folder) {
    path_ = folder.string();
    const fs::path config_path = folder / "config.json";
    if (!Exists(config_path)) {
      const std::string gguf = GgufIn(folder);
      if (!gguf.empty()) ThrowInvalid("{}: has no config.json, but a GGUF model: give {}", path_, gguf);
      if (IsAdapterFolder(folder)) {
        ThrowInvalid("{}: is a LoRA adapter: give its folder as {}, and the model that it is for", path_,
                     Option{"adapter"});
      }
      ThrowInvalid("{}: has no config.json: give a Hugging Face folder or a .gguf file", path_);
    }
    config_json_ = ReadJsonFile(config_path, kMaxConfigBytes);
    config_ = ReadHfConfig(config_json_, config_path.string());
    config_.name = FolderName(folder);
    const fs::path generation_path = folder / "generation_config.json";
    if (Exists(generation_path)) {
      ReadHfGenerationConfig(ReadJsonFile(generation_path, kMaxConfigBytes), generation_path.string(), &config_);
    }
    CheckConfig(config_path.string(), config_);
    OpenWeights();
    CheckEmbedding(*this, kEmbeddingName);
    CheckHead(config_path.string());
    ReadTokenizerFiles();
  }

  const Tensor* Find(std::string_view name) const override {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }

  std::vector<const Tensor*> Tensors() const override {
    std::vector<const Tensor*> out;
    for (const Shard& shard : shards_) {
      for (const Tensor& tensor : shard.tensors) out.push_back(&tensor);
    }
    return out;
  }

  void Release(const Tensor& tensor) const override {
    for (const Shard& shard : shards_) {
      if (tensor.file == shard.file->path().c_str()) shard.file->Release(tensor.data, tensor.bytes);
    }
  }

  std::vector<std::pair<std::string, std::string>> Metadata() const override {
    std::vector<std::pair<std::string, std::string>> out;
    for (const auto& [key, value] : config_json_.items()) {
      out.emplace_back(key, value.is_structured() ? Quoted(value.dump()) : JsonText(value));
    }
    return out;
  }

 private:
  struct Shard {
    std::unique_ptr<MappedFile> file;  // the tensors point at its path
    std::vector<Tensor> tensors;
  };

  void OpenShard(const fs::path& path) {
    Shard shard;
    shard.file = std::make_unique<MappedFile>(path);
    shard.tensors = ReadSafetensors(*shard.file, true);
    file_bytes_ += shard.file->size();
    shards_.push_back(std::move(shard));
  }

  void OpenWeights() {
    const fs::path single = folder_ / "model.safetensors";
    const fs::path index = folder_ / "model.safetensors.index.json";
    if (Exists(single)) {
      OpenShard(single);
      for (const Tensor& tensor : shards_[0].tensors) by_name_.emplace(tensor.name, &tensor);
    } else if (Exists(index)) {
      OpenShards(index);
    } else if (Exists(folder_ / "pytorch_model.bin") || Exists(folder_ / "pytorch_model.bin.index.json")) {
      ThrowInvalid(
          "{}: has its weights in pytorch_model.bin only: convert them to safetensors "
          "(transformers: from_pretrained, then save_pretrained)",
          path_);
    } else {
      ThrowInvalid("{}: has neither model.safetensors nor model.safetensors.index.json: fetch the weights", path_);
    }
    JoinMxfp4();
    format_ = fmt::format("Hugging Face, {} safetensors file{}", shards_.size(), shards_.size() == 1 ? "" : "s");
  }

  // "x_blocks" [rows …][blocks][16] and "x_scales" [rows …][blocks] become "x" [rows …][32 · blocks]. Bytes that are
  // nothing of the kind are refused: nobody knows what they mean.
  void JoinMxfp4() {
    constexpr std::string_view kBlocks = "_blocks", kScales = "_scales";
    constexpr int64_t kBlockElements = 32, kBlockBytes = 16;
    std::vector<std::string> names;
    for (const auto& [name, tensor] : by_name_) {
      if (tensor->type == TensorType::kU8 && name.ends_with(kBlocks)) names.push_back(name);
    }
    for (const std::string& name : names) {
      const std::string whole = name.substr(0, name.size() - kBlocks.size());
      const Tensor& blocks = *Find(name);
      const Tensor* const scales = Find(whole + std::string(kScales));
      if (scales == nullptr || scales->type != TensorType::kU8) continue;
      std::vector<int64_t> shape = scales->shape;
      shape.push_back(kBlockBytes);
      if (blocks.shape != shape || scales->shape.empty()) {
        ThrowInvalid("{}: the tensor {} has the shape [{}], its scales [{}]; allowed: 16 bytes for each scale",
                     blocks.file, Quoted(name), fmt::join(blocks.shape, ", "), fmt::join(scales->shape, ", "));
      }
      auto joined = std::make_unique<Tensor>(blocks);
      joined->name = whole;
      joined->type = TensorType::kMxfp4;
      joined->shape = scales->shape;
      joined->shape.back() *= kBlockElements;
      joined->scales = scales->data;
      by_name_.emplace(whole, joined.get());
      by_name_.erase(name);
      by_name_.erase(whole + std::string(kScales));
      joined_.push_back(std::move(joined));
    }
    for (const auto& [name, tensor] : by_name_) {
      if (tensor->type != TensorType::kU8) continue;
      ThrowInvalid("{}: the tensor {} has the dtype \"U8\"; allowed: F32, F16, BF16, and MXFP4 as _blocks and _scales",
                   tensor->file, Quoted(name));
    }
  }

  // The index says in which file each tensor is.
  void OpenShards(const fs::path& index_path) {
    const std::string where = index_path.string();
    const Json index = ReadJsonFile(index_path, kMaxIndexBytes);
    const auto weight_map = index.find("weight_map");
    if (weight_map == index.end() || !weight_map->is_object() || weight_map->empty()) {
      ThrowInvalid("{}: has no weight_map", where);
    }
    std::map<std::string, std::vector<std::string>> names_by_file;
    for (const auto& [name, file] : weight_map->items()) {
      // A name of a file in this folder, and nothing that leads out of it.
      const std::string text = file.is_string() ? file.get<std::string>() : "";
      if (text.empty() || text == "." || text == ".." ||
          text.find_first_of(std::string_view("/\0", 2)) != std::string::npos) {
        ThrowInvalid("{}: {} is in {}; allowed: the name of a file beside the index", where, Quoted(name),
                     JsonText(file));
      }
      names_by_file[text].push_back(name);
    }
    for (const auto& [file, names] : names_by_file) {
      const fs::path path = folder_ / file;
      if (!Exists(path)) {
        ThrowInvalid("{}: {} is missing, {} of the model's tensors are in it: fetch it", where, Quoted(file),
                     names.size());
      }
      OpenShard(path);
      std::map<std::string_view, const Tensor*> in_file;
      for (const Tensor& tensor : shards_.back().tensors) in_file.emplace(tensor.name, &tensor);
      for (const std::string& name : names) {
        const auto found = in_file.find(name);
        if (found == in_file.end()) {
          ThrowInvalid("{}: the tensor {} should be in {} and is not", where, Quoted(name), path.string());
        }
        by_name_.emplace(name, found->second);
      }
    }
  }

  // Where the head is tied to the embedding, a head in the file is not used, as in transformers.
  void CheckHead(const std::string& config_path) {
    const bool has_head = Find(kHeadName) != nullptr;
    const bool untied = config_json_.contains("tie_word_embeddings") && !config_.tied_embeddings;
    if (!has_head && untied) {
      ThrowInvalid("{}: tie_word_embeddings is false, but there is no tensor {}", config_path, kHeadName);
    }
    if (!has_head) config_.tied_embeddings = true;
    if (config_.tied_embeddings) by_name_.erase(std::string(kHeadName));
  }

  void ReadTokenizerFiles() {
    if (Exists(folder_ / "tokenizer.json")) tokenizer_json_ = folder_ / "tokenizer.json";
    const fs::path config_path = folder_ / "tokenizer_config.json";
    if (Exists(config_path)) {
      tokenizer_config_ = ReadTextFile(config_path, kMaxTokenizerConfigBytes);
      chat_template_ = TemplateOf(ReadJsonFile(config_path, kMaxTokenizerConfigBytes), config_path.string());
    }
    // Files of their own win, the newer kind over the older.
    const fs::path json_path = folder_ / "chat_template.json";
    const fs::path jinja_path = folder_ / "chat_template.jinja";
    if (Exists(jinja_path)) {
      chat_template_ = ReadTextFile(jinja_path, kMaxConfigBytes);
    } else if (Exists(json_path)) {
      chat_template_ = TemplateOf(ReadJsonFile(json_path, kMaxConfigBytes), json_path.string());
    }
  }

  // chat_template is a text, or a list of named ones, of which we take "default".
  static std::string TemplateOf(const Json& json, const std::string& path) {
    const JsonFields fields(json, path);
    const Json* value = fields.Find("chat_template");
    if (value == nullptr) return "";
    if (!value->is_array()) return *fields.String("chat_template");
    for (const Json& item : *value) {
      if (!item.is_object())
        ThrowInvalid("{} holds {}; allowed: objects", fields.Where("chat_template"), JsonText(item));
      const JsonFields named(item, fields.Where("chat_template"));
      if (named.String("name") == "default") return named.String("template").value_or("");
    }
    return "";
  }

  fs::path folder_;
  Json config_json_;
  std::vector<Shard> shards_;
  std::map<std::string, const Tensor*, std::less<>> by_name_;
  std::vector<std::unique_ptr<const Tensor>> joined_;  // of MXFP4, that lie in two tensors each
};

}  // namespace

std::unique_ptr<ModelSource> OpenHuggingFace(const fs::path& folder) { return std::make_unique<HfSource>(folder); }

}  // namespace phsa
