#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace phsa {
namespace {

int32_t RotaryDim(const ModelConfig& config) { return config.rotary_dim > 0 ? config.rotary_dim : config.head_dim; }

// The usual frequencies below `low` wavelengths, those divided by the factor above `high`, a blend in between.
double Llama3Frequency(double frequency, const RopeScaling& scaling) {
  const double context = scaling.original_context;
  const double wavelength = 2 * std::numbers::pi / frequency;
  if (wavelength < context / scaling.high_freq_factor) return frequency;
  if (wavelength > context / scaling.low_freq_factor) return frequency / scaling.factor;
  const double smooth =
      (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  return (1 - smooth) * frequency / scaling.factor + smooth * frequency;
}

double YarnMagnitude(double factor, double mscale) { return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0; }

void ApplyYarn(const ModelConfig& config, RopeFrequencies& rope) {
  const RopeScaling& scaling = config.rope_scaling;
  const double dim = RotaryDim(config);
  // The pair that turns `rotations` times within the context the model was trained for.
  const auto pair_of = [&](double rotations) {
    return dim * std::log(scaling.original_context / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(static_cast<double>(config.rope_base)));
  };
  double low = pair_of(scaling.beta_fast), high = pair_of(scaling.beta_slow);
  if (scaling.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < rope.frequencies.size(); ++i) {
    const double interpolated = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    rope.frequencies[i] *= interpolated / scaling.factor + (1 - interpolated);
  }
  if (scaling.attention_factor) {
    rope.factor = *scaling.attention_factor;
  } else if (scaling.mscale.value_or(0) != 0 && scaling.mscale_all_dim.value_or(0) != 0) {
    rope.factor = static_cast<float>(YarnMagnitude(scaling.factor, *scaling.mscale) /
                                     YarnMagnitude(scaling.factor, *scaling.mscale_all_dim));
  } else {
    rope.factor = static_cast<float>(YarnMagnitude(scaling.factor, 1));
  }
}

}  // namespace

RopeFrequencies MakeRope(const ModelConfig& config) {
  RopeFrequencies rope;
  const int32_t dim = RotaryDim(config);
  rope.frequencies.resize(static_cast<size_t>(dim / 2));
  for (int32_t i = 0; i < dim / 2; ++i) {
    rope.frequencies[static_cast<size_t>(i)] = std::pow(static_cast<double>(config.rope_base), -2.0 * i / dim);
  }
  const RopeScaling& scaling = config.rope_scaling;
  switch (scaling.kind) {
    case RopeScaling::Kind::kNone:
    case RopeScaling::Kind::kLongRope: rope.factor = scaling.attention_factor.value_or(1); break;
    case RopeScaling::Kind::kLinear:
      for (double& frequency : rope.frequencies) frequency /= scaling.factor;
      break;
    case RopeScaling::Kind::kLlama3:
      for (double& frequency : rope.frequencies) frequency = Llama3Frequency(frequency, scaling);
      break;
    case RopeScaling::Kind::kYarn: ApplyYarn(config, rope); break;
  }
  for (size_t i = 0; i < scaling.frequency_factors.size() && i < rope.frequencies.size(); ++i) {
    rope.frequencies[i] /= scaling.frequency_factors[i];
  }
  rope.frequencies.resize(static_cast<size_t>(config.head_dim / 2), 0.0);  // the rest of a head is not turned
  return rope;
}

LayerRopes MakeLayerRopes(const ModelConfig& config) {
  enum Kind : uint8_t { kUsual, kWindow, kNone };
  LayerRopes out;
  std::vector<Kind> kinds;
  for (int32_t i = 0; i < config.num_layers; ++i) {
    const LayerTraits traits = config.Layer(i);
    const Kind kind = !traits.rope ? kNone : traits.window > 0 && config.window_rope_base ? kWindow : kUsual;
    const auto known = std::find(kinds.begin(), kinds.end(), kind);
    out.of_layer.push_back(static_cast<size_t>(known - kinds.begin()));
    if (known != kinds.end()) continue;
    kinds.push_back(kind);
    ModelConfig own = config;
    if (kind != kUsual) own.rope_scaling = {};
    if (kind == kWindow) own.rope_base = *config.window_rope_base;
    RopeFrequencies rope = MakeRope(own);
    if (kind == kNone) std::fill(rope.frequencies.begin(), rope.frequencies.end(), 0.0);
    out.all.push_back(std::move(rope));
  }
  return out;
}

}  // namespace phsa
