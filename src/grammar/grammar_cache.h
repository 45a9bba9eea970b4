// Grammars that were asked for before: what an automaton has worked out for one request is there for the next.
#ifndef PHSA_GRAMMAR_GRAMMAR_CACHE_H_
#define PHSA_GRAMMAR_GRAMMAR_CACHE_H_

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "grammar/grammar.h"

namespace phsa {

// Any thread may use it.
class GrammarCache {
 public:
  // The grammar that `compile` made of this text before, or makes now. Throws what it throws.
  std::shared_ptr<const Grammar> Get(const std::string& text,
                                     const std::function<std::shared_ptr<const Grammar>()>& compile) {
    {
      const std::lock_guard lock(mutex_);
      const auto found = std::ranges::find(kept_, text, &Kept::first);
      if (found != kept_.end()) {
        std::rotate(found, found + 1, kept_.end());
        return kept_.back().second;
      }
    }
    std::shared_ptr<const Grammar> grammar = compile();  // two threads may do so at the same time; either one is kept
    const std::lock_guard lock(mutex_);
    kept_.emplace_back(text, grammar);
    if (kept_.size() > kMost) kept_.pop_front();
    return grammar;
  }

 private:
  static constexpr size_t kMost = 16;
  using Kept = std::pair<std::string, std::shared_ptr<const Grammar>>;
  std::mutex mutex_;
  std::deque<Kept> kept_;  // the one that was not asked for for the longest time first
};

}  // namespace phsa

#endif  // PHSA_GRAMMAR_GRAMMAR_CACHE_H_
