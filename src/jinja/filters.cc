#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <map>

#include "base/errors.h"
#include "jinja/builtins.h"
#include "jinja/formatting.h"
#include "jinja/strings.h"

namespace phsa::jinja {
namespace {

Text Stringified(const Value& value, Meter& meter) { return ToText(value, meter); }

// Nothing but white space around a number.
std::string Bare(const Value& value) { return Strip(value.text(), nullptr, Side::kBoth).bytes(); }

Value ToInt(const Value& value, const Arguments& arguments) {
  const Value* const otherwise = arguments.Find(0, "default");
  const int64_t base = arguments.Int(1, "base", 10);
  const auto in_range = [](double number) { return number > -9.2e18 && number < 9.2e18; };
  if (value.IsFloat() && in_range(value.float_value())) {
    return Value::Int(static_cast<int64_t>(value.float_value()));
  }
  if (value.IsBool() || value.IsInt()) return Value::Int(value.AsInt());
  if (value.IsString()) {
    const std::string text = Bare(value);
    const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
    const char* const end = text.data() + text.size();
    int64_t number = 0;
    const auto [rest, error] = std::from_chars(begin, end, number, static_cast<int>(std::clamp<int64_t>(base, 2, 36)));
    if (error == std::errc() && rest == end) return Value::Int(number);
    double real = 0;
    const auto [real_rest, real_error] = std::from_chars(begin, end, real);
    if (real_error == std::errc() && real_rest == end && in_range(real)) return Value::Int(static_cast<int64_t>(real));
  }
  return otherwise != nullptr ? *otherwise : Value::Int(0);
}

Value ToFloat(const Value& value, const Arguments& arguments) {
  if (value.IsNumber()) return Value::Float(value.AsDouble());
  if (value.IsString()) {
    const std::string text = Bare(value);
    const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
    double real = 0;
    const auto [rest, error] = std::from_chars(begin, text.data() + text.size(), real);
    if (error == std::errc() && rest == text.data() + text.size()) return Value::Float(real);
  }
  const Value* const otherwise = arguments.Find(0, "default");
  return otherwise != nullptr ? *otherwise : Value::Float(0);
}

Value Length(const Value& value) {
  if (value.IsString()) return Value::Int(static_cast<int64_t>(Characters(value.bytes())));
  if (value.IsList()) return Value::Int(static_cast<int64_t>(value.list().items.size()));
  if (value.IsDict()) return Value::Int(static_cast<int64_t>(value.dict().items().size()));
  if (value.IsUndefined()) return Value::Int(0);
  Fail("object of type '{}' has no len()", value.TypeName());
}

// "a.b.0" of an item; Jinja's attribute argument.
Value Deep(const Value& item, const Value& path, Meter& meter) {
  if (!path.IsString()) return Item(item, path, meter);
  static const std::string kDot = ".";
  Value value = item;
  for (const Value& part : Split(path.text(), &kDot, -1, false, meter)) {
    const std::string& name = part.bytes();
    const bool number = !name.empty() && name.size() < 10 && name.find_first_not_of("0123456789") == std::string::npos;
    value = Item(value, number ? Value::Int(std::stoi(name)) : part, meter);
  }
  return value;
}

Arguments Rest(const Arguments& arguments, size_t from) {
  Arguments rest;
  rest.list.assign(arguments.list.begin() + static_cast<std::ptrdiff_t>(std::min(from, arguments.list.size())),
                   arguments.list.end());
  rest.named = arguments.named;
  return rest;
}

Value Map(const Value& value, const Arguments& arguments, Meter& meter) {
  if (!value.Truth()) return MakeList({});  // None too, as in Jinja
  std::vector<Value> items = Items(value, meter);
  if (const Value* const attribute = arguments.Find(SIZE_MAX, "attribute")) {
    const Value* const otherwise = arguments.Find(SIZE_MAX, "default");
    for (Value& item : items) {
      item = Deep(item, *attribute, meter);
      if (item.IsUndefined() && otherwise != nullptr) item = *otherwise;
    }
  } else {
    const Text* const name = arguments.String(0, "filter");
    if (name == nullptr) Fail("map requires a filter argument");
    const Arguments rest = Rest(arguments, 1);
    for (Value& item : items) item = ApplyFilter(name->bytes(), item, rest, meter);
  }
  return MakeList(std::move(items));
}

// select, reject and the two that look at an attribute.
Value Select(const Value& value, const Arguments& arguments, bool by_attribute, bool keep, Meter& meter) {
  const size_t at = by_attribute ? 1 : 0;
  if (!value.Truth()) return MakeList({});
  const Value* const attribute = by_attribute ? &arguments.Require(0, "attribute") : nullptr;
  const Text* const test = arguments.String(at, "test");
  const Arguments rest = Rest(arguments, at + 1);
  std::vector<Value> chosen;
  for (Value& item : Items(value, meter)) {
    const Value judged = attribute != nullptr ? Deep(item, *attribute, meter) : item;
    const bool passes = test != nullptr ? ApplyTest(test->bytes(), judged, rest, meter) : judged.Truth();
    if (passes == keep) chosen.push_back(std::move(item));
  }
  return MakeList(std::move(chosen));
}

// What sorting compares: texts without their case unless it is asked for.
Value SortKey(const Value& item, const Value* attribute, bool case_sensitive, Meter& meter) {
  Value key = attribute != nullptr && !attribute->IsNone() ? Deep(item, *attribute, meter) : item;
  if (!case_sensitive && key.IsString()) key = Value::String(WithCase(key.text(), Case::kLower));
  return key;
}

std::vector<Value> Sorted(std::vector<Value> items, const Value* attribute, bool case_sensitive, bool reverse,
                          Meter& meter) {
  std::vector<std::pair<Value, Value>> keyed;
  keyed.reserve(items.size());
  for (Value& item : items) {
    Value key = SortKey(item, attribute, case_sensitive, meter);
    keyed.emplace_back(std::move(key), std::move(item));
  }
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return reverse ? Less(b.first, a.first, meter) : Less(a.first, b.first, meter);
  });
  items.clear();
  for (auto& [key, item] : keyed) items.push_back(std::move(item));
  return items;
}

