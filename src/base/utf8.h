// Strict UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
#ifndef PHSA_BASE_UTF8_H_
#define PHSA_BASE_UTF8_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace phsa {

struct Utf8Step {
  enum class Kind : uint8_t {
    kCharacter,
    kInvalid,  // the longest start of a character that cannot go on: what one U+FFFD stands for
    kCut,      // the start of a character, and then the text ends
  };
  Kind kind;
  uint8_t size;   // bytes, at least 1
  char32_t code;  // of a character
};

// What is at text[at]; at < text.size().
inline Utf8Step ScanUtf8(std::string_view text, size_t at) {
  using Kind = Utf8Step::Kind;
  const auto lead = static_cast<uint8_t>(text[at]);
  if (lead < 0x80) return {Kind::kCharacter, 1, lead};
  if (lead < 0xc2 || lead > 0xf4) return {Kind::kInvalid, 1, 0};
  const uint8_t size = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // The second byte's range is narrower after these leads: no overlong forms, no surrogates, nothing above U+10FFFF.
  uint8_t low = 0x80, high = 0xbf;
  if (lead == 0xe0) low = 0xa0;
  if (lead == 0xed) high = 0x9f;
  if (lead == 0xf0) low = 0x90;
  if (lead == 0xf4) high = 0x8f;
  char32_t code = lead & (0x7fu >> size);
  for (uint8_t k = 1; k < size; ++k) {
    if (at + k == text.size()) return {Kind::kCut, k, 0};
    const auto byte = static_cast<uint8_t>(text[at + k]);
    if (byte < low || byte > high) return {Kind::kInvalid, k, 0};
    code = (code << 6) | (byte & 0x3fu);
    low = 0x80;
    high = 0xbf;
  }
  return {Kind::kCharacter, size, code};
}

// The code points of `text`, or nothing where a byte of it is not valid UTF-8.
inline std::optional<std::u32string> DecodeUtf8(std::string_view text) {
  std::u32string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = ScanUtf8(text, at);
    if (step.kind != Utf8Step::Kind::kCharacter) return std::nullopt;
    out += step.code;
    at += step.size;
  }
  return out;
}

inline bool IsUtf8(std::string_view text) { return DecodeUtf8(text).has_value(); }

}  // namespace phsa

#endif  // PHSA_BASE_UTF8_H_
