// Draws that are the same on every machine and with every standard library: samples of a run that is split over
// machines must be those of one run.
#ifndef PHSA_EVAL_NIAH_RANDOM_H_
#define PHSA_EVAL_NIAH_RANDOM_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace phsa {

class NiahRandom {
 public:
  // Other labels, other draws.
  explicit NiahRandom(std::string_view label) {
    for (const char c : label) state_ = (state_ ^ static_cast<uint8_t>(c)) * 0x100000001b3;  // FNV-1a
  }

  // SplitMix64.
  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  // In [0, count), all equally likely; count > 0.
  uint64_t Below(uint64_t count) {
    const uint64_t uneven = (0 - count) % count;  // 2^64 mod count: draws below it would favour small results
    for (;;) {
      const uint64_t draw = Next();
      if (draw >= uneven) return draw % count;
    }
  }
  double Unit() { return static_cast<double>(Next() >> 11) * 0x1p-53; }  // in [0, 1)
  // `count` different numbers below `from`, in random order; count <= from.
  std::vector<size_t> Sample(size_t from, size_t count) {
    std::vector<size_t> all(from);
    for (size_t i = 0; i < from; ++i) all[i] = i;
    for (size_t i = 0; i < count; ++i) std::swap(all[i], all[i + Below(from - i)]);
    all.resize(count);
    return all;
  }

 private:
  uint64_t state_ = 0xcbf29ce484222325;
};

}  // namespace phsa

#endif  // PHSA_EVAL_NIAH_RANDOM_H_
