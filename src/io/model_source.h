// A model's files, opened: its configuration, its tensors, and what its tokenizer is made of. One interface over
// GGUF files and Hugging Face folders; the names are Hugging Face's.
#ifndef PHSA_IO_MODEL_SOURCE_H_
#define PHSA_IO_MODEL_SOURCE_H_

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/adapter.h"
#include "io/model_config.h"
#include "io/tensor.h"

namespace phsa {

// What a GGUF file holds of its tokenizer: the arrays as they lie there.
struct GgufTokenizer {
  std::string model, pre;            // "gpt2", "llama", "t5"; "smollm", "qwen2", "llama-bpe", "gpt-2", …
  std::vector<std::string> tokens;   // in GPT-2's printable byte alphabet
  std::vector<int32_t> token_types;  // 1 normal, 3 control, 4 user-defined, …; may be empty
  std::vector<std::string> merges;   // "left right"; of the model llama, none: scores say which pair is joined first
  std::vector<float> scores;         // of the models llama and t5: [token]
  bool add_space_prefix = true;      // likewise: a text begins with a space
  bool one_space = false;            // of the model t5: spaces in a row are one, and none at the ends
  std::string charsmap;              // likewise: what characters become (tokenizer/charsmap.h)
  int32_t bos = -1, eos = -1, unknown = -1, padding = -1;
  std::vector<int32_t> end_of_turn;  // eot and eom where the file names them
  bool add_bos = false, add_eos = false;
};

class ModelSource {
 public:
  // A .gguf file (by its magic, whatever its name) or a folder with config.json. Checks everything that can be checked
  // without a model: sizes, offsets, overlaps, types, that all required configuration is there and in range. Throws
  // phsa::Error: one line, what is wrong in which file at which offset, and what to do.
  // `adapter`: the folder of a LoRA adapter that belongs to the model from then on; empty: none.
  static std::unique_ptr<ModelSource> Open(const std::filesystem::path& path,
                                           const std::filesystem::path& adapter = {});
  virtual ~ModelSource() = default;
  // Another adapter in place of the one that it has; empty: none. The settings that config() carries follow. Throws
  // phsa::Error, and changes nothing, where the adapter is not for this model.
  void SetAdapter(const std::filesystem::path& folder);
  // One that becomes nobody's. Throws phsa::Error where it is not for this model.
  std::unique_ptr<Adapter> OpenAdapter(const std::filesystem::path& folder) const;
  ModelConfig ConfigWith(const Adapter& adapter) const;  // config() as if it had this one

  // The longest text that will be read, as far as weights and RoPE care (RopeScaling::ChooseFactors); the model's own
  // context to begin with. Before anything is computed.
  void SetContext(int32_t tokens) { config_.rope_scaling.ChooseFactors(tokens); }

  const ModelConfig& config() const { return config_; }
  const std::string& path() const { return path_; }
  const std::string& format() const { return format_; }  // "GGUF v3", "Hugging Face, 2 safetensors files"
  uint64_t file_bytes() const { return file_bytes_; }
  const Adapter* adapter() const { return adapter_.get(); }  // null: none
  // By Hugging Face's name ("model.layers.0.self_attn.q_proj.weight"); null where there is none.
  virtual const Tensor* Find(std::string_view name) const = 0;
  virtual std::vector<const Tensor*> Tensors() const = 0;  // all, in the file's order
  virtual void Release(const Tensor& tensor) const = 0;    // its pages may leave memory
  // Key and printable value of every metadata entry, arrays shortened: for `phsa info`.
  virtual std::vector<std::pair<std::string, std::string>> Metadata() const = 0;

  // Exactly one of the two is set, or none where the folder has no tokenizer.json.
  const std::optional<GgufTokenizer>& gguf_tokenizer() const { return gguf_tokenizer_; }
  const std::optional<std::filesystem::path>& tokenizer_json() const { return tokenizer_json_; }
  // tokenizer_config.json's text ("" where absent); it says whether a begin token is added.
  const std::string& tokenizer_config() const { return tokenizer_config_; }
  const std::string& chat_template() const { return chat_template_; }  // "" where the model has none

 protected:
  ModelConfig config_;
  std::string path_, format_, tokenizer_config_, chat_template_;
  uint64_t file_bytes_ = 0;
  std::unique_ptr<Adapter> adapter_;
  std::string own_settings_;  // config_.phsa_settings without an adapter, while there is one
  std::optional<GgufTokenizer> gguf_tokenizer_;
  std::optional<std::filesystem::path> tokenizer_json_;
};

}  // namespace phsa

#endif  // PHSA_IO_MODEL_SOURCE_H_
