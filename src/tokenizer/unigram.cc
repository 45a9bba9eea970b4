#include "tokenizer/unigram.h"

#include <algorithm>
#include <utility>

#include "base/utf8.h"

namespace phsa {
namespace {

constexpr double kUnknownPenalty = 10;

}  // namespace

Unigram::Unigram(UnigramModel model) : model_(std::move(model)) {
  std::vector<std::pair<std::string_view, int32_t>> tokens(model_.ids.begin(), model_.ids.end());
  std::sort(tokens.begin(), tokens.end());
  // Level by level, so that the children of a node lie together.
  struct Range {
    size_t begin, end, depth;  // of `tokens`: those that begin alike
  };
  std::vector<Range> ranges{{0, tokens.size(), 0}};
  nodes_.emplace_back();
  bytes_.push_back(0);
  for (size_t node = 0; node < nodes_.size(); ++node) {
    Range range = ranges[node];
    if (range.begin < range.end && tokens[range.begin].first.size() == range.depth) {
      nodes_[node].token = tokens[range.begin].second;
      ++range.begin;
    }
    nodes_[node].children = static_cast<uint32_t>(nodes_.size());
    while (range.begin < range.end) {
      const char byte = tokens[range.begin].first[range.depth];
      size_t end = range.begin;
      while (end < range.end && tokens[end].first[range.depth] == byte) ++end;
      ranges.push_back({range.begin, end, range.depth + 1});
      nodes_.emplace_back();
      bytes_.push_back(static_cast<uint8_t>(byte));
      range.begin = end;
    }
    nodes_[node].count = static_cast<uint32_t>(nodes_.size()) - nodes_[node].children;
  }
}

inline uint32_t Unigram::Child(uint32_t node, uint8_t byte) const {
  const uint8_t* const first = bytes_.data() + nodes_[node].children;
  const uint8_t* const end = first + nodes_[node].count;
  const uint8_t* const found = std::lower_bound(first, end, byte);
  return found == end || *found != byte ? 0 : static_cast<uint32_t>(found - bytes_.data());
}

bool Unigram::CanGive(const std::vector<uint8_t>& tokens) const {
  const auto is_one = [&](int32_t id) { return id >= 0 && tokens[static_cast<size_t>(id)] != 0; };
  return is_one(model_.unknown) ||
         std::any_of(model_.ids.begin(), model_.ids.end(), [&](const auto& token) { return is_one(token.second); });
}

void Unigram::Encode(std::string_view text, const std::vector<uint8_t>* forbidden, Scratch* scratch,
                     std::vector<int32_t>* ids) const {
  const auto allowed = [&](int32_t id) { return forbidden == nullptr || (*forbidden)[static_cast<size_t>(id)] == 0; };
  // What is unknown, characters one after the other, is one.
  size_t unknown_begin = 0, unknown_end = 0;
  const auto end_unknown = [&] {
    const std::string_view unknown = text.substr(unknown_begin, unknown_end - unknown_begin);
    unknown_begin = unknown_end;
    if (unknown.empty()) return;
    if (const auto found = model_.ids.find(std::string(unknown)); found != model_.ids.end() && allowed(found->second)) {
      ids->push_back(found->second);
      return;
    }
    const auto byte_id = [&](char c) { return model_.byte_ids[static_cast<uint8_t>(c)]; };
    if (std::all_of(unknown.begin(), unknown.end(), [&](char c) { return byte_id(c) >= 0; })) {
      for (const char c : unknown) ids->push_back(byte_id(c));
    } else if (model_.unknown >= 0 && allowed(model_.unknown)) {
      ids->push_back(model_.unknown);
    }
  };

  std::vector<Scratch::Best>& best = scratch->best;  // [byte - base]: ends there
  std::vector<Scratch::Best>& path = scratch->path;
  best.assign(1, {});
  size_t base = 0;  // all ways go through here
  for (size_t at = 0;;) {
    if (at == base + best.size() - 1) {  // nothing goes beyond: what lies before is decided
      path.clear();
      for (size_t end = at; end > base; end -= path.back().size) path.push_back(best[end - base]);
      for (size_t begin = base; !path.empty(); path.pop_back()) {
        const Scratch::Best& token = path.back();
        if (token.id == model_.unknown) {
          if (unknown_end != begin || unknown_begin == unknown_end) {
            end_unknown();
            unknown_begin = begin;
          }
          unknown_end = begin + token.size;
        } else {
          end_unknown();
          ids->push_back(token.id);
        }
        begin += token.size;
      }
      best[0] = best[at - base];
      best.resize(1);
      base = at;
      if (at == text.size()) break;
    }
    const double here = best[at - base].score;
    const auto offer = [&](size_t size, double score, int32_t id) {
      const size_t end = at + size - base;
      if (end >= best.size()) best.resize(end + 1);
      Scratch::Best& target = best[end];
      if (target.size == 0 || score > target.score) target = {score, static_cast<uint32_t>(size), id};
    };
    const size_t character = ScanUtf8(text, at).size;
    bool known = false;
    uint32_t node = 0;
    for (size_t end = at; end < text.size();) {
      node = Child(node, static_cast<uint8_t>(text[end]));
      if (node == 0) break;
      ++end;
      const int32_t id = nodes_[node].token;
      if (id < 0 || !allowed(id)) continue;
      offer(end - at, model_.scores[static_cast<size_t>(id)] + here, id);
      known = known || end - at == character;
    }
    if (!known) offer(character, model_.lowest_score - kUnknownPenalty + here, model_.unknown);
    at += character;
  }
  end_unknown();
}

}  // namespace phsa
