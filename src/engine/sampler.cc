#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "base/errors.h"

namespace phsa {

void Validate(const SamplerSettings& settings) {
  const auto in = [](float value, float low, float high) { return value >= low && value <= high; };  // false for NaN
  if (!in(settings.temperature, 0, 100))
    ThrowInvalid("{} is {}; allowed: 0 to 100", Option{"temperature"}, settings.temperature);
  if (settings.top_k < 0) ThrowInvalid("{} is {}; allowed: 0 (all) and up", Option{"top_k"}, settings.top_k);
  if (!(settings.top_p > 0) || !in(settings.top_p, 0, 1)) {
    ThrowInvalid("{} is {}; allowed: above 0, to 1 (all)", Option{"top_p"}, settings.top_p);
  }
  if (!in(settings.min_p, 0, 1)) ThrowInvalid("{} is {}; allowed: 0 (all) to 1", Option{"min_p"}, settings.min_p);
  if (!in(settings.repetition_penalty, 0.01f, 100)) {
    ThrowInvalid("{} is {}; allowed: 0.01 to 100, 1 for none", Option{"repetition_penalty"},
                 settings.repetition_penalty);
  }
  if (!in(settings.frequency_penalty, -2, 2)) {
    ThrowInvalid("{} is {}; allowed: -2 to 2, 0 for none", Option{"frequency_penalty"}, settings.frequency_penalty);
  }
  if (!in(settings.presence_penalty, -2, 2)) {
    ThrowInvalid("{} is {}; allowed: -2 to 2, 0 for none", Option{"presence_penalty"}, settings.presence_penalty);
  }
  for (const auto& [token, bias] : settings.logit_bias) {
    if (!in(bias, -100, 100))
      ThrowInvalid("{} of token {} is {}; allowed: -100 to 100", Option{"logit_bias"}, token, bias);
  }
}

void ThrowNoFiniteLogits() {
  ThrowInvalid("the model gave no finite logits; its weights are damaged, or not for this architecture");
}

Sampler::Sampler(const SamplerSettings& settings) : settings_(settings), random_(settings.seed) { Validate(settings); }

std::vector<TokenLogit> Sampler::Allowed(const LogitsRow& logits, size_t count, int32_t known, TokenFilter& filter) {
  // Mostly the model wants what it may, and then nobody needs to know of the whole vocabulary.
  constexpr size_t kTried = 64;
  if (count <= kTried) {
    std::vector<TokenLogit> best = logits.Top(count == 1 ? kTried / 8 : kTried, known);
    std::erase_if(best, [&](const TokenLogit& one) { return !filter.Allows(one.token); });
    if (best.size() >= count) {
      best.resize(count);
      return best;
    }
  }
  const std::span<const uint64_t> mask = filter.Mask();
  std::span<const float> all = logits.All();
  all = all.first(std::min(all.size(), static_cast<size_t>(known)));
  masked_.assign(all.begin(), all.end());
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < masked_.size(); i += 64) {
    const uint64_t word = i / 64 < mask.size() ? mask[i / 64] : 0;
    const size_t end = std::min(masked_.size() - i, size_t{64});
    if (word == 0) {
      std::fill_n(masked_.begin() + static_cast<std::ptrdiff_t>(i), end, kNever);
    } else if (~word != 0) {
      for (size_t k = 0; k < end; ++k) masked_[i + k] = (word >> k & 1) != 0 ? masked_[i + k] : kNever;
    }
  }
  std::vector<TokenLogit> best = HostLogitsRow(masked_).Top(count);
  std::erase_if(best, [](const TokenLogit& one) { return one.logit == kNever; });
  if (best.empty()) ThrowNoFiniteLogits();
  return best;
}

std::vector<TokenLogit> Sampler::Likeliest(const LogitsRow& logits, size_t count, int32_t known,
                                           std::span<const int32_t> seen, std::span<const int32_t> answer,
                                           TokenFilter* filter) {
  const auto top = [&](const LogitsRow& row) {
    return filter != nullptr ? Allowed(row, count, known, *filter) : row.Top(count, known);
  };
  const bool repetition = settings_.repetition_penalty != 1;
  const bool counted = settings_.frequency_penalty != 0 || settings_.presence_penalty != 0;
  if (!repetition && !counted && settings_.logit_bias.empty()) return top(logits);
  std::span<const float> all = logits.All();
  all = all.first(std::min(all.size(), static_cast<size_t>(known)));
  logits_.assign(all.begin(), all.end());
  // A prompt may have tokens that cannot be chosen, and they may be given a bias.
  const auto choosable = [&](int32_t id) { return static_cast<size_t>(id) < all.size(); };
  for (const auto& [id, bias] : settings_.logit_bias) {
    if (choosable(id)) logits_[static_cast<size_t>(id)] += bias;
  }
  if (repetition) {
    biased_ = logits_;
    for (const int32_t id : seen) {
      if (!choosable(id)) continue;
      // Once a token, however often it was seen: from its logit before, not from the one already changed.
      const float logit = biased_[static_cast<size_t>(id)];
      logits_[static_cast<size_t>(id)] =
          logit > 0 ? logit / settings_.repetition_penalty : logit * settings_.repetition_penalty;
    }
  }
  if (counted) {
    std::map<int32_t, int32_t> counts;
    for (const int32_t id : answer) ++counts[id];
    for (const auto& [id, times] : counts) {
      if (!choosable(id)) continue;
      logits_[static_cast<size_t>(id)] -=
          settings_.frequency_penalty * static_cast<float>(times) + settings_.presence_penalty;
    }
  }
  return top(HostLogitsRow(logits_));
}

int32_t Sampler::Next(const LogitsRow& logits, int32_t known, std::span<const int32_t> seen,
                      std::span<const int32_t> answer, TokenFilter* filter) {
  PHSA_CHECK(known > 0);
  const bool greedy = settings_.temperature == 0 || settings_.top_k == 1;
  const auto count = static_cast<size_t>(greedy ? 1 : settings_.top_k > 0 ? settings_.top_k : known);
  std::vector<TokenLogit> candidates = Likeliest(logits, count, known, seen, answer, filter);
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
