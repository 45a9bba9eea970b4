// The fields of a request's body: read one by one, with messages that name them.
#ifndef PHSA_SERVER_FIELDS_H_
#define PHSA_SERVER_FIELDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/errors.h"
#include "io/json.h"
#include "server/http_types.h"

namespace phsa::server {

// One object of a request.
class Fields {
 public:
  Fields(const Json& object, std::string place)
      : object_(object), fields_(object, "the request"), place_(std::move(place)) {}

  // What the engine or the tokenizer says of a field.
  template <class Fn>
  auto Named(const char* key, const Fn& fn) const {
    try {
      return fn();
    } catch (const Error& error) {
      throw HttpError(400, error.what(), Name(key), "invalid_value");
    }
  }

  const Json* Find(const char* key) const { return fields_.Find(key); }
  const std::string& place() const { return place_; }  // of the object in the request; empty: it is the request
  std::string Name(const char* key) const { return place_.empty() ? key : place_ + "." + key; }
  [[noreturn]] void Refuse(const char* key, const std::string& message) const {
    throw HttpError(400, Name(key) + message, Name(key), "invalid_value");
  }
  [[noreturn]] void RefuseValue(const char* key, const Json& value, const std::string& allowed) const {
    Refuse(key, fmt::format(" is {}; allowed: {}", JsonText(value), allowed));
  }

  std::optional<int32_t> Int(const char* key, int32_t low, int32_t high) const {
    return Named(key, [&] { return fields_.Int(key, low, high); });
  }
  std::optional<float> Float(const char* key, double low, double high) const {
    return Named(key, [&] { return fields_.Float(key, low, high); });
  }
  bool Bool(const char* key, bool otherwise) const {
    return Named(key, [&] { return fields_.Bool(key); }).value_or(otherwise);
  }
  std::optional<std::string> String(const char* key) const {
    return Named(key, [&] { return fields_.String(key); });
  }
  std::optional<Fields> Object(const char* key) const {
    const Json* const value = Find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_object()) RefuseValue(key, *value, "an object");
    return Fields(*value, Name(key));
  }
  // A field that would change the answer in a way that is not there: only what changes nothing is taken.
  void Neutral(const char* key, const Json& neutral) const {
    const Json* const value = Find(key);
    if (value != nullptr && *value != neutral) {
      Refuse(key, fmt::format(" is {}, which is not supported; leave it out", JsonText(*value)));
    }
  }
  const Json& object() const { return object_; }

 private:
  const Json& object_;
  JsonFields fields_;
  std::string place_;
};

// The object that a body is. Throws HttpError with status 400.
Json ParseBody(std::string_view body);

}  // namespace phsa::server

#endif  // PHSA_SERVER_FIELDS_H_
