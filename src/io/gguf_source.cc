// A model in a GGUF file: what the metadata say in our terms, and the tensors under Hugging Face's names.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <utility>

#include "base/errors.h"
#include "io/architecture.h"
#include "io/gguf.h"
#include "io/gguf_names.h"
#include "io/hub.h"
#include "io/source.h"

namespace phsa {
namespace {

constexpr double kMaxFactor = 1e6;

// Tokens that end a turn or a text in the models we know. A GGUF file names one end token, where a Hugging Face folder
// lists all of them in generation_config.json.
constexpr std::string_view kEndTokens[] = {"<|im_end|>", "<|endoftext|>",   "<|eot_id|>",
                                           "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>"};
constexpr int64_t kControlToken = 3;
constexpr int64_t kMaxCharsmap = 4 << 20;  // bytes; SentencePiece's own have 0.24 MB

class GgufSource final : public ModelSource {
 public:
  explicit GgufSource(MappedFile mapped) : gguf_(std::move(mapped)) {
    path_ = gguf_.file().path();
    format_ = fmt::format("GGUF v{}", gguf_.version());
    file_bytes_ = gguf_.file().size();
    OpenParts();
    ReadArchitecture();
    for (const Tensor* tensor : Tensors()) by_name_.emplace(HuggingFaceName(*architecture_, tensor->name), tensor);
    ReadConfig();
    CheckEmbedding(*this, "token_embd.weight");
    ReadTokenizer();
    ReadSampling();
    CheckConfig(path_, config_);
  }

  const Tensor* Find(std::string_view name) const override {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }

  std::vector<const Tensor*> Tensors() const override {
    std::vector<const Tensor*> out;
    out.reserve(gguf_.tensors().size());
    for (const Tensor& tensor : gguf_.tensors()) out.push_back(&tensor);
    for (const std::unique_ptr<GgufFile>& part : parts_) {
      for (const Tensor& tensor : part->tensors()) out.push_back(&tensor);
    }
    return out;
  }

  void Release(const Tensor& tensor) const override {
    const auto holds = [&](const GgufFile& part) {
      return tensor.data >= part.file().data() && tensor.data < part.file().data() + part.file().size();
    };
    const auto found = std::find_if(parts_.begin(), parts_.end(), [&](const auto& part) { return holds(*part); });
    (found == parts_.end() ? gguf_ : **found).file().Release(tensor.data, tensor.bytes);
  }

  std::vector<std::pair<std::string, std::string>> Metadata() const override {
    std::vector<std::pair<std::string, std::string>> out;
    out.reserve(gguf_.entries().size());
    for (const GgufFile::Entry& entry : gguf_.entries()) {
      out.emplace_back(std::string(entry.key), GgufValueText(entry.value));
    }
    return out;
  }

 private:
  // The other files of a split model. The first has the metadata, all have tensors.
  void OpenParts() {
    const int64_t count = gguf_.Integer("split.count").value_or(1);
    if (count <= 1) return;
    const std::filesystem::path path = path_;
    const std::optional<GgufPart> first = PartOfSplitGguf(path.filename().string());
    if (!first || first->count != count) {
      ThrowInvalid("{}: is one of {} parts of a split model; their names must end in -00001-of-{:05}.gguf and so on",
                   path_, count, count);
    }
    if (first->number != 1) {
      ThrowInvalid("{}: is part {} of {} of a split model: give the first, {}", path_, first->number, count,
                   (path.parent_path() / first->Name(1)).string());
    }
    for (int32_t number = 2; number <= first->count; ++number) {
      const std::filesystem::path other = path.parent_path() / first->Name(number);
      std::error_code ignored;
      if (!std::filesystem::exists(other, ignored)) {
        ThrowInvalid("{}: is missing, part {} of {} of the model: fetch it", other.string(), number, count);
      }
      parts_.push_back(std::make_unique<GgufFile>(MappedFile(other)));
      if (parts_.back()->Integer("split.no").value_or(-1) != number - 1) {
        ThrowInvalid("{}: is not part {} of {}", other.string(), number, count);
      }
      file_bytes_ += parts_.back()->file().size();
    }
    format_ += fmt::format(", {} files", count);
  }

  // Keys of the architecture: "block_count" is "llama.block_count".
  std::string Key(std::string_view name) const { return fmt::format("{}.{}", architecture_->gguf, name); }

