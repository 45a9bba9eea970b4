#include "jinja/template.h"

#include <locale.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <optional>

#include "base/errors.h"
#include "base/utf8.h"
#include "jinja/ast.h"
#include "jinja/builtins.h"

namespace phsa::jinja {
namespace {

using Kind = Expression::Kind;

constexpr size_t kMaxSource = size_t{4} << 20;
constexpr size_t kValueBytes = 64;
constexpr int64_t kMaxRange = 1'000'000;
constexpr size_t kMaxMessage = 300;

// What the template itself says is wrong with the conversation.
struct Raised {
  std::string message;
};

enum class Flow : uint8_t { kNext, kBreak, kContinue };

class Scope {
 public:
  explicit Scope(Scope* outer) : outer_(outer) {}
  const Value* Find(std::string_view name) const {
    for (const Scope* scope = this; scope != nullptr; scope = scope->outer_) {
      const auto found = scope->values_.find(name);
      if (found != scope->values_.end()) return &found->second;
    }
    return nullptr;
  }
  void Set(std::string_view name, Value value) {
    const auto found = values_.find(name);
    if (found != values_.end()) {
      found->second = std::move(value);
    } else {
      values_.emplace(std::string(name), std::move(value));
    }
  }

 private:
  Scope* const outer_;
  std::map<std::string, Value, std::less<>> values_;
};

// datetime.now().strftime(), in English whatever the locale is.
std::string Now(const std::string& format) {
  static const locale_t kEnglish = newlocale(LC_ALL_MASK, "C", nullptr);
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 1024> buffer{};
  // An empty result is no error if the format is empty; %p gives something here.
  const size_t size = strftime_l(buffer.data(), buffer.size(), format.c_str(), &local, kEnglish);
  if (size == 0 && !format.empty()) Fail("strftime_now() takes shorter formats");
  return {buffer.data(), size};
}

class Interpreter {
 public:
  Interpreter(const Template::Variables& variables, Meter* meter, const Limits& limits, int32_t* line)
      : meter_(*meter), limits_(limits), line_(*line), globals_(nullptr), root_(&globals_) {
    for (const char* name : {"range", "namespace", "dict", "raise_exception", "strftime_now"}) {
      globals_.Set(name, Value(std::make_shared<const Function>(Function{Function::Kind::kGlobal, name})));
    }
    for (const auto& [name, value] : variables) globals_.Set(name, value);
  }
  // Namespaces can hold each other.
  ~Interpreter() {
    for (const auto& one : namespaces_) one->attributes.clear();
  }
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  Text Run(const Body& body) {
    Text out;
    Execute(body, &root_, &out);
    return out;
  }

 private:
  void Print(const Text& text, Text* out) {
    meter_.Charge(text.size());
    if (out->size() + text.size() > limits_.output_bytes) Fail("it writes too much");
    out->Append(text);
  }

  Flow Execute(const Body& body, Scope* scope, Text* out) {
    const Deeper deeper(&depth_);
    for (const auto& statement : body) {
      const Flow flow = Execute(*statement, scope, out);
      if (flow != Flow::kNext) return flow;
    }
    return Flow::kNext;
  }

