// A character class as byte ranges of UTF-8.
#include <algorithm>
#include <array>

#include "grammar/nfa.h"

namespace phsa {
namespace {

struct Bytes {
  std::array<uint8_t, 4> byte{};
  int size = 0;
};

Bytes Encode(char32_t code) {
  const auto tail = [&](int shift) { return static_cast<uint8_t>(0x80 | ((code >> shift) & 0x3f)); };
  if (code < 0x80) return {{static_cast<uint8_t>(code)}, 1};
  if (code < 0x800) return {{static_cast<uint8_t>(0xc0 | (code >> 6)), tail(0)}, 2};
  if (code < 0x10000) return {{static_cast<uint8_t>(0xe0 | (code >> 12)), tail(6), tail(0)}, 3};
  return {{static_cast<uint8_t>(0xf0 | (code >> 18)), tail(12), tail(6), tail(0)}, 4};
}

}  // namespace

std::vector<CodeRange> Normalized(std::vector<CodeRange> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const CodeRange& a, const CodeRange& b) { return a.low < b.low; });
  std::vector<CodeRange> out;
  for (const CodeRange& range : ranges) {
    if (range.low > range.high) continue;
    if (!out.empty() && range.low <= out.back().high + 1) {
      out.back().high = std::max(out.back().high, range.high);
    } else {
      out.push_back(range);
    }
  }
  return out;
}

std::vector<CodeRange> Complement(std::span<const CodeRange> ranges) {
  std::vector<CodeRange> out;
  char32_t next = 0;
  for (const CodeRange& range : ranges) {
    if (range.low > next) out.push_back({next, range.low - 1});
    next = range.high + 1;
  }
  if (next <= kLastCode) out.push_back({next, kLastCode});
  return out;
}

int32_t Builder::Class(int32_t from, std::span<const CodeRange> ranges) {
  const int32_t to = State();
  // The states behind a lead byte whose further bytes may be any: [1] has one to come.
  std::array<int32_t, 4> any = {to, -1, -1, -1};
  const auto any_tail = [&](int count) {
    for (int k = 1; k <= count; ++k) {
      auto& state = any[static_cast<size_t>(k)];
      if (state >= 0) continue;
      state = State();
      Byte(state, 0x80, 0xbf, any[static_cast<size_t>(k) - 1]);
    }
    return any[static_cast<size_t>(count)];
  };
  // The bytes from low[at] to high[at] and all that follows, for bounds of one length.
  const auto add = [&](const auto& self, int32_t state, const Bytes& low, const Bytes& high, int at) -> void {
    const auto i = static_cast<size_t>(at);
    const int left = low.size - at - 1;
    if (left == 0) {
      Byte(state, low.byte[i], high.byte[i], to);
      return;
    }
    bool low_is_first = true, high_is_last = true;  // of the tails
    for (int k = at + 1; k < low.size; ++k) {
      low_is_first = low_is_first && low.byte[static_cast<size_t>(k)] == 0x80;
      high_is_last = high_is_last && high.byte[static_cast<size_t>(k)] == 0xbf;
    }
    if (low.byte[i] == high.byte[i] && !(low_is_first && high_is_last)) {
      const int32_t next = State();
      Byte(state, low.byte[i], low.byte[i], next);
      self(self, next, low, high, at + 1);
      return;
    }
    int first = low.byte[i], last = high.byte[i];
    if (!low_is_first) {
      const int32_t next = State();
      Byte(state, low.byte[i], low.byte[i], next);
      Bytes end = low;
      for (int k = at + 1; k < low.size; ++k) end.byte[static_cast<size_t>(k)] = 0xbf;
      self(self, next, low, end, at + 1);
      ++first;
    }
    if (!high_is_last) {
      const int32_t next = State();
      Byte(state, high.byte[i], high.byte[i], next);
      Bytes begin = high;
      for (int k = at + 1; k < high.size; ++k) begin.byte[static_cast<size_t>(k)] = 0x80;
      self(self, next, begin, high, at + 1);
      --last;
    }
    if (first <= last) Byte(state, static_cast<uint8_t>(first), static_cast<uint8_t>(last), any_tail(left));
  };
  // Within these all codes have the same number of bytes, and none is a surrogate.
  static constexpr std::array<CodeRange, 5> kParts = {
      {{0, 0x7f}, {0x80, 0x7ff}, {0x800, 0xd7ff}, {0xe000, 0xffff}, {0x10000, kLastCode}}};
  for (const CodeRange& range : ranges) {
    for (const CodeRange& part : kParts) {
      const char32_t low = std::max(range.low, part.low), high = std::min(range.high, part.high);
      if (low <= high) add(add, from, Encode(low), Encode(high), 0);
    }
  }
  return to;
}

}  // namespace phsa