  int32_t RequiredInt(std::string_view name, int64_t high) const {
    const std::string key = Key(name);
    const std::optional<int64_t> value = gguf_.Integer(key);
    if (!value) ThrowInvalid("{}: has no {}: the file is not a whole model", path_, key);
    return CheckedInt(gguf_.Where(key), *value, 1, high);
  }

  std::optional<int32_t> OptionalInt(std::string_view name, int64_t high) const {
    const std::string key = Key(name);
    const std::optional<int64_t> value = gguf_.Integer(key);
    if (!value) return std::nullopt;
    return CheckedInt(gguf_.Where(key), *value, 1, high);
  }

  std::optional<float> OptionalFloat(const std::string& key, double low, double high) const {
    const std::optional<double> value = gguf_.Number(key);
    if (!value) return std::nullopt;
    return CheckedFloat(gguf_.Where(key), *value, low, high);
  }

  // Judged before the array is copied: in memory it takes several times its bytes in the file.
  void CheckCount(const std::string& key, int64_t most) const {
    const GgufValue* value = gguf_.Find(key);
    if (value == nullptr || value->type != GgufType::kArray || value->count <= static_cast<uint64_t>(most)) return;
    ThrowInvalid("{} has {} elements; allowed: at most {}", gguf_.Where(key), value->count, most);
  }

  // Some converters write one number of KV heads per layer; they must be the same in all.
  int32_t KvHeads() const {
    const std::string key = Key("attention.head_count_kv");
    const GgufValue* value = gguf_.Find(key);
    if (value == nullptr) return config_.num_q_heads;
    if (value->type != GgufType::kArray) return RequiredInt("attention.head_count_kv", kMaxModelHeads);
    CheckCount(key, kMaxLayers);
    const std::vector<int64_t> heads = *gguf_.Integers(key);
    if (heads.empty() || std::adjacent_find(heads.begin(), heads.end(), std::not_equal_to<>()) != heads.end()) {
      ThrowInvalid("{} differs from layer to layer; allowed: one number for all", gguf_.Where(key));
    }
    return CheckedInt(gguf_.Where(key), heads.front(), 1, kMaxModelHeads);
  }

  void ReadArchitecture() {
    const std::optional<std::string_view> name = gguf_.String("general.architecture");
    if (!name) ThrowInvalid("{}: has no general.architecture: the file is not a whole model", path_);
    for (const Architecture* known : Architectures()) {
      if (architecture_ == nullptr && known->gguf == *name && !name->empty()) architecture_ = known;
    }
    if (architecture_ == nullptr) {
      ThrowInvalid("{} is {}; allowed: {}", gguf_.Where("general.architecture"), Quoted(*name),
                   ArchitectureNames(&Architecture::gguf));
    }
    config_.architecture = std::string(architecture_->name);
    config_.interleaved_rope_rows = architecture_->gguf_interleaves_rope_rows || architecture_->interleaved_rope;
  }

  void ReadConfig() {
    config_.name = std::string(gguf_.String("general.name").value_or(""));
    if (config_.name.empty()) config_.name = std::filesystem::path(path_).stem().string();
    config_.num_layers = RequiredInt("block_count", kMaxLayers);
    config_.hidden = RequiredInt("embedding_length", kMaxWidth);
    config_.intermediate = RequiredInt("feed_forward_length", kMaxWidth);
    config_.context = RequiredInt("context_length", kMaxContext);
    config_.num_q_heads = RequiredInt("attention.head_count", kMaxModelHeads);
    config_.num_kv_heads = KvHeads();
    ReadHeadDim();
    config_.rms_eps = OptionalFloat(Key("attention.layer_norm_rms_epsilon"), 0, 1).value_or(1e-6f);
    config_.rope_base =
        OptionalFloat(Key("rope.freq_base"), 1, kMaxRopeBase).value_or(architecture_->default_rope_base);
    ReadRopeScaling();
    if (architecture_->configure != nullptr) architecture_->configure(Keys(*this), &config_);

    const Tensor* embedding = Find(kEmbeddingName);
    const std::optional<int32_t> vocab = OptionalInt("vocab_size", kMaxVocab);
    if (vocab) {
      config_.vocab_size = *vocab;
    } else if (embedding != nullptr) {
      config_.vocab_size =
          CheckedInt(path_ + ": the number of rows of token_embd.weight", embedding->shape.front(), 1, kMaxVocab);
    }
    config_.tied_embeddings = Find(kHeadName) == nullptr;
    config_.phsa_settings = std::string(gguf_.String("phsa.settings").value_or(""));
    if (const auto text = gguf_.String("tokenizer.chat_template")) chat_template_ = std::string(*text);
  }

