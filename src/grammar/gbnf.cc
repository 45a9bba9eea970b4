// GBNF, as llama.cpp reads it.
#include <algorithm>
#include <map>
#include <set>

#include "base/errors.h"
#include "base/utf8.h"
#include "grammar/fragments.h"

namespace phsa {
namespace {

constexpr size_t kMaxText = size_t{1} << 20, kMaxBuilt = size_t{1} << 26;
constexpr int kMaxDepth = 100;
constexpr size_t kMaxClassRanges = 10000;

class Parser {
 public:
  Parser(Builder& builder, std::string_view text) : builder_(builder), text_(text) {}

  int32_t Parse() {
    if (text_.size() > kMaxText) {
      ThrowInvalid("{}: has {} bytes; allowed: {}", builder_.place(), text_.size(), kMaxText);
    }
    if (!IsUtf8(text_)) ThrowInvalid("{}: is not UTF-8; convert it first", builder_.place());
    SkipSpace(true);
    while (at_ < text_.size()) ParseRule();
    for (const auto& [name, rule] : rules_) {
      if (!defined_.contains(name)) {
        ThrowInvalid("{}: the rule {} is used and never defined", builder_.place(), Quoted(name));
      }
    }
    const auto root = rules_.find("root");
    if (root == rules_.end()) {
      ThrowInvalid("{}: has no rule root; write one as `root ::= …`", builder_.place());
    }
    return root->second;
  }

