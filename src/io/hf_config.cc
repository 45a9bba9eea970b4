#include "io/hf_config.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "base/errors.h"
#include "io/architecture.h"
#include "io/source.h"

namespace phsa {
namespace {

constexpr double kMaxFactor = 1e6;
constexpr size_t kMaxEndTokens = 1024;

// By the class in architectures where it is there, else by model_type.
const Architecture& ReadArchitecture(const JsonFields& fields) {
  if (const Json* classes = fields.Find("architectures"); classes != nullptr && classes->is_array()) {
    for (const Json& item : *classes) {
      for (const Architecture* known : Architectures()) {
        if (item == known->hugging_face_class) return *known;
      }
    }
    if (!classes->empty()) {
      ThrowInvalid("{} is {}; allowed: {}", fields.Where("architectures"), JsonText(classes->front()),
                   ArchitectureNames(&Architecture::hugging_face_class));
    }
  }
  const std::string type = fields.String("model_type").value_or("");
  for (const Architecture* known : Architectures()) {
    if (type == known->hugging_face) return *known;
  }
  ThrowInvalid("{} is {}; allowed: {}", fields.Where("model_type"), Quoted(type),
               ArchitectureNames(&Architecture::hugging_face));
}

class Keys final : public ConfigKeys {
 public:
  explicit Keys(const JsonFields& fields) : fields_(fields) {}
  bool gguf() const override { return false; }
  std::optional<int32_t> Int(const char* name, const char*, int64_t low, int64_t high) const override {
    return Has(name) ? fields_.Int(name, low, high) : std::nullopt;
  }
  std::optional<float> Float(const char* name, const char*, double low, double high) const override {
    return Has(name) ? fields_.Float(name, low, high) : std::nullopt;
  }
  std::optional<bool> Bool(const char* name, const char*) const override {
    return Has(name) ? fields_.Bool(name) : std::nullopt;
  }
  std::optional<std::vector<int32_t>> Ints(const char* name, const char*, int64_t low, int64_t high) const override {
    const Json* const list = Has(name) ? fields_.Find(name) : nullptr;
    if (list == nullptr) return std::nullopt;
    if (!list->is_array() || list->size() > kMaxLayers) {
      ThrowInvalid("{} is {}; allowed: a list of numbers, at most one a layer", Where(name, ""), JsonText(*list));
    }
    std::vector<int32_t> out;
    for (const Json& item : *list) {
      if (!item.is_number_integer()) {
        ThrowInvalid("{} holds {}; allowed: {} to {}", Where(name, ""), JsonText(item), low, high);
      }
      out.push_back(CheckedInt(Where(name, ""), item.get<int64_t>(), low, high));
    }
    return out;
  }
  std::string Where(const char* name, const char*) const override { return fields_.Where(name); }

