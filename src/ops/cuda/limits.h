// What the GPU's operations take at most. No CUDA in here: what is refused is tested on machines without.
#ifndef PHSA_OPS_CUDA_LIMITS_H_
#define PHSA_OPS_CUDA_LIMITS_H_

#include <cstdint>

namespace phsa::cuda {

inline constexpr int32_t kMaxTopVocab = 1 << 18;  // tokens of a vocabulary

// Sizes of a head that RopeAndAppend has kernels for.
inline constexpr int32_t kHeadDims[] = {64, 80, 96, 128, 256};

// Experts of a layer, those that a row takes, and the width of the rows that are routed to them.
inline constexpr int32_t kMaxExperts = 1024, kMaxTakenExperts = 64, kMaxRoutedDim = 12160;

}  // namespace phsa::cuda

#endif  // PHSA_OPS_CUDA_LIMITS_H_
