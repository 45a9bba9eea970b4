#include "tokenizer/sentencepiece.h"

#include <algorithm>
#include <tuple>

#include "base/utf8.h"

namespace phsa {
namespace {

// In bytes: far above every token of a real vocabulary. A longer one is not looked at for merges: all its halves would
// take the square of its length.
constexpr size_t kLongestMerged = 4096;

}  // namespace

std::string UnmarkSpaces(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const bool mark = text.substr(at, kSpaceMark.size()) == kSpaceMark;
    out += mark ? ' ' : text[at];
    at += mark ? kSpaceMark.size() : 1;
  }
  return out;
}

int ByteOfToken(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    const bool digit = c >= '0' && c <= '9', letter = c >= 'A' && c <= 'F';
    if (!digit && !letter) return -1;
    value = value * 16 + (digit ? c - '0' : c - 'A' + 10);
  }
  return value;
}

bool FillCharacters(const std::unordered_map<std::string, int32_t>& ids, std::span<const std::string> tokens,
                    BpeModel* model) {
  model->byte_ids.fill(-1);
  for (const auto& [token, id] : ids) {
    if (const int byte = ByteOfToken(token); byte >= 0) model->byte_ids[static_cast<size_t>(byte)] = id;
    const std::optional<std::u32string> characters = DecodeUtf8(token);
    if (characters && characters->size() == 1) model->character_ids.emplace(characters->front(), id);
  }
  for (const BpeMerge& merge : model->merges) {
    const std::optional<std::u32string> characters = DecodeUtf8(tokens[static_cast<size_t>(merge.result)]);
    if (!characters) continue;
    for (size_t i = 0; i + 1 < characters->size(); ++i) {
      const char32_t one = (*characters)[i];
      if (one != kSpaceMarkCode && (*characters)[i + 1] == kSpaceMarkCode) model->before_space.insert(one);
    }
  }
  return std::find(model->byte_ids.begin(), model->byte_ids.end(), -1) == model->byte_ids.end();
}

std::vector<BpeMerge> MergesFromScores(const std::unordered_map<std::string, int32_t>& ids,
                                       std::span<const float> scores) {
  struct Candidate {
    BpeMerge merge;
    float score;
    int32_t left_size, right_size;  // in characters
  };
  std::vector<Candidate> candidates;
  for (const auto& [token, id] : ids) {
    const std::string_view text = token;
    if (text.size() > kLongestMerged) continue;
    const std::optional<std::u32string> characters = DecodeUtf8(text);
    if (!characters) continue;
    const auto size = static_cast<int32_t>(characters->size());
    size_t at = 0;
    for (int32_t left = 1; left < size; ++left) {
      at += ScanUtf8(text, at).size;
      const auto first = ids.find(std::string(text.substr(0, at)));
      if (first == ids.end()) continue;
      const auto second = ids.find(std::string(text.substr(at)));
      if (second == ids.end()) continue;
      candidates.push_back({{first->second, second->second, id}, scores[static_cast<size_t>(id)], left, size - left});
    }
  }
  // Of equal scores the longer left half first: as transformers makes merges of such files.
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return std::tuple(-a.score, -a.left_size, -a.right_size, a.merge.result, a.merge.left) <
           std::tuple(-b.score, -b.left_size, -b.right_size, b.merge.result, b.merge.left);
  });
  std::vector<BpeMerge> merges;
  merges.reserve(candidates.size());
  for (const Candidate& candidate : candidates) merges.push_back(candidate.merge);
  return merges;
}

}  // namespace phsa
