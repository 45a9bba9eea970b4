#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/errors.h"

namespace phsa {

void Validate(const SamplerSettings& settings) {
  const auto in = [](float value, float low, float high) { return value >= low && value <= high; };  // false for NaN
  if (!in(settings.temperature, 0, 100)) ThrowInvalid("--temp is {}; allowed: 0 to 100", settings.temperature);
  if (settings.top_k < 0) ThrowInvalid("--top-k is {}; allowed: 0 (all) and up", settings.top_k);
  if (!(settings.top_p > 0) || !in(settings.top_p, 0, 1)) {
    ThrowInvalid("--top-p is {}; allowed: above 0, to 1 (all)", settings.top_p);
  }
  if (!in(settings.min_p, 0, 1)) ThrowInvalid("--min-p is {}; allowed: 0 (all) to 1", settings.min_p);
  if (!in(settings.repetition_penalty, 0.01f, 100)) {
    ThrowInvalid("--repeat-penalty is {}; allowed: 0.01 to 100, 1 for none", settings.repetition_penalty);
  }
}

void ThrowNoFiniteLogits() {
  ThrowInvalid("the model gave no finite logits; its weights are damaged, or not for this architecture");
}

Sampler::Sampler(const SamplerSettings& settings) : settings_(settings), random_(settings.seed) { Validate(settings); }

int32_t Sampler::Next(std::span<const float> logits, std::span<const int32_t> seen) {
  if (settings_.repetition_penalty != 1) {
    logits_.assign(logits.begin(), logits.end());
    for (const int32_t id : seen) {
      if (static_cast<size_t>(id) >= logits.size()) continue;  // a prompt may have one that cannot be chosen
      // Once a token, however often it was seen: from the model's own logit, not from the one already changed.
      const float logit = logits[static_cast<size_t>(id)];
      logits_[static_cast<size_t>(id)] =
          logit > 0 ? logit / settings_.repetition_penalty : logit * settings_.repetition_penalty;
    }
    logits = logits_;
  }
  int32_t best = -1;
  float best_logit = -std::numeric_limits<float>::infinity();
  for (size_t id = 0; id < logits.size(); ++id) {
    if (logits[id] > best_logit) {
      best_logit = logits[id];
      best = static_cast<int32_t>(id);
    }
  }
  if (best < 0 || !std::isfinite(best_logit)) ThrowNoFiniteLogits();
  if (settings_.temperature == 0 || settings_.top_k == 1) return best;

  candidates_.clear();
  // What is further below the best than this has no weight in double precision.
  const float floor = best_logit - 700 * settings_.temperature;
  for (size_t id = 0; id < logits.size(); ++id) {
    if (logits[id] >= floor) candidates_.push_back({static_cast<int32_t>(id), logits[id], 0});
  }
  const auto likelier = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  };
  size_t kept = candidates_.size();
  if (settings_.top_k > 0) kept = std::min(kept, static_cast<size_t>(settings_.top_k));
  std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<int64_t>(kept), candidates_.end(), likelier);
  candidates_.resize(kept);
  double total = 0;
  for (Candidate& candidate : candidates_) {
    candidate.weight = std::exp((static_cast<double>(candidate.logit) - best_logit) / settings_.temperature);
    total += candidate.weight;
  }
  if (settings_.top_p < 1) {
    double sum = 0;
    for (size_t i = 0; i < candidates_.size(); ++i) {
      sum += candidates_[i].weight;
      if (sum >= settings_.top_p * total) {
        candidates_.resize(i + 1);
        total = sum;
        break;
      }
    }
  }
  if (settings_.min_p > 0) {
    // Sorted, and the most likely one weighs 1.
    while (candidates_.back().weight < settings_.min_p) {
      total -= candidates_.back().weight;
      candidates_.pop_back();
    }
  }
  double left = static_cast<double>(random_() >> 11) * 0x1p-53 * total;
  for (const Candidate& candidate : candidates_) {
    left -= candidate.weight;
    if (left < 0) return candidate.id;
  }
  return candidates_.back().id;
}

}  // namespace phsa
