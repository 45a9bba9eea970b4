#include "cli/prompt.h"

#include <algorithm>

#include "base/errors.h"
#include "cli/options.h"

namespace phsa::cli {

void AddPromptFlags(CLI::App& command, PromptFlags& flags) {
  command.add_option("-f,--file", flags.document, "a text that the question is about; - for standard input");
  command.add_option("-p,--prompt", flags.question, "the question");
  command.add_option("--system", flags.system, "the system message");
  command.add_option("--chat-template", flags.chat_template, "the chat template by name, where the model's is unknown");
  command.add_flag("--raw", flags.raw, "no chat template: the model goes on from the text as it is");
}

std::vector<int32_t> PromptTokens(const PromptFlags& flags, const ModelSource& source, const Tokenizer& tokenizer) {
  if (flags.question.empty() && flags.document.empty()) {
    ThrowInvalid("there is nothing to read; give a question (-p), a text (-f), or both");
  }
  std::string text = flags.document.empty() ? "" : ReadText(flags.document);
  if (!text.empty() && !flags.question.empty()) text += "\n\n";
  text += flags.question;
  if (flags.raw) {
    std::vector<int32_t> ids;
    if (tokenizer.add_bos() && tokenizer.bos() >= 0) ids.push_back(tokenizer.bos());
    const std::vector<int32_t> rest = tokenizer.Encode(text, SpecialTokens::kRecognise);
    ids.insert(ids.end(), rest.begin(), rest.end());
    return ids;
  }
  const ChatTemplate chat = ChooseChatTemplate(flags.chat_template, source.chat_template());
  std::vector<ChatMessage> messages;
  if (!flags.system.empty()) messages.push_back({"system", flags.system});
  messages.push_back({"user", text});
  return chat.Encode(messages, true, tokenizer);
}

int32_t ContextFor(size_t prompt_tokens, int32_t answer, const ModelConfig& config) {
  if (prompt_tokens >= static_cast<size_t>(config.context)) {
    ThrowInvalid("the prompt has {} tokens, the model's context {}; give a shorter text", prompt_tokens,
                 config.context);
  }
  return static_cast<int32_t>(std::min<int64_t>(static_cast<int64_t>(prompt_tokens) + answer, config.context));
}

}  // namespace phsa::cli
