// Regular expressions over the text of a JSON string: what ECMAScript and JSON Schema have of them that an automaton
// can do.
#include <algorithm>
#include <memory>

#include "base/errors.h"
#include "base/utf8.h"
#include "grammar/fragments.h"

namespace phsa {
namespace {

constexpr size_t kMaxPattern = 1000;
constexpr int kMaxDepth = 50;

struct Piece {
  enum class Kind : uint8_t { kClass, kSequence, kChoice, kRepeat } kind = Kind::kSequence;
  std::vector<CodeRange> ranges;
  std::vector<Piece> parts;
  int32_t min = 0, max = 0;
};

// One way to fulfil the whole.
struct Alternative {
  Piece piece;
  bool from_start = false, to_end = false;
};

const std::vector<CodeRange> kDigits = {{'0', '9'}};
const std::vector<CodeRange> kWord = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const std::vector<CodeRange> kSpaces = {{'\t', '\r'},     {' ', ' '},       {0xa0, 0xa0},     {0x1680, 0x1680},
                                        {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f},
                                        {0x3000, 0x3000}, {0xfeff, 0xfeff}};
const std::vector<CodeRange> kLineEnds = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

class Parser {
 public:
  Parser(std::u32string text, const std::string& place) : text_(std::move(text)), place_(place) {}

  std::vector<Alternative> Parse() {
    std::vector<Alternative> all;
    do {
      if (!all.empty()) ++at_;
      Alternative one;
      if (Here() == '^') {
        one.from_start = true;
        ++at_;
      }
      one.piece = ParseSequence(0);
      if (Here() == '$') {
        one.to_end = true;
        ++at_;
      }
      all.push_back(std::move(one));
    } while (Here() == '|');
    if (at_ < text_.size()) {
      Refuse(Here() == ')' ? "a ) has no ("
                           : "^ and $ are supported at the ends of the pattern and of its alternatives only");
    }
    return all;
  }

 private:
  [[noreturn]] void Refuse(std::string_view what) const {
    ThrowInvalid("{}: the pattern is not supported at its character {}: {}", place_, at_ + 1, what);
  }
  char32_t Here() const { return at_ < text_.size() ? text_[at_] : 0; }
  bool Has(std::u32string_view what) const { return std::u32string_view(text_).substr(at_).starts_with(what); }

  Piece ParseChoice(int depth) {
    Piece choice;
    choice.kind = Piece::Kind::kChoice;
    choice.parts.push_back(ParseSequence(depth));
    while (Here() == '|') {
      ++at_;
      choice.parts.push_back(ParseSequence(depth));
    }
    return choice;
  }

  Piece ParseSequence(int depth) {
    Piece sequence;
    while (at_ < text_.size() && Here() != '|' && Here() != ')' && Here() != '$') {
      Piece item = ParseItem(depth);
      ParseCount(item);
      sequence.parts.push_back(std::move(item));
    }
    return sequence;
  }

  void ParseCount(Piece& item) {
    int32_t min = 0, max = -1;
    const char32_t c = Here();
    if (c == '+') {
      min = 1;
    } else if (c == '?') {
      max = 1;
    } else if (c == '{') {
      const size_t begin = at_;
      ++at_;
      const std::optional<int32_t> low = ParseInt();
      std::optional<int32_t> high = low;
      if (Here() == ',') {
        ++at_;
        high = ParseInt();
        if (!high) high = -1;
      }
      if (!low || Here() != '}') {
        at_ = begin;
        Refuse("{ is written \\{ where it is no count");
      }
      min = *low;
      max = *high;
      if (max >= 0 && max < min) Refuse("a count has its smaller number last");
    } else if (c != '*') {
      return;
    }
    ++at_;
    if (Here() == '?') ++at_;  // as few as can be: the same texts
    if (Here() == '*' || Here() == '+' || Here() == '?') Refuse("two counts follow each other");
    Piece repeat;
    repeat.kind = Piece::Kind::kRepeat;
    repeat.min = min;
    repeat.max = max;
    repeat.parts.push_back(std::move(item));
    item = std::move(repeat);
  }

  std::optional<int32_t> ParseInt() {
    if (Here() < '0' || Here() > '9') return std::nullopt;
    int32_t value = 0;
    while (Here() >= '0' && Here() <= '9') {
      value = value * 10 + static_cast<int32_t>(Here() - '0');
      if (value > Builder::kMaxRepeat) Refuse(fmt::format("a count is above {}", Builder::kMaxRepeat));
      ++at_;
    }
    return value;
  }

  static Piece Class(std::vector<CodeRange> ranges) {
    Piece piece;
    piece.kind = Piece::Kind::kClass;
    piece.ranges = std::move(ranges);
    return piece;
  }

