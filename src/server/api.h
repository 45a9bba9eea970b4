// Bodies of requests: JSON into what the engine is asked for, with every limit and every message about a wrong field.
#ifndef PHSA_SERVER_API_H_
#define PHSA_SERVER_API_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/attention_choice.h"
#include "engine/engine.h"
#include "engine/sampling_choice.h"
#include "engine/session.h"
#include "grammar/grammar_cache.h"
#include "server/tools.h"
#include "server/worker.h"
#include "tokenizer/chat_template.h"

namespace phsa::server {

// Answers of one request: prompts times n. More than any client asks for, and few enough that one request cannot
// take the queue.
inline constexpr int32_t kMaxAnswers = 128;
inline constexpr int32_t kMaxEmbeddings = 2048;  // texts of one request, as OpenAI takes them
inline constexpr int32_t kMaxTopLogProbabilities = 20;
inline constexpr size_t kMaxLogitBias = 4096;        // tokens of one request
inline constexpr int32_t kMaxInspectedTokens = 256;  // of the prompt's end, and of the answer

// A model under one of its names, and what requests may leave unsaid.
struct ServedModel {
  const Engine& engine;
  std::string id;
  std::optional<ChatTemplate> chat_template;
  AttentionChoice attention;
  int32_t chat_tokens = 1024;  // of an answer in a chat
  int32_t adapter = 0;         // Engine::AddAdapter
  std::shared_ptr<GrammarCache> grammars = std::make_shared<GrammarCache>();
};

// A text of a request in which an answer's sources are sought.
struct GivenText {
  std::string place;               // the request's field: "messages[0].content"
  std::optional<int32_t> message;  // its index in the list of messages; none: it is in no list
  std::string text;
};

struct Prompt {
  std::vector<int32_t> tokens;
  std::string text = {};  // as it is echoed
  std::vector<GivenText> given = {};
  std::shared_ptr<const SourceTask> sources = nullptr;  // its texts are those that were given; none: nobody asks
};

struct GenerationRequest {
  bool chat = false;
  std::vector<Prompt> prompts;
  int32_t n = 1;
  GenerateOptions options;  // the sampler's seed comes from `sampling`, for each answer
  SamplingChoice sampling;
  LayerSettings attention;
  ToolUse tools;                          // of a chat
  std::optional<SourceOptions> sources;   // of each answer; none: nobody asks
  bool thinks = false, thinking = false;  // the model may write thoughts; it is in one already
  bool stream = false, include_usage = false, echo = false, return_token_ids = false;
  bool progress = false;  // a stream tells how much of the prompt there is
};

struct EmbeddingsRequest {
  std::vector<Prompt> prompts;
  int32_t dimensions = 0;  // that are wanted of the model's hidden ones: the first
  bool base64 = false;     // of little-endian f32, in place of a list of numbers
  LayerSettings attention;
};

struct InspectRequest {
  std::vector<int32_t> tokens;  // the prompt, and the answer that was given
  int32_t prompt_tokens = 0;    // of them
  std::string answer;           // the text that was given
  int32_t last = 1;
  GenerateOptions options;
  LayerSettings attention;
  bool stream = false;  // events with what is there of the prompt, then the inspection
};

struct TokenizeRequest {
  std::vector<int32_t> tokens;
  bool with_pieces = false;
};

// All throw HttpError with status 400 naming the field, its value and what is allowed. `body`: the text of a JSON
// object.
GenerationRequest ParseCompletion(std::string_view body, const ServedModel& model);
GenerationRequest ParseChat(std::string_view body, const ServedModel& model);
EmbeddingsRequest ParseEmbeddings(std::string_view body, const ServedModel& model);
InspectRequest ParseInspect(std::string_view body, const ServedModel& model);
TokenizeRequest ParseTokenize(std::string_view body, const ServedModel& model);
std::vector<int32_t> ParseDetokenize(std::string_view body, const ServedModel& model);
std::string ParseApplyTemplate(std::string_view body, const ServedModel& model);  // the rendered text

}  // namespace phsa::server

#endif  // PHSA_SERVER_API_H_
