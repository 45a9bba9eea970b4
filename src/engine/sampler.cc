#include "engine/sampler.h"

#include <algorithm>
#include <cmath>

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

std::vector<TokenLogit> Sampler::Likeliest(const LogitsRow& logits, size_t count, int32_t known,
                                           std::span<const int32_t> seen) {
  if (settings_.repetition_penalty == 1) return logits.Top(count, known);
  std::span<const float> all = logits.All();
  all = all.first(std::min(all.size(), static_cast<size_t>(known)));
  logits_.assign(all.begin(), all.end());
  for (const int32_t id : seen) {
    if (static_cast<size_t>(id) >= all.size()) continue;  // a prompt may have one that cannot be chosen
    // Once a token, however often it was seen: from the model's own logit, not from the one already changed.
    const float logit = all[static_cast<size_t>(id)];
    logits_[static_cast<size_t>(id)] =
        logit > 0 ? logit / settings_.repetition_penalty : logit * settings_.repetition_penalty;
  }
  return HostLogitsRow(logits_).Top(count);
}

int32_t Sampler::Next(const LogitsRow& logits, int32_t known, std::span<const int32_t> seen) {
  PHSA_CHECK(known > 0);
  const bool greedy = settings_.temperature == 0 || settings_.top_k == 1;
  const auto count = static_cast<size_t>(greedy ? 1 : settings_.top_k > 0 ? settings_.top_k : known);
  std::vector<TokenLogit> candidates = Likeliest(logits, count, known, seen);
  const TokenLogit best = candidates.front();
  if (!std::isfinite(best.logit)) ThrowNoFiniteLogits();
  if (greedy) return best.token;

  // What is further below the best than this has no weight in double precision.
  const float floor = best.logit - 700 * settings_.temperature;
  weights_.clear();
  double total = 0;
  for (const TokenLogit& candidate : candidates) {
    if (!(candidate.logit >= floor)) break;
    weights_.push_back(std::exp((static_cast<double>(candidate.logit) - best.logit) / settings_.temperature));
    total += weights_.back();
  }
  if (settings_.top_p < 1) {
    double sum = 0;
    for (size_t i = 0; i < weights_.size(); ++i) {
      sum += weights_[i];
      if (sum >= settings_.top_p * total) {
        weights_.resize(i + 1);
        total = sum;
        break;
      }
    }
  }
  if (settings_.min_p > 0) {
    // Sorted, and the most likely one weighs 1.
    while (weights_.back() < settings_.min_p) {
      total -= weights_.back();
      weights_.pop_back();
    }
  }
  double left = static_cast<double>(random_() >> 11) * 0x1p-53 * total;
  for (size_t i = 0; i < weights_.size(); ++i) {
    left -= weights_[i];
    if (left < 0) return candidates[i].token;
  }
  return candidates[weights_.size() - 1].token;
}

}  // namespace phsa