  Flow Execute(const Statement& node, Scope* scope, Text* out) {
    meter_.Step();
    line_ = node.line;
    switch (node.kind) {
      case Statement::Kind::kText: Print(Text(node.text, true), out); break;
      case Statement::Kind::kPrint: Print(ToText(Evaluate(*node.expressions[0], scope), meter_), out); break;
      case Statement::Kind::kIf:
        for (size_t i = 0; i < node.bodies.size(); ++i) {
          if (i == node.expressions.size() || Evaluate(*node.expressions[i], scope).Truth()) {
            return Execute(node.bodies[i], scope, out);
          }
        }
        break;
      case Statement::Kind::kFor: ExecuteFor(node, scope, out); break;
      case Statement::Kind::kSet: Assign(node.targets[0], Evaluate(*node.expressions[0], scope), scope); break;
      case Statement::Kind::kSetBlock: {
        Value value = Value::String(Captured(node.bodies[0], scope));
        if (node.expressions[0]) value = Filtered(*node.expressions[0], std::move(value), scope);
        Assign(node.targets[0], std::move(value), scope);
        break;
      }
      case Statement::Kind::kMacro: {
        Function function{Function::Kind::kMacro, node.macro->name, node.macro.get()};
        scope->Set(node.macro->name, Value(std::make_shared<const Function>(std::move(function))));
        break;
      }
      case Statement::Kind::kFilter: {
        Value value = Value::String(Captured(node.bodies[0], scope));
        Print(ToText(Filtered(*node.expressions[0], std::move(value), scope), meter_), out);
        break;
      }
      case Statement::Kind::kWith: {
        Scope inner(scope);
        for (size_t i = 0; i < node.targets.size(); ++i) {
          inner.Set(node.targets[i].name, Evaluate(*node.expressions[i], scope));
        }
        return Execute(node.bodies[0], &inner, out);
      }
      case Statement::Kind::kBlock: return Execute(node.bodies[0], scope, out);
      case Statement::Kind::kBreak: return Flow::kBreak;
      case Statement::Kind::kContinue: return Flow::kContinue;
    }
    return Flow::kNext;
  }

  // A block of its own: what it sets is seen in it alone.
  Text Captured(const Body& body, Scope* scope) {
    Scope inner(scope);
    Text out;
    Execute(body, &inner, &out);
    return out;
  }

  void ExecuteFor(const Statement& node, Scope* scope, Text* out) {
    auto loop = std::make_shared<Loop>();
    loop->items = Items(Evaluate(*node.expressions[0], scope), meter_);
    if (node.expressions[1]) {
      std::vector<Value> kept;
      for (Value& item : loop->items) {
        Scope inner(scope);
        Assign(node.targets[0], item, &inner);
        if (Evaluate(*node.expressions[1], &inner).Truth()) kept.push_back(std::move(item));
      }
      loop->items = std::move(kept);
    }
    loop->level = loop_level_ + 1;
    for (const Value& item : loop->items) loop->depth = std::max(loop->depth, item.depth() + 1);
    if (loop->items.empty()) {
      Scope inner(scope);
      Execute(node.bodies[1], &inner, out);
      return;
    }
    ++loop_level_;
    for (; loop->index < loop->items.size(); ++loop->index) {
      meter_.Step();
      Scope inner(scope);
      inner.Set("loop", Value(loop));
      Assign(node.targets[0], loop->items[loop->index], &inner);
      if (Execute(node.bodies[0], &inner, out) == Flow::kBreak) break;
    }
    --loop_level_;
  }

  void Assign(const Target& target, Value value, Scope* scope) {
    if (!target.names.empty()) {
      std::vector<Value> items = Items(value, meter_);
      if (items.size() != target.names.size()) {
        Fail("{} values are to be unpacked into {} names", items.size(), target.names.size());
      }
      for (size_t i = 0; i < items.size(); ++i) scope->Set(target.names[i], std::move(items[i]));
    } else if (target.attribute.empty()) {
      scope->Set(target.name, std::move(value));
    } else {
      const Value* const place = scope->Find(target.name);
      if (place == nullptr || !place->IsNamespace()) {
        Fail("cannot assign attribute on non-namespace object {}", Quoted(target.name));
      }
      place->name_space().attributes[target.attribute] = std::move(value);
    }
  }

