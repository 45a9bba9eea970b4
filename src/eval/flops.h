// What the attention of a text costs by the formulas of docs/compare.md: counted, not measured.
#ifndef PHSA_EVAL_FLOPS_H_
#define PHSA_EVAL_FLOPS_H_

#include <cstdint>

#include "io/model_source.h"
#include "phsa/settings.h"

namespace phsa {

// A multiplication and an addition are one each; softmax, top-K and the model's other layers are left out. Doubles: a
// million tokens of a large model are beyond what 64 bits count exactly.
struct AttentionFlops {
  double attention = 0;        // queries with keys, weights with values
  double scores = 0;           // queries with representatives
  double representatives = 0;  // of the blocks
  double total() const { return attention + scores + representatives; }
  void operator+=(const AttentionFlops& other) {
    attention += other.attention, scores += other.scores, representatives += other.representatives;
  }
};

// All layers of a model that reads `tokens` tokens from the beginning.
AttentionFlops CountAttentionFlops(const LayerSettings& attention, const ModelConfig& config, int32_t tokens);

}  // namespace phsa

#endif  // PHSA_EVAL_FLOPS_H_
