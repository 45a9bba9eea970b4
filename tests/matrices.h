// Weights of every type with known parts, and what a product of them is in double precision.
#ifndef PHSA_TESTS_MATRICES_H_
#define PHSA_TESTS_MATRICES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "ops/linear.h"
#include "phsa/threads.h"

namespace phsa::matrices {

struct Pair {
  WeightType weights;
  ActivationType activations;
};
inline constexpr Pair kPairs[] = {
    {WeightType::kF32, ActivationType::kF32},   {WeightType::kBf16, ActivationType::kBf16},
    {WeightType::kInt8, ActivationType::kF32},  {WeightType::kInt8, ActivationType::kBf16},
    {WeightType::kInt8, ActivationType::kInt8}, {WeightType::kInt4, ActivationType::kF32},
    {WeightType::kInt4, ActivationType::kBf16}, {WeightType::kInt4, ActivationType::kInt8},
    {WeightType::kInt6, ActivationType::kBf16}, {WeightType::kInt6, ActivationType::kInt8},
};

inline std::string Name(const Pair& pair) {
  constexpr const char* kActivations[] = {"f32", "bf16", "int8"};
  return std::string(WeightTypeName(pair.weights)) + " × " + kActivations[static_cast<int>(pair.activations)];
}

inline std::vector<float> RandomFloats(size_t n, uint32_t seed, float scale = 1) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(n);
  for (float& v : values) v = normal(rng);
  return values;
}

// Weights, and beside them the parts that a product adds up: w = part + minimum.
struct Weights {
  Matrix matrix;
  std::vector<float> part, minimum;  // [rows][cols]
};

inline Weights MakeWeights(WeightType type, int32_t rows, int32_t cols, uint32_t seed) {
  Weights w{Matrix(type, rows, cols), {}, {}};
  w.part.resize(static_cast<size_t>(rows) * static_cast<size_t>(cols));
  w.minimum.resize(w.part.size());
  const int32_t groups = (cols + kWeightGroup - 1) / kWeightGroup;
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> scale(0.001f, 0.1f);
  for (int32_t r = 0; r < rows; ++r) {
    float* const part = w.part.data() + static_cast<size_t>(r) * static_cast<size_t>(cols);
    float* const minimum = w.minimum.data() + static_cast<size_t>(r) * static_cast<size_t>(cols);
    std::vector<float> scales(static_cast<size_t>(groups)), mins(scales.size());
    for (float& s : scales) s = F32FromF16(F16FromF32(scale(rng)));
    for (float& s : mins) s = F32FromF16(F16FromF32(-8 * scale(rng)));
    if (type == WeightType::kInt4) {
      std::vector<uint8_t> codes(static_cast<size_t>(cols));
      for (uint8_t& c : codes) c = rng() & 15;
      w.matrix.SetRowInt4(r, codes.data(), scales.data(), mins.data());
      for (int32_t c = 0; c < cols; ++c) {
        part[c] = codes[static_cast<size_t>(c)] * scales[static_cast<size_t>(c / kWeightGroup)];
        minimum[c] = mins[static_cast<size_t>(c / kWeightGroup)];
      }
    } else if (type == WeightType::kInt6) {
      std::vector<uint8_t> codes(static_cast<size_t>(cols));
      for (uint8_t& c : codes) c = rng() & 63;
      scales.resize(static_cast<size_t>((cols + kInt6Group - 1) / kInt6Group));
      for (float& s : scales) s = F32FromF16(F16FromF32(rng() % 2 == 0 ? scale(rng) : -scale(rng)));
      w.matrix.SetRowInt6(r, codes.data(), scales.data());
      for (int32_t c = 0; c < cols; ++c) {
        part[c] = (codes[static_cast<size_t>(c)] - 32) * scales[static_cast<size_t>(c / kInt6Group)];
      }
    } else if (type == WeightType::kInt8) {
      std::vector<int8_t> codes(static_cast<size_t>(cols));
      for (int8_t& c : codes) c = static_cast<int8_t>(static_cast<int>(rng() % 256) - 128);
      w.matrix.SetRowInt8(r, codes.data(), scales.data());
      for (int32_t c = 0; c < cols; ++c) {
        part[c] = codes[static_cast<size_t>(c)] * scales[static_cast<size_t>(c / kWeightGroup)];
      }
    } else {
      const std::vector<float> values = RandomFloats(static_cast<size_t>(cols), rng());
      w.matrix.SetRow(r, values.data());
      w.matrix.GetRow(r, part);
    }
  }
  return w;
}

