// Unicode's normal forms as the Python package tokenizers does them.
#ifndef PHSA_TOKENIZER_NORMALIZER_H_
#define PHSA_TOKENIZER_NORMALIZER_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace phsa {

enum class NormalForm : uint8_t { kNfc, kNfd, kNfkc, kNfkd };

// The text in a normal form. Text that needs no change is only looked at: then `storage` stays as it is and the result
// is `text`. In NFC that is nearly all text, in the other forms ASCII and Chinese.
std::string_view Normalize(NormalForm form, std::string_view text, std::string* storage);
inline std::string_view NormalizeNfc(std::string_view text, std::string* storage) {
  return Normalize(NormalForm::kNfc, text, storage);
}

}  // namespace phsa

#endif  // PHSA_TOKENIZER_NORMALIZER_H_