 private:
  static bool Has(const char* name) { return *name != '\0'; }
  const JsonFields& fields_;
};

// How much of each head RoPE turns.
void ReadRotary(const JsonFields& fields, bool partial, ModelConfig* config) {
  const std::optional<float> share = fields.Float("partial_rotary_factor", 0, 1);
  if (!share || *share == 1) return;
  const auto turned = static_cast<int32_t>(static_cast<float>(config->head_dim) * *share);
  if (!partial || turned < 2 || turned % 2 != 0) {
    ThrowInvalid("{} is {}; allowed: {}", fields.Where("partial_rotary_factor"), *share,
                 partial ? "what gives an even number of dimensions" : "1, the whole head");
  }
  config->rotary_dim = turned;
}

void ReadLongRope(const JsonFields& fields, const JsonFields& rope, ModelConfig* config) {
  const auto factors = [&](const char* key) {
    const Json* const list = rope.Find(key);
    const int32_t pairs = (config->rotary_dim > 0 ? config->rotary_dim : config->head_dim) / 2;
    if (list == nullptr || !list->is_array() || list->size() != static_cast<size_t>(pairs)) {
      ThrowInvalid("{} is not a list of {} numbers", rope.Where(key), pairs);
    }
    std::vector<float> out;
    for (const Json& item : *list) {
      if (!item.is_number()) ThrowInvalid("{} holds {}; allowed: numbers", rope.Where(key), JsonText(item));
      out.push_back(CheckedFloat(rope.Where(key), item.get<double>(), 1e-3, kMaxFactor));
    }
    return out;
  };
  RopeScaling& scaling = config->rope_scaling;
  scaling.kind = RopeScaling::Kind::kLongRope;
  scaling.short_factors = factors("short_factor");
  scaling.long_factors = factors("long_factor");
  std::optional<int32_t> original = rope.Int("original_max_position_embeddings", 1, kMaxContext);
  if (!original) original = fields.Int("original_max_position_embeddings", 1, kMaxContext);
  scaling.original_context = original.value_or(config->context);
  const float growth =
      rope.Float("factor", 1e-3, kMaxFactor)
          .value_or(static_cast<float>(config->context) / static_cast<float>(scaling.original_context));
  scaling.attention_factor =
      rope.Float("attention_factor", 1e-3, kMaxFactor).value_or(LongRopeMagnitude(growth, scaling.original_context));
  scaling.ChooseFactors(config->context);
}

// RoPE in the style of transformers 5 (one object rope_parameters) and before (rope_theta, and rope_scaling where it is
// scaled). Where a file has both, rope_scaling wins, as it does there.
void ReadRope(const JsonFields& fields, float default_base, bool partial_rotary, ModelConfig* config) {
  std::optional<JsonFields> rope = fields.Object("rope_scaling");
  if (!rope) rope = fields.Object("rope_parameters");
  if (rope && rope->Find("full_attention") != nullptr) {
    // One object for each kind of layer.
    if (const std::optional<JsonFields> windowed = rope->Object("sliding_attention")) {
      const std::string type = windowed->String("rope_type").value_or("default");
      if (type != "default") {
        ThrowInvalid("{} is {}; allowed: default", windowed->Where("rope_type"), Quoted(type));
      }
      config->window_rope_base = windowed->Float("rope_theta", 1, kMaxRopeBase);
    }
    rope = rope->Object("full_attention");
  }
  config->rope_base = fields.Float("rope_theta", 1, kMaxRopeBase).value_or(default_base);
  ReadRotary(fields, partial_rotary, config);
  if (!rope) return;

  config->rope_base = rope->Float("rope_theta", 1, kMaxRopeBase).value_or(config->rope_base);
  ReadRotary(*rope, partial_rotary, config);
  std::optional<std::string> type = rope->String("rope_type");
  if (!type) type = rope->String("type");
  if (!type || *type == "default") return;

  if (*type == "longrope") return ReadLongRope(fields, *rope, config);
  RopeScaling& scaling = config->rope_scaling;
  if (*type == "linear") {
    scaling.kind = RopeScaling::Kind::kLinear;
  } else if (*type == "llama3") {
    scaling.kind = RopeScaling::Kind::kLlama3;
  } else if (*type == "yarn") {
    scaling.kind = RopeScaling::Kind::kYarn;
  } else {
    ThrowInvalid("{} is {}; allowed: default, linear, llama3, yarn, longrope", rope->Where("rope_type"), Quoted(*type));
  }
  const std::optional<float> factor = rope->Float("factor", 1e-3, kMaxFactor);
  if (!factor) ThrowInvalid("{} is missing", rope->Where("factor"));
  scaling.factor = *factor;
  if (scaling.kind == RopeScaling::Kind::kLinear) return;

  std::optional<int32_t> original = fields.Int("original_max_position_embeddings", 1, kMaxContext);
  if (!original) original = rope->Int("original_max_position_embeddings", 1, kMaxContext);
  scaling.original_context = original.value_or(config->context);
  if (scaling.kind == RopeScaling::Kind::kLlama3) {
    scaling.low_freq_factor = rope->Float("low_freq_factor", 1e-3, kMaxFactor).value_or(scaling.low_freq_factor);
    scaling.high_freq_factor = rope->Float("high_freq_factor", 1e-3, kMaxFactor).value_or(scaling.high_freq_factor);
    if (scaling.low_freq_factor >= scaling.high_freq_factor) {
      ThrowInvalid("{} is {}; allowed: below high_freq_factor, {}", rope->Where("low_freq_factor"),
                   scaling.low_freq_factor, scaling.high_freq_factor);
    }
    return;
  }
  scaling.beta_fast = rope->Float("beta_fast", 1e-3, kMaxFactor).value_or(scaling.beta_fast);
  scaling.beta_slow = rope->Float("beta_slow", 1e-3, kMaxFactor).value_or(scaling.beta_slow);
  scaling.attention_factor = rope->Float("attention_factor", 1e-3, kMaxFactor);
  scaling.mscale = rope->Float("mscale", 0, kMaxFactor);
  scaling.mscale_all_dim = rope->Float("mscale_all_dim", 0, kMaxFactor);
  scaling.truncate = rope->Bool("truncate").value_or(true);
}

void RefuseWhatWeDoNotCompute(const JsonFields& fields, const Architecture& architecture) {
  const char* const wanted = architecture.gate == Gate::kGeluTanh ? "gelu_pytorch_tanh" : "silu";
  const char* const key = fields.Find("hidden_activation") != nullptr ? "hidden_activation" : "hidden_act";
  const std::string activation = fields.String(key).value_or(wanted);
  if (activation != wanted) ThrowInvalid("{} is {}; allowed: {}", fields.Where(key), Quoted(activation), wanted);
  if (const std::optional<JsonFields> quantization = fields.Object("quantization_config")) {
    const bool experts = !architecture.names.expert_gate_up.hugging_face.empty();
    if (experts && quantization->String("quant_method") == "mxfp4") return;
    ThrowInvalid("{} is {}; allowed: weights in F32, F16 or BF16, or a GGUF file", quantization->Where("quant_method"),
                 Quoted(quantization->String("quant_method").value_or("")));
  }
}

// InfLLM v2's settings as those of the policy infllm2-64, in the words of docs/settings.md. Of its `topk` blocks the
// first ones are some, the window's are not; `dense_len` is the length from which texts are read sparsely.
std::string ReadInfLlm2(const JsonFields& sparse) {
  constexpr int64_t kMost = 1 << 20;
  const auto must_be = [&](const char* key, int32_t only) {
    const int32_t value = sparse.Int(key, 1, kMost).value_or(only);
    if (value != only) ThrowInvalid("{} is {}; allowed: {}", sparse.Where(key), value, only);
  };
  must_be("kernel_size", 32);
  must_be("kernel_stride", 16);
  constexpr int32_t kBlock = 64;
  must_be("block_size", kBlock);
  if (sparse.Bool("use_nope").value_or(false)) ThrowInvalid("{} is true; allowed: false", sparse.Where("use_nope"));
  const auto whole_blocks = [](int32_t tokens) { return (tokens + kBlock - 1) / kBlock * kBlock; };
  const int32_t init = sparse.Int("init_blocks", 0, kMost / kBlock).value_or(1);
  const int32_t top_k = sparse.Int("topk", 0, kMost / kBlock).value_or(64);
  return Json{{"attention", "infllm2-64"},
              {"block", kBlock},
              {"init", init * kBlock},
              {"local", whole_blocks(sparse.Int("window_size", 0, kMost).value_or(2048))},
              {"top_k", std::max(0, top_k - init)},
              {"dense_below", whole_blocks(std::max(0, sparse.Int("dense_len", -1, kMost).value_or(8192)))}}
      .dump();
}

// The layers that have a window, where config.json lists them.
void ReadLayerTypes(const JsonFields& fields, ModelConfig* config) {
  const Json* const types = fields.Find("layer_types");
  if (types == nullptr || !types->is_array()) return;
  if (types->size() != static_cast<size_t>(config->num_layers)) {
    ThrowInvalid("{} lists {} layers; the model has {}", fields.Where("layer_types"), types->size(),
                 config->num_layers);
  }
  int32_t windowed = 0;
  for (const Json& type : *types) {
    if (type == "sliding_attention") ++windowed;
    if (type != "full_attention" && type != "sliding_attention") {
      ThrowInvalid("{} has {}; allowed: full_attention, sliding_attention", fields.Where("layer_types"),
                   JsonText(type));
    }
  }
  const std::optional<int32_t> window = fields.Int("sliding_window", 1, kMaxContext);
  if (windowed > 0 && !window) {
    ThrowInvalid("{} is missing; layer_types has sliding_attention", fields.Where("sliding_window"));
  }
  SetWindows(config, window.value_or(0),
             [&](int32_t layer) { return (*types)[static_cast<size_t>(layer)] == "sliding_attention"; });
}

// An id or a list of them; nothing where the key is not there.
std::optional<std::vector<int32_t>> ReadEndTokens(const JsonFields& fields) {
  const Json* value = fields.Find("eos_token_id");
  if (value == nullptr) return std::nullopt;
  if (!value->is_array()) return std::vector<int32_t>{*fields.Int("eos_token_id", 0, kMaxVocab - 1)};
  if (value->size() > kMaxEndTokens) {
    ThrowInvalid("{} is a list of {}; allowed: at most {}", fields.Where("eos_token_id"), value->size(), kMaxEndTokens);
  }
  std::vector<int32_t> out;
  for (const Json& item : *value) {
    if (!item.is_number_unsigned() || item.get<uint64_t>() >= kMaxVocab) {
      ThrowInvalid("{} holds {}; allowed: 0 to {}", fields.Where("eos_token_id"), JsonText(item), kMaxVocab - 1);
    }
    out.push_back(item.get<int32_t>());
  }
  return out;
}

// GGUF keeps Llama 3's scaling as the numbers that it divides the frequencies by. All models of that family blend
// between 1 and 4 turns; the factor, and the context that they were first trained for, are found from the numbers.
std::optional<RopeScaling> Llama3ScalingOf(const ModelConfig& config) {
  const std::vector<float>& divisors = config.rope_scaling.frequency_factors;
  if (config.rope_scaling.kind != RopeScaling::Kind::kNone) return std::nullopt;
  RopeScaling scaling;
  scaling.kind = RopeScaling::Kind::kLlama3;
  scaling.factor = divisors.back();
  scaling.low_freq_factor = 1;
  scaling.high_freq_factor = 4;
  const auto explains = [&](double context) {
    for (size_t i = 0; i < divisors.size(); ++i) {
      const double frequency = std::pow(double{config.rope_base}, -2.0 * static_cast<double>(i) / config.head_dim);
      const double turns = context * frequency / (2 * std::numbers::pi);
      const double smooth = std::clamp((turns - 1.0) / 3.0, 0.0, 1.0);
      const double divisor = 1 / ((1 - smooth) / double{scaling.factor} + smooth);
      if (std::fabs(divisor - double{divisors[i]}) > 1e-4 * divisor) return false;
    }
    return true;
  };
  for (int32_t context = 64; context <= 1 << 20; context *= 2) {
    scaling.original_context = context;
    if (explains(context)) return scaling;
  }
  return std::nullopt;
}

// 1e-05 and not 9.999999747378752e-06.
double Shortest(float value) { return std::stod(fmt::format("{}", value)); }

Json MakeRopeScaling(const RopeScaling& scaling) {
  switch (scaling.kind) {
    case RopeScaling::Kind::kNone: return nullptr;
    case RopeScaling::Kind::kLinear: return {{"rope_type", "linear"}, {"factor", Shortest(scaling.factor)}};
    case RopeScaling::Kind::kLlama3:
      return {{"rope_type", "llama3"},
              {"factor", Shortest(scaling.factor)},
              {"low_freq_factor", Shortest(scaling.low_freq_factor)},
              {"high_freq_factor", Shortest(scaling.high_freq_factor)},
              {"original_max_position_embeddings", scaling.original_context}};
    case RopeScaling::Kind::kYarn: {
      Json json = {{"rope_type", "yarn"},
                   {"factor", Shortest(scaling.factor)},
                   {"original_max_position_embeddings", scaling.original_context},
                   {"beta_fast", Shortest(scaling.beta_fast)},
                   {"beta_slow", Shortest(scaling.beta_slow)}};
      if (scaling.attention_factor) json["attention_factor"] = Shortest(*scaling.attention_factor);
      if (scaling.mscale) json["mscale"] = Shortest(*scaling.mscale);
      if (scaling.mscale_all_dim) json["mscale_all_dim"] = Shortest(*scaling.mscale_all_dim);
      if (!scaling.truncate) json["truncate"] = false;
      return json;
    }
    case RopeScaling::Kind::kLongRope: {
      const auto list = [](const std::vector<float>& factors) {
        Json json = Json::array();
        for (const float factor : factors) json.push_back(Shortest(factor));
        return json;
      };
      return {{"rope_type", "longrope"},
              {"short_factor", list(scaling.short_factors)},
              {"long_factor", list(scaling.long_factors)},
              {"attention_factor", Shortest(scaling.attention_factor.value_or(1))},
              {"original_max_position_embeddings", scaling.original_context}};
    }
  }
  return nullptr;
}

class HfWriter final : public ConfigWriter {
 public:
  explicit HfWriter(Json& json) : json_(json) {}
  bool gguf() const override { return false; }
  void Int(const char* name, const char*, int32_t value) override { Set(name, value); }
  void Float(const char* name, const char*, float value) override { Set(name, Shortest(value)); }
  void Bool(const char* name, const char*, bool value) override { Set(name, value); }
  void Ints(const char* name, const char*, const std::vector<int32_t>& values) override { Set(name, values); }

