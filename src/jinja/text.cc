#include "jinja/text.h"

#include <algorithm>

namespace phsa::jinja {

size_t Text::RunAt(size_t at) const {
  const auto run =
      std::upper_bound(runs_.begin(), runs_.end(), at, [](size_t place, const Run& one) { return place < one.end; });
  return static_cast<size_t>(run - runs_.begin());
}

bool Text::IsOwn(size_t begin, size_t end) const {
  if (begin >= end) return true;
  const Run& run = runs_[RunAt(begin)];
  return run.own && end <= run.end;
}

void Text::Append(std::string_view bytes, bool own) {
  if (bytes.empty()) return;
  bytes_ += bytes;
  if (!runs_.empty() && runs_.back().own == own) {
    runs_.back().end = bytes_.size();
  } else {
    runs_.push_back({bytes_.size(), own});
  }
}

void Text::Append(const Text& other, size_t begin, size_t end) {
  const std::string_view bytes = other.bytes_;
  for (size_t at = begin, run = begin < end ? other.RunAt(begin) : 0; at < end; ++run) {
    const size_t stop = std::min(end, other.runs_[run].end);
    Append(bytes.substr(at, stop - at), other.runs_[run].own);
    at = stop;
  }
}

Text Text::Part(size_t begin, size_t end) const {
  Text part;
  part.Append(*this, begin, end);
  return part;
}

}  // namespace phsa::jinja
