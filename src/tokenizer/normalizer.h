// Unicode normalisation form C as the Python package tokenizers does it.
#ifndef PHSA_TOKENIZER_NORMALIZER_H_
#define PHSA_TOKENIZER_NORMALIZER_H_

#include <string>
#include <string_view>

namespace phsa {

// The text in NFC. Text that needs no change, which is nearly all, is only looked at: then `storage` stays as it is and
// the result is `text`.
std::string_view NormalizeNfc(std::string_view text, std::string* storage);

}  // namespace phsa

#endif  // PHSA_TOKENIZER_NORMALIZER_H_
