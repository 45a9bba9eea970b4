#include "data/overlap.h"

#include <array>
#include <cctype>
#include <cstddef>

#include "base/utf8.h"

namespace phsa {
namespace {

constexpr size_t kWords = 13;
constexpr uint64_t kOneIn = 100;

constexpr uint64_t kPrime = 0x100000001b3, kFactor = 0x9e3779b97f4a7c15;

constexpr uint64_t Power(uint64_t base, size_t exponent) {
  return exponent == 0 ? 1 : base * Power(base, exponent - 1);
}
constexpr uint64_t kOldestFactor = Power(kFactor, kWords);

bool IsPunctuation(char32_t c) {
  return c < 0x80
             ? std::isalnum(static_cast<int>(c)) == 0
             : c < 0xc0 || (c >= 0x2000 && c < 0x2070) || (c >= 0x3000 && c < 0x3040) || (c >= 0xff00 && c < 0xff10);
}

// Calls fn(digest) for each run of words, which is a polynomial of the digests of its words.
template <class Fn>
void ForEachRun(std::string_view text, const Fn& fn) {
  std::array<uint64_t, kWords> words{};
  size_t count = 0;
  uint64_t run = 0, word = 0;
  const auto end_word = [&] {
    if (word == 0) return;
    uint64_t& oldest = words[count % kWords];
    run = run * kFactor + word - oldest * kOldestFactor;
    oldest = word;
    word = 0;
    if (++count >= kWords) fn(run ^ (run >> 29));
  };
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = ScanUtf8(text, at);
    at += step.size;
    if (IsPunctuation(step.code)) {
      end_word();
      continue;
    }
    const bool whole_word = step.code >= 0x2e80;
    if (whole_word) end_word();
    const char32_t code =
        step.code < 0x80 ? static_cast<char32_t>(std::tolower(static_cast<int>(step.code))) : step.code;
    word = (word + code) * kPrime + 1;
    if (whole_word) end_word();
  }
  end_word();
}

}  // namespace

void OverlapFinder::Add(std::string_view text) {
  ForEachRun(text, [&](uint64_t run) { runs_.insert(run); });
}

bool OverlapFinder::Overlaps(std::string_view text) const {
  uint64_t all = 0, found = 0;
  ForEachRun(text, [&](uint64_t run) {
    ++all;
    found += runs_.count(run);
  });
  return found * kOneIn > all;
}

}  // namespace phsa
