// The passages of a request that an answer was read from (eval/sources.h), as requests ask for them and answers say
// them.
#ifndef PHSA_SERVER_ANSWER_SOURCES_H_
#define PHSA_SERVER_ANSWER_SOURCES_H_

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/answer.h"
#include "io/json.h"
#include "server/api.h"
#include "server/fields.h"
#include "server/worker.h"

namespace phsa::server {

// `phsa.sources`: true, or how many at most; none: they are not asked for. Throws HttpError.
std::optional<SourceOptions> ReadSources(const Fields& fields);

// A text of a prompt. What ends with a question, as a user's turn that is answered does, is a source without it.
struct CandidateText {
  GivenText given;
  bool ends_with_question = false;
};
// Where the question begins: behind the last empty line, or else the last line break, or else at once.
size_t QuestionBegin(std::string_view text);
// Those that the prompt's tokens hold as they are; the others have no sources.
void SetSources(const std::vector<CandidateText>& texts, const Tokenizer& tokenizer, const SourceOptions& options,
                Prompt* prompt);

// Of the answer number `choice`, whose client sees `content` of its text.
Json SourcesJson(const Prompt& prompt, const AnswerSources& sources, size_t choice, const GenerateResult& result,
                 std::string_view content, const Tokenizer& tokenizer);

}  // namespace phsa::server

#endif  // PHSA_SERVER_ANSWER_SOURCES_H_
