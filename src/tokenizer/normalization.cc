#include "tokenizer/normalization.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "tokenizer/utf8_scan.h"

namespace phsa {
namespace {

// How much more than a text its steps may make of it; 11 times is what a normal form does at most.
size_t Most(std::string_view text) { return 32 * text.size() + 4096; }

void Check(const std::string& out, size_t most) {
  if (out.size() > most) ThrowInvalid("tokenizer: its normalizer makes more than {} bytes of a text", most);
}

// Unicode's White_Space property.
bool IsWhiteSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

std::string_view Strip(std::string_view text, bool left, bool right) {
  size_t begin = 0, end = text.size(), at = 0;
  while (left && begin < end) {
    const Utf8Step step = ScanUtf8(text, begin);
    if (!IsWhiteSpace(step.code)) break;
    begin += step.size;
  }
  while (right && end > begin) {
    at = end - 1;
    while (at > begin && (static_cast<uint8_t>(text[at]) & 0xc0) == 0x80) --at;
    if (!IsWhiteSpace(ScanUtf8(text, at).code)) break;
    end = at;
  }
  return text.substr(begin, end - begin);
}

bool NmtDrops(char32_t c) {
  return (c >= 0x01 && c <= 0x08) || c == 0x0b || (c >= 0x0e && c <= 0x1f) || c == 0x7f || c == 0x8f || c == 0x9f;
}

// Of SentencePiece's nmt rules those that tokenizers has.
void AppendNmt(std::string_view text, std::string* out) {
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = ScanUtf8(text, at);
    const char32_t c = step.code;
    const bool space = c == 0x09 || c == 0x0a || c == 0x0c || c == 0x0d || c == 0x1680 ||
                       (c >= 0x200b && c <= 0x200f) || c == 0x2028 || c == 0x2029 || c == 0x2581 || c == 0xfeff ||
                       c == 0xfffd;
    if (space) {
      *out += ' ';
    } else if (!NmtDrops(c)) {
      *out += text.substr(at, step.size);
    }
    at += step.size;
  }
}

}  // namespace

void Normalization::AddForm(NormalForm form) { steps_.push_back({.kind = Kind::kForm, .form = form}); }

void Normalization::AddNmt() { steps_.push_back({.kind = Kind::kNmt}); }

void Normalization::AddCharsmap(Charsmap charsmap) {
  steps_.push_back({.kind = Kind::kCharsmap, .charsmap = std::move(charsmap)});
}

void Normalization::AddReplace(std::string_view text, std::string_view by) {
  steps_.push_back({.kind = Kind::kReplaceText, .text = std::string(text), .by = std::string(by)});
}

void Normalization::AddReplace(Pattern pattern, std::string_view by) {
  steps_.push_back({.kind = Kind::kReplacePattern, .pattern = std::move(pattern), .by = std::string(by)});
}

void Normalization::AddPrepend(std::string_view text) {
  steps_.push_back({.kind = Kind::kPrepend, .text = std::string(text)});
}

void Normalization::AddStrip(bool left, bool right) {
  steps_.push_back({.kind = Kind::kStrip, .left = left, .right = right});
}

std::string_view Normalization::Apply(std::string_view text, Pattern::Scratch* pattern, Scratch* scratch) const {
  const size_t most = Most(text);
  bool second = false;
  bool& dropped = scratch->dropped_first;
  dropped = false;
  for (const Step& step : steps_) {
    std::string& out = scratch->texts[second ? 1 : 0];  // `text` may lie in the other one
    size_t done = 0;                                    // what lies before is in `out`
    const auto replace = [&](size_t begin, size_t size) {
      dropped = dropped || (begin == 0 && step.by.empty());
      out.append(text.substr(done, begin - done)).append(step.by);
      Check(out, most);
      done = begin + size;
    };
    switch (step.kind) {
      case Kind::kForm: {
        if (Normalize(step.form, text, &out).data() == text.data()) continue;
        break;
      }
      case Kind::kStrip: {
        const std::string_view left = Strip(text, step.left, step.right);
        dropped = dropped || left.data() != text.data();
        text = left;
        continue;
      }
      case Kind::kPrepend: {
        if (text.empty()) continue;
        out.assign(step.text).append(text);
        break;
      }
      case Kind::kNmt: {
        out.clear();
        dropped = dropped || (!text.empty() && NmtDrops(ScanUtf8(text, 0).code));
        AppendNmt(text, &out);
        break;
      }
      case Kind::kCharsmap: {
        out.clear();
        dropped = dropped || step.charsmap->DropsFirst(text);
        // In pieces, so that what a hostile table makes is seen before it is large.
        for (size_t at = 0; at < text.size();) {
          constexpr size_t kPiece = 1 << 16;
          size_t end = std::min(at + kPiece, text.size());
          // Cut behind a line's end or, where there is none, not at all: a mark may join what is before it.
          end = std::min(text.find('\n', end - 1), text.size() - 1) + 1;
          step.charsmap->Append(text.substr(at, end - at), &out);
          Check(out, most);
          at = end;
        }
        break;
      }
      case Kind::kReplaceText: {
        if (text.find(step.text) == std::string_view::npos) continue;
        out.clear();
        for (size_t at = 0; (at = text.find(step.text, at)) != std::string_view::npos; at = done) {
          replace(at, step.text.size());
        }
        out.append(text.substr(done));
        break;
      }
      case Kind::kReplacePattern: {
        scratch->matches.clear();
        step.pattern->FindAll(text, pattern, &scratch->matches);
        if (scratch->matches.empty()) continue;
        out.clear();
        for (const TextRange& match : scratch->matches) {
          if (match.begin < match.end) replace(match.begin, match.end - match.begin);
        }
        out.append(text.substr(done));
        break;
      }
    }
    Check(out, most);
    text = out;
    second = !second;
  }
  return text;
}

}  // namespace phsa
