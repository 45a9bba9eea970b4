#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>

#include "base/errors.h"
#include "jinja/ast.h"
#include "jinja/lexer.h"

namespace phsa::jinja {
namespace {

using Kind = Expression::Kind;

// The tree is walked by functions that call themselves.
constexpr int32_t kMaxDepth = 150;
// The same of the parser, which takes three calls that count for a pair of brackets.

class Parser {
 public:
  Parser(std::vector<Token> tokens, int32_t* line) : tokens_(std::move(tokens)), line_(*line) {}

  Body Run() {
    Body body = ParseBody({});
    if (!Is(Token::Kind::kEnd)) Fail("there is a tag {} that closes nothing", Quoted(PeekTag()));
    return body;
  }

 private:
  const Token& Now() {
    line_ = tokens_[at_].line;
    return tokens_[at_];
  }
  const Token& Next() {
    const Token& token = Now();
    if (token.kind != Token::Kind::kEnd) ++at_;
    return token;
  }
  bool Is(Token::Kind kind) { return Now().kind == kind; }
  bool IsOperator(std::string_view text) { return Now().kind == Token::Kind::kOperator && Now().text == text; }
  bool IsName(std::string_view text) { return Now().kind == Token::Kind::kName && Now().text == text; }
  bool SkipOperator(std::string_view text) { return IsOperator(text) && (Next(), true); }
  bool SkipName(std::string_view text) { return IsName(text) && (Next(), true); }
  void Expect(std::string_view op) {
    if (!SkipOperator(op)) Fail("there is {} where {} is expected", Shown(), op);
  }
  void ExpectName(std::string_view name) {
    if (!SkipName(name)) Fail("there is {} where {} is expected", Shown(), name);
  }
  std::string Name() {
    if (!Is(Token::Kind::kName)) Fail("there is {} where a name is expected", Shown());
    return Next().text;
  }
  std::string Shown() {
    const Token& token = Now();
    return token.text.empty() ? "the end of a tag" : Quoted(token.text);
  }
  std::string PeekTag() { return at_ + 1 < tokens_.size() ? tokens_[at_ + 1].text : ""; }
  void EndTag() {
    if (!Is(Token::Kind::kTagEnd)) Fail("there is {} where the tag should end", Shown());
    Next();
  }

  // Guards the parser's own recursion.
  ExpressionPtr Make(Kind kind, std::vector<ExpressionPtr> parts = {}, std::string name = {}) {
    auto node = std::make_unique<Expression>();
    node->kind = kind;
    node->line = tokens_[at_ > 0 ? at_ - 1 : 0].line;
    node->name = std::move(name);
    for (const ExpressionPtr& part : parts) {
      if (part) node->depth = std::max(node->depth, part->depth + 1);
    }
    if (node->depth > kMaxDepth) Fail("it is nested too deep");
    node->parts = std::move(parts);
    return node;
  }
  ExpressionPtr Make(Kind kind, ExpressionPtr only, std::string name = {}) {
    std::vector<ExpressionPtr> parts;
    parts.push_back(std::move(only));
    return Make(kind, std::move(parts), std::move(name));
  }
  ExpressionPtr Make(Kind kind, ExpressionPtr first, ExpressionPtr second, std::string name = {}) {
    std::vector<ExpressionPtr> parts;
    parts.push_back(std::move(first));
    parts.push_back(std::move(second));
    return Make(kind, std::move(parts), std::move(name));
  }
  ExpressionPtr Constant(Value value) {
    ExpressionPtr node = Make(Kind::kConstant);
    node->constant = std::move(value);
    return node;
  }

  // ---- Statements

  // Until a tag with one of these names, which stays to be read.
  Body ParseBody(std::initializer_list<std::string_view> ends) {
    const Deeper deeper(&depth_);
    Body body;
    for (;;) {
      const Token& token = Now();
      if (token.kind == Token::Kind::kText) {
        auto text = std::make_unique<Statement>(Statement{Statement::Kind::kText, token.line});
        text->text = Next().text;
        body.push_back(std::move(text));
      } else if (token.kind == Token::Kind::kPrintBegin) {
        auto print = std::make_unique<Statement>(Statement{Statement::Kind::kPrint, token.line});
        Next();
        print->expressions.push_back(Tuple(true));
        if (!Is(Token::Kind::kPrintEnd)) Fail("there is {} where the expression should end", Shown());
        Next();
        body.push_back(std::move(print));
      } else if (token.kind == Token::Kind::kTagBegin) {
        const std::string name = PeekTag();
        if (std::find(ends.begin(), ends.end(), name) != ends.end()) return body;
        if (name.starts_with("end") || name == "else" || name == "elif") return body;  // the caller says what is wrong
        Next();
        body.push_back(ParseTag());
      } else {
        return body;
      }
    }
  }