 private:
  template <class Value>
  void Set(const char* name, const Value& value) {
    if (*name != '\0') json_[name] = value;
  }
  Json& json_;
};

}  // namespace

Json MakeHfConfig(const ModelConfig& config, const std::string& path, const ModelBiases& biases) {
  Json json;
  const Architecture& architecture = ArchitectureOf(config);
  json["architectures"] = {architecture.hugging_face_class};
  json["model_type"] = architecture.hugging_face;
  json["num_hidden_layers"] = config.num_layers;
  json["hidden_size"] = config.hidden;
  json["intermediate_size"] = config.intermediate;
  json["vocab_size"] = config.vocab_size;
  json["max_position_embeddings"] = config.context;
  json["num_attention_heads"] = config.num_q_heads;
  json["num_key_value_heads"] = config.num_kv_heads;
  json["head_dim"] = config.head_dim;
  json["rms_norm_eps"] = Shortest(config.rms_eps);
  json[architecture.gate == Gate::kGeluTanh ? "hidden_activation" : "hidden_act"] =
      architecture.gate == Gate::kGeluTanh ? "gelu_pytorch_tanh" : "silu";
  json["pad_token_id"] = nullptr;  // else transformers takes the family's, which the vocabulary may not have
  json["tie_word_embeddings"] = config.tied_embeddings;
  json["rope_theta"] = Shortest(config.rope_base);
  RopeScaling scaling = config.rope_scaling;
  if (scaling.kind != RopeScaling::Kind::kLongRope && !scaling.frequency_factors.empty()) {
    const std::optional<RopeScaling> llama3 = Llama3ScalingOf(config);
    if (!llama3) {
      Throw(PHSA_UNSUPPORTED,
            "rope_freqs.weight is not Llama 3's scaling, and config.json has no word for another; "
            "a GGUF file can be written");
    }
    scaling = *llama3;
  }
  json["rope_scaling"] = MakeRopeScaling(scaling);
  if (scaling.kind == RopeScaling::Kind::kLongRope) {
    json["original_max_position_embeddings"] = scaling.original_context;
  }
  if (architecture.partial_rotary) {
    const int32_t turned = config.rotary_dim > 0 ? config.rotary_dim : config.head_dim;
    json["partial_rotary_factor"] = static_cast<double>(turned) / config.head_dim;
  }
  if (WindowOf(config) > 0) {
    json["layer_types"] = Json::array();
    for (int32_t i = 0; i < config.num_layers; ++i) {
      json["layer_types"].push_back(config.Layer(i).window > 0 ? "sliding_attention" : "full_attention");
    }
  }
  HfWriter writer(json);
  WriteConfig(config, path, writer);
  const bool both = architecture.output_bias != Presence::kAbsent && architecture.output_bias_key.empty();
  if (both && architecture.qkv_bias == Presence::kOptional && biases.qkv != biases.output) {
    Throw(PHSA_UNSUPPORTED,
          "{}: has a bias on some of q, k, v and o, for which config.json has no word; a GGUF file can be written",
          path);
  }
  if (architecture.qkv_bias == Presence::kOptional) json["attention_bias"] = biases.qkv;
  if (!architecture.output_bias_key.empty()) json[std::string(architecture.output_bias_key)] = biases.output;
  if (architecture.mlp_bias == Presence::kOptional) json["mlp_bias"] = biases.mlp;
  if (!config.eos_ids.empty()) json["eos_token_id"] = config.eos_ids.front();
  return json;
}

Json MakeHfGenerationConfig(const ModelConfig& config, int32_t bos) {
  Json json = Json::object();
  if (bos >= 0) json["bos_token_id"] = bos;
  if (!config.eos_ids.empty()) json["eos_token_id"] = config.eos_ids;
  const auto add = [&](const char* key, const std::optional<float>& value) {
    if (value) json[key] = Shortest(*value);
  };
  if (config.temperature) json["do_sample"] = *config.temperature > 0;
  if (config.temperature.value_or(0) > 0) json["temperature"] = Shortest(*config.temperature);
  if (config.top_k) json["top_k"] = *config.top_k;
  add("top_p", config.top_p);
  add("min_p", config.min_p);
  add("repetition_penalty", config.repetition_penalty);
  return json;
}

ModelConfig ReadHfConfig(const Json& json, const std::string& path) {
  const JsonFields fields(json, path);
  ModelConfig config;
  const Architecture& architecture = ReadArchitecture(fields);
  config.architecture = architecture.name;
  config.interleaved_rope_rows = architecture.interleaved_rope;
  config.norms_from_one = architecture.norms_from_one;
  RefuseWhatWeDoNotCompute(fields, architecture);
  config.num_layers = fields.RequiredInt("num_hidden_layers", 1, kMaxLayers);
  config.hidden = fields.RequiredInt("hidden_size", 1, kMaxWidth);
  config.intermediate = fields.RequiredInt("intermediate_size", 1, kMaxWidth);
  config.vocab_size = fields.RequiredInt("vocab_size", 1, kMaxVocab);
  config.context = fields.RequiredInt("max_position_embeddings", 1, kMaxContext);
  config.num_q_heads = fields.RequiredInt("num_attention_heads", 1, kMaxModelHeads);
  config.num_kv_heads = fields.Int("num_key_value_heads", 1, kMaxModelHeads).value_or(config.num_q_heads);
  std::optional<int32_t> head_dim = fields.Int("head_dim", 1, kMaxHeadDim);
  if (!head_dim && architecture.default_head_dim > 0) head_dim = architecture.default_head_dim;
  if (!head_dim && config.hidden % config.num_q_heads != 0) {
    ThrowInvalid("{} is missing, and {} heads do not divide hidden_size {}", fields.Where("head_dim"),
                 config.num_q_heads, config.hidden);
  }
  config.head_dim = head_dim.value_or(config.hidden / config.num_q_heads);
  config.rms_eps = fields.Float("rms_norm_eps", 0, 1).value_or(1e-6f);
  config.tied_embeddings = fields.Bool("tie_word_embeddings").value_or(false);
  config.eos_ids = ReadEndTokens(fields).value_or(std::vector<int32_t>());
  ReadRope(fields, architecture.default_rope_base, architecture.partial_rotary, &config);
  ReadLayerTypes(fields, &config);
  if (architecture.configure != nullptr) architecture.configure(Keys(fields), &config);
  if (fields.Object("phsa")) {
    Json settings = *fields.Find("phsa");
    // A set of its own lies beside the settings, so that transformers keeps it: phsa.hf.enable.
    const Json* const ids = fields.Find("phsa_punctuation_ids");
    if (ids != nullptr && settings.value("punctuation", Json()) == "custom") settings["punctuation"] = *ids;
    config.phsa_settings = settings.dump();
  } else if (architecture.infllm2) {
    if (const std::optional<JsonFields> sparse = fields.Object("sparse_config")) {
      config.phsa_settings = ReadInfLlm2(*sparse);
    }
  }
  return config;
}

void ReadHfGenerationConfig(const Json& json, const std::string& path, ModelConfig* config) {
  const JsonFields fields(json, path);
  if (std::optional<std::vector<int32_t>> ids = ReadEndTokens(fields)) config->eos_ids = std::move(*ids);
  config->temperature = fields.Float("temperature", 0, 100);
  config->top_k = fields.Int("top_k", 0, INT32_MAX);
  config->top_p = fields.Float("top_p", 0, 1);
  config->min_p = fields.Float("min_p", 0, 1);
  config->repetition_penalty = fields.Float("repetition_penalty", 1e-3, 100);
  if (!fields.Bool("do_sample").value_or(true)) config->temperature = 0;
}

}  // namespace phsa
