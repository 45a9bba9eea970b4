// What one architecture does differently from another. All of them are pre-norm decoders with grouped-query attention,
// RoPE and a gated MLP (decoder.cc); which tensors a layer has says the rest.
#ifndef PHSA_MODEL_ARCHITECTURE_H_
#define PHSA_MODEL_ARCHITECTURE_H_

#include <string_view>

#include "model/weights.h"

namespace phsa {

enum class Presence : uint8_t { kAbsent, kOptional, kRequired };

struct Architecture {
  std::string_view name;  // as in ModelConfig::architecture
  Presence qkv_bias, output_bias, mlp_bias, qk_norm;
};

extern const Architecture kLlama, kQwen2, kQwen3;  // one file each: arch_*.cc

const Architecture& ArchitectureOf(const ModelConfig& config);

}  // namespace phsa

#endif  // PHSA_MODEL_ARCHITECTURE_H_