Value Extreme(const Value& value, const Arguments& arguments, bool largest, Meter& meter) {
  const bool case_sensitive = arguments.Bool(0, "case_sensitive", false);
  const Value* const attribute = arguments.Find(1, "attribute");
  Value best = Value::Missing("the first item of an empty sequence"), best_key;
  bool any = false;
  for (Value& item : Items(value, meter)) {
    Value key = SortKey(item, attribute, case_sensitive, meter);
    if (any && !(largest ? Less(best_key, key, meter) : Less(key, best_key, meter))) continue;
    best = std::move(item);
    best_key = std::move(key);
    any = true;
  }
  return best;
}

Value Unique(const Value& value, const Arguments& arguments, Meter& meter) {
  const bool case_sensitive = arguments.Bool(0, "case_sensitive", false);
  const Value* const attribute = arguments.Find(1, "attribute");
  Dict seen;
  std::vector<Value> items;
  for (Value& item : Items(value, meter)) {
    const Value key = SortKey(item, attribute, case_sensitive, meter);
    if (seen.Find(key) != nullptr) continue;
    seen.Set(key, Value::NoneValue());
    items.push_back(std::move(item));
  }
  return MakeList(std::move(items));
}

Value DictSort(const Value& value, const Arguments& arguments, Meter& meter) {
  if (!value.IsDict()) Fail("dictsort needs a dict, not '{}'", value.TypeName());
  const bool case_sensitive = arguments.Bool(0, "case_sensitive", false), reverse = arguments.Bool(2, "reverse", false);
  const Text* const by = arguments.String(1, "by");
  const Value place = Value::Int(by != nullptr && by->bytes() == "value" ? 1 : 0);
  std::vector<Value> items;
  for (const auto& [key, item] : value.dict().items()) {
    meter.Charge(160);
    items.push_back(MakeList({key, item}, true));
  }
  return MakeList(Sorted(std::move(items), &place, case_sensitive, reverse, meter));
}

