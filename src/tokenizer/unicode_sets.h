// Sets of characters as tokenizers' regular expressions see them (Oniguruma with Unicode 16), written for the inside
// of a PCRE2 class. PCRE2 of Debian 12 has Unicode 14: what came later is added here by code point.
#ifndef PHSA_TOKENIZER_UNICODE_SETS_H_
#define PHSA_TOKENIZER_UNICODE_SETS_H_

#include <optional>
#include <string>
#include <string_view>

namespace phsa {

// \p{name}: a general category ("L", "Lu", …) or one of a few scripts ("Han"); nothing where we do not know the name.
std::optional<std::string> UnicodeProperty(std::string_view name);
inline constexpr std::string_view kUnicodePropertyNames =
    "L, Lu, Ll, Lt, Lm, Lo, M, N, Nd, Nl, No, P, Pc, Pd, Ps, Pe, Pi, Pf, Po, S, Sm, Sc, Sk, So, Z, Zs, Zl, Zp, Han, "
    "Hiragana, Katakana";

// \s, its complement, and \w. PCRE2's \s has U+180E too, and its \w has no marks.
inline constexpr std::string_view kWhiteSpace =
    R"(\x09-\x0d\x20\x85\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
inline constexpr std::string_view kNotWhiteSpace =
    R"(\x00-\x08\x0e-\x1f\x21-\x84\x86-\x9f\xa1-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027}\x{202a}-\x{202e})"
    R"(\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";
std::string WordCharacters();
// Outside of a class, Oniguruma's \w has the six numbers of Latin-1 that are not digits, too.
inline constexpr std::string_view kWordOutsideClass = R"(\xb2\xb3\xb9\xbc-\xbe)";

// What the pre-tokenizer Digits and the flag single_word of added tokens ask: these come from the Rust language, whose
// Unicode is a little newer.
std::string RustNumeric();
std::string RustWordCharacters();

}  // namespace phsa

#endif  // PHSA_TOKENIZER_UNICODE_SETS_H_
