// What Python's operators do with values.
#include <algorithm>
#include <cmath>

#include "base/errors.h"
#include "base/utf8.h"
#include "jinja/builtins.h"
#include "jinja/formatting.h"

namespace phsa::jinja {
namespace {

constexpr size_t kValueBytes = 64;

[[noreturn]] void FailOperands(std::string_view op, const Value& a, const Value& b) {
  if (a.IsUndefined()) a.FailUndefined();
  if (b.IsUndefined()) b.FailUndefined();
  Fail("unsupported operand types for {}: '{}' and '{}'", op, a.TypeName(), b.TypeName());
}

[[noreturn]] void FailOverflow() { Fail("a number is too large"); }

int64_t FloorDivide(int64_t a, int64_t b) {
  if (b == 0) Fail("division by zero");
  if (b == -1) {
    int64_t result = 0;
    if (__builtin_sub_overflow(int64_t{0}, a, &result)) FailOverflow();
    return result;
  }
  const int64_t quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

int64_t PowerOf(int64_t base, int64_t exponent) {
  int64_t result = 1;
  while (exponent > 0) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) FailOverflow();
    exponent >>= 1;
    if (exponent > 0 && __builtin_mul_overflow(base, base, &base)) FailOverflow();
  }
  return result;
}

Value Integers(std::string_view op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflow = false;
  if (op == "+") {
    overflow = __builtin_add_overflow(a, b, &result);
  } else if (op == "-") {
    overflow = __builtin_sub_overflow(a, b, &result);
  } else if (op == "*") {
    overflow = __builtin_mul_overflow(a, b, &result);
  } else if (op == "//") {
    result = FloorDivide(a, b);
  } else if (op == "%") {
    result = b == -1 ? 0 : a - FloorDivide(a, b) * b;
  } else if (op == "/") {
    if (b == 0) Fail("division by zero");
    return Value::Float(static_cast<double>(a) / static_cast<double>(b));
  } else {
    if (b < 0) return Value::Float(std::pow(static_cast<double>(a), static_cast<double>(b)));
    result = PowerOf(a, b);
  }
  if (overflow) FailOverflow();
  return Value::Int(result);
}

Value Floats(std::string_view op, double a, double b) {
  if (op == "+") return Value::Float(a + b);
  if (op == "-") return Value::Float(a - b);
  if (op == "*") return Value::Float(a * b);
  if (op == "**") return Value::Float(std::pow(a, b));
  if (b == 0) Fail("division by zero");
  if (op == "/") return Value::Float(a / b);
  if (op == "//") return Value::Float(std::floor(a / b));
  const double rest = std::fmod(a, b);
  return Value::Float(rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest);
}

Value Repeated(const Value& value, int64_t count, Meter& meter) {
  const size_t size = value.IsString() ? value.text().size() : value.list().items.size() * kValueBytes;
  if (count <= 0 || size == 0) return value.IsString() ? Value::String(Text()) : MakeList({}, value.list().tuple);
  if (static_cast<uint64_t>(count) > static_cast<uint64_t>(INT64_MAX) / size) Fail("it takes too much memory");
  meter.Charge(size * static_cast<size_t>(count));
  if (value.IsString()) {
    Text text;
    for (int64_t i = 0; i < count; ++i) text.Append(value.text());
    return Value::String(std::move(text));
  }
  std::vector<Value> items;
  for (int64_t i = 0; i < count; ++i) {
    items.insert(items.end(), value.list().items.begin(), value.list().items.end());
  }
  return MakeList(std::move(items), value.list().tuple);
}

// Where the characters of a text begin, and its end.
std::vector<size_t> CharacterOffsets(const std::string& text, Meter& meter) {
  meter.Charge(text.size() * sizeof(size_t));
  std::vector<size_t> offsets;
  for (size_t at = 0; at < text.size(); at += ScanUtf8(text, at).size) offsets.push_back(at);
  offsets.push_back(text.size());
  return offsets;
}

}  // namespace

