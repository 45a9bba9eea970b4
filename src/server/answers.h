// Bodies of answers: what the engine found, as OpenAI's API says it.
#ifndef PHSA_SERVER_ANSWERS_H_
#define PHSA_SERVER_ANSWERS_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/answer.h"
#include "io/json.h"
#include "server/api.h"
#include "server/http_types.h"
#include "server/metrics.h"

namespace phsa::server {

// Valid JSON whatever bytes the texts have.
double Rounded(double value);  // microseconds and millionths are enough for anybody
std::string JsonBody(const Json& json);

// {"error": {"message", "type", "param", "code"}}
Json ErrorJson(const HttpError& error);
HttpResponse ErrorResponse(const HttpError& error);
// Anthropic's: {"type": "error", "error": {"type", "message"}}
HttpResponse MessagesError(const HttpError& error);
// The one of the API that the path belongs to.
HttpResponse ErrorResponse(const HttpError& error, std::string_view target);
// What a status means in the line of an error that has no words of its own.
const char* StatusText(int status);

// The text of a token, or "bytes:\xe4\xbd" where its bytes are no characters, as OpenAI's API has it.
std::string TokenText(const Tokenizer& tokenizer, int32_t token);

// A text with what the model thought of its tokens.
struct ScoredText {
  std::span<const int32_t> tokens;
  // As many as there are tokens, or one less where nothing predicts the first one.
  std::span<const TokenLogProbability> log_probabilities;
  bool echoed = false;  // a prompt: its control tokens are part of the text
};

// Where the tokens of a text begin in it, as they come. A character that several tokens share counts with the last.
class TextPosition {
 public:
  explicit TextPosition(const Tokenizer& tokenizer) : tokenizer_(&tokenizer), decoder_(tokenizer) {}
  int64_t Next(int32_t token, bool shows_control_tokens);  // in characters

 private:
  const Tokenizer* tokenizer_;
  StreamDecoder decoder_;
  int64_t characters_ = 0;
};

// logprobs of a completion. `position`: before the texts; moved behind them.
Json CompletionLogProbabilities(const Tokenizer& tokenizer, std::span<const ScoredText> texts, TextPosition& position);
Json ChatLogProbabilities(const Tokenizer& tokenizer, const ScoredText& text);

// An answer that ended.
struct EndedAnswer {
  GenerateResult result;
  AnswerTimes times;
  std::optional<AnswerSources> sources = {};
};
// A chat's answer taken apart; what is said of a completion is its text.
Reply WholeReply(const GenerationRequest& request, const GenerateResult& result, const Tokenizer& tokenizer);
// Of all answers of a request; they are the n of the first prompt, those of the second, and so on.
Json UsageJson(const GenerationRequest& request, std::span<const EndedAnswer> answers);
Json MeasurementsJson(const GenerationRequest& request, std::span<const EndedAnswer> answers,
                      const Tokenizer& tokenizer);

}  // namespace phsa::server

#endif  // PHSA_SERVER_ANSWERS_H_
