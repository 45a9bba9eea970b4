// The punctuation set P: which token ids count as punctuation, and one flag byte per token.
#ifndef PHSA_PUNCTUATION_H_
#define PHSA_PUNCTUATION_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "phsa/c.h"

namespace phsa {

// Built once from a vocabulary, never from text.
class PunctuationTable {
 public:
  // `set`: en, zh, en+zh, sentence, pure, none, ids:11,13, or a file of ids or strings (one a line; docs/settings.md).
  // tokens[i]: the raw bytes of token i. special: empty, or non-zero where token i is a special token.
  PHSA_API PunctuationTable(std::string_view set, std::span<const std::string> tokens,
                            std::span<const uint8_t> special = {});

  // The flags of a sequence of token ids. Ids outside the vocabulary throw phsa::Error.
  PHSA_API void Flags(std::span<const int32_t> ids, uint8_t* flags) const;
  PHSA_API std::vector<int32_t> Ids() const;  // ascending
  const std::vector<uint8_t>& table() const { return table_; }

 private:
  std::vector<uint8_t> table_;
};

PHSA_API std::vector<std::string> PunctuationSetNames();
// Whether a token's bytes belong to a named set. Bytes that are not valid UTF-8 never do.
PHSA_API bool InPunctuationSet(std::string_view set, std::string_view token);

}  // namespace phsa

#endif  // PHSA_PUNCTUATION_H_
