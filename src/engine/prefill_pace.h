// How many tokens of prompts a step prefills while others wait for the next token of their answers: as many as the
// steps before say can be done in the time that those may wait. What is computed does not depend on it, only when.
#ifndef PHSA_ENGINE_PREFILL_PACE_H_
#define PHSA_ENGINE_PREFILL_PACE_H_

#include <algorithm>
#include <cstddef>

namespace phsa {

class PrefillPace {
 public:
  // A prompt goes on by so many tokens in each step, however long that takes: fewer would be done little sooner, as the
  // step reads all weights for the answers anyway (Qwen2.5-Coder-1.5B on two cores: 40 ms for one token, 6 for each
  // more of a prompt).
  static constexpr size_t kLeastTokens = 8;

  // What is aimed at, as a share of what a step may take: one that takes a little longer than the last is not late yet.
  static constexpr double kAim = 0.85;

  // `step_seconds`: of a step in which somebody waits; 0: they wait as long as it takes.
  explicit PrefillPace(double step_seconds) : step_seconds_(step_seconds) {}

  // A step has prefilled `tokens` tokens of prompts, beside one for each answer.
  void Measured(size_t tokens, double seconds) {
    if (tokens == 0) return;
    before_ = last_;
    last_ = seconds / static_cast<double>(tokens);
  }

  // For the next step, of `most` at most. As if its time were that of the last one, in proportion. It is not, as part
  // of it belongs to the answers and to reading the weights, but where the last step took what it may, that is no
  // error: so it comes to rest there, from either side, and follows a text as it gets longer. The slower of two counts:
  // after one that was fast by chance (a warm cache, a core that was free) the next would be too long.
  size_t Tokens(size_t most) const {
    const double each = std::max(last_, before_);
    if (step_seconds_ <= 0 || each <= 0) return most;
    const double tokens = kAim * step_seconds_ / each;
    if (tokens >= static_cast<double>(most)) return most;
    return std::min(most, std::max(static_cast<size_t>(tokens), kLeastTokens));
  }

 private:
  double step_seconds_;
  double last_ = 0, before_ = 0;  // seconds per token of the last two steps that prefilled some; 0: there was none
};

}  // namespace phsa

#endif  // PHSA_ENGINE_PREFILL_PACE_H_
