#include "eval/sentences.h"

#include <algorithm>
#include <array>

#include "base/utf8.h"

namespace phsa {
namespace {

// Shorter ones go to the next: "1.", "Dr.", a heading of one word.
constexpr size_t kShortestSentence = 12;

bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f'; }

// Words whose point ends no sentence.
bool IsAbbreviation(std::string_view before) {
  static constexpr std::array<std::string_view, 22> kWords = {"Mr",  "Mrs", "Ms",  "Dr",  "Prof", "St",    "No", "vs",
                                                              "etc", "cf",  "Fig", "e.g", "i.e",  "Jr",    "Sr", "Inc",
                                                              "Ltd", "Co",  "Vol", "pp",  "al",   "approx"};
  const size_t at = before.find_last_of(" \t\n\r(\"");
  const std::string_view word = at == std::string_view::npos ? before : before.substr(at + 1);
  const bool initial = word.size() == 1 && word[0] >= 'A' && word[0] <= 'Z';
  return initial || std::find(kWords.begin(), kWords.end(), word) != kWords.end();
}

class Cutter {
 public:
  Cutter(std::string_view text, SentenceKind kind) : text_(text), kind_(kind) {}

  std::vector<size_t> Run() {
    for (size_t at = 0; at < text_.size();) {
      const Utf8Step step = ScanUtf8(text_, at);
      const size_t next = at + step.size;
      if (next - begin_ > kLongestSentence) CutLong(at);
      if (kind_ == SentenceKind::kLines) {
        if (step.code == '\n') Cut(next);
      } else if (step.code == '\n') {
        if (BlankLineAt(next)) Cut(SkipSpace(next));
      } else if (step.kind == Utf8Step::Kind::kCharacter && EndsSentence(step.code, at, next)) {
        const size_t closed = SkipClosing(next);
        if (IsWide(step.code) || closed == text_.size() || IsSpace(text_[closed])) Cut(SkipSpace(closed));
      }
      at = std::max(next, begin_);
    }
    if (begin_ < text_.size()) {
      // What is left of nothing but a few characters belongs to the sentence before.
      if (!ends_.empty() && text_.size() - begin_ < kShortestSentence && kind_ == SentenceKind::kProse &&
          text_.size() - previous_ <= kLongestSentence) {
        ends_.back() = text_.size();
      } else {
        ends_.push_back(text_.size());
      }
    }
    return std::move(ends_);
  }

 private:
  static bool IsWide(char32_t c) { return c == U'。' || c == U'！' || c == U'？' || c == U'；'; }

  bool EndsSentence(char32_t c, size_t at, size_t next) const {
    if (IsWide(c)) return true;
    if (c == '!' || c == '?' || c == U'…') return true;
    if (c != '.') return false;
    if (next < text_.size() && !IsSpace(text_[next])) return SkipClosing(next) > next;
    if (IsAbbreviation(text_.substr(begin_, at - begin_))) return false;
    // "approx. five": a small letter goes on with the sentence.
    const size_t word = SkipSpace(next);
    return word == text_.size() || text_[word] < 'a' || text_[word] > 'z';
  }

  // Behind quotation marks and brackets that close.
  size_t SkipClosing(size_t at) const {
    while (at < text_.size()) {
      const Utf8Step step = ScanUtf8(text_, at);
      static constexpr std::u32string_view kClosing = U"\"')]”’»」』）】*_";
      if (step.kind != Utf8Step::Kind::kCharacter || kClosing.find(step.code) == std::u32string_view::npos) break;
      at += step.size;
    }
    return at;
  }

  size_t SkipSpace(size_t at) const {
    while (at < text_.size() && IsSpace(text_[at])) ++at;
    return at;
  }

  // Whether the line that begins here is empty, or begins as items of lists and headings do.
  bool BlankLineAt(size_t at) const {
    while (at < text_.size() && (text_[at] == ' ' || text_[at] == '\t' || text_[at] == '\r')) ++at;
    if (at == text_.size() || text_[at] == '\n' || text_[at] == '#' || text_[at] == '|') return true;
    const bool item = text_[at] == '-' || text_[at] == '*' || text_[at] == '+';
    return item && at + 1 < text_.size() && text_[at + 1] == ' ';
  }

  void Cut(size_t end) {
    if (end <= begin_ || (kind_ == SentenceKind::kProse && end - begin_ < kShortestSentence)) return;
    while (end - begin_ > kLongestSentence) {  // white space behind it, and what closes it
      size_t part = begin_ + kLongestSentence;
      while ((static_cast<uint8_t>(text_[part]) & 0xc0) == 0x80) --part;  // whole characters
      ends_.push_back(part);
      previous_ = begin_;
      begin_ = part;
    }
    ends_.push_back(end);
    previous_ = begin_;
    begin_ = end;
  }

  // Before `at`: at the last line break or space, if there is one, else here.
  void CutLong(size_t at) {
    const std::string_view part = text_.substr(begin_, at - begin_);
    size_t end = part.find_last_of('\n');
    if (end == std::string_view::npos || end < kLongestSentence / 2) end = part.find_last_of(" \t");
    Cut(end == std::string_view::npos || end < kLongestSentence / 2 ? at : begin_ + end + 1);
    if (at - begin_ >= kLongestSentence) Cut(at);
  }

  const std::string_view text_;
  const SentenceKind kind_;
  size_t begin_ = 0, previous_ = 0;  // of the sentence that is being read, and of the one before
  std::vector<size_t> ends_;
};

}  // namespace

std::vector<size_t> SentenceEnds(std::string_view text, SentenceKind kind) { return Cutter(text, kind).Run(); }

}  // namespace phsa
