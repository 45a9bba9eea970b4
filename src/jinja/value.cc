#include "jinja/value.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/errors.h"
#include "base/utf8.h"

namespace phsa::jinja {
namespace {

constexpr size_t kValueBytes = 64;  // about what a value in a list takes

void CheckDepth(int32_t depth) {
  if (depth > kMaxValueDepth) Fail("its values are nested deeper than {}", kMaxValueDepth);
}

// What becomes part of another value stays as it is.
void Freeze(const Value& value) {
  if (value.IsList()) value.list().frozen = true;
  if (value.IsFunction() && value.function().self.IsList()) value.function().self.list().frozen = true;
}

// nlohmann's parser calls this; its own values would lose the order of keys, or search them one by one.
class JsonReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return Put(Value::NoneValue()); }
  bool boolean(bool value) override { return Put(Value::Bool(value)); }
  bool number_integer(number_integer_t value) override { return Put(Value::Int(value)); }
  bool number_unsigned(number_unsigned_t value) override {
    return Put(value <= INT64_MAX ? Value::Int(static_cast<int64_t>(value)) : Value::Float(static_cast<double>(value)));
  }
  bool number_float(number_float_t value, const string_t&) override { return Put(Value::Float(value)); }
  bool string(string_t& value) override { return Put(Value::String(value, false)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return Open(MakeDict()); }
  bool key(string_t& value) override {
    keys_.back() = Value::String(value, false);
    return true;
  }
  bool end_object() override { return Close(); }
  bool start_array(std::size_t) override { return Open(MakeList({})); }
  bool end_array() override { return Close(); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    error_ = fmt::format("is not JSON: byte {}", position);
    return false;
  }

  Value root;
  const std::string& error() const { return error_; }

 private:
  bool Put(Value value) {
    if (open_.empty()) {
      root = std::move(value);
    } else if (open_.back().IsList()) {
      open_.back().list().Add(std::move(value));
    } else {
      open_.back().dict().Set(keys_.back(), std::move(value));
    }
    return true;
  }
  bool Open(Value value) {
    if (open_.size() >= static_cast<size_t>(kMaxValueDepth) - 1) {
      error_ = fmt::format("is nested deeper than {}", kMaxValueDepth - 1);
      return false;
    }
    open_.push_back(std::move(value));
    keys_.emplace_back();
    return true;
  }
  // Put where it belongs only when it is complete, so that depths are known.
  bool Close() {
    Value value = std::move(open_.back());
    open_.pop_back();
    keys_.pop_back();
    return Put(std::move(value));
  }

  std::vector<Value> open_, keys_;
  std::string error_ = "is not JSON";
};

std::string NumberText(const Value& value) {
  if (value.IsBool()) return value.bool_value() ? "True" : "False";
  return value.IsInt() ? fmt::format("{}", value.int_value()) : FloatText(value.float_value());
}

// A text with its characters replaced by what `write` gives for each; a run stays what it was.
template <class Fn>
Text Rewritten(const Text& text, const Fn& write) {
  Text out;
  size_t at = 0;
  for (const Text::Run& run : text.runs()) {
    std::string bytes;
    while (at < run.end) {
      const Utf8Step step = ScanUtf8(text.bytes(), at);
      const std::string_view raw = std::string_view(text.bytes()).substr(at, step.size);
      write(step.kind == Utf8Step::Kind::kCharacter ? step.code : U'\xfffd', raw, &bytes);
      at += step.size;
    }
    out.Append(bytes, run.own);
  }
  return out;
}

Text Representation(const Text& text) {
  const bool single = text.bytes().find('\'') != std::string::npos && text.bytes().find('"') == std::string::npos;
  const char quote = single ? '"' : '\'';
  Text out(std::string(1, quote), true);
  out.Append(Rewritten(text, [&](char32_t code, std::string_view raw, std::string* bytes) {
    if (code == static_cast<unsigned char>(quote) || code == '\\') {
      *bytes += '\\';
      *bytes += raw;
    } else if (code == '\n' || code == '\r' || code == '\t') {
      *bytes += code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t";
    } else if (code < 0x20 || code == 0x7f) {
      *bytes += fmt::format("\\x{:02x}", static_cast<uint32_t>(code));
    } else {
      *bytes += raw;
    }
  }));
  out.Append(std::string(1, quote), true);
  return out;
}

Text JsonString(const Text& text, bool ascii) {
  Text out("\"", true);
  out.Append(Rewritten(text, [&](char32_t code, std::string_view raw, std::string* bytes) {
    switch (code) {
      case '"': *bytes += "\\\""; return;
      case '\\': *bytes += "\\\\"; return;
      case '\n': *bytes += "\\n"; return;
      case '\r': *bytes += "\\r"; return;
      case '\t': *bytes += "\\t"; return;
      case '\f': *bytes += "\\f"; return;
      case '\b': *bytes += "\\b"; return;
      default: break;
    }
    if (code < 0x20 || (ascii && code >= 0x7f && code < 0x10000)) {
      *bytes += fmt::format("\\u{:04x}", static_cast<uint32_t>(code));
    } else if (ascii && code >= 0x10000) {
      const auto rest = static_cast<uint32_t>(code) - 0x10000;
      *bytes += fmt::format("\\u{:04x}\\u{:04x}", 0xd800 + (rest >> 10), 0xdc00 + (rest & 0x3ff));
    } else {
      *bytes += raw;
    }
  }));
  out.Append("\"", true);
  return out;
}

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, Meter& meter) : style_(style), meter_(meter) {}
  void Write(const Value& value, int32_t level) {
    meter_.Step();
    if (value.IsNone()) {
      Own("null");
    } else if (value.IsBool()) {
      Own(value.bool_value() ? "true" : "false");
    } else if (value.IsInt()) {
      Own(fmt::format("{}", value.int_value()));
    } else if (value.IsFloat()) {
      Own(JsonFloat(value.float_value()));
    } else if (value.IsString()) {
      meter_.Charge(value.text().size());
      out.Append(JsonString(value.text(), style_.ascii));
    } else if (value.IsList()) {
      const std::vector<Value>& items = value.list().items;
      Own("[");
      for (size_t i = 0; i < items.size(); ++i) {
        Separate(i, level + 1);
        Write(items[i], level + 1);
      }
      Close(items.size(), level, "]");
    } else if (value.IsDict()) {
      auto items = value.dict().items();
      if (style_.sort_keys) {
        std::stable_sort(items.begin(), items.end(),
                         [&](const auto& a, const auto& b) { return Less(a.first, b.first, meter_); });
      }
      Own("{");
      for (size_t i = 0; i < items.size(); ++i) {
        Separate(i, level + 1);
        WriteKey(items[i].first);
        Own(style_.key);
        Write(items[i].second, level + 1);
      }
      Close(items.size(), level, "}");
    } else {
      Fail("Object of type {} is not JSON serializable", value.TypeName());
    }
  }
  Text out;

 private:
  void Own(std::string_view text) {
    meter_.Charge(text.size());
    out.Append(text, true);
  }
  static std::string JsonFloat(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
    return FloatText(value);
  }
  void WriteKey(const Value& key) {
    if (key.IsString()) {
      meter_.Charge(key.text().size());
      out.Append(JsonString(key.text(), style_.ascii));
    } else {
      Own(key.IsNone()   ? "\"null\""
          : key.IsBool() ? (key.bool_value() ? "\"true\"" : "\"false\"")
                         : "\"" + NumberText(key) + "\"");
    }
  }
  void Line(int32_t level) {
    if (style_.indent < 0 && style_.indent_text.empty()) return;
    Own("\n");
    for (int32_t i = 0; i < level; ++i) {
      Own(style_.indent_text.empty() ? std::string(static_cast<size_t>(style_.indent), ' ') : style_.indent_text);
    }
  }
  void Separate(size_t i, int32_t level) {
    if (i > 0) Own(style_.item);
    Line(level);
  }
  void Close(size_t count, int32_t level, std::string_view bracket) {
    if (count > 0) Line(level);
    Own(bracket);
  }

  const JsonStyle& style_;
  Meter& meter_;
};

}  // namespace