  std::string CloseTag(std::initializer_list<std::string_view> names, std::string_view of) {
    if (!Is(Token::Kind::kTagBegin) || std::find(names.begin(), names.end(), PeekTag()) == names.end()) {
      Fail("{} has no end", Quoted(of));
    }
    Next();
    return Next().text;
  }

  std::unique_ptr<Statement> ParseTag() {
    const int32_t line = Now().line;
    const std::string name = Name();
    const auto make = [&](Statement::Kind kind) { return std::make_unique<Statement>(Statement{kind, line}); };
    if (name == "if") return ParseIf(make(Statement::Kind::kIf));
    if (name == "for") return ParseFor(make(Statement::Kind::kFor));
    if (name == "set") return ParseSet(make(Statement::Kind::kSet));
    if (name == "macro") return ParseMacro(make(Statement::Kind::kMacro));
    if (name == "with") return ParseWith(make(Statement::Kind::kWith));
    if (name == "break" || name == "continue") {
      if (loops_ == 0) Fail("{} is outside of a loop", name);
      EndTag();
      return make(name == "break" ? Statement::Kind::kBreak : Statement::Kind::kContinue);
    }
    if (name == "generation") {
      // transformers marks the assistant's text by it; what is printed is the body.
      auto block = make(Statement::Kind::kBlock);
      EndTag();
      block->bodies.push_back(ParseBody({"endgeneration"}));
      CloseTag({"endgeneration"}, name);
      EndTag();
      return block;
    }
    if (name == "filter") {
      auto filter = make(Statement::Kind::kFilter);
      filter->expressions.push_back(Filters(nullptr, true));
      EndTag();
      filter->bodies.push_back(ParseBody({"endfilter"}));
      CloseTag({"endfilter"}, name);
      EndTag();
      return filter;
    }
    Fail("there is a tag {}; known are if, for, set, macro, with, filter, generation, break, continue", Quoted(name));
  }

  std::unique_ptr<Statement> ParseIf(std::unique_ptr<Statement> node) {
    for (;;) {
      node->expressions.push_back(Tuple(false));
      EndTag();
      node->bodies.push_back(ParseBody({"elif", "else", "endif"}));
      const std::string end = CloseTag({"elif", "else", "endif"}, "if");
      if (end == "elif") continue;
      EndTag();
      if (end == "else") {
        node->bodies.push_back(ParseBody({"endif"}));
        CloseTag({"endif"}, "if");
        EndTag();
      }
      return node;
    }
  }

  std::unique_ptr<Statement> ParseFor(std::unique_ptr<Statement> node) {
    Target target;
    const bool brackets = SkipOperator("(");
    std::vector<std::string> names = {Name()};
    bool tuple = false;
    while (SkipOperator(",")) {
      tuple = true;
      if (Is(Token::Kind::kName) && !IsName("in")) names.push_back(Name());
    }
    if (brackets) Expect(")");
    if (tuple) {
      target.names = std::move(names);
    } else {
      target.name = std::move(names.front());
    }
    node->targets.push_back(std::move(target));
    ExpectName("in");
    node->expressions.push_back(Tuple(false));
    node->expressions.push_back(SkipName("if") ? Whole() : nullptr);
    if (IsName("recursive")) Fail("recursive loops are not supported");
    EndTag();
    ++loops_;
    node->bodies.push_back(ParseBody({"else", "endfor"}));
    --loops_;
    const std::string end = CloseTag({"else", "endfor"}, "for");
    EndTag();
    node->bodies.emplace_back();
    if (end == "else") {
      node->bodies.back() = ParseBody({"endfor"});
      CloseTag({"endfor"}, "for");
      EndTag();
    }
    return node;
  }

