// Decimal numbers within bounds, digit by digit.
#include <algorithm>

#include "grammar/fragments.h"

namespace phsa {
namespace {

// Digits of a number that has no bound on that side, and behind the point.
constexpr size_t kWholeDigits = 16;
constexpr int32_t kFractionDigits = 16;

int32_t Digit(Builder& builder, int32_t from, char low, char high) {
  const int32_t to = builder.State();
  builder.Byte(from, static_cast<uint8_t>(low), static_cast<uint8_t>(high), to);
  return to;
}

int32_t AnyDigits(Builder& builder, int32_t from, int32_t min, int32_t max) {
  return builder.Repeat(from, min, max, [&](int32_t at) { return Digit(builder, at, '0', '9'); });
}

// `end` behind the whole numbers from low to high, which have the same number of digits.
void AddSameLength(Builder& builder, int32_t from, std::string_view low, std::string_view high, int32_t end) {
  if (low.empty()) {
    builder.Empty(from, end);
    return;
  }
  const auto all = [](std::string_view digits, char digit) {
    return digits.find_first_not_of(digit) == std::string_view::npos;
  };
  const auto tail = static_cast<int32_t>(low.size()) - 1;
  if (all(low.substr(1), '0') && all(high.substr(1), '9')) {
    builder.Empty(AnyDigits(builder, Digit(builder, from, low[0], high[0]), tail, tail), end);
    return;
  }
  if (low[0] == high[0]) {
    AddSameLength(builder, Digit(builder, from, low[0], low[0]), low.substr(1), high.substr(1), end);
    return;
  }
  const std::string nines(low.size() - 1, '9'), zeros(low.size() - 1, '0');
  AddSameLength(builder, Digit(builder, from, low[0], low[0]), low.substr(1), nines, end);
  if (high[0] - low[0] > 1) {
    const int32_t between = Digit(builder, from, static_cast<char>(low[0] + 1), static_cast<char>(high[0] - 1));
    builder.Empty(AnyDigits(builder, between, tail, tail), end);
  }
  AddSameLength(builder, Digit(builder, from, high[0], high[0]), zeros, high.substr(1), end);
}

bool Less(std::string_view a, std::string_view b) { return a.size() != b.size() ? a.size() < b.size() : a < b; }

// Whole numbers from low to high, both without a sign and without zeros in front.
void AddWholeBetween(Builder& builder, int32_t from, const std::string& low, const std::string& high, int32_t end) {
  for (size_t digits = low.size(); digits <= high.size(); ++digits) {
    std::string first(digits, '0'), last(digits, '9');
    first[0] = '1';
    if (digits == low.size()) first = low;
    if (digits == high.size()) last = high;
    const int32_t branch = builder.State();
    builder.Empty(from, branch);
    AddSameLength(builder, branch, first, last, end);
  }
}

std::string Next(std::string digits, int step) {  // one more, or one less where there is one
  for (size_t i = digits.size(); i-- > 0;) {
    if (step > 0 && digits[i] != '9') {
      ++digits[i];
      return digits;
    }
    if (step < 0 && digits[i] != '0') {
      --digits[i];
      const size_t first = digits.find_first_not_of('0');
      return first == std::string::npos ? "0" : digits.substr(first);
    }
    digits[i] = step > 0 ? '0' : '9';
  }
  return "1" + digits;
}

// Numbers without a sign; no high: no upper bound.
struct Magnitudes {
  std::string low_whole = "0", low_fraction;
  bool above_low = false;  // not on it
  std::optional<std::string> high_whole = std::nullopt;
  std::string high_fraction;
  bool below_high = false;
};

// A bound on the digits behind the point.
struct FractionBound {
  bool there = false;
  std::string digits;
  bool strict = false;  // the fraction may not be on it
};

// What may stand behind the whole part: nothing, or a point and digits, within the bounds.
void AddFraction(Builder& builder, int32_t from, const FractionBound& low, const FractionBound& high, int32_t end) {
  // What is written so far ends here as if zeros followed.
  const auto may_end = [&](bool on_low, bool on_high, size_t i) {
    if (on_low && (i < low.digits.size() || low.strict)) return false;
    return !on_high || !high.strict || i < high.digits.size();
  };
  if (may_end(low.there, high.there, 0)) builder.Empty(from, end);
  const size_t longest = std::max({low.digits.size(), high.digits.size(), size_t{1}});
  const auto digit_of = [](const std::string& digits, size_t i) { return i < digits.size() ? digits[i] : '0'; };
  // Digit by digit: still on both bounds, on one of them, or free.
  const auto add = [&](const auto& self, int32_t state, bool on_low, bool on_high, size_t i) -> void {
    if (!on_low && !on_high) {
      builder.Empty(AnyDigits(builder, state, i == 0 ? 1 : 0, kFractionDigits), end);
      return;
    }
    if (i > 0 && may_end(on_low, on_high, i)) builder.Empty(state, end);
    // On the upper bound only zeros may come; above a lower one something must, in the end.
    const size_t last_digit = on_low ? longest + (low.strict ? 4 : 0) : longest;
    if (i >= longest && on_high) {
      const auto zero = [&](int32_t at) { return Digit(builder, at, '0', '0'); };
      if (may_end(on_low, on_high, i)) builder.Empty(builder.Repeat(state, 0, 4, zero), end);
      return;
    }
    if (i >= last_digit) {
      if (!low.strict) builder.Empty(AnyDigits(builder, state, 0, kFractionDigits), end);
      return;
    }
    const char first = on_low ? digit_of(low.digits, i) : '0', last = on_high ? digit_of(high.digits, i) : '9';
    if (first > last) return;
    if (first == last) {
      self(self, Digit(builder, state, first, last), on_low, on_high, i + 1);
      return;
    }
    self(self, Digit(builder, state, first, first), on_low, false, i + 1);
    if (last - first > 1) {
      const auto after = static_cast<char>(first + 1), before = static_cast<char>(last - 1);
      self(self, Digit(builder, state, after, before), false, false, i + 1);
    }
    self(self, Digit(builder, state, last, last), false, on_high, i + 1);
  };
  add(add, Digit(builder, from, '.', '.'), low.there, high.there, 0);
}

void AddMagnitude(Builder& builder, int32_t from, const Magnitudes& range, bool integer, int32_t end) {
  const std::string unbounded(std::max(kWholeDigits, range.low_whole.size() + 1), '9');
  if (integer) {
    const bool next = !range.low_fraction.empty() || range.above_low;
    const std::string low = next ? Next(range.low_whole, 1) : range.low_whole;
    std::string high = range.high_whole ? *range.high_whole : unbounded;
    if (range.high_whole && range.below_high && range.high_fraction.empty()) {
      if (high == "0") return;
      high = Next(high, -1);
    }
    if (!Less(high, low)) AddWholeBetween(builder, from, low, high, end);
    return;
  }
  const FractionBound none, low{true, range.low_fraction, range.above_low},
      high{true, range.high_fraction, range.below_high};
  const auto on_bound = [&](const std::string& whole, const FractionBound& least, const FractionBound& most) {
    const int32_t branch = builder.State();
    builder.Empty(from, branch);
    AddFraction(builder, builder.Literal(branch, whole), least, most, end);
  };
  if (range.high_whole && *range.high_whole == range.low_whole) {
    on_bound(range.low_whole, low, high);
    return;
  }
  on_bound(range.low_whole, low, none);
  const std::string first = Next(range.low_whole, 1);
  std::string last = unbounded;
  if (range.high_whole) {
    if (!(range.below_high && range.high_fraction.empty())) on_bound(*range.high_whole, none, high);
    last = Next(*range.high_whole, -1);
  }
  const int32_t inside = builder.State();  // behind whole parts that leave the fraction free
  AddFraction(builder, inside, none, none, end);
  if (!Less(last, first)) AddWholeBetween(builder, from, first, last, inside);
}

bool IsZero(const Decimal& value) { return value.whole == "0" && value.fraction.empty(); }

int32_t AddBetween(Builder& builder, int32_t from, const std::optional<Bound>& low, const std::optional<Bound>& high,
                   bool integer) {
  const int32_t end = builder.State();
  const bool low_negative = !low || (low->value.negative && !IsZero(low->value));
  const bool high_negative = high && high->value.negative && !IsZero(high->value);
  const auto set_low = [](Magnitudes& range, const Bound& bound) {
    range.low_whole = bound.value.whole;
    range.low_fraction = bound.value.fraction;
    range.above_low = bound.strict;
  };
  const auto set_high = [](Magnitudes& range, const Bound& bound) {
    range.high_whole = bound.value.whole;
    range.high_fraction = bound.value.fraction;
    range.below_high = bound.strict;
  };
  const auto add = [&](int32_t at, const Magnitudes& range) {
    const bool none =
        range.high_whole && (*range.high_whole != range.low_whole ? Less(*range.high_whole, range.low_whole)
                                                                  : range.high_fraction < range.low_fraction);
    if (!none) AddMagnitude(builder, at, range, integer, end);
  };
  if (!high_negative) {
    Magnitudes range;
    if (low && !low_negative) set_low(range, *low);
    if (high) set_high(range, *high);
    add(from, range);
  }
  if (low_negative) {
    // Of negative numbers the lower bound is the larger magnitude. 0 is written without a sign.
    Magnitudes range;
    range.above_low = true;
    if (high_negative) set_low(range, *high);
    if (low) set_high(range, *low);
    add(Digit(builder, from, '-', '-'), range);
  }
  return end;
}

}  // namespace

int32_t AddIntegerBetween(Builder& builder, int32_t from, const std::optional<Bound>& low,
                          const std::optional<Bound>& high) {
  return AddBetween(builder, from, low, high, true);
}

int32_t AddNumberBetween(Builder& builder, int32_t from, const std::optional<Bound>& low,
                         const std::optional<Bound>& high) {
  return AddBetween(builder, from, low, high, false);
}

}  // namespace phsa
