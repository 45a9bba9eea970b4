#include "cli/prompt.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "base/errors.h"
#include "cli/options.h"
#include "cli/terminal.h"

namespace phsa::cli {

void AddPromptFlags(CLI::App& command, PromptFlags& flags) {
  command.add_option("-f,--file", flags.document, "a text that the question is about; - for standard input");
  command.add_option("-p,--prompt", flags.question,
                     "the question; -: standard input, which is also read where it is a pipe and nothing else asks");
  command.add_option("--system", flags.system, "the system message");
  command.add_option("--chat-template", flags.chat_template, "the chat template by name, where the model's is unknown");
  command.add_flag("--raw", flags.raw, "no chat template: the model goes on from the text as it is");
}

namespace {

// -p, or what standard input says in its place: `echo "Why?" | phsa run -m M -f DOC`.
std::string Question(const PromptFlags& flags) {
  if (flags.question == "-" && flags.document == "-") {
    ThrowInvalid("-f - and -p -: standard input is one of them; give the other another way");
  }
  struct stat input {};
  const bool known = fstat(STDIN_FILENO, &input) == 0;
  const bool pipe = known && (S_ISFIFO(input.st_mode) || S_ISSOCK(input.st_mode));
  // A text alone may be all of the prompt, and a loop in a shell has its list as standard input: then only a pipe asks.
  const bool asks =
      flags.document.empty() ? pipe || (known && S_ISREG(input.st_mode)) : pipe && flags.document != "-" && !flags.raw;
  if (flags.question != "-" && !(flags.question.empty() && asks)) return flags.question;
  if (flags.question.empty()) Note("reading the question from standard input");
  std::string question = ReadText("-");
  while (!question.empty() && (question.back() == '\n' || question.back() == '\r')) question.pop_back();
  return question;
}

}  // namespace

std::vector<int32_t> PromptTokens(const PromptFlags& flags, const ModelSource& source, const Tokenizer& tokenizer) {
  const std::string question = Question(flags);
  if (question.empty() && flags.document.empty()) {
    ThrowInvalid("there is nothing to read; give a question (-p), a text (-f), or both");
  }
  std::string text = flags.document.empty() ? "" : ReadText(flags.document);
  if (!text.empty() && !question.empty()) text += "\n\n";
  text += question;
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

std::string DocumentTitle(const Document& document) { return fmt::format("File: {}\n\n", document.name); }

std::string TurnAbout(std::span<const Document> documents, std::string_view question) {
  std::string turn;
  for (const Document& document : documents) {
    if (documents.size() > 1) turn += DocumentTitle(document);
    turn += document.text;
    turn += "\n\n";
  }
  turn += question;
  return turn;
}

int32_t ContextFor(size_t prompt_tokens, int32_t answer, const ModelConfig& config) {
  if (prompt_tokens >= static_cast<size_t>(config.context)) {
    ThrowInvalid("the prompt has {} tokens, the model's context {}; give a shorter text", prompt_tokens,
                 config.context);
  }
  return static_cast<int32_t>(std::min<int64_t>(static_cast<int64_t>(prompt_tokens) + answer, config.context));
}

}  // namespace phsa::cli