  Target SetTarget() {
    Target target;
    std::string first = Name();
    if (SkipOperator(".")) {
      target.name = std::move(first);
      target.attribute = Name();
    } else if (IsOperator(",")) {
      target.names.push_back(std::move(first));
      while (SkipOperator(",")) target.names.push_back(Name());
    } else {
      target.name = std::move(first);
    }
    return target;
  }

  std::unique_ptr<Statement> ParseSet(std::unique_ptr<Statement> node) {
    node->targets.push_back(SetTarget());
    if (SkipOperator("=")) {
      node->expressions.push_back(Tuple(true));
      EndTag();
      return node;
    }
    node->kind = Statement::Kind::kSetBlock;
    node->expressions.push_back(IsOperator("|") ? Filters(nullptr, false) : nullptr);
    EndTag();
    node->bodies.push_back(ParseBody({"endset"}));
    CloseTag({"endset"}, "set");
    EndTag();
    return node;
  }

  std::unique_ptr<Statement> ParseMacro(std::unique_ptr<Statement> node) {
    node->macro = std::make_unique<Macro>();
    node->macro->name = Name();
    Expect("(");
    while (!IsOperator(")")) {
      Macro::Parameter parameter{Name(), nullptr};
      if (SkipOperator("=")) parameter.otherwise = Whole();
      node->macro->parameters.push_back(std::move(parameter));
      if (!IsOperator(")")) Expect(",");
    }
    Expect(")");
    EndTag();
    const int32_t loops = std::exchange(loops_, 0);
    node->macro->body = ParseBody({"endmacro"});
    loops_ = loops;
    CloseTag({"endmacro"}, "macro");
    if (Is(Token::Kind::kName)) Next();
    EndTag();
    return node;
  }

  std::unique_ptr<Statement> ParseWith(std::unique_ptr<Statement> node) {
    while (!Is(Token::Kind::kTagEnd)) {
      if (!node->targets.empty()) Expect(",");
      Target target;
      target.name = Name();
      node->targets.push_back(std::move(target));
      Expect("=");
      node->expressions.push_back(Whole());
    }
    EndTag();
    node->bodies.push_back(ParseBody({"endwith"}));
    CloseTag({"endwith"}, "with");
    EndTag();
    return node;
  }

  // ---- Expressions, each level as Jinja's parser has it

  // One expression, or several with commas between: a tuple.
  ExpressionPtr Tuple(bool conditions) {
    ExpressionPtr first = conditions ? Whole() : Or();
    if (!IsOperator(",")) return first;
    std::vector<ExpressionPtr> items;
    items.push_back(std::move(first));
    while (SkipOperator(",")) {
      if (Is(Token::Kind::kPrintEnd) || Is(Token::Kind::kTagEnd) || IsOperator(")")) break;
      items.push_back(conditions ? Whole() : Or());
    }
    return Make(Kind::kTuple, std::move(items));
  }

  ExpressionPtr Whole() {
    const Deeper deeper(&depth_);
    ExpressionPtr value = Or();
    while (SkipName("if")) {
      std::vector<ExpressionPtr> parts;
      parts.push_back(std::move(value));
      parts.push_back(Or());
      parts.push_back(SkipName("else") ? Whole() : nullptr);
      value = Make(Kind::kCondition, std::move(parts));
    }
    return value;
  }

  ExpressionPtr Or() {
    const Deeper deeper(&depth_);
    ExpressionPtr left = And();
    while (SkipName("or")) left = Make(Kind::kOr, std::move(left), And());
    return left;
  }

  ExpressionPtr And() {
    ExpressionPtr left = Not();
    while (SkipName("and")) left = Make(Kind::kAnd, std::move(left), Not());
    return left;
  }

  ExpressionPtr Not() {
    if (!SkipName("not")) return Compare();
    const Deeper deeper(&depth_);
    return Make(Kind::kNot, Not());
  }

  ExpressionPtr Compare() {
    static constexpr std::array<std::string_view, 6> kOperators = {"==", "!=", "<", "<=", ">", ">="};
    std::vector<ExpressionPtr> parts;
    std::vector<std::string> operators;
    parts.push_back(Sum());
    for (;;) {
      if (Is(Token::Kind::kOperator) &&
          std::find(kOperators.begin(), kOperators.end(), Now().text) != kOperators.end()) {
        operators.push_back(Next().text);
      } else if (IsName("in")) {
        operators.push_back(Next().text);
      } else if (IsName("not") && tokens_[at_ + 1].kind == Token::Kind::kName && tokens_[at_ + 1].text == "in") {
        Next();
        Next();
        operators.emplace_back("not in");
      } else {
        break;
      }
      parts.push_back(Sum());
    }
    if (operators.empty()) return std::move(parts.front());
    ExpressionPtr node = Make(Kind::kCompare, std::move(parts));
    node->operators = std::move(operators);
    return node;
  }

