#include "server/chat_input.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "engine/session.h"

namespace phsa::server {
namespace {

constexpr size_t kMaxTools = 512, kMaxToolName = 128;

std::vector<ChatToolCall> ReadCalls(const Fields& message) {
  static constexpr const char* kKey = "tool_calls";
  std::vector<ChatToolCall> calls;
  const Json* const list = message.Find(kKey);
  if (list == nullptr) return calls;
  if (!list->is_array()) message.RefuseValue(kKey, *list, "a list of calls");
  for (size_t i = 0; i < list->size(); ++i) {
    const Json& one = (*list)[i];
    const std::string place = message.Name(fmt::format("tool_calls[{}]", i).c_str());
    if (!one.is_object()) message.Refuse(kKey, fmt::format("[{}] is {}; allowed: an object", i, JsonText(one)));
    const Fields call(one, place);
    if (const auto type = call.String("type"); type && *type != "function") {
      call.Refuse("type", fmt::format(" is {}; allowed: function", Quoted(*type)));
    }
    const std::optional<Fields> function = call.Object("function");
    if (!function) call.Refuse("function", " is missing; give its name and its arguments");
    ChatToolCall& read = calls.emplace_back();
    read.id = call.String("id").value_or("");
    const std::optional<std::string> name = function->String("name");
    if (!name) function->Refuse("name", " is missing");
    read.name = *name;
    read.arguments = CallArguments(function->String("arguments").value_or(""));
  }
  return calls;
}

std::vector<ChatMessage> ReadMessages(const Fields& fields) {
  static constexpr const char* kKey = "messages";
  static constexpr std::array<std::string_view, 5> kRoles = {"system", "developer", "user", "assistant", "tool"};
  const Json* const value = fields.Find(kKey);
  if (value == nullptr) fields.Refuse(kKey, " is missing; give a list of messages");
  if (!value->is_array() || value->empty()) fields.RefuseValue(kKey, *value, "a list with at least one message");
  std::vector<ChatMessage> messages;
  for (size_t i = 0; i < value->size(); ++i) {
    const Json& one = (*value)[i];
    if (!one.is_object()) fields.Refuse(kKey, fmt::format("[{}] is {}; allowed: an object", i, JsonText(one)));
    const Fields message(one, fields.Name(fmt::format("messages[{}]", i).c_str()));
    const std::optional<std::string> role = message.String("role");
    if (!role || std::find(kRoles.begin(), kRoles.end(), *role) == kRoles.end()) {
      message.Refuse("role",
                     fmt::format(" is {}; allowed: {}", role ? Quoted(*role) : "missing", fmt::join(kRoles, ", ")));
    }
    const std::string reasoning = message.String("reasoning_content").value_or("");
    std::vector<ChatToolCall> calls = ReadCalls(message);
    const std::string call_id = message.String("tool_call_id").value_or(""), name = message.String("name").value_or("");
    ChatMessage& read =
        messages.emplace_back(ChatMessage{*role == "developer" ? "system" : *role, ReadContent(message)});
    if (*role == "assistant") {
      read.reasoning = reasoning;
      read.tool_calls = std::move(calls);
    } else if (*role == "tool") {
      read.tool_call_id = call_id;
      read.name = name;
    }
  }
  return messages;
}

void ReadToolChoice(const Fields& fields, ToolUse* use) {
  static constexpr const char* kKey = "tool_choice";
  const Json* const value = fields.Find(kKey);
  use->parallel = fields.Bool("parallel_tool_calls", true);
  const auto needs_tools = [&] {
    if (use->tools.empty()) fields.Refuse(kKey, " asks for a call, and there are no tools");
  };
  if (value == nullptr) return;
  if (value->is_string()) {
    const auto& choice = value->get_ref<const std::string&>();
    if (choice == "none") {
      use->choice = ToolUse::Choice::kNone;
    } else if (choice == "required") {
      needs_tools();
      use->choice = ToolUse::Choice::kRequired;
    } else if (choice != "auto") {
      fields.RefuseValue(kKey, *value, "none, auto, required, or a function by its name");
    }
    return;
  }
  const std::optional<Fields> choice = fields.Object(kKey);
  const std::optional<Fields> function = choice->Object("function");
  const std::optional<std::string> name = function ? function->String("name") : std::nullopt;
  if (!name)
    fields.RefuseValue(kKey, *value, R"(none, auto, required, or {"type": "function", "function": {"name": …}})");
  needs_tools();
  const bool known =
      std::any_of(use->tools.begin(), use->tools.end(), [&](const Tool& tool) { return tool.name == *name; });
  if (!known) fields.Refuse(kKey, fmt::format(" names {}, which is none of the tools", Quoted(*name)));
  use->choice = ToolUse::Choice::kRequired;
  use->named = *name;
}

}  // namespace

std::string ReadContent(const Fields& message) {
  static constexpr const char* kKey = "content";
  const Json* const value = message.Find(kKey);
  if (value == nullptr) return "";
  if (value->is_string()) return value->get<std::string>();
  if (!value->is_array()) message.RefuseValue(kKey, *value, "a text, or a list of parts of the type text");
  std::string text;
  for (const Json& part : *value) {
    const auto type = part.is_object() ? part.find("type") : part.end();
    const auto own = part.is_object() ? part.find("text") : part.end();
    if (!part.is_object() || type == part.end() || *type != "text" || own == part.end() || !own->is_string()) {
      message.Refuse(kKey, R"( has a part that is no text; allowed: {"type": "text", "text": "…"})");
    }
    text += own->get_ref<const std::string&>();
  }
  return text;
}

jinja::Value OrderedBody(std::string_view body) {
  try {
    return jinja::FromJson(body, "the request's body");
  } catch (const Error& error) {
    throw HttpError(400, error.what());
  }
}

std::string OrderedText(const jinja::Value& value) {
  jinja::Meter meter(INT64_MAX, INT64_MAX);  // it came in a body, whose size is limited
  return jinja::ToJson(value, {}, meter).bytes();
}

std::string CallArguments(const std::string& text) {
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) return "{}";
  try {
    (void)ParseJsonObject(text, "arguments");
    return text;
  } catch (const Error&) {
    return OrderedText(jinja::Value::String(text, false));
  }
}

