// What a model's files say of it, in our terms.
#ifndef PHSA_IO_MODEL_CONFIG_H_
#define PHSA_IO_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace phsa {

struct RopeScaling {
  enum class Kind : uint8_t { kNone, kLinear, kLlama3, kYarn, kLongRope };
  Kind kind = Kind::kNone;
  float factor = 1;
  int32_t original_context = 0;
  float low_freq_factor = 1, high_freq_factor = 4;                // llama3
  float beta_fast = 32, beta_slow = 1;                            // yarn
  std::optional<float> attention_factor, mscale, mscale_all_dim;  // yarn and longrope, as transformers reads them
  bool truncate = true;                                           // yarn
  // Divides the base frequencies, [head_dim / 2]: GGUF's rope_freqs.weight, or one of longrope's two lists. Empty:
  // none.
  std::vector<float> frequency_factors;
  std::vector<float> short_factors, long_factors;  // longrope

  // longrope turns a text that is longer than the original context by other angles than a shorter one. A cache keeps
  // keys as they were turned, so the longest text that may come decides for all: never the length that one has so far.
  void ChooseFactors(int32_t context) {
    if (kind == Kind::kLongRope) frequency_factors = context > original_context ? long_factors : short_factors;
  }
};

// What the attention of one layer does, where the layers of a model differ.
struct LayerTraits {
  int32_t window = 0;  // tokens that a query attends to at most, its own included; 0: no limit
  bool rope = true;
  bool experts = false;  // the MLP is one of experts, chosen for each token
};

struct ModelConfig {
  std::string architecture;  // Architecture::name (io/architecture.h): others are refused by Open, naming all
  std::string name;          // general.name, or the folder's name
  int32_t num_layers = 0, hidden = 0, intermediate = 0, vocab_size = 0, context = 0;
  int32_t num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
  int32_t rotary_dim = 0;  // the first dimensions of a head, which RoPE turns; 0: all
  // Of the layers with experts: how many, how many a token takes, and how wide one is.
  int32_t num_experts = 0, experts_per_token = 0, expert_width = 0;
  bool normalized_experts = true;                 // the weights of those that a token takes add up to 1
  float swiglu_alpha = 1.702f, swiglu_limit = 7;  // of Gate::kClampedSwiglu
  float rms_eps = 1e-6f;
  float rope_base = 10000;
  RopeScaling rope_scaling;
  std::optional<float> window_rope_base;  // of the layers with a window, which are not scaled then
  bool tied_embeddings = false;           // there is no lm_head.weight
  // The rows of each head of q_proj and k_proj lie for RoPE over neighbours (2i, 2i+1), as GGUF stores the architecture
  // llama, and not over halves (i, i + head_dim / 2), as Hugging Face does: row 2i + j of the file's head is row
  // i + j · head_dim / 2 of ours.
  bool interleaved_rope_rows = false;
  std::vector<LayerTraits> layers;  // [num_layers]; empty: none differs
  float attention_scale = 0;        // of the dot products; 0: 1/√head_dim
  // What the embedding, and each layer's two additions to the residual stream, are multiplied by; what the logits are
  // divided by.
  float embedding_scale = 1, residual_scale = 1, logits_divisor = 1;
  bool norms_from_one = false;  // the file's norms hold what is to be added to 1
  // The adapter's phsa.json, else config.json's "phsa" object or GGUF's phsa.settings, as JSON text; empty: none.
  std::string phsa_settings;

  // What generation_config.json or the GGUF metadata recommend.
  std::vector<int32_t> eos_ids;
  std::optional<float> temperature, top_p, min_p, repetition_penalty;
  std::optional<int32_t> top_k;

  LayerTraits Layer(int32_t layer) const { return layers.empty() ? LayerTraits() : layers[static_cast<size_t>(layer)]; }
};

}  // namespace phsa

#endif  // PHSA_IO_MODEL_CONFIG_H_
