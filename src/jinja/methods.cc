#include <algorithm>
#include <array>

#include "base/errors.h"
#include "jinja/builtins.h"
#include "jinja/formatting.h"
#include "jinja/strings.h"

namespace phsa::jinja {
namespace {

constexpr std::array<std::string_view, 31> kTextMethods = {
    "strip",   "lstrip",  "rstrip",       "split",        "rsplit",    "splitlines", "startswith", "endswith",
    "upper",   "lower",   "title",        "capitalize",   "replace",   "find",       "rfind",      "index",
    "count",   "join",    "isdigit",      "isdecimal",    "isnumeric", "isalpha",    "isalnum",    "isspace",
    "isupper", "islower", "removeprefix", "removesuffix", "format",    "zfill",      "casefold"};
constexpr std::array<std::string_view, 5> kDictMethods = {"items", "keys", "values", "get", "copy"};
constexpr std::array<std::string_view, 4> kListMethods = {"append", "index", "count", "copy"};

// One text, or any of several.
bool HasEnd(const Value& self, const Arguments& arguments, bool at_start) {
  const Value& what = arguments.Require(0, "prefix");
  const auto matches = [&](const Value& one) {
    if (!one.IsString()) Fail("{} first arg must be str or a tuple of str", at_start ? "startswith" : "endswith");
    return at_start ? self.bytes().starts_with(one.bytes()) : self.bytes().ends_with(one.bytes());
  };
  if (!what.IsList()) return matches(what);
  return std::any_of(what.list().items.begin(), what.list().items.end(), matches);
}

const Text& TextArgument(const Arguments& arguments, size_t index, std::string_view name) {
  const Value& value = arguments.Require(index, name);
  if (value.IsUndefined()) value.FailUndefined();
  if (!value.IsString()) Fail("a text is needed, not '{}'", value.TypeName());
  return value.text();
}

Value FindIn(const Text& text, const Arguments& arguments, std::string_view name, Meter& meter) {
  const std::string& what = TextArgument(arguments, 0, "sub").bytes();
  meter.Charge(text.size());
  const size_t found = name == "rfind" ? text.bytes().rfind(what) : text.bytes().find(what);
  if (found == std::string::npos && name == "index") Fail("substring not found");
  if (found == std::string::npos) return Value::Int(-1);
  return Value::Int(static_cast<int64_t>(Characters(std::string_view(text.bytes()).substr(0, found))));
}

Value Joined(const Text& between, const Value& list, Meter& meter) {
  Text out;
  bool first = true;
  for (const Value& item : Items(list, meter)) {
    if (!item.IsString()) Fail("sequence item: expected str instance, {} found", item.TypeName());
    meter.Charge(between.size() + item.text().size());
    if (!first) out.Append(between);
    out.Append(item.text());
    first = false;
  }
  return Value::String(std::move(out));
}

Value CountIn(const Text& text, const std::string& what, Meter& meter) {
  meter.Charge(text.size());
  if (what.empty()) return Value::Int(static_cast<int64_t>(Characters(text.bytes())) + 1);
  int64_t count = 0;
  for (size_t at = 0; (at = text.bytes().find(what, at)) != std::string::npos; at += what.size()) ++count;
  return Value::Int(count);
}

Value CallText(const Value& self, std::string_view name, const Arguments& arguments, Meter& meter) {
  const Text& text = self.text();
  meter.Charge(text.size());
  const auto string_value = [](Text made) { return Value::String(std::move(made)); };
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const Text* const characters = arguments.String(0, "chars");
    if (characters != nullptr) meter.Charge(text.size() * std::min<size_t>(characters->size(), 1 << 16));
    const Side side = name == "strip" ? Side::kBoth : name == "lstrip" ? Side::kLeft : Side::kRight;
    return string_value(Strip(text, characters == nullptr ? nullptr : &characters->bytes(), side));
  }
  if (name == "split" || name == "rsplit") {
    const Text* const separator = arguments.String(0, "sep");
    const int64_t most = arguments.Int(1, "maxsplit", -1);
    return MakeList(Split(text, separator == nullptr ? nullptr : &separator->bytes(), most, name == "rsplit", meter));
  }
  if (name == "splitlines") return MakeList(SplitLines(text, arguments.Bool(0, "keepends", false), meter));
  if (name == "startswith" || name == "endswith") return Value::Bool(HasEnd(self, arguments, name == "startswith"));
  if (name == "upper") return string_value(WithCase(text, Case::kUpper));
  if (name == "lower" || name == "casefold") return string_value(WithCase(text, Case::kLower));
  if (name == "title") return string_value(WithCase(text, Case::kTitle));
  if (name == "capitalize") return string_value(WithCase(text, Case::kCapitalised));
  if (name == "replace") {
    return string_value(Replace(text, TextArgument(arguments, 0, "old").bytes(), TextArgument(arguments, 1, "new"),
                                arguments.Int(2, "count", -1), meter));
  }
  if (name == "find" || name == "rfind" || name == "index") return FindIn(text, arguments, name, meter);
  if (name == "count") return CountIn(text, TextArgument(arguments, 0, "sub").bytes(), meter);
  if (name == "join") return Joined(text, arguments.Require(0, "iterable"), meter);
  if (name == "removeprefix" || name == "removesuffix") {
    const std::string& what = TextArgument(arguments, 0, "affix").bytes();
    const bool prefix = name == "removeprefix";
    const bool there = prefix ? text.bytes().starts_with(what) : text.bytes().ends_with(what);
    if (!there) return self;
    return string_value(prefix ? text.Part(what.size(), text.size()) : text.Part(0, text.size() - what.size()));
  }
  if (name == "format") return string_value(BraceFormat(text, arguments, meter));
  if (name == "zfill") {
    const int64_t missing = arguments.Require(0, "width").AsInt() - static_cast<int64_t>(Characters(text.bytes()));
    if (missing <= 0) return self;
    meter.Charge(static_cast<size_t>(missing));
    const size_t sign = !text.empty() && (text.bytes()[0] == '-' || text.bytes()[0] == '+') ? 1 : 0;
    Text out = text.Part(0, sign);
    out.Append(std::string(static_cast<size_t>(missing), '0'), true);
    out.Append(text, sign, text.size());
    return string_value(std::move(out));
  }
  const CharacterClass characters = name == "isalpha"   ? CharacterClass::kAlpha
                                    : name == "isalnum" ? CharacterClass::kAlphaNumeric
                                    : name == "isspace" ? CharacterClass::kSpace
                                    : name == "isupper" ? CharacterClass::kUpper
                                    : name == "islower" ? CharacterClass::kLower
                                                        : CharacterClass::kDigit;
  return Value::Bool(IsAll(text.bytes(), characters));
}

Value CallDict(const Value& self, std::string_view name, const Arguments& arguments, Meter& meter) {
  const Dict& dict = self.dict();
  if (name == "get") {
    const Value* const found = dict.Find(arguments.Require(0, "key"));
    if (found != nullptr) return *found;
    const Value* const otherwise = arguments.Find(1, "default");
    return otherwise != nullptr ? *otherwise : Value::NoneValue();
  }
  if (name == "copy") return self;  // dicts do not change
  std::vector<Value> items;
  for (const auto& [key, value] : dict.items()) {
    meter.Charge(name == "items" ? 160 : 64);
    items.push_back(name == "items" ? MakeList({key, value}, true) : name == "keys" ? key : value);
  }
  return MakeList(std::move(items));
}

Value CallList(const Value& self, std::string_view name, const Arguments& arguments, Meter& meter) {
  List& list = self.list();
  if (name == "copy") return MakeList(Items(self, meter), list.tuple);
  const Value& item = arguments.Require(0, "object");
  if (name == "append") {
    if (list.tuple || list.frozen) Fail("a list that is part of something else cannot be changed");
    if (item.IsList() && &item.list() == &list) Fail("a list cannot hold itself");
    meter.Charge(64);
    list.Add(item);
    return Value::NoneValue();
  }
  int64_t count = 0;
  for (size_t i = 0; i < list.items.size(); ++i) {
    if (!Equal(list.items[i], item, meter)) continue;
    if (name == "index") return Value::Int(static_cast<int64_t>(i));
    ++count;
  }
  if (name == "index") Fail("the value is not in the list");
  return Value::Int(count);
}

}  // namespace

