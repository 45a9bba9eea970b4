// Base64, of which a tokenizer.json has its bytes.
#ifndef PHSA_TOKENIZER_BASE64_H_
#define PHSA_TOKENIZER_BASE64_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace phsa {

// The bytes of `text`, with or without the padding; nothing where it is not base64.
inline std::optional<std::string> DecodeBase64(std::string_view text) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  while (text.ends_with('=')) text.remove_suffix(1);
  if (text.size() % 4 == 1) return std::nullopt;
  std::string out;
  out.reserve(text.size() / 4 * 3 + 2);
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const size_t digit = kDigits.find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(digit);
    count += 6;
    if (count < 8) continue;
    count -= 8;
    out += static_cast<char>(bits >> count & 0xff);
  }
  return out;
}

}  // namespace phsa

#endif  // PHSA_TOKENIZER_BASE64_H_