int64_t Value::AsInt() const {
  if (IsBool()) return bool_value() ? 1 : 0;
  if (IsInt()) return int_value();
  if (IsUndefined()) FailUndefined();
  Fail("'{}' object cannot be interpreted as an integer", TypeName());
}

double Value::AsDouble() const { return IsFloat() ? float_value() : static_cast<double>(AsInt()); }

bool Value::Truth() const {
  if (IsUndefined() || IsNone()) return false;
  if (IsBool()) return bool_value();
  if (IsInt()) return int_value() != 0;
  if (IsFloat()) return float_value() != 0;
  if (IsString()) return !text().empty();
  if (IsList()) return !list().items.empty();
  if (IsDict()) return !dict().items().empty();
  return true;
}

const char* Value::TypeName() const {
  if (IsUndefined()) return "Undefined";
  if (IsNone()) return "NoneType";
  if (IsBool()) return "bool";
  if (IsInt()) return "int";
  if (IsFloat()) return "float";
  if (IsString()) return "str";
  if (IsList()) return list().tuple ? "tuple" : "list";
  if (IsDict()) return "dict";
  if (IsNamespace()) return "Namespace";
  if (IsLoop()) return "LoopContext";
  return function().kind == Function::Kind::kMacro ? "Macro" : "builtin_function_or_method";
}