  ExpressionPtr Sum() {
    ExpressionPtr left = Concat();
    while (IsOperator("+") || IsOperator("-")) {
      std::string op = Next().text;
      left = Make(Kind::kBinary, std::move(left), Concat(), std::move(op));
    }
    return left;
  }

  ExpressionPtr Concat() {
    std::vector<ExpressionPtr> parts;
    parts.push_back(Product());
    while (SkipOperator("~")) parts.push_back(Product());
    return parts.size() == 1 ? std::move(parts.front()) : Make(Kind::kConcat, std::move(parts));
  }

  ExpressionPtr Product() {
    ExpressionPtr left = Power();
    while (IsOperator("*") || IsOperator("/") || IsOperator("//") || IsOperator("%")) {
      std::string op = Next().text;
      left = Make(Kind::kBinary, std::move(left), Power(), std::move(op));
    }
    return left;
  }

  ExpressionPtr Power() {
    ExpressionPtr left = Unary(true);
    while (SkipOperator("**")) left = Make(Kind::kBinary, std::move(left), Unary(true), "**");
    return left;
  }

  ExpressionPtr Unary(bool filters) {
    const Deeper deeper(&depth_);
    ExpressionPtr value;
    if (SkipOperator("-")) {
      value = Make(Kind::kNegative, Unary(false));
    } else if (SkipOperator("+")) {
      value = Make(Kind::kPositive, Unary(false));
    } else {
      value = Primary();
    }
    value = Postfix(std::move(value));
    return filters ? FiltersAndTests(std::move(value)) : std::move(value);
  }

  ExpressionPtr Primary() {
    const Token& token = Next();
    switch (token.kind) {
      case Token::Kind::kName:
        if (token.text == "true" || token.text == "True") return Constant(Value::Bool(true));
        if (token.text == "false" || token.text == "False") return Constant(Value::Bool(false));
        if (token.text == "none" || token.text == "None") return Constant(Value::NoneValue());
        return Make(Kind::kName, std::vector<ExpressionPtr>{}, token.text);
      case Token::Kind::kString: {
        std::string text = token.text;
        while (Is(Token::Kind::kString)) text += Next().text;
        return Constant(Value::String(text, true));
      }
      case Token::Kind::kInteger: {
        int64_t value = 0;
        const char* const end = token.text.data() + token.text.size();
        if (std::from_chars(token.text.data(), end, value).ec != std::errc())
          Fail("the number {} is too large", token.text);
        return Constant(Value::Int(value));
      }
      case Token::Kind::kFloat: return Constant(Value::Float(std::strtod(token.text.c_str(), nullptr)));
      case Token::Kind::kOperator:
        if (token.text == "(") return Brackets();
        if (token.text == "[") return ListOf();
        if (token.text == "{") return DictOf();
        break;
      default: break;
    }
    --at_;
    Fail("there is {} where a value is expected", Shown());
  }

  ExpressionPtr Brackets() {
    if (SkipOperator(")")) return Make(Kind::kTuple);
    ExpressionPtr value = Tuple(true);
    Expect(")");
    return value;
  }

  ExpressionPtr ListOf() {
    std::vector<ExpressionPtr> items;
    while (!IsOperator("]")) {
      items.push_back(Whole());
      if (!IsOperator("]")) Expect(",");
    }
    Expect("]");
    return Make(Kind::kList, std::move(items));
  }

  ExpressionPtr DictOf() {
    std::vector<ExpressionPtr> items;
    while (!IsOperator("}")) {
      items.push_back(Whole());
      Expect(":");
      items.push_back(Whole());
      if (!IsOperator("}")) Expect(",");
    }
    Expect("}");
    return Make(Kind::kDict, std::move(items));
  }

