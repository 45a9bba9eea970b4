#include "base/errors.h"

#include <cstdio>
#include <cstdlib>

namespace phsa {

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