Value Join(const Value& value, const Arguments& arguments, Meter& meter) {
  const Value* const between = arguments.Find(0, "d");
  const Text separator = between != nullptr ? Stringified(*between, meter) : Text();
  const Value* const attribute = arguments.Find(1, "attribute");
  Text out;
  bool first = true;
  for (const Value& item : Items(value, meter)) {
    if (!first) out.Append(separator);
    first = false;
    meter.Charge(separator.size());
    out.Append(Stringified(attribute != nullptr ? Deep(item, *attribute, meter) : item, meter));
  }
  return Value::String(std::move(out));
}

Value Indent(const Text& text, const Arguments& arguments, Meter& meter) {
  const Value* const width = arguments.Find(0, "width");
  Text indention;
  if (width != nullptr && width->IsString()) {
    indention = width->text();
  } else {
    const int64_t spaces = width != nullptr ? width->AsInt() : 4;
    if (spaces > 1000) Fail("an indentation of {} is too wide", spaces);
    indention.Append(std::string(static_cast<size_t>(std::max<int64_t>(spaces, 0)), ' '), true);
  }
  const bool first = arguments.Bool(1, "first", false), blank = arguments.Bool(2, "blank", false);
  // As Jinja does: a line end is added, so that the last line counts, and lines end as splitlines() says.
  Text whole = text;
  whole.Append("\n", true);
  const std::vector<Value> lines = SplitLines(whole, false, meter);
  Text out;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out.Append("\n", true);
    meter.Charge(indention.size() + 1);
    const bool indented = i == 0 ? first : blank || !lines[i].text().empty();
    if (indented) out.Append(indention);
    out.Append(lines[i].text());
  }
  return Value::String(std::move(out));
}

Value Escape(const Text& text, Meter& meter) {
  Text out = Replace(text, "&", Text("&amp;", true), -1, meter);
  out = Replace(out, "<", Text("&lt;", true), -1, meter);
  out = Replace(out, ">", Text("&gt;", true), -1, meter);
  out = Replace(out, "'", Text("&#39;", true), -1, meter);
  return Value::String(Replace(out, "\"", Text("&#34;", true), -1, meter));
}

Value Round(const Value& value, const Arguments& arguments) {
  const int64_t precision = arguments.Int(0, "precision", 0);
  const Text* const method = arguments.String(1, "method");
  const double factor = std::pow(10.0, static_cast<double>(std::clamp<int64_t>(precision, -15, 15)));
  const double scaled = value.AsDouble() * factor;
  const std::string kind = method != nullptr ? method->bytes() : "common";
  const double rounded = kind == "ceil"    ? std::ceil(scaled)
                         : kind == "floor" ? std::floor(scaled)
                                           : std::nearbyint(scaled);
  return Value::Float(rounded / factor);
}

Value Reverse(const Value& value, Meter& meter) {
  std::vector<Value> items = Items(value, meter);
  std::reverse(items.begin(), items.end());
  if (!value.IsString()) return MakeList(std::move(items));
  Text out;
  for (const Value& item : items) out.Append(item.text());
  return Value::String(std::move(out));
}

