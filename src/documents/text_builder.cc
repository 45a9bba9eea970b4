#include "documents/text_builder.h"

#include "base/errors.h"
#include "base/utf8.h"

namespace phsa {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

bool IsSpace(char32_t c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == 0xa0; }

}  // namespace

void TextBuilder::Put(std::string_view text, int32_t place) {
  std::string& out = document_.text;
  if (out.size() + text.size() > kLongestDocumentText) {
    ThrowInvalid("{}: holds more than {} MiB of text; give a part of it", document_.name, kLongestDocumentText >> 20);
  }
  if (!out.empty() && breaks_ > 0) {
    out.append(static_cast<size_t>(breaks_), '\n');
  } else if (!out.empty() && space_ && out.back() != '\n') {
    out += ' ';
  }
  breaks_ = 0;
  space_ = false;
  if (document_.marks.empty() || document_.marks.back().number < place) {
    document_.marks.push_back({document_.marks.empty() ? 0 : out.size(), place});
  }
  out += text;
}

void TextBuilder::Add(std::string_view text, int32_t place, bool keep_white_space) {
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = ScanUtf8(text, at);
    const bool character = step.kind == Utf8Step::Kind::kCharacter;
    const bool space = character && IsSpace(step.code);
    if (space && !keep_white_space) {
      space_ = true;
    } else if (!character || step.code == 0) {
      Put(kReplacement, place);
    } else if (!(step.code == '\r')) {
      Put(text.substr(at, step.size), place);
    }
    at += step.size;
  }
}

void CheckHasText(const Document& document, const char* advice) {
  if (document.text.find_first_not_of(" \t\r\n\f") == std::string::npos) {
    ThrowInvalid("{}: holds no text{}", document.name, advice);
  }
}

}  // namespace phsa
