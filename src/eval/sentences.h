// A text cut into sentences, the unit in which its passages are named.
#ifndef PHSA_EVAL_SENTENCES_H_
#define PHSA_EVAL_SENTENCES_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace phsa {

enum class SentenceKind : uint8_t {
  kProse,  // up to ". ", "。" or an empty line; a line break alone ends none, as prose may be wrapped
  kLines,  // a line each: source code
};

// Where each sentence ends, ascending; the last end is text.size(). A sentence has the white space behind it. None is
// longer than kLongestSentence bytes, whatever the text is. text: UTF-8.
inline constexpr size_t kLongestSentence = 800;
std::vector<size_t> SentenceEnds(std::string_view text, SentenceKind kind);

}  // namespace phsa

#endif  // PHSA_EVAL_SENTENCES_H_