int32_t Value::depth() const {
  if (IsList()) return list().depth;
  if (IsDict()) return dict().depth();
  if (IsLoop()) return loop().depth;
  if (IsFunction()) return function().self.depth() + 1;
  return 0;
}

void Value::FailUndefined() const {
  const auto& what = std::get<Undefined>(data_).what;
  Fail("{} is undefined", what ? *what : "a value");
}

void List::Add(Value value) {
  Freeze(value);
  depth = std::max(depth, value.depth() + 1);
  CheckDepth(depth);
  items.push_back(std::move(value));
}

std::string Dict::KeyOf(const Value& key) {
  if (key.IsString()) return "s" + key.bytes();
  if (key.IsNone()) return "n";
  if (key.IsFloat() && std::trunc(key.float_value()) != key.float_value()) return "f" + FloatText(key.float_value());
  if (key.IsFloat()) return "i" + fmt::format("{:.0f}", key.float_value());
  if (key.IsNumber()) return fmt::format("i{}", key.AsInt());
  if (key.IsUndefined()) key.FailUndefined();
  Fail("unhashable type: '{}'", key.TypeName());
}

void Dict::Set(const Value& key, Value value) {
  Freeze(value);
  depth_ = std::max(depth_, value.depth() + 1);
  CheckDepth(depth_);
  const auto [place, is_new] = index_.try_emplace(KeyOf(key), items_.size());
  if (is_new) {
    items_.emplace_back(key, std::move(value));
  } else {
    items_[place->second].second = std::move(value);
  }
}

const Value* Dict::Find(const Value& key) const {
  const auto found = index_.find(KeyOf(key));
  return found == index_.end() ? nullptr : &items_[found->second].second;
}

const Value* Dict::Find(std::string_view key) const {
  const auto found = index_.find("s" + std::string(key));
  return found == index_.end() ? nullptr : &items_[found->second].second;
}

Value MakeList(std::vector<Value> items, bool tuple) {
  auto list = std::make_shared<List>();
  list->tuple = tuple;
  for (const Value& item : items) {
    Freeze(item);
    list->depth = std::max(list->depth, item.depth() + 1);
  }
  CheckDepth(list->depth);
  list->items = std::move(items);
  return Value(std::move(list));
}

Value MakeDict() { return Value(std::make_shared<Dict>()); }

bool Equal(const Value& a, const Value& b, Meter& meter) {
  meter.Step();
  if (a.IsNumber() && b.IsNumber()) {
    return a.IsFloat() || b.IsFloat() ? a.AsDouble() == b.AsDouble() : a.AsInt() == b.AsInt();
  }
  if (a.IsString() && b.IsString()) {
    meter.Charge(std::min(a.text().size(), b.text().size()) / 16);
    return a.bytes() == b.bytes();
  }
  if (a.IsList() && b.IsList()) {
    const List &x = a.list(), &y = b.list();
    if (x.tuple != y.tuple || x.items.size() != y.items.size()) return false;
    for (size_t i = 0; i < x.items.size(); ++i) {
      if (!Equal(x.items[i], y.items[i], meter)) return false;
    }
    return true;
  }
  if (a.IsDict() && b.IsDict()) {
    if (a.dict().items().size() != b.dict().items().size()) return false;
    for (const auto& [key, value] : a.dict().items()) {
      const Value* const other = b.dict().Find(key);
      if (other == nullptr || !Equal(value, *other, meter)) return false;
    }
    return true;
  }
  if (a.IsUndefined() || a.IsNone()) return a.data().index() == b.data().index();
  if (a.IsNamespace() && b.IsNamespace()) return &a.name_space() == &b.name_space();
  return false;
}

bool Less(const Value& a, const Value& b, Meter& meter) {
  meter.Step();
  if (a.IsUndefined()) a.FailUndefined();
  if (b.IsUndefined()) b.FailUndefined();
  if (a.IsNumber() && b.IsNumber()) {
    return a.IsFloat() || b.IsFloat() ? a.AsDouble() < b.AsDouble() : a.AsInt() < b.AsInt();
  }
  if (a.IsString() && b.IsString()) {
    meter.Charge(std::min(a.text().size(), b.text().size()) / 16);
    return a.bytes() < b.bytes();
  }
  if (a.IsList() && b.IsList() && a.list().tuple == b.list().tuple) {
    const std::vector<Value>&x = a.list().items, &y = b.list().items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!Equal(x[i], y[i], meter)) return Less(x[i], y[i], meter);
    }
    return x.size() < y.size();
  }
  Fail("'<' not supported between instances of '{}' and '{}'", a.TypeName(), b.TypeName());
}

