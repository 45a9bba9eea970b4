// A family of models as data: what its files call things, what a layer of it has, and which layers differ. All are
// pre-norm decoders with grouped-query attention and a gated MLP; one file each describes them (architectures/), and
// everything that reads, runs or writes models follows the description.
#ifndef PHSA_IO_ARCHITECTURE_H_
#define PHSA_IO_ARCHITECTURE_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/model_config.h"

namespace phsa {

enum class Presence : uint8_t { kAbsent, kOptional, kRequired };

enum class Gate : uint8_t { kSilu, kGeluTanh, kClampedSwiglu };

// A tensor's name in both kinds of files, after "model.layers.N." and "blk.N."; empty: there is none.
struct TensorName {
  std::string_view hugging_face, gguf;
};

// The tensors of a layer; each may have a weight and a bias. As Llama's are called, unless a family says otherwise.
struct LayerNames {
  TensorName attention_norm = {"input_layernorm", "attn_norm"};
  TensorName q = {"self_attn.q_proj", "attn_q"};
  TensorName k = {"self_attn.k_proj", "attn_k"};
  TensorName v = {"self_attn.v_proj", "attn_v"};
  TensorName q_norm = {"self_attn.q_norm", "attn_q_norm"};
  TensorName k_norm = {"self_attn.k_norm", "attn_k_norm"};
  TensorName o = {"self_attn.o_proj", "attn_output"};
  TensorName attention_post_norm = {};  // of the attention's output, before it is added
  TensorName mlp_norm = {"post_attention_layernorm", "ffn_norm"};
  TensorName gate = {"mlp.gate_proj", "ffn_gate"};
  TensorName up = {"mlp.up_proj", "ffn_up"};
  TensorName down = {"mlp.down_proj", "ffn_down"};
  TensorName mlp_post_norm = {};  // of the MLP's output, before it is added
  // Two or three tensors that lie in one, their rows one behind the other.
  TensorName qkv = {}, gate_up = {};
  // Experts: in Hugging Face's files one tensor each, at "mlp.experts.E.…", in GGUF one for all.
  TensorName router = {}, expert_gate = {}, expert_up = {}, expert_down = {};
  // Where there is this name, Hugging Face's files have one tensor for all experts too, gate and up in one, and no
  // ".weight" behind it: [expert][hidden][2 · width], gates and ups by turns, and down as [expert][width][hidden]; or
  // both in MXFP4 and the other way round, as "…_blocks" and "…_scales". Their biases end in "_bias".
  TensorName expert_gate_up = {};
  // A score for each query head that joins its softmax; without ".weight" in Hugging Face's files.
  TensorName sinks = {};

