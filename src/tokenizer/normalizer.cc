#include "tokenizer/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/errors.h"
#include "tokenizer/utf8_scan.h"

namespace phsa {
namespace {

struct Range {
  char32_t first, last;
};

// Characters that NFC leaves alone and that never join the one before them, so that text can be cut before each of
// them. Not all such characters: the blocks that most text is made of.
constexpr Range kPlain[] = {
    {0x0, 0x2ff},     {0x388, 0x482},   {0x48a, 0x590},   {0x1e00, 0x1eff}, {0x2010, 0x205e},
    {0x2190, 0x2328}, {0x232b, 0x2adb}, {0x3000, 0x3029}, {0x3030, 0x3098}, {0x309b, 0x4dbf},
    {0x4e00, 0x9fff}, {0xac00, 0xd7a3}, {0xe000, 0xf8ff}, {0xff00, 0xffef}, {0x1f000, 0x1faff},
};

// Characters that tokenizers' tables (Unicode 9) know nothing of: to them these are neither marks nor parts of others,
// and pass as they are. U+11A7 is none of these: utf8proc 2.8 loses it after a Hangul syllable.
constexpr Range kPassed[] = {
    {0x7fd, 0x7fd},     {0x898, 0x89f},     {0x8ca, 0x8d3},     {0x9fe, 0x9fe},     {0xc3c, 0xc3c},
    {0xd3b, 0xd3c},     {0xeba, 0xeba},     {0x11a7, 0x11a7},   {0x1715, 0x1715},   {0x1abf, 0x1ace},
    {0x1df6, 0x1dfa},   {0xa82c, 0xa82c},   {0x10d24, 0x10d27}, {0x10eab, 0x10eac}, {0x10efd, 0x10eff},
    {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070}, {0x1133b, 0x1133b}, {0x1145e, 0x1145e},
    {0x11839, 0x1183a}, {0x11930, 0x11930}, {0x11938, 0x11938}, {0x1193d, 0x1193e}, {0x11943, 0x11943},
    {0x119e0, 0x119e0}, {0x11a34, 0x11a34}, {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42},
    {0x11d44, 0x11d45}, {0x11d97, 0x11d97}, {0x11f41, 0x11f42}, {0x16ff0, 0x16ff1}, {0x1e08f, 0x1e08f},
    {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef},
};

// Of these the tables know no compatibility form.
constexpr Range kPassedOfCompatibility[] = {
    {0x32ff, 0x32ff},   {0xa7f2, 0xa7f4},   {0xab69, 0xab69},   {0x10781, 0x10785}, {0x10787, 0x107b0},
    {0x107b2, 0x107ba}, {0x1e030, 0x1e06d}, {0x1f16c, 0x1f16c}, {0x1fbf0, 0x1fbf9},
};

// What kPlain is for NFC, for the other forms.
constexpr Range kPlainInAll[] = {{0x0, 0x7f}, {0x4e00, 0x9fff}};

template <size_t size>
bool Contains(const Range (&ranges)[size], char32_t code) {
  const Range* after =
      std::upper_bound(ranges, ranges + size, code, [](char32_t c, const Range& range) { return c < range.first; });
  return after != ranges && code <= after[-1].last;
}

int CombiningClass(int32_t code) { return utf8proc_get_property(code)->combining_class; }

struct Form {
  bool composed, compatible;
  bool IsPlain(char32_t code) const {
    return composed && !compatible ? Contains(kPlain, code) : Contains(kPlainInAll, code);
  }
  bool Passes(char32_t code) const {
    return Contains(kPassed, code) || (compatible && Contains(kPassedOfCompatibility, code));
  }
};

// The normal form of a short text. Its marks are sorted here, because utf8proc does it in quadratic time.
std::string NormalizeRun(const Form& form, std::string_view run) {
  std::vector<utf8proc_int32_t> codes;
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | (form.compatible ? UTF8PROC_COMPAT : 0) |
                                                      (form.composed ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE));
  for (size_t at = 0; at < run.size();) {
    const Utf8Step step = ScanUtf8(run, at);
    at += step.size;
    constexpr utf8proc_ssize_t kLongest = 32;  // code points that one character decomposes into; 18 in fact
    const size_t before = codes.size();
    codes.resize(before + kLongest);
    int boundary = 0;
    const utf8proc_ssize_t count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(step.code),
                                                           codes.data() + before, kLongest, options, &boundary);
    PHSA_CHECK(count >= 0 && count <= kLongest);
    codes.resize(before + static_cast<size_t>(count));
  }
  for (auto begin = codes.begin(); begin != codes.end();) {
    if (CombiningClass(*begin) == 0) {
      ++begin;
      continue;
    }
    const auto end = std::find_if(begin, codes.end(), [](int32_t code) { return CombiningClass(code) == 0; });
    std::stable_sort(begin, end, [](int32_t a, int32_t b) { return CombiningClass(a) < CombiningClass(b); });
    begin = end;
  }
  const utf8proc_ssize_t count =
      utf8proc_normalize_utf32(codes.data(), static_cast<utf8proc_ssize_t>(codes.size()), options);
  PHSA_CHECK(count >= 0);
  std::string out;
  for (utf8proc_ssize_t i = 0; i < count; ++i) AppendUtf8(static_cast<char32_t>(codes[static_cast<size_t>(i)]), &out);
  return out;
}

}  // namespace

std::string_view Normalize(NormalForm which, std::string_view text, std::string* storage) {
  const Form form{.composed = which == NormalForm::kNfc || which == NormalForm::kNfkc,
                  .compatible = which == NormalForm::kNfkc || which == NormalForm::kNfkd};
  size_t done = 0;   // what lies before is in `storage`
  size_t plain = 0;  // where the plain character before `at` begins
  bool after_plain = false;
  bool changed = false;
  for (size_t at = 0; at < text.size();) {
    if (const size_t ascii = AsciiAhead(text, at); ascii > 0) {
      at += ascii;
      plain = at - 1;
      after_plain = true;
      continue;
    }
    Utf8Step step = ScanUtf8(text, at);
    if (form.IsPlain(step.code) || form.Passes(step.code)) {
      after_plain = form.IsPlain(step.code);
      plain = at;
      at += step.size;
      continue;
    }
    // A mark may join the plain character before it.
    const size_t begin = after_plain ? plain : at;
    do {
      at += step.size;
      if (at == text.size()) break;
      step = ScanUtf8(text, at);
    } while (!form.IsPlain(step.code) && !form.Passes(step.code));
    after_plain = false;
    const std::string_view run = text.substr(begin, at - begin);
    const std::string normal = NormalizeRun(form, run);
    if (normal == run) continue;
    if (!changed) storage->clear();
    changed = true;
    storage->append(text.substr(done, begin - done)).append(normal);
    done = at;
  }
  if (!changed) return text;
  storage->append(text.substr(done));
  return *storage;
}

}  // namespace phsa
