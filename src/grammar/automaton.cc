#include "grammar/automaton.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/errors.h"
#include "grammar/matcher.h"

namespace phsa {
namespace {

// States of no grammar: the end of the whole text, and "whoever called", which is not known.
constexpr int32_t kEndOfText = -1, kCaller = -2;
// What a token may cost: closures of ambiguous grammars grow with the ways to read what was written.
constexpr size_t kMaxSteps = 3000000, kMaxClosure = 100000;
// What is kept between tokens: entries of sets and places, and bytes of masks and of known steps.
constexpr size_t kMaxEntries = 200000, kMaxBytes = size_t{16} << 20;

[[noreturn]] void ThrowAmbiguous() {
  ThrowInvalid(
      "the grammar is too ambiguous: what was written so far can be read in too many ways; write it so that "
      "each text has few of them");
}

}  // namespace

size_t Automaton::EntriesHash::operator()(const Entries& entries) const {
  uint64_t hash = entries.size();
  for (const Entry& entry : entries) {
    const uint64_t one =
        (static_cast<uint64_t>(static_cast<uint32_t>(entry.state)) << 32) | static_cast<uint32_t>(entry.below);
    hash = (hash ^ one) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return hash;
}

Automaton::Automaton(const Grammar& grammar, std::shared_ptr<const TokenTrie> trie)
    : grammar_(grammar), trie_(std::move(trie)) {
  Reset();
}

void Automaton::Reset() {
  set_ids_.clear();
  place_ids_.clear();
  sets_.clear();
  places_.clear();
  masks_.clear();
  local_masks_.clear();
  entries_ = mask_bytes_ = 0;
  Intern({});
  InternPlace({});
}

void Automaton::CountSteps(size_t steps) {
  steps_ += steps;
  if (steps_ > kMaxSteps) ThrowAmbiguous();
}

Automaton::SetId Automaton::Intern(Entries entries) {
  const auto [found, is_new] = set_ids_.try_emplace(std::move(entries), static_cast<SetId>(sets_.size()));
  if (is_new) {
    int32_t depth = 0;
    for (const Entry& entry : found->first) depth = std::max(depth, sets_[static_cast<size_t>(entry.below)].depth + 1);
    sets_.push_back({&found->first, depth, -1});
    entries_ += found->first.size() + 1;
  }
  return found->second;
}

Automaton::SetId Automaton::Union(SetId a, SetId b) {
  if (a == b || b == 0) return a;
  if (a == 0) return b;
  const Entries &left = *sets_[static_cast<size_t>(a)].entries, &right = *sets_[static_cast<size_t>(b)].entries;
  CountSteps(left.size() + right.size());
  Entries merged;
  merged.reserve(left.size() + right.size());
  for (size_t i = 0, k = 0; i < left.size() || k < right.size();) {
    if (k == right.size() || (i < left.size() && left[i].state < right[k].state)) {
      merged.push_back(left[i++]);
    } else if (i == left.size() || right[k].state < left[i].state) {
      merged.push_back(right[k++]);
    } else {
      // As deep as the sets are, which has a limit.
      merged.push_back({left[i].state, Union(left[i].below, right[k].below)});
      ++i;
      ++k;
    }
  }
  return Intern(std::move(merged));
}

Automaton::PlaceId Automaton::InternPlace(Entries entries) {
  const auto [found, is_new] = place_ids_.try_emplace(std::move(entries), static_cast<PlaceId>(places_.size()));
  if (is_new) {
    Place place;
    place.entries = &found->first;
    for (const Entry& entry : found->first) {
      place.accepts = place.accepts || entry.state == kEndOfText;
      place.leaves = place.leaves || entry.state == kCaller;
    }
    places_.push_back(std::move(place));
    entries_ += found->first.size() + 1;
  }
  return found->second;
}

Automaton::PlaceId Automaton::Close(std::vector<Entry> work) {
  std::set<Entry> seen(work.begin(), work.end());
  work.assign(seen.begin(), seen.end());
  std::vector<Entry> tops;
  const auto visit = [&](int32_t state, SetId below) {
    if (seen.insert({state, below}).second) work.push_back({state, below});
  };
  while (!work.empty()) {
    const Entry top = work.back();
    work.pop_back();
    if (seen.size() > kMaxClosure) ThrowAmbiguous();
    if (top.state < 0) {
      tops.push_back(top);
      continue;
    }
    CountSteps(1 + grammar_.empty(top.state).size() + grammar_.calls(top.state).size());
    if (!grammar_.edges(top.state).empty()) tops.push_back(top);
    for (const int32_t to : grammar_.empty(top.state)) visit(to, top.below);
    for (const Grammar::Call& call : grammar_.calls(top.state)) {
      // A rule that has nothing left to do behind the call need not be come back to: lists do not grow the stack.
      const bool last = grammar_.is_end(call.to) && grammar_.edges(call.to).empty() &&
                        grammar_.empty(call.to).empty() && grammar_.calls(call.to).empty();
      if (last) {
        visit(call.start, top.below);
      } else if (sets_[static_cast<size_t>(top.below)].depth < kMaxGrammarDepth) {
        visit(call.start, Intern({{call.to, top.below}}));
      }
    }
    if (grammar_.is_end(top.state)) {
      const Entries& callers = *sets_[static_cast<size_t>(top.below)].entries;
      CountSteps(callers.size());
      for (const Entry& entry : callers) visit(entry.state, entry.below);
    }
  }
  std::sort(tops.begin(), tops.end());
  Entries entries;
  for (const Entry& top : tops) {
    if (!entries.empty() && entries.back().state == top.state) {
      entries.back().below = Union(entries.back().below, top.below);
    } else {
      entries.push_back(top);
    }
  }
  return InternPlace(std::move(entries));
}

Automaton::PlaceId Automaton::PlaceOf(SetId set) {
  const auto at = static_cast<size_t>(set);
  if (sets_[at].place < 0) {
    const PlaceId place = Close(*sets_[at].entries);
    sets_[at].place = place;
  }
  return sets_[at].place;
}

Automaton::PlaceId Automaton::Step(PlaceId place, uint8_t byte_class) {
  const auto at = static_cast<size_t>(place);
  if (places_[at].next.empty()) {
    const auto classes = static_cast<size_t>(grammar_.num_classes());
    places_[at].next.assign(classes, place == 0 ? 0 : -1);
    mask_bytes_ += classes * sizeof(PlaceId);
  }
  if (const PlaceId known = places_[at].next[byte_class]; known >= 0) return known;
  std::vector<Entry> work;
  for (const Entry& entry : *places_[at].entries) {
    if (entry.state < 0) continue;
    const auto edges = grammar_.edges(entry.state);
    CountSteps(edges.size());
    for (const Grammar::Edge& edge : edges) {
      if (edge.low <= byte_class && byte_class <= edge.high) work.push_back({edge.to, entry.below});
    }
  }
  const PlaceId next = work.empty() ? 0 : Close(std::move(work));
  places_[at].next[byte_class] = next;
  return next;
}

Automaton::PlaceId Automaton::StepBytes(PlaceId place, std::string_view bytes) {
  for (const char byte : bytes) {
    if (place == 0) break;
    place = Step(place, grammar_.class_of(static_cast<uint8_t>(byte)));
  }
  return place;
}

template <class Visit>
void Automaton::Walk(PlaceId place, int32_t node, const Visit& visit) {
  const std::span<const TokenTrie::Node> nodes = trie_->nodes();
  path_.resize(trie_->depth() + 1);
  path_[nodes[static_cast<size_t>(node)].depth] = place;
  const int32_t end = nodes[static_cast<size_t>(node)].end;
  for (int32_t i = node + 1; i < end;) {
    const TokenTrie::Node& one = nodes[static_cast<size_t>(i)];
    const PlaceId above = path_[size_t{one.depth} - 1];
    const uint8_t byte_class = grammar_.class_of(one.byte);
    const std::vector<PlaceId>& known = places_[static_cast<size_t>(above)].next;
    PlaceId next = known.empty() ? -1 : known[byte_class];
    if (next < 0) next = Step(above, byte_class);
    if (next == 0) {
      i = one.end;
      continue;
    }
    path_[one.depth] = next;
    visit(i, next);
    ++i;
  }
}

void Automaton::AddTokens(const TokenTrie::Node& node, std::vector<uint64_t>& words) const {
  for (int32_t i = node.tokens; i < node.tokens_end; ++i) {
    const auto token = static_cast<size_t>(trie_->tokens()[static_cast<size_t>(i)]);
    words[token / 64] |= uint64_t{1} << (token % 64);
  }
}

const Automaton::LocalMask& Automaton::Local(PlaceId place) {
  if (places_[static_cast<size_t>(place)].local_mask < 0) {
    LocalMask local;
    local.words.resize(trie_->mask_words());
    Walk(place, 0, [&](int32_t node, PlaceId at) {
      AddTokens(trie_->nodes()[static_cast<size_t>(node)], local.words);
      if (places_[static_cast<size_t>(at)].leaves) local.leaving.push_back(node);
    });
    mask_bytes_ += local.words.size() * sizeof(uint64_t) + local.leaving.size() * sizeof(int32_t);
    places_[static_cast<size_t>(place)].local_mask = static_cast<int32_t>(local_masks_.size());
    local_masks_.push_back(std::move(local));
  }
  return local_masks_[static_cast<size_t>(places_[static_cast<size_t>(place)].local_mask)];
}

void Automaton::MakeMask(PlaceId place, std::vector<uint64_t>& words) {
  words.assign(trie_->mask_words(), 0);
  const SetId unknown = Intern({{kCaller, 0}});
  // Those that go on in the same way are in the same rule, as far as a mask can tell.
  std::map<SetId, Entries> by_caller;
  for (const Entry& entry : *places_[static_cast<size_t>(place)].entries) {
    if (entry.state >= 0) by_caller[entry.below].push_back({entry.state, unknown});
  }
  for (auto& [below, entries] : by_caller) {
    const LocalMask& local = Local(InternPlace(std::move(entries)));
    for (size_t i = 0; i < words.size(); ++i) words[i] |= local.words[i];
    if (local.leaving.empty()) continue;
    const PlaceId behind = PlaceOf(below);
    // `local` may move while others are made; none are here.
    for (const int32_t node : local.leaving) {
      Walk(behind, node, [&](int32_t at, PlaceId) { AddTokens(trie_->nodes()[static_cast<size_t>(at)], words); });
    }
  }
}

void Automaton::Collect() {
  if (entries_ < kMaxEntries && mask_bytes_ < kMaxBytes) return;
  // The sets that the slots stand on, from the bottom: ids below an entry are smaller than its own.
  const std::vector<Set> old_sets = std::move(sets_);
  const std::vector<Place> old_places = std::move(places_);
  const auto old_set_ids = std::move(set_ids_);
  const auto old_place_ids = std::move(place_ids_);
  std::vector<bool> needed(old_sets.size());
  for (const PlaceId slot : slots_) {
    if (slot < 0) continue;
    for (const Entry& entry : *old_places[static_cast<size_t>(slot)].entries) {
      needed[static_cast<size_t>(entry.below)] = true;
    }
  }
  for (size_t i = old_sets.size(); i-- > 0;) {
    if (!needed[i]) continue;
    for (const Entry& entry : *old_sets[i].entries) needed[static_cast<size_t>(entry.below)] = true;
  }
  Reset();
  std::vector<SetId> moved(old_sets.size());
  const auto renumbered = [&](Entries entries) {
    for (Entry& entry : entries) entry.below = moved[static_cast<size_t>(entry.below)];
    return entries;
  };
  for (size_t i = 0; i < old_sets.size(); ++i) {
    if (needed[i]) moved[i] = Intern(renumbered(*old_sets[i].entries));
  }
  for (PlaceId& slot : slots_) {
    if (slot >= 0) slot = InternPlace(renumbered(*old_places[static_cast<size_t>(slot)].entries));
  }
}

int32_t Automaton::NewSlot() {
  const std::lock_guard lock(mutex_);
  steps_ = 0;
  const PlaceId place = Close({{grammar_.start(), Intern({{kEndOfText, 0}})}});
  const auto free = std::ranges::find(slots_, -1);
  if (free != slots_.end()) {
    *free = place;
    return static_cast<int32_t>(free - slots_.begin());
  }
  slots_.push_back(place);
  return static_cast<int32_t>(slots_.size()) - 1;
}

int32_t Automaton::CopySlot(int32_t slot) {
  const std::lock_guard lock(mutex_);
  const PlaceId place = slots_[static_cast<size_t>(slot)];
  const auto free = std::ranges::find(slots_, -1);
  if (free != slots_.end()) {
    *free = place;
    return static_cast<int32_t>(free - slots_.begin());
  }
  slots_.push_back(place);
  return static_cast<int32_t>(slots_.size()) - 1;
}

void Automaton::FreeSlot(int32_t slot) {
  const std::lock_guard lock(mutex_);
  slots_[static_cast<size_t>(slot)] = -1;
}

bool Automaton::Allows(int32_t slot, int32_t token) {
  const std::lock_guard lock(mutex_);
  steps_ = 0;
  if (token < 0 || token >= trie_->vocab_size()) return false;
  const std::string_view bytes = trie_->Bytes(token);
  if (bytes.empty()) return false;
  const PlaceId place = slots_[static_cast<size_t>(slot)];
  if (const int32_t mask = places_[static_cast<size_t>(place)].mask; mask >= 0) {
    const auto bit = static_cast<size_t>(token);
    return (masks_[static_cast<size_t>(mask)][bit / 64] >> (bit % 64) & 1) != 0;
  }
  return StepBytes(place, bytes) != 0;
}

std::span<const uint64_t> Automaton::Mask(int32_t slot, std::vector<uint64_t>& storage) {
  const std::lock_guard lock(mutex_);
  steps_ = 0;
  Collect();
  const PlaceId place = slots_[static_cast<size_t>(slot)];
  if (places_[static_cast<size_t>(place)].mask < 0) {
    std::vector<uint64_t> words;
    MakeMask(place, words);
    mask_bytes_ += words.size() * sizeof(uint64_t);
    places_[static_cast<size_t>(place)].mask = static_cast<int32_t>(masks_.size());
    masks_.push_back(std::move(words));
  }
  // Copied: another thread's call may drop it.
  storage = masks_[static_cast<size_t>(places_[static_cast<size_t>(place)].mask)];
  return storage;
}

bool Automaton::Accept(int32_t slot, int32_t token) {
  const std::lock_guard lock(mutex_);
  steps_ = 0;
  Collect();
  if (token < 0 || token >= trie_->vocab_size() || trie_->Bytes(token).empty()) return false;
  const PlaceId next = StepBytes(slots_[static_cast<size_t>(slot)], trie_->Bytes(token));
  if (next == 0) return false;
  slots_[static_cast<size_t>(slot)] = next;
  return true;
}

bool Automaton::MayEnd(int32_t slot) {
  const std::lock_guard lock(mutex_);
  return places_[static_cast<size_t>(slots_[static_cast<size_t>(slot)])].accepts;
}

bool Automaton::MustEnd(int32_t slot) {
  const std::lock_guard lock(mutex_);
  const Entries& entries = *places_[static_cast<size_t>(slots_[static_cast<size_t>(slot)])].entries;
  return entries.size() == 1 && entries.front().state == kEndOfText;
}

}  // namespace phsa
