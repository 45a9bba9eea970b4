// A vocabulary with a token for each byte.
#ifndef PHSA_TESTS_BYTE_VOCABULARY_H_
#define PHSA_TESTS_BYTE_VOCABULARY_H_

#include <cstdint>
#include <string>

#include "tokenizer/tokenizer.h"

namespace phsa {

// Each as GPT-2's vocabulary writes it; token types are to be added.
inline BpeVocabulary ByteVocabulary() {
  const auto utf8 = [](uint32_t code) -> std::string {
    if (code < 0x80) return std::string(1, static_cast<char>(code));
    return {static_cast<char>(0xc0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3f))};
  };
  BpeVocabulary vocabulary;
  vocabulary.model = "gpt2";
  vocabulary.pre = "qwen2";
  uint32_t next = 256;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    vocabulary.tokens.push_back(utf8(printable ? byte : next++));
  }
  return vocabulary;
}

}  // namespace phsa

#endif  // PHSA_TESTS_BYTE_VOCABULARY_H_
