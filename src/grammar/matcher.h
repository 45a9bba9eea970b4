// Where an answer is in its grammar: which tokens may follow, and whether the text may end.
#ifndef PHSA_GRAMMAR_MATCHER_H_
#define PHSA_GRAMMAR_MATCHER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "grammar/grammar.h"
#include "grammar/token_trie.h"

namespace phsa {

class Automaton;

// Rules within rules; a text that nests deeper is not written.
inline constexpr int kMaxGrammarDepth = 1000;

// A copy is at the same place and goes its own way, so that tokens can be tried.
class GrammarMatcher {
 public:
  GrammarMatcher(std::shared_ptr<const Grammar> grammar, const std::shared_ptr<const TokenTrie>& trie);
  ~GrammarMatcher();
  GrammarMatcher(const GrammarMatcher& other);
  GrammarMatcher& operator=(const GrammarMatcher& other);

  // All may throw phsa::Error where a grammar is so ambiguous that the steps for one token are too many.
  bool Allows(int32_t token);
  // A bit for each token of the vocabulary, the lowest of word 0 first; valid until the next call. All zero: the text
  // must end, or the vocabulary has no token for what must follow.
  std::span<const uint64_t> Mask();
  // The token is written; false, and nothing happens, where it is not allowed.
  bool Accept(int32_t token);
  bool MayEnd() const;
  bool MustEnd() const;  // and nothing may follow

 private:
  std::shared_ptr<const Grammar> grammar_;
  std::shared_ptr<Automaton> automaton_;
  int32_t slot_;                // of the automaton's
  std::vector<uint64_t> mask_;  // the last one
};

}  // namespace phsa

#endif  // PHSA_GRAMMAR_MATCHER_H_
