#include "tokenizer/pretokenizer.h"

#include <utility>

#include "tokenizer/bpe.h"

namespace phsa {
namespace {

// Hands out the pieces of one text, matches and what lies between them, as `behavior` wants them. Empty ones are left
// out at the end only: an empty match still separates.
class PieceMaker {
 public:
  PieceMaker(SplitBehavior behavior, size_t offset, std::vector<TextRange>* out)
      : behavior_(behavior), offset_(offset), out_(out) {}

  void Add(TextRange piece, bool is_match) {
    bool join = false;  // with the piece that waits
    switch (behavior_) {
      case SplitBehavior::kIsolated: break;
      case SplitBehavior::kRemoved:
        if (is_match) return;
        break;
      case SplitBehavior::kMergedWithPrevious: join = is_match && !last_is_match_; break;
      case SplitBehavior::kContiguous: join = is_match == last_is_match_; break;
      case SplitBehavior::kMergedWithNext: join = last_is_match_ && !is_match; break;
    }
    last_is_match_ = is_match;
    if (join && any_waits_) {
      waiting_.end = piece.end;
      return;
    }
    Flush();
    waiting_ = piece;
    any_waits_ = true;
  }

  void Flush() {
    if (waiting_.begin < waiting_.end) out_->push_back({waiting_.begin + offset_, waiting_.end + offset_});
    waiting_ = {0, 0};
    any_waits_ = false;
  }

 private:
  SplitBehavior behavior_;
  size_t offset_;
  std::vector<TextRange>* out_;
  TextRange waiting_{0, 0};
  bool any_waits_ = false;
  bool last_is_match_ = false;
};

}  // namespace

void PreTokenizer::AddSplit(Pattern pattern, SplitBehavior behavior, bool inverted) {
  Step& step = steps_.emplace_back();
  step.pattern = std::move(pattern);
  step.behavior = behavior;
  step.inverted = inverted;
}

void PreTokenizer::AddPrefixSpace() { steps_.emplace_back(); }

void PreTokenizer::AddSpaceMarks(MarkFirst first) { steps_.emplace_back().marks = first; }

std::string_view PreTokenizer::Split(std::string_view text, bool first, Scratch* scratch) const {
  std::vector<TextRange>& words = scratch->words;
  words.clear();
  if (!text.empty()) words.push_back({0, text.size()});
  for (const Step& step : steps_) {
    std::swap(words, scratch->input);
    words.clear();
    if (!step.pattern) {
      std::string spaced;
      spaced.reserve(text.size() + scratch->input.size());
      for (const TextRange& piece : scratch->input) {
        const size_t begin = spaced.size();
        const std::string_view own = text.substr(piece.begin, piece.end - piece.begin);
        if (step.marks) {
          const bool wanted =
              *step.marks == MarkFirst::kOfEach || (*step.marks == MarkFirst::kOfText && first && piece.begin == 0);
          if (wanted && !own.starts_with(' ') && !own.starts_with(kSpaceMark)) spaced += kSpaceMark;
          for (const char c : own) {
            if (c == ' ') {
              spaced += kSpaceMark;
            } else {
              spaced += c;
            }
          }
        } else {
          if (!own.starts_with(' ')) spaced += ' ';
          spaced += own;
        }
        words.push_back({begin, spaced.size()});
      }
      scratch->text = std::move(spaced);
      text = scratch->text;
      continue;
    }
    for (const TextRange& piece : scratch->input) {
      scratch->matches.clear();
      const size_t size = piece.end - piece.begin;
      step.pattern->FindAll(text.substr(piece.begin, size), &scratch->pattern, &scratch->matches);
      PieceMaker maker(step.behavior, piece.begin, &words);
      size_t done = 0;
      for (const TextRange& match : scratch->matches) {
        if (done != match.begin) maker.Add({done, match.begin}, step.inverted);
        maker.Add(match, !step.inverted);
        done = match.end;
      }
      if (done != size) maker.Add({done, size}, step.inverted);
      maker.Flush();
    }
  }
  return text;
}

}  // namespace phsa