  ExpressionPtr Postfix(ExpressionPtr value) {
    for (;;) {
      if (SkipOperator(".")) {
        if (Is(Token::Kind::kInteger)) {
          ExpressionPtr index = Primary();
          value = Make(Kind::kItem, std::move(value), std::move(index));
        } else {
          std::string name = Name();
          value = Make(Kind::kAttribute, std::move(value), std::move(name));
        }
      } else if (SkipOperator("[")) {
        value = Subscript(std::move(value));
      } else if (SkipOperator("(")) {
        value = Arguments(Make(Kind::kCall, std::move(value)));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr Subscript(ExpressionPtr value) {
    std::vector<ExpressionPtr> parts;
    parts.push_back(std::move(value));
    bool slice = false;
    if (!IsOperator(":")) parts.push_back(Whole());
    while (parts.size() < 4 && SkipOperator(":")) {
      if (!slice && parts.size() == 1) parts.push_back(nullptr);
      slice = true;
      parts.push_back(IsOperator(":") || IsOperator("]") ? nullptr : Whole());
    }
    Expect("]");
    if (!slice) return Make(Kind::kItem, std::move(parts));
    parts.resize(4);
    return Make(Kind::kSlice, std::move(parts));
  }

  // Behind the opening bracket. They are added to the node's parts.
  ExpressionPtr Arguments(ExpressionPtr node) {
    while (!IsOperator(")")) {
      if (IsOperator("*") || IsOperator("**")) Fail("arguments with * are not supported");
      if (Is(Token::Kind::kName) && tokens_[at_ + 1].kind == Token::Kind::kOperator && tokens_[at_ + 1].text == "=") {
        node->keywords.push_back(Name());
        Next();
      } else if (!node->keywords.empty()) {
        Fail("an argument without a name follows one with a name");
      }
      node->parts.push_back(Whole());
      node->depth = std::max(node->depth, node->parts.back()->depth + 1);
      if (!IsOperator(")")) Expect(",");
    }
    Expect(")");
    if (node->depth > kMaxDepth) Fail("it is nested too deep");
    return node;
  }

  std::string DottedName() {
    std::string name = Name();
    while (SkipOperator(".")) name += "." + Name();
    return name;
  }

  ExpressionPtr OneFilter(ExpressionPtr value) {
    std::string name = DottedName();
    ExpressionPtr node = Make(Kind::kFilter, std::move(value), std::move(name));
    return SkipOperator("(") ? Arguments(std::move(node)) : std::move(node);
  }

  // At the head of a block; the first name comes without a bar in {% filter %}.
  ExpressionPtr Filters(ExpressionPtr value, bool first_without_bar) {
    if (first_without_bar) value = OneFilter(std::move(value));
    while (SkipOperator("|")) value = OneFilter(std::move(value));
    return value;
  }

  ExpressionPtr FiltersAndTests(ExpressionPtr value) {
    for (;;) {
      if (SkipOperator("|")) {
        value = OneFilter(std::move(value));
      } else if (SkipName("is")) {
        value = Test(std::move(value));
      } else if (SkipOperator("(")) {
        value = Arguments(Make(Kind::kCall, std::move(value)));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr Test(ExpressionPtr value) {
    const bool negated = SkipName("not");
    std::string name = DottedName();
    ExpressionPtr node = Make(Kind::kTest, std::move(value), std::move(name));
    const Token& token = Now();
    if (SkipOperator("(")) {
      node = Arguments(std::move(node));
    } else if (token.kind == Token::Kind::kString || token.kind == Token::Kind::kInteger ||
               token.kind == Token::Kind::kFloat || IsOperator("[") || IsOperator("{") ||
               (token.kind == Token::Kind::kName && token.text != "else" && token.text != "or" &&
                token.text != "and")) {
      if (IsName("is")) Fail("tests cannot be chained with is");
      const bool keyword = IsName("if") || IsName("not") || IsName("in");
      if (!keyword) {
        node->parts.push_back(Postfix(Primary()));
        node->depth = std::max(node->depth, node->parts.back()->depth + 1);
      }
    }
    return negated ? Make(Kind::kNot, std::move(node)) : std::move(node);
  }

  const std::vector<Token> tokens_;
  int32_t& line_;
  size_t at_ = 0;
  int32_t depth_ = 0;
  int32_t loops_ = 0;
};

}  // namespace

Body ParseTemplate(std::string_view source, int32_t* line) {
  std::vector<Token> tokens = Tokenise(source, line);
  return Parser(std::move(tokens), line).Run();
}

}  // namespace phsa::jinja
