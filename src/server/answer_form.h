// What an answer may be: a schema's or a grammar's text, calls of tools with arguments that fulfil their schemas, and
// thoughts before either.
#ifndef PHSA_SERVER_ANSWER_FORM_H_
#define PHSA_SERVER_ANSWER_FORM_H_

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "grammar/grammar.h"
#include "server/api.h"
#include "server/fields.h"

namespace phsa::server {

// A text that was asked for.
struct AnswerForm {
  std::string key;  // says it all
  GrammarExpression expression;
  std::shared_ptr<const Grammar> grammar;  // of the text alone
};

// Throws phsa::Error where the grammar is wrong.
AnswerForm MakeForm(std::string key, GrammarExpression expression, const ServedModel& model);

// The object `format` with its `type`: text (then none), json_object or json_schema, whose schema is in `described`,
// the object that `path` leads to in the body, where keys are in their order. Throws HttpError.
std::optional<AnswerForm> ReadFormat(const Fields& format, const Fields& described,
                                     const std::vector<std::string_view>& path, std::string_view body,
                                     const ServedModel& model);

// What a chat's answer may be; none: anything. The request's tools and thoughts are known; whether a grammar guides its
// calls is set. Throws HttpError where a call is to fulfil a schema that no grammar can be made of.
std::shared_ptr<const Grammar> ChatGrammar(const std::optional<AnswerForm>& form, const ServedModel& model,
                                           GenerationRequest* request);

}  // namespace phsa::server

#endif  // PHSA_SERVER_ANSWER_FORM_H_
