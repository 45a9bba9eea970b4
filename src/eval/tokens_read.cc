#include "eval/tokens_read.h"

#include "attention/policies.h"

namespace phsa {
namespace {

int64_t TokensReadInLayer(const Settings& settings, int32_t tokens) {
  const BlockRules rules = RulesOf(settings);
  const int32_t block = settings.block_size;
  int64_t read = 0;
  for (int32_t position = 0; position < tokens; ++position) {
    read += rules.TokensRead(position, rules.Chosen(position / block), block);
  }
  return read;
}

}  // namespace

TokensRead CountTokensRead(const ModelConfig& config, const LayerSettings& attention, int32_t tokens) {
  const int64_t base = TokensReadInLayer(attention.base, tokens);
  TokensRead count;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    const auto own = attention.layers.find(layer);
    count.read += own == attention.layers.end() ? base : TokensReadInLayer(own->second, tokens);
  }
  count.read *= config.num_q_heads;
  count.dense = DenseTokensRead(config, tokens);
  return count;
}

int64_t DenseTokensRead(const ModelConfig& config, int32_t tokens) {
  return int64_t{tokens} * (tokens + 1) / 2 * config.num_layers * config.num_q_heads;
}

}  // namespace phsa
