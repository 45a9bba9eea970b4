#include "tokenizer/added_tokens.h"

#include <algorithm>
#include <iterator>

#include "tokenizer/unicode_sets.h"
#include "tokenizer/utf8_scan.h"

namespace phsa {
namespace {

uint64_t Edge(uint32_t node, char byte) { return uint64_t{node} << 8 | static_cast<uint8_t>(byte); }

bool IsWhiteSpace(char32_t code) {
  return (code >= 0x9 && code <= 0xd) || code == 0x20 || code == 0x85 || code == 0xa0 || code == 0x1680 ||
         (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f ||
         code == 0x3000;
}

// Where the character that ends at `end` begins; end > 0.
size_t CharacterBefore(std::string_view text, size_t end) {
  size_t begin = end - 1;
  while (begin > 0 && (static_cast<uint8_t>(text[begin]) & 0xc0) == 0x80) --begin;
  return begin;
}

}  // namespace

bool SpecialPlaces::Hold(size_t begin, size_t end) const {
  if (everywhere) return true;
  const auto after = std::upper_bound(ranges.begin(), ranges.end(), begin,
                                      [](size_t place, const TextRange& range) { return place < range.begin; });
  return after != ranges.begin() && end <= std::prev(after)->end;
}

AddedTokenFinder::AddedTokenFinder() : token_of_{-1}, word_character_(Pattern::OneOf(RustWordCharacters())) {}

void AddedTokenFinder::Add(const AddedToken& token, std::string_view text) {
  if (text.empty()) return;
  begins_[static_cast<uint8_t>(text.front())] = true;
  uint32_t node = 0;
  for (const char byte : text) {
    const auto [edge, is_new] = edges_.try_emplace(Edge(node, byte), static_cast<uint32_t>(token_of_.size()));
    if (is_new) token_of_.push_back(-1);
    node = edge->second;
  }
  if (token_of_[node] >= 0) return;
  token_of_[node] = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
}

const AddedToken* AddedTokenFinder::Longest(std::string_view text, size_t at, size_t* end) const {
  const AddedToken* longest = nullptr;
  uint32_t node = 0;
  for (size_t i = at; i < text.size(); ++i) {
    const auto edge = edges_.find(Edge(node, text[i]));
    if (edge == edges_.end()) break;
    node = edge->second;
    if (token_of_[node] < 0) continue;
    longest = &tokens_[static_cast<size_t>(token_of_[node])];
    *end = i + 1;
  }
  return longest;
}

bool AddedTokenFinder::IsWordCharacter(std::string_view character, Pattern::Scratch* scratch) const {
  std::vector<TextRange> matches;
  word_character_.FindAll(character, scratch, &matches);
  return !matches.empty();
}

void AddedTokenFinder::Split(std::string_view text, const SpecialPlaces& special, Pattern::Scratch* scratch,
                             std::vector<Piece>* pieces) const {
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    size_t end = 0;
    const AddedToken* token = begins_[static_cast<uint8_t>(text[at])] ? Longest(text, at, &end) : nullptr;
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at;
    at = end;  // also where the match does not count: no shorter or later token is looked for inside it
    if (token->special && !special.Hold(begin, end)) continue;
    if (token->single_word) {
      const size_t before = begin == 0 ? 0 : CharacterBefore(text, begin);
      if (begin > 0 && IsWordCharacter(text.substr(before, begin - before), scratch)) continue;
      if (end < text.size() && IsWordCharacter(text.substr(end, ScanUtf8(text, end).size), scratch)) continue;
    }
    if (token->left_strip) {
      while (begin > done) {
        const size_t before = CharacterBefore(text, begin);
        if (!IsWhiteSpace(ScanUtf8(text, before).code)) break;
        begin = before;
      }
      begin = std::max(begin, done);
    }
    if (token->right_strip) {
      while (end < text.size()) {
        const Utf8Step step = ScanUtf8(text, end);
        if (!IsWhiteSpace(step.code)) break;
        end += step.size;
      }
    }
    if (done < begin) pieces->push_back({text.substr(done, begin - done), -1});
    pieces->push_back({{}, token->id});
    done = end;
  }
  if (done < text.size()) pieces->push_back({text.substr(done), -1});
}

}  // namespace phsa
