// Rules over bytes, as they are built (Builder) and as they run (Grammar). Everything that reads a grammar from
// somewhere builds one of these.
#ifndef PHSA_GRAMMAR_NFA_H_
#define PHSA_GRAMMAR_NFA_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "grammar/grammar.h"

namespace phsa {

class Automaton;
class TokenTrie;

// Code points, both ends included.
struct CodeRange {
  char32_t low, high;
};
inline constexpr char32_t kLastCode = 0x10ffff;
// Sorted, without overlaps.
std::vector<CodeRange> Normalized(std::vector<CodeRange> ranges);
std::vector<CodeRange> Complement(std::span<const CodeRange> ranges);

class Builder {
 public:
  // A grammar that takes more is refused: what it would take to run it is a multiple of this.
  static constexpr size_t kMaxStates = 200000;
  static constexpr int32_t kMaxRepeat = 10000;

  explicit Builder(std::string place) : place_(std::move(place)) {}
  const std::string& place() const { return place_; }

  int32_t State();
  void Empty(int32_t from, int32_t to);
  void Byte(int32_t from, uint8_t low, uint8_t high, int32_t to);
  // These return the state behind.
  int32_t Literal(int32_t from, std::string_view text);
  // One character, in UTF-8; surrogates are left out. Ranges as Normalized gives them.
  int32_t Class(int32_t from, std::span<const CodeRange> ranges);
  int32_t Call(int32_t from, int32_t rule);
  // `part` builds what is repeated, from one state to the one that it returns. max < 0: without end.
  using Part = std::function<int32_t(int32_t from)>;
  int32_t Repeat(int32_t from, int32_t min, int32_t max, const Part& part);

  // `name` is for messages.
  int32_t Rule(std::string name);
  int32_t RuleStart(int32_t rule) const { return rules_[static_cast<size_t>(rule)].start; }
  int32_t RuleEnd(int32_t rule) const { return rules_[static_cast<size_t>(rule)].end; }
  // A rule that `part` makes, the first time that `key` is asked for.
  int32_t SharedRule(const std::string& key, const Part& part);

  // Throws phsa::Error where a rule calls itself before it has read anything, or no text can ever end.
  std::shared_ptr<const Grammar> Finish(int32_t root);

 private:
  struct Edge {
    uint8_t low, high;
    int32_t to;
  };
  struct CallEdge {
    int32_t rule, to;
  };
  struct StateEdges {
    std::vector<Edge> bytes;
    std::vector<int32_t> empty;
    std::vector<CallEdge> calls;
  };
  struct RuleEnds {
    std::string name;
    int32_t start, end;
  };
  void CheckStates(size_t more) const;
  // States from which the end of their rule can be reached; by the empty text alone unless `bytes`.
  std::vector<bool> ReachEnd(bool bytes) const;
  void RefuseLeftRecursion() const;
  void InlineRules();
  std::vector<int32_t> StatesOf(int32_t rule) const;
  std::vector<bool> RuleEndStates() const;  // [state]
  // Calls go on behind states that only lead on, so that a call at the end of its rule is seen to be one.
  void ShortenCalls(const std::vector<bool>& is_end);
  // What can be reached from the root and comes to an end, numbered anew.
  struct Numbering {
    std::vector<int32_t> number;  // [state]; -1: left out
    std::vector<int32_t> order;   // the states, by number
  };
  Numbering NumberUseful(int32_t root, const std::vector<bool>& useful) const;
  // Bytes that no edge tells apart are one class.
  void MakeClasses(std::span<const int32_t> order, Grammar& grammar) const;
  void CopyStates(const Numbering& useful, const std::vector<bool>& is_end, Grammar& grammar) const;

  std::string place_;
  std::vector<StateEdges> states_;
  std::vector<RuleEnds> rules_;
  std::map<std::string, int32_t> shared_;
};

// Immutable, but for the automaton, which is made when the first text is followed and keeps what it has worked out.
class Grammar {
 public:
  struct Edge {
    uint8_t low, high;  // classes of bytes
    int32_t to;
  };
  struct Call {
    int32_t start, to;  // the first state of the rule; where it goes on behind it
  };
  struct State {
    uint32_t edges, empty, calls;  // where its lists begin; they end where the next state's begin
    bool end;                      // of its rule
  };

  int32_t start() const { return start_; }
  size_t num_states() const { return states_.size() - 1; }
  int32_t num_classes() const { return num_classes_; }
  uint8_t class_of(uint8_t byte) const { return classes_[byte]; }
  bool is_end(int32_t state) const { return states_[static_cast<size_t>(state)].end; }
  std::span<const Edge> edges(int32_t state) const { return List(edges_, &State::edges, state); }
  std::span<const int32_t> empty(int32_t state) const { return List(empty_, &State::empty, state); }
  std::span<const Call> calls(int32_t state) const { return List(calls_, &State::calls, state); }

  // The one for this vocabulary; it must not outlive the grammar.
  std::shared_ptr<Automaton> AutomatonFor(const std::shared_ptr<const TokenTrie>& trie) const;

 private:
  friend class Builder;
  template <class T>
  std::span<const T> List(const std::vector<T>& all, uint32_t State::*begin, int32_t state) const {
    const auto at = static_cast<size_t>(state);
    return std::span(all).subspan(states_[at].*begin, states_[at + 1].*begin - states_[at].*begin);
  }

  int32_t start_ = 0, num_classes_ = 0;
  std::array<uint8_t, 256> classes_{};
  std::vector<State> states_;  // and one behind the last
  std::vector<Edge> edges_;
  std::vector<int32_t> empty_;
  std::vector<Call> calls_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<Automaton> automaton_;
};

}  // namespace phsa

#endif  // PHSA_GRAMMAR_NFA_H_
