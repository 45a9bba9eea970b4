// What a model's text may be: a grammar, compiled once from GBNF, from a JSON schema or from pieces of both, and
// followed token by token with GrammarMatcher (grammar/matcher.h).
#ifndef PHSA_GRAMMAR_GRAMMAR_H_
#define PHSA_GRAMMAR_GRAMMAR_H_

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace phsa {

// Keys in the order in which they were written: an answer has its properties in that order.
using OrderedJson = nlohmann::ordered_json;

class Grammar;  // compiled; never changes, and may be shared by requests and threads

// All throw phsa::Error, naming `place` ("grammar", "response_format"), where in the text, and what is allowed.
// GBNF as llama.cpp reads it; the rule `root` is the text.
std::shared_ptr<const Grammar> CompileGbnf(std::string_view text, const std::string& place);
// What JSON Schema of the text asks for; what it asks for and is not supported is refused by its JSON pointer.
std::shared_ptr<const Grammar> CompileJsonSchema(const OrderedJson& schema, const std::string& place);
std::shared_ptr<const Grammar> CompileJsonSchemaText(std::string_view schema, const std::string& place);
// Any JSON object.
std::shared_ptr<const Grammar> CompileJsonObject();

// A schema's text with the order of its keys, with limits on depth and size. Throws phsa::Error.
OrderedJson ParseSchemaText(std::string_view text, const std::string& place);

// The text of a control token ("<|python_tag|>", "[TOOL_CALLS]") as a piece of a grammar: it stands for that one token,
// never for its letters.
std::string ControlTokenText(std::string_view token);

// A grammar in pieces:
//   Sequence({Text("<tool_call>\n{\"name\": \"x\", \"arguments\": "), Schema(parameters), Text("}\n</tool_call>")})
// Values that share what they are made of; cheap to copy.
class GrammarExpression {
 public:
  struct Node;
  explicit GrammarExpression(std::shared_ptr<const Node> node) : node_(std::move(node)) {}
  const Node& node() const { return *node_; }

  static GrammarExpression Text(std::string text);
  static GrammarExpression Schema(OrderedJson schema, std::string place);
  static GrammarExpression AnyJsonObject();
  static GrammarExpression Gbnf(std::string text, std::string place);
  static GrammarExpression Sequence(std::vector<GrammarExpression> parts);
  static GrammarExpression Choice(std::vector<GrammarExpression> parts);
  // max < 0: as often as wanted.
  static GrammarExpression Repeat(GrammarExpression part, int min, int max);

  // Any text. Once a trigger is written, what belongs to it must follow; then `again`: any text again, or else the end.
  // The text may end wherever it is free.
  struct Trigger;
  static GrammarExpression FreeText(std::vector<Trigger> triggers, bool again);
  // Any text up to one of the marks, and the mark; the text cannot end before.
  static GrammarExpression Until(const std::vector<std::string>& marks);
  // The part, made once in a grammar that has this expression in many places.
  static GrammarExpression Once(GrammarExpression part);
  // What may stand between the tokens of a JSON text.
  static GrammarExpression Space();

 private:
  std::shared_ptr<const Node> node_;
};

struct GrammarExpression::Trigger {
  std::string text;  // not empty; none may be the beginning of another or lie within it
  GrammarExpression then;
  // It counts only where the text begins, or behind white space there, and the text ends behind what belongs to it.
  bool first = false;
};

std::shared_ptr<const Grammar> CompileExpression(const GrammarExpression& expression);

}  // namespace phsa

#endif  // PHSA_GRAMMAR_GRAMMAR_H_
