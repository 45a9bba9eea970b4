#include "grammar/matcher.h"

#include <utility>

#include "grammar/automaton.h"
#include "grammar/nfa.h"

namespace phsa {

GrammarMatcher::GrammarMatcher(std::shared_ptr<const Grammar> grammar, const std::shared_ptr<const TokenTrie>& trie)
    : grammar_(std::move(grammar)), automaton_(grammar_->AutomatonFor(trie)), slot_(automaton_->NewSlot()) {}
GrammarMatcher::~GrammarMatcher() { automaton_->FreeSlot(slot_); }
GrammarMatcher::GrammarMatcher(const GrammarMatcher& other)
    : grammar_(other.grammar_), automaton_(other.automaton_), slot_(automaton_->CopySlot(other.slot_)) {}
GrammarMatcher& GrammarMatcher::operator=(const GrammarMatcher& other) {
  if (this == &other) return *this;
  const int32_t slot = other.automaton_->CopySlot(other.slot_);
  automaton_->FreeSlot(slot_);
  grammar_ = other.grammar_;
  automaton_ = other.automaton_;
  slot_ = slot;
  return *this;
}
bool GrammarMatcher::Allows(int32_t token) { return automaton_->Allows(slot_, token); }
std::span<const uint64_t> GrammarMatcher::Mask() { return automaton_->Mask(slot_, mask_); }
bool GrammarMatcher::Accept(int32_t token) { return automaton_->Accept(slot_, token); }
bool GrammarMatcher::MayEnd() const { return automaton_->MayEnd(slot_); }
bool GrammarMatcher::MustEnd() const { return automaton_->MustEnd(slot_); }

}  // namespace phsa