 private:
  [[noreturn]] void Refuse(std::string_view what) const {
    const auto line = 1 + std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(at_), '\n');
    ThrowInvalid("{}: line {}: {}, before {}", builder_.place(), line, what,
                 at_ < text_.size() ? Quoted(text_.substr(at_), 20) : "the end");
  }
  bool Has(std::string_view what) const { return text_.substr(at_).starts_with(what); }
  char Here() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  // Blanks and comments; over the ends of lines where `lines`.
  void SkipSpace(bool lines) {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '#') {
        while (at_ < text_.size() && text_[at_] != '\n' && text_[at_] != '\r') ++at_;
      } else if (c == ' ' || c == '\t' || (lines && (c == '\n' || c == '\r'))) {
        ++at_;
      } else {
        return;
      }
    }
  }

  static bool IsNameCharacter(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
  }
  std::string ParseName() {
    const size_t begin = at_;
    while (IsNameCharacter(Here())) ++at_;
    if (at_ == begin) Refuse("a rule's name is expected (letters, digits, - and _)");
    return std::string(text_.substr(begin, at_ - begin));
  }
  int32_t RuleOf(const std::string& name) {
    const auto found = rules_.find(name);
    if (found != rules_.end()) return found->second;
    return rules_[name] = builder_.Rule(name);
  }

  void ParseRule() {
    const std::string name = ParseName();
    SkipSpace(false);
    if (!Has("::=")) Refuse("::= is expected behind a rule's name");
    at_ += 3;
    if (!defined_.insert(name).second) Refuse(fmt::format("the rule {} is defined twice", Quoted(name)));
    SkipSpace(true);
    const int32_t rule = RuleOf(name);
    builder_.Empty(ParseAlternatives(builder_.RuleStart(rule), false, 0), builder_.RuleEnd(rule));
    if (at_ < text_.size() && Here() != '\n' && Here() != '\r') Refuse("a rule ends with its line");
    SkipSpace(true);
  }

  int32_t ParseAlternatives(int32_t from, bool nested, int depth) {
    if (depth > kMaxDepth) Refuse(fmt::format("groups are nested deeper than {} levels", kMaxDepth));
    const int32_t end = builder_.State();
    builder_.Empty(ParseSequence(Branch(from), nested, depth), end);
    while (Here() == '|') {
      ++at_;
      SkipSpace(true);
      builder_.Empty(ParseSequence(Branch(from), nested, depth), end);
    }
    return end;
  }
  int32_t Branch(int32_t from) {
    const int32_t state = builder_.State();
    builder_.Empty(from, state);
    return state;
  }

  int32_t ParseSequence(int32_t from, bool nested, int depth) {
    while (at_ < text_.size()) {
      // What follows an item says how often it comes, so it is read before it is built: the parser goes over its text
      // once for each copy.
      const size_t begin = at_;
      const char c = Here();
      if (c != '"' && c != '[' && c != '(' && c != '.' && !IsNameCharacter(c)) break;
      SkipItem(depth);
      SkipSpace(nested);
      int32_t min = 1, max = 1;
      size_t end = at_;
      ParseCount(&min, &max, nested, &end);
      at_ = begin;
      const auto part = [&](int32_t state) {
        built_ += end - begin;
        if (built_ > kMaxBuilt) Refuse("repetitions within repetitions come to too much");
        at_ = begin;
        return ParseItem(state, depth);
      };
      from = min == 1 && max == 1 ? part(from) : builder_.Repeat(from, min, max, part);
      at_ = end;
      SkipSpace(nested);
    }
    return from;
  }

  // Behind an item. `end`: where the count ends.
  void ParseCount(int32_t* min, int32_t* max, bool nested, size_t* end) {
    int64_t low = 1, high = 1;
    bool counted = false;
    for (;;) {
      int64_t from = 0, to = -1;
      const char c = Here();
      if (c == '*') {
        ++at_;
      } else if (c == '+') {
        ++at_;
        from = 1;
      } else if (c == '?') {
        ++at_;
        to = 1;
      } else if (c == '{') {
        ++at_;
        SkipSpace(nested);
        const bool has_low = IsDigit(Here());
        from = has_low ? ParseInt() : 0;
        SkipSpace(nested);
        to = from;
        if (Here() == ',') {
          ++at_;
          SkipSpace(nested);
          to = IsDigit(Here()) ? ParseInt() : -1;
          SkipSpace(nested);
        } else if (!has_low) {
          Refuse("a number is expected in { }");
        }
        if (Here() != '}') Refuse("} is expected");
        ++at_;
        if (to >= 0 && to < from) Refuse(fmt::format("{{{},{}}} has its smaller number last", from, to));
      } else {
        break;
      }
      if (counted) Refuse("two counts follow each other; put the first in parentheses");
      counted = true;
      low = from;
      high = to;
      *end = at_;
      SkipSpace(nested);
    }
    *min = static_cast<int32_t>(low);
    *max = static_cast<int32_t>(high);
  }
  static bool IsDigit(char c) { return c >= '0' && c <= '9'; }
  int64_t ParseInt() {
    int64_t value = 0;
    while (IsDigit(Here())) {
      value = value * 10 + (Here() - '0');
      if (value > Builder::kMaxRepeat) Refuse(fmt::format("a count is above {}", Builder::kMaxRepeat));
      ++at_;
    }
    return value;
  }

  // Over one item, without building it.
  void SkipItem(int depth) {
    const char c = Here();
    if (c == '"') {
      ++at_;
      while (Here() != '"') ParseCharacter('"');
      ++at_;
    } else if (c == '[') {
      ++at_;
      if (Here() == '^') ++at_;
      while (Here() != ']') ParseCharacter(']');
      ++at_;
    } else if (c == '(') {
      if (depth >= kMaxDepth) Refuse(fmt::format("groups are nested deeper than {} levels", kMaxDepth));
      const size_t begin = at_;
      const auto known = group_ends_.find(begin);
      if (known != group_ends_.end()) {
        at_ = known->second;
        return;
      }
      ++at_;
      for (;;) {
        SkipSpace(true);
        const char inner = Here();
        if (at_ >= text_.size()) Refuse(") is missing");
        if (inner == ')') break;
        if (inner == '"' || inner == '[' || inner == '(') {
          SkipItem(depth + 1);
        } else {
          ++at_;
        }
      }
      ++at_;
      group_ends_[begin] = at_;
    } else if (c == '.') {
      ++at_;
    } else {
      ParseName();
    }
  }

  int32_t ParseItem(int32_t from, int depth) {
    const char c = Here();
    if (c == '"') {
      ++at_;
      while (Here() != '"') {
        const char32_t code = ParseCharacter('"');
        from = builder_.Class(from, std::vector<CodeRange>{{code, code}});
      }
      ++at_;
      return from;
    }
    if (c == '[') {
      ++at_;
      const bool negated = Here() == '^';
      if (negated) ++at_;
      std::vector<CodeRange> ranges;
      while (Here() != ']') {
        const char32_t low = ParseCharacter(']');
        char32_t high = low;
        if (Here() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
          ++at_;
          high = ParseCharacter(']');
          if (high < low) Refuse("a range has its smaller character last");
        }
        ranges.push_back({low, high});
        if (ranges.size() > kMaxClassRanges) Refuse(fmt::format("a class has more than {} ranges", kMaxClassRanges));
      }
      ++at_;
      ranges = Normalized(std::move(ranges));
      if (negated) ranges = Complement(ranges);
      return builder_.Class(from, ranges);
    }
    if (c == '(') {
      ++at_;
      SkipSpace(true);
      const int32_t end = ParseAlternatives(Branch(from), true, depth + 1);
      if (Here() != ')') Refuse(") is expected");
      ++at_;
      return end;
    }
    if (c == '.') {
      ++at_;
      return builder_.Class(from, std::vector<CodeRange>{{0, kLastCode}});
    }
    return builder_.Call(from, RuleOf(ParseName()));
  }

  char32_t ParseHex(int digits) {
    char32_t code = 0;
    for (int i = 0; i < digits; ++i) {
      const char c = Here();
      const char32_t value = c >= '0' && c <= '9'   ? static_cast<char32_t>(c - '0')
                             : c >= 'a' && c <= 'f' ? static_cast<char32_t>(c - 'a' + 10)
                             : c >= 'A' && c <= 'F' ? static_cast<char32_t>(c - 'A' + 10)
                                                    : 16;
      if (value == 16) Refuse(fmt::format("{} hexadecimal digits are expected", digits));
      code = code * 16 + value;
      ++at_;
    }
    if (code > kLastCode || (code >= 0xd800 && code <= 0xdfff)) Refuse("the escape before this is no character");
    return code;
  }

  char32_t ParseCharacter(char closing) {
    if (at_ >= text_.size()) Refuse(fmt::format("{} is missing", closing));
    if (Here() == '\n') Refuse(fmt::format("{} is missing in this line; a line's end is written \\n", closing));
    if (Here() != '\\') {
      const Utf8Step step = ScanUtf8(text_, at_);
      at_ += step.size;
      return step.code;
    }
    ++at_;
    const char c = Here();
    ++at_;
    switch (c) {
      case 'x': return ParseHex(2);
      case 'u': return ParseHex(4);
      case 'U': return ParseHex(8);
      case 't': return '\t';
      case 'r': return '\r';
      case 'n': return '\n';
      case '\\':
      case '"':
      case '[':
      case ']':
      case '-':
      case '^': return static_cast<char32_t>(c);
      default:
        at_ = std::min(at_ - 1, text_.size());
        Refuse(R"(an escape is none of \\ \" \[ \] \- \^ \n \r \t \xHH \uHHHH \UHHHHHHHH)");
    }
  }

  Builder& builder_;
  std::string_view text_;
  size_t at_ = 0;
  std::map<std::string, int32_t> rules_;
  std::set<std::string> defined_;
  size_t built_ = 0;                     // characters of items, each time that they were built
  std::map<size_t, size_t> group_ends_;  // where groups end, by where they begin
};

}  // namespace

int32_t AddGbnf(Builder& builder, std::string_view text) { return Parser(builder, text).Parse(); }

std::shared_ptr<const Grammar> CompileGbnf(std::string_view text, const std::string& place) {
  Builder builder(place);
  const int32_t root = AddGbnf(builder, text);
  return builder.Finish(root);
}

}  // namespace phsa
