// One answer as it grows, token by token: sampling, text, and what ends it. Session and Scheduler run the decoder.
#ifndef PHSA_ENGINE_ANSWER_H_
#define PHSA_ENGINE_ANSWER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/repetition_watch.h"
#include "engine/sampler.h"
#include "engine/stop_strings.h"
#include "grammar/matcher.h"

namespace phsa {

// What a model thought of a token: natural logarithms of probabilities over its whole vocabulary, before any sampling
// setting.
struct TokenLogProbability {
  float value = 0;
  std::vector<std::pair<int32_t, float>> top;  // the likeliest tokens, the likeliest first, the lower id where equal
};

// How tokens are guessed that one step then checks together (engine/speculation.h).
enum class Speculation : uint8_t { kNone, kNgram };

struct GenerateOptions {
  int32_t max_tokens = 512;
  SamplerSettings sampler;
  std::vector<std::string> stops;
  std::vector<int32_t> stop_tokens = {};  // end an answer as the model's own end tokens do, also with ignore_eos
  bool ignore_eos = false;
  bool stop_loops = false;                   // end an answer that only repeats itself (RepetitionWatch)
  std::optional<int32_t> log_probabilities;  // of the answer's tokens, with this many of the likeliest ones
  bool prompt_log_probabilities = false;     // and of the prompt's, from the second on: all of it is prefilled
  // What the text must be; none: anything. It ends when it is whole; what else ends an answer may cut it short.
  std::shared_ptr<const Grammar> grammar = nullptr;
  Speculation speculation = Speculation::kNone;  // on the CPU only
};

// Refuses speculation on a device whose results depend on how many tokens a step has.
void CheckSpeculation(const Engine& engine, Speculation speculation);

enum class StopReason : uint8_t { kEndOfText, kStopString, kStopToken, kMaxTokens, kContextFull, kInterrupted, kLoop };
const char* Name(StopReason reason);  // "end of text", …

struct GenerateResult {
  std::string text;
  std::vector<int32_t> tokens;                                                   // without the end token
  std::vector<TokenLogProbability> log_probabilities, prompt_log_probabilities;  // where they were asked for
  StopReason reason = StopReason::kEndOfText;
  int32_t prompt_tokens = 0, reused_tokens = 0;
  double prefill_seconds = 0, decode_seconds = 0;  // decode: from the first token to the last
  TokensRead tokens_read;                          // by the attention, prompt and answer
  // Where it was asked for: the mean of what the model's last norm gives for the prompt's tokens, of length 1.
  std::vector<float> embedding;
  int32_t drafted_tokens = 0, accepted_tokens = 0;  // by speculation
};

// Refuses, with both numbers, a prompt that leaves no room for a token in the context, and tokens that the model has
// not.
void CheckPrompt(const Engine& engine, std::span<const int32_t> prompt);

class Answer {
 public:
  // `text`: called with the text as it comes; may be empty. Throws phsa::Error where the options are wrong.
  Answer(const Engine& engine, const GenerateOptions& options, std::function<void(std::string_view)> text);
  ~Answer();

  // Chooses the next token. logits: of the last token in the cache; `text`: all of them, prompt and answer.
  void Choose(const LogitsRow& logits, std::span<const int32_t> text);
  int32_t chosen() const { return next_; }
  // What the model thought of the prompt's next token.
  void ScorePrompt(const LogitsRow& logits, int32_t next);
  // Takes the chosen token, with its text. True: the answer goes on, and result().tokens.back() is the next step's.
  // `length`: tokens in the cache, prompt and answer.
  bool Take(int32_t length);
  void Interrupt();  // ends the answer here; one that goes on only
  GenerateResult& result() { return result_; }
  const GenerateResult& result() const { return result_; }

 private:
  void Emit(const std::string& text);
  // Why the answer ends before the chosen token, or with it; none: it goes on.
  std::optional<StopReason> TakeToken(int32_t length);
  void Finish(StopReason reason);
  TokenLogProbability LogProbability(const LogitsRow& logits, int32_t token) const;

  const Engine& engine_;
  GenerateOptions options_;
  std::function<void(std::string_view)> text_;
  Sampler sampler_;
  StreamDecoder decoder_;
  StopStrings stops_;
  RepetitionWatch repetition_;
  class GrammarFilter;
  std::unique_ptr<GrammarFilter> grammar_;  // none: the text may be anything
  int32_t next_ = -1;
  TokenLogProbability next_log_probability_;
  GenerateResult result_;
};

}  // namespace phsa

#endif  // PHSA_ENGINE_ANSWER_H_
