// Where an answer was read from: the passages of the texts in its prompt that its tokens attended to.
//
// The tokens from the end of the texts on go through the model once more, watched: for each layer, query head and token
// of the answer (the query that led to it), the attention's mass on each token of the texts, of those that the query
// read. What some queries before the question give to a token as well is taken off: sinks, headings, whatever is looked
// at regardless. What is left of a head's mass on a sentence counts squared: a head that looks to one place with much
// of its mass is one that retrieves, one that spreads it says nothing (docs/ask.md).
#ifndef PHSA_EVAL_SOURCES_H_
#define PHSA_EVAL_SOURCES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "eval/sentences.h"

namespace phsa {

// A text that is part of a prompt, and its sentences in the prompt's tokens.
struct SourceText {
  struct Sentence {
    size_t begin, end;    // bytes of the text, without the white space around
    int32_t first, last;  // tokens of the prompt, `last` included; first > last: it has none of its own
  };
  std::vector<Sentence> sentences;
  int32_t end = 0;  // the token behind it
};

// Finds texts in a prompt, one after the other.
class SourceFinder {
 public:
  SourceFinder(const Tokenizer& tokenizer, std::span<const int32_t> prompt);
  // From now on texts are sought from the beginning of this part of the prompt on, or behind it; nothing changes where
  // it is not there as it is.
  void Enter(std::string_view part);
  void Pass(std::string_view part);
  // None where the prompt does not hold the text, not even without the white space around it or in NFC, as templates
  // and tokenizers change texts.
  std::optional<SourceText> Find(std::string_view text, SentenceKind kind);

 private:
  std::string bytes_;         // of the prompt's tokens
  std::vector<size_t> ends_;  // of each token, in bytes_
  size_t at_ = 0;
};

// A passage of the texts, of one or more sentences.
struct Passage {
  size_t text = 0;            // which of the texts
  size_t begin = 0, end = 0;  // bytes of it, without white space around
  double weight = 0;          // its share of what counts
  // Tokens of the answer that it counts for most, ascending, and the share of its weight that comes from each.
  struct Use {
    int32_t token;
    double share;
  };
  std::vector<Use> used_by = {};
};

struct SourceOptions {
  size_t most = 5;      // passages
  double least = 0.05;  // weight of all but the first one
  // What one step may look at: tokens that are prefilled again times those that they look at; 0: as much as fits.
  int64_t step_pairs = 0;
};

// The sources of an answer, found step by step, so that others can use the engine between the steps.
class SourceSearch {
 public:
  // `length`: tokens of the prompt and the answer as far as they are in the cache: all but the answer's last one, which
  // may be there too.
  SourceSearch(Engine& engine, int32_t length, int32_t prompt_tokens, int32_t answer_tokens,
               std::vector<SourceText> texts, const SourceOptions& options = {});
  ~SourceSearch();
  SourceSearch(SourceSearch&&) noexcept;
  // The first token of the text that its steps prefill again, or one before it.
  static int32_t FirstRead(std::span<const SourceText> texts, int32_t prompt_tokens);
  // One step of the decoder. `sequence`: prompt and answer; between the first step and the last it is shorter, and the
  // same again behind that. False: there is nothing left to do. Throws phsa::Error where the cache has no page left for
  // a copy of those that other texts share.
  bool Step(Sequence& sequence);
  // The best passage comes first; none where no text has a sentence or the answer has no token.
  std::vector<Passage> Passages() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// All of it at once. None where `stop` said so; then the sequence is shorter.
std::vector<Passage> FindSources(Engine& engine, Sequence& sequence, int32_t prompt_tokens, int32_t answer_tokens,
                                 std::span<const SourceText> texts, const std::function<bool()>& stop,
                                 const SourceOptions& options = {});

}  // namespace phsa

#endif  // PHSA_EVAL_SOURCES_H_
