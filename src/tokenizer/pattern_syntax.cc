// Oniguruma's Ruby syntax, as far as tokenizers use it, in PCRE2's. The two differ in what the character types mean,
// in the Unicode version, in sets inside sets and in a few quantifiers.
#include <algorithm>
#include <cctype>
#include <optional>

#include "base/errors.h"
#include "tokenizer/pattern.h"
#include "tokenizer/unicode_sets.h"
#include "tokenizer/utf8_scan.h"

namespace phsa {
namespace {

class Translator {
 public:
  Translator(std::string_view pattern, const std::string& where) : pattern_(pattern), where_(where) {}

  std::string Run() {
    if (const size_t bad = FirstInvalidUtf8(pattern_); bad < pattern_.size()) {
      ThrowInvalid("{}: the pattern {} is not UTF-8 at byte {}", where_, Quoted(pattern_), bad);
    }
    while (!AtEnd()) Item();
    // X+… that is searched for in a long run of X without success would be tried from each of its characters, each time
    // to the end of the run. Where it matches from inside a run it also matches one character earlier: so only the
    // run's first character is a start. (\s+$ of the DeepSeek tokenizers takes hours on a megabyte of spaces
    // otherwise.)
    if (!first_set_.empty() && first_repeated_ && !top_level_alternatives_) {
      return "(?:\\G|(?<!" + first_set_ + "))" + out_;
    }
    return out_;
  }

 private:
  bool AtEnd() const { return at_ == pattern_.size(); }
  bool Next(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }
  bool Take(std::string_view text) {
    if (!Next(text)) return false;
    at_ += text.size();
    return true;
  }

  [[noreturn]] void Refuse(std::string_view what) const {
    ThrowInvalid("{}: the pattern {} has {} at byte {}, which is not supported", where_, Quoted(pattern_), what, at_);
  }

  void Copy(size_t bytes) {
    out_ += pattern_.substr(at_, bytes);
    at_ += bytes;
  }

  void Item() {
    const bool first = at_ == 0;
    switch (pattern_[at_]) {
      case '\\':
        if (const std::optional<std::string> set = TakeSetEscape()) {
          out_ += *set;
          if (first) NoteFirstSet(*set);
        } else {
          out_ += TakeCharacterEscape();
        }
        return;
      case '[': {
        const std::string set = TakeClass();
        out_ += set;
        if (first) NoteFirstSet(set);
        return;
      }
      case '(': Group(); return;
      case ')': --depth_; break;
      case '|': top_level_alternatives_ |= depth_ == 0; break;
      case '{': Interval(); return;
      default: break;
    }
    Copy(1);
  }

  void NoteFirstSet(const std::string& set) {
    first_set_ = set;
    first_repeated_ = Next("+");
  }

