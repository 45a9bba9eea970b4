// Conversations in requests: messages, tools and the template's variables, whatever API they came in.
#ifndef PHSA_SERVER_CHAT_INPUT_H_
#define PHSA_SERVER_CHAT_INPUT_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/value.h"
#include "server/answer_form.h"
#include "server/api.h"
#include "server/fields.h"
#include "server/tools.h"
#include "tokenizer/chat_template.h"

namespace phsa::server {

struct ChatInput {
  // `place`: the field of its text in the request; `index`: of the message in its list.
  void Add(ChatMessage message, std::string place, std::optional<int32_t> index) {
    messages.push_back(std::move(message));
    places.push_back({std::move(place), index});
  }
  struct Place {
    std::string field;
    std::optional<int32_t> index;
  };

  std::vector<ChatMessage> messages;
  std::vector<Place> places;  // of each message
  ChatVariables variables;
  ToolUse tools;
};

// As OpenAI's chat completions say it. All throw HttpError. `body`: the text that the fields are of, for what must keep
// its order.
ChatInput ReadChatInput(const Fields& fields, std::string_view body, const ServedModel& model);
ChatVariables ReadVariables(const Fields& fields, std::string_view body);
// A text, or parts of the type text.
std::string ReadContent(const Fields& message);

const ChatTemplate& TemplateOf(const ServedModel& model);
void CheckLength(const Fields& fields, const char* key, std::span<const int32_t> tokens, const ServedModel& model);
std::vector<int32_t> ChatTokens(const Fields& fields, const ChatInput& input, const ServedModel& model,
                                bool add_generation_prompt);
// The conversation becomes the request's prompt, and `form` (none: any text) what its answer may be beside calls.
// `key`: the field that messages are in.
void SetChat(const Fields& fields, const char* key, ChatInput input, const std::optional<AnswerForm>& form,
             const ServedModel& model, GenerationRequest* request);

// What all APIs that write have in common; `stops` names the field with the texts that end an answer.
GenerationRequest ReadCommon(const Fields& fields, const ServedModel& model, const char* stops = "stop");
inline constexpr int32_t kMaxTokens = 1 << 30;
// The body once more, with its keys in order.
jinja::Value OrderedBody(std::string_view body);

// The field `tools`: `read` is given each as its API writes it, and the same object with its keys in order.
using ToolReader = std::function<Tool(const Fields& tool, const jinja::Value& ordered)>;
void ReadTools(const Fields& fields, std::string_view body, const ToolReader& read, ToolUse* use);
// Name, description and `strict` of the object `tool`, and its field `schema`.
Tool ReadTool(const Fields& tool, const jinja::Value& ordered, const char* schema);
// OpenAI's list of them, for templates.
std::string ToolsText(const std::vector<Tool>& tools);
// `tool_choice` and `parallel_tool_calls` as OpenAI's APIs say them.
void ReadToolChoice(const Fields& fields, ToolUse* use);
// What the field `key` asks for: a call, or that only the tool of this name is called.
void RequireCall(const Fields& fields, const char* key, ToolUse* use);
void AllowTool(const Fields& fields, const char* key, const std::string& name, ToolUse* use);
std::string OrderedText(const jinja::Value& value);
// Arguments of a call that a client sends back. What is no object, as one that was cut short, is shown as the text it
// is.
std::string CallArguments(const std::string& text);

}  // namespace phsa::server

#endif  // PHSA_SERVER_CHAT_INPUT_H_
