#include "tokenizer/charsmap.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/errors.h"
#include "tokenizer/utf8_scan.h"

namespace phsa {
namespace {

// A text that a character becomes; 33 bytes in the tables that SentencePiece comes with.
constexpr size_t kLongestText = 256;
// A cluster from here on is looked up by its characters.
constexpr size_t kLongCluster = 6;

// Characters that join the one before them in tokenizers' tables, and that utf8proc does not know.
struct Range {
  char32_t first, last;
};
constexpr Range kNewMarks[] = {
    {0x897, 0x897},     {0x1acf, 0x1add},   {0x1ae0, 0x1aeb},   {0x10d69, 0x10d6d}, {0x10efa, 0x10efc},
    {0x113b8, 0x113c0}, {0x113c2, 0x113c2}, {0x113c5, 0x113c5}, {0x113c7, 0x113ca}, {0x113cc, 0x113d0},
    {0x113d2, 0x113d2}, {0x113e1, 0x113e2}, {0x11b60, 0x11b67}, {0x11f5a, 0x11f5a}, {0x1611e, 0x1612f},
    {0x1e5ee, 0x1e5ef}, {0x1e6e3, 0x1e6e3}, {0x1e6e6, 0x1e6e6}, {0x1e6ee, 0x1e6ef}, {0x1e6f5, 0x1e6f5},
};
constexpr char32_t kAnyMark = 0x300;

// A character with the same joining that utf8proc knows.
int32_t Known(char32_t code) {
  const Range* after = std::upper_bound(std::begin(kNewMarks), std::end(kNewMarks), code,
                                        [](char32_t c, const Range& range) { return c < range.first; });
  if (after != std::begin(kNewMarks) && code <= after[-1].last) return kAnyMark;
  return static_cast<int32_t>(code);
}

// Where the cluster that begins at `at` ends.
size_t ClusterEnd(std::string_view text, size_t at) {
  Utf8Step step = ScanUtf8(text, at);
  size_t end = at + step.size;
  utf8proc_int32_t state = 0;
  while (end < text.size()) {
    // No mark is ASCII, and what ASCII joins is one line's end.
    if (step.code < 0x80 && static_cast<uint8_t>(text[end]) < 0x80 && step.code != '\r') break;
    const Utf8Step next = ScanUtf8(text, end);
    if (utf8proc_grapheme_break_stateful(Known(step.code), Known(next.code), &state)) break;
    end += next.size;
    step = next;
  }
  return end;
}

uint32_t Offset(uint32_t unit) { return (unit >> 10) << ((unit & (1u << 9)) >> 6); }

}  // namespace

Charsmap::Charsmap(std::string_view blob, const std::string& where) {
  uint32_t size = 0;
  if (blob.size() >= sizeof(size)) std::memcpy(&size, blob.data(), sizeof(size));
  if (blob.size() < sizeof(size) || size == 0 || size % sizeof(uint32_t) != 0 || size > blob.size() - sizeof(size)) {
    ThrowInvalid("{} is no precompiled_charsmap: {} bytes that begin with a trie of {}", where, blob.size(), size);
  }
  units_.resize(size / sizeof(uint32_t));
  std::memcpy(units_.data(), blob.data() + sizeof(size), size);
  texts_ = blob.substr(sizeof(size) + size);
  if (FirstInvalidUtf8(texts_) < texts_.size()) ThrowInvalid("{} has texts that are not UTF-8", where);
  for (size_t begin = 0; begin < texts_.size();) {
    const size_t end = std::min(texts_.find('\0', begin), texts_.size());
    if (end - begin > kLongestText) {
      ThrowInvalid("{} has a text of {} bytes for a character; allowed: {}", where, end - begin, kLongestText);
    }
    begin = end + 1;
  }
}

std::optional<std::string_view> Charsmap::Find(std::string_view text) const {
  size_t node = Offset(units_[0]);
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    node ^= byte;
    if (byte == 0 || node >= units_.size()) return std::nullopt;
    const uint32_t unit = units_[node];
    if ((unit & (1u << 31 | 0xff)) != byte) return std::nullopt;
    node ^= Offset(unit);
    if ((unit >> 8 & 1) == 0) continue;
    const size_t begin = node < units_.size() ? units_[node] & ~(1u << 31) : texts_.size();
    // Not into the middle of a character.
    if (begin >= texts_.size() || (static_cast<uint8_t>(texts_[begin]) & 0xc0) == 0x80) return std::nullopt;
    return std::string_view(texts_).substr(begin, std::min(texts_.find('\0', begin), texts_.size()) - begin);
  }
  return std::nullopt;
}

bool Charsmap::DropsFirst(std::string_view text) const {
  if (text.empty()) return false;
  const std::string_view cluster = text.substr(0, ClusterEnd(text, 0));
  const auto whole = cluster.size() < kLongCluster ? Find(cluster) : std::nullopt;
  const auto found = whole ? whole : Find(text.substr(0, ScanUtf8(text, 0).size));
  return found && found->empty();
}

void Charsmap::Append(std::string_view text, std::string* out) const {
  for (size_t at = 0; at < text.size();) {
    const size_t end = ClusterEnd(text, at);
    const std::string_view cluster = text.substr(at, end - at);
    if (cluster.size() < kLongCluster) {
      if (const auto found = Find(cluster)) {
        *out += *found;
        at = end;
        continue;
      }
    }
    while (at < end) {
      const std::string_view character = text.substr(at, ScanUtf8(text, at).size);
      *out += Find(character).value_or(character);
      at += character.size();
    }
  }
}

}  // namespace phsa
