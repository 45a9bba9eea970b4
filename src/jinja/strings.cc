#include "jinja/strings.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "base/utf8.h"

namespace phsa::jinja {
namespace {

constexpr size_t kPieceBytes = 128;  // about what a piece of a split takes

bool IsCategory(char32_t code, std::initializer_list<utf8proc_category_t> categories) {
  const utf8proc_category_t own = utf8proc_category(static_cast<utf8proc_int32_t>(code));
  return std::find(categories.begin(), categories.end(), own) != categories.end();
}
bool IsLetter(char32_t code) {
  return IsCategory(code, {UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_LL, UTF8PROC_CATEGORY_LT, UTF8PROC_CATEGORY_LM,
                           UTF8PROC_CATEGORY_LO});
}
bool IsCased(char32_t code) {
  return IsCategory(code, {UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_LL, UTF8PROC_CATEGORY_LT});
}

void AppendCode(utf8proc_int32_t code, std::string* out) {
  std::array<utf8proc_uint8_t, 4> bytes{};
  const auto size = static_cast<size_t>(utf8proc_encode_char(code, bytes.data()));
  for (size_t i = 0; i < size; ++i) *out += static_cast<char>(bytes[i]);
}

// Each character by `map`, which is told the character before it (0: none) and appends what becomes of it.
template <class Fn>
Text Mapped(const Text& text, const Fn& map) {
  Text out;
  size_t at = 0;
  char32_t before = 0;
  for (const Text::Run& run : text.runs()) {
    std::string bytes;
    while (at < run.end) {
      const Utf8Step step = ScanUtf8(text.bytes(), at);
      if (step.kind == Utf8Step::Kind::kCharacter) {
        map(step.code, before, &bytes);
        before = step.code;
      } else {
        bytes.append(text.bytes(), at, step.size);
        before = 0xfffd;
      }
      at += step.size;
    }
    out.Append(bytes, run.own);
  }
  return out;
}

void AppendUpper(char32_t code, std::string* out) {
  if (code == 0xdf) {
    *out += "SS";
  } else {
    AppendCode(utf8proc_toupper(static_cast<utf8proc_int32_t>(code)), out);
  }
}
void AppendLower(char32_t code, std::string* out) {
  AppendCode(utf8proc_tolower(static_cast<utf8proc_int32_t>(code)), out);
}
void AppendTitle(char32_t code, std::string* out) {
  if (code == 0xdf) {
    *out += "Ss";
  } else {
    AppendCode(utf8proc_totitle(static_cast<utf8proc_int32_t>(code)), out);
  }
}

}  // namespace

Text Strip(const Text& text, const std::string* characters, Side side) {
  const std::string& bytes = text.bytes();
  const auto goes = [&](size_t at, const Utf8Step& step) {
    if (characters == nullptr) return step.kind == Utf8Step::Kind::kCharacter && IsSpace(step.code);
    const std::string_view one = std::string_view(bytes).substr(at, step.size);
    for (size_t k = 0; k < characters->size(); k += ScanUtf8(*characters, k).size) {
      if (std::string_view(*characters).substr(k, ScanUtf8(*characters, k).size) == one) return true;
    }
    return false;
  };
  size_t begin = 0, end = bytes.size();
  if (side != Side::kRight) {
    while (begin < end) {
      const Utf8Step step = ScanUtf8(bytes, begin);
      if (!goes(begin, step)) break;
      begin += step.size;
    }
  }
  if (side != Side::kLeft) {
    while (end > begin) {
      size_t last = end - 1;
      while (last > begin && (static_cast<uint8_t>(bytes[last]) & 0xc0) == 0x80) --last;
      const Utf8Step step = ScanUtf8(bytes, last);
      if (last + step.size != end || !goes(last, step)) break;
      end = last;
    }
  }
  return text.Part(begin, end);
}

std::vector<Value> Split(const Text& text, const std::string* separator, int64_t most, bool from_right, Meter& meter) {
  const std::string_view bytes = text.bytes();
  std::vector<std::pair<size_t, size_t>> parts;
  const auto more = [&] { return most < 0 || static_cast<int64_t>(parts.size()) < most; };
  meter.Charge(bytes.size());
  if (separator != nullptr) {
    if (separator->empty()) Fail("empty separator");
    if (from_right) {
      size_t end = bytes.size();
      while (more() && end >= separator->size()) {
        const size_t found = bytes.substr(0, end).rfind(*separator);
        if (found == std::string_view::npos) break;
        parts.emplace_back(found + separator->size(), end);
        meter.Charge(kPieceBytes);
        end = found;
      }
      parts.emplace_back(0, end);
      std::reverse(parts.begin(), parts.end());
    } else {
      size_t begin = 0;
      for (size_t found = 0; more() && (found = bytes.find(*separator, begin)) != std::string_view::npos;) {
        parts.emplace_back(begin, found);
        meter.Charge(kPieceBytes);
        begin = found + separator->size();
      }
      parts.emplace_back(begin, bytes.size());
    }
  } else {
    if (from_right && most >= 0) Fail("rsplit() without a separator takes no count here");
    size_t at = 0;
    const auto skip = [&](bool space) {
      while (at < bytes.size()) {
        const Utf8Step step = ScanUtf8(bytes, at);
        if ((step.kind == Utf8Step::Kind::kCharacter && IsSpace(step.code)) != space) break;
        at += step.size;
      }
    };
    for (skip(true); at < bytes.size(); skip(true)) {
      const size_t begin = at;
      meter.Charge(kPieceBytes);
      if (!more()) {
        const Text rest = Strip(text.Part(begin, bytes.size()), nullptr, Side::kRight);
        parts.emplace_back(begin, begin + rest.size());
        break;
      }
      skip(false);
      parts.emplace_back(begin, at);
    }
  }
  std::vector<Value> pieces;
  pieces.reserve(parts.size());
  for (const auto& [begin, end] : parts) pieces.push_back(Value::String(text.Part(begin, end)));
  return pieces;
}

std::vector<Value> SplitLines(const Text& text, bool keep_ends, Meter& meter) {
  const std::string& bytes = text.bytes();
  meter.Charge(bytes.size());
  std::vector<Value> lines;
  size_t begin = 0;
  for (size_t at = 0; at < bytes.size();) {
    const Utf8Step step = ScanUtf8(bytes, at);
    const char32_t c = step.code;
    size_t next = at + step.size;
    if ((c >= 0xa && c <= 0xd) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 || c == 0x2029) {
      if (c == '\r' && next < bytes.size() && bytes[next] == '\n') ++next;
      meter.Charge(kPieceBytes);
      lines.push_back(Value::String(text.Part(begin, keep_ends ? next : at)));
      begin = next;
    }
    at = next;
  }
  if (begin < bytes.size()) lines.push_back(Value::String(text.Part(begin, bytes.size())));
  return lines;
}

Text Replace(const Text& text, const std::string& old, const Text& with, int64_t most, Meter& meter) {
  const std::string& bytes = text.bytes();
  meter.Charge(bytes.size());
  Text out;
  size_t at = 0;
  int64_t count = 0;
  if (old.empty()) {
    // Before every character and behind the last.
    while (most < 0 || count < most) {
      meter.Charge(with.size() + 1);
      out.Append(with);
      ++count;
      if (at == bytes.size()) return out;
      const size_t next = at + ScanUtf8(bytes, at).size;
      out.Append(text, at, next);
      at = next;
    }
  } else {
    for (size_t found = 0; (most < 0 || count < most) && (found = bytes.find(old, at)) != std::string::npos; ++count) {
      meter.Charge(with.size() + 1);
      out.Append(text, at, found);
      out.Append(with);
      at = found + old.size();
    }
  }
  out.Append(text, at, bytes.size());
  return out;
}

Text WithCase(const Text& text, Case letters) {
  bool first = true;
  return Mapped(text, [&](char32_t code, char32_t before, std::string* out) {
    const bool begins = letters == Case::kCapitalised ? first : before == 0 || !IsCased(before);
    first = false;
    if (letters == Case::kUpper) {
      AppendUpper(code, out);
    } else if (letters == Case::kLower || !begins) {
      AppendLower(code, out);
    } else {
      AppendTitle(code, out);
    }
  });
}

Text JinjaTitle(const Text& text) {
  return Mapped(text, [&](char32_t code, char32_t before, std::string* out) {
    static constexpr std::string_view kBorders = "-({[<";
    const bool begins = before == 0 || IsSpace(before) ||
                        (before < 0x80 && kBorders.find(static_cast<char>(before)) != std::string_view::npos);
    if (begins) {
      AppendUpper(code, out);
    } else {
      AppendLower(code, out);
    }
  });
}

bool IsAll(const std::string& text, CharacterClass characters) {
  bool cased = false;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = ScanUtf8(text, at);
    at += step.size;
    const char32_t code = step.code;
    if (step.kind != Utf8Step::Kind::kCharacter) return false;
    const bool upper = IsCategory(code, {UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_LT});
    const bool lower = IsCategory(code, {UTF8PROC_CATEGORY_LL});
    cased = cased || upper || lower;
    const bool digit = IsCategory(code, {UTF8PROC_CATEGORY_ND});
    switch (characters) {
      case CharacterClass::kDigit:
        if (!digit) return false;
        break;
      case CharacterClass::kAlpha:
        if (!IsLetter(code)) return false;
        break;
      case CharacterClass::kAlphaNumeric:
        if (!IsLetter(code) && !digit && !IsCategory(code, {UTF8PROC_CATEGORY_NL, UTF8PROC_CATEGORY_NO})) return false;
        break;
      case CharacterClass::kSpace:
        if (!IsSpace(code)) return false;
        break;
      case CharacterClass::kUpper:
        if (lower) return false;
        break;
      case CharacterClass::kLower:
        if (upper) return false;
        break;
    }
  }
  const bool by_case = characters == CharacterClass::kUpper || characters == CharacterClass::kLower;
  return by_case ? cased : !text.empty();
}

}  // namespace phsa::jinja
