#include "tokenizer/chat_template.h"

#include <algorithm>
#include <array>
#include <ctime>

#include "base/errors.h"
#include "tokenizer/jinja_text.h"
#include "tokenizer/utf8_scan.h"

namespace phsa {
namespace {

constexpr std::string_view kSystemTurn = "<|im_start|>system\n", kTurnEnd = "<|im_end|>\n";

// The templates that can be chosen by name: the ones their models came with, as far as they can print without tools.
struct NamedTemplate {
  std::string_view name, text;
};
constexpr NamedTemplate kNamed[] = {
    {"chatml",
     R"({% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}})"
     R"({% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %})"},
    {"smollm2",
     R"({{'<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n'}})"
     R"({{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}})"
     R"({% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %})"},
    {"qwen2", R"({{'<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'}})"
              R"({{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}})"
              R"({% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %})"},
    {"qwen2.5",
     R"({{'<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n'}})"
     R"({{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}})"
     R"({% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %})"},
    {"qwen3",
     R"({{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}})"
     R"({{'<|im_start|>' + message['role'] + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + )"
     R"(content.lstrip('\n')}}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{{'<think>\n\n</think>\n\n'}})"
     R"({% endif %})"},
    {"llama-3",
     R"({{bos_token}}{{'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + )"
     R"('<|eot_id|>'}}{% if add_generation_prompt %}{{'<|start_header_id|>assistant<|end_header_id|>\n\n'}}{% endif %})"},
    {"llama-3.1",
     R"({{bos_token}}{% set date_string = '26 Jul 2024' %}{{'Cutting Knowledge Date: December 2023\n'}})"
     R"({{'Today Date: ' + date_string + '\n\n'}}{{'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + )"
     R"(message['content'] | trim + '<|eot_id|>'}}{% if add_generation_prompt %})"
     R"({{'<|start_header_id|>assistant<|end_header_id|>\n\n'}}{% endif %})"},
    {"llama-3.2",
     R"({{bos_token}}{% set date_string = strftime_now('%d %b %Y') %}{{'Cutting Knowledge Date: December 2023\n'}})"
     R"({{'Today Date: ' + date_string + '\n\n'}}{{'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + )"
     R"(message['content'] | trim + '<|eot_id|>'}}{% if add_generation_prompt %})"
     R"({{'<|start_header_id|>assistant<|end_header_id|>\n\n'}}{% endif %})"},
};

// What the templates print for messages without tools, and what they prepare for it. A template that prints anything
// else is not known, unless that has to do with tools.
constexpr std::string_view kChatMlMessage = R"('<|im_start|>'+message['role']+'\n'+message['content']+'<|im_end|>\n')";
constexpr std::string_view kChatMlContent = R"('<|im_start|>'+message['role']+'\n'+content+'<|im_end|>\n')";
constexpr std::string_view kChatMlPrompt = R"('<|im_start|>assistant\n')";
constexpr std::string_view kQwen3Thought =
    R"('<|im_start|>'+message['role']+'\n<think>\n'+reasoning_content.strip('\n')+'\n</think>\n\n'+content.lstrip('\n'))";
constexpr std::string_view kLlamaMessage =
    R"('<|start_header_id|>'+message['role']+'<|end_header_id|>\n\n'+message['content']|trim+'<|eot_id|>')";
constexpr std::string_view kLlamaPrompt = R"('<|start_header_id|>assistant<|end_header_id|>\n\n')";

constexpr std::string_view kChatMlPrints[] = {
    kChatMlMessage,
    kChatMlPrompt,
    R"('<|im_start|>system\n'+messages[0]['content']+'<|im_end|>\n')",
};
constexpr std::string_view kQwen3Prints[] = {
    kQwen3Thought,
    kChatMlContent,
    R"('<|im_start|>'+message['role']+'\n'+content)",
    R"('<think>\n\n</think>\n\n')",
    R"('<|im_end|>\n')",
};
constexpr std::string_view kQwen3Sets[] = {
    "content=message['content']",
    "content=''",
    "reasoning_content=''",
    "reasoning_content=message.reasoning_content",
    R"(content=message['content'].split('</think>')[-1].lstrip('\n'))",
    R"(content=content.split('</think>')[-1].lstrip('\n'))",
    R"(reasoning_content=message['content'].split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n'))",
    R"(reasoning_content=content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n'))",
    "index=(messages|length-1)-loop.index0",
    "ns.last_query_index=index",
};
constexpr std::string_view kLlama3Prints[] = {kLlamaMessage, kLlamaPrompt, "content"};
constexpr std::string_view kLlama31Prints[] = {
    R"('<|start_header_id|>system<|end_header_id|>\n\n')",
    R"('Today Date: '+date_string+'\n\n')",
    "system_message",
    "'<|eot_id|>'",
};
constexpr std::string_view kLlamaSets[] = {
    "loop_messages=messages",      "content=bos_token+content", "system_message=messages[0]['content']|trim",
    "messages=messages[1:]",       "system_message=''",         "first_user_message=messages[0]['content']|trim",
    "add_generation_prompt=false",
};
// What they print besides, and do not say themselves that it is for tools.
constexpr std::string_view kToolPrints[] = {
    R"('<|im_start|>system\n')",
    "messages[0]['content']",
    R"(messages[0]['content']+'\n\n')",
    R"('\n')",
    R"('<|im_start|>'+message['role'])",
    R"('\n'+message['content'])",
    R"('<|im_end|>\n')",
    R"('<|im_start|>user')",
    "message['content']",
    R"('", "arguments": ')",
    R"('Do not use variables.\n\n')",
    "t|tojson(indent=4)",
    R"('\n\n')",
    R"('<|start_header_id|>user<|end_header_id|>\n\n')",
    R"('<|start_header_id|>assistant<|end_header_id|>\n\n')",
    "first_user_message+'<|eot_id|>'",
    "'<|eom_id|>'",
    R"(arg_name+'="'+arg_val+'"')",
    "', '",
    "')'",
    "'}'",
    R"('"parameters": ')",
    "message['content']|tojson",
};

template <class Texts>
bool Contains(const Texts& texts, std::string_view text) {
  return std::find(std::begin(texts), std::end(texts), text) != std::end(texts);
}

template <class Texts>
bool AnyHas(const Texts& texts, std::string_view part) {
  return std::any_of(std::begin(texts), std::end(texts),
                     [&](const std::string& text) { return text.find(part) != std::string::npos; });
}

bool IsAboutTools(std::string_view code) {
  return code.find("tool") != std::string_view::npos || code.find("function") != std::string_view::npos ||
         code.find("ipython") != std::string_view::npos;
}

// Python's str.strip().
std::string_view StripSpace(std::string_view text) {
  const auto is_space = [](char32_t c) {
    return (c >= 0x9 && c <= 0xd) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
  };
  size_t begin = text.size(), end = 0;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = ScanUtf8(text, at);
    if (step.kind != Utf8Step::Kind::kCharacter || !is_space(step.code)) {
      begin = std::min(begin, at);
      end = at + step.size;
    }
    at += step.size;
  }
  return begin < end ? text.substr(begin, end - begin) : std::string_view();
}

std::string_view StripLinesLeft(std::string_view text) {
  while (text.starts_with('\n')) text.remove_prefix(1);
  return text;
}

std::string_view StripLinesRight(std::string_view text) {
  while (text.ends_with('\n')) text.remove_suffix(1);
  return text;
}

// As strftime_now("%d %b %Y") in English.
std::string Today() {
  constexpr std::array<const char*, 12> kMonths = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                                   "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  return fmt::format("{:02} {} {}", local.tm_mday, kMonths[static_cast<size_t>(local.tm_mon)], local.tm_year + 1900);
}

std::string JoinedNames() { return fmt::format("{}", fmt::join(ChatTemplate::Names(), ", ")); }

}  // namespace