  void ReadHeadDim() {
    const std::optional<int32_t> key_length = OptionalInt("attention.key_length", kMaxHeadDim);
    const std::optional<int32_t> value_length = OptionalInt("attention.value_length", kMaxHeadDim);
    if (!key_length && config_.hidden % config_.num_q_heads != 0) {
      ThrowInvalid("{}: {} is not there, and {} heads do not divide a width of {}", path_, Key("attention.key_length"),
                   config_.num_q_heads, config_.hidden);
    }
    config_.head_dim = key_length ? *key_length : config_.hidden / config_.num_q_heads;
    if (value_length && *value_length != config_.head_dim) {
      ThrowInvalid("{} is {}; allowed: {}, as long as a key", gguf_.Where(Key("attention.value_length")), *value_length,
                   config_.head_dim);
    }
    const std::optional<int32_t> rotated = OptionalInt("rope.dimension_count", kMaxHeadDim);
    if (!rotated || *rotated == config_.head_dim) return;
    if (!architecture_->partial_rotary || *rotated > config_.head_dim || *rotated % 2 != 0) {
      ThrowInvalid("{} is {}; allowed: {}", gguf_.Where(Key("rope.dimension_count")), *rotated,
                   architecture_->partial_rotary ? fmt::format("even numbers up to {}", config_.head_dim)
                                                 : fmt::format("{}, the whole head", config_.head_dim));
    }
    config_.rotary_dim = *rotated;
  }

  // A row of f32; empty where there is no such tensor.
  std::vector<float> Factors(const char* name) const {
    const Tensor* const tensor = gguf_.FindTensor(name);
    if (tensor == nullptr) return {};
    if (tensor->type != TensorType::kF32 || tensor->shape.size() != 1) {
      ThrowInvalid("{}: the tensor {} at offset {} is not a row of f32", path_, name, tensor->file_offset);
    }
    std::vector<float> out(static_cast<size_t>(tensor->shape[0]));
    Dequantize(tensor->type, tensor->data, tensor->shape[0], out.data());
    return out;
  }

  void ReadLongRope() {
    RopeScaling& scaling = config_.rope_scaling;
    const std::string key = Key("rope.scaling.type");
    const std::string_view type = gguf_.String(key).value_or("longrope");
    if (type != "longrope" && type != "none") {
      ThrowInvalid("{} is {}, and there is rope_factors_long.weight; allowed: longrope", gguf_.Where(key),
                   Quoted(type));
    }
    scaling.kind = RopeScaling::Kind::kLongRope;
    scaling.original_context =
        OptionalInt("rope.scaling.original_context_length", kMaxContext).value_or(config_.context);
    const float growth = static_cast<float>(config_.context) / static_cast<float>(scaling.original_context);
    scaling.attention_factor = OptionalFloat(Key("rope.scaling.attn_factor"), 1e-3, kMaxFactor)
                                   .value_or(LongRopeMagnitude(growth, scaling.original_context));
    scaling.ChooseFactors(config_.context);
  }