  Piece ParseItem(int depth) {
    const char32_t c = Here();
    if (c == '(') {
      if (depth >= kMaxDepth) Refuse(fmt::format("groups are nested deeper than {} levels", kMaxDepth));
      ++at_;
      if (Has(U"?:")) {
        at_ += 2;
      } else if (Has(U"?<") && !Has(U"?<=") && !Has(U"?<!")) {
        while (at_ < text_.size() && Here() != '>') ++at_;
        ++at_;
      } else if (Here() == '?') {
        Refuse("groups that look ahead or behind, or set options");
      }
      Piece group = ParseChoice(depth + 1);
      if (Here() != ')') Refuse(Here() == '$' ? "$ within a group" : ") is missing");
      ++at_;
      return group;
    }
    if (c == '[') return Class(ParseClass());
    if (c == '.') {
      ++at_;
      return Class(Complement(kLineEnds));
    }
    if (c == '^') Refuse("^ within the pattern");
    if (c == '*' || c == '+' || c == '?' || c == '{') Refuse("a count has nothing before it");
    if (c == '\\') return Class(ParseEscape(false));
    ++at_;
    return Class({{c, c}});
  }

  std::vector<CodeRange> ParseClass() {
    ++at_;
    const bool negated = Here() == '^';
    if (negated) ++at_;
    std::vector<CodeRange> ranges;
    while (Here() != ']') {
      if (at_ >= text_.size()) Refuse("] is missing");
      std::vector<CodeRange> one = ParseClassItem();
      if (Here() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        const std::vector<CodeRange> other = ParseClassItem();
        const auto single = [](const auto& list) { return list.size() == 1 && list[0].low == list[0].high; };
        if (!single(one) || !single(other) || other[0].low < one[0].low) Refuse("a range in [ ] is none");
        one[0].high = other[0].high;
      }
      ranges.insert(ranges.end(), one.begin(), one.end());
    }
    ++at_;
    ranges = Normalized(std::move(ranges));
    return negated ? Complement(ranges) : ranges;
  }

  std::vector<CodeRange> ParseClassItem() {
    if (Here() == '\\') return ParseEscape(true);
    const char32_t c = Here();
    ++at_;
    return {{c, c}};
  }

  std::vector<CodeRange> ParseEscape(bool in_class) {
    ++at_;
    if (at_ >= text_.size()) Refuse("it ends with \\");
    const char32_t c = Here();
    ++at_;
    const auto one = [](char32_t code) { return std::vector<CodeRange>{{code, code}}; };
    switch (c) {
      case 'd': return kDigits;
      case 'D': return Complement(kDigits);
      case 'w': return kWord;
      case 'W': return Complement(kWord);
      case 's': return kSpaces;
      case 'S': return Complement(kSpaces);
      case 't': return one('\t');
      case 'n': return one('\n');
      case 'r': return one('\r');
      case 'f': return one('\f');
      case 'v': return one('\v');
      case 'x': return one(ParseHex(2));
      case 'u': return one(ParseHex(4));
      default: break;
    }
    if (c == 'b' && in_class) return one('\b');
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (letter) {
      --at_;
      Refuse("this escape (known are \\d \\w \\s, their capitals, \\t \\n \\r \\f \\v \\xHH \\uHHHH, and signs)");
    }
    return one(c);
  }

  char32_t ParseHex(int digits) {
    char32_t code = 0;
    for (int i = 0; i < digits; ++i, ++at_) {
      const char32_t c = Here();
      const char32_t value = c >= '0' && c <= '9'   ? c - '0'
                             : c >= 'a' && c <= 'f' ? c - 'a' + 10
                             : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                    : 16;
      if (value == 16) Refuse(fmt::format("{} hexadecimal digits are expected", digits));
      code = code * 16 + value;
    }
    if (code >= 0xd800 && code <= 0xdfff) Refuse("half of a surrogate pair");
    return code;
  }

  std::u32string text_;
  const std::string& place_;
  size_t at_ = 0;
};

int32_t Build(Builder& builder, int32_t from, const Piece& piece) {
  switch (piece.kind) {
    case Piece::Kind::kClass: return AddJsonClass(builder, from, piece.ranges);
    case Piece::Kind::kSequence:
      for (const Piece& part : piece.parts) from = Build(builder, from, part);
      return from;
    case Piece::Kind::kChoice: {
      const int32_t end = builder.State();
      for (const Piece& part : piece.parts) {
        const int32_t branch = builder.State();
        builder.Empty(from, branch);
        builder.Empty(Build(builder, branch, part), end);
      }
      return end;
    }
    case Piece::Kind::kRepeat:
      return builder.Repeat(from, piece.min, piece.max,
                            [&](int32_t at) { return Build(builder, at, piece.parts.front()); });
  }
  return from;
}

}  // namespace

int32_t AddPattern(Builder& builder, int32_t from, std::string_view pattern, const std::string& place) {
  std::optional<std::u32string> text = DecodeUtf8(pattern);
  if (!text) ThrowInvalid("{}: the pattern is not UTF-8", place);
  if (text->size() > kMaxPattern) {
    ThrowInvalid("{}: the pattern has {} characters; allowed: {}", place, text->size(), kMaxPattern);
  }
  const std::vector<Alternative> alternatives = Parser(std::move(*text), place).Parse();
  const auto anything = [&](int32_t at) {
    return builder.Repeat(at, 0, -1, [&](int32_t state) { return AddJsonCharacter(builder, state); });
  };
  const int32_t end = builder.State();
  for (const Alternative& one : alternatives) {
    int32_t at = builder.State();
    builder.Empty(from, at);
    if (!one.from_start) at = anything(at);
    at = Build(builder, at, one.piece);
    if (!one.to_end) at = anything(at);
    builder.Empty(at, end);
  }
  return end;
}

}  // namespace phsa
