#include "io/json.h"

#include "base/errors.h"
#include "base/mapped_file.h"
#include "base/strict_json.h"
#include "io/source.h"

namespace phsa {
namespace {

constexpr int kMaxDepth = 32;

}  // namespace

Json ReadJsonFile(const std::filesystem::path& path, size_t limit) {
  const std::string name = path.string();
  const std::string text = ReadTextFile(path, limit);
  if (text.empty()) ThrowInvalid("{}: is empty (0 bytes): fetch it again", name);
  return ParseJsonObject(text, name);
}

Json ParseJsonObject(std::string_view text, const std::string& place) {
  const auto too_deep = [&] { ThrowInvalid("{}: is nested deeper than {} levels", place, kMaxDepth); };
  const auto twice = [&](const std::string& key) { ThrowInvalid("{}: the key {} is there twice", place, Quoted(key)); };
  try {
    Json out = ParseStrictly<Json>(text, kMaxDepth, too_deep, twice);
    if (!out.is_object()) ThrowInvalid("{}: is not a JSON object", place);
    return out;
  } catch (const Json::parse_error& error) {
    ThrowInvalid("{}: is not valid JSON at offset {}", place, error.byte);
  } catch (const Json::out_of_range&) {
    ThrowInvalid("{}: holds a number that is too large", place);
  }
}

std::string JsonText(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  if (value.is_string()) return Quoted(value.get_ref<const std::string&>());
  return value.dump();
}

const Json* JsonFields::Find(const char* key) const {
  const auto found = object_->find(key);
  return found == object_->end() || found->is_null() ? nullptr : &*found;
}

std::optional<int32_t> JsonFields::Int(const char* key, int64_t low, int64_t high) const {
  const Json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  const bool fits = value->is_number_integer() && !(value->is_number_unsigned() && value->get<uint64_t>() > INT64_MAX);
  if (!fits) ThrowInvalid("{} is {}; allowed: {} to {}", Where(key), JsonText(*value), low, high);
  return CheckedInt(Where(key), value->get<int64_t>(), low, high);
}

int32_t JsonFields::RequiredInt(const char* key, int64_t low, int64_t high) const {
  const std::optional<int32_t> value = Int(key, low, high);
  if (!value) ThrowInvalid("{} is missing; allowed: {} to {}", Where(key), low, high);
  return *value;
}

std::optional<float> JsonFields::Float(const char* key, double low, double high) const {
  const Json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) ThrowInvalid("{} is {}; allowed: {} to {}", Where(key), JsonText(*value), low, high);
  return CheckedFloat(Where(key), value->get<double>(), low, high);
}

std::optional<bool> JsonFields::Bool(const char* key) const {
  const Json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) ThrowInvalid("{} is {}; allowed: true, false", Where(key), JsonText(*value));
  return value->get<bool>();
}

std::optional<std::string> JsonFields::String(const char* key) const {
  const Json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) ThrowInvalid("{} is {}; allowed: a string", Where(key), JsonText(*value));
  return value->get<std::string>();
}

std::optional<JsonFields> JsonFields::Object(const char* key) const {
  const Json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_object()) ThrowInvalid("{} is {}; allowed: an object", Where(key), JsonText(*value));
  return JsonFields(*value, Where(key));
}

}  // namespace phsa
