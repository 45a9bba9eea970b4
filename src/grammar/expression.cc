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
    bool again, may_end;
  };
  struct Once {
    GrammarExpression part;
  };
  struct Space {};
  std::variant<std::string, AnyJson, SchemaOf, GbnfOf, Parts, Repeated, Free, Once, Space> what;
};

namespace {

using Node = GrammarExpression::Node;

GrammarExpression Make(Node node) { return GrammarExpression(std::make_shared<const Node>(std::move(node))); }

int32_t Add(Builder& builder, int32_t from, const GrammarExpression& expression);

// The automaton of Aho and Corasick: in each state, how much of a trigger was written last. Those that count where the
// text begins are a tree of their own; who leaves it is where the same text leads in the other one.
class FreeTextWriter {
 public:
  FreeTextWriter(Builder& builder, const Node::Free& free) : builder_(builder), free_(free), nodes_(2) {
    for (size_t i = 0; i < free.triggers.size(); ++i) Insert(free.triggers[i], static_cast<int>(i));
    FindFallbacks(kAnywhere);
    FindFallbacks(kFirst);
  }

  int32_t Write(int32_t from) {
    for (size_t i = 0; i < nodes_.size(); ++i) states_.push_back(builder_.State());
    end_ = builder_.State();
    builder_.Empty(from, states_[nodes_[kFirst].next.empty() ? kAnywhere : kFirst]);
    for (size_t i = 0; i < nodes_.size(); ++i) WriteNode(i);
    return end_;
  }

 private:
  static constexpr size_t kAnywhere = 0, kFirst = 1;  // the trees' roots
  struct TreeNode {
    std::map<uint8_t, size_t> next;
    size_t fallback = 0;
    int trigger = -1;      // that ends here
    bool control = false;  // within a control token, which is nothing else
  };

  void Insert(const GrammarExpression::Trigger& trigger, int index) {
    const size_t root = trigger.first ? kFirst : kAnywhere;
    size_t at = root;
    for (const char c : trigger.text) {
      const auto [found, is_new] = nodes_[at].next.try_emplace(static_cast<uint8_t>(c), nodes_.size());
      const bool control = nodes_[at].control || c == kControlByte;
      at = found->second;
      if (is_new) nodes_.emplace_back();
      nodes_[at].control = control;
    }
    PHSA_CHECK(at != root && nodes_[at].trigger < 0);
    nodes_[at].trigger = index;
  }

  size_t Next(size_t at, uint8_t byte) const {
    for (;; at = nodes_[at].fallback) {
      if (const auto found = nodes_[at].next.find(byte); found != nodes_[at].next.end()) return found->second;
      if (at == kAnywhere) return at;
    }
  }

  void FindFallbacks(size_t root) {
    std::queue<size_t> work;
    for (const auto& [byte, to] : nodes_[root].next) {
      if (root != kAnywhere) nodes_[to].fallback = Next(kAnywhere, byte);
      work.push(to);
    }
    while (!work.empty()) {
      const size_t at = work.front();
      work.pop();
      for (const auto& [byte, to] : nodes_[at].next) {
        nodes_[to].fallback = Next(nodes_[at].fallback, byte);
        work.push(to);
      }
    }
  }

  void WriteNode(size_t at) {
    const TreeNode& node = nodes_[at];
    if (node.trigger >= 0) {
      const GrammarExpression::Trigger& trigger = free_.triggers[static_cast<size_t>(node.trigger)];
      const int32_t behind = Add(builder_, states_[at], trigger.then);
      builder_.Empty(behind, free_.again && !trigger.first ? states_[kAnywhere] : end_);
      return;
    }
    if (node.control) {
      for (const auto& [byte, to] : node.next) builder_.Byte(states_[at], byte, byte, states_[to]);
      return;
    }
    if (free_.may_end) builder_.Empty(states_[at], end_);
    for (int byte = 0; byte < 256; ++byte) {
      const auto value = static_cast<uint8_t>(byte);
      const bool space = byte == ' ' || byte == '\t' || byte == '\r' || byte == '\n';
      const size_t to = at == kFirst && space ? kFirst : Next(at, value);
      // A control token is never part of free text, but as a trigger.
      if (value != static_cast<uint8_t>(kControlByte) || to != kAnywhere) {
        builder_.Byte(states_[at], value, value, states_[to]);
      }
    }
  }

  Builder& builder_;
  const Node::Free& free_;
  std::vector<TreeNode> nodes_;
  std::vector<int32_t> states_;  // of each node
  int32_t end_ = 0;
};

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
  if (const auto* once = std::get_if<Node::Once>(&what)) {
    const std::string key = fmt::format("part {}", fmt::ptr(&expression.node()));
    return builder.Call(from, builder.SharedRule(key, [&](int32_t at) { return Add(builder, at, once->part); }));
  }
  if (std::holds_alternative<Node::Space>(what)) return AddSpace(builder, from);
  return FreeTextWriter(builder, std::get<Node::Free>(what)).Write(from);
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
  return Make({Node::Free{std::move(triggers), again, true}});
}
GrammarExpression GrammarExpression::Until(const std::vector<std::string>& marks) {
  std::vector<Trigger> triggers;
  for (const std::string& mark : marks) triggers.push_back({mark, Text("")});
  return Make({Node::Free{std::move(triggers), false, false}});
}
GrammarExpression GrammarExpression::Once(GrammarExpression part) { return Make({Node::Once{std::move(part)}}); }
GrammarExpression GrammarExpression::Space() { return Make({Node::Space{}}); }

std::string ControlTokenText(std::string_view token) { return std::string(1, kControlByte) + std::string(token); }

std::shared_ptr<const Grammar> CompileExpression(const GrammarExpression& expression) {
  Builder builder("grammar");
  const int32_t root = builder.Rule("root");
  builder.Empty(Add(builder, builder.RuleStart(root), expression), builder.RuleEnd(root));
  return builder.Finish(root);
}

}  // namespace phsa
