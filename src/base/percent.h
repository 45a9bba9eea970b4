// "%20" and the like in links and in the paths of requests.
#ifndef PHSA_BASE_PERCENT_H_
#define PHSA_BASE_PERCENT_H_

#include <string>
#include <string_view>

namespace phsa {

// What is no byte in hexadecimal digits behind a % stays as it is.
inline std::string WithoutPercents(std::string_view text) {
  const auto digit = [&](size_t at) {
    const char c = at < text.size() ? text[at] : ' ';
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
  };
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && digit(i + 1) >= 0 && digit(i + 2) >= 0) {
      out += static_cast<char>(digit(i + 1) * 16 + digit(i + 2));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace phsa

#endif  // PHSA_BASE_PERCENT_H_
