// The activations of a step in a GPU's memory.
#ifndef PHSA_MODEL_CUDA_ACTIVATIONS_H_
#define PHSA_MODEL_CUDA_ACTIVATIONS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "io/model_config.h"
#include "ops/cuda/ops.h"

namespace phsa::cuda {

inline int32_t QWidth(const ModelConfig& config) { return config.num_q_heads * config.head_dim; }
inline int32_t QkvWidth(const ModelConfig& config) {
  return (config.num_q_heads + 2 * config.num_kv_heads) * config.head_dim;
}
// Logits are made this many rows at a time.
inline int32_t LogitRows(int32_t max_rows) { return std::min(max_rows, 128); }
// Rows of logits begin at multiples of 256 bytes.
inline int64_t LogitsStride(const ModelConfig& config) { return (int64_t{config.vocab_size} + 63) / 64 * 64; }
// Rows go through experts this many at a time: what their halves take grows with it.
inline int32_t RoutedRows(const ModelConfig& config, int32_t max_rows) {
  constexpr int32_t kPairs = 1 << 15;  // of a row and an expert
  return std::min(max_rows, std::max(1, kPairs / std::max(config.experts_per_token, 1)));
}

// All of device memory. [max_rows][…] unless it says something else.
struct Activations {
  float* residual = nullptr;   // [hidden]
  uint16_t* normed = nullptr;  // [hidden]
  // [(heads + 2 · kv heads) · head_dim]. When queries, keys and values are where they belong, the attention's output
  // takes its place, [heads · head_dim].
  uint16_t* qkv = nullptr;
  uint16_t* queries = nullptr;    // [heads · head_dim] in the cache's dtype
  uint16_t* gate_up = nullptr;    // [2 · intermediate]
  uint16_t* activated = nullptr;  // [intermediate]
  float* projected = nullptr;     // [hidden]: what is normed before it is added; models without such norms have none
  float* cos_sin = nullptr;       // [rope][max_rows][head_dim]
  double* frequencies = nullptr;  // [rope][head_dim / 2]
  float* kept = nullptr;          // [LogitRows][hidden]: rows of the residual stream behind the last attention
  float* logits = nullptr;        // [LogitRows][LogitsStride]
  TopLogits* top = nullptr;       // one of each
  uint8_t* top_workspace = nullptr;
  // Of layers with experts; [RoutedRows][…], pairs: [RoutedRows · experts_per_token][…].
  struct Routed {
    float* logits = nullptr;                            // [experts]
    int32_t *experts = nullptr, *order = nullptr;       // pairs
    float* weights = nullptr;                           // pairs
    int32_t *starts = nullptr, *tiles = nullptr;        // [experts + 1], [MaxTiles][2]
    uint16_t *gate_up = nullptr, *activated = nullptr;  // pairs: [2 · expert_width], [expert_width]
    float* out = nullptr;                               // pairs: [hidden]
  } routed;
  size_t size = 0;

  Activations() = default;
  Activations(const ModelConfig& config, int32_t max_rows, uint8_t* memory);
};

}  // namespace phsa::cuda

#endif  // PHSA_MODEL_CUDA_ACTIVATIONS_H_
