#include "server/answer_form.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "base/errors.h"
#include "server/chat_input.h"
#include "server/tools.h"

namespace phsa::server {
namespace {

using Expression = GrammarExpression;

// The mark as the model writes it, and its letters where it has a control token for it: they read the same.
std::vector<std::string> Spellings(const Tokenizer& tokenizer, std::string_view mark) {
  const int32_t id = tokenizer.TokenId(mark);
  if (id >= 0 && tokenizer.IsSpecial(id)) return {ControlTokenText(mark), std::string(mark)};
  return {std::string(mark)};
}

OrderedJson NoParameters() { return {{"type", "object"}, {"properties", OrderedJson::object()}}; }

// A tool's schema. Throws phsa::Error where it is none of an object, or larger than grammars may be.
OrderedJson SchemaOf(const Tool& tool) {
  if (tool.parameters.empty()) return NoParameters();
  OrderedJson schema = ParseSchemaText(tool.parameters, tool.place);
  if (!schema.is_object()) ThrowInvalid("{}: is no schema; allowed: an object", tool.place);
  if (schema.empty()) return {{"type", "object"}};
  const auto type = schema.find("type");
  if (type != schema.end() && *type != "object") {
    ThrowInvalid("{}: \"#/type\" is {}; arguments are an object", tool.place, type->dump());
  }
  const bool is_whole = type != schema.end() || schema.contains("$ref") || schema.contains("anyOf") ||
                        schema.contains("oneOf") || schema.contains("allOf");
  if (!is_whole) schema["type"] = "object";
  return schema;
}

// Puts together what an answer with tools may be.
class CallWriter {
 public:
  // `free`: tools by their index whose arguments may be any object.
  CallWriter(const ToolUse& use, const Tokenizer& tokenizer, const std::vector<bool>& free)
      : use_(use), tokenizer_(tokenizer), rest_(Expression::Once(Rest(free))) {}

  // One call or more, and nothing else.
  Expression Calls() const {
    switch (use_.format) {
      case CallFormat::kTags: return Several(Tagged(true), Expression::Space());
      case CallFormat::kJson: return Marked(kPythonMark, Listed(), true);
      default: return Mistral();
    }
  }

  // Any text; a call that is begun in it is one.
  Expression FreeText(std::vector<Expression::Trigger> triggers) const {
    const auto add = [&](std::string_view mark, const Expression& then) {
      for (const std::string& text : Spellings(tokenizer_, mark)) triggers.push_back({text, then});
    };
    bool again = false;
    switch (use_.format) {
      case CallFormat::kTags:
        add(kCallOpen, Tagged(false));
        again = use_.parallel;
        break;
      case CallFormat::kJson: add(kPythonMark, Listed()); break;
      default: add(kMistralMark, MistralBehindMark()); break;
    }
    if (use_.format == CallFormat::kJson || use_.json_calls) {
      const Expression more = MoreObjects();
      const Expression list =
          Expression::Sequence({rest_, MoreOf(Comma()), Expression::Space(), Expression::Text("]")});
      const Expression typed = Expression::Sequence({Expression::Text(", \"name\""), rest_, more});
      triggers.push_back({std::string(kCallBeginnings[0]), Expression::Sequence({rest_, more}), true});
      triggers.push_back({std::string(kCallBeginnings[1]), list, true});
      triggers.push_back({std::string(kCallBeginnings[2]), typed, true});
    }
    return Expression::FreeText(std::move(triggers), again);
  }

 private:
  Expression Mark(std::string_view mark) const { return Expression::Text(Spellings(tokenizer_, mark).front()); }
  static Expression Comma() { return Expression::Sequence({Expression::Text(","), Expression::Space()}); }
  Expression Several(const Expression& one, const Expression& between) const {
    if (!use_.parallel) return one;
    return Expression::Sequence({one, Expression::Repeat(Expression::Sequence({between, one}), 0, -1)});
  }

  static Expression Arguments(const Tool& tool, bool free) {
    return free ? Expression::AnyJsonObject() : Expression::Schema(SchemaOf(tool), tool.place);
  }