  void Group() {
    constexpr std::string_view kKnown[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"};
    ++depth_;
    if (Next("(*")) Refuse("\"(*\"");  // where PCRE2 takes orders
    if (!Next("(?")) {
      Copy(1);
      return;
    }
    for (const std::string_view known : kKnown) {
      if (!Next(known)) continue;
      // What (?i: does to sets differs; tokenizers put letters into it, for which both agree.
      if (known == "(?i:") RefuseSetsInGroup();
      Copy(known.size());
      return;
    }
    Refuse(Quoted(pattern_.substr(at_, 4)));
  }

  void RefuseSetsInGroup() {
    int depth = 0;
    for (size_t i = at_; i < pattern_.size(); ++i) {
      if (pattern_[i] == '\\') {
        if (i + 1 < pattern_.size() && std::string_view("pPwWsSdD").find(pattern_[i + 1]) != std::string_view::npos) {
          Refuse("a set inside (?i:");
        }
        ++i;
      } else if (pattern_[i] == '(') {
        ++depth;
      } else if (pattern_[i] == ')' && --depth == 0) {
        return;
      }
    }
  }

  // {n}, {n,}, {n,m}, {,m}, or a brace that means itself.
  void Interval() {
    size_t i = at_ + 1;
    const auto digits = [&] {
      const size_t begin = i;
      while (i < pattern_.size() && std::isdigit(static_cast<unsigned char>(pattern_[i])) != 0) ++i;
      return pattern_.substr(begin, i - begin);
    };
    const std::string_view low = digits();
    const bool comma = i < pattern_.size() && pattern_[i] == ',';
    if (comma) ++i;
    const std::string_view high = comma ? digits() : low;
    if (i == pattern_.size() || pattern_[i] != '}' || (low.empty() && high.empty())) {
      out_ += '\\';
      Copy(1);
      return;
    }
    at_ = i + 1;
    // In Ruby's syntax {n,m}+ repeats the whole again, and {n}? makes it optional.
    if (Next("+") || (!comma && Next("?"))) Refuse("a quantifier after a quantifier");
    out_ += '{';
    out_ += low.empty() ? "0" : low;
    if (comma) out_ += ',';
    if (comma) out_ += high;
    out_ += '}';
  }

  // \s, \p{L} and the like, as a class of PCRE2.
  std::optional<std::string> TakeSetEscape() {
    const char kind = at_ + 1 < pattern_.size() ? pattern_[at_ + 1] : '\0';
    const std::optional<std::string> set = SetOf(kind);
    if (!set) return std::nullopt;
    const bool negated = kind == 'P' || kind == 'S' || kind == 'D' || kind == 'W';
    const std::string_view more = kind == 'w' || kind == 'W' ? kWordOutsideClass : "";
    return fmt::format("{}{}{}]", negated ? "[^" : "[", *set, more);
  }

  // The set that \kind names or negates, for the inside of a class; reads it where there is one.
  std::optional<std::string> SetOf(char kind) {
    switch (kind) {
      case 's':
      case 'S': at_ += 2; return std::string(kWhiteSpace);
      case 'd':
      case 'D': at_ += 2; return *UnicodeProperty("Nd");
      case 'w':
      case 'W': at_ += 2; return WordCharacters();
      case 'p':
      case 'P': {
        const size_t close = pattern_.find('}', at_);
        if (!pattern_.substr(at_ + 2).starts_with("{") || close == std::string_view::npos) Refuse("\\p without {name}");
        const std::string_view name = pattern_.substr(at_ + 3, close - at_ - 3);
        std::optional<std::string> set = UnicodeProperty(name);
        if (!set) {
          ThrowInvalid("{}: the pattern {} asks for the property {}; known: {}", where_, Quoted(pattern_), Quoted(name),
                       kUnicodePropertyNames);
        }
        at_ = close + 1;
        return set;
      }
      default: return std::nullopt;
    }
  }

  // An escape that stands for one character.
  std::string TakeCharacterEscape() {
    if (at_ + 1 == pattern_.size()) Refuse("a backslash at its end");
    const auto kind = static_cast<unsigned char>(pattern_[at_ + 1]);
    if (kind >= 0x80) {
      ++at_;
      return "";  // the character follows and is copied as it is
    }
    if (kind == 'x' && pattern_.substr(at_ + 2).starts_with("{")) return TakeCode(3, 8, true);
    if (kind == 'x') return TakeCode(2, 2, false);
    if (kind == 'u') return TakeCode(2, 4, false);
    if (kind == 'v') {
      at_ += 2;
      return "\\x0b";
    }
    const bool letter = std::isalnum(kind) != 0;
    if (letter && std::string_view("rntfea").find(static_cast<char>(kind)) == std::string_view::npos) {
      Refuse(Quoted(pattern_.substr(at_, 2)));
    }
    at_ += 2;
    return {'\\', static_cast<char>(kind)};
  }

  // Hexadecimal digits from at_ + skip: exactly `most`, or in braces up to `most`.
  std::string TakeCode(size_t skip, size_t most, bool braces) {
    size_t end = at_ + skip;
    uint32_t code = 0;
    for (; end < pattern_.size() && end < at_ + skip + most; ++end) {
      const char digit = pattern_[end];
      if (std::isxdigit(static_cast<unsigned char>(digit)) == 0) break;
      code = code * 16 + static_cast<uint32_t>(digit <= '9' ? digit - '0' : (digit | 0x20) - 'a' + 10);
    }
    const size_t count = end - at_ - skip;
    const bool whole = braces ? count > 0 && pattern_.substr(end).starts_with("}") : count == most;
    // \x80 to \xff are bytes and not characters in Oniguruma.
    if (!whole || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) || (most == 2 && code >= 0x80)) {
      Refuse(Quoted(pattern_.substr(at_, 10)));
    }
    at_ = end + (braces ? 1 : 0);
    return fmt::format("\\x{{{:x}}}", code);
  }

  std::string TakeClass() {
    ++at_;
    const bool negated = Take("^");
    std::string sets, characters;
    ClassItems(&sets, &characters, 0);
    if (sets.empty() && characters.empty()) Refuse("an empty class");
    // The sets first: what follows them cannot be taken for the end of a range.
    return (negated ? "[^" : "[") + sets + characters + "]";
  }

  // Up to and with the closing bracket. A set inside a set adds its members.
  void ClassItems(std::string* sets, std::string* characters, int depth) {
    constexpr int kDeepest = 8;
    if (depth > kDeepest) Refuse("sets nested that deep");
    bool after_set = true;  // a minus at the start means itself, as it does after a set
    for (;;) {
      if (AtEnd()) Refuse("a class without its closing bracket");
      if (Take("]")) return;
      if (Next("&&")) Refuse("an intersection of sets");
      if (Next("[:") || Next("[^")) Refuse(Quoted(pattern_.substr(at_, 2)));
      if (Take("[")) {
        ClassItems(sets, characters, depth + 1);
        after_set = true;
        continue;
      }
      if (Take("-")) {
        const bool range = !after_set && !AtEnd() && !Next("]") && !Next("[") && !NextIsSetEscape();
        *characters += range ? "-" : "\\-";
        after_set = !range;
        continue;
      }
      if (Next("\\S")) {
        *sets += kNotWhiteSpace;
        at_ += 2;
        after_set = true;
        continue;
      }
      if (Next("\\P") || Next("\\D") || Next("\\W")) Refuse("a negated set inside a class");
      if (NextIsSetEscape()) {
        *sets += *SetOf(pattern_[at_ + 1]);
        after_set = true;
        continue;
      }
      if (Next("\\")) {
        *characters += TakeCharacterEscape();
        after_set = false;
        continue;
      }
      const Utf8Step step = ScanUtf8(pattern_, at_);
      *characters += pattern_.substr(at_, step.size);
      at_ += step.size;
      after_set = false;
    }
  }

  bool NextIsSetEscape() const {
    return Next("\\") && at_ + 1 < pattern_.size() &&
           std::string_view("sSdDwWpP").find(pattern_[at_ + 1]) != std::string_view::npos;
  }

  std::string_view pattern_;
  const std::string& where_;
  size_t at_ = 0;
  std::string out_;
  int depth_ = 0;
  bool top_level_alternatives_ = false;
  std::string first_set_;  // where the pattern begins with a set
  bool first_repeated_ = false;
};

}  // namespace

std::string TranslatePattern(std::string_view pattern, const std::string& where) {
  return Translator(pattern, where).Run();
}

}  // namespace phsa
