// JSON Schema: the text of a JSON value that fulfils it. Every text that comes out fulfils the schema; where not every
// value that does can be written (another order of the properties, properties that are not named), docs/server.md says
// so.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

#include "base/errors.h"
#include "grammar/fragments.h"

namespace phsa {
namespace {

constexpr size_t kMaxText = size_t{1} << 20;
constexpr size_t kMaxKeys = 1000;  // of one object: they are found one by one
constexpr int kMaxParsedDepth = 64;
constexpr int kMaxDepth = 48;          // of schemas within schemas, and of references to references
constexpr size_t kMaxValues = 2000;    // of an enum
constexpr size_t kMaxSchemas = 20000;  // that are looked at: merging copies them

// They say what a value means, not what it may be.
constexpr std::array<std::string_view, 18> kNotes = {
    "title",     "description",      "default",         "examples",     "example", "deprecated", "readOnly",
    "writeOnly", "$comment",         "$schema",         "$id",          "$defs",   "id",         "definitions",
    "$anchor",   "contentMediaType", "contentEncoding", "discriminator"};
constexpr std::array<std::string_view, 23> kUnsupported = {"not",
                                                           "if",
                                                           "then",
                                                           "else",
                                                           "patternProperties",
                                                           "propertyNames",
                                                           "dependencies",
                                                           "contains",
                                                           "minContains",
                                                           "maxContains",
                                                           "dependentRequired",
                                                           "dependentSchemas",
                                                           "minProperties",
                                                           "maxProperties",
                                                           "unevaluatedItems",
                                                           "unevaluatedProperties",
                                                           "$dynamicRef",
                                                           "$dynamicAnchor",
                                                           "$recursiveRef",
                                                           "$recursiveAnchor",
                                                           "contentSchema",
                                                           "extends",
                                                           "disallow"};
constexpr std::array<std::string_view, 7> kTypes = {"object", "array",   "string", "integer",
                                                    "number", "boolean", "null"};

struct Format {
  std::string_view name, pattern;
};
#define PHSA_DATE                                     \
  "(?:000[1-9]|00[1-9]\\d|0[1-9]\\d\\d|[1-9]\\d{3})-" \
  "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|02-(?:0[1-9]|1\\d|2[0-8]))"
#define PHSA_TIME "(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,6})?(?:Z|[+-](?:[01]\\d|2[0-3]):[0-5]\\d)"
#define PHSA_TIME_PART "T(?:\\d{1,4}H(?:\\d{1,4}M(?:\\d{1,4}S)?)?|\\d{1,4}M(?:\\d{1,4}S)?|\\d{1,4}S)"
#define PHSA_BYTE "(?:\\d|[1-9]\\d|1\\d\\d|2[0-4]\\d|25[0-5])"
#define PHSA_LABEL "[A-Za-z0-9](?:[A-Za-z0-9]{0,20}[A-Za-z0-9])?"
constexpr std::array<Format, 10> kFormats = {{
    {"date", "^" PHSA_DATE "$"},
    {"time", "^" PHSA_TIME "$"},
    {"date-time", "^" PHSA_DATE "T" PHSA_TIME "$"},
    {"duration",
     "^P(?:\\d{1,4}W|(?:\\d{1,4}Y(?:\\d{1,4}M(?:\\d{1,4}D)?)?|\\d{1,4}M(?:\\d{1,4}D)?|\\d{1,4}D)(?:" PHSA_TIME_PART
     ")?|" PHSA_TIME_PART ")$"},
    {"email", "^[A-Za-z0-9_+-]{1,20}(?:\\.[A-Za-z0-9_+-]{1,20}){0,2}@" PHSA_LABEL "(?:\\." PHSA_LABEL "){1,3}$"},
    {"hostname", "^" PHSA_LABEL "(?:\\." PHSA_LABEL "){0,5}$"},
    {"ipv4", "^" PHSA_BYTE "(?:\\." PHSA_BYTE "){3}$"},
    {"ipv6", "^[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}$"},
    {"uuid", "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
    {"uri", "^(?:https?|ftp)://" PHSA_LABEL "(?:\\." PHSA_LABEL
            "){0,5}(?::[1-9]\\d{0,3})?(?:/[A-Za-z0-9._~-]{0,40}){0,20}(?:\\?[A-Za-z0-9._~=&-]{0,80})?$"},
}};
#undef PHSA_DATE
#undef PHSA_TIME
#undef PHSA_TIME_PART
#undef PHSA_BYTE
#undef PHSA_LABEL

// A schema and where it is, for messages.
struct Place {
  const OrderedJson* schema;
  std::string pointer;
};

class SchemaCompiler {
 public:
  SchemaCompiler(Builder& builder, const OrderedJson& root, const std::string& place)
      : builder_(builder), root_(root), place_(place) {}

  int32_t Compile(int32_t from) {
    const int32_t end = Any(from, {&root_, "#"}, 0);
    while (!pending_.empty()) {
      const auto [rule, target] = std::move(pending_.back());
      pending_.pop_back();
      builder_.Empty(Any(builder_.RuleStart(rule), target, 0), builder_.RuleEnd(rule));
    }
    return end;
  }

 private:
  [[noreturn]] void Refuse(const std::string& pointer, std::string_view what) const {
    ThrowInvalid("{}: {} {}", place_, Quoted(pointer, 200), what);
  }
  [[noreturn]] void RefuseKey(const Place& at, std::string_view key, std::string_view what) const {
    Refuse(Below(at.pointer, key), what);
  }
  static std::string Below(const std::string& pointer, std::string_view key) {
    std::string out = pointer + "/";
    for (const char c : key) {
      if (c == '~') {
        out += "~0";
      } else if (c == '/') {
        out += "~1";
      } else {
        out += c;
      }
    }
    return out;
  }
  static const OrderedJson* Find(const OrderedJson& schema, std::string_view key) {
    const auto found = schema.find(key);
    return found == schema.end() ? nullptr : &*found;
  }

  // Schemas that merging makes live as long as the compiler.
  const OrderedJson& Keep(OrderedJson schema) {
    if (kept_.size() > kMaxSchemas) Refuse("#", "is too large: its schemas refer to too many others");
    return *kept_.emplace_back(std::make_unique<OrderedJson>(std::move(schema)));
  }

  Place Follow(const Place& at, std::string_view reference) const {
    if (reference.empty() || reference[0] != '#') {
      RefuseKey(at, "$ref", "names another document; allowed: one in this schema, as #/$defs/NAME");
    }
    Place target{&root_, "#"};
    std::string_view rest = reference.substr(1);
    while (!rest.empty()) {
      if (rest[0] != '/') RefuseKey(at, "$ref", "is no JSON pointer; allowed: # or #/$defs/NAME");
      rest.remove_prefix(1);
      const std::string_view escaped = rest.substr(0, rest.find('/'));
      rest.remove_prefix(escaped.size());
      std::string key;
      for (size_t i = 0; i < escaped.size(); ++i) {
        const std::string_view two = escaped.substr(i, 2);
        if (two == "~0" || two == "~1") {
          key += two == "~0" ? '~' : '/';
          ++i;
        } else {
          key += escaped[i];
        }
      }
      const OrderedJson* next = nullptr;
      if (target.schema->is_object()) {
        next = Find(*target.schema, key);
      } else if (target.schema->is_array() && !key.empty() && key.size() < 6 &&
                 key.find_first_not_of("0123456789") == std::string::npos) {
        const auto index = static_cast<size_t>(std::stoul(key));
        if (index < target.schema->size()) next = &(*target.schema)[index];
      }
      if (next == nullptr) RefuseKey(at, "$ref", fmt::format("leads nowhere: {} is not there", Quoted(key)));
      target = {next, Below(target.pointer, key)};
    }
    return target;
  }

  static bool IsNote(std::string_view key) { return Has(kNotes, key); }
  // Whether there is more than the keyword and notes.
  static bool StandsAlone(const OrderedJson& schema, std::string_view keyword) {
    return std::all_of(schema.items().begin(), schema.items().end(),
                       [&](const auto& item) { return item.key() == keyword || IsNote(item.key()); });
  }

  int32_t Any(int32_t from, const Place& at, int depth) {
    if (depth > kMaxDepth) Refuse(at.pointer, fmt::format("is nested deeper than {} levels", kMaxDepth));
    if (++looked_at_ > kMaxSchemas) Refuse(at.pointer, "is one schema too many: they refer to too many others");
    const OrderedJson& schema = *at.schema;
    if (schema.is_boolean()) {
      if (!schema.get<bool>()) Refuse(at.pointer, "is false, which no value fulfils");
      return AddJsonValue(builder_, from);
    }
    if (!schema.is_object()) Refuse(at.pointer, "is no schema; allowed: an object, true");
    for (const auto& item : schema.items()) {
      if (Has(kUnsupported, item.key())) RefuseKey(at, item.key(), "is not supported; leave it out");
    }
    if (const OrderedJson* const nullable = Find(schema, "nullable"); nullable != nullptr && *nullable != false) {
      RefuseKey(at, "nullable", "is not supported; write the type as a list with null");
    }
    if (const OrderedJson* const reference = Find(schema, "$ref")) {
      if (!reference->is_string()) RefuseKey(at, "$ref", "is no text");
      const Place target = Follow(at, reference->get_ref<const std::string&>());
      if (StandsAlone(schema, "$ref")) return builder_.Call(from, RuleFor(target));
      return Any(from, {&Keep(Merge(Without(schema, "$ref"), Resolved(target, depth), at)), at.pointer}, depth + 1);
    }
    if (const OrderedJson* const all = Find(schema, "allOf")) {
      if (!all->is_array() || all->empty()) RefuseKey(at, "allOf", "is no list of schemas");
      OrderedJson merged = Without(schema, "allOf");
      for (size_t i = 0; i < all->size(); ++i) {
        const Place part{&(*all)[i], Below(Below(at.pointer, "allOf"), std::to_string(i))};
        merged = Merge(std::move(merged), Resolved(part, depth), at);
      }
      return Any(from, {&Keep(std::move(merged)), at.pointer}, depth + 1);
    }
    if (Find(schema, "anyOf") != nullptr || Find(schema, "oneOf") != nullptr) return Choice(from, at, depth);
    if (Find(schema, "const") != nullptr || Find(schema, "enum") != nullptr) return Values(from, at);
    return Typed(from, at, depth);
  }

  int32_t RuleFor(const Place& target) {
    if (const auto found = rules_.find(target.pointer); found != rules_.end()) return found->second;
    const int32_t rule = builder_.Rule(target.pointer);
    rules_[target.pointer] = rule;
    if (rules_.size() > kMaxRules)
      Refuse(target.pointer, fmt::format("is one reference too many; allowed: {}", kMaxRules));
    pending_.emplace_back(rule, target);
    return rule;
  }

  static OrderedJson Without(const OrderedJson& schema, std::string_view key) {
    OrderedJson out = OrderedJson::object();
    for (const auto& item : schema.items()) {
      if (item.key() != key) out[item.key()] = item.value();
    }
    return out;
  }

  // The object that references lead to.
  const OrderedJson& Resolved(Place at, int depth) {
    for (;; ++depth) {
      if (depth > kMaxDepth) Refuse(at.pointer, "refers to itself");
      if (!at.schema->is_object()) Refuse(at.pointer, "is no object, and cannot be put together with another schema");
      const OrderedJson* const reference = Find(*at.schema, "$ref");
      if (reference == nullptr) return *at.schema;
      if (!reference->is_string()) RefuseKey(at, "$ref", "is no text");
      if (!StandsAlone(*at.schema, "$ref"))
        RefuseKey(at, "$ref", "has other keywords beside it, within allOf or anyOf");
      at = Follow(at, reference->get_ref<const std::string&>());
    }
  }

  // What fulfils both, where that can be said in one schema.
  OrderedJson Merge(OrderedJson a, const OrderedJson& b, const Place& at) const {
    for (const auto& item : b.items()) {
      const std::string& key = item.key();
      if (IsNote(key)) continue;
      const auto own = a.find(key);
      if (own == a.end()) {
        a[key] = item.value();
      } else if (*own == item.value()) {
        continue;
      } else if (key == "properties" && own->is_object() && item.value().is_object()) {
        for (const auto& property : item.value().items()) {
          const auto other = own->find(property.key());
          if (other == own->end()) {
            (*own)[property.key()] = property.value();
          } else if (*other != property.value()) {
            *other = OrderedJson{{"allOf", OrderedJson::array({*other, property.value()})}};
          }
        }
      } else if (key == "required" && own->is_array() && item.value().is_array()) {
        for (const OrderedJson& name : item.value()) {
          if (!Contains(*own, name)) own->push_back(name);
        }
      } else if ((key == "minimum" || key == "minLength" || key == "minItems" || key == "exclusiveMinimum") &&
                 own->is_number() && item.value().is_number()) {
        if (item.value() > *own) *own = item.value();
      } else if ((key == "maximum" || key == "maxLength" || key == "maxItems" || key == "exclusiveMaximum") &&
                 own->is_number() && item.value().is_number()) {
        if (item.value() < *own) *own = item.value();
      } else if (key == "type" && (*own == "integer" || item.value() == "integer") &&
                 (*own == "number" || item.value() == "number")) {
        *own = "integer";
      } else {
        Refuse(at.pointer, fmt::format("puts together schemas that say different things of {}", Quoted(key)));
      }
    }
    // A schema that closes its properties knows nothing of the other's.
    const auto closed = [](const OrderedJson& schema) {
      const OrderedJson* const more = Find(schema, "additionalProperties");
      return more != nullptr && *more != true;
    };
    if (Find(b, "properties") != nullptr && closed(a)) {
      for (const auto& item : b["properties"].items()) {
        const auto known = [&](const OrderedJson& schema) {
          const OrderedJson* const properties = Find(schema, "properties");
          return !closed(schema) || (properties != nullptr && Find(*properties, item.key()) != nullptr);
        };
        if (!known(b)) Refuse(at.pointer, "puts together schemas with additionalProperties");
      }
    }
    return a;
  }
  template <class T>
  static bool Contains(const OrderedJson& list, const T& value) {
    return std::find(list.begin(), list.end(), value) != list.end();
  }
  template <class List>
  static bool Has(const List& list, std::string_view name) {
    return std::find(list.begin(), list.end(), name) != list.end();
  }

  int32_t Choice(int32_t from, const Place& at, int depth) {
    const OrderedJson& schema = *at.schema;
    if (Find(schema, "anyOf") != nullptr && Find(schema, "oneOf") != nullptr) {
      RefuseKey(at, "oneOf", "is beside anyOf; give one of them");
    }
    const std::string_view key = Find(schema, "anyOf") != nullptr ? "anyOf" : "oneOf";
    const OrderedJson& branches = *Find(schema, key);
    if (!branches.is_array() || branches.empty()) RefuseKey(at, key, "is no list of schemas");
    std::vector<Place> places;
    for (size_t i = 0; i < branches.size(); ++i) {
      Place branch{&branches[i], Below(Below(at.pointer, key), std::to_string(i))};
      if (!StandsAlone(schema, key)) {
        branch.schema = &Keep(Merge(Without(schema, key), Resolved(branch, depth), at));
      }
      places.push_back(std::move(branch));
    }
    if (key == "oneOf") {
      for (size_t i = 0; i < places.size(); ++i) {
        for (size_t k = i + 1; k < places.size(); ++k) {
          if (looked_at_ += 1; looked_at_ > kMaxSchemas) RefuseKey(at, key, "has too many schemas");
          if (!Disjoint(places[i], places[k], depth)) {
            RefuseKey(at, key,
                      fmt::format("has schemas {} and {} that one value may fulfil both; tell them apart by type or by "
                                  "a required property with const, or write anyOf",
                                  i, k));
          }
        }
      }
    }
    const int32_t end = builder_.State();
    for (const Place& place : places) {
      const int32_t branch = builder_.State();
      builder_.Empty(from, branch);
      builder_.Empty(Any(branch, place, depth + 1), end);
    }
    return end;
  }

  // Values that `schema` allows by name; none: it names no values.
  static std::optional<std::vector<OrderedJson>> NamedValues(const OrderedJson& schema) {
    if (const OrderedJson* const value = Find(schema, "const")) return std::vector<OrderedJson>{*value};
    const OrderedJson* const list = Find(schema, "enum");
    if (list == nullptr || !list->is_array()) return std::nullopt;
    return std::vector<OrderedJson>(list->begin(), list->end());
  }

  static std::set<std::string> TypesOf(const OrderedJson& schema) {
    std::set<std::string> types;
    const auto add = [&](const OrderedJson& type) {
      if (type.is_string()) types.insert(type.get<std::string>() == "integer" ? "number" : type.get<std::string>());
    };
    if (const OrderedJson* const type = Find(schema, "type")) {
      if (type->is_array()) {
        for (const OrderedJson& one : *type) add(one);
      } else {
        add(*type);
      }
    } else if (const auto values = NamedValues(schema)) {
      for (const OrderedJson& value : *values) types.insert(TypeName(value));
    }
    return types;
  }
  static std::string TypeName(const OrderedJson& value) {
    return value.is_null()      ? "null"
           : value.is_boolean() ? "boolean"
           : value.is_number()  ? "number"
           : value.is_string()  ? "string"
           : value.is_array()   ? "array"
                                : "object";
  }

  bool Disjoint(const Place& a, const Place& b, int depth) {
    if (!a.schema->is_object() || !b.schema->is_object()) return false;
    const OrderedJson &left = Resolved(a, depth), &right = Resolved(b, depth);
    const std::set<std::string> types = TypesOf(left), others = TypesOf(right);
    const bool same_type =
        types.empty() || others.empty() ||
        std::any_of(types.begin(), types.end(), [&](const auto& type) { return others.contains(type); });
    if (!same_type) return true;
    const auto apart = [](const OrderedJson& one, const OrderedJson& other) {
      const auto values = NamedValues(one), others_values = NamedValues(other);
      if (!values || !others_values || values->size() * others_values->size() > kMaxValues * 10) return false;
      return std::none_of(values->begin(), values->end(), [&](const OrderedJson& value) {
        return std::find(others_values->begin(), others_values->end(), value) != others_values->end();
      });
    };
    if (apart(left, right)) return true;
    if (types != std::set<std::string>{"object"} || others != types) return false;
    const OrderedJson *const properties = Find(left, "properties"), *const required = Find(left, "required");
    const OrderedJson *const other_properties = Find(right, "properties"), *const other_required =
                                                                               Find(right, "required");
    if (properties == nullptr || required == nullptr || other_properties == nullptr || other_required == nullptr) {
      return false;
    }
    if (!properties->is_object() || !other_properties->is_object()) return false;
    for (const auto& item : properties->items()) {
      const OrderedJson* const other = Find(*other_properties, item.key());
      if (other == nullptr || !item.value().is_object() || !other->is_object()) continue;
      if (Contains(*required, item.key()) && Contains(*other_required, item.key()) && apart(item.value(), *other))
        return true;
    }
    return false;
  }

  int32_t Values(int32_t from, const Place& at) {
    const OrderedJson& schema = *at.schema;
    const bool is_const = Find(schema, "const") != nullptr;
    const std::string_view key = is_const ? "const" : "enum";
    if (is_const && Find(schema, "enum") != nullptr) RefuseKey(at, "enum", "is beside const; give one of them");
    for (const auto& item : schema.items()) {
      if (item.key() != key && item.key() != "type" && !IsNote(item.key())) {
        RefuseKey(at, item.key(), fmt::format("is beside {}, which says it all; leave it out", key));
      }
    }
    if (!is_const && (!schema["enum"].is_array() || schema["enum"].empty())) {
      RefuseKey(at, key, "is no list of values");
    }
    const std::vector<OrderedJson> values = *NamedValues(schema);
    if (values.size() > kMaxValues)
      RefuseKey(at, key, fmt::format("has {} values; allowed: {}", values.size(), kMaxValues));
    std::set<std::string> types = TypesOf(schema);
    if (Find(schema, "type") == nullptr) types.clear();
    const int32_t end = builder_.State();
    bool some = false;
    for (const OrderedJson& value : values) {
      if (!types.empty() && !types.contains(TypeName(value))) continue;
      some = true;
      const int32_t branch = builder_.State();
      builder_.Empty(from, branch);
      builder_.Empty(builder_.Literal(branch, value.dump()), end);
    }
    if (!some) RefuseKey(at, key, "has no value of the type that is asked for");
    return end;
  }

  int32_t Typed(int32_t from, const Place& at, int depth) {
    const OrderedJson& schema = *at.schema;
    std::vector<std::string> types;
    if (const OrderedJson* const type = Find(schema, "type")) {
      const OrderedJson list = type->is_array() ? *type : OrderedJson::array({*type});
      for (const OrderedJson& one : list) {
        if (!one.is_string() || !Has(kTypes, std::string_view(one.get_ref<const std::string&>()))) {
          RefuseKey(at, "type", fmt::format("is none; allowed: {}, or a list of them", fmt::join(kTypes, ", ")));
        }
        if (!Has(types, std::string_view(one.get_ref<const std::string&>()))) types.push_back(one.get<std::string>());
      }
      if (types.empty()) RefuseKey(at, "type", "is an empty list");
    } else {
      // What it says is of one type; values of others would fulfil it too, but nobody means them.
      static const std::array<std::pair<std::string_view, std::vector<std::string_view>>, 4> kWords = {{
          {"object", {"properties", "required", "additionalProperties"}},
          {"array", {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}},
          {"string", {"pattern", "format", "minLength", "maxLength"}},
          {"number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}},
      }};
      for (const auto& [name, words] : kWords) {
        if (std::any_of(words.begin(), words.end(), [&](auto word) { return Find(schema, word) != nullptr; })) {
          types.emplace_back(name);
        }
      }
      if (types.empty()) return AddJsonValue(builder_, from);
    }
    if (types.size() == 1) return OfType(from, types.front(), at, depth);
    const int32_t end = builder_.State();
    for (const std::string& type : types) {
      const int32_t branch = builder_.State();
      builder_.Empty(from, branch);
      builder_.Empty(OfType(branch, type, at, depth), end);
    }
    return end;
  }

  int32_t OfType(int32_t from, std::string_view type, const Place& at, int depth) {
    if (type == "object") return Object(from, at, depth);
    if (type == "array") return Array(from, at, depth);
    if (type == "string") return String(from, at);
    if (type == "integer" || type == "number") return Number(from, type == "integer", at);
    if (type == "null") return builder_.Literal(from, "null");
    const int32_t end = builder_.State();
    builder_.Empty(builder_.Literal(from, "true"), end);
    builder_.Empty(builder_.Literal(from, "false"), end);
    return end;
  }

  std::optional<int32_t> Count(const Place& at, std::string_view key) const {
    const OrderedJson* const value = Find(*at.schema, key);
    if (value == nullptr) return std::nullopt;
    const bool whole = value->is_number_integer() ||
                       (value->is_number_float() && std::trunc(value->get<double>()) == value->get<double>());
    const double number = value->is_number() ? value->get<double>() : -1;
    if (!whole || !(number >= 0) || number > Builder::kMaxRepeat) {
      RefuseKey(at, key, fmt::format("is out of range; allowed: 0 to {}", Builder::kMaxRepeat));
    }
    return static_cast<int32_t>(number);
  }

  int32_t Object(int32_t from, const Place& at, int depth) {
    const OrderedJson& schema = *at.schema;
    static const OrderedJson kNone = OrderedJson::object(), kAny = true;
    const OrderedJson* properties = Find(schema, "properties");
    if (properties != nullptr && !properties->is_object()) RefuseKey(at, "properties", "is no object");
    const OrderedJson* const more = Find(schema, "additionalProperties");
    if (more != nullptr && !more->is_boolean() && !more->is_object()) {
      RefuseKey(at, "additionalProperties", "is no schema; allowed: false, true, a schema");
    }
    std::set<std::string> required;
    if (const OrderedJson* const names = Find(schema, "required")) {
      if (!names->is_array()) RefuseKey(at, "required", "is no list of names");
      for (const OrderedJson& name : *names) {
        if (!name.is_string()) RefuseKey(at, "required", "is no list of names");
        required.insert(name.get<std::string>());
      }
    }
    const bool closed = more != nullptr && *more == false;
    if (properties == nullptr && required.empty() && more == nullptr) return AddJsonObject(builder_, from);
    if (properties == nullptr) properties = &kNone;
    struct Property {
      std::string name;
      Place schema;
      bool required;
    };
    std::vector<Property> members;
    for (const auto& item : properties->items()) {
      const std::string pointer = Below(Below(at.pointer, "properties"), item.key());
      members.push_back({item.key(), {&item.value(), pointer}, required.contains(item.key())});
      required.erase(item.key());
    }
    for (const std::string& name : required) {
      if (closed) {
        RefuseKey(at, "required", fmt::format("names {}, which is no property; no object can fulfil it", Quoted(name)));
      }
      const bool own = more != nullptr && more->is_object();
      members.push_back({name, {own ? more : &kAny, Below(at.pointer, "additionalProperties")}, true});
    }

    // Two rows of states: before the first member, and behind one, where a comma comes first.
    int32_t none_yet = builder_.State();
    builder_.Empty(AddSpace(builder_, builder_.Literal(from, "{")), none_yet);
    int32_t some = builder_.State();
    const auto begin_member = [&] {
      const int32_t begin = builder_.State();
      builder_.Empty(none_yet, begin);
      builder_.Empty(AddSpace(builder_, builder_.Literal(some, ",")), begin);
      return begin;
    };
    for (const Property& property : members) {
      int32_t end = builder_.Literal(begin_member(), JsonLiteral(property.name) + ":");
      end = AddSpace(builder_, Any(AddSpace(builder_, end), property.schema, depth + 1));
      const int32_t next_none = builder_.State(), next_some = builder_.State();
      builder_.Empty(end, next_some);
      if (!property.required) {
        builder_.Empty(none_yet, next_none);
        builder_.Empty(some, next_some);
      }
      none_yet = next_none;
      some = next_some;
    }
    const int32_t close = builder_.State();
    builder_.Empty(none_yet, close);
    builder_.Empty(some, close);
    // Without a word about others, the properties are all there are; a text with no others fulfils it too.
    if (more != nullptr && !closed) {
      std::vector<std::string> names;
      for (const Property& property : members) names.push_back(property.name);
      int32_t end = builder_.Literal(begin_member(), "\"");
      end = builder_.Literal(AddOtherName(builder_, end, names), ":");
      const Place other{more, Below(at.pointer, "additionalProperties")};
      end = AddSpace(builder_, Any(AddSpace(builder_, end), other, depth + 1));
      builder_.Empty(end, some);
    }
    return builder_.Literal(close, "}");
  }

  int32_t Array(int32_t from, const Place& at, int depth) {
    const OrderedJson& schema = *at.schema;
    static const OrderedJson kAny = true;
    if (const OrderedJson* const unique = Find(schema, "uniqueItems"); unique != nullptr && *unique != false) {
      RefuseKey(at, "uniqueItems", "is not supported; leave it out");
    }
    const OrderedJson* const prefix = Find(schema, "prefixItems");
    if (prefix != nullptr && !prefix->is_array()) RefuseKey(at, "prefixItems", "is no list of schemas");
    const OrderedJson* const items = Find(schema, "items");
    if (items != nullptr && items->is_array()) {
      RefuseKey(at, "items", "is a list, which is not supported; write it as prefixItems");
    }
    const int32_t min = Count(at, "minItems").value_or(0);
    const std::optional<int32_t> max = Count(at, "maxItems");
    if (max && *max < min) RefuseKey(at, "maxItems", "is less than minItems");
    const auto element = [&](int32_t state, const Place& place) {
      return AddSpace(builder_, Any(state, place, depth + 1));
    };
    const auto comma = [&](int32_t state) { return AddSpace(builder_, builder_.Literal(state, ",")); };
    int32_t state = AddSpace(builder_, builder_.Literal(from, "["));
    const int32_t close = builder_.State();
    const auto fixed = static_cast<int32_t>(std::min<size_t>(prefix != nullptr ? prefix->size() : 0,
                                                             static_cast<size_t>(max.value_or(Builder::kMaxRepeat))));
    for (int32_t i = 0; i < fixed; ++i) {
      if (i >= min) builder_.Empty(state, close);
      if (i > 0) state = comma(state);
      const auto index = static_cast<size_t>(i);
      state = element(state, {&(*prefix)[index], Below(Below(at.pointer, "prefixItems"), std::to_string(i))});
    }
    const int32_t least = std::max(0, min - fixed), most = max ? *max - fixed : -1;
    const bool no_more = most == 0 || (items != nullptr && *items == false);
    if (no_more) {
      if (least > 0) RefuseKey(at, "minItems", "asks for more than there may be");
      builder_.Empty(state, close);
      return builder_.Literal(close, "]");
    }
    const Place rest{items != nullptr ? items : &kAny, Below(at.pointer, "items")};
    const auto next = [&](int32_t one) { return element(comma(one), rest); };
    if (fixed > 0) {
      builder_.Empty(builder_.Repeat(state, least, most, next), close);
    } else {
      if (least == 0) builder_.Empty(state, close);
      const int32_t first = element(state, rest);
      builder_.Empty(builder_.Repeat(first, std::max(0, least - 1), most < 0 ? -1 : most - 1, next), close);
    }
    return builder_.Literal(close, "]");
  }

  int32_t String(int32_t from, const Place& at) {
    const OrderedJson& schema = *at.schema;
    const OrderedJson *const pattern = Find(schema, "pattern"), *const format = Find(schema, "format");
    const std::optional<int32_t> min = Count(at, "minLength"), max = Count(at, "maxLength");
    if (pattern == nullptr && format == nullptr) {
      if (max && *max < min.value_or(0)) RefuseKey(at, "maxLength", "is less than minLength");
      return AddJsonString(builder_, from, min.value_or(0), max.value_or(-1));
    }
    const std::string_view key = pattern != nullptr ? "pattern" : "format";
    if (min.value_or(0) > 0) RefuseKey(at, "minLength", fmt::format("is beside {}, which is not supported", key));
    if (max) RefuseKey(at, "maxLength", fmt::format("is beside {}, which is not supported", key));
    if (pattern != nullptr && format != nullptr) RefuseKey(at, "format", "is beside pattern, which is not supported");
    const OrderedJson& value = pattern != nullptr ? *pattern : *format;
    if (!value.is_string()) RefuseKey(at, key, "is no text");
    std::string_view text = value.get_ref<const std::string&>();
    if (format != nullptr) {
      const auto known =
          std::find_if(kFormats.begin(), kFormats.end(), [&](const Format& one) { return one.name == text; });
      if (known == kFormats.end()) {
        std::string names;
        for (const Format& one : kFormats) names += (names.empty() ? "" : ", ") + std::string(one.name);
        RefuseKey(at, key, fmt::format("is {}; allowed: {}", Quoted(text), names));
      }
      text = known->pattern;
    }
    const std::string place = fmt::format("{}: {}", place_, Quoted(Below(at.pointer, key), 200));
    return builder_.Literal(AddPattern(builder_, builder_.Literal(from, "\""), text, place), "\"");
  }

  std::optional<Bound> NumberBound(const Place& at, std::string_view key, bool strict) const {
    const OrderedJson* const value = Find(*at.schema, key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number()) RefuseKey(at, key, "is no number");
    // "-1.5e-07", by the shortest digits that say the number.
    const std::string text = value->is_number_float() ? fmt::format("{}", value->get<double>()) : value->dump();
    Bound bound;
    bound.strict = strict;
    std::string_view rest = text;
    if (rest.starts_with('-')) {
      bound.value.negative = true;
      rest.remove_prefix(1);
    }
    int exponent = 0;
    if (const size_t e = rest.find('e'); e != std::string_view::npos) {
      exponent = std::stoi(std::string(rest.substr(e + 1)));
      rest = rest.substr(0, e);
    }
    std::string whole(rest.substr(0, rest.find('.')));
    std::string fraction(rest.find('.') == std::string_view::npos ? "" : rest.substr(rest.find('.') + 1));
    constexpr int kMaxDigits = 24;
    if (std::abs(exponent) > kMaxDigits)
      RefuseKey(at, key, "is too large or too small; allowed: 24 digits on each side of the point");
    for (; exponent > 0; --exponent) {
      whole += fraction.empty() ? '0' : fraction.front();
      if (!fraction.empty()) fraction.erase(0, 1);
    }
    for (; exponent < 0; ++exponent) {
      fraction.insert(0, 1, whole.empty() ? '0' : whole.back());
      if (!whole.empty()) whole.pop_back();
    }
    whole.erase(0, std::min(whole.find_first_not_of('0'), whole.size()));
    fraction.erase(fraction.find_last_not_of('0') + 1);
    bound.value.whole = whole.empty() ? "0" : whole;
    bound.value.fraction = fraction;
    return bound;
  }

  int32_t Number(int32_t from, bool integer, const Place& at) {
    const OrderedJson& schema = *at.schema;
    if (const OrderedJson* const multiple = Find(schema, "multipleOf");
        multiple != nullptr && !(integer && *multiple == 1)) {
      RefuseKey(at, "multipleOf", "is not supported; leave it out");
    }
    const auto one_of = [&](std::string_view inclusive, std::string_view exclusive) {
      const std::optional<Bound> on = NumberBound(at, inclusive, false), beside = NumberBound(at, exclusive, true);
      if (on && beside) RefuseKey(at, exclusive, fmt::format("is beside {}; give one of them", inclusive));
      return on ? on : beside;
    };
    const std::optional<Bound> low = one_of("minimum", "exclusiveMinimum"),
                               high = one_of("maximum", "exclusiveMaximum");
    if (!low && !high) return integer ? AddJsonInteger(builder_, from) : AddJsonNumber(builder_, from);
    return integer ? AddIntegerBetween(builder_, from, low, high) : AddNumberBetween(builder_, from, low, high);
  }

  static constexpr size_t kMaxRules = 500;
  Builder& builder_;
  const OrderedJson& root_;
  const std::string& place_;
  std::map<std::string, int32_t> rules_;            // by the pointer of what they are for
  std::vector<std::pair<int32_t, Place>> pending_;  // rules that are still to be written
  std::vector<std::unique_ptr<OrderedJson>> kept_;
  size_t looked_at_ = 0;
};

}  // namespace

int32_t AddSchema(Builder& builder, int32_t from, const OrderedJson& schema, const std::string& place) {
  return SchemaCompiler(builder, schema, place).Compile(from);
}

std::shared_ptr<const Grammar> CompileJsonSchema(const OrderedJson& schema, const std::string& place) {
  Builder builder(place);
  const int32_t root = builder.Rule("the schema");
  builder.Empty(AddSchema(builder, builder.RuleStart(root), schema, place), builder.RuleEnd(root));
  return builder.Finish(root);
}

std::shared_ptr<const Grammar> CompileJsonSchemaText(std::string_view schema, const std::string& place) {
  return CompileJsonSchema(ParseSchemaText(schema, place), place);
}

OrderedJson ParseSchemaText(std::string_view text, const std::string& place) {
  if (text.size() > kMaxText) ThrowInvalid("{}: has {} bytes; allowed: {}", place, text.size(), kMaxText);
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int depth, OrderedJson::parse_event_t event, OrderedJson& parsed) {
    using Event = OrderedJson::parse_event_t;
    if ((event == Event::object_start || event == Event::array_start) && depth >= kMaxParsedDepth) {
      ThrowInvalid("{}: is nested deeper than {} levels", place, kMaxParsedDepth);
    }
    if (event == Event::object_start) {
      keys.emplace_back();
    } else if (event == Event::object_end) {
      keys.pop_back();
    } else if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) ThrowInvalid("{}: the key {} is there twice", place, Quoted(key));
      if (keys.back().size() > kMaxKeys) ThrowInvalid("{}: an object has more than {} keys", place, kMaxKeys);
    }
    return true;
  };
  try {
    return OrderedJson::parse(text.begin(), text.end(), watch);
  } catch (const OrderedJson::parse_error& error) {
    ThrowInvalid("{}: is not valid JSON at offset {}", place, error.byte);
  } catch (const OrderedJson::out_of_range&) {
    ThrowInvalid("{}: holds a number that is too large", place);
  }
}

}  // namespace phsa