const Value* Arguments::Find(size_t index, std::string_view name) const {
  if (index < list.size()) return &list[index];
  for (const auto& [key, value] : named) {
    if (key == name) return &value;
  }
  return nullptr;
}

const Value& Arguments::Require(size_t index, std::string_view name) const {
  const Value* const found = Find(index, name);
  if (found == nullptr) Fail("the argument {} is missing", name);
  return *found;
}

int64_t Arguments::Int(size_t index, std::string_view name, int64_t otherwise) const {
  const Value* const found = Find(index, name);
  return found == nullptr || found->IsNone() ? otherwise : found->AsInt();
}

bool Arguments::Bool(size_t index, std::string_view name, bool otherwise) const {
  const Value* const found = Find(index, name);
  return found == nullptr ? otherwise : found->Truth();
}

const Text* Arguments::String(size_t index, std::string_view name) const {
  const Value* const found = Find(index, name);
  if (found == nullptr || found->IsNone()) return nullptr;
  if (found->IsUndefined()) found->FailUndefined();
  if (!found->IsString()) Fail("the argument {} is a text, not '{}'", name, found->TypeName());
  return &found->text();
}

bool HasMethod(const Value& value, std::string_view name) {
  const auto has = [&](const auto& names) { return std::find(names.begin(), names.end(), name) != names.end(); };
  if (value.IsString()) return has(kTextMethods);
  if (value.IsDict()) return has(kDictMethods);
  if (value.IsList()) return has(kListMethods);
  return value.IsLoop() && (name == "cycle" || name == "changed");
}

Value CallMethod(const Value& self, std::string_view name, const Arguments& arguments, Meter& meter) {
  if (self.IsString()) return CallText(self, name, arguments, meter);
  if (self.IsDict()) return CallDict(self, name, arguments, meter);
  if (self.IsList()) return CallList(self, name, arguments, meter);
  if (name != "cycle") Fail("loop.{} is not supported", name);
  if (arguments.list.empty()) Fail("no items for cycling given");
  return arguments.list[self.loop().index % arguments.list.size()];
}

}  // namespace phsa::jinja
