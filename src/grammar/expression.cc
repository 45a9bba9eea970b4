// Grammars in pieces.
#include <map>
#include <nlohmann/json.hpp>
#include <queue>
#include <utility>
#include <variant>

#include "base/errors.h"
#include "grammar/fragments.h"
#include "grammar/token_trie.h"

namespace phsa {

struct GrammarExpression::Node {
  struct AnyJson {};
  struct SchemaOf {
    OrderedJson schema;
    std::string place;
  };
  struct GbnfOf {
    std::string text, place;
  };
  struct Parts {
    bool choice;
    std::vector<GrammarExpression> parts;
  };
  struct Repeated {
    GrammarExpression part;
    int min, max;
  };
  struct Free {
    std::vector<Trigger> triggers;
    bool again;
  };
  std::variant<std::string, AnyJson, SchemaOf, GbnfOf, Parts, Repeated, Free> what;
};

namespace {

using Node = GrammarExpression::Node;

GrammarExpression Make(Node node) { return GrammarExpression(std::make_shared<const Node>(std::move(node))); }

int32_t Add(Builder& builder, int32_t from, const GrammarExpression& expression);

// The automaton of Aho and Corasick: in each state, how much of a trigger was written last.
int32_t AddFreeText(Builder& builder, int32_t from, const Node::Free& free) {
  struct State {
    std::map<uint8_t, size_t> next;
    size_t fallback = 0;
    int trigger = -1;      // that ends here
    bool control = false;  // within a control token, which is nothing else
  };
  std::vector<State> nodes(1);
  for (size_t i = 0; i < free.triggers.size(); ++i) {
    size_t at = 0;
    for (const char c : free.triggers[i].text) {
      const auto [found, is_new] = nodes[at].next.try_emplace(static_cast<uint8_t>(c), nodes.size());
      const bool control = nodes[at].control || c == kControlByte;
      at = found->second;
      if (is_new) nodes.emplace_back();
      nodes[at].control = control;
    }
    PHSA_CHECK(at != 0 && nodes[at].trigger < 0);
    nodes[at].trigger = static_cast<int>(i);
  }
  std::queue<size_t> work;
  const auto next_of = [&](size_t at, uint8_t byte) {
    for (;; at = nodes[at].fallback) {
      if (const auto found = nodes[at].next.find(byte); found != nodes[at].next.end()) return found->second;
      if (at == 0) return size_t{0};
    }
  };
  for (const auto& [byte, to] : nodes[0].next) work.push(to);
  while (!work.empty()) {
    const size_t at = work.front();
    work.pop();
    for (const auto& [byte, to] : nodes[at].next) {
      nodes[to].fallback = next_of(nodes[at].fallback, byte);
      work.push(to);
    }
  }
  std::vector<int32_t> states;
  for (size_t i = 0; i < nodes.size(); ++i) states.push_back(builder.State());
  const int32_t end = builder.State();
  builder.Empty(from, states[0]);
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].trigger >= 0) {
      const int32_t behind = Add(builder, states[i], free.triggers[static_cast<size_t>(nodes[i].trigger)].then);
      builder.Empty(behind, free.again ? states[0] : end);
      continue;
    }
    if (nodes[i].control) {
      for (const auto& [byte, to] : nodes[i].next) builder.Byte(states[i], byte, byte, states[to]);
      continue;
    }
    builder.Empty(states[i], end);
    for (int byte = 0; byte < 256; ++byte) {
      // A control token is never part of free text, but as a trigger.
      const auto value = static_cast<uint8_t>(byte);
      const size_t to = next_of(i, value);
      if (value != static_cast<uint8_t>(kControlByte) || to != 0) builder.Byte(states[i], value, value, states[to]);
    }
  }
  return end;
}

int32_t Add(Builder& builder, int32_t from, const GrammarExpression& expression) {
  const auto& what = expression.node().what;
  if (const auto* text = std::get_if<std::string>(&what)) return builder.Literal(from, *text);
  if (std::holds_alternative<Node::AnyJson>(what)) return AddJsonObject(builder, from);
  if (const auto* schema = std::get_if<Node::SchemaOf>(&what)) {
    return AddSchema(builder, from, schema->schema, schema->place);
  }
  if (const auto* gbnf = std::get_if<Node::GbnfOf>(&what)) return builder.Call(from, AddGbnf(builder, gbnf->text));
  if (const auto* parts = std::get_if<Node::Parts>(&what)) {
    if (!parts->choice) {
      for (const GrammarExpression& part : parts->parts) from = Add(builder, from, part);
      return from;
    }
    const int32_t end = builder.State();
    for (const GrammarExpression& part : parts->parts) {
      const int32_t branch = builder.State();
      builder.Empty(from, branch);
      builder.Empty(Add(builder, branch, part), end);
    }
    return end;
  }
  if (const auto* repeated = std::get_if<Node::Repeated>(&what)) {
    return builder.Repeat(from, repeated->min, repeated->max,
                          [&](int32_t at) { return Add(builder, at, repeated->part); });
  }
  return AddFreeText(builder, from, std::get<Node::Free>(what));
}

}  // namespace

GrammarExpression GrammarExpression::Text(std::string text) { return Make({std::move(text)}); }
GrammarExpression GrammarExpression::Schema(OrderedJson schema, std::string place) {
  return Make({Node::SchemaOf{std::move(schema), std::move(place)}});
}
GrammarExpression GrammarExpression::AnyJsonObject() { return Make({Node::AnyJson{}}); }
GrammarExpression GrammarExpression::Gbnf(std::string text, std::string place) {
  return Make({Node::GbnfOf{std::move(text), std::move(place)}});
}
GrammarExpression GrammarExpression::Sequence(std::vector<GrammarExpression> parts) {
  return Make({Node::Parts{false, std::move(parts)}});
}
GrammarExpression GrammarExpression::Choice(std::vector<GrammarExpression> parts) {
  return Make({Node::Parts{true, std::move(parts)}});
}
GrammarExpression GrammarExpression::Repeat(GrammarExpression part, int min, int max) {
  return Make({Node::Repeated{std::move(part), min, max}});
}
GrammarExpression GrammarExpression::FreeText(std::vector<Trigger> triggers, bool again) {
  return Make({Node::Free{std::move(triggers), again}});
}

std::string ControlTokenText(std::string_view token) { return std::string(1, kControlByte) + std::string(token); }

std::shared_ptr<const Grammar> CompileExpression(const GrammarExpression& expression) {
  Builder builder("grammar");
  const int32_t root = builder.Rule("root");
  builder.Empty(Add(builder, builder.RuleStart(root), expression), builder.RuleEnd(root));
  return builder.Finish(root);
}

}  // namespace phsa
