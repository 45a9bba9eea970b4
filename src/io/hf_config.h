// config.json and generation_config.json of a Hugging Face folder.
#ifndef PHSA_IO_HF_CONFIG_H_
#define PHSA_IO_HF_CONFIG_H_

#include <filesystem>

#include "io/json.h"
#include "io/model_source.h"

namespace phsa {

// The configuration of a model from its config.json, already parsed; `path` is for messages. What this engine would
// compute differently (another activation, sliding windows, unknown RoPE scaling, quantised weights) is refused.
// tied_embeddings is what the file says, and false where it does not.
ModelConfig ReadHfConfig(const Json& json, const std::string& path);

// What generation_config.json says over what config.json says.
void ReadHfGenerationConfig(const Json& json, const std::string& path, ModelConfig* config);

// The config.json of a model, but for its PHSA settings: what ReadHfConfig reads back, and transformers too.
// `path`: of the model, for messages. Throws phsa::Error where a GGUF file says something that config.json has no word
// for.
struct ModelBiases {
  bool qkv = false, output = false, mlp = false;  // whether the model has such tensors
};
Json MakeHfConfig(const ModelConfig& config, const std::string& path, const ModelBiases& biases);
Json MakeHfGenerationConfig(const ModelConfig& config, int32_t bos);  // bos: -1 for none

}  // namespace phsa

#endif  // PHSA_IO_HF_CONFIG_H_