// What the activation type makes of a row of x.
inline std::vector<double> Rounded(const float* x, int32_t cols, ActivationType type) {
  std::vector<double> out(x, x + cols);
  if (type == ActivationType::kBf16) {
    for (double& v : out) v = RoundTo(PHSA_BF16, static_cast<float>(v));
  } else if (type == ActivationType::kInt8) {
    for (int32_t begin = 0; begin < cols; begin += kWeightGroup) {
      const int32_t end = std::min(begin + kWeightGroup, cols);
      float largest = 0;
      for (int32_t c = begin; c < end; ++c) largest = std::max(largest, std::fabs(x[c]));
      for (int32_t c = begin; c < end; ++c) {
        out[static_cast<size_t>(c)] =
            largest == 0 ? 0.0 : static_cast<double>(largest / 127.0f) * std::nearbyint(x[c] * (127.0f / largest));
      }
    }
  }
  return out;
}

struct Output {
  const Matrix* weights;
  const float* bias = nullptr;
};

// y of each output, [m][rows], through buffers of exactly the size that was asked for.
inline std::vector<std::vector<float>> Multiply(const std::vector<float>& x, int32_t m, ActivationType activations,
                                                const std::vector<Output>& outputs, ThreadPool* pool = nullptr) {
  const Matrix& first = *outputs[0].weights;
  const int32_t threads = pool != nullptr ? pool->num_threads() : 1;
  const size_t size = LinearWorkspaceSize(first.type(), activations, m, first.cols(), threads, first.of_file());
  auto* workspace = static_cast<uint8_t*>(std::aligned_alloc(64, (size + 63) / 64 * 64));
  std::memset(workspace, 0xff, size);  // NaN in every format: nothing may be read before it is written
  std::vector<std::vector<float>> y;
  std::vector<LinearOutput> calls;
  for (const Output& output : outputs) {
    y.emplace_back(static_cast<size_t>(m) * static_cast<size_t>(output.weights->rows()),
                   std::numeric_limits<float>::quiet_NaN());
    calls.push_back({output.weights, output.bias, y.back().data(), output.weights->rows()});
  }
  for (size_t i = 0; i < calls.size(); ++i) calls[i].y = y[i].data();
  const phsa_executor executor = pool != nullptr ? pool->executor() : phsa_executor{};
  Linear(x.data(), first.cols(), m, activations, calls, workspace, size, executor);
  std::free(workspace);
  return y;
}

// A product from the definition, and how far each element may be off. Every sum has at most cols + 1 terms and is
// rounded at most twice a term. A code in a wrong row, column or group is an error of about its own size, thousands of
// times this. `split_minima`: matrix tiles take a group's sum of x, which meets the minimum, in two bf16.
struct ExpectedProduct {
  std::vector<double> value, bound;  // [m][rows]
};
inline ExpectedProduct Expect(const Weights& w, const std::vector<float>& x, int32_t m, ActivationType activations,
                              const float* bias, bool split_minima) {
  const int32_t rows = w.matrix.rows(), cols = w.matrix.cols();
  ExpectedProduct out;
  for (int32_t r = 0; r < m; ++r) {
    const std::vector<double> rounded = Rounded(x.data() + static_cast<size_t>(r) * cols, cols, activations);
    for (int32_t n = 0; n < rows; ++n) {
      double sum = bias != nullptr ? bias[n] : 0.0, size = std::fabs(sum), minima = 0;
      for (int32_t c = 0; c < cols; ++c) {
        const size_t at = static_cast<size_t>(n) * static_cast<size_t>(cols) + static_cast<size_t>(c);
        const double e = rounded[static_cast<size_t>(c)];
        sum += e * (static_cast<double>(w.part[at]) + w.minimum[at]);
        size += std::fabs(e * w.part[at]) + std::fabs(e * w.minimum[at]);
        minima += std::fabs(e * w.minimum[at]);
      }
      if (activations == ActivationType::kInt8 || !split_minima) minima = 0;
      out.value.push_back(sum);
      out.bound.push_back(size * (2 * cols + 16) * 0x1p-24 + minima * 0x1p-17 + 1e-30);
    }
  }
  return out;
}

}  // namespace phsa::matrices

#endif  // PHSA_TESTS_MATRICES_H_
