#include "tokenizer/chat_template.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/errors.h"

namespace phsa {
namespace {

// The templates that can be chosen by name: they write what their models' own write, without tools.
struct NamedTemplate {
  std::string_view name, text;
};
constexpr NamedTemplate kNamed[] = {
    {"chatml",
     R"({% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}})"
     R"({% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %})"},
    {"smollm2",
     R"({% for message in messages %}{% if loop.first and message['role'] != 'system' %})"
     R"({{'<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n'}})"
     R"({% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}{% endfor %})"
     R"({% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %})"},
    {"qwen2",
     R"({% for message in messages %}{% if loop.first and message['role'] != 'system' %})"
     R"({{'<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'}})"
     R"({% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}{% endfor %})"
     R"({% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %})"},
    {"qwen2.5",
     R"({% for message in messages %}{% if loop.first and message['role'] != 'system' %})"
     R"({{'<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n'}})"
     R"({% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}{% endfor %})"
     R"({% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %})"},
    // Thoughts are kept in answers to the last question and dropped from older ones.
    {"qwen3", R"({%- set seen = namespace(question=messages | length - 1, found=false) -%}
{%- for message in messages | reverse -%}
  {%- set said = message.content -%}
  {%- if not seen.found and message.role == 'user'
         and not (said.startswith('<tool_response>') and said.endswith('</tool_response>')) -%}
    {%- set seen.found = true -%}
    {%- set seen.question = messages | length - loop.index -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set said = message.content -%}
  {%- set thought = message.reasoning_content | default('') -%}
  {{- '<|im_start|>' + message.role + '\n' -}}
  {%- if message.role == 'assistant' -%}
    {%- if not thought and '</think>' in said -%}
      {%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
      {%- set said = said.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {%- if loop.index0 > seen.question and (loop.last or thought) -%}
      {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' -}}
      {%- set said = said.lstrip('\n') -%}
    {%- endif -%}
  {%- endif -%}
  {{- said + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%})"},
    {"llama-3",
     R"({{bos_token}}{% for message in messages %}{{'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + )"
     R"(message['content'] | trim + '<|eot_id|>'}}{% endfor %}{% if add_generation_prompt %})"
     R"({{'<|start_header_id|>assistant<|end_header_id|>\n\n'}}{% endif %})"},
    {"llama-3.1",
     R"({{bos_token}}{% set has_system = messages[0]['role'] == 'system' %})"
     R"({{'<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: '}})"
     R"({{date_string | default('26 Jul 2024')}}{{'\n\n'}}{% if has_system %}{{messages[0]['content'] | trim}}{% endif %})"
     R"({{'<|eot_id|>'}}{% for message in (messages[1:] if has_system else messages) %})"
     R"({{'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>'}})"
     R"({% endfor %}{% if add_generation_prompt %}{{'<|start_header_id|>assistant<|end_header_id|>\n\n'}}{% endif %})"},
    {"llama-3.2",
     R"({{bos_token}}{% set has_system = messages[0]['role'] == 'system' %})"
     R"({{'<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: '}})"
     R"({{date_string | default(strftime_now('%d %b %Y'))}}{{'\n\n'}})"
     R"({% if has_system %}{{messages[0]['content'] | trim}}{% endif %})"
     R"({{'<|eot_id|>'}}{% for message in (messages[1:] if has_system else messages) %})"
     R"({{'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>'}})"
     R"({% endfor %}{% if add_generation_prompt %}{{'<|start_header_id|>assistant<|end_header_id|>\n\n'}}{% endif %})"},
};

constexpr std::array<std::string_view, 5> kRoles = {"system", "developer", "user", "assistant", "tool"};

// For what a template is tried with when it is loaded.
constexpr jinja::Limits kSampleLimits = {.steps = 100'000, .bytes = 4 << 20, .output_bytes = 1 << 20};

std::string JoinedNames() { return fmt::format("{}", fmt::join(ChatTemplate::Names(), ", ")); }

jinja::Value Said(std::string_view text) { return jinja::Value::String(text, false); }

size_t Count(std::string_view text, std::string_view part) {
  size_t count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string_view::npos; at += part.size()) ++count;
  return count;
}

// Tools, calls and results in words, for a template that has none of its own. The form is the one that most models
// which call functions were trained with.
std::vector<ChatMessage> InWords(std::span<const ChatMessage> messages, const std::string& tools) {
  std::vector<ChatMessage> plain;
  if (!tools.empty()) {
    std::string words =
        "You can call functions. They are described here, one JSON object each:\n<tools>\n" + tools +
        "\n</tools>\nTo call one, write nothing but a JSON object with its name and arguments between these tags:\n"
        "<tool_call>\n{\"name\": \"function\", \"arguments\": {\"argument\": \"value\"}}\n</tool_call>\n"
        "What it gave comes back between <tool_response> and </tool_response>.";
    if (!messages.empty() && (messages.front().role == "system" || messages.front().role == "developer")) {
      words = messages.front().content + "\n\n" + words;
      messages = messages.subspan(1);
    }
    plain.push_back({"system", std::move(words)});
  }
  bool results = false;  // the message before is one of results
  for (const ChatMessage& message : messages) {
    const bool result = message.role == "tool";
    if (!result) {
      ChatMessage& own = plain.emplace_back(message);
      own.tool_calls.clear();
      for (const ChatToolCall& call : message.tool_calls) {
        if (!own.content.empty()) own.content += "\n";
        const jinja::Value name = Said(call.name);
        jinja::Meter meter(1 << 20, int64_t{1} << 30);
        own.content += "<tool_call>\n{\"name\": " + jinja::ToJson(name, {}, meter).bytes() +
                       ", \"arguments\": " + call.arguments + "}\n</tool_call>";
      }
    } else {
      if (!results) plain.push_back({"user", ""});
      std::string& content = plain.back().content;
      if (results) content += "\n";
      content += "<tool_response>\n" + message.content + "\n</tool_response>";
    }
    results = result;
  }
  return plain;
}

}  // namespace

std::vector<std::string> ChatTemplate::Names() {
  std::vector<std::string> names;
  for (const NamedTemplate& named : kNamed) names.emplace_back(named.name);
  return names;
}

ChatTemplate::ChatTemplate(std::string_view template_text, jinja::Template program)
    : text_(template_text), program_(std::move(program)) {}

ChatTemplate ChatTemplate::ByName(std::string_view name) {
  for (const NamedTemplate& named : kNamed) {
    if (named.name != name) continue;
    ChatTemplate known(named.text, jinja::Template::Parse(named.text));
    known.name_ = name;
    known.is_named_ = true;
    return known;
  }
  ThrowInvalid("{} is {}; allowed: {}", Option{"chat_template"}, Quoted(name), JoinedNames());
}

ChatTemplate ChatTemplate::Recognise(std::string_view template_text) {
  if (template_text.empty()) {
    ThrowInvalid("the model has no chat template: choose one with {} ({})", Option{"chat_template"}, JoinedNames());
  }
  try {
    ChatTemplate own(template_text, jinja::Template::Parse(template_text));
    const std::vector<std::string> samples = own.Samples();
    for (const NamedTemplate& named : kNamed) {
      if (own.name_.empty() && !samples.empty() && samples == ByName(named.name).Samples()) own.name_ = named.name;
    }
    uint32_t hash = 2166136261u;  // FNV-1a
    for (const char c : template_text) hash = (hash ^ static_cast<uint8_t>(c)) * 16777619u;
    if (own.name_.empty()) own.name_ = fmt::format("own-{:08x}", hash);
    own.LearnHowItCalls();
    return own;
  } catch (const Error& error) {
    Throw(error.status(), "{}; choose the closest with {} ({})", error.message(), Option{"chat_template"},
          JoinedNames());
  }
}

std::vector<std::string> ChatTemplate::Samples() const {
  const std::vector<ChatMessage> plain = {{"user", " a\n"}, {"assistant", "b"}, {"user", "c"}};
  const std::vector<ChatMessage> thinks = {{"system", "s"}, {"user", "a"}, {"assistant", "<think>\nt\n</think>\n\nb"}};
  try {
    return {Write(plain, true, ControlTokens{"<begin>", "<end>"}, {}, kSampleLimits).bytes(),
            Write(plain, true, ControlTokens{"<begin>", "<end>"}, {.enable_thinking = false}, kSampleLimits).bytes(),
            Write(thinks, false, ControlTokens{"<begin>", "<end>"}, {}, kSampleLimits).bytes()};
  } catch (const Error&) {
    return {};
  }
}

// A conversation with everything in it shows what the template can write, and in which form it wants it.
void ChatTemplate::LearnHowItCalls() {
  const std::vector<ChatMessage> messages = {
      {"user", "question"},
      {"assistant", "", "", {{"probe_tool", R"({"probe_key": "given"})", "abcdefghi"}}},
      {"tool", "probe result", "", {}, "abcdefghi", "probe_tool"}};
  ChatVariables variables;
  variables.tools =
      R"([{"type": "function", "function": {"name": "probe_tool", "description": "Probes.", "parameters": )"
      R"({"type": "object", "properties": {"probe_key": {"type": "string", "description": "What."}}, )"
      R"("required": ["probe_key"]}}}])";
  has_tools_ = true;
  for (const bool text : {false, true}) {
    for (const bool none : {false, true}) {
      arguments_are_text_ = text;
      calls_have_no_content_ = none;
      try {
        const std::string written =
            Write(messages, true, ControlTokens{"<begin>", "<end>"}, variables, kSampleLimits).bytes();
        // Once as a tool, once as a call; and as JSON, not as Python would print an object or a text in a text.
        if (Count(written, "probe_tool") >= 2 && Count(written, "probe_key") >= 2 && Count(written, "given") >= 1 &&
            Count(written, "{'probe_key'") == 0 && Count(written, "{\\\"probe_key") == 0 &&
            Count(written, "probe result") >= 1) {
          return;
        }
      } catch (const Error&) {
      }
    }
  }
  has_tools_ = arguments_are_text_ = calls_have_no_content_ = false;
}

jinja::Value ChatTemplate::MessageValue(const ChatMessage& message) const {
  using jinja::Value;
  Value value = jinja::MakeDict();
  // A role is one of the five, so that templates may make a control token of it.
  value.dict().Set("role", Value::String(message.role, true));
  const bool none = calls_have_no_content_ && !message.tool_calls.empty() && message.content.empty();
  value.dict().Set("content", none ? Value::NoneValue() : Said(message.content));
  if (!message.reasoning.empty()) value.dict().Set("reasoning_content", Said(message.reasoning));
  if (!message.tool_calls.empty()) {
    std::vector<Value> calls;
    for (const ChatToolCall& call : message.tool_calls) {
      Value function = jinja::MakeDict();
      function.dict().Set("name", Said(call.name));
      function.dict().Set("arguments", arguments_are_text_
                                           ? Said(call.arguments)
                                           : jinja::FromJson(call.arguments, "the arguments of a tool call"));
      Value one = jinja::MakeDict();
      one.dict().Set("id", Said(call.id));
      one.dict().Set("type", Said("function"));
      one.dict().Set("function", std::move(function));
      calls.push_back(std::move(one));
    }
    value.dict().Set("tool_calls", jinja::MakeList(std::move(calls)));
  }
  if (!message.tool_call_id.empty()) value.dict().Set("tool_call_id", Said(message.tool_call_id));
  if (!message.name.empty()) value.dict().Set("name", Said(message.name));
  return value;
}

ChatTemplate::ControlTokens ChatTemplate::TokensOf(const Tokenizer& tokenizer) {
  ControlTokens tokens;
  if (tokenizer.bos() >= 0) tokens.begin = tokenizer.TokenBytes(tokenizer.bos());
  if (tokenizer.eos() >= 0) tokens.end = tokenizer.TokenBytes(tokenizer.eos());
  return tokens;
}

jinja::Text ChatTemplate::Write(std::span<const ChatMessage> messages, bool add_generation_prompt,
                                const ControlTokens& tokens, const ChatVariables& variables,
                                const jinja::Limits& limits) const {
  try {
    return WriteUnguarded(messages, add_generation_prompt, tokens, variables, limits);
  } catch (const jinja::Fault& fault) {
    ThrowInvalid("chat: {}", fault.what);  // before the template itself was run
  }
}

jinja::Text ChatTemplate::WriteUnguarded(std::span<const ChatMessage> messages, bool add_generation_prompt,
                                         const ControlTokens& tokens, const ChatVariables& variables,
                                         const jinja::Limits& limits) const {
  using jinja::Value;
  if (messages.empty()) ThrowInvalid("chat: there is no message");
  bool about_tools = !variables.tools.empty();
  for (const ChatMessage& message : messages) {
    if (std::find(kRoles.begin(), kRoles.end(), message.role) == kRoles.end()) {
      ThrowInvalid("chat: a message has the role {}; allowed: {}", Quoted(message.role), fmt::join(kRoles, ", "));
    }
    about_tools = about_tools || message.role == "tool" || !message.tool_calls.empty();
  }
  std::vector<ChatMessage> in_words;
  const bool with_tools = about_tools && has_tools_;
  if (about_tools && !has_tools_) {
    in_words = InWords(messages, variables.tools);
    messages = in_words;
  }
  size_t bytes = (with_tools ? variables.tools.size() : 0) + variables.more.size() + variables.date_string.size();
  std::vector<Value> list;
  for (const ChatMessage& message : messages) {
    bytes += message.content.size() + message.reasoning.size() + 64;
    for (const ChatToolCall& call : message.tool_calls) bytes += call.name.size() + call.arguments.size();
    list.push_back(MessageValue(message));
  }
  jinja::Template::Variables values;
  if (!variables.more.empty()) {
    const Value more = jinja::FromJson(variables.more, "the variables of the chat template");
    if (more.IsDict()) {
      for (const auto& [key, value] : more.dict().items()) values[key.bytes()] = value;
    }
  }
  values["messages"] = jinja::MakeList(std::move(list));
  values["add_generation_prompt"] = Value::Bool(add_generation_prompt);
  values["tools"] =
      with_tools && !variables.tools.empty() ? jinja::FromJson(variables.tools, "tools") : Value::NoneValue();
  values.try_emplace("documents", Value::NoneValue());
  if (!tokens.begin.empty()) values["bos_token"] = Value::String(tokens.begin, true);
  if (!tokens.end.empty()) values["eos_token"] = Value::String(tokens.end, true);
  if (variables.enable_thinking) values["enable_thinking"] = Value::Bool(*variables.enable_thinking);
  if (!variables.date_string.empty()) values["date_string"] = Said(variables.date_string);
  return program_.Render(values, bytes, limits);
}

std::string ChatTemplate::Render(std::span<const ChatMessage> messages, bool add_generation_prompt,
                                 const Tokenizer& tokenizer, const ChatVariables& variables) const {
  return Write(messages, add_generation_prompt, TokensOf(tokenizer), variables).bytes();
}

std::vector<int32_t> ChatTemplate::Encode(std::span<const ChatMessage> messages, bool add_generation_prompt,
                                          const Tokenizer& tokenizer, const ChatVariables& variables) const {
  const jinja::Text text = Write(messages, add_generation_prompt, TokensOf(tokenizer), variables);
  std::vector<TextRange> own;
  size_t begin = 0;
  for (const jinja::Text::Run& run : text.runs()) {
    if (run.own) own.push_back({begin, run.end});
    begin = run.end;
  }
  if (is_named_) {
    // Another model's tokens would be read as text, letter by letter.
    for (const TextRange& range : own) {
      const std::string_view said = std::string_view(text.bytes()).substr(range.begin, range.end - range.begin);
      for (size_t at = 0, end = 0; (at = said.find("<|", end)) != std::string_view::npos;) {
        end = said.find("|>", at);
        if (end == std::string_view::npos) break;
        end += 2;
        const std::string_view token = said.substr(at, end - at);
        if (tokenizer.TokenId(token) < 0) {
          ThrowInvalid("the tokenizer has no token {}, which the chat template needs", Quoted(token));
        }
      }
    }
  }
  return tokenizer.Encode(text.bytes(), own);
}

}  // namespace phsa
