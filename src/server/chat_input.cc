#include "server/chat_input.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "engine/session.h"
#include "server/answer_sources.h"

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

void ReadMessages(const Fields& fields, ChatInput* input) {
  static constexpr const char* kKey = "messages";
  static constexpr std::array<std::string_view, 5> kRoles = {"system", "developer", "user", "assistant", "tool"};
  const Json* const value = fields.Find(kKey);
  if (value == nullptr) fields.Refuse(kKey, " is missing; give a list of messages");
  if (!value->is_array() || value->empty()) fields.RefuseValue(kKey, *value, "a list with at least one message");
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
    ChatMessage read{*role == "developer" ? "system" : *role, ReadContent(message)};
    if (*role == "assistant") {
      read.reasoning = reasoning;
      read.tool_calls = std::move(calls);
    } else if (*role == "tool") {
      read.tool_call_id = call_id;
      read.name = name;
    }
    input->Add(std::move(read), message.Name("content"), static_cast<int32_t>(i));
  }
}

// Where an answer's sources are sought: in what was said to the model. A user's turn that is answered ends with the
// question.
std::vector<CandidateText> Candidates(const ChatInput& input) {
  std::vector<CandidateText> texts;
  for (size_t i = 0; i < input.messages.size(); ++i) {
    const ChatMessage& message = input.messages[i];
    if (message.role == "assistant") continue;
    const bool answered = i + 1 == input.messages.size() || input.messages[i + 1].role == "assistant";
    texts.push_back(
        {{input.places[i].field, input.places[i].index, message.content}, message.role == "user" && answered});
  }
  return texts;
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

Tool ReadTool(const Fields& tool, const jinja::Value& ordered, const char* schema) {
  constexpr std::string_view kAllowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
  const std::optional<std::string> name = tool.String("name");
  if (!name) tool.Refuse("name", " is missing");
  if (name->empty() || name->size() > kMaxToolName || name->find_first_not_of(kAllowed) != std::string::npos) {
    tool.Refuse("name", fmt::format(" is {}; allowed: 1 to {} letters, digits, _ - .", Quoted(*name), kMaxToolName));
  }
  Tool read{*name};
  read.description = tool.String("description");
  read.strict = tool.Bool("strict", false);
  read.place = tool.Name(schema);
  if (tool.Object(schema)) read.parameters = OrderedText(*ordered.dict().Find(std::string_view(schema)));
  return read;
}

void ReadTools(const Fields& fields, std::string_view body, const ToolReader& read, ToolUse* use) {
  static constexpr const char* kKey = "tools";
  const Json* const list = fields.Find(kKey);
  if (list == nullptr) return;
  if (!list->is_array()) fields.RefuseValue(kKey, *list, "a list of tools");
  if (list->size() > kMaxTools) {
    fields.Refuse(kKey, fmt::format(" has {} tools; allowed: at most {}", list->size(), kMaxTools));
  }
  if (list->empty()) return;
  const jinja::Value whole = OrderedBody(body);
  const std::vector<jinja::Value>& ordered = whole.dict().Find(std::string_view(kKey))->list().items;
  for (size_t i = 0; i < list->size(); ++i) {
    const Json& one = (*list)[i];
    if (!one.is_object()) fields.Refuse(kKey, fmt::format("[{}] is {}; allowed: an object", i, JsonText(one)));
    use->tools.push_back(read(Fields(one, fmt::format("tools[{}]", i)), ordered[i]));
  }
  use->choice = ToolUse::Choice::kAuto;
}

std::string ToolsText(const std::vector<Tool>& tools) {
  using jinja::Value;
  std::vector<Value> list;
  for (const Tool& tool : tools) {
    Value function = jinja::MakeDict();
    function.dict().Set("name", Value::String(tool.name, false));
    if (tool.description) function.dict().Set("description", Value::String(*tool.description, false));
    if (!tool.parameters.empty()) function.dict().Set("parameters", jinja::FromJson(tool.parameters, "parameters"));
    Value told = jinja::MakeDict();
    told.dict().Set("type", Value::String("function", false));
    told.dict().Set("function", function);
    list.push_back(std::move(told));
  }
  return OrderedText(jinja::MakeList(std::move(list)));
}

void RequireCall(const Fields& fields, const char* key, ToolUse* use) {
  if (use->tools.empty()) fields.Refuse(key, " asks for a call, and there are no tools");
  use->choice = ToolUse::Choice::kRequired;
}

void AllowTool(const Fields& fields, const char* key, const std::string& name, ToolUse* use) {
  if (use->Find(name) == nullptr) {
    fields.Refuse(key, fmt::format(" names {}, which is none of the tools", Quoted(name)));
  }
  use->allowed.push_back(name);
}

void ReadToolChoice(const Fields& fields, ToolUse* use) {
  static constexpr const char* kKey = "tool_choice";
  static constexpr const char* kAllowed =
      R"(none, auto, required, {"type": "function", …} with a name, {"type": "allowed_tools", …})";
  const Json* const value = fields.Find(kKey);
  use->parallel = fields.Bool("parallel_tool_calls", true);
  if (value == nullptr) return;
  const auto take_mode = [&](const std::string& mode, bool may_be_none) {
    if (mode == "required") {
      RequireCall(fields, kKey, use);
    } else if (mode == "none" && may_be_none) {
      use->choice = ToolUse::Choice::kNone;
    } else if (mode != "auto") {
      fields.RefuseValue(kKey, *value, kAllowed);
    }
  };
  if (value->is_string()) return take_mode(value->get<std::string>(), true);
  if (!value->is_object()) fields.RefuseValue(kKey, *value, kAllowed);
  // One API has a tool's name in an object `function`, the other beside the type.
  const auto name_of = [&](const Json& tool) {
    const auto function = tool.find("function");
    const Json& named = function != tool.end() && function->is_object() ? *function : tool;
    const auto name = named.find("name");
    if (name == named.end() || !name->is_string()) fields.RefuseValue(kKey, *value, kAllowed);
    return name->get<std::string>();
  };
  const Fields choice = *fields.Object(kKey);
  const std::string type = choice.String("type").value_or("function");
  if (type != "function" && type != "allowed_tools") fields.RefuseValue(kKey, *value, kAllowed);
  if (type == "function") {
    const std::string name = name_of(*value);
    RequireCall(fields, kKey, use);
    AllowTool(fields, kKey, name, use);
    use->parallel = false;  // this call, and nothing else
    return;
  }
  const std::optional<Fields> inner = choice.Object("allowed_tools");
  const Fields& allowed = inner ? *inner : choice;
  const Json* const list = allowed.Find("tools");
  if (list == nullptr || !list->is_array() || list->empty()) fields.RefuseValue(kKey, *value, "a list of tools in it");
  for (const Json& tool : *list) {
    if (!tool.is_object()) fields.RefuseValue(kKey, *value, "tools that are objects");
    AllowTool(fields, kKey, name_of(tool), use);
  }
  take_mode(allowed.String("mode").value_or("auto"), false);
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
  const ChatTemplate& chat = TemplateOf(model);
  ChatInput input;
  ReadMessages(fields, &input);
  input.variables = ReadVariables(fields, body);
  input.tools.format = CallFormatOf(chat.text(), chat.has_tools());
  const auto read = [](const Fields& tool, const jinja::Value& ordered) {
    const std::optional<std::string> type = tool.String("type");
    if (!type || *type != "function") {
      tool.Refuse("type", fmt::format(" is {}; allowed: function", type ? Quoted(*type) : "missing"));
    }
    const std::optional<Fields> function = tool.Object("function");
    if (!function) tool.Refuse("function", " is missing; give its name, description and parameters");
    return ReadTool(*function, *ordered.dict().Find("function"), "parameters");
  };
  ReadTools(fields, body, read, &input.tools);
  ReadToolChoice(fields, &input.tools);
  // A model that shall not call is not told what it could.
  if (input.tools.active()) {
    input.variables.tools = OrderedText(*OrderedBody(body).dict().Find(std::string_view("tools")));
  }
  return input;
}

const ChatTemplate& TemplateOf(const ServedModel& model) {
  if (model.chat_template) return *model.chat_template;
  throw HttpError(
      400,
      "the model carries no chat template that is known; use /v1/completions, or have the server started with "
      "one that is");
}

void CheckLength(const Fields& fields, const char* key, std::span<const int32_t> tokens, const ServedModel& model) {
  try {
    CheckPrompt(model.engine, tokens);
  } catch (const Error& error) {
    const bool is_long = tokens.size() >= static_cast<size_t>(model.engine.memory().context);
    throw HttpError(400, error.what(), fields.Name(key), is_long ? "context_length_exceeded" : "invalid_value");
  }
}

std::vector<int32_t> ChatTokens(const Fields& fields, const ChatInput& input, const ServedModel& model,
                                bool add_generation_prompt) {
  return fields.Named("messages", [&] {
    return TemplateOf(model).Encode(input.messages, add_generation_prompt, model.engine.tokenizer(), input.variables);
  });
}

void SetChat(const Fields& fields, const char* key, ChatInput input, const std::optional<AnswerForm>& form,
             const ServedModel& model, GenerationRequest* request) {
  constexpr size_t kEnd = 8;  // tokens that may open a thought
  const Tokenizer& tokenizer = model.engine.tokenizer();
  std::vector<int32_t> tokens = ChatTokens(fields, input, model, true);
  CheckLength(fields, key, tokens, model);
  std::string end = tokenizer.Decode(std::span(tokens).last(std::min(kEnd, tokens.size())), false);
  while (!end.empty() && (end.back() == '\n' || end.back() == ' ')) end.pop_back();
  request->chat = true;
  request->thinking = end.ends_with(kThink);
  request->thinks = request->thinking || TemplateOf(model).text().find(kThinkEnd) != std::string::npos;
  request->tools = std::move(input.tools);
  request->options.grammar = ChatGrammar(form, model, request);
  Prompt& prompt = request->prompts.emplace_back();
  prompt.tokens = std::move(tokens);
  if (request->sources) SetSources(Candidates(input), tokenizer, *request->sources, &prompt);
}

}  // namespace phsa::server