  std::vector<TensorName> All() const {
    return {attention_norm, q,         k,           v,    q_norm,        k_norm, o,       attention_post_norm,
            mlp_norm,       gate,      up,          down, mlp_post_norm, qkv,    gate_up, router,
            expert_gate,    expert_up, expert_down, sinks};
  }
};

// The keys of a model's configuration, by what config.json calls them and what GGUF's metadata do (behind the name of
// the architecture); an empty name: that kind of file has no such key. Throw phsa::Error, naming file and key, where a
// value has another type or lies outside of the range.
class ConfigKeys {
 public:
  virtual ~ConfigKeys() = default;
  virtual bool gguf() const = 0;
  virtual std::optional<int32_t> Int(const char* hugging_face, const char* gguf, int64_t low, int64_t high) const = 0;
  virtual std::optional<float> Float(const char* hugging_face, const char* gguf, double low, double high) const = 0;
  virtual std::optional<bool> Bool(const char* hugging_face, const char* gguf) const = 0;
  virtual std::optional<std::vector<int32_t>> Ints(const char* hugging_face, const char* gguf, int64_t low,
                                                   int64_t high) const = 0;
  // "FILE: key", for messages.
  virtual std::string Where(const char* hugging_face, const char* gguf) const = 0;
};

// What a family writes of its own, as ConfigKeys reads it; an empty name: that kind of file has no such key.
class ConfigWriter {
 public:
  virtual ~ConfigWriter() = default;
  virtual bool gguf() const = 0;
  virtual void Int(const char* hugging_face, const char* gguf, int32_t value) = 0;
  virtual void Float(const char* hugging_face, const char* gguf, float value) = 0;
  virtual void Bool(const char* hugging_face, const char* gguf, bool value) = 0;
  virtual void Ints(const char* hugging_face, const char* gguf, const std::vector<int32_t>& values) = 0;
};

struct Architecture {
  std::string_view name;                // ModelConfig::architecture
  std::string_view gguf;                // general.architecture; empty: GGUF has no such name
  std::string_view hugging_face;        // model_type
  std::string_view hugging_face_class;  // in config.json's architectures
  LayerNames names;
  Presence qkv_bias = Presence::kAbsent, output_bias = Presence::kAbsent, mlp_bias = Presence::kAbsent;
  // config.json's word for a bias behind the attention, where attention_bias is that of q, k and v alone.
  std::string_view output_bias_key = {};
  Presence qk_norm = Presence::kAbsent;
  Presence expert_bias = Presence::kAbsent;  // of the router, and of the experts' gate, up and down
  Gate gate = Gate::kSilu;
  bool gguf_interleaves_rope_rows = false;  // ModelConfig::interleaved_rope_rows, in GGUF files alone
  bool interleaved_rope = false;            // and in both: the model turns neighbours
  bool partial_rotary = false;              // RoPE may turn a part of each head
  bool infllm2 = false;                     // config.json may have sparse_config, InfLLM v2's settings
  bool norms_from_one = false;      // ModelConfig::norms_from_one, in Hugging Face's files; converters add the 1
  int32_t default_head_dim = 0;     // where config.json has none, whatever the width; 0: width / heads
  float default_rope_base = 10000;  // where the file has none
  // What is this family's own: reads its keys, and says which layers differ. `config` has what all have; its `layers`
  // are there where config.json lists layer_types, and empty otherwise. Null: nothing is.
  void (*configure)(const ConfigKeys& keys, ModelConfig* config) = nullptr;
  // The other way round; what a kind of file has no key for is left out, and found by reading again (WriteConfig).
  void (*write)(const ModelConfig& config, ConfigWriter& to) = nullptr;
};

// All of them.
std::span<const Architecture* const> Architectures();
// Throws phsa::Error, naming all, where there is none of that name.
const Architecture& ArchitectureOf(const ModelConfig& config);
// "llama, qwen2, …": the names that Architecture::*name is for.
std::string ArchitectureNames(std::string_view Architecture::*name);

// What the model has beyond the keys that all architectures have: windows, experts, scales. Throws phsa::Error, naming
// `path`, where what is read from these keys would be another model.
void WriteConfig(const ModelConfig& config, const std::string& path, ConfigWriter& to);
// A thing that two configurations of one architecture differ in, in words; empty: none.
std::string DifferenceOf(const ModelConfig& a, const ModelConfig& b);

// For Architecture::configure: layers [0, num_layers) of which `windowed` says which have the window.
template <class Windowed>
void SetWindows(ModelConfig* config, int32_t window, const Windowed& windowed) {
  config->layers.resize(static_cast<size_t>(config->num_layers));
  for (int32_t i = 0; i < config->num_layers; ++i) {
    config->layers[static_cast<size_t>(i)].window = windowed(i) ? window : 0;
  }
}
// How many experts, how many a token takes, and their width, by the key of config.json that it has; all layers have
// them.
void ReadExperts(const ConfigKeys& keys, const char* width, ModelConfig* config);
void WriteExperts(const ModelConfig& config, const char* count, const char* width, ConfigWriter& to);
// The window that layers have; 0: none has one.
int32_t WindowOf(const ModelConfig& config);
// Qwen's keys, and who has them from there: use_sliding_window, sliding_window, and the first layer with a window.
void ReadQwenWindows(const ConfigKeys& keys, ModelConfig* config);
void WriteQwenWindows(const ModelConfig& config, ConfigWriter& to);

// One file each, in architectures/.
extern const Architecture kLlama, kQwen2, kQwen3, kMistral, kMinistral, kSmolLm3, kGemma3, kQwen3Moe, kPhi3, kGlm4,
    kGranite, kMiniCpm, kGptOss, kErnie45, kSeedOss;

}  // namespace phsa

#endif  // PHSA_IO_ARCHITECTURE_H_
