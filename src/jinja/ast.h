// A template as a tree.
#ifndef PHSA_JINJA_AST_H_
#define PHSA_JINJA_AST_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/value.h"

namespace phsa::jinja {

struct Expression {
  enum class Kind : uint8_t {
    kConstant,
    kName,
    kList,
    kTuple,
    kDict,       // key, value, key, value
    kAttribute,  // parts[0].name
    kItem,       // parts[0][parts[1]]
    kSlice,      // parts[0][parts[1]:parts[2]:parts[3]], null where nothing stands
    kCall,       // parts[0](parts[1], …, keywords[0]=…)
    kFilter,     // parts[0] | name(…); parts[0] is null at the head of a filter block
    kTest,       // parts[0] is name(…)
    kNot,
    kNegative,
    kPositive,
    kBinary,   // by `name`: + - * / // % **
    kConcat,   // all parts, as text
    kCompare,  // parts[0] operators[0] parts[1] operators[1] …
    kAnd,
    kOr,
    kCondition,  // parts[0] if parts[1] else parts[2], which may be null
  };
  Kind kind;
  int32_t line;
  int32_t depth = 1;
  std::string name = {};
  Value constant = {};
  std::vector<std::unique_ptr<Expression>> parts = {};
  std::vector<std::string> keywords = {};  // of the last parts of a call, a filter or a test
  std::vector<std::string> operators = {};
};
using ExpressionPtr = std::unique_ptr<Expression>;

struct Statement;
using Body = std::vector<std::unique_ptr<Statement>>;

// What is set, and what a loop fills: a name, an attribute of a namespace, or several names.
struct Target {
  std::string name, attribute;
  std::vector<std::string> names;  // not empty: these
};

struct Macro {
  std::string name;
  struct Parameter {
    std::string name;
    ExpressionPtr otherwise;
  };
  std::vector<Parameter> parameters;
  Body body;
};

struct Statement {
  enum class Kind : uint8_t {
    kText,
    kPrint,
    kIf,   // conditions and bodies; one more body: else
    kFor,  // bodies: the loop's, else's
    kSet,
    kSetBlock,
    kMacro,
    kFilter,  // a block
    kWith,
    kBlock,  // a tag that only groups
    kBreak,
    kContinue,
  };
  Kind kind;
  int32_t line;
  std::string text = {};
  std::vector<ExpressionPtr> expressions = {};  // for: what is gone through, and the condition or null
  std::vector<Target> targets = {};
  std::vector<Body> bodies = {};
  std::unique_ptr<Macro> macro = {};
};

// Throws Fault; `line` is then where.
Body ParseTemplate(std::string_view source, int32_t* line);

}  // namespace phsa::jinja

#endif  // PHSA_JINJA_AST_H_