void CheckToolName(const Fields& fields, const char* key, const std::string& name) {
  constexpr std::string_view kAllowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
  if (name.empty() || name.size() > kMaxToolName || name.find_first_not_of(kAllowed) != std::string::npos) {
    fields.Refuse(key, fmt::format(" is {}; allowed: 1 to {} letters, digits, _ - .", Quoted(name), kMaxToolName));
  }
}

void AddTool(const std::string& name, const jinja::Value& description, const jinja::Value& parameters,
             std::vector<jinja::Value>* list, ToolUse* use) {
  using jinja::Value;
  Value function = jinja::MakeDict();
  function.dict().Set("name", Value::String(name, false));
  if (description.IsString()) function.dict().Set("description", description);
  if (parameters.IsDict()) function.dict().Set("parameters", parameters);
  Value tool = jinja::MakeDict();
  tool.dict().Set("type", Value::String("function", false));
  tool.dict().Set("function", function);
  list->push_back(std::move(tool));
  use->tools.push_back({name, parameters.IsDict() ? OrderedText(parameters) : ""});
}

ChatVariables ReadVariables(const Fields& fields, std::string_view body) {
  ChatVariables variables;
  const auto kwargs = fields.Object("chat_template_kwargs");
  if (!kwargs) return variables;
  if (kwargs->Find("enable_thinking") != nullptr) variables.enable_thinking = kwargs->Bool("enable_thinking", true);
  variables.more = OrderedText(*OrderedBody(body).dict().Find("chat_template_kwargs"));
  return variables;
}

