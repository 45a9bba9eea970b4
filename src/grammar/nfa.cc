#include "grammar/nfa.h"

#include <algorithm>

#include "base/errors.h"
#include "grammar/automaton.h"

namespace phsa {
namespace {

// What is repeated is copied while that stays small, else it becomes a rule that is called.
constexpr size_t kCopiedStates = 2000;
// States that putting rules into their callers may add: inside one rule there is no stack, and places that differ in
// nothing but their stack are worked out once.
constexpr size_t kInlinedStates = 60000;
// States that only lead on, behind a call.
constexpr int kFollowed = 16;

}  // namespace

void Builder::CheckStates(size_t more) const {
  if (states_.size() + more > kMaxStates) {
    ThrowInvalid(
        "{}: is too large: it takes more than {} states; ask for less (fewer or smaller repetitions, bounds, "
        "alternatives)",
        place_, kMaxStates);
  }
}

int32_t Builder::State() {
  CheckStates(1);
  states_.emplace_back();
  return static_cast<int32_t>(states_.size()) - 1;
}

void Builder::Empty(int32_t from, int32_t to) {
  if (from != to) states_[static_cast<size_t>(from)].empty.push_back(to);
}

void Builder::Byte(int32_t from, uint8_t low, uint8_t high, int32_t to) {
  states_[static_cast<size_t>(from)].bytes.push_back({low, high, to});
}

int32_t Builder::Literal(int32_t from, std::string_view text) {
  for (const char c : text) {
    const int32_t next = State();
    Byte(from, static_cast<uint8_t>(c), static_cast<uint8_t>(c), next);
    from = next;
  }
  return from;
}

int32_t Builder::Call(int32_t from, int32_t rule) {
  const int32_t to = State();
  states_[static_cast<size_t>(from)].calls.push_back({rule, to});
  return to;
}

int32_t Builder::Repeat(int32_t from, int32_t min, int32_t max, const Part& part) {
  const int32_t last = std::max(min, max);
  if (last > kMaxRepeat) ThrowInvalid("{}: repeats something {} times; allowed: {}", place_, last, kMaxRepeat);
  const int32_t end = State();
  const bool endless = max < 0;
  // Endless: the last one that must be there is the one that may come again.
  const int32_t copies = endless ? std::max(min, 1) : max;
  if (copies == 0) {
    Empty(from, end);
    return end;
  }
  // Nothing of this may be reached from `from` but through what is repeated: it may have other edges.
  int32_t at = State();
  Empty(from, at);
  int32_t rule = -1;
  Part again = part;
  for (int32_t i = 0; i < copies; ++i) {
    if (i >= min) Empty(at, end);
    const size_t before = states_.size();
    const int32_t first = State();
    Empty(at, first);
    int32_t next = again(first);
    if (i == 0 && copies > 1 && (states_.size() - before) * static_cast<size_t>(copies) > kCopiedStates) {
      // The first one stays; the others share a rule, which is made on its own.
      rule = Rule("a repetition");
      Empty(part(RuleStart(rule)), RuleEnd(rule));
      again = [this, rule](int32_t state) { return Call(state, rule); };
    }
    if (endless && i == copies - 1) Empty(next, at);
    // What comes next must not lie inside of what is repeated, should that be a loop.
    const int32_t behind = State();
    Empty(next, behind);
    at = behind;
  }
  Empty(at, end);
  return end;
}

int32_t Builder::Rule(std::string name) {
  const int32_t start = State(), end = State();
  rules_.push_back({std::move(name), start, end});
  return static_cast<int32_t>(rules_.size()) - 1;
}

int32_t Builder::SharedRule(const std::string& key, const Part& part) {
  if (const auto found = shared_.find(key); found != shared_.end()) return found->second;
  const int32_t rule = Rule(key);
  shared_[key] = rule;
  Empty(part(RuleStart(rule)), RuleEnd(rule));
  return rule;
}

std::vector<bool> Builder::ReachEnd(bool bytes) const {
  struct Into {
    std::vector<int32_t> plain;                      // states with an edge to this one
    std::vector<std::pair<int32_t, int32_t>> calls;  // (state, rule) of calls that go on here
  };
  std::vector<Into> into(states_.size());
  std::vector<std::vector<std::pair<int32_t, int32_t>>> callers(rules_.size());  // (state, where it goes on)
  std::vector<std::vector<int32_t>> starts(states_.size());                      // rules that begin here
  for (size_t s = 0; s < states_.size(); ++s) {
    const auto from = static_cast<int32_t>(s);
    if (bytes) {
      for (const Edge& edge : states_[s].bytes) into[static_cast<size_t>(edge.to)].plain.push_back(from);
    }
    for (const int32_t to : states_[s].empty) into[static_cast<size_t>(to)].plain.push_back(from);
    for (const CallEdge& call : states_[s].calls) {
      into[static_cast<size_t>(call.to)].calls.emplace_back(from, call.rule);
      callers[static_cast<size_t>(call.rule)].emplace_back(from, call.to);
    }
  }
  std::vector<bool> reaches(states_.size());
  std::vector<int32_t> work;
  const auto mark = [&](int32_t state) {
    if (reaches[static_cast<size_t>(state)]) return;
    reaches[static_cast<size_t>(state)] = true;
    work.push_back(state);
  };
  for (size_t r = 0; r < rules_.size(); ++r) {
    starts[static_cast<size_t>(rules_[r].start)].push_back(static_cast<int32_t>(r));
    mark(rules_[r].end);
  }
  while (!work.empty()) {
    const auto state = static_cast<size_t>(work.back());
    work.pop_back();
    for (const int32_t from : into[state].plain) mark(from);
    for (const auto& [from, rule] : into[state].calls) {
      if (reaches[static_cast<size_t>(RuleStart(rule))]) mark(from);
    }
    for (const int32_t rule : starts[state]) {
      for (const auto& [from, to] : callers[static_cast<size_t>(rule)]) {
        if (reaches[static_cast<size_t>(to)]) mark(from);
      }
    }
  }
  return reaches;
}

void Builder::RefuseLeftRecursion() const {
  const std::vector<bool> may_be_empty = ReachEnd(false);
  // What a rule may call before it has read a byte.
  std::vector<std::vector<int32_t>> first_calls(rules_.size());
  std::vector<bool> seen(states_.size());
  for (size_t r = 0; r < rules_.size(); ++r) {
    std::vector<int32_t> work = {rules_[r].start}, all;
    seen[static_cast<size_t>(rules_[r].start)] = true;
    while (!work.empty()) {
      const int32_t state = work.back();
      work.pop_back();
      all.push_back(state);
      const auto visit = [&](int32_t to) {
        if (seen[static_cast<size_t>(to)]) return;
        seen[static_cast<size_t>(to)] = true;
        work.push_back(to);
      };
      for (const int32_t to : states_[static_cast<size_t>(state)].empty) visit(to);
      for (const CallEdge& call : states_[static_cast<size_t>(state)].calls) {
        first_calls[r].push_back(call.rule);
        if (may_be_empty[static_cast<size_t>(RuleStart(call.rule))]) visit(call.to);
      }
    }
    for (const int32_t state : all) seen[static_cast<size_t>(state)] = false;
  }
  // Rules that call nothing that is left are taken away; what stays is in a circle, or leads into one.
  std::vector<std::vector<int32_t>> callers(rules_.size());
  std::vector<size_t> left(rules_.size());
  std::vector<int32_t> work;
  for (size_t r = 0; r < rules_.size(); ++r) {
    left[r] = first_calls[r].size();
    for (const int32_t called : first_calls[r]) callers[static_cast<size_t>(called)].push_back(static_cast<int32_t>(r));
    if (left[r] == 0) work.push_back(static_cast<int32_t>(r));
  }
  size_t taken = 0;
  while (!work.empty()) {
    const auto rule = static_cast<size_t>(work.back());
    work.pop_back();
    ++taken;
    for (const int32_t caller : callers[rule]) {
      if (--left[static_cast<size_t>(caller)] == 0) work.push_back(caller);
    }
  }
  if (taken == rules_.size()) return;
  // Follow calls that are left until a rule comes again: that one is in the circle.
  size_t at = 0;
  while (left[at] == 0) ++at;
  std::vector<bool> passed(rules_.size());
  while (!passed[at]) {
    passed[at] = true;
    const auto next =
        std::ranges::find_if(first_calls[at], [&](int32_t to) { return left[static_cast<size_t>(to)] > 0; });
    at = static_cast<size_t>(*next);
  }
  ThrowInvalid(
      "{}: the rule {} calls itself before it has read anything (left recursion); write it as a repetition, "
      "or with itself at the end",
      place_, Quoted(rules_[at].name));
}

std::vector<int32_t> Builder::StatesOf(int32_t rule) const {
  std::vector<int32_t> all = {RuleStart(rule)};
  std::map<int32_t, bool> seen = {{RuleStart(rule), true}};
  const auto visit = [&](int32_t to) {
    if (seen.emplace(to, true).second) all.push_back(to);
  };
  for (size_t i = 0; i < all.size(); ++i) {
    const StateEdges& state = states_[static_cast<size_t>(all[i])];
    for (const Edge& edge : state.bytes) visit(edge.to);
    for (const int32_t to : state.empty) visit(to);
    for (const CallEdge& call : state.calls) visit(call.to);
  }
  visit(RuleEnd(rule));
  return all;
}

void Builder::InlineRules() {
  size_t room = std::min(kInlinedStates, kMaxStates - states_.size());
  // Calls by the rule that they are in; rules whose calls have all been replaced can be put into theirs.
  std::vector<std::vector<std::pair<int32_t, int32_t>>> sites(rules_.size());  // of a rule: (state, caller)
  std::vector<size_t> calls_left(rules_.size());
  for (size_t r = 0; r < rules_.size(); ++r) {
    for (const int32_t state : StatesOf(static_cast<int32_t>(r))) {
      for (const CallEdge& call : states_[static_cast<size_t>(state)].calls) {
        sites[static_cast<size_t>(call.rule)].emplace_back(state, static_cast<int32_t>(r));
        ++calls_left[r];
      }
    }
  }
  std::vector<int32_t> ready;
  for (size_t r = 0; r < rules_.size(); ++r) {
    if (calls_left[r] == 0) ready.push_back(static_cast<int32_t>(r));
  }
  for (size_t i = 0; i < ready.size(); ++i) {
    const int32_t rule = ready[i];
    const auto& callers = sites[static_cast<size_t>(rule)];
    if (callers.empty()) continue;
    const std::vector<int32_t> body = StatesOf(rule);
    if (body.size() * callers.size() > room) continue;
    room -= body.size() * callers.size();
    for (const auto& [state, caller] : callers) {
      std::vector<CallEdge>& calls = states_[static_cast<size_t>(state)].calls;
      const auto call = std::ranges::find_if(calls, [&](const CallEdge& one) { return one.rule == rule; });
      const int32_t to = call->to;
      calls.erase(call);
      std::map<int32_t, int32_t> copies;
      for (const int32_t old : body) copies[old] = State();
      for (const int32_t old : body) {
        StateEdges edges = states_[static_cast<size_t>(old)];
        for (Edge& edge : edges.bytes) edge.to = copies[edge.to];
        for (int32_t& next : edges.empty) next = copies[next];
        states_[static_cast<size_t>(copies[old])] = std::move(edges);
      }
      Empty(state, copies[RuleStart(rule)]);
      Empty(copies[RuleEnd(rule)], to);
      if (--calls_left[static_cast<size_t>(caller)] == 0) ready.push_back(caller);
    }
  }
}

std::vector<bool> Builder::RuleEndStates() const {
  std::vector<bool> is_end(states_.size());
  for (const RuleEnds& rule : rules_) is_end[static_cast<size_t>(rule.end)] = true;
  return is_end;
}

void Builder::ShortenCalls(const std::vector<bool>& is_end) {
  for (StateEdges& state : states_) {
    for (CallEdge& call : state.calls) {
      for (int i = 0; i < kFollowed; ++i) {
        const StateEdges& to = states_[static_cast<size_t>(call.to)];
        if (is_end[static_cast<size_t>(call.to)] || !to.bytes.empty() || !to.calls.empty() || to.empty.size() != 1)
          break;
        call.to = to.empty.front();
      }
    }
  }
}

Builder::Numbering Builder::NumberUseful(int32_t root, const std::vector<bool>& useful) const {
  Numbering out;
  out.number.assign(states_.size(), -1);
  const auto visit = [&](int32_t state) {
    if (!useful[static_cast<size_t>(state)] || out.number[static_cast<size_t>(state)] >= 0) return;
    out.number[static_cast<size_t>(state)] = static_cast<int32_t>(out.order.size());
    out.order.push_back(state);
  };
  visit(RuleStart(root));
  for (size_t i = 0; i < out.order.size(); ++i) {
    const StateEdges& state = states_[static_cast<size_t>(out.order[i])];
    for (const Edge& edge : state.bytes) visit(edge.to);
    for (const int32_t to : state.empty) visit(to);
    for (const CallEdge& call : state.calls) {
      if (!useful[static_cast<size_t>(RuleStart(call.rule))] || !useful[static_cast<size_t>(call.to)]) continue;
      visit(RuleStart(call.rule));
      visit(call.to);
    }
  }
  return out;
}

void Builder::MakeClasses(std::span<const int32_t> order, Grammar& grammar) const {
  std::array<bool, 257> begins{};
  begins[0] = true;
  for (const int32_t old : order) {
    for (const Edge& edge : states_[static_cast<size_t>(old)].bytes) {
      begins[edge.low] = true;
      begins[size_t{edge.high} + 1] = true;
    }
  }
  int32_t classes = -1;
  for (size_t byte = 0; byte < 256; ++byte) {
    if (begins[byte]) ++classes;
    grammar.classes_[byte] = static_cast<uint8_t>(classes);
  }
  grammar.num_classes_ = classes + 1;
}

void Builder::CopyStates(const Numbering& useful, const std::vector<bool>& is_end, Grammar& grammar) const {
  const auto renumbered = [&](int32_t state) { return useful.number[static_cast<size_t>(state)]; };
  const auto begin_state = [&](bool end) {
    grammar.states_.push_back({static_cast<uint32_t>(grammar.edges_.size()),
                               static_cast<uint32_t>(grammar.empty_.size()),
                               static_cast<uint32_t>(grammar.calls_.size()), end});
  };
  for (const int32_t old : useful.order) {
    const StateEdges& state = states_[static_cast<size_t>(old)];
    begin_state(is_end[static_cast<size_t>(old)]);
    for (const Edge& edge : state.bytes) {
      if (renumbered(edge.to) < 0) continue;
      grammar.edges_.push_back({grammar.classes_[edge.low], grammar.classes_[edge.high], renumbered(edge.to)});
    }
    for (const int32_t to : state.empty) {
      if (renumbered(to) >= 0) grammar.empty_.push_back(renumbered(to));
    }
    for (const CallEdge& call : state.calls) {
      const int32_t start = renumbered(RuleStart(call.rule)), to = renumbered(call.to);
      if (start >= 0 && to >= 0) grammar.calls_.push_back({start, to});
    }
  }
  begin_state(false);
}

std::shared_ptr<const Grammar> Builder::Finish(int32_t root) {
  RefuseLeftRecursion();
  InlineRules();
  const std::vector<bool> useful = ReachEnd(true);
  if (!useful[static_cast<size_t>(RuleStart(root))]) {
    ThrowInvalid("{}: no text can ever fulfil it: its rules never come to an end", place_);
  }
  const std::vector<bool> is_end = RuleEndStates();
  ShortenCalls(is_end);
  const Numbering numbering = NumberUseful(root, useful);
  auto grammar = std::make_shared<Grammar>();
  MakeClasses(numbering.order, *grammar);
  CopyStates(numbering, is_end, *grammar);
  grammar->start_ = numbering.number[static_cast<size_t>(RuleStart(root))];
  return grammar;
}

std::shared_ptr<Automaton> Grammar::AutomatonFor(const std::shared_ptr<const TokenTrie>& trie) const {
  const std::lock_guard lock(mutex_);
  if (automaton_ == nullptr || automaton_->trie() != trie) automaton_ = std::make_shared<Automaton>(*this, trie);
  return automaton_;
}

}  // namespace phsa
