// Chat templates: the Jinja program that a model carries, run as transformers runs it (apply_chat_template). What
// comes from a message, a tool or a result cannot become a control token, whatever the template does with it.
#ifndef PHSA_TOKENIZER_CHAT_TEMPLATE_H_
#define PHSA_TOKENIZER_CHAT_TEMPLATE_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "jinja/template.h"
#include "tokenizer/tokenizer.h"

namespace phsa {

struct ChatToolCall {
  std::string name;
  std::string arguments;  // the JSON text of an object
  std::string id = {};
};

struct ChatMessage {
  std::string role;  // "system", "developer", "user", "assistant", "tool"
  std::string content;
  std::string reasoning = {};                 // of an assistant that thinks
  std::vector<ChatToolCall> tool_calls = {};  // of an assistant
  std::string tool_call_id = {}, name = {};   // of a tool: which call it answers, and the function's name
};

// The variables that templates look at besides the messages.
struct ChatVariables {
  std::optional<bool> enable_thinking = {};  // Qwen3: false puts an empty thought before the answer
  std::string date_string = {};  // Llama 3.1 and later: "26 Jul 2024"; empty: what the template itself takes
  std::string tools = {};        // the JSON text of OpenAI's list; empty: none
  std::string more = {};         // the JSON text of an object: further variables
};

class ChatTemplate {
 public:
  // From the template's text (a Jinja program in the model's files). One that is empty or no Jinja throws phsa::Error
  // naming --chat-template and the names it takes.
  static ChatTemplate Recognise(std::string_view template_text);
  // By name: "chatml", "qwen2", "qwen2.5", "qwen3", "smollm2", "llama-3", "llama-3.1", … as Names() lists.
  static ChatTemplate ByName(std::string_view name);
  static std::vector<std::string> Names();
  // The name of the one that writes the same; else "own-" and a number that is the text's.
  const std::string& name() const { return name_; }
  const std::string& text() const { return text_; }
  // Whether the template itself writes tools, calls and results. Where it does not, they are written as text into the
  // turns that it knows: calls as <tool_call>{"name": …, "arguments": …}</tool_call>.
  bool has_tools() const { return has_tools_; }

  // As apply_chat_template(messages, add_generation_prompt=…, tokenize=False). Throws where there is no message, a role
  // is none of the five, or the template does.
  std::string Render(std::span<const ChatMessage> messages, bool add_generation_prompt, const Tokenizer& tokenizer,
                     const ChatVariables& variables = {}) const;
  // The same as ids.
  std::vector<int32_t> Encode(std::span<const ChatMessage> messages, bool add_generation_prompt,
                              const Tokenizer& tokenizer, const ChatVariables& variables = {}) const;

 private:
  struct ControlTokens {
    std::string begin, end;  // empty: the tokenizer has none
  };

  ChatTemplate(std::string_view template_text, jinja::Template program);
  static ControlTokens TokensOf(const Tokenizer& tokenizer);
  jinja::Text Write(std::span<const ChatMessage> messages, bool add_generation_prompt, const ControlTokens& tokens,
                    const ChatVariables& variables, const jinja::Limits& limits = {}) const;
  jinja::Text WriteUnguarded(std::span<const ChatMessage> messages, bool add_generation_prompt,
                             const ControlTokens& tokens, const ChatVariables& variables,
                             const jinja::Limits& limits) const;
  jinja::Value MessageValue(const ChatMessage& message) const;
  void LearnHowItCalls();
  // What it writes for a few small conversations; empty where it refuses one.
  std::vector<std::string> Samples() const;

  std::string name_, text_;
  jinja::Template program_;
  bool is_named_ = false;  // by the user, so that its control tokens may be another model's
  bool has_tools_ = false;
  bool arguments_are_text_ = false;     // of calls, where the template wants no object
  bool calls_have_no_content_ = false;  // null where a message of calls says nothing else
};

}  // namespace phsa

#endif  // PHSA_TOKENIZER_CHAT_TEMPLATE_H_