Value Binary(std::string_view op, const Value& a, const Value& b, Meter& meter) {
  if (op == "%" && a.IsString()) {
    const std::vector<Value> one = {b};
    return Value::String(PercentFormat(a.text(), b.IsList() && b.list().tuple ? b.list().items : one, meter));
  }
  if (a.IsNumber() && b.IsNumber()) {
    return a.IsFloat() || b.IsFloat() ? Floats(op, a.AsDouble(), b.AsDouble()) : Integers(op, a.AsInt(), b.AsInt());
  }
  if (op == "+" && a.IsString() && b.IsString()) {
    meter.Charge(a.text().size() + b.text().size());
    Text text = a.text();
    text.Append(b.text());
    return Value::String(std::move(text));
  }
  if (op == "+" && a.IsList() && b.IsList() && a.list().tuple == b.list().tuple) {
    std::vector<Value> items = Items(a, meter);
    for (Value& item : Items(b, meter)) items.push_back(std::move(item));
    return MakeList(std::move(items), a.list().tuple);
  }
  if (op == "*" && (a.IsString() || a.IsList()) && b.IsNumber() && !b.IsFloat()) return Repeated(a, b.AsInt(), meter);
  if (op == "*" && (b.IsString() || b.IsList()) && a.IsNumber() && !a.IsFloat()) return Repeated(b, a.AsInt(), meter);
  FailOperands(op, a, b);
}

bool Compare(std::string_view op, const Value& a, const Value& b, Meter& meter) {
  if (op == "==") return Equal(a, b, meter);
  if (op == "!=") return !Equal(a, b, meter);
  if (op == "in") return Contains(b, a, meter);
  if (op == "not in") return !Contains(b, a, meter);
  if (op == "<") return Less(a, b, meter);
  if (op == ">") return Less(b, a, meter);
  if (op == "<=") return Less(a, b, meter) || Equal(a, b, meter);
  return Less(b, a, meter) || Equal(a, b, meter);
}

bool Contains(const Value& container, const Value& item, Meter& meter) {
  if (container.IsString()) {
    if (item.IsUndefined()) item.FailUndefined();
    if (!item.IsString()) Fail("'in <string>' requires string as left operand, not {}", item.TypeName());
    meter.Charge(container.text().size());
    return container.bytes().find(item.bytes()) != std::string::npos;
  }
  if (container.IsList()) {
    const std::vector<Value>& items = container.list().items;
    return std::any_of(items.begin(), items.end(), [&](const Value& one) { return Equal(one, item, meter); });
  }
  if (container.IsDict()) return !item.IsUndefined() && container.dict().Find(item) != nullptr;
  if (container.IsUndefined()) return false;
  Fail("argument of type '{}' is not iterable", container.TypeName());
}

Value Attribute(const Value& value, std::string_view name) {
  if (value.IsUndefined()) value.FailUndefined();
  if (value.IsNamespace()) {
    const auto& attributes = value.name_space().attributes;
    const auto found = attributes.find(name);
    return found == attributes.end() ? Value::Missing(fmt::format("the namespace's {}", Quoted(name))) : found->second;
  }
  if (value.IsLoop()) {
    const Loop& loop = value.loop();
    const auto index = static_cast<int64_t>(loop.index), count = static_cast<int64_t>(loop.items.size());
    if (name == "index") return Value::Int(index + 1);
    if (name == "index0") return Value::Int(index);
    if (name == "revindex") return Value::Int(count - index);
    if (name == "revindex0") return Value::Int(count - index - 1);
    if (name == "first") return Value::Bool(index == 0);
    if (name == "last") return Value::Bool(index + 1 == count);
    if (name == "length") return Value::Int(count);
    if (name == "depth") return Value::Int(loop.level);
    if (name == "depth0") return Value::Int(loop.level - 1);
    if (name == "previtem" && index > 0) return loop.items[loop.index - 1];
    if (name == "nextitem" && index + 1 < count) return loop.items[loop.index + 1];
  }
  if (HasMethod(value, name)) {
    return Value(
        std::make_shared<const Function>(Function{Function::Kind::kMethod, std::string(name), nullptr, value}));
  }
  if (value.IsDict()) {
    if (const Value* const found = value.dict().Find(name)) return *found;
  }
  return Value::Missing(fmt::format("{} object's {}", value.TypeName(), Quoted(name)));
}

