// RoPE's frequencies, with the scalings that long-context models ask for, as transformers computes them.
#ifndef PHSA_MODEL_ROPE_H_
#define PHSA_MODEL_ROPE_H_

#include <vector>

#include "io/model_source.h"

namespace phsa {

struct RopeFrequencies {
  std::vector<double> frequencies;  // [head_dim / 2], radians per position
  float factor = 1;                 // of sin and cos: YaRN's attention factor
};

RopeFrequencies MakeRope(const ModelConfig& config);

// What the layers of a model turn by, each once. A layer without RoPE has frequencies of 0, which turn nothing.
struct LayerRopes {
  std::vector<RopeFrequencies> all;
  std::vector<size_t> of_layer;
};
LayerRopes MakeLayerRopes(const ModelConfig& config);

}  // namespace phsa

#endif  // PHSA_MODEL_ROPE_H_