Value TojsonFilter(const Value& value, const Arguments& arguments, Meter& meter) {
  // The signature that transformers gives it: tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=…).
  JsonStyle style;
  style.ascii = arguments.Bool(0, "ensure_ascii", false);
  const Value* const indent = arguments.Find(1, "indent");
  if (indent != nullptr && indent->IsString()) {
    style.indent_text = indent->bytes();
    if (style.indent_text.empty()) style.indent = 0;
  } else if (indent != nullptr && !indent->IsNone()) {
    style.indent = static_cast<int32_t>(std::clamp<int64_t>(indent->AsInt(), 0, 100));
  }
  if (style.indent >= 0 || !style.indent_text.empty()) style.item = ",";
  const Value* const separators = arguments.Find(2, "separators");
  if (separators != nullptr && !separators->IsNone()) {
    const std::vector<Value> both = Items(*separators, meter);
    if (both.size() != 2 || !both[0].IsString() || !both[1].IsString()) Fail("separators are two texts");
    style.item = both[0].bytes();
    style.key = both[1].bytes();
  }
  style.sort_keys = arguments.Bool(3, "sort_keys", false);
  return Value::String(ToJson(value, style, meter));
}

Value Truncate(const Text& text, const Arguments& arguments, Meter& meter) {
  const int64_t length = arguments.Int(0, "length", 255);
  const bool kill_words = arguments.Bool(1, "killwords", false);
  const Text* const end = arguments.String(2, "end");
  const Text dots = end != nullptr ? *end : Text("...", true);
  const int64_t leeway = arguments.Int(3, "leeway", 5);
  const Value whole = Value::String(text);
  if (static_cast<int64_t>(Characters(text.bytes())) <= length + std::clamp<int64_t>(leeway, 0, 1 << 20)) return whole;
  const Value keep = Value::Int(std::max<int64_t>(0, length - static_cast<int64_t>(Characters(dots.bytes()))));
  Text out = Slice(whole, nullptr, &keep, nullptr, meter).text();
  if (!kill_words) {
    const size_t space = out.bytes().rfind(' ');
    if (space != std::string::npos) out = out.Part(0, space);
  }
  out.Append(dots);
  return Value::String(std::move(out));
}

bool IsLike(const Value& value, std::string_view kind) {
  if (value.IsUndefined()) return false;
  if (kind == "string") return value.IsString();
  return value.IsDict();
}

Value Abs(const Value& value, const Arguments& /*arguments*/, Meter& /*meter*/) {
  if (value.IsFloat()) return Value::Float(std::fabs(value.float_value()));
  const int64_t number = value.AsInt();
  if (number == INT64_MIN) Fail("a number is too large");
  return Value::Int(std::abs(number));
}

Value Default(const Value& value, const Arguments& arguments, Meter& /*meter*/) {
  const bool replaced = value.IsUndefined() || (arguments.Bool(1, "boolean", false) && !value.Truth());
  if (!replaced) return value;
  const Value* const otherwise = arguments.Find(0, "default_value");
  return otherwise != nullptr ? *otherwise : Value::String("", true);
}

Value First(const Value& value, const Arguments& /*arguments*/, Meter& meter) {
  const std::vector<Value> items = Items(value, meter);
  return items.empty() ? Value::Missing("the first item of an empty sequence") : items.front();
}

Value Last(const Value& value, const Arguments& /*arguments*/, Meter& meter) {
  const std::vector<Value> items = Items(value, meter);
  return items.empty() ? Value::Missing("the last item of an empty sequence") : items.back();
}

Value PairsOf(const Value& value, const Arguments& arguments, Meter& meter) {
  if (value.IsUndefined()) return MakeList({});
  if (!value.IsDict()) Fail("Can only get item pairs from a mapping.");
  return CallMethod(value, "items", arguments, meter);
}

Value ReplaceFilter(const Value& value, const Arguments& arguments, Meter& meter) {
  const Text old = Stringified(arguments.Require(0, "old"), meter);
  return Value::String(Replace(Stringified(value, meter), old.bytes(), Stringified(arguments.Require(1, "new"), meter),
                               arguments.Int(2, "count", -1), meter));
}

Value Sort(const Value& value, const Arguments& arguments, Meter& meter) {
  return MakeList(Sorted(Items(value, meter), arguments.Find(2, "attribute"),
                         arguments.Bool(1, "case_sensitive", false), arguments.Bool(0, "reverse", false), meter));
}

