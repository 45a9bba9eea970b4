// The prompt of commands that read one: a text, a question, or both.
#ifndef PHSA_CLI_PROMPT_H_
#define PHSA_CLI_PROMPT_H_

#include <CLI/CLI.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "documents/document.h"
#include "io/model_source.h"
#include "tokenizer/tokenizer.h"

namespace phsa::cli {

struct PromptFlags {
  std::string document, question, system, chat_template;
  bool raw = false;
};
void AddPromptFlags(CLI::App& command, PromptFlags& flags);

// The user's turn (the text, an empty line, the question) through the chat template, or as it is with --raw. Throws
// phsa::Error where there is neither.
std::vector<int32_t> PromptTokens(const PromptFlags& flags, const ModelSource& source, const Tokenizer& tokenizer);

// What a user's turn about documents says: each document and an empty line, then the question. One document needs no
// name; each of several stands below a line that DocumentTitle makes.
std::string TurnAbout(std::span<const Document> documents, std::string_view question);
std::string DocumentTitle(const Document& document);

// The context where -c does not ask for one: what the prompt and `answer` tokens need, at most the model's. Throws
// phsa::Error where the prompt leaves no room for an answer.
int32_t ContextFor(size_t prompt_tokens, int32_t answer, const ModelConfig& config);

}  // namespace phsa::cli

#endif  // PHSA_CLI_PROMPT_H_
