// Python's operations on texts; every byte stays of its origin.
#ifndef PHSA_JINJA_STRINGS_H_
#define PHSA_JINJA_STRINGS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "jinja/value.h"

namespace phsa::jinja {

enum class Side : uint8_t { kBoth, kLeft, kRight };
// `characters` null: white space.
Text Strip(const Text& text, const std::string* characters, Side side);
// `separator` null: white space; `most` < 0: as often as it is there.
std::vector<Value> Split(const Text& text, const std::string* separator, int64_t most, bool from_right, Meter& meter);
std::vector<Value> SplitLines(const Text& text, bool keep_ends, Meter& meter);
Text Replace(const Text& text, const std::string& old, const Text& with, int64_t most, Meter& meter);

enum class Case : uint8_t { kUpper, kLower, kCapitalised, kTitle };
Text WithCase(const Text& text, Case letters);
// Jinja's filter title, which counts other characters as the borders of words than str.title() does.
Text JinjaTitle(const Text& text);

enum class CharacterClass : uint8_t { kDigit, kAlpha, kAlphaNumeric, kSpace, kUpper, kLower };
bool IsAll(const std::string& text, CharacterClass characters);

}  // namespace phsa::jinja

#endif  // PHSA_JINJA_STRINGS_H_
