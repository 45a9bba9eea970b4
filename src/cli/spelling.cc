#include "cli/spelling.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/option.h"

namespace phsa::cli {
namespace {

// Flags that are not made of their option's name: llama.cpp's, mostly. tests/e2e/test_entrances.py holds each option
// that a message names to a flag that there is.
constexpr struct {
  std::string_view name, flag;
} kFlags[] = {
    {".top_k", "-K"},          {"context", "-c"}, {"max_tokens", "-n"}, {"repetition_penalty", "--repeat-penalty"},
    {"temperature", "--temp"},
};

}  // namespace

std::string FlagOf(std::string_view name, std::string_view value) {
  std::string flag;
  const auto* const own = std::ranges::find(kFlags, name, [](const auto& one) { return one.name; });
  if (own != std::end(kFlags)) {
    flag = own->flag;
  } else {
    flag = fmt::format("--{}", name.starts_with(kSettingSign) ? name.substr(1) : name);
    std::ranges::replace(flag, '_', '-');
  }
  return value.empty() ? flag : fmt::format("{} {}", flag, value);
}

std::string WithFlags(std::string_view text) { return SpellOptions(text, FlagOf); }

}  // namespace phsa::cli
