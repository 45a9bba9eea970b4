// UTF-8 a character at a time: checking, lossy decoding and streaming all step through text with ScanUtf8.
#ifndef PHSA_TOKENIZER_UTF8_SCAN_H_
#define PHSA_TOKENIZER_UTF8_SCAN_H_

#include <cstddef>
#include <cstdint>
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

// The offset of the first byte that is not UTF-8; text.size() where all of it is.
size_t FirstInvalidUtf8(std::string_view text);

// Appends `text` with each invalid sequence replaced by U+FFFD. A character cut at the end is left out and its bytes
// are counted in the result: the caller waits for the rest, or replaces it too.
size_t AppendValidUtf8(std::string_view text, std::string* out);

void AppendUtf8(char32_t code, std::string* out);

inline constexpr std::string_view kReplacementCharacter = "\xef\xbf\xbd";

}  // namespace phsa

#endif  // PHSA_TOKENIZER_UTF8_SCAN_H_
