// What a Jinja template prints and sets, read without running it: enough to tell whether it is one that we know.
#ifndef PHSA_TOKENIZER_JINJA_TEXT_H_
#define PHSA_TOKENIZER_JINJA_TEXT_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace phsa {

// Expressions are brought into one form, so that two ways to write the same are equal: no spaces, x['y'] and not x.y,
// strings in single quotes with \n for a line end, and neighbouring strings 'a'+'b' joined.
struct JinjaText {
  std::vector<std::string> printed;     // {{ expression }}
  std::vector<std::string> set;         // {% set name = expression %}, as name=expression
  std::vector<std::string> statements;  // the other {% … %}
  bool text_outside = false;            // something is printed that is in no tag
};

// Nothing where the template cannot be read.
std::optional<JinjaText> ReadJinja(std::string_view text);

// The text of an expression that is one string: "'a\\n'" to "a\n".
std::optional<std::string> StringLiteral(std::string_view expression);

}  // namespace phsa

#endif  // PHSA_TOKENIZER_JINJA_TEXT_H_
