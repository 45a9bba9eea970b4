// A grammar made deterministic as it is used, over the bytes of one vocabulary's tokens.
//
// A place in a text is a set of stacks: states of the grammar, each above those that its rule goes on with. Sets are
// kept once each, so a place is a number, and a step from it by a class of bytes is looked up once it is known. The
// mask of a place is kept too. Places that differ only below what is read now, as a string in an array and one in an
// object do, share what does not depend on that: the tokens that stay inside of the rule.
#ifndef PHSA_GRAMMAR_AUTOMATON_H_
#define PHSA_GRAMMAR_AUTOMATON_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "grammar/nfa.h"
#include "grammar/token_trie.h"

namespace phsa {

// Any thread, one call at a time: it locks itself.
class Automaton {
 public:
  Automaton(const Grammar& grammar, std::shared_ptr<const TokenTrie> trie);

  const std::shared_ptr<const TokenTrie>& trie() const { return trie_; }
  // Slots are places that somebody is at.
  int32_t NewSlot();
  int32_t CopySlot(int32_t slot);
  void FreeSlot(int32_t slot);

  bool Allows(int32_t slot, int32_t token);
  std::span<const uint64_t> Mask(int32_t slot, std::vector<uint64_t>& storage);
  bool Accept(int32_t slot, int32_t token);
  bool MayEnd(int32_t slot);
  bool MustEnd(int32_t slot);

 private:
  using SetId = int32_t;    // of stacks, as they are: 0 is the empty set
  using PlaceId = int32_t;  // of a set of stacks whose tops read bytes: 0 is dead
  struct Entry {
    int32_t state;
    SetId below;
    friend auto operator<=>(const Entry&, const Entry&) = default;
  };
  using Entries = std::vector<Entry>;  // sorted by state, each state once
  struct EntriesHash {
    size_t operator()(const Entries& entries) const;
  };
  struct Set {
    const Entries* entries = nullptr;
    int32_t depth = 0;
    PlaceId place = -1;  // of the set as what is read next, once it was asked for
  };
  struct Place {
    const Entries* entries = nullptr;
    bool accepts = false;       // the text may end here
    bool leaves = false;        // the rule that a local place is in may have ended here
    std::vector<PlaceId> next;  // by class of bytes; -1: not known yet; empty: none is
    int32_t mask = -1, local_mask = -1;
  };
  struct LocalMask {
    std::vector<uint64_t> words;
    std::vector<int32_t> leaving;  // nodes of the trie at which the rule has ended
  };

  // Counts what closures and walks do for one call.
  void CountSteps(size_t steps);
  SetId Intern(Entries entries);
  SetId Union(SetId a, SetId b);
  // What is read next where any of these is on top.
  PlaceId Close(std::vector<Entry> work);
  PlaceId PlaceOf(SetId set);
  PlaceId InternPlace(Entries entries);
  PlaceId Step(PlaceId place, uint8_t byte_class);
  PlaceId StepBytes(PlaceId place, std::string_view bytes);
  // Calls visit(node index, place) for the nodes below `node` that can be reached from `place`, which is at that node.
  template <class Visit>
  void Walk(PlaceId place, int32_t node, const Visit& visit);
  void AddTokens(const TokenTrie::Node& node, std::vector<uint64_t>& words) const;
  const LocalMask& Local(PlaceId place);
  void MakeMask(PlaceId place, std::vector<uint64_t>& words);
  // Keeps only what the slots need, where much has come together.
  void Collect();
  void Reset();

  const Grammar& grammar_;
  const std::shared_ptr<const TokenTrie> trie_;
  std::mutex mutex_;
  std::unordered_map<Entries, SetId, EntriesHash> set_ids_;
  std::unordered_map<Entries, PlaceId, EntriesHash> place_ids_;
  std::vector<Set> sets_;
  std::vector<Place> places_;
  std::vector<std::vector<uint64_t>> masks_;
  std::vector<LocalMask> local_masks_;
  std::vector<PlaceId> slots_;  // -1: free
  size_t steps_ = 0, entries_ = 0, mask_bytes_ = 0;
  std::vector<PlaceId> path_;  // of Walk
};

}  // namespace phsa

#endif  // PHSA_GRAMMAR_AUTOMATON_H_
