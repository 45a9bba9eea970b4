#include "eval/niah/statistics.h"

#include <algorithm>
#include <cmath>

#include "base/errors.h"

namespace phsa {
namespace {

constexpr double kZ = 1.959963984540054;  // 97.5 % of a normal distribution lie below

}  // namespace

Interval WilsonInterval(double mean, int64_t samples) {
  PHSA_CHECK(samples > 0);
  const double n = static_cast<double>(samples), z2 = kZ * kZ;
  const double centre = (mean + z2 / (2 * n)) / (1 + z2 / n);
  const double half = kZ / (1 + z2 / n) * std::sqrt(mean * (1 - mean) / n + z2 / (4 * n * n));
  // At 0 and 1 one end is the mean itself; rounding must not put it beyond.
  return {std::clamp(centre - half, 0.0, mean), std::clamp(centre + half, mean, 1.0)};
}

double McNemarExact(int64_t better, int64_t worse) {
  const int64_t n = better + worse, fewer = std::min(better, worse);
  // Terms as logarithms: 2^n leaves the range of double for n above 1023.
  double tail = 0;
  for (int64_t i = 0; i <= fewer; ++i) {
    const auto log_factorial = [](int64_t k) { return std::lgamma(static_cast<double>(k) + 1); };
    tail += std::exp(log_factorial(n) - log_factorial(i) - log_factorial(n - i) - static_cast<double>(n) * std::log(2));
  }
  return std::min(1.0, 2 * tail);
}

PairedDifference ComparePaired(std::span<const double> first, std::span<const double> second) {
  PHSA_CHECK(first.size() == second.size() && !first.empty());
  PairedDifference result;
  result.samples = static_cast<int64_t>(first.size());
  double sum = 0, squares = 0;
  for (size_t i = 0; i < first.size(); ++i) {
    const double difference = first[i] - second[i];
    if (difference > 0) ++result.better;
    if (difference < 0) ++result.worse;
    sum += difference;
    squares += difference * difference;
  }
  result.mean = sum / static_cast<double>(first.size());
  const double n = static_cast<double>(first.size()) + 2;
  const double centre = sum / n, variance = (squares + 2) / n - centre * centre;
  const double half = kZ * std::sqrt(variance / n);
  result.ci95 = {std::max(centre - half, -1.0), std::min(centre + half, 1.0)};
  result.p = McNemarExact(result.better, result.worse);
  return result;
}

}  // namespace phsa
