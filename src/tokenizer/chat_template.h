// Chat templates that we know by their text: ChatML as Qwen and SmolLM2 write it, and Llama 3's. Rendered exactly as
// transformers renders the model's own template.
#ifndef PHSA_TOKENIZER_CHAT_TEMPLATE_H_
#define PHSA_TOKENIZER_CHAT_TEMPLATE_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace phsa {

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

// The variables that templates look at besides the messages.
struct ChatVariables {
  bool enable_thinking = true;  // Qwen3: false puts an empty thought before the answer
  std::string date_string;      // Llama 3.1 and later: "26 Jul 2024"; empty: what the template itself takes
};

class ChatTemplate {
 public:
  // From the template's text (a Jinja program in the model's files). An unknown or empty one throws phsa::Error naming
  // --chat-template and the names it takes.
  static ChatTemplate Recognise(std::string_view template_text);
  // By name: "chatml", "qwen2", "qwen2.5", "qwen3", "smollm2", "llama-3", "llama-3.1", … as Names() lists.
  static ChatTemplate ByName(std::string_view name);
  static std::vector<std::string> Names();
  const std::string& name() const { return name_; }

  // As apply_chat_template(messages, add_generation_prompt=…, tokenize=False). Throws where there is no message or a
  // role is none of the three: messages of tools are not rendered.
  std::string Render(std::span<const ChatMessage> messages, bool add_generation_prompt, const Tokenizer& tokenizer,
                     const ChatVariables& variables = {}) const;
  // The same as ids, the contents encoded with SpecialTokens::kAsText so that they cannot become control tokens.
  std::vector<int32_t> Encode(std::span<const ChatMessage> messages, bool add_generation_prompt,
                              const Tokenizer& tokenizer, const ChatVariables& variables = {}) const;

 private:
  // Takes the rendered text in pieces: what the template says, in which control tokens are meant, and what others said.
  class Sink;
  class TextSink;
  class IdSink;

  enum class Family : uint8_t { kChatMl, kQwen3, kLlama3, kLlama31 };
  enum class Prompt : uint8_t { kIfAsked, kAlways, kNever };  // whether the assistant's turn is opened

  static std::optional<ChatTemplate> FromText(std::string_view template_text);
  void Write(std::span<const ChatMessage> messages, bool add_generation_prompt, const ChatVariables& variables,
             Sink& out) const;
  void WriteChatMl(std::span<const ChatMessage> messages, Sink& out) const;
  void WriteQwen3(std::span<const ChatMessage> messages, Sink& out) const;
  void WriteLlama3(std::span<const ChatMessage> messages, Sink& out) const;
  void WriteLlama31(std::span<const ChatMessage> messages, const ChatVariables& variables, Sink& out) const;

  std::string name_;
  Family family_ = Family::kChatMl;
  Prompt prompt_ = Prompt::kIfAsked;
  bool begin_token_ = false;           // the begin token comes first
  std::optional<std::string> system_;  // ChatML: said where the first message is not the system's
  std::string knowledge_;              // Llama 3.1: "Cutting Knowledge Date: December 2023\n"
  std::string date_;                   // Llama 3.1: the template's own; empty: today's
};

}  // namespace phsa

#endif  // PHSA_TOKENIZER_CHAT_TEMPLATE_H_
