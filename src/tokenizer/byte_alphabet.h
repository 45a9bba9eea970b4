// GPT-2's way to write any bytes as printable text, in which byte-level vocabularies are stored: printable Latin-1
// characters stand for themselves, the other 68 bytes for U+0100 and the code points after it, in order.
#ifndef PHSA_TOKENIZER_BYTE_ALPHABET_H_
#define PHSA_TOKENIZER_BYTE_ALPHABET_H_

#include <optional>
#include <string>
#include <string_view>

namespace phsa {

// The bytes that `printable` stands for; nothing where a character of it is not of the alphabet.
std::optional<std::string> BytesOfAlphabet(std::string_view printable);

}  // namespace phsa

#endif  // PHSA_TOKENIZER_BYTE_ALPHABET_H_
