// Strict UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
#ifndef PHSA_BASE_UTF8_H_
#define PHSA_BASE_UTF8_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace phsa {

// The code points of `text`, or nothing where a byte of it is not valid UTF-8.
inline std::optional<std::u32string> DecodeUtf8(std::string_view text) {
  std::u32string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<uint8_t>(text[i]);
    const int size = lead < 0x80 ? 1 : lead < 0xc0 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf8 ? 4 : 0;
    if (size == 0 || text.size() - i < static_cast<size_t>(size)) return std::nullopt;
    char32_t code = size == 1 ? lead : lead & (0x7fu >> size);
    for (int k = 1; k < size; ++k) {
      const auto next = static_cast<uint8_t>(text[i + static_cast<size_t>(k)]);
      if ((next & 0xc0) != 0x80) return std::nullopt;
      code = (code << 6) | (next & 0x3fu);
    }
    constexpr char32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
    if (code < kSmallest[size] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return std::nullopt;
    out += code;
    i += static_cast<size_t>(size);
  }
  return out;
}

inline bool IsUtf8(std::string_view text) { return DecodeUtf8(text).has_value(); }

}  // namespace phsa

#endif  // PHSA_BASE_UTF8_H_
