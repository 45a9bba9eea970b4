#include "tokenizer/utf8_scan.h"

namespace phsa {

size_t FirstInvalidUtf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    if (const size_t ascii = AsciiAhead(text, at); ascii > 0) {
      at += ascii;
      continue;
    }
    const Utf8Step step = ScanUtf8(text, at);
    if (step.kind != Utf8Step::Kind::kCharacter) return at;
    at += step.size;
  }
  return text.size();
}

size_t AppendValidUtf8(std::string_view text, std::string* out) {
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = ScanUtf8(text, at);
    if (step.kind == Utf8Step::Kind::kCut) return step.size;
    out->append(step.kind == Utf8Step::Kind::kCharacter ? text.substr(at, step.size) : kReplacementCharacter);
    at += step.size;
  }
  return 0;
}

void AppendUtf8(char32_t code, std::string* out) {
  if (code < 0x80) {
    *out += static_cast<char>(code);
    return;
  }
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  constexpr unsigned kLead[] = {0, 0xc0, 0xe0, 0xf0};
  *out += static_cast<char>(kLead[more] | (code >> (6 * more)));
  for (int k = more - 1; k >= 0; --k) *out += static_cast<char>(0x80u | ((code >> (6 * k)) & 0x3fu));
}

}  // namespace phsa
