// JSON files of a model: parsed with limits, and read field by field with messages that name file and key.
#ifndef PHSA_IO_JSON_H_
#define PHSA_IO_JSON_H_

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace phsa {

using Json = nlohmann::json;

// The object in the file. Refuses what is not valid JSON, not an object, nested deeper than any such file is, or has a
// key twice (the parser alone would keep the last).
Json ReadJsonFile(const std::filesystem::path& path, size_t limit);
// The same of a text; `place` is for messages.
Json ParseJsonObject(std::string_view text, const std::string& place);

// A value as it may appear in a message. Lists and objects are named only: they may be of any size.
std::string JsonText(const Json& value);

// Fields of one object. A field that is null is as one that is not there. All throw, naming file, key and what is
// allowed, where a field has another type or lies outside of the range.
class JsonFields {
 public:
  // `place` is the file, or "FILE: key" for an object inside. The object must outlive this.
  JsonFields(const Json& object, std::string place) : object_(&object), place_(std::move(place)) {}

  const Json* Find(const char* key) const;
  std::string Where(const char* key) const { return place_ + ": " + key; }

  std::optional<int32_t> Int(const char* key, int64_t low, int64_t high) const;
  int32_t RequiredInt(const char* key, int64_t low, int64_t high) const;
  std::optional<float> Float(const char* key, double low, double high) const;
  std::optional<bool> Bool(const char* key) const;
  std::optional<std::string> String(const char* key) const;
  std::optional<JsonFields> Object(const char* key) const;

 private:
  const Json* object_;
  std::string place_;
};

}  // namespace phsa

#endif  // PHSA_IO_JSON_H_
