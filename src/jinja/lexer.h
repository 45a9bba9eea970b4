// A template's text as tokens, with the white space that Jinja drops around tags already gone (trim_blocks and
// lstrip_blocks, as transformers sets them).
#ifndef PHSA_JINJA_LEXER_H_
#define PHSA_JINJA_LEXER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace phsa::jinja {

struct Token {
  enum class Kind : uint8_t {
    kText,  // outside of tags
    kPrintBegin,
    kPrintEnd,
    kTagBegin,
    kTagEnd,
    kName,
    kString,
    kInteger,
    kFloat,
    kOperator,
    kEnd,
  };
  Kind kind;
  std::string text;  // of a string: what it says
  int32_t line;
};

// Throws Fault; `line` is then where. The last token is kEnd.
std::vector<Token> Tokenise(std::string_view source, int32_t* line);

}  // namespace phsa::jinja

#endif  // PHSA_JINJA_LEXER_H_