std::vector<std::string> ChatTemplate::Names() {
  std::vector<std::string> names;
  for (const NamedTemplate& named : kNamed) names.emplace_back(named.name);
  return names;
}

ChatTemplate ChatTemplate::ByName(std::string_view name) {
  for (const NamedTemplate& named : kNamed) {
    if (named.name != name) continue;
    std::optional<ChatTemplate> known = FromText(named.text);
    PHSA_CHECK(known.has_value());
    known->name_ = name;
    return *known;
  }
  ThrowInvalid("--chat-template is {}; allowed: {}", Quoted(name), JoinedNames());
}

ChatTemplate ChatTemplate::Recognise(std::string_view template_text) {
  if (template_text.empty()) {
    ThrowInvalid("the model has no chat template: choose one with --chat-template ({})", JoinedNames());
  }
  if (std::optional<ChatTemplate> known = FromText(template_text)) return *known;
  ThrowInvalid("the model's chat template is not one that phsa knows: choose the closest with --chat-template ({})",
               JoinedNames());
}

std::optional<ChatTemplate> ChatTemplate::FromText(std::string_view template_text) {
  const std::optional<JinjaText> text = ReadJinja(template_text);
  if (!text || text->text_outside) return std::nullopt;
  const std::string llama_set = "content=" + std::string(kLlamaMessage);
  const bool llama = Contains(text->printed, kLlamaMessage) || Contains(text->set, llama_set);
  const bool chatml = Contains(text->printed, kChatMlMessage) ||
                      (Contains(text->printed, kChatMlContent) && Contains(text->set, "content=message['content']"));
  if (llama == chatml) return std::nullopt;
  const bool tools = AnyHas(text->statements, "tools");

  ChatTemplate out;
  const bool thinks = chatml && Contains(text->printed, kQwen3Thought);
  const bool dated = llama && AnyHas(text->printed, "'Today Date: '");
  out.family_ = thinks ? Family::kQwen3 : chatml ? Family::kChatMl : dated ? Family::kLlama31 : Family::kLlama3;
  // The parts that differ from model to model are the template's own.
  for (const std::string& printed : text->printed) {
    const std::optional<std::string> literal = StringLiteral(printed);
    if (!literal) continue;
    if (literal->starts_with(kSystemTurn) && literal->ends_with(kTurnEnd)) {
      out.system_ = literal->substr(kSystemTurn.size(), literal->size() - kSystemTurn.size() - kTurnEnd.size());
    } else if (literal->starts_with("Cutting Knowledge Date: ")) {
      out.knowledge_ = *literal;
    }
  }
  out.begin_token_ = (!text->printed.empty() && text->printed.front() == "bos_token") ||
                     Contains(text->set, "content=bos_token+content");

  for (const std::string& printed : text->printed) {
    const std::optional<std::string> literal = StringLiteral(printed);
    const bool own =
        literal && ((out.system_ && (*literal == *out.system_ ||
                                     *literal == std::string(kSystemTurn) + *out.system_ + std::string(kTurnEnd))) ||
                    (dated && *literal == out.knowledge_));
    const bool begin = printed == "bos_token" && &printed == &text->printed.front();
    const bool known = (chatml && Contains(kChatMlPrints, printed)) || (thinks && Contains(kQwen3Prints, printed)) ||
                       (llama && Contains(kLlama3Prints, printed)) || (dated && Contains(kLlama31Prints, printed));
    if (own || begin || known || (tools && (IsAboutTools(printed) || Contains(kToolPrints, printed)))) continue;
    return std::nullopt;
  }
  bool today = false;
  for (const std::string& set : text->set) {
    constexpr std::string_view kDate = "date_string=";
    if (dated && set == "date_string=strftime_now('%d %b %Y')") {
      today = true;
    } else if (dated && set.starts_with(kDate)) {
      const std::optional<std::string> fixed = StringLiteral(std::string_view(set).substr(kDate.size()));
      if (!fixed) return std::nullopt;
      out.date_ = *fixed;
    } else if (!(llama && (set == llama_set || Contains(kLlamaSets, set))) && !(thinks && Contains(kQwen3Sets, set)) &&
               !IsAboutTools(set)) {
      return std::nullopt;
    }
  }
  if (today) out.date_.clear();
  if (dated && (out.knowledge_.empty() || (out.date_.empty() && !today))) return std::nullopt;
  // Templates that leave the last turn open, or look at who spoke last.
  if (!thinks && (AnyHas(text->statements, "loop.last and") || AnyHas(text->statements, "messages[-1]"))) {
    return std::nullopt;
  }
  if (!Contains(text->printed, llama ? kLlamaPrompt : kChatMlPrompt)) {
    out.prompt_ = Prompt::kNever;
  } else if (!AnyHas(text->statements, "add_generation_prompt")) {
    out.prompt_ = Prompt::kAlways;
  }

  out.name_ = thinks ? "qwen3" : chatml ? "chatml" : !dated ? "llama-3" : today ? "llama-3.2" : "llama-3.1";
  for (const NamedTemplate& named : kNamed) {
    if (chatml && !thinks && out.system_ && named.text.find(*out.system_ + "<|im_end|>") != std::string_view::npos) {
      out.name_ = named.name;
    }
  }
  return out;
}

