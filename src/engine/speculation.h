// Speculation by prompt look-up: where the last tokens of a text stand in it before, what followed them there may
// follow again. A step of the decoder takes it with the last token, which takes little longer than that one alone, and
// the answer goes on by as many tokens as turn out to be those that it would have written anyway. So the text is that
// of plain decoding, to the token; drafts change how many steps it takes.
#ifndef PHSA_ENGINE_SPECULATION_H_
#define PHSA_ENGINE_SPECULATION_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/answer.h"
#include "engine/engine.h"

namespace phsa {

Speculation SpeculationFromName(std::string_view name);  // none, ngram; throws phsa::Error

// What followed the end of a text where it stood there before.
class PromptLookup {
 public:
  void Append(int32_t token);
  // At most `most` tokens from behind the place that agrees with the end furthest back, the latest where several do;
  // empty: the last tokens are nowhere else.
  std::span<const int32_t> Draft(size_t most) const;
  size_t size() const { return text_.size(); }

 private:
  uint64_t Key() const;  // of the last tokens
  std::vector<int32_t> text_;
  std::unordered_map<uint64_t, int32_t> last_;  // where these tokens ended, the last time
  std::vector<int32_t> before_;                 // [end]: where the tokens that end here ended before; -1: nowhere
};

// How many tokens are worth trying. It knows what steps took and what came of drafts, and spends on drafts that may be
// wrong no more than 2 % of the time of plain steps, and what drafts that were right have saved.
class SpeculationPace {
 public:
  size_t Most() const;
  void Plain(double seconds);  // a step without a draft
  void Tried(size_t tried, size_t right, double seconds);

 private:
  double plain_ = 0;    // seconds of a step of one token
  double row_ = 0;      // seconds that each further one takes
  double right_ = 0.5;  // share of tries that were right, lately
  double credit_ = 0;   // seconds that may be lost
};

// How many tokens may be tried in the answer's next step: as many as a step, the context and the answer have room for,
// and not so many that they take pages from others.
size_t DraftRoom(Engine& engine, const GenerateOptions& options, const GenerateResult& result,
                 const Sequence& sequence);

// The drafts of one answer. A step: Begin, the decoder's with the logits of all rows, Row for each of them, End.
class Drafts {
 public:
  explicit Drafts(std::span<const int32_t> prompt);
  // The step's tokens: the answer's last one, and up to `room` that may follow. `before`: tokens in the cache.
  std::span<const int32_t> Begin(const GenerateResult& result, int32_t before, size_t room);
  // `text`: all tokens, the step's included.
  void Row(Answer& answer, int32_t row, const LogitsRow& logits, std::span<const int32_t> text);
  // Takes the wrong drafts out of the cache. False: the answer has ended; else its next token is chosen and not taken.
  bool End(Sequence& sequence, GenerateResult& result);

 private:
  size_t prompt_tokens_;
  PromptLookup lookup_;
  SpeculationPace pace_;
  std::vector<int32_t> tokens_;  // of the step
  size_t right_ = 0;             // of its drafts
  int32_t cached_ = 0;
  bool ended_ = false;
  double began_ = 0;
};

}  // namespace phsa

#endif  // PHSA_ENGINE_SPECULATION_H_