  // Of a call, what stands behind `{"name"`.
  Expression Rest(const std::vector<bool>& free) {
    const Expression key =
        Expression::Choice({Expression::Text("\"arguments\":"), Expression::Text("\"parameters\":")});
    std::vector<Expression> calls;
    for (size_t i = 0; i < use_.tools.size(); ++i) {
      const Tool& tool = use_.tools[i];
      if (!use_.Allows(tool.name)) continue;
      arguments_.emplace_back(tool.name, Expression::Once(Arguments(tool, free[i])));
      calls.push_back(Expression::Sequence({Expression::Text("\"" + tool.name + "\","), Expression::Space(), key,
                                            Expression::Space(), arguments_.back().second}));
    }
    return Expression::Sequence({Expression::Text(":"), Expression::Space(), Expression::Choice(std::move(calls)),
                                 Expression::Space(), Expression::Text("}")});
  }

  Expression Object() const {
    return Expression::Sequence({Expression::Text("{"), Expression::Space(), Expression::Text("\"name\""), rest_});
  }
  Expression MoreOf(const Expression& between) const {
    if (!use_.parallel) return Expression::Text("");
    return Expression::Repeat(Expression::Sequence({between, Object()}), 0, -1);
  }
  Expression MoreObjects() const {
    const Expression mark = Expression::Choice({Expression::Text(";"), Expression::Text("")});
    return MoreOf(Expression::Sequence({mark, Expression::Space()}));
  }
  Expression List() const {
    return Expression::Sequence({Expression::Text("["), Expression::Space(), Object(), MoreOf(Comma()),
                                 Expression::Space(), Expression::Text("]")});
  }
  Expression Listed() const { return Expression::Choice({Expression::Sequence({Object(), MoreObjects()}), List()}); }

  // Behind the mark, or with it where the model need not write it.
  Expression Marked(std::string_view mark, const Expression& then, bool may_lack) const {
    const Expression marked = Expression::Sequence({Mark(mark), then});
    return may_lack ? Expression::Choice({then, marked}) : marked;
  }

  Expression Tagged(bool with_mark) const {
    const Expression then =
        Expression::Sequence({Expression::Space(), Object(), Expression::Space(), Mark(kCallClose)});
    return with_mark ? Marked(kCallOpen, then, false) : then;
  }

  Expression MistralBehindMark() const {
    if (use_.format == CallFormat::kMistral) return Expression::Sequence({Expression::Space(), List()});
    std::vector<Expression> calls;
    for (const auto& [name, arguments] : arguments_) {
      calls.push_back(Expression::Sequence({Expression::Text(name), Mark(kArgumentsMark), arguments}));
    }
    const Expression call = Expression::Choice(std::move(calls));
    if (!use_.parallel) return call;
    const Expression next = Expression::Sequence({Mark(kMistralMark), call});
    return Expression::Sequence({call, Expression::Repeat(next, 0, -1)});
  }
  Expression Mistral() const { return Marked(kMistralMark, MistralBehindMark(), false); }