std::vector<Value> Items(const Value& value, Meter& meter) {
  std::vector<Value> items;
  if (value.IsList()) {
    meter.Charge(value.list().items.size() * kValueBytes);
    items = value.list().items;
  } else if (value.IsDict()) {
    meter.Charge(value.dict().items().size() * kValueBytes);
    for (const auto& [key, unused] : value.dict().items()) items.push_back(key);
  } else if (value.IsString()) {
    const Text& text = value.text();
    meter.Charge(text.size() * (kValueBytes + sizeof(Text)));
    for (size_t at = 0; at < text.size();) {
      const size_t end = at + ScanUtf8(text.bytes(), at).size;
      items.push_back(Value::String(text.Part(at, end)));
      at = end;
    }
  } else if (!value.IsUndefined()) {
    Fail("'{}' object is not iterable", value.TypeName());
  }
  return items;
}

Text ToText(const Value& value, Meter& meter) {
  if (value.IsString()) {
    meter.Charge(value.text().size());
    return value.text();
  }
  if (value.IsUndefined()) return {};
  return ToRepr(value, meter);
}

Text ToRepr(const Value& value, Meter& meter) {
  meter.Step();
  Text out;
  if (value.IsString()) {
    out = Representation(value.text());
  } else if (value.IsNone()) {
    out.Append("None", true);
  } else if (value.IsNumber()) {
    out.Append(NumberText(value), true);
  } else if (value.IsList()) {
    const List& list = value.list();
    out.Append(list.tuple ? "(" : "[", true);
    for (size_t i = 0; i < list.items.size(); ++i) {
      if (i > 0) out.Append(", ", true);
      out.Append(ToRepr(list.items[i], meter));
    }
    if (list.tuple && list.items.size() == 1) out.Append(",", true);
    out.Append(list.tuple ? ")" : "]", true);
  } else if (value.IsDict()) {
    out.Append("{", true);
    for (const auto& [key, item] : value.dict().items()) {
      if (out.size() > 1) out.Append(", ", true);
      out.Append(ToRepr(key, meter));
      out.Append(": ", true);
      out.Append(ToRepr(item, meter));
    }
    out.Append("}", true);
  } else {
    out.Append(fmt::format("<{}>", value.TypeName()), true);
  }
  meter.Charge(out.size());
  return out;
}

std::string FloatText(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::array<char, 32> buffer{};
  const char* const end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::scientific).ptr;
  // d.ddde±xx, to be written as Python does.
  const std::string text(buffer.data(), static_cast<size_t>(end - buffer.data()));
  const size_t e = text.find('e');
  const bool negative = text.front() == '-';
  const int exponent = std::stoi(text.substr(e + 1));
  std::string digits;
  for (const char c : text.substr(0, e)) {
    if (c >= '0' && c <= '9') digits += c;
  }
  std::string out = negative ? "-" : "";
  if (exponent < -4 || exponent >= 16) {
    out += digits.substr(0, 1);
    if (digits.size() > 1) out += "." + digits.substr(1);
    return out + fmt::format("e{}{:02}", exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent) - 1, '0') + digits;
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return out + digits + std::string(whole - digits.size(), '0') + ".0";
  return out + digits.substr(0, whole) + "." + digits.substr(whole);
}

Value FromJson(std::string_view json, const std::string& place) {
  JsonReader reader;
  bool read = false;
  try {
    read = nlohmann::json::sax_parse(json, &reader);
  } catch (const Fault& fault) {
    ThrowInvalid("{}: {}", place, fault.what);
  }
  if (!read) ThrowInvalid("{} {}", place, reader.error());
  return std::move(reader.root);
}

Text ToJson(const Value& value, const JsonStyle& style, Meter& meter) {
  JsonWriter writer(style, meter);
  writer.Write(value, 0);
  return std::move(writer.out);
}

size_t Characters(std::string_view text) {
  size_t count = 0;
  for (size_t at = 0; at < text.size(); at += ScanUtf8(text, at).size) ++count;
  return count;
}

bool IsSpace(char32_t c) {
  return (c >= 0x9 && c <= 0xd) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

}  // namespace phsa::jinja
