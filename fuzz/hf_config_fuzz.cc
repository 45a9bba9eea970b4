// Any config.json, read also as generation_config.json, is either refused with phsa::Error or gives numbers in range.
#include "io/hf_config.h"

#include "model_file.h"
#include "phsa/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const phsa::MemoryFile file(data, size);
  try {
    const phsa::Json json = phsa::ReadJsonFile(file.path(), 1 << 20);
    phsa::ModelConfig config;
    phsa::ReadHfGenerationConfig(json, file.path(), &config);
    config = phsa::ReadHfConfig(json, file.path());
    if (config.num_layers < 1 || config.hidden < 1 || config.vocab_size < 1 || config.head_dim < 1) std::abort();
    if (!(config.rope_base >= 1) || !(config.rope_scaling.factor > 0) || !(config.rms_eps >= 0)) std::abort();
    for (const int32_t id : config.eos_ids) {
      if (id < 0) std::abort();
    }
  } catch (const phsa::Error&) {
  }
  return 0;
}
