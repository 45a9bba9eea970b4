#include <algorithm>
#include <map>

#include "base/errors.h"
#include "base/utf8.h"
#include "grammar/fragments.h"

namespace phsa {
namespace {

// Digits and exponents of numbers nobody says the bounds of: enough for what a double holds, and an end for a model
// that would go on for ever.
constexpr int32_t kWholeDigits = 16, kFractionDigits = 16, kExponentDigits = 2;
constexpr int32_t kIndentation = 40;

const std::vector<CodeRange>& PlainCharacters() {
  static const std::vector<CodeRange> kPlain = Complement(Normalized({{0, 0x1f}, {'"', '"'}, {'\\', '\\'}}));
  return kPlain;
}

int32_t AddBytes(Builder& builder, int32_t from, std::initializer_list<std::pair<char, char>> ranges) {
  const int32_t to = builder.State();
  for (const auto& [low, high] : ranges) {
    builder.Byte(from, static_cast<uint8_t>(low), static_cast<uint8_t>(high), to);
  }
  return to;
}

int32_t AddHex(Builder& builder, int32_t from) { return AddBytes(builder, from, {{'0', '9'}, {'a', 'f'}, {'A', 'F'}}); }

int32_t AddDigits(Builder& builder, int32_t from, int32_t min, int32_t max) {
  return builder.Repeat(from, min, max, [&](int32_t at) { return AddBytes(builder, at, {{'0', '9'}}); });
}

int32_t AddWhole(Builder& builder, int32_t from) {
  const int32_t sign = builder.State(), end = builder.State();
  builder.Empty(from, sign);
  builder.Byte(from, '-', '-', sign);
  builder.Byte(sign, '0', '0', end);
  builder.Empty(AddDigits(builder, AddBytes(builder, sign, {{'1', '9'}}), 0, kWholeDigits - 1), end);
  return end;
}

}  // namespace

int32_t AddSpace(Builder& builder, int32_t from) {
  const int32_t rule = builder.SharedRule("space", [&](int32_t start) {
    const int32_t end = builder.State();
    builder.Empty(start, end);
    builder.Byte(start, ' ', ' ', end);
    const int32_t line = AddBytes(builder, start, {{'\n', '\n'}});
    const auto blank = [&](int32_t at) { return AddBytes(builder, at, {{' ', ' '}, {'\t', '\t'}}); };
    builder.Empty(builder.Repeat(line, 0, kIndentation, blank), end);
    return end;
  });
  return builder.Call(from, rule);
}

int32_t AddJsonCharacter(Builder& builder, int32_t from) {
  const int32_t to = builder.State();
  builder.Empty(builder.Class(from, PlainCharacters()), to);
  const int32_t escape = AddBytes(builder, from, {{'\\', '\\'}});
  for (const char c : std::string_view("\"\\/bfnrt"))
    builder.Byte(escape, static_cast<uint8_t>(c), static_cast<uint8_t>(c), to);
  const int32_t code = AddBytes(builder, escape, {{'u', 'u'}});
  // Half of a surrogate pair is no character: many readers refuse it.
  const auto hex = [&](int32_t at, int digits) {
    for (int i = 0; i < digits; ++i) at = AddHex(builder, at);
    return at;
  };
  builder.Empty(hex(AddBytes(builder, code, {{'0', '9'}, {'a', 'c'}, {'A', 'C'}, {'e', 'f'}, {'E', 'F'}}), 3), to);
  const int32_t d = AddBytes(builder, code, {{'d', 'd'}, {'D', 'D'}});
  builder.Empty(hex(AddBytes(builder, d, {{'0', '7'}}), 2), to);
  int32_t pair = hex(AddBytes(builder, d, {{'8', '9'}, {'a', 'b'}, {'A', 'B'}}), 2);
  pair = AddBytes(builder, builder.Literal(pair, "\\u"), {{'d', 'd'}, {'D', 'D'}});
  builder.Empty(hex(AddBytes(builder, pair, {{'c', 'f'}, {'C', 'F'}}), 2), to);
  return to;
}

int32_t AddJsonString(Builder& builder, int32_t from, int32_t min_length, int32_t max_length) {
  const auto part = [&](int32_t start) {
    const auto character = [&](int32_t at) { return AddJsonCharacter(builder, at); };
    return builder.Literal(builder.Repeat(builder.Literal(start, "\""), min_length, max_length, character), "\"");
  };
  if (min_length > 0 || max_length >= 0) return part(from);
  return builder.Call(from, builder.SharedRule("string", part));
}

int32_t AddJsonClass(Builder& builder, int32_t from, const std::vector<CodeRange>& ranges) {
  const int32_t to = builder.State();
  std::vector<CodeRange> plain;
  static constexpr char kHex[] = "0123456789abcdef";
  for (const CodeRange& range : ranges) {
    for (char32_t code = range.low; code <= range.high && code < 0x60; ++code) {
      if (code >= 0x20 && code != '"' && code != '\\') continue;
      const char c = static_cast<char>(code);
      std::string text;
      switch (c) {
        case '"': text = "\\\""; break;
        case '\\': text = "\\\\"; break;
        case '\b': text = "\\b"; break;
        case '\f': text = "\\f"; break;
        case '\n': text = "\\n"; break;
        case '\r': text = "\\r"; break;
        case '\t': text = "\\t"; break;
        default: text = std::string("\\u00") + kHex[code >> 4] + kHex[code & 15];
      }
      builder.Empty(builder.Literal(from, text), to);
    }
  }
  // All that needs no escape.
  for (const CodeRange& range : ranges) {
    for (const CodeRange& allowed : PlainCharacters()) {
      const CodeRange both = {std::max(range.low, allowed.low), std::min(range.high, allowed.high)};
      if (both.low <= both.high) plain.push_back(both);
    }
  }
  if (!plain.empty()) builder.Empty(builder.Class(from, plain), to);
  return to;
}

std::string JsonLiteral(std::string_view text) { return nlohmann::json(text).dump(); }

int32_t AddOtherName(Builder& builder, int32_t from, const std::vector<std::string>& names) {
  // A tree of the names' characters. Who leaves it has another name; who is in it may not end where a name ends.
  struct Node {
    std::map<char32_t, size_t> next;
    bool is_name = false;
  };
  std::vector<Node> nodes(1);
  for (const std::string& name : names) {
    size_t at = 0;
    for (const char32_t code : DecodeUtf8(name).value_or(U"")) {
      const auto [found, is_new] = nodes[at].next.try_emplace(code, nodes.size());
      at = found->second;
      if (is_new) nodes.emplace_back();
    }
    nodes[at].is_name = true;
  }
  const int32_t end = builder.State(), other = builder.State();
  const auto character = [&](int32_t state) { return AddJsonCharacter(builder, state); };
  builder.Empty(builder.Literal(builder.Repeat(other, 0, -1, character), "\""), end);
  std::vector<int32_t> states(nodes.size());
  states[0] = builder.State();
  builder.Empty(from, states[0]);
  for (size_t i = 0; i < nodes.size(); ++i) {
    std::vector<CodeRange> used;
    for (const auto& [code, next] : nodes[i].next) {
      used.push_back({code, code});
      states[next] = AddJsonClass(builder, states[i], {{code, code}});
    }
    builder.Empty(AddJsonClass(builder, states[i], Complement(Normalized(std::move(used)))), other);
    if (!nodes[i].is_name) builder.Byte(states[i], '"', '"', end);
  }
  return end;
}

int32_t AddJsonInteger(Builder& builder, int32_t from) {
  return builder.Call(from, builder.SharedRule("integer", [&](int32_t start) { return AddWhole(builder, start); }));
}

int32_t AddJsonNumber(Builder& builder, int32_t from) {
  return builder.Call(from, builder.SharedRule("number", [&](int32_t start) {
    const int32_t whole = AddWhole(builder, start), fraction = builder.State(), end = builder.State();
    builder.Empty(whole, fraction);
    builder.Empty(AddDigits(builder, AddBytes(builder, whole, {{'.', '.'}}), 1, kFractionDigits), fraction);
    builder.Empty(fraction, end);
    const int32_t exponent = AddBytes(builder, fraction, {{'e', 'e'}, {'E', 'E'}}), sign = builder.State();
    builder.Empty(exponent, sign);
    builder.Byte(exponent, '+', '+', sign);
    builder.Byte(exponent, '-', '-', sign);
    builder.Empty(AddDigits(builder, sign, 1, kExponentDigits), end);
    return end;
  }));
}

int32_t AddJsonObject(Builder& builder, int32_t from) {
  return builder.Call(from, builder.SharedRule("object", [&](int32_t start) {
    const auto member = [&](int32_t at) {
      at = builder.Literal(AddSpace(builder, AddJsonString(builder, at, 0, -1)), ":");
      return AddSpace(builder, AddJsonValue(builder, AddSpace(builder, at)));
    };
    const auto next = [&](int32_t at) { return member(AddSpace(builder, builder.Literal(at, ","))); };
    const int32_t open = AddSpace(builder, builder.Literal(start, "{")), close = builder.State();
    builder.Empty(open, close);
    builder.Empty(builder.Repeat(member(open), 0, -1, next), close);
    return builder.Literal(close, "}");
  }));
}

int32_t AddJsonValue(Builder& builder, int32_t from) {
  return builder.Call(from, builder.SharedRule("value", [&](int32_t start) {
    const int32_t end = builder.State();
    builder.Empty(AddJsonObject(builder, start), end);
    builder.Empty(AddJsonString(builder, start, 0, -1), end);
    builder.Empty(AddJsonNumber(builder, start), end);
    for (const char* word : {"true", "false", "null"}) builder.Empty(builder.Literal(start, word), end);
    const auto element = [&](int32_t at) { return AddSpace(builder, AddJsonValue(builder, at)); };
    const auto next = [&](int32_t at) { return element(AddSpace(builder, builder.Literal(at, ","))); };
    const int32_t open = AddSpace(builder, builder.Literal(start, "[")), close = builder.State();
    builder.Empty(open, close);
    builder.Empty(builder.Repeat(element(open), 0, -1, next), close);
    builder.Empty(builder.Literal(close, "]"), end);
    return end;
  }));
}

std::shared_ptr<const Grammar> CompileJsonObject() {
  Builder builder("response_format");
  const int32_t root = builder.SharedRule("root", [&](int32_t start) { return AddJsonObject(builder, start); });
  return builder.Finish(root);
}

}  // namespace phsa
