#include "jinja/lexer.h"

#include <algorithm>
#include <array>

#include "base/errors.h"
#include "base/utf8.h"
#include "jinja/value.h"

namespace phsa::jinja {
namespace {

bool IsNameStart(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || static_cast<uint8_t>(c) >= 0x80;
}
bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsAsciiSpace(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Where the white space at the end of `text` begins.
size_t TrimmedEnd(std::string_view text) {
  size_t end = 0;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = ScanUtf8(text, at);
    at += step.size;
    if (step.kind != Utf8Step::Kind::kCharacter || !IsSpace(step.code)) end = at;
  }
  return end;
}

void AppendCode(uint32_t code, std::string* out) {
  if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) Fail("a text has an escape that is no character");
  const auto byte = [&](uint32_t bits) { *out += static_cast<char>(bits); };
  if (code < 0x80) {
    byte(code);
  } else if (code < 0x800) {
    byte(0xc0 | code >> 6);
    byte(0x80 | (code & 0x3f));
  } else {
    if (code < 0x10000) {
      byte(0xe0 | code >> 12);
    } else {
      byte(0xf0 | code >> 18);
      byte(0x80 | (code >> 12 & 0x3f));
    }
    byte(0x80 | (code >> 6 & 0x3f));
    byte(0x80 | (code & 0x3f));
  }
}

int HexDigit(char c) {
  return IsDigit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

// What stands between the quotes, as Python reads it.
std::string Unescaped(std::string_view raw) {
  std::string out;
  for (size_t i = 0; i < raw.size(); ++i) {
    if (raw[i] != '\\' || i + 1 == raw.size()) {
      out += raw[i];
      continue;
    }
    const char c = raw[++i];
    const auto hex = [&](size_t digits) {
      uint32_t code = 0;
      for (size_t k = 1; k <= digits; ++k) {
        const int digit = i + k < raw.size() ? HexDigit(raw[i + k]) : -1;
        if (digit < 0) Fail("a text has an escape \\{} that is cut short", c);
        code = code * 16 + static_cast<uint32_t>(digit);
      }
      i += digits;
      AppendCode(code, &out);
    };
    switch (c) {
      case 'n': out += '\n'; break;
      case 't': out += '\t'; break;
      case 'r': out += '\r'; break;
      case 'a': out += '\a'; break;
      case 'b': out += '\b'; break;
      case 'f': out += '\f'; break;
      case 'v': out += '\v'; break;
      case '\\':
      case '\'':
      case '"': out += c; break;
      case '\n': break;
      case 'x': hex(2); break;
      case 'u': hex(4); break;
      case 'U': hex(8); break;
      default:
        if (c >= '0' && c <= '7') {
          uint32_t code = 0;
          size_t digits = 0;
          for (; digits < 3 && i + digits < raw.size() && raw[i + digits] >= '0' && raw[i + digits] <= '7'; ++digits) {
            code = code * 8 + static_cast<uint32_t>(raw[i + digits] - '0');
          }
          i += digits - 1;
          AppendCode(code, &out);
        } else {
          out += '\\';
          out += c;
        }
    }
  }
  return out;
}

class Lexer {
 public:
  Lexer(std::string_view source, int32_t* line) : source_(source), line_(*line) {}

  std::vector<Token> Run() {
    while (at_ < source_.size()) Outside();
    Put(Token::Kind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  void Put(Token::Kind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }
  void Advance(size_t to) {
    line_ += static_cast<int32_t>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                             source_.begin() + static_cast<std::ptrdiff_t>(to), '\n'));
    at_ = to;
  }
  bool At(std::string_view text) const { return source_.substr(at_).starts_with(text); }
  // Over what \s* matches.
  void SkipSpace() {
    size_t to = at_;
    while (to < source_.size()) {
      const Utf8Step step = ScanUtf8(source_, to);
      if (step.kind != Utf8Step::Kind::kCharacter || !IsSpace(step.code)) break;
      to += step.size;
    }
    Advance(to);
  }
  // Behind a tag or a comment, with `sign` before its end: what goes with it.
  void EndTag(char sign) {
    if (sign == '-') {
      SkipSpace();
    } else if (sign != '+' && At("\n")) {
      Advance(at_ + 1);
    }
    at_line_start_ = at_ > 0 && source_[at_ - 1] == '\n';
  }

  // The text before a tag that begins with `sign`, without what the tag takes from it.
  void PutText(size_t begin, size_t end, char sign, bool is_print) {
    std::string_view text = source_.substr(begin, end - begin);
    if (sign == '-') {
      text = text.substr(0, TrimmedEnd(text));
    } else if (sign != '+' && !is_print) {
      const size_t newline = text.rfind('\n');
      const size_t line = newline == std::string_view::npos ? 0 : newline + 1;
      if ((line > 0 || at_line_start_) && text.find_first_not_of(" \t", line) == std::string_view::npos) {
        text = text.substr(0, line);
      }
    }
    if (!text.empty()) Put(Token::Kind::kText, std::string(text));
  }

  void Outside() {
    const size_t begin = at_;
    size_t open = begin;
    do {
      open = source_.find('{', open);
      if (open == std::string_view::npos || open + 1 == source_.size()) {
        Put(Token::Kind::kText, std::string(source_.substr(begin)));
        Advance(source_.size());
        return;
      }
    } while (source_[open + 1] != '{' && source_[open + 1] != '%' && source_[open + 1] != '#' && ++open > 0);
    const char kind = source_[open + 1];
    const char sign = open + 2 < source_.size() ? source_[open + 2] : ' ';
    const bool has_sign = sign == '-' || sign == '+';
    PutText(begin, open, has_sign ? sign : ' ', kind == '{');
    Advance(open + (has_sign ? 3 : 2));
    if (kind == '#') {
      Comment();
    } else if (kind == '{') {
      Put(Token::Kind::kPrintBegin, "");
      Inside(Token::Kind::kPrintEnd);
    } else if (!Raw()) {
      Put(Token::Kind::kTagBegin, "");
      Inside(Token::Kind::kTagEnd);
    }
  }

  void Comment() {
    const size_t end = source_.find("#}", at_);
    if (end == std::string_view::npos) Fail("a comment has no end");
    const char sign = end > at_ ? source_[end - 1] : ' ';
    Advance(end + 2);
    EndTag(sign);
  }

  // {% raw %} … {% endraw %}, where the tag is one.
  bool Raw() {
    size_t at = at_;
    while (at < source_.size() && IsAsciiSpace(source_[at])) ++at;
    if (!source_.substr(at).starts_with("raw")) return false;
    at += 3;
    while (at < source_.size() && IsAsciiSpace(source_[at])) ++at;
    const bool strip = source_.substr(at).starts_with("-%}");
    if (!strip && !source_.substr(at).starts_with("%}")) return false;
    Advance(at + (strip ? 3 : 2));
    if (strip) SkipSpace();
    at_line_start_ = source_[at_ - 1] == '\n';
    for (size_t open = at_; (open = source_.find("{%", open)) != std::string_view::npos; open += 2) {
      size_t name = open + 2;
      const char sign = name < source_.size() && (source_[name] == '-' || source_[name] == '+') ? source_[name] : ' ';
      if (sign != ' ') ++name;
      while (name < source_.size() && IsAsciiSpace(source_[name])) ++name;
      if (!source_.substr(name).starts_with("endraw")) continue;
      name += 6;
      while (name < source_.size() && IsAsciiSpace(source_[name])) ++name;
      const char end_sign =
          name < source_.size() && (source_[name] == '-' || source_[name] == '+') ? source_[name] : ' ';
      if (end_sign != ' ') ++name;
      if (!source_.substr(name).starts_with("%}")) continue;
      PutText(at_, open, sign, false);
      Advance(name + 2);
      EndTag(end_sign);
      return true;
    }
    Fail("{{% raw %}} has no end");
  }

  void Inside(Token::Kind end) {
    const std::string_view close = end == Token::Kind::kPrintEnd ? "}}" : "%}";
    std::string brackets;  // the closing ones that are to come
    for (;;) {
      SkipSpace();
      if (at_ >= source_.size()) Fail("a tag has no end");
      const char c = source_[at_];
      if (brackets.empty()) {
        const bool sign = c == '-' || (c == '+' && end == Token::Kind::kTagEnd);
        if (source_.substr(at_ + (sign ? 1 : 0)).starts_with(close)) {
          Put(end, "");
          Advance(at_ + close.size() + (sign ? 1 : 0));
          if (end == Token::Kind::kTagEnd) {
            EndTag(sign ? c : ' ');
          } else {
            if (sign) SkipSpace();
            at_line_start_ = source_[at_ - 1] == '\n';
          }
          return;
        }
      }
      if (IsNameStart(c)) {
        size_t to = at_;
        while (to < source_.size() && (IsNameStart(source_[to]) || IsDigit(source_[to]))) ++to;
        Put(Token::Kind::kName, std::string(source_.substr(at_, to - at_)));
        Advance(to);
      } else if (IsDigit(c)) {
        Number();
      } else if (c == '\'' || c == '"') {
        Quoted(c);
      } else {
        Operator(&brackets);
      }
    }
  }

  void Number() {
    std::string text;
    size_t to = at_;
    const auto digits = [&] {
      while (to < source_.size() && (IsDigit(source_[to]) || source_[to] == '_')) {
        if (source_[to] != '_') text += source_[to];
        ++to;
      }
    };
    digits();
    bool is_float = false;
    if (to + 1 < source_.size() && source_[to] == '.' && IsDigit(source_[to + 1])) {
      is_float = true;
      text += source_[to++];
      digits();
    }
    if (to < source_.size() && (source_[to] == 'e' || source_[to] == 'E')) {
      size_t exponent = to + 1;
      if (exponent < source_.size() && (source_[exponent] == '-' || source_[exponent] == '+')) ++exponent;
      if (exponent < source_.size() && IsDigit(source_[exponent])) {
        is_float = true;
        text += source_.substr(to, exponent - to);
        to = exponent;
        digits();
      }
    }
    Put(is_float ? Token::Kind::kFloat : Token::Kind::kInteger, std::move(text));
    Advance(to);
  }

  void Quoted(char quote) {
    size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) Fail("a text in quotes has no end");
    Put(Token::Kind::kString, Unescaped(source_.substr(at_ + 1, end - at_ - 1)));
    Advance(end + 1);
  }

  void Operator(std::string* brackets) {
    static constexpr std::array<std::string_view, 27> kOperators = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                                                    "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                                                    ">",  "<",  "=",  ".",  ":",  "|",  ",", ";", "!"};
    for (const std::string_view one : kOperators) {
      if (!At(one)) continue;
      const char c = one.front();
      if (c == '(' || c == '[' || c == '{') {
        *brackets += c == '(' ? ')' : c == '[' ? ']' : '}';
      } else if (c == ')' || c == ']' || c == '}') {
        if (brackets->empty() || brackets->back() != c) Fail("a bracket {} closes nothing", c);
        brackets->pop_back();
      }
      Put(Token::Kind::kOperator, std::string(one));
      Advance(at_ + one.size());
      return;
    }
    Fail("there is {} in a tag", phsa::Quoted(source_.substr(at_, 1)));
  }

  const std::string_view source_;
  int32_t& line_;
  size_t at_ = 0;
  bool at_line_start_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> Tokenise(std::string_view source, int32_t* line) {
  *line = 1;
  return Lexer(source, line).Run();
}

}  // namespace phsa::jinja
