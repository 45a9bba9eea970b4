#include "jinja/formatting.h"

#include <array>
#include <cstdio>
#include <string>
#include <string_view>

namespace phsa::jinja {
namespace {

constexpr int64_t kMaxWidth = 1000;

}  // namespace

Text PercentFormat(const Text& format, const std::vector<Value>& values, Meter& meter) {
  Text out;
  const std::string_view text = format.bytes();
  size_t next = 0;
  for (size_t at = 0; at < text.size();) {
    meter.Step();
    const size_t percent = std::min(text.find('%', at), text.size());
    out.Append(format, at, percent);
    meter.Charge(percent - at);
    if (percent == text.size()) break;
    at = percent + 1;
    std::string flags;
    while (at < text.size() && std::string_view("-+ 0#").find(text[at]) != std::string_view::npos) flags += text[at++];
    const auto number = [&] {
      int64_t value = -1;
      while (at < text.size() && text[at] >= '0' && text[at] <= '9') {
        value = std::max<int64_t>(value, 0) * 10 + (text[at++] - '0');
        if (value > kMaxWidth) Fail("a width in a format is larger than {}", kMaxWidth);
      }
      return value;
    };
    const int64_t width = number();
    int64_t precision = -1;
    if (at < text.size() && text[at] == '.') {
      ++at;
      precision = std::max<int64_t>(number(), 0);
    }
    if (at == text.size()) Fail("incomplete format");
    const char kind = text[at++];
    if (kind == '%') {
      out.Append("%", true);
      continue;
    }
    if (next == values.size()) Fail("not enough arguments for format string");
    const Value& value = values[next++];
    Text piece;
    if (kind == 's' || kind == 'r') {
      piece = kind == 's' ? ToText(value, meter) : ToRepr(value, meter);
      if (precision >= 0) Fail("a precision for a text is not supported");
    } else if (std::string_view("dixXofFeEgG").find(kind) != std::string_view::npos) {
      if (!value.IsNumber()) Fail("%{} format: a number is required, not {}", kind, value.TypeName());
      const bool whole = std::string_view("dixXo").find(kind) != std::string_view::npos;
      std::string spec = "%" + flags + (width >= 0 ? std::to_string(width) : "") +
                         (precision >= 0 ? "." + std::to_string(precision) : "");
      // A double has up to 309 digits before the point.
      std::array<char, 2 * kMaxWidth + 400> buffer{};
      int size = 0;
      if (whole) {
        const auto integer = static_cast<long long>(
            value.IsFloat() ? static_cast<int64_t>(std::min(9.0e18, std::max(-9.0e18, value.AsDouble())))
                            : value.AsInt());
        spec += std::string("ll") + (kind == 'i' ? 'd' : kind);
        size = std::snprintf(buffer.data(), buffer.size(), spec.c_str(), integer);
      } else {
        spec += kind;
        size = std::snprintf(buffer.data(), buffer.size(), spec.c_str(), value.AsDouble());
      }
      out.Append(std::string_view(buffer.data(), static_cast<size_t>(std::max(size, 0))), true);
      continue;
    } else {
      Fail("unsupported format character '{}'", kind >= ' ' && kind <= '~' ? kind : '?');
    }
    const auto characters = static_cast<int64_t>(Characters(piece.bytes()));
    const std::string padding(static_cast<size_t>(std::max<int64_t>(0, width - characters)), ' ');
    const bool left = flags.find('-') != std::string::npos;
    if (!left) out.Append(padding, true);
    out.Append(piece);
    if (left) out.Append(padding, true);
  }
  if (next < values.size()) Fail("not all arguments converted during string formatting");
  return out;
}

Text BraceFormat(const Text& format, const Arguments& arguments, Meter& meter) {
  Text out;
  const std::string_view text = format.bytes();
  size_t next = 0;
  for (size_t at = 0; at < text.size();) {
    meter.Step();
    const size_t brace = std::min(text.find_first_of("{}", at), text.size());
    meter.Charge(brace - at);
    out.Append(format, at, brace);
    if (brace == text.size()) break;
    if (brace + 1 < text.size() && text[brace + 1] == text[brace]) {
      out.Append(format, brace, brace + 1);
      at = brace + 2;
      continue;
    }
    const size_t end = text[brace] == '{' ? text.find('}', brace) : std::string_view::npos;
    if (end == std::string_view::npos) Fail("a format has a single bracket");
    const std::string_view name = text.substr(brace + 1, end - brace - 1);
    if (name.find_first_of(".[:!") != std::string_view::npos) Fail("format() takes plain fields only");
    const Value* value = nullptr;
    if (name.empty()) {
      if (next < arguments.list.size()) value = &arguments.list[next++];
    } else if (name.find_first_not_of("0123456789") == std::string_view::npos) {
      const size_t index = name.size() < 4 ? static_cast<size_t>(std::stoi(std::string(name))) : SIZE_MAX;
      if (index < arguments.list.size()) value = &arguments.list[index];
    } else {
      value = arguments.Find(SIZE_MAX, name);
    }
    if (value == nullptr) Fail("format() has no value for a field");
    out.Append(ToText(*value, meter));
    at = end + 1;
  }
  return out;
}

}  // namespace phsa::jinja
