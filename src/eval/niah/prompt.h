// Prompts of the needle tasks, cut to a number of tokens.
#ifndef PHSA_EVAL_NIAH_PROMPT_H_
#define PHSA_EVAL_NIAH_PROMPT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "eval/niah/haystack.h"
#include "eval/niah/task.h"
#include "tokenizer/chat_template.h"
#include "tokenizer/tokenizer.h"

namespace phsa {

struct NiahPromptOptions {
  NiahLanguage language = NiahLanguage::kEnglish;
  uint64_t seed = 1;
  // Where the needle lies, in percent of the haystack: sample i has depths[i % size]. Empty: drawn as RULER draws them.
  std::vector<double> depths;
  bool random_start = true;  // each sample begins somewhere else in the text; else all at its beginning, as in RULER
  bool repeat = false;       // a text that is too short is repeated, as in RULER; else refused
  std::optional<ChatTemplate> chat;  // the prompt is a user's turn, the answer prefix begins the model's
};

struct NiahSample {
  std::string text;             // without chat markup, the answer prefix included
  std::vector<int32_t> tokens;  // what the model reads
  std::vector<std::string> references;
  std::vector<double> depths;  // of each reference's needle, in percent
  std::string answer;          // what follows the prompt in a right answer; where there is one reference
};

class NiahPrompts {
 public:
  // `haystack` may be null where no task of kind essay is built. Both must outlive this.
  NiahPrompts(const Tokenizer& tokenizer, const Haystack* haystack, NiahPromptOptions options);

  // Throws phsa::Error, saying what would work, where samples of this length cannot be built.
  void Check(NiahTask task, int32_t length) const;
  // Sample `index`: the same for the same task, length, seed and index, at most `length` tokens with the answer, and
  // not more than a sentence of the haystack below that.
  NiahSample Build(NiahTask task, int32_t length, int32_t index) const;

  const NiahPromptOptions& options() const { return options_; }

 private:
  struct Draft;
  struct Hay;
  Draft Draw(NiahTask task, int32_t index, NiahRandom& random) const;
  // More than `room` tokens of haystack, or all there is.
  Hay GatherSentences(NiahTask task, int32_t length, int64_t room, NiahRandom& random) const;
  Hay GatherLines(NiahTask task, int64_t room, const Draft& draft, NiahRandom& random) const;
  std::vector<int32_t> Encode(const std::string& question, const std::string& answer_prefix,
                              std::string_view space) const;
  int64_t HaystackTokens() const { return tokens_before_.back(); }

  const Tokenizer& tokenizer_;
  const Haystack* haystack_;
  NiahPromptOptions options_;
  std::vector<int64_t> tokens_before_;  // [sentences + 1]: tokens of the haystack before each sentence
};

}  // namespace phsa

#endif  // PHSA_EVAL_NIAH_PROMPT_H_
