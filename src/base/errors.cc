#include "base/errors.h"

#include <cstdio>
#include <cstdlib>

namespace phsa {
namespace {

// Around an option in a message: no text that is shown has these.
constexpr char kBegin = '\x1e', kValue = '\x1f', kEnd = '\x1d';

std::string Plain(std::string_view name, std::string_view value) {
  if (name.starts_with(kSettingSign)) name.remove_prefix(1);
  return value.empty() ? std::string(name) : fmt::format("{} {}", name, value);
}

}  // namespace

std::string Marked(const Option& option) {
  std::string out = fmt::format("{}{}", kBegin, option.name);
  if (!option.value.empty()) out += fmt::format("{}{}", kValue, option.value);
  return out + kEnd;
}

std::string Marked(const Setting& setting) {
  return Marked(Option{std::string(1, kSettingSign) += setting.name, setting.value});
}

std::string SpellOptions(std::string_view text, const OptionSpeller& spell) {
  std::string out;
  for (;;) {
    const size_t begin = text.find(kBegin), end = text.find(kEnd, begin);
    if (begin == std::string_view::npos || end == std::string_view::npos) return out.append(text);
    out += text.substr(0, begin);
    const std::string_view option = text.substr(begin + 1, end - begin - 1);
    const size_t value = option.find(kValue);
    out += spell(option.substr(0, value), value == std::string_view::npos ? "" : option.substr(value + 1));
    text.remove_prefix(end + 1);
  }
}

Error::Error(phsa_status status, const std::string& message)
    : std::runtime_error(SpellOptions(message, Plain)),
      status_(status),
      message_(std::make_shared<const std::string>(message)) {}

std::string Error::field() const {
  std::string first;
  SpellOptions(*message_, [&](std::string_view name, std::string_view) {
    if (first.empty()) first = name;
    return "";
  });
  return first;
}

std::string Error::Spelt(const OptionSpeller& spell) const { return SpellOptions(*message_, spell); }

std::string Quoted(std::string_view text, size_t longest) {
  std::string out = "\"";
  for (const char c : text.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte >= 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  out += text.size() > longest ? "\"…" : "\"";
  return out;
}

void CheckFailed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "phsa: bug at %s:%d: %s does not hold\n", file, line, condition);
  std::abort();
}

}  // namespace phsa
