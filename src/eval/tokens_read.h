// How many tokens attention reads, counted instead of measured.
#ifndef PHSA_EVAL_TOKENS_READ_H_
#define PHSA_EVAL_TOKENS_READ_H_

#include <cstdint>

#include "model/decoder.h"

namespace phsa {

// What the decoder counts as it reads a text's first `tokens` tokens: all layers and query heads.
TokensRead CountTokensRead(const ModelConfig& config, const LayerSettings& attention, int32_t tokens);
int64_t DenseTokensRead(const ModelConfig& config, int32_t tokens);

}  // namespace phsa

#endif  // PHSA_EVAL_TOKENS_READ_H_
