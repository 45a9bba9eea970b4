// The words that needles' keys are made of.
#ifndef PHSA_EVAL_NIAH_WORDS_H_
#define PHSA_EVAL_NIAH_WORDS_H_

#include <span>
#include <string_view>

namespace phsa {

struct NiahWords {
  std::span<const std::string_view> adjectives, nouns;
};
const NiahWords& EnglishNiahWords();
const NiahWords& ChineseNiahWords();

}  // namespace phsa

#endif  // PHSA_EVAL_NIAH_WORDS_H_
