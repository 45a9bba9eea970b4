// Notices an answer that has run into a loop.
#ifndef PHSA_ENGINE_REPETITION_WATCH_H_
#define PHSA_ENGINE_REPETITION_WATCH_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace phsa {

// A loop: a part of at most kLongestPart tokens stands there kTimes in a row, token for token, over at least
// kLeastTokens. Lists, tables and rows of zeros that somebody asked for are shorter or not equal to the last token;
// small models that loop never come out of it again.
class RepetitionWatch {
 public:
  static constexpr size_t kLongestPart = 256, kTimes = 4, kLeastTokens = 160;

  // tokens: of the answer, one more than at the last call. True: they end in a loop.
  bool Next(std::span<const int32_t> tokens) {
    const int32_t token = tokens.back();
    bool loop = false;
    for (size_t part = 1; part <= std::min(kLongestPart, tokens.size() - 1); ++part) {
      size_t& equal = equal_[part - 1];
      equal = tokens[tokens.size() - 1 - part] == token ? equal + 1 : 0;
      loop = loop || equal + part >= std::max(kLeastTokens, kTimes * part);
    }
    return loop;
  }

 private:
  // For each length of the part: how many of the last tokens are equal to the one that much before them.
  std::vector<size_t> equal_ = std::vector<size_t>(kLongestPart);
};

}  // namespace phsa

#endif  // PHSA_ENGINE_REPETITION_WATCH_H_