Value Sum(const Value& value, const Arguments& arguments, Meter& meter) {
  const Value* const attribute = arguments.Find(0, "attribute");
  const Value* const start = arguments.Find(1, "start");
  Value sum = start != nullptr ? *start : Value::Int(0);
  for (const Value& item : Items(value, meter)) {
    const bool deep = attribute != nullptr && !attribute->IsNone();
    sum = Binary("+", sum, deep ? Deep(item, *attribute, meter) : item, meter);
  }
  return sum;
}

Value Trim(const Value& value, const Arguments& arguments, Meter& meter) {
  const Text* const characters = arguments.String(0, "chars");
  const Text text = Stringified(value, meter);
  if (characters != nullptr) meter.Charge(text.size() * std::min<size_t>(characters->size(), 1 << 16));
  return Value::String(Strip(text, characters == nullptr ? nullptr : &characters->bytes(), Side::kBoth));
}

Value WordCount(const Value& value, const Arguments& /*arguments*/, Meter& meter) {
  const std::vector<Value> words = Split(Stringified(value, meter), nullptr, -1, false, meter);
  return Value::Int(static_cast<int64_t>(words.size()));
}

using FilterFunction = Value (*)(const Value&, const Arguments&, Meter&);

// Filters of more than a line are functions of their own.
const std::map<std::string_view, FilterFunction>& Filters() {
  static const std::map<std::string_view, FilterFunction> kFilters = {
      {"abs", Abs},
      {"capitalize",
       [](const Value& value, const Arguments&, Meter& meter) {
         return Value::String(WithCase(Stringified(value, meter), Case::kCapitalised));
       }},
      {"count", [](const Value& value, const Arguments&, Meter&) { return Length(value); }},
      {"default", Default},
      {"dictsort", DictSort},
      {"escape",
       [](const Value& value, const Arguments&, Meter& meter) { return Escape(Stringified(value, meter), meter); }},
      {"first", First},
      {"float", [](const Value& value, const Arguments& arguments, Meter&) { return ToFloat(value, arguments); }},
      {"format",
       [](const Value& value, const Arguments& arguments, Meter& meter) {
         return Value::String(PercentFormat(Stringified(value, meter), arguments.list, meter));
       }},
      {"indent", [](const Value& value, const Arguments& arguments,
                    Meter& meter) { return Indent(Stringified(value, meter), arguments, meter); }},
      {"int", [](const Value& value, const Arguments& arguments, Meter&) { return ToInt(value, arguments); }},
      {"items", PairsOf},
      {"join", Join},
      {"last", Last},
      {"length", [](const Value& value, const Arguments&, Meter&) { return Length(value); }},
      {"list", [](const Value& value, const Arguments&, Meter& meter) { return MakeList(Items(value, meter)); }},
      {"lower", [](const Value& value, const Arguments&,
                   Meter& meter) { return Value::String(WithCase(Stringified(value, meter), Case::kLower)); }},
      {"map", Map},
      {"max", [](const Value& value, const Arguments& arguments,
                 Meter& meter) { return Extreme(value, arguments, true, meter); }},
      {"min", [](const Value& value, const Arguments& arguments,
                 Meter& meter) { return Extreme(value, arguments, false, meter); }},
      {"pprint",
       [](const Value& value, const Arguments&, Meter& meter) { return Value::String(ToRepr(value, meter)); }},
      {"reject", [](const Value& value, const Arguments& arguments,
                    Meter& meter) { return Select(value, arguments, false, false, meter); }},
      {"rejectattr", [](const Value& value, const Arguments& arguments,
                        Meter& meter) { return Select(value, arguments, true, false, meter); }},
      {"replace", ReplaceFilter},
      {"reverse", [](const Value& value, const Arguments&, Meter& meter) { return Reverse(value, meter); }},
      {"round", [](const Value& value, const Arguments& arguments, Meter&) { return Round(value, arguments); }},
      {"select", [](const Value& value, const Arguments& arguments,
                    Meter& meter) { return Select(value, arguments, false, true, meter); }},
      {"selectattr", [](const Value& value, const Arguments& arguments,
                        Meter& meter) { return Select(value, arguments, true, true, meter); }},
      {"sort", Sort},
      {"string",
       [](const Value& value, const Arguments&, Meter& meter) { return Value::String(Stringified(value, meter)); }},
      {"sum", Sum},
      {"title", [](const Value& value, const Arguments&,
                   Meter& meter) { return Value::String(JinjaTitle(Stringified(value, meter))); }},
      {"tojson", TojsonFilter},
      {"trim", Trim},
      {"truncate", [](const Value& value, const Arguments& arguments,
                      Meter& meter) { return Truncate(Stringified(value, meter), arguments, meter); }},
      {"unique", Unique},
      {"upper", [](const Value& value, const Arguments&,
                   Meter& meter) { return Value::String(WithCase(Stringified(value, meter), Case::kUpper)); }},
      {"wordcount", WordCount},
  };
  return kFilters;
}

}  // namespace