Value Item(const Value& value, const Value& key, Meter& meter) {
  if (value.IsUndefined()) value.FailUndefined();
  if (value.IsDict() && !key.IsUndefined() && !key.IsList() && !key.IsDict()) {
    if (const Value* const found = value.dict().Find(key)) return *found;
  }
  if ((value.IsList() || value.IsString()) && key.IsNumber() && !key.IsFloat()) {
    int64_t index = key.AsInt();
    if (value.IsList()) {
      const std::vector<Value>& items = value.list().items;
      const auto size = static_cast<int64_t>(items.size());
      if (index < 0) index += size;
      if (index >= 0 && index < size) return items[static_cast<size_t>(index)];
    } else {
      const std::vector<size_t> offsets = CharacterOffsets(value.bytes(), meter);
      const auto size = static_cast<int64_t>(offsets.size()) - 1;
      if (index < 0) index += size;
      if (index >= 0 && index < size) {
        const auto at = static_cast<size_t>(index);
        return Value::String(value.text().Part(offsets[at], offsets[at + 1]));
      }
    }
    return Value::Missing(fmt::format("{} object's element {}", value.TypeName(), key.AsInt()));
  }
  if (key.IsString()) return Attribute(value, key.bytes());
  return Value::Missing(fmt::format("{} object's element", value.TypeName()));
}

Value Slice(const Value& value, const Value* begin, const Value* end, const Value* step_value, Meter& meter) {
  if (value.IsUndefined()) value.FailUndefined();
  if (!value.IsString() && !value.IsList()) Fail("'{}' object cannot be sliced", value.TypeName());
  const auto number = [](const Value* given, int64_t otherwise) {
    return given == nullptr || given->IsNone() ? otherwise : given->AsInt();
  };
  const int64_t step = number(step_value, 1);
  if (step == 0) Fail("slice step cannot be zero");
  std::vector<size_t> offsets;
  if (value.IsString()) offsets = CharacterOffsets(value.bytes(), meter);
  const auto size =
      value.IsString() ? static_cast<int64_t>(offsets.size()) - 1 : static_cast<int64_t>(value.list().items.size());
  // As Python's slice.indices().
  const int64_t low = step < 0 ? -1 : 0, high = step < 0 ? size - 1 : size;
  const auto bounded = [&](const Value* given, int64_t otherwise) {
    int64_t at = number(given, otherwise);
    if (given == nullptr || given->IsNone()) return at;
    if (at < 0) at = at < -size ? low : std::max(at + size, low);
    return std::min(at, high);
  };
  const int64_t from = bounded(begin, step < 0 ? high : low), to = bounded(end, step < 0 ? low : high);
  if (value.IsString()) {
    if (step == 1) {
      if (from >= to) return Value::String(Text());
      const size_t first = offsets[static_cast<size_t>(from)], last = offsets[static_cast<size_t>(to)];
      meter.Charge(last - first);
      return Value::String(value.text().Part(first, last));
    }
    Text text;
    for (int64_t at = from; step > 0 ? at < to : at > to;) {
      text.Append(value.text(), offsets[static_cast<size_t>(at)], offsets[static_cast<size_t>(at) + 1]);
      if (__builtin_add_overflow(at, step, &at)) break;
    }
    meter.Charge(text.size());
    return Value::String(std::move(text));
  }
  std::vector<Value> items;
  for (int64_t at = from; step > 0 ? at < to : at > to;) {
    items.push_back(value.list().items[static_cast<size_t>(at)]);
    if (__builtin_add_overflow(at, step, &at)) break;
  }
  meter.Charge(items.size() * kValueBytes);
  return MakeList(std::move(items), value.list().tuple);
}

}  // namespace phsa::jinja
