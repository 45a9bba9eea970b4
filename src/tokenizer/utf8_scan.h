// What text needs of UTF-8: checking, lossy decoding, streaming. All step through it with ScanUtf8.
#ifndef PHSA_TOKENIZER_UTF8_SCAN_H_
#define PHSA_TOKENIZER_UTF8_SCAN_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "base/utf8.h"

namespace phsa {

// How many bytes from `at` on are ASCII, found in one look: 8 or 0.
inline size_t AsciiAhead(std::string_view text, size_t at) {
  uint64_t eight = 0;
  if (text.size() - at < sizeof(eight)) return 0;
  std::memcpy(&eight, text.data() + at, sizeof(eight));
  return (eight & 0x8080808080808080u) == 0 ? sizeof(eight) : 0;
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