Value ApplyFilter(std::string_view name, const Value& value, const Arguments& arguments, Meter& meter) {
  meter.Step();
  if (name == "d") name = "default";
  if (name == "e" || name == "forceescape") name = "escape";
  if (name == "safe") name = "string";  // nothing is escaped unless it is asked for
  const auto found = Filters().find(name);
  if (found == Filters().end()) Fail("there is no filter {}", Quoted(name));
  return found->second(value, arguments, meter);
}

bool ApplyTest(std::string_view name, const Value& value, const Arguments& arguments, Meter& meter) {
  meter.Step();
  if (name == "defined") return !value.IsUndefined();
  if (name == "undefined") return value.IsUndefined();
  if (name == "none") return value.IsNone();
  if (name == "string" || name == "mapping") return IsLike(value, name);
  if (name == "boolean") return value.IsBool();
  if (name == "true") return value.IsBool() && value.bool_value();
  if (name == "false") return value.IsBool() && !value.bool_value();
  if (name == "integer") return value.IsInt();
  if (name == "float") return value.IsFloat();
  if (name == "number") return value.IsNumber();
  if (name == "iterable") return value.IsString() || value.IsList() || value.IsDict() || value.IsUndefined();
  if (name == "sequence") return value.IsString() || value.IsList() || value.IsDict() || value.IsUndefined();
  if (name == "callable") return value.IsFunction();
  if (name == "escaped") return false;
  if (name == "upper" || name == "lower") {
    const CharacterClass kind = name == "upper" ? CharacterClass::kUpper : CharacterClass::kLower;
    return IsAll(ToText(value, meter).bytes(), kind);
  }
  if (name == "odd" || name == "even")
    return (Binary("%", value, Value::Int(2), meter).AsDouble() == 1) == (name == "odd");
  if (name == "divisibleby") return Binary("%", value, arguments.Require(0, "num"), meter).AsDouble() == 0;
  if (name == "in") return Contains(arguments.Require(0, "seq"), value, meter);
  if (name == "sameas") {
    const Value& other = arguments.Require(0, "other");
    if (value.IsBool() != other.IsBool()) return false;
    return Equal(value, other, meter);
  }
  if (name == "filter" || name == "test") return value.IsString() && Filters().contains(value.bytes());
  static const std::map<std::string_view, std::string_view> kComparisons = {
      {"eq", "=="}, {"equalto", "=="}, {"==", "=="},         {"ne", "!="}, {"!=", "!="},
      {"lt", "<"},  {"lessthan", "<"}, {"<", "<"},           {"le", "<="}, {"<=", "<="},
      {"gt", ">"},  {">", ">"},        {"greaterthan", ">"}, {"ge", ">="}, {">=", ">="},
  };
  const auto comparison = kComparisons.find(name);
  if (comparison == kComparisons.end()) Fail("there is no test {}", Quoted(name));
  return Compare(comparison->second, value, arguments.Require(0, "other"), meter);
}

}  // namespace phsa::jinja
