// What the cores can do at most: the roof that the benchmarks compare with.
#ifndef PHSA_BENCH_PEAK_H_
#define PHSA_BENCH_PEAK_H_

#include <cstdint>

namespace phsa {

// `steps` times 12 · 16 multiply-adds on registers.
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "fma", "default"), optimize("O3", "fp-contract=fast")))
#endif
inline float
PeakLoop(int64_t steps) {
  typedef float Vec __attribute__((vector_size(64)));
  Vec acc[12];
  for (int i = 0; i < 12; ++i) acc[i] = Vec{} + static_cast<float>(i);
  const Vec a = Vec{} + 0.999f, b = Vec{} + 1e-3f;
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) acc[i] = acc[i] * a + b;
  }
  float sum = 0;
  for (int i = 0; i < 12; ++i) sum += acc[i][i];
  return sum;
}

}  // namespace phsa

#endif  // PHSA_BENCH_PEAK_H_
