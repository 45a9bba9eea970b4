// Conversations in requests: messages, tools and the template's variables, whatever API they came in.
#ifndef PHSA_SERVER_CHAT_INPUT_H_
#define PHSA_SERVER_CHAT_INPUT_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "jinja/value.h"
#include "server/api.h"
#include "server/fields.h"
#include "server/tools.h"
#include "tokenizer/chat_template.h"

namespace phsa::server {

struct ChatInput {
  std::vector<ChatMessage> messages;
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
// The conversation becomes the request's prompt. `key`: the field that messages are in.
void SetChat(const Fields& fields, const char* key, ChatInput input, const ServedModel& model,
             GenerationRequest* request);

// What all APIs that write have in common; `stops` names the field with the texts that end an answer.
GenerationRequest ReadCommon(const Fields& fields, const ServedModel& model, const char* stops = "stop");
inline constexpr int32_t kMaxTokens = 1 << 30;
// The body once more, with its keys in order.
jinja::Value OrderedBody(std::string_view body);

// Tools that were read one by one: what the template is told of them.
void AddTool(const std::string& name, const jinja::Value& description, const jinja::Value& parameters,
             std::vector<jinja::Value>* list, ToolUse* use);
std::string OrderedText(const jinja::Value& value);
// Arguments of a call that a client sends back. What is no object, as one that was cut short, is shown as the text it
// is.
std::string CallArguments(const std::string& text);
void CheckToolName(const Fields& fields, const char* key, const std::string& name);

}  // namespace phsa::server

#endif  // PHSA_SERVER_CHAT_INPUT_H_
