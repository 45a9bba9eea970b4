// What the CUDA kernels take: plans, the engine and, through the C ABI, Python ask here. No header of CUDA is needed.
#ifndef PHSA_ATTENTION_CUDA_LIMITS_H_
#define PHSA_ATTENTION_CUDA_LIMITS_H_

#include <cstdint>

#include "attention/blocks.h"

namespace phsa::cuda {

inline constexpr int32_t kBlockTokens = 16;
// Every kernel is compiled for these; CMakeLists.txt and scripts/test-cuda.sh read the list here.
#define PHSA_CUDA_HEAD_DIMS(X) X(64) X(80) X(96) X(128) X(256)
inline constexpr int32_t kMaxGroup = 16;  // query heads of a KV head
inline constexpr int32_t kMaxTopK = 64;
inline constexpr int32_t kLongestSequence = 1 << 20;

enum class Dtype : int32_t { kF16 = 1, kBf16 = 2 };  // the values of phsa_dtype

// What a call computes, whatever its batch.
struct Shape : BlockRules {
  Dtype dtype;
  int32_t num_q_heads, num_kv_heads;
  int32_t head_dim;
  int32_t selection_heads;  // num_kv_heads, or num_q_heads where each head chooses for itself
  bool group_max;           // the group's score is the largest of its heads' softmax values, not their sum
  int32_t parts;            // rows of reps that a block has: 1, 2, 4 or 8; its score is the sum over them
  float scale;              // of the dot products, above 0

  constexpr int32_t Group() const { return num_q_heads / num_kv_heads; }
};

constexpr bool HasHeadDim(int32_t head_dim) {
#define PHSA_CASE(dim) \
  if (head_dim == dim) return true;
  PHSA_CUDA_HEAD_DIMS(PHSA_CASE)
#undef PHSA_CASE
  return false;
}

// NULL, or what the kernels cannot do with calls of this shape, and what they can.
constexpr const char* Unsupported(const Shape& shape) {
  if (shape.dtype != Dtype::kBf16 && shape.dtype != Dtype::kF16) return "dtype: the CUDA kernels take bf16 and fp16";
  if (!HasHeadDim(shape.head_dim)) return "head_dim: the CUDA kernels take 64, 80, 96, 128 and 256";
  if (shape.num_kv_heads <= 0 || shape.num_q_heads % shape.num_kv_heads != 0)
    return "num_kv_heads must divide num_q_heads";
  if (shape.Group() > kMaxGroup) return "group: the CUDA kernels take up to 16 query heads a KV head";
  if (shape.parts != 1 && shape.parts != 2 && shape.parts != 4 && shape.parts != 8)
    return "parts: the CUDA kernels take 1, 2, 4 and 8";
  if (shape.top_k < 0 || shape.top_k > kMaxTopK) return "top_k: the CUDA kernels take 0 to 64";
  return nullptr;
}
constexpr const char* Unsupported(const Shape& shape, int32_t max_kv_len) {
  if (max_kv_len > kLongestSequence) return "kv_len: the CUDA kernels take up to 1048576 tokens";
  return Unsupported(shape);
}

}  // namespace phsa::cuda

#endif  // PHSA_ATTENTION_CUDA_LIMITS_H_