// What the template itself says is Template(), with its control tokens; what came in a message is Content().
class ChatTemplate::Sink {
 public:
  virtual ~Sink() = default;
  virtual void Template(std::string_view text) = 0;
  virtual void Content(std::string_view text) = 0;
  virtual void Begin() = 0;  // the begin token
};

class ChatTemplate::TextSink : public Sink {
 public:
  explicit TextSink(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  void Template(std::string_view text) override { text_ += text; }
  void Content(std::string_view text) override { text_ += text; }
  void Begin() override {
    if (tokenizer_.bos() >= 0) text_ += tokenizer_.TokenBytes(tokenizer_.bos());
  }
  std::string Take() { return std::move(text_); }

 private:
  const Tokenizer& tokenizer_;
  std::string text_;
};

// Text between two control tokens is encoded as a whole, as it would be in the rendered text: a word may begin in the
// template's part and end in the message's.
class ChatTemplate::IdSink : public Sink {
 public:
  explicit IdSink(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  void Template(std::string_view text) override {
    for (size_t at; (at = text.find("<|")) != std::string_view::npos;) {
      const size_t end = text.find("|>", at) + 2;
      run_ += text.substr(0, at);
      Flush();
      const std::string_view token = text.substr(at, end - at);
      const int32_t id = tokenizer_.TokenId(token);
      if (id < 0) ThrowInvalid("the tokenizer has no token {}, which the chat template needs", Quoted(token));
      ids_.push_back(id);
      text.remove_prefix(end);
    }
    run_ += text;
  }
  void Content(std::string_view text) override { run_ += text; }
  void Begin() override {
    if (tokenizer_.bos() >= 0) ids_.push_back(tokenizer_.bos());
  }
  std::vector<int32_t> Take() {
    Flush();
    return std::move(ids_);
  }

 private:
  void Flush() {
    const std::vector<int32_t> ids = tokenizer_.Encode(run_, SpecialTokens::kAsText);
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    run_.clear();
  }

  const Tokenizer& tokenizer_;
  std::string run_;
  std::vector<int32_t> ids_;
};

std::string ChatTemplate::Render(std::span<const ChatMessage> messages, bool add_generation_prompt,
                                 const Tokenizer& tokenizer, const ChatVariables& variables) const {
  TextSink out(tokenizer);
  Write(messages, add_generation_prompt, variables, out);
  return out.Take();
}

std::vector<int32_t> ChatTemplate::Encode(std::span<const ChatMessage> messages, bool add_generation_prompt,
                                          const Tokenizer& tokenizer, const ChatVariables& variables) const {
  IdSink out(tokenizer);
  Write(messages, add_generation_prompt, variables, out);
  return out.Take();
}

void ChatTemplate::Write(std::span<const ChatMessage> messages, bool add_generation_prompt,
                         const ChatVariables& variables, Sink& out) const {
  if (messages.empty()) ThrowInvalid("chat: there is no message");
  for (const ChatMessage& message : messages) {
    if (message.role != "system" && message.role != "user" && message.role != "assistant") {
      ThrowInvalid("chat: a message has the role {}; allowed: system, user, assistant", Quoted(message.role));
    }
  }
  const bool prompt = prompt_ == Prompt::kAlways || (prompt_ == Prompt::kIfAsked && add_generation_prompt);
  if (begin_token_) out.Begin();
  switch (family_) {
    case Family::kChatMl: WriteChatMl(messages, out); break;
    case Family::kQwen3: WriteQwen3(messages, out); break;
    case Family::kLlama3: WriteLlama3(messages, out); break;
    case Family::kLlama31: WriteLlama31(messages, variables, out); break;
  }
  if (!prompt) return;
  const bool llama = family_ == Family::kLlama3 || family_ == Family::kLlama31;
  out.Template(llama ? "<|start_header_id|>assistant<|end_header_id|>\n\n" : "<|im_start|>assistant\n");
  if (family_ == Family::kQwen3 && !variables.enable_thinking) out.Template("<think>\n\n</think>\n\n");
}

void ChatTemplate::WriteChatMl(std::span<const ChatMessage> messages, Sink& out) const {
  if (system_ && messages.front().role != "system") {
    out.Template(kSystemTurn);
    out.Template(*system_);
    out.Template(kTurnEnd);
  }
  for (const ChatMessage& message : messages) {
    out.Template("<|im_start|>");
    out.Template(message.role);
    out.Template("\n");
    out.Content(message.content);
    out.Template(kTurnEnd);
  }
}

// Thoughts are kept in answers to the last question and dropped from older ones.
void ChatTemplate::WriteQwen3(std::span<const ChatMessage> messages, Sink& out) const {
  constexpr std::string_view kThink = "<think>", kThinkEnd = "</think>";
  size_t last_question = messages.size() - 1;
  for (size_t i = messages.size(); i-- > 0;) {
    const std::string_view content = messages[i].content;
    if (messages[i].role != "user") continue;
    if (content.starts_with("<tool_response>") && content.ends_with("</tool_response>")) continue;
    last_question = i;
    break;
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    std::string_view content = messages[i].content, thought;
    out.Template("<|im_start|>");
    out.Template(messages[i].role);
    out.Template("\n");
    if (messages[i].role == "assistant") {
      const std::string_view whole = content;
      if (const size_t first = whole.find(kThinkEnd); first != std::string_view::npos) {
        content = StripLinesLeft(whole.substr(whole.rfind(kThinkEnd) + kThinkEnd.size()));
        thought = StripLinesRight(whole.substr(0, first));
        if (const size_t think = thought.rfind(kThink); think != std::string_view::npos) {
          thought.remove_prefix(think + kThink.size());
        }
        thought = StripLinesLeft(thought);
      }
      if (i > last_question && (i + 1 == messages.size() || !thought.empty())) {
        out.Template("<think>\n");
        out.Content(StripLinesRight(thought));
        out.Template("\n</think>\n\n");
        content = StripLinesLeft(content);
      }
    }
    out.Content(content);
    out.Template(kTurnEnd);
  }
}

void ChatTemplate::WriteLlama3(std::span<const ChatMessage> messages, Sink& out) const {
  for (const ChatMessage& message : messages) {
    out.Template("<|start_header_id|>");
    out.Template(message.role);
    out.Template("<|end_header_id|>\n\n");
    out.Content(StripSpace(message.content));
    out.Template("<|eot_id|>");
  }
}

void ChatTemplate::WriteLlama31(std::span<const ChatMessage> messages, const ChatVariables& variables,
                                Sink& out) const {
  const bool has_system = messages.front().role == "system";
  out.Template("<|start_header_id|>system<|end_header_id|>\n\n");
  out.Template(knowledge_);
  out.Template("Today Date: ");
  out.Content(!variables.date_string.empty() ? variables.date_string : date_.empty() ? Today() : date_);
  out.Template("\n\n");
  if (has_system) out.Content(StripSpace(messages.front().content));
  out.Template("<|eot_id|>");
  WriteLlama3(messages.subspan(has_system ? 1 : 0), out);
}

}  // namespace phsa
