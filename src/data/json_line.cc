#include "data/json_line.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "base/errors.h"
#include "tokenizer/utf8_scan.h"

namespace phsa {
namespace {

using Json = nlohmann::json;

// Keeps one string and nothing else of the line.
class FieldFinder {
 public:
  explicit FieldFinder(const std::string& field) : field_(&field) {}

  std::optional<std::string> text;
  const char* other_type = nullptr;  // where the field is there and is no string
  bool is_object = false;
  size_t error_at = 0;

  bool null() { return Other("null"); }
  bool boolean(bool) { return Other("true or false"); }
  bool number_integer(Json::number_integer_t) { return Other("a number"); }
  bool number_unsigned(Json::number_unsigned_t) { return Other("a number"); }
  bool number_float(Json::number_float_t, const std::string&) { return Other("a number"); }
  bool binary(Json::binary_t&) { return Other("binary"); }
  bool string(std::string& value) {
    if (depth_ == 1 && in_field_) {
      text = std::move(value);
      other_type = nullptr;
    }
    return true;
  }
  bool start_object(size_t) {
    if (depth_ == 0) is_object = true;
    Other("an object");
    ++depth_;
    return true;
  }
  bool end_object() { return --depth_, true; }
  bool start_array(size_t) {
    Other("a list");
    ++depth_;
    return true;
  }
  bool end_array() { return --depth_, true; }
  bool key(std::string& name) {
    if (depth_ == 1) in_field_ = is_object && name == *field_;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) {
    error_at = position;
    return false;
  }

 private:
  bool Other(const char* type) {
    if (depth_ == 1 && in_field_) {
      text.reset();
      other_type = type;
    }
    return true;
  }

  const std::string* field_;
  size_t depth_ = 0;
  bool in_field_ = false;
};

}  // namespace

std::string TextOfJsonLine(std::string_view line, const std::string& field, const std::string& where) {
  FieldFinder finder(field);
  if (!Json::sax_parse(line.begin(), line.end(), &finder)) {
    if (const size_t bad = FirstInvalidUtf8(line); bad < line.size()) {
      ThrowInvalid("{}: is not UTF-8: byte {} of the line is 0x{:02x}; convert it first", where, bad + 1,
                   static_cast<uint8_t>(line[bad]));
    }
    ThrowInvalid("{}: is not valid JSON at byte {} of the line", where, finder.error_at);
  }
  if (!finder.is_object) ThrowInvalid("{}: is not a JSON object; a line is an object with the text in it", where);
  if (finder.other_type != nullptr) {
    ThrowInvalid("{}: the field {} is {}; it must be a string", where, Quoted(field), finder.other_type);
  }
  if (!finder.text)
    ThrowInvalid("{}: there is no field {}; name the one with the text: {}", where, Quoted(field), Option{"field"});
  return std::move(*finder.text);
}

}  // namespace phsa