  void ReadRopeScaling() {
    RopeScaling& scaling = config_.rope_scaling;
    scaling.frequency_factors = Factors("rope_freqs.weight");
    scaling.short_factors = Factors("rope_factors_short.weight");
    scaling.long_factors = Factors("rope_factors_long.weight");
    if (scaling.short_factors.empty() != scaling.long_factors.empty()) {
      ThrowInvalid("{}: has one of the tensors rope_factors_short.weight and rope_factors_long.weight; it needs both",
                   path_);
    }
    if (!scaling.long_factors.empty()) return ReadLongRope();

    const std::string type_key = Key("rope.scaling.type");
    const std::string old_key = Key("rope.scale_linear");  // what linear scaling was before rope.scaling.type
    const std::string_view type =
        gguf_.String(type_key).value_or(gguf_.Find(old_key) != nullptr ? std::string_view("linear") : "none");
    if (type == "none") return;
    if (type != "linear" && type != "yarn") {
      ThrowInvalid("{} is {}; allowed: none, linear, yarn, and longrope with its factors as tensors",
                   gguf_.Where(type_key), Quoted(type));
    }
    const std::string factor_key = Key("rope.scaling.factor");
    const std::string& given_key = gguf_.Find(factor_key) != nullptr ? factor_key : old_key;
    const std::optional<float> factor = OptionalFloat(given_key, 1e-3, kMaxFactor);
    if (!factor) ThrowInvalid("{}: has {} {} and no {}", path_, type_key, type, factor_key);
    scaling.factor = *factor;
    if (type == "linear") {
      scaling.kind = RopeScaling::Kind::kLinear;
      return;
    }
    scaling.kind = RopeScaling::Kind::kYarn;
    scaling.original_context =
        OptionalInt("rope.scaling.original_context_length", kMaxContext).value_or(config_.context);
    scaling.beta_fast = OptionalFloat(Key("rope.scaling.yarn_beta_fast"), 1e-3, kMaxFactor).value_or(32);
    scaling.beta_slow = OptionalFloat(Key("rope.scaling.yarn_beta_slow"), 1e-3, kMaxFactor).value_or(1);
    for (const char* name : {"rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor"}) {
      if (gguf_.Find(Key(name)) != nullptr) ThrowInvalid("{}: is not supported", gguf_.Where(Key(name)));
    }
    // Here the factor is applied on top of YaRN's own, where Hugging Face's attention_factor replaces it.
    const std::optional<float> attention = OptionalFloat(Key("rope.scaling.attn_factor"), 1e-3, kMaxFactor);
    if (attention) scaling.attention_factor = *attention * (0.1f * std::log(scaling.factor) + 1);
  }

  // An id of the tokenizer's. Some converters write −1, in 32 bits without a sign, for "none".
  int32_t TokenId(const std::string& key) const {
    const std::optional<int64_t> id = gguf_.Integer(key);
    if (!id || *id == -1 || *id == UINT32_MAX) return -1;
    return CheckedInt(gguf_.Where(key), *id, 0, config_.vocab_size - 1);
  }

