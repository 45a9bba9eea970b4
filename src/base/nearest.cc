#include "base/nearest.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace phsa {
namespace {

// How many letters must be put in, taken out, changed or swapped with their neighbour.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    before.swap(last);
    last.swap(row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1), last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row.back();
}

}  // namespace

std::string Nearest(std::string_view name, std::span<const std::string> names) {
  constexpr size_t kShortest = 3, kLongest = 200;
  if (name.size() < kShortest || name.size() > kLongest) return "";
  std::string nearest;
  size_t best = name.size() / 3 + 1;  // one letter of three may be wrong
  for (const std::string& known : names) {
    const size_t distance = known.starts_with(name) ? 1 : EditDistance(name, known);
    if (distance < best) {
      best = distance;
      nearest = known;
    }
  }
  return nearest;
}

std::string DidYouMean(std::string_view name, std::span<const std::string> names) {
  const std::string nearest = Nearest(name, names);
  return nearest.empty() ? "" : " (did you mean " + nearest + "?)";
}

}  // namespace phsa