ChatInput ReadChatInput(const Fields& fields, std::string_view body, const ServedModel& model) {
  static constexpr const char* kTools = "tools";
  const ChatTemplate& chat = TemplateOf(model);
  ChatInput input;
  input.messages = ReadMessages(fields);
  input.variables = ReadVariables(fields, body);
  input.tools.format = CallFormatOf(chat.text(), chat.has_tools());
  const Json* const list = fields.Find(kTools);
  if (list != nullptr && !list->is_array()) fields.RefuseValue(kTools, *list, "a list of tools");
  if (list != nullptr && !list->empty()) {
    if (list->size() > kMaxTools) {
      fields.Refuse(kTools, fmt::format(" has {} tools; allowed: at most {}", list->size(), kMaxTools));
    }
    const jinja::Value whole = OrderedBody(body);
    const std::vector<jinja::Value>& ordered = whole.dict().Find(std::string_view(kTools))->list().items;
    for (size_t i = 0; i < list->size(); ++i) {
      const Json& one = (*list)[i];
      if (!one.is_object()) fields.Refuse(kTools, fmt::format("[{}] is {}; allowed: an object", i, JsonText(one)));
      const Fields tool(one, fmt::format("tools[{}]", i));
      const std::optional<std::string> type = tool.String("type");
      if (!type || *type != "function") {
        tool.Refuse("type", fmt::format(" is {}; allowed: function", type ? Quoted(*type) : "missing"));
      }
      const std::optional<Fields> function = tool.Object("function");
      if (!function) tool.Refuse("function", " is missing; give its name, description and parameters");
      const std::optional<std::string> name = function->String("name");
      if (!name) function->Refuse("name", " is missing");
      CheckToolName(*function, "name", *name);
      (void)function->String("description");
      const bool has_parameters = function->Object("parameters").has_value();
      const jinja::Value& own = *ordered[i].dict().Find("function");
      input.tools.tools.push_back({*name, has_parameters ? OrderedText(*own.dict().Find("parameters")) : ""});
    }
    input.tools.choice = ToolUse::Choice::kAuto;
  }
  ReadToolChoice(fields, &input.tools);
  // A model that shall not call is not told what it could.
  if (input.tools.active()) {
    input.variables.tools = OrderedText(*OrderedBody(body).dict().Find(std::string_view(kTools)));
  }
  return input;
}

const ChatTemplate& TemplateOf(const ServedModel& model) {
  if (model.chat_template) return *model.chat_template;
  throw HttpError(400,
                  "the model carries no chat template that is known; start the server with --chat-template, or use "
                  "/v1/completions");
}

void CheckLength(const Fields& fields, const char* key, std::span<const int32_t> tokens, const ServedModel& model) {
  try {
    CheckPrompt(model.engine, tokens);
  } catch (const Error& error) {
    const bool is_long = tokens.size() >= static_cast<size_t>(model.engine.plan().context);
    throw HttpError(400, error.what(), fields.Name(key), is_long ? "context_length_exceeded" : "invalid_value");
  }
}

std::vector<int32_t> ChatTokens(const Fields& fields, const ChatInput& input, const ServedModel& model,
                                bool add_generation_prompt) {
  return fields.Named("messages", [&] {
    return TemplateOf(model).Encode(input.messages, add_generation_prompt, model.engine.tokenizer(), input.variables);
  });
}

void SetChat(const Fields& fields, const char* key, ChatInput input, const ServedModel& model,
             GenerationRequest* request) {
  constexpr size_t kEnd = 8;  // tokens that may open a thought
  const Tokenizer& tokenizer = model.engine.tokenizer();
  if (input.tools.choice == ToolUse::Choice::kRequired) {
    fields.Refuse("tool_choice", " asks for a call, which cannot be made sure of; allowed: none, auto");
  }
  std::vector<int32_t> tokens = ChatTokens(fields, input, model, true);
  CheckLength(fields, key, tokens, model);
  std::string end = tokenizer.Decode(std::span(tokens).last(std::min(kEnd, tokens.size())), false);
  while (!end.empty() && (end.back() == '\n' || end.back() == ' ')) end.pop_back();
  request->chat = true;
  request->thinking = end.ends_with("<think>");
  request->thinks = request->thinking || TemplateOf(model).text().find("</think>") != std::string::npos;
  request->tools = std::move(input.tools);
  request->prompts.push_back({std::move(tokens), ""});
}

}  // namespace phsa::server
