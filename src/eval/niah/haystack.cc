#include "eval/niah/haystack.h"

#include <algorithm>
#include <array>

#include "base/errors.h"
#include "base/utf8.h"
#include "io/sha256.h"

namespace phsa {

extern const std::string_view kBuiltInHaystack;  // made from the text by the build

namespace {

// Long enough for any sentence of a novel. A text without sentence ends must still be cut near the asked length.
constexpr size_t kMaxSentenceBytes = 1000;

constexpr std::u32string_view kSpaces = U" \t\n\v\f\r\u0085\u00a0\u2028\u2029\u3000";
constexpr std::u32string_view kEndsBeforeSpace = U".!?…";
constexpr std::u32string_view kEndsAnywhere = U"。！？";
constexpr std::u32string_view kClosing = U"\"')]}”’»」』）》】";

bool Has(std::u32string_view set, char32_t c) { return set.find(c) != std::u32string_view::npos; }

// Whether the dot that ends `sentence` belongs to a word: a title, or a single letter as in "C. F. Adams".
bool EndsInAbbreviation(std::string_view sentence) {
  static constexpr std::array<std::string_view, 16> kAbbreviations = {"Mr.",  "Mrs.", "Ms.",  "Dr.",  "St.",   "Prof.",
                                                                      "Rev.", "Hon.", "Gen.", "Col.", "Capt.", "Lt.",
                                                                      "Sr.",  "Jr.",  "vs.",  "No."};
  const size_t first = sentence.find_last_of(" (\"'");
  const std::string_view word = sentence.substr(first == std::string_view::npos ? 0 : first + 1);
  // "I." is the end of a sentence.
  if (word.size() == 2 && word[1] == '.' && word[0] >= 'A' && word[0] <= 'Z' && word[0] != 'I') return true;
  return std::find(kAbbreviations.begin(), kAbbreviations.end(), word) != kAbbreviations.end();
}

}  // namespace

std::vector<std::string> SplitSentences(std::string_view text) {
  std::vector<std::string> sentences;
  std::string sentence;
  bool space = false;  // white space waits for the next character
  enum { kInside, kAtDot, kAtFullStop } state = kInside;
  const auto finish = [&] {
    if (!sentence.empty()) sentences.push_back(std::move(sentence));
    sentence.clear();
    space = false;
    state = kInside;
  };
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = ScanUtf8(text, at);
    const char32_t c = step.kind == Utf8Step::Kind::kCharacter ? step.code : U'\ufffd';
    if (Has(kSpaces, c)) {
      if (state == kAtFullStop || (state == kAtDot && !EndsInAbbreviation(sentence))) finish();
      if (sentence.size() >= kMaxSentenceBytes) finish();
      space = !sentence.empty();
      at += step.size;
      continue;
    }
    const bool ends_anywhere = Has(kEndsAnywhere, c), ends = Has(kEndsBeforeSpace, c), closes = Has(kClosing, c);
    if (state == kAtFullStop && !ends_anywhere && !closes) finish();
    if (sentence.size() >= 2 * kMaxSentenceBytes) finish();  // nor a space for very long
    if (space) sentence += ' ';
    space = false;
    sentence.append(text.substr(at, step.size));
    at += step.size;
    if (ends_anywhere) {
      state = kAtFullStop;
    } else if (ends) {
      state = kAtDot;
    } else if (!closes) {
      state = kInside;
    }
  }
  finish();
  return sentences;
}

Haystack::Haystack(std::string_view text, std::string name) : name_(std::move(name)), sentences_(SplitSentences(text)) {
  if (sentences_.empty()) ThrowInvalid("{}: the haystack has no text", name_);
  Sha256 hash;
  hash.Update(text.data(), text.size());
  sha256_ = hash.Hex();
}

Haystack Haystack::BuiltIn() { return Haystack(kBuiltInHaystack, "the built-in haystack"); }

}  // namespace phsa