  Value Evaluate(const Expression& node, Scope* scope) {
    const Deeper deeper(&depth_);
    meter_.Step();
    line_ = node.line;
    const auto part = [&](size_t i) { return Evaluate(*node.parts[i], scope); };
    switch (node.kind) {
      case Kind::kConstant: return node.constant;
      case Kind::kName: {
        const Value* const found = scope->Find(node.name);
        return found != nullptr ? *found : Value::Missing(Quoted(node.name));
      }
      case Kind::kList:
      case Kind::kTuple: return EvaluateList(node, scope);
      case Kind::kDict: return EvaluateDict(node, scope);
      case Kind::kAttribute: {
        const Value value = part(0);
        line_ = node.line;
        return Attribute(value, node.name);
      }
      case Kind::kItem: {
        const Value value = part(0), key = part(1);
        line_ = node.line;
        return Item(value, key, meter_);
      }
      case Kind::kSlice: return EvaluateSlice(node, scope);
      case Kind::kCall: {
        const Value callee = part(0);
        const Arguments arguments = ArgumentsOf(node, 1, scope);
        line_ = node.line;
        return Call(callee, arguments);
      }
      case Kind::kFilter: return Filtered(node, {}, scope);
      case Kind::kTest: {
        const Value value = part(0);
        const Arguments arguments = ArgumentsOf(node, 1, scope);
        line_ = node.line;
        return Value::Bool(ApplyTest(node.name, value, arguments, meter_));
      }
      case Kind::kNot: return Value::Bool(!part(0).Truth());
      case Kind::kNegative:
      case Kind::kPositive: return Signed(part(0), node.kind == Kind::kNegative);
      case Kind::kBinary: {
        const Value a = part(0), b = part(1);
        line_ = node.line;
        return Binary(node.name, a, b, meter_);
      }
      case Kind::kConcat: {
        Text text;
        for (size_t i = 0; i < node.parts.size(); ++i) text.Append(ToText(part(i), meter_));
        return Value::String(std::move(text));
      }
      case Kind::kCompare: return EvaluateCompare(node, scope);
      case Kind::kAnd: {
        Value left = part(0);
        return left.Truth() ? part(1) : left;
      }
      case Kind::kOr: {
        Value left = part(0);
        return left.Truth() ? left : part(1);
      }
      case Kind::kCondition:
        if (part(1).Truth()) return part(0);
        return node.parts[2] ? part(2) : Value::Missing("an inline if without else");
    }
    return {};
  }

  Value EvaluateList(const Expression& node, Scope* scope) {
    meter_.Charge(node.parts.size() * kValueBytes);
    std::vector<Value> items;
    for (const auto& part : node.parts) items.push_back(Evaluate(*part, scope));
    return MakeList(std::move(items), node.kind == Kind::kTuple);
  }

  Value EvaluateDict(const Expression& node, Scope* scope) {
    meter_.Charge(node.parts.size() * 2 * kValueBytes);
    Value dict = MakeDict();
    for (size_t i = 0; i + 1 < node.parts.size(); i += 2) {
      const Value key = Evaluate(*node.parts[i], scope);
      dict.dict().Set(key, Evaluate(*node.parts[i + 1], scope));
    }
    return dict;
  }

  Value EvaluateSlice(const Expression& node, Scope* scope) {
    const Value value = Evaluate(*node.parts[0], scope);
    std::array<std::optional<Value>, 3> ends;
    for (size_t i = 0; i < 3; ++i) {
      if (node.parts[i + 1]) ends[i] = Evaluate(*node.parts[i + 1], scope);
    }
    const auto end = [&](size_t i) { return ends[i] ? &*ends[i] : nullptr; };
    return Slice(value, end(0), end(1), end(2), meter_);
  }

  // a < b < c: each part is evaluated once, and none behind the first comparison that does not hold.
  Value EvaluateCompare(const Expression& node, Scope* scope) {
    Value left = Evaluate(*node.parts[0], scope);
    for (size_t i = 0; i < node.operators.size(); ++i) {
      Value right = Evaluate(*node.parts[i + 1], scope);
      line_ = node.line;
      if (!Compare(node.operators[i], left, right, meter_)) return Value::Bool(false);
      left = std::move(right);
    }
    return Value::Bool(true);
  }

