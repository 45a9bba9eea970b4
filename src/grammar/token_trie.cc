#include "grammar/token_trie.h"

#include <algorithm>

namespace phsa {
namespace {

// Longer ones, as runs of spaces can be, are left out: nothing needs them, and the walk's depth has a limit.
constexpr size_t kLongestToken = 1024;

}  // namespace

TokenTrie::TokenTrie(const std::vector<std::string>& token_bytes) {
  offsets_.reserve(token_bytes.size() + 1);
  for (const std::string& bytes : token_bytes) {
    offsets_.push_back(bytes_.size());
    bytes_ += bytes;
  }
  offsets_.push_back(bytes_.size());
  for (size_t i = 0; i < token_bytes.size(); ++i) {
    if (!token_bytes[i].empty() && token_bytes[i].size() <= kLongestToken) tokens_.push_back(static_cast<int32_t>(i));
  }
  std::sort(tokens_.begin(), tokens_.end(), [&](int32_t a, int32_t b) {
    const std::string_view left = Bytes(a), right = Bytes(b);
    return left != right ? left < right : a < b;
  });

  nodes_.push_back({0, 0, 0, 0, 0});
  std::vector<int32_t> path = {0};  // from the root to the last node
  std::string_view before;
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const std::string_view text = Bytes(tokens_[i]);
    const auto at = static_cast<int32_t>(i);
    if (i == 0 || text != before) {
      const auto common = static_cast<size_t>(
          std::mismatch(text.begin(), text.end(), before.begin(), before.end()).first - text.begin());
      while (path.size() > common + 1) {
        nodes_[static_cast<size_t>(path.back())].end = static_cast<int32_t>(nodes_.size());
        path.pop_back();
      }
      for (size_t k = common; k < text.size(); ++k) {
        path.push_back(static_cast<int32_t>(nodes_.size()));
        nodes_.push_back({static_cast<uint8_t>(text[k]), static_cast<uint16_t>(k + 1), 0, at, at});
      }
      depth_ = std::max(depth_, text.size());
      before = text;
    }
    nodes_[static_cast<size_t>(path.back())].tokens_end = at + 1;
  }
  for (const int32_t node : path) nodes_[static_cast<size_t>(node)].end = static_cast<int32_t>(nodes_.size());
}

}  // namespace phsa
