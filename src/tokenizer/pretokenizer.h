// Cuts text into the words that BPE works on: the steps of a tokenizer.json's pre_tokenizer.
#ifndef PHSA_TOKENIZER_PRETOKENIZER_H_
#define PHSA_TOKENIZER_PRETOKENIZER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/pattern.h"

namespace phsa {

// What becomes of a match: a piece of its own, dropped, joined with the piece before or after it, or with its
// neighbours that match too.
enum class SplitBehavior : uint8_t { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

class PreTokenizer {
 public:
  struct Scratch {
    Pattern::Scratch pattern;
    std::vector<TextRange> words, input, matches;
    std::string text;
  };

  // A step cuts every piece that the steps before it made. `inverted`: what lies between the matches is the match.
  void AddSplit(Pattern pattern, SplitBehavior behavior, bool inverted);
  // A space before each piece that does not begin with one.
  void AddPrefixSpace();
  // SentencePiece's marks for spaces, and one before the piece that the text begins with, or each, that has none.
  enum class MarkFirst : uint8_t { kNone, kOfText, kOfEach };
  void AddSpaceMarks(MarkFirst first);

  // Leaves the words in scratch->words, and returns the text that they are ranges of: `text`, or scratch->text.
  // `first`: the text that is encoded begins with this one.
  std::string_view Split(std::string_view text, bool first, Scratch* scratch) const;

 private:
  struct Step {
    std::optional<Pattern> pattern;  // none: a prefix space, or marks
    SplitBehavior behavior = SplitBehavior::kIsolated;
    bool inverted = false;
    std::optional<MarkFirst> marks;
  };
  std::vector<Step> steps_;
};

}  // namespace phsa

#endif  // PHSA_TOKENIZER_PRETOKENIZER_H_
