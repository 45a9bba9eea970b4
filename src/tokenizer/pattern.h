// A regular expression of a tokenizer.json, which is written for Oniguruma, run by PCRE2 with the same matches.
#ifndef PHSA_TOKENIZER_PATTERN_H_
#define PHSA_TOKENIZER_PATTERN_H_

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/text_range.h"

namespace phsa {

// Oniguruma's syntax in PCRE2's. What we do not know to mean the same is refused by name. `where` begins the message.
std::string TranslatePattern(std::string_view pattern, const std::string& where);

class Pattern {
 public:
  // What one thread at a time needs for matching; any pattern may use it.
  class Scratch {
   public:
    // As after Restart(0).
    Scratch();
    ~Scratch();
    Scratch(Scratch&&) noexcept;
    Scratch& operator=(Scratch&&) noexcept;
    // A text of so many bytes begins: patterns from files may take a second of the processor's time for it, and five
    // more for each MiB. Ours take 0.05 s for one.
    void Restart(size_t text_bytes);

   private:
    friend class Pattern;
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };

  // `pattern` is Oniguruma's; `where` names the place in the file for messages. Those that pre_tokenization.h has are
  // known to take time in proportion to the text; all others are watched while they match, which takes 2.5 times as
  // long.
  Pattern(std::string_view pattern, const std::string& where);
  // The characters of a set (unicode_sets.h), one at a time.
  static Pattern OneOf(const std::string& set);
  ~Pattern();
  Pattern(Pattern&&) noexcept;
  Pattern& operator=(Pattern&&) noexcept;

  // Appends the matches in `text`, which must be UTF-8, from left to right, as Oniguruma's iterator gives them. Throws
  // phsa::Error where the pattern takes more steps, memory or time than any sane one would.
  void FindAll(std::string_view text, Scratch* scratch, std::vector<TextRange>* matches) const;

 private:
  struct Compiled;
  explicit Pattern(std::unique_ptr<const Compiled> compiled);
  std::unique_ptr<const Compiled> compiled_;
};

}  // namespace phsa

#endif  // PHSA_TOKENIZER_PATTERN_H_
