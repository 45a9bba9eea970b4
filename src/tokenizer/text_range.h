// A stretch of a text, in bytes.
#ifndef PHSA_TOKENIZER_TEXT_RANGE_H_
#define PHSA_TOKENIZER_TEXT_RANGE_H_

#include <cstddef>

namespace phsa {

struct TextRange {
  size_t begin, end;
};

}  // namespace phsa

#endif  // PHSA_TOKENIZER_TEXT_RANGE_H_