  Value Signed(const Value& value, bool negative) {
    if (!value.IsUndefined() && !value.IsNumber()) Fail("bad operand type for unary -: '{}'", value.TypeName());
    if (!negative) {
      if (value.IsUndefined()) value.FailUndefined();
      return value;
    }
    return value.IsFloat() ? Value::Float(-value.float_value()) : Binary("-", Value::Int(0), value, meter_);
  }

  Arguments ArgumentsOf(const Expression& node, size_t from, Scope* scope) {
    Arguments arguments;
    const size_t named = node.parts.size() - node.keywords.size();
    for (size_t i = from; i < node.parts.size(); ++i) {
      Value value = Evaluate(*node.parts[i], scope);
      if (i < named) {
        arguments.list.push_back(std::move(value));
      } else {
        arguments.named.emplace_back(node.keywords[i - named], std::move(value));
      }
    }
    return arguments;
  }

  // `head`: what goes in where the chain has no value of its own.
  Value Filtered(const Expression& node, Value head, Scope* scope) {
    const Deeper deeper(&depth_);
    Value value = std::move(head);
    if (node.parts[0] && node.parts[0]->kind == Kind::kFilter) {
      value = Filtered(*node.parts[0], std::move(value), scope);
    } else if (node.parts[0]) {
      value = Evaluate(*node.parts[0], scope);
    }
    const Arguments arguments = ArgumentsOf(node, 1, scope);
    line_ = node.line;
    return ApplyFilter(node.name, value, arguments, meter_);
  }

  Value Call(const Value& callee, const Arguments& arguments) {
    if (callee.IsUndefined()) callee.FailUndefined();
    if (!callee.IsFunction()) Fail("'{}' object is not callable", callee.TypeName());
    const Function& function = callee.function();
    if (function.kind == Function::Kind::kMacro) return CallMacro(*function.macro, arguments);
    if (function.kind == Function::Kind::kMethod) return CallMethod(function.self, function.name, arguments, meter_);
    return CallGlobal(function.name, arguments);
  }

  Value CallMacro(const Macro& macro, const Arguments& arguments) {
    Scope scope(&root_);
    if (arguments.list.size() > macro.parameters.size()) {
      Fail("macro {} takes not more than {} argument(s)", Quoted(macro.name), macro.parameters.size());
    }
    for (const auto& [name, value] : arguments.named) {
      const bool known = std::any_of(macro.parameters.begin(), macro.parameters.end(),
                                     [&, &name = name](const Macro::Parameter& one) { return one.name == name; });
      if (!known) Fail("macro {} takes no keyword argument {}", Quoted(macro.name), Quoted(name));
    }
    for (size_t i = 0; i < macro.parameters.size(); ++i) {
      const Macro::Parameter& parameter = macro.parameters[i];
      const Value* const given = arguments.Find(i, parameter.name);
      scope.Set(parameter.name, given != nullptr      ? *given
                                : parameter.otherwise ? Evaluate(*parameter.otherwise, &scope)
                                                      : Value::Missing("parameter " + Quoted(parameter.name)));
    }
    const int32_t level = std::exchange(loop_level_, 0);
    Text out;
    Execute(macro.body, &scope, &out);
    loop_level_ = level;
    return Value::String(std::move(out));
  }