  void ReadTokenizer() {
    const std::optional<std::string_view> model = gguf_.String("tokenizer.ggml.model");
    if (!model) return;
    for (const char* key : {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"}) CheckCount(key, config_.vocab_size);
    CheckCount("tokenizer.ggml.merges", kMaxVocab);
    GgufTokenizer tokenizer;
    tokenizer.model = std::string(*model);
    tokenizer.pre = std::string(gguf_.String("tokenizer.ggml.pre").value_or(""));
    tokenizer.tokens = gguf_.Strings("tokenizer.ggml.tokens").value_or(std::vector<std::string>());
    tokenizer.merges = gguf_.Strings("tokenizer.ggml.merges").value_or(std::vector<std::string>());
    const std::string types_key = "tokenizer.ggml.token_type";
    CheckCount("tokenizer.ggml.scores", config_.vocab_size);
    tokenizer.scores = gguf_.Floats("tokenizer.ggml.scores").value_or(std::vector<float>());
    tokenizer.add_space_prefix = gguf_.Bool("tokenizer.ggml.add_space_prefix").value_or(true);
    tokenizer.one_space = gguf_.Bool("tokenizer.ggml.remove_extra_whitespaces").value_or(false);
    CheckCount("tokenizer.ggml.precompiled_charsmap", kMaxCharsmap);
    if (const auto bytes = gguf_.Integers("tokenizer.ggml.precompiled_charsmap")) {
      for (const int64_t byte : *bytes) tokenizer.charsmap += static_cast<char>(byte);
    }
    if (const auto types = gguf_.Integers(types_key)) {
      if (types->size() != tokenizer.tokens.size()) {
        ThrowInvalid("{} has {} elements for {} tokens", gguf_.Where(types_key), types->size(),
                     tokenizer.tokens.size());
      }
      tokenizer.token_types.reserve(types->size());
      for (const int64_t type : *types) {
        tokenizer.token_types.push_back(CheckedInt(gguf_.Where(types_key), type, INT32_MIN, INT32_MAX));
      }
    }
    tokenizer.bos = TokenId("tokenizer.ggml.bos_token_id");
    tokenizer.eos = TokenId("tokenizer.ggml.eos_token_id");
    tokenizer.unknown = TokenId("tokenizer.ggml.unknown_token_id");
    tokenizer.padding = TokenId("tokenizer.ggml.padding_token_id");
    for (const char* key : {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
      const int32_t id = TokenId(key);
      if (id >= 0) tokenizer.end_of_turn.push_back(id);
    }
    // Files of Llama 3 often leave the key out and still expect the begin token.
    const bool llama3 = tokenizer.pre == "llama-bpe" || tokenizer.pre == "llama3" || tokenizer.pre == "llama-v3";
    tokenizer.add_bos = gguf_.Bool("tokenizer.ggml.add_bos_token").value_or(llama3);
    tokenizer.add_eos = gguf_.Bool("tokenizer.ggml.add_eos_token").value_or(false);

    if (tokenizer.eos >= 0) AddEnd(tokenizer.eos);
    for (const int32_t id : tokenizer.end_of_turn) AddEnd(id);
    for (size_t id = 0; id < tokenizer.token_types.size(); ++id) {
      if (tokenizer.token_types[id] != kControlToken) continue;
      if (std::find(std::begin(kEndTokens), std::end(kEndTokens), tokenizer.tokens[id]) == std::end(kEndTokens))
        continue;
      AddEnd(static_cast<int32_t>(id));
    }
    gguf_tokenizer_ = std::move(tokenizer);
  }

  void AddEnd(int32_t id) {
    if (std::find(config_.eos_ids.begin(), config_.eos_ids.end(), id) == config_.eos_ids.end()) {
      config_.eos_ids.push_back(id);
    }
  }

  void ReadSampling() {
    config_.temperature = OptionalFloat("general.sampling.temp", 0, 100);
    config_.top_p = OptionalFloat("general.sampling.top_p", 0, 1);
    config_.min_p = OptionalFloat("general.sampling.min_p", 0, 1);
    config_.repetition_penalty = OptionalFloat("general.sampling.penalty_repeat", 1e-3, 100);
    if (const auto top_k = gguf_.Integer("general.sampling.top_k")) {
      config_.top_k = CheckedInt(gguf_.Where("general.sampling.top_k"), *top_k, 0, INT32_MAX);
    }
  }

  // The keys of an architecture's own.
  class Keys final : public ConfigKeys {
   public:
    explicit Keys(const GgufSource& source) : source_(source) {}
    bool gguf() const override { return true; }
    std::optional<int32_t> Int(const char*, const char* name, int64_t low, int64_t high) const override {
      const auto value = Has(name) ? source_.gguf_.Integer(source_.Key(name)) : std::nullopt;
      if (!value) return std::nullopt;
      return CheckedInt(Where("", name), *value, low, high);
    }
    std::optional<float> Float(const char*, const char* name, double low, double high) const override {
      return Has(name) ? source_.OptionalFloat(source_.Key(name), low, high) : std::nullopt;
    }
    std::optional<bool> Bool(const char*, const char* name) const override {
      return Has(name) ? source_.gguf_.Bool(source_.Key(name)) : std::nullopt;
    }
    std::optional<std::vector<int32_t>> Ints(const char*, const char* name, int64_t low, int64_t high) const override {
      if (!Has(name)) return std::nullopt;
      source_.CheckCount(source_.Key(name), kMaxLayers);
      const auto values = source_.gguf_.Integers(source_.Key(name));
      if (!values) return std::nullopt;
      std::vector<int32_t> out;
      for (const int64_t value : *values) out.push_back(CheckedInt(Where("", name), value, low, high));
      return out;
    }
    std::string Where(const char*, const char* name) const override { return source_.gguf_.Where(source_.Key(name)); }

   private:
    static bool Has(const char* name) { return *name != '\0'; }
    const GgufSource& source_;
  };

  GgufFile gguf_;
  std::vector<std::unique_ptr<GgufFile>> parts_;  // of a split model, without the first
  const Architecture* architecture_ = nullptr;
  std::map<std::string, const Tensor*, std::less<>> by_name_;
};

}  // namespace

std::unique_ptr<ModelSource> OpenGguf(MappedFile file) { return std::make_unique<GgufSource>(std::move(file)); }

}  // namespace phsa