  const ToolUse& use_;
  const Tokenizer& tokenizer_;
  std::vector<std::pair<std::string, Expression>> arguments_;  // by the tool's name
  const Expression rest_;
};

// Thoughts in front of what follows.
Expression WithThoughts(const Expression& then, const GenerationRequest& request, const Tokenizer& tokenizer) {
  const Expression lines = Expression::Repeat(Expression::Text("\n"), 0, 2);
  const Expression thought = Expression::Sequence({Expression::Until(Spellings(tokenizer, kThinkEnd)), lines, then});
  if (request.thinking) return thought;
  std::vector<Expression> ways = {then};
  for (const std::string& mark : Spellings(tokenizer, kThink)) {
    ways.push_back(Expression::Sequence({lines, Expression::Text(mark), thought}));
  }
  return Expression::Choice(std::move(ways));
}

Expression AnswerExpression(const std::optional<AnswerForm>& form, const GenerationRequest& request,
                            const Tokenizer& tokenizer, const std::vector<bool>& free) {
  const ToolUse& use = request.tools;
  const auto thinking = [&](const Expression& then) {
    return request.thinks ? WithThoughts(then, request, tokenizer) : then;
  };
  if (!use.active()) return thinking(form->expression);
  const CallWriter writer(use, tokenizer, free);
  if (use.choice == ToolUse::Choice::kRequired) return thinking(writer.Calls());
  if (form) return thinking(Expression::Choice({writer.Calls(), form->expression}));
  const Expression said = writer.FreeText({});
  if (!request.thinks) return said;
  const Expression thought = Expression::Sequence({Expression::Until(Spellings(tokenizer, kThinkEnd)), said});
  if (request.thinking) return thought;
  std::vector<Expression::Trigger> thoughts;
  for (const std::string& mark : Spellings(tokenizer, kThink)) thoughts.push_back({mark, thought, true});
  return writer.FreeText(std::move(thoughts));
}

std::string KeyOf(const std::optional<AnswerForm>& form, const GenerationRequest& request) {
  const ToolUse& use = request.tools;
  Json key = Json::array({form ? form->key : "", request.thinks, request.thinking});
  if (use.active()) {
    key.push_back(Json::array({use.choice, use.format, use.parallel, use.allowed}));
    for (const Tool& tool : use.tools) {
      key.push_back(Json::array({tool.name, tool.parameters, tool.place, tool.strict}));
    }
  }
  return "chat " + key.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Tools whose arguments may be any object, as no grammar can be made of their schemas. Throws HttpError where that
// will not do.
std::vector<bool> FindFree(const ToolUse& use) {
  std::vector<bool> free(use.tools.size());
  for (size_t i = 0; i < use.tools.size(); ++i) {
    const Tool& tool = use.tools[i];
    if (!use.Allows(tool.name)) continue;
    try {
      (void)CompileJsonSchema(SchemaOf(tool), tool.place);
    } catch (const Error& error) {
      if (tool.strict || use.choice == ToolUse::Choice::kRequired) {
        throw HttpError(400, error.what(), tool.place, "invalid_value");
      }
      free[i] = true;
    }
  }
  return free;
}

}  // namespace

AnswerForm MakeForm(std::string key, GrammarExpression expression, const ServedModel& model) {
  AnswerForm form{std::move(key), std::move(expression), nullptr};
  form.grammar = model.grammars->Get(form.key, [&] { return CompileExpression(form.expression); });
  return form;
}

std::optional<AnswerForm> ReadFormat(const Fields& format, const Fields& described,
                                     const std::vector<std::string_view>& path, std::string_view body,
                                     const ServedModel& model) {
  (void)described.String("name");
  (void)described.Bool("strict", true);
  const std::string type = format.String("type").value_or("");
  if (type == "text") return std::nullopt;
  if (type == "json_object") return MakeForm("json_object", GrammarExpression::AnyJsonObject(), model);
  if (type != "json_schema") {
    const std::string given = format.Find("type") != nullptr ? JsonText(*format.Find("type")) : "missing";
    format.Refuse("type", fmt::format(" is {}; allowed: text, json_object, json_schema", given));
  }
  const jinja::Value whole = OrderedBody(body);
  const jinja::Value* holder = &whole;
  for (const std::string_view key : path) holder = holder->dict().Find(key);
  const jinja::Value* const schema = holder->dict().Find(std::string_view("schema"));
  const std::string& field = format.place();
  if (schema == nullptr || schema->IsNone()) {
    throw HttpError(400, field + " has no schema; give one, or another type", field, "invalid_value");
  }
  try {
    OrderedJson read = ParseSchemaText(OrderedText(*schema), field);
    std::string key = "schema " + read.dump();
    return MakeForm(std::move(key), GrammarExpression::Schema(std::move(read), field), model);
  } catch (const Error& error) {
    throw HttpError(400, error.what(), field, "invalid_value");
  }
}

std::shared_ptr<const Grammar> ChatGrammar(const std::optional<AnswerForm>& form, const ServedModel& model,
                                           GenerationRequest* request) {
  ToolUse& use = request->tools;
  use.guided = use.active();
  use.json_calls = !form;
  if (!use.active() && (!form || !request->thinks)) return form ? form->grammar : nullptr;
  return model.grammars->Get(KeyOf(form, *request), [&] {
    const Tokenizer& tokenizer = model.engine.tokenizer();
    std::vector<bool> free(use.tools.size());
    try {
      return CompileExpression(AnswerExpression(form, *request, tokenizer, free));
    } catch (const Error&) {
      if (!use.active()) throw;
      free = FindFree(use);
    }
    try {
      return CompileExpression(AnswerExpression(form, *request, tokenizer, free));
    } catch (const Error& error) {
      throw HttpError(400, error.what(), "tools", "invalid_value");
    }
  });
}

}  // namespace phsa::server
