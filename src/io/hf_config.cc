#include "io/hf_config.h"

#include <utility>

#include "base/errors.h"
#include "io/source.h"

namespace phsa {
namespace {

constexpr double kMaxRopeBase = 1e15;
constexpr double kMaxFactor = 1e6;
constexpr size_t kMaxEndTokens = 1024;

// By model_type where it is there, else by the class in architectures.
std::string ReadArchitecture(const JsonFields& fields) {
  constexpr std::pair<const char*, const char*> kClasses[] = {
      {"LlamaForCausalLM", "llama"}, {"Qwen2ForCausalLM", "qwen2"}, {"Qwen3ForCausalLM", "qwen3"}};
  if (const Json* classes = fields.Find("architectures"); classes != nullptr && classes->is_array()) {
    for (const Json& item : *classes) {
      for (const auto& [name, architecture] : kClasses) {
        if (item == name) return architecture;
      }
    }
    if (!classes->empty()) {
      ThrowInvalid("{} is {}; allowed: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
                   fields.Where("architectures"), JsonText(classes->front()));
    }
  }
  std::string type = fields.String("model_type").value_or("");
  if (!IsKnownArchitecture(type)) {
    ThrowInvalid("{} is {}; allowed: {}", fields.Where("model_type"), Quoted(type), kArchitectures);
  }
  return type;
}

// RoPE in the style of transformers 5 (one object rope_parameters) and before (rope_theta, and rope_scaling where it is
// scaled). Where a file has both, rope_scaling wins, as it does there.
void ReadRope(const JsonFields& fields, ModelConfig* config) {
  std::optional<JsonFields> rope = fields.Object("rope_scaling");
  if (!rope) rope = fields.Object("rope_parameters");
  config->rope_base = fields.Float("rope_theta", 1, kMaxRopeBase).value_or(10000);
  const std::optional<float> rotated = fields.Float("partial_rotary_factor", 0, 1);
  if (rotated && *rotated != 1) {
    ThrowInvalid("{} is {}; allowed: 1, the whole head", fields.Where("partial_rotary_factor"), *rotated);
  }
  if (!rope) return;

  config->rope_base = rope->Float("rope_theta", 1, kMaxRopeBase).value_or(config->rope_base);
  const std::optional<float> rotated_here = rope->Float("partial_rotary_factor", 0, 1);
  if (rotated_here && *rotated_here != 1) {
    ThrowInvalid("{} is {}; allowed: 1, the whole head", rope->Where("partial_rotary_factor"), *rotated_here);
  }
  std::optional<std::string> type = rope->String("rope_type");
  if (!type) type = rope->String("type");
  if (!type || *type == "default") return;

  RopeScaling& scaling = config->rope_scaling;
  if (*type == "linear") {
    scaling.kind = RopeScaling::Kind::kLinear;
  } else if (*type == "llama3") {
    scaling.kind = RopeScaling::Kind::kLlama3;
  } else if (*type == "yarn") {
    scaling.kind = RopeScaling::Kind::kYarn;
  } else {
    ThrowInvalid("{} is {}; allowed: default, linear, llama3, yarn", rope->Where("rope_type"), Quoted(*type));
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

void RefuseWhatWeDoNotCompute(const JsonFields& fields) {
  const std::string activation = fields.String("hidden_act").value_or("silu");
  if (activation != "silu") {
    ThrowInvalid("{} is {}; allowed: silu", fields.Where("hidden_act"), Quoted(activation));
  }
  if (fields.Bool("use_sliding_window").value_or(false)) {
    ThrowInvalid("{} is true; allowed: false", fields.Where("use_sliding_window"));
  }
  if (const Json* types = fields.Find("layer_types"); types != nullptr && types->is_array()) {
    for (const Json& type : *types) {
      if (type != "full_attention") {
        ThrowInvalid("{} has {}; allowed: full_attention", fields.Where("layer_types"), JsonText(type));
      }
    }
  }
  if (const std::optional<JsonFields> quantization = fields.Object("quantization_config")) {
    ThrowInvalid("{} is {}; allowed: weights in F32, F16 or BF16, or a GGUF file", quantization->Where("quant_method"),
                 Quoted(quantization->String("quant_method").value_or("")));
  }
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

}  // namespace

ModelConfig ReadHfConfig(const Json& json, const std::string& path) {
  const JsonFields fields(json, path);
  ModelConfig config;
  config.architecture = ReadArchitecture(fields);
  RefuseWhatWeDoNotCompute(fields);
  config.num_layers = fields.RequiredInt("num_hidden_layers", 1, kMaxLayers);
  config.hidden = fields.RequiredInt("hidden_size", 1, kMaxWidth);
  config.intermediate = fields.RequiredInt("intermediate_size", 1, kMaxWidth);
  config.vocab_size = fields.RequiredInt("vocab_size", 1, kMaxVocab);
  config.context = fields.RequiredInt("max_position_embeddings", 1, kMaxContext);
  config.num_q_heads = fields.RequiredInt("num_attention_heads", 1, kMaxModelHeads);
  config.num_kv_heads = fields.Int("num_key_value_heads", 1, kMaxModelHeads).value_or(config.num_q_heads);
  std::optional<int32_t> head_dim = fields.Int("head_dim", 1, kMaxHeadDim);
  if (!head_dim && config.architecture == "qwen3") head_dim = 128;  // transformers' default, whatever the width
  if (!head_dim && config.hidden % config.num_q_heads != 0) {
    ThrowInvalid("{} is missing, and {} heads do not divide hidden_size {}", fields.Where("head_dim"),
                 config.num_q_heads, config.hidden);
  }
  config.head_dim = head_dim.value_or(config.hidden / config.num_q_heads);
  config.rms_eps = fields.Float("rms_norm_eps", 0, 1).value_or(1e-6f);
  config.tied_embeddings = fields.Bool("tie_word_embeddings").value_or(false);
  config.eos_ids = ReadEndTokens(fields).value_or(std::vector<int32_t>());
  ReadRope(fields, &config);
  if (fields.Object("phsa")) config.phsa_settings = fields.Find("phsa")->dump();
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
