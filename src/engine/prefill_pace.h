// How many tokens of prompts a step reads while others wait for the next token of their answers: as many as the steps
// before say can be read in the time that those may wait. What is read does not depend on it, only when.
#ifndef PHSA_ENGINE_PREFILL_PACE_H_
#define PHSA_ENGINE_PREFILL_PACE_H_

#include <algorithm>
#include <cstddef>

namespace phsa {

class PrefillPace {
 public:
  // A prompt goes on by so many tokens in each step, however long that takes: fewer would be read little sooner, as the
  // step reads all weights for the answers anyway (Qwen2.5-Coder-1.5B on two cores: 40 ms for one token, 6 for each
  // more of a prompt).
  static constexpr size_t kLeastTokens = 8;

  // `step_seconds`: of a step in which somebody waits; 0: they wait as long as it takes.
  explicit PrefillPace(double step_seconds) : step_seconds_(step_seconds) {}

  // A step has read `tokens` tokens of prompts, beside one for each answer.
  void Measured(size_t tokens, double seconds) {
    if (tokens == 0) return;
    tokens_ = tokens;
    seconds_ = seconds;
  }

  // For the next step, of `most` at most. As if its time were that of the last one, in proportion. It is not, as part
  // of it belongs to the answers and to reading the weights, but where the last step took what it may, that is no
  // error: so it comes to rest there, from either side, and follows a text as it gets longer.
  size_t Tokens(size_t most) const {
    if (step_seconds_ <= 0 || seconds_ <= 0) return most;
    const double tokens = static_cast<double>(tokens_) * step_seconds_ / seconds_;
    if (tokens >= static_cast<double>(most)) return most;
    return std::min(most, std::max(static_cast<size_t>(tokens), kLeastTokens));
  }

 private:
  double step_seconds_;
  size_t tokens_ = 0;
  double seconds_ = 0;  // of the last step that read some; 0: there was none
};

}  // namespace phsa

#endif  // PHSA_ENGINE_PREFILL_PACE_H_