  Value CallGlobal(std::string_view name, const Arguments& arguments) {
    if (name == "namespace" || name == "dict") return MakeNamespace(name == "dict", arguments);
    if (name == "raise_exception") {
      throw Raised{ToText(arguments.Require(0, "message"), meter_).bytes()};
    }
    if (name == "strftime_now") {
      const Text* const format = arguments.String(0, "format");
      if (format == nullptr) Fail("strftime_now() needs a format");
      return Value::String(Now(format->bytes()), format->IsOwn());
    }
    std::array<int64_t, 3> ends = {0, arguments.Require(0, "stop").AsInt(), 1};
    if (arguments.list.size() > 1) ends = {ends[1], arguments.list[1].AsInt(), 1};
    if (arguments.list.size() > 2) ends[2] = arguments.list[2].AsInt();
    if (ends[2] == 0) Fail("range() arg 3 must not be zero");
    std::vector<Value> items;
    for (int64_t at = ends[0]; ends[2] > 0 ? at < ends[1] : at > ends[1];) {
      if (static_cast<int64_t>(items.size()) == kMaxRange) Fail("range() is longer than {}", kMaxRange);
      meter_.Charge(kValueBytes);
      items.push_back(Value::Int(at));
      if (__builtin_add_overflow(at, ends[2], &at)) break;
    }
    return MakeList(std::move(items));
  }

  Value MakeNamespace(bool is_dict, const Arguments& arguments) {
    meter_.Charge(4 * kValueBytes);
    std::vector<std::pair<Value, Value>> items;
    if (!arguments.list.empty()) {
      if (!arguments.list[0].IsDict()) Fail("namespace() and dict() take a dict");
      items = arguments.list[0].dict().items();
    }
    for (const auto& [key, value] : arguments.named) items.emplace_back(Value::String(key, true), value);
    meter_.Charge(items.size() * 2 * kValueBytes);
    if (is_dict) {
      Value dict = MakeDict();
      for (const auto& [key, value] : items) dict.dict().Set(key, value);
      return dict;
    }
    namespaces_.push_back(std::make_shared<Namespace>());
    for (const auto& [key, value] : items) {
      if (key.IsString()) namespaces_.back()->attributes[key.bytes()] = value;
    }
    return Value(namespaces_.back());
  }

  Meter& meter_;
  const Limits& limits_;
  int32_t& line_;
  int32_t depth_ = 0, loop_level_ = 0;
  std::vector<std::shared_ptr<Namespace>> namespaces_;
  Scope globals_, root_;
};

// Lines end in \n, and the last line's end is none: so Jinja reads a template.
std::string Normalised(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      text += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      text += source[i];
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

}  // namespace

struct Template::Tree {
  Body body;
};

Template::Template(std::shared_ptr<const Tree> tree) : tree_(std::move(tree)) {}
Template::~Template() = default;
Template::Template(Template&&) noexcept = default;
Template& Template::operator=(Template&&) noexcept = default;
Template::Template(const Template&) = default;
Template& Template::operator=(const Template&) = default;

Template Template::Parse(std::string_view source) {
  if (source.size() > kMaxSource) {
    ThrowInvalid("the chat template has {} bytes; allowed: {}", source.size(), kMaxSource);
  }
  if (!IsUtf8(source)) ThrowInvalid("the chat template is not UTF-8");
  int32_t line = 1;
  try {
    auto tree = std::make_shared<Tree>();
    tree->body = ParseTemplate(Normalised(source), &line);
    return Template(std::move(tree));
  } catch (const Fault& fault) {
    ThrowInvalid("the chat template, line {}: {}", line, fault.what);
  }
}

Text Template::Render(const Variables& variables, size_t input_bytes, const Limits& limits) const {
  int32_t line = 1;
  const auto input = static_cast<int64_t>(std::min<size_t>(input_bytes, size_t{1} << 40));
  Meter meter(limits.steps + input / 8, limits.bytes + limits.bytes_per_input_byte * input);
  try {
    Interpreter interpreter(variables, &meter, limits, &line);
    return interpreter.Run(tree_->body);
  } catch (const Fault& fault) {
    ThrowInvalid("the chat template, line {}: {}", line, fault.what);
  } catch (const Raised& raised) {
    ThrowInvalid("the chat template, line {}, says {}", line, Quoted(raised.message, kMaxMessage));
  }
}

}  // namespace phsa::jinja
