// Filters, tests and methods.
#ifndef PHSA_JINJA_BUILTINS_H_
#define PHSA_JINJA_BUILTINS_H_

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/value.h"

namespace phsa::jinja {

struct Arguments {
  std::vector<Value> list;
  std::vector<std::pair<std::string, Value>> named;

  // The argument at this place or of this name; null: it is not there.
  const Value* Find(size_t index, std::string_view name) const;
  const Value& Require(size_t index, std::string_view name) const;
  int64_t Int(size_t index, std::string_view name, int64_t otherwise) const;
  bool Bool(size_t index, std::string_view name, bool otherwise) const;
  // A text, where it is there and not None.
  const Text* String(size_t index, std::string_view name) const;
};

Value ApplyFilter(std::string_view name, const Value& value, const Arguments& arguments, Meter& meter);
bool ApplyTest(std::string_view name, const Value& value, const Arguments& arguments, Meter& meter);
// Whether a value has this method, and calling it.
bool HasMethod(const Value& value, std::string_view name);
Value CallMethod(const Value& self, std::string_view name, const Arguments& arguments, Meter& meter);

// value.name and value[key], as Jinja looks for them: what is not there is undefined.
Value Attribute(const Value& value, std::string_view name);
Value Item(const Value& value, const Value& key, Meter& meter);
Value Slice(const Value& value, const Value* begin, const Value* end, const Value* step, Meter& meter);
bool Contains(const Value& container, const Value& item, Meter& meter);
Value Binary(std::string_view op, const Value& a, const Value& b, Meter& meter);
bool Compare(std::string_view op, const Value& a, const Value& b, Meter& meter);

}  // namespace phsa::jinja

#endif  // PHSA_JINJA_BUILTINS_H_
