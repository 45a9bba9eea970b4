// What a template computes with: Python's values, as far as templates know them.
#ifndef PHSA_JINJA_VALUE_H_
#define PHSA_JINJA_VALUE_H_

#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "jinja/text.h"

namespace phsa::jinja {

// What is wrong in a template or its variables; the line is added by who runs it.
struct Fault {
  std::string what;
};
template <class... Args>
[[noreturn]] void Fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Fault{fmt::format(format, std::forward<Args>(args)...)};
}

// Lists in lists, and JSON: deeper nesting is refused, so that nothing that follows it can run out of stack.
inline constexpr int32_t kMaxValueDepth = 100;

// What a run may still take.
class Meter {
 public:
  Meter(int64_t steps, int64_t bytes) : steps_(steps), bytes_(bytes) {}
  void Step() {
    if (--steps_ < 0) Fail("it takes too many steps");
  }
  // For what is copied or searched.
  void Charge(size_t bytes) {
    if (bytes > static_cast<uint64_t>(INT64_MAX) || (bytes_ -= static_cast<int64_t>(bytes)) < 0) {
      bytes_ = 0;
      Fail("it takes too much memory");
    }
  }

 private:
  int64_t steps_, bytes_;
};

// While it lives, what counts `depth` is one level deeper; too many levels would run out of stack.
class Deeper {
 public:
  explicit Deeper(int32_t* depth) : depth_(depth) {
    if (++*depth_ > kMostLevels) Fail("it is nested too deep");
  }
  ~Deeper() { --*depth_; }
  Deeper(const Deeper&) = delete;
  Deeper& operator=(const Deeper&) = delete;

 private:
  static constexpr int32_t kMostLevels = 400;
  int32_t* depth_;
};

struct List;
class Dict;
struct Namespace;
struct Loop;
struct Function;

class Value {
 public:
  struct Undefined {
    std::shared_ptr<const std::string> what;  // for messages; may be null
  };
  struct None {};
  using Data = std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const Text>, std::shared_ptr<List>,
                            std::shared_ptr<Dict>, std::shared_ptr<Namespace>, std::shared_ptr<Loop>,
                            std::shared_ptr<const Function>>;

  Value() = default;  // undefined
  template <class T>
  explicit Value(std::shared_ptr<T> pointer) : data_(std::move(pointer)) {}
  static Value NoneValue() { return Value(Data(None{})); }
  static Value Bool(bool value) { return Value(Data(value)); }
  static Value Int(int64_t value) { return Value(Data(value)); }
  static Value Float(double value) { return Value(Data(value)); }
  static Value String(std::string_view text, bool own) { return String(Text(text, own)); }
  static Value String(Text text) { return Value(Data(std::make_shared<const Text>(std::move(text)))); }
  static Value Missing(std::string what) {
    return Value(Data(Undefined{std::make_shared<const std::string>(std::move(what))}));
  }

  bool IsUndefined() const { return Holds<Undefined>(); }
  bool IsNone() const { return Holds<None>(); }
  bool IsBool() const { return Holds<bool>(); }
  bool IsInt() const { return Holds<int64_t>(); }  // a bool is none here
  bool IsFloat() const { return Holds<double>(); }
  bool IsNumber() const { return IsBool() || IsInt() || IsFloat(); }
  bool IsString() const { return Holds<std::shared_ptr<const Text>>(); }
  bool IsList() const { return Holds<std::shared_ptr<List>>(); }  // or a tuple
  bool IsDict() const { return Holds<std::shared_ptr<Dict>>(); }
  bool IsNamespace() const { return Holds<std::shared_ptr<Namespace>>(); }
  bool IsLoop() const { return Holds<std::shared_ptr<Loop>>(); }
  bool IsFunction() const { return Holds<std::shared_ptr<const Function>>(); }

  bool bool_value() const { return std::get<bool>(data_); }
  int64_t int_value() const { return std::get<int64_t>(data_); }
  double float_value() const { return std::get<double>(data_); }
  const Text& text() const { return *std::get<std::shared_ptr<const Text>>(data_); }
  const std::string& bytes() const { return text().bytes(); }
  List& list() const { return *std::get<std::shared_ptr<List>>(data_); }
  Dict& dict() const { return *std::get<std::shared_ptr<Dict>>(data_); }
  Namespace& name_space() const { return *std::get<std::shared_ptr<Namespace>>(data_); }
  const Loop& loop() const { return *std::get<std::shared_ptr<Loop>>(data_); }
  const Function& function() const { return *std::get<std::shared_ptr<const Function>>(data_); }
  const Data& data() const { return data_; }

  // A number as an integer, where it is one in Python: True is 1.
  int64_t AsInt() const;
  double AsDouble() const;  // of any number
  bool Truth() const;
  const char* TypeName() const;  // Python's word
  int32_t depth() const;         // of lists and dicts in it
  [[noreturn]] void FailUndefined() const;

 private:
  explicit Value(Data data) : data_(std::move(data)) {}
  template <class T>
  bool Holds() const {
    return std::holds_alternative<T>(data_);
  }
  Data data_;
};

// A list that is part of another value does not change any more: so no value holds itself, and depths stay true.
struct List {
  std::vector<Value> items;
  bool tuple = false;
  bool frozen = false;
  int32_t depth = 1;
  void Add(Value value);
};

class Dict {
 public:
  // In the order in which they came. A key is a text, a number or None.
  const std::vector<std::pair<Value, Value>>& items() const { return items_; }
  void Set(const Value& key, Value value);
  void Set(std::string_view key, Value value) { Set(Value::String(key, true), std::move(value)); }
  const Value* Find(const Value& key) const;
  const Value* Find(std::string_view key) const;
  int32_t depth() const { return depth_; }

 private:
  static std::string KeyOf(const Value& key);
  std::vector<std::pair<Value, Value>> items_;
  std::unordered_map<std::string, size_t> index_;
  int32_t depth_ = 1;
};

struct Namespace {
  std::map<std::string, Value, std::less<>> attributes;
};

struct Loop {
  std::vector<Value> items;
  size_t index = 0;
  int32_t level = 1;  // of loops around each other
  int32_t depth = 1;  // as a value
};

struct Macro;
struct Function {
  enum class Kind : uint8_t { kMacro, kMethod, kGlobal };
  Kind kind;
  std::string name;
  const Macro* macro = nullptr;
  Value self = {};  // of a method
};

Value MakeList(std::vector<Value> items, bool tuple = false);
Value MakeDict();

// Python's ==.
bool Equal(const Value& a, const Value& b, Meter& meter);
// Python's <; fails where the two cannot be compared.
bool Less(const Value& a, const Value& b, Meter& meter);
// What a loop sees of it; fails where it is none.
std::vector<Value> Items(const Value& value, Meter& meter);
// str() and repr().
Text ToText(const Value& value, Meter& meter);
Text ToRepr(const Value& value, Meter& meter);
std::string FloatText(double value);

// The value that a JSON text says, with the keys in their order; nothing in it is the template's own. Throws
// phsa::Error naming `place`.
Value FromJson(std::string_view json, const std::string& place);
struct JsonStyle {
  bool ascii = false, sort_keys = false;
  int32_t indent = -1;  // -1: one line
  std::string item = ", ", key = ": ";
  std::string indent_text = {};  // instead of spaces
};
Text ToJson(const Value& value, const JsonStyle& style, Meter& meter);

// Characters of UTF-8; a byte that belongs to none counts as one.
size_t Characters(std::string_view text);
bool IsSpace(char32_t code);  // as Python's str.isspace()

}  // namespace phsa::jinja

#endif  // PHSA_JINJA_VALUE_H_
