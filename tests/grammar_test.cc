#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <random>

#include "grammar/grammar.h"
#include "grammar/matcher.h"
#include "phsa/error.h"

namespace phsa {
namespace {

// A token for each byte, then `more`.
std::shared_ptr<const TokenTrie> Vocabulary(const std::vector<std::string>& more = {}) {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 255; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  tokens.insert(tokens.end(), more.begin(), more.end());
  return std::make_shared<const TokenTrie>(tokens);
}

const std::shared_ptr<const TokenTrie>& Bytes() {
  static const auto kBytes = Vocabulary();
  return kBytes;
}

// How many bytes of the text the grammar lets through, and whether it may end there.
std::pair<size_t, bool> Follow(const std::shared_ptr<const Grammar>& grammar, std::string_view text) {
  GrammarMatcher matcher(grammar, Bytes());
  for (size_t i = 0; i < text.size(); ++i) {
    if (!matcher.Accept(static_cast<uint8_t>(text[i]))) return {i, false};
  }
  return {text.size(), matcher.MayEnd()};
}

bool Takes(const std::shared_ptr<const Grammar>& grammar, std::string_view text) {
  return Follow(grammar, text) == std::pair(text.size(), true);
}

std::shared_ptr<const Grammar> Gbnf(std::string_view text) { return CompileGbnf(text, "grammar"); }
std::shared_ptr<const Grammar> Schema(std::string_view text) { return CompileJsonSchemaText(text, "schema"); }

template <class Fn>
std::string Refusal(const Fn& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}
std::string GbnfRefusal(std::string_view text) {
  return Refusal([&] { Gbnf(text); });
}
std::string SchemaRefusal(std::string_view text) {
  return Refusal([&] { Schema(text); });
}

void ExpectTakes(const std::shared_ptr<const Grammar>& grammar, const std::vector<std::string>& good,
                 const std::vector<std::string>& bad) {
  for (const std::string& text : good) EXPECT_TRUE(Takes(grammar, text)) << text;
  for (const std::string& text : bad) EXPECT_FALSE(Takes(grammar, text)) << text;
}

constexpr std::string_view kJsonGbnf = R"GBNF(
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
)GBNF";

TEST(Gbnf, LiteralsClassesGroupsAndCounts) {
  ExpectTakes(Gbnf("root ::= \"a\" [b-d]+ (\"x\" | \"yz\")? [^0-9]{2}"), {"abbb..", "acyz--", "abxab"},
              {"a", "ab", "abx1.", "eb..", "ab...."});
  ExpectTakes(Gbnf("root ::= [a-c]{2,3} \"-\" \"q\"{,2} [z]{1,}"), {"ab-z", "abc-qqzz"},
              {"a-z", "abcc-z", "ab-qqqz", "ab-"});
  ExpectTakes(Gbnf("root ::= \"\\x41\\u00e9\\U0001F600\\n\\\"\" ."), {"A\u00e9\U0001F600\n\"\u4e2d"},
              {"A\u00e9\U0001F600\n\"\n\n"});
  ExpectTakes(Gbnf("root ::= \"(\" inner* \")\"\ninner ::= root | [a-z]"), {"()", "(a(b)(c(d)))"}, {"(", "(a))"});
  ExpectTakes(Gbnf("root ::= x{3}\nx ::= [a-b] [0-9]{2}"), {"a00b11a22"}, {"a00b11", "a00b11a22b33"});
}

TEST(Gbnf, ClassesAreOfCharactersAndNotOfBytes) {
  const auto grammar = Gbnf("root ::= [^a]");
  ExpectTakes(grammar, {"b", "\u00e9", "\u0800", "\uffff", "\U00010000", "\U0010ffff", "\ud7ff", "\ue000"},
              {"a", "\xc3", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xc0\x80", "\xff", "\u00e9x"});
  // Each character against the class, at every border of the encoding.
  const auto range = Gbnf("root ::= [\\u07f0-\\u0810\\uD7F0-\\uE010\\uFFF0-\\U00010010é]");
  const auto encode = [](char32_t code) {
    std::string out;
    if (code < 0x800) {
      out = {static_cast<char>(0xc0 | (code >> 6)), static_cast<char>(0x80 | (code & 63))};
    } else if (code < 0x10000) {
      out = {static_cast<char>(0xe0 | (code >> 12)), static_cast<char>(0x80 | ((code >> 6) & 63)),
             static_cast<char>(0x80 | (code & 63))};
    } else {
      out = {static_cast<char>(0xf0 | (code >> 18)), static_cast<char>(0x80 | ((code >> 12) & 63)),
             static_cast<char>(0x80 | ((code >> 6) & 63)), static_cast<char>(0x80 | (code & 63))};
    }
    return out;
  };
  for (char32_t code = 0x80; code < 0x10100; ++code) {
    const bool inside = (code >= 0x7f0 && code <= 0x810) || (code >= 0xd7f0 && code <= 0xd7ff) ||
                        (code >= 0xe000 && code <= 0xe010) || (code >= 0xfff0 && code <= 0x10010) || code == 0xe9;
    ASSERT_EQ(Takes(range, encode(code)), inside) << static_cast<uint32_t>(code);
  }
}

TEST(Gbnf, LlamaCppsJsonGrammarTakesJson) {
  const auto grammar = Gbnf(kJsonGbnf);
  ExpectTakes(grammar, {R"({})", R"({"a": [1, -2.5e+3, true, null, {"b": "\u00e9\n"}]})", "{\n  \"a\":\n \"\u4e2d\"}"},
              {R"([])", R"({"a" 1})", R"({"a": 01})", R"({"a": "x)", R"({"a": tru})"});
}

TEST(Gbnf, ABadGrammarIsRefusedWithItsLine) {
  EXPECT_EQ(GbnfRefusal("root ::= \"a\"\nx ::= (\"b\""), "grammar: line 2: ) is missing, before the end");
  EXPECT_EQ(GbnfRefusal("rot ::= \"a\""), "grammar: has no rule root; write one as `root ::= …`");
  EXPECT_EQ(GbnfRefusal("root ::= a"), "grammar: the rule \"a\" is used and never defined");
  EXPECT_EQ(GbnfRefusal("root = \"a\""), R"(grammar: line 1: ::= is expected behind a rule's name, before "= \"a\"")");
  EXPECT_NE(GbnfRefusal("root ::= \"a").find("\" is missing"), std::string::npos);
  EXPECT_NE(GbnfRefusal("root ::= [a").find("] is missing"), std::string::npos);
  EXPECT_NE(GbnfRefusal("root ::= \"a\"{3,2}").find("smaller number last"), std::string::npos);
  EXPECT_NE(GbnfRefusal("root ::= \"a\"\nroot ::= \"b\"").find("defined twice"), std::string::npos);
  EXPECT_NE(GbnfRefusal("root ::= \"\\q\"").find("an escape is none of"), std::string::npos);
  EXPECT_NE(GbnfRefusal("root ::= * \"a\"").find("a rule ends with its line"), std::string::npos);
}

TEST(Gbnf, LeftRecursionIsRefusedByTheRulesName) {
  EXPECT_NE(GbnfRefusal("root ::= sum\nsum ::= sum \"+\" [0-9] | [0-9]").find("the rule \"sum\" calls itself"),
            std::string::npos);
  EXPECT_NE(GbnfRefusal("root ::= a\na ::= b? c\nb ::= \"x\"\nc ::= a \"y\" | \"z\"").find("calls itself"),
            std::string::npos);
  EXPECT_EQ(GbnfRefusal("root ::= [0-9] (\"+\" root)?"), "");
}

TEST(Gbnf, AGrammarThatNeverEndsIsRefusedAndDeadEndsAreNotWalkedInto) {
  EXPECT_NE(GbnfRefusal("root ::= \"a\" root").find("never come to an end"), std::string::npos);
  // What begins with x could never be ended.
  const auto grammar = Gbnf("root ::= \"x\" never | \"y\"\nnever ::= \"a\" never");
  GrammarMatcher matcher(grammar, Bytes());
  EXPECT_FALSE(matcher.Allows('x'));
  EXPECT_TRUE(matcher.Allows('y'));
  EXPECT_EQ(Follow(Gbnf("root ::= \"x\" [] | \"y\""), "x").first, 0u);
}

TEST(Gbnf, HostileGrammarsEndSoon) {
  const auto begin = std::chrono::steady_clock::now();
  std::string nested = "\"a\"";
  for (int i = 0; i < 40; ++i) nested = "(" + nested + "){2}";
  EXPECT_NE(GbnfRefusal("root ::= " + nested).find("grammar: "), std::string::npos);
  EXPECT_NE(GbnfRefusal("root ::= " + std::string(5000, '(')).find("nested deeper"), std::string::npos);
  EXPECT_NE(GbnfRefusal("root ::= \"a\"{20000}").find("a count is above"), std::string::npos);
  EXPECT_EQ(GbnfRefusal("root ::= ((\"a\"{1000}){1000}){1000}"), "");
  // Each text has more readings than there are atoms; the sets of stacks stay small, or the token is refused.
  const auto ambiguous = Gbnf("root ::= \"a\" root \"b\" | \"a\" root \"c\" | \"a\" root \"d\" | \"\"");
  std::string text(200, 'a');
  EXPECT_EQ(Follow(ambiguous, text).first, 200u);
  EXPECT_TRUE(Takes(ambiguous, text + std::string(200, 'c')));
  std::string wide = "root ::= r0\n";
  for (int i = 0; i < 25; ++i) {
    const std::string next = " r" + std::to_string(i + 1);
    wide += "r" + std::to_string(i) + " ::=" + next + " \"x\" |" + next + " \"y\" |" + next + " \"z\" root?\n";
  }
  wide += "r25 ::= \"a\"\n";
  try {
    Follow(Gbnf(wide), "axxxx");
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("too ambiguous"), std::string::npos);
  }
  // Generous: a machine may be busy. What this is about takes for ever.
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

TEST(Gbnf, DeepNestingIsFollowedToItsLimit) {
  const auto grammar = Gbnf("root ::= \"[\" root? \"]\"");
  EXPECT_TRUE(Takes(grammar, std::string(900, '[') + std::string(900, ']')));
  EXPECT_LT(Follow(grammar, std::string(5000, '[')).first, 1100u);
  // A list that goes on by itself at its end is no nesting.
  EXPECT_TRUE(Takes(Gbnf("root ::= [a-z] root | \".\""), std::string(50000, 'q') + "."));
}

// Every mask against each token tried alone, along random texts.
void CheckMasks(const std::shared_ptr<const Grammar>& grammar, const std::shared_ptr<const TokenTrie>& trie,
                uint64_t seed, int steps) {
  std::mt19937_64 random(seed);
  GrammarMatcher matcher(grammar, trie);
  for (int step = 0; step < steps; ++step) {
    std::vector<int32_t> allowed;
    // The tokens first: afterwards they are looked up in the mask.
    for (int32_t token = 0; token < trie->vocab_size(); ++token) {
      GrammarMatcher copy = matcher;
      if (copy.Accept(token)) allowed.push_back(token);
    }
    const std::span<const uint64_t> mask = matcher.Mask();
    std::vector<int32_t> of_mask;
    for (int32_t token = 0; token < trie->vocab_size(); ++token) {
      if ((mask[static_cast<size_t>(token) / 64] >> (token % 64) & 1) != 0) of_mask.push_back(token);
      ASSERT_EQ(matcher.Allows(token), std::ranges::binary_search(allowed, token)) << token;
    }
    ASSERT_EQ(of_mask, allowed) << "step " << step;
    if (allowed.empty()) {
      ASSERT_TRUE(matcher.MayEnd());
      ASSERT_TRUE(matcher.MustEnd());
      return;
    }
    ASSERT_TRUE(matcher.Accept(allowed[random() % allowed.size()]));
  }
}

TEST(GrammarMatcher, AMaskHasExactlyTheTokensThatMayFollow) {
  const auto trie =
      Vocabulary({"{\"",    "\": ", "\"}", "},{", "]}",     "\"a\":",   "true",   "tr", "ue}",  "null,",
                  "\",\"b", "12",   "e+",  ".5",  "\u00e9", "\xe4\xb8", "\xad\"", "  ", "\n  ", "[[",
                  "]]",     "[]",   "{}",  ": {", "abc",    "\\u00",    "\\\"",   "",   "aaaa", "\xffpython"});
  for (uint64_t seed = 0; seed < 12; ++seed) {
    CheckMasks(Gbnf(kJsonGbnf), trie, seed, 25);
    CheckMasks(CompileJsonObject(), trie, seed, 25);
    CheckMasks(Schema(R"({"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}},
        "b": {"type": "string", "maxLength": 4}, "c": {"type": "number", "minimum": -1.5}}, "additionalProperties": true})"),
               trie, seed, 25);
    CheckMasks(Gbnf("root ::= \"a\" root \"b\" | \"a\" root \"c\" | \"aa\" root? \"]\" | \"[\" root \"]]\""), trie,
               seed, 25);
  }
}

TEST(GrammarMatcher, WhatIsKeptStaysSmallAndPlacesSurviveTheClearing) {
  // Each position of the text is a place of its own.
  const auto grammar = Gbnf("root ::= ([a-z]? [0-9]? [A-Z]?){400}");
  const auto trie = Vocabulary({"abc", "a1A", "1Aa", "zz"});
  GrammarMatcher waits(grammar, trie), goes(grammar, trie);
  ASSERT_TRUE(waits.Accept('a'));
  std::mt19937 random(1);
  for (int i = 0; i < 390; ++i) {
    ASSERT_TRUE(goes.Accept("a1A"[random() % 3]));
    if (i % 7 != 0) continue;
    ASSERT_NE(goes.Mask()[0], 0u);
  }
  ASSERT_TRUE(waits.Accept('1'));
  ASSERT_TRUE(waits.MayEnd());
}

TEST(GrammarMatcher, ACopyGoesItsOwnWay) {
  GrammarMatcher one(Gbnf("root ::= \"ab\" | \"ac\""), Bytes());
  ASSERT_TRUE(one.Accept('a'));
  GrammarMatcher two = one;
  ASSERT_TRUE(two.Accept('b'));
  EXPECT_TRUE(two.MustEnd());
  EXPECT_FALSE(one.MayEnd());
  EXPECT_FALSE(one.Accept('x'));
  EXPECT_TRUE(one.Accept('c'));
  two = one;
  EXPECT_TRUE(two.MayEnd());
}

TEST(GrammarExpression, TextBeforeATriggerIsFreeAndBehindItTheGrammarHolds) {
  const OrderedJson parameters = ParseSchemaText(R"({"type": "object", "properties": {"city": {"type": "string"}},
      "required": ["city"], "additionalProperties": false})",
                                                 "tools");
  using E = GrammarExpression;
  const E call = E::Sequence({E::Text("\n{\"name\": \"weather\", \"arguments\": "), E::Schema(parameters, "tools"),
                              E::Text("}\n</tool_call>")});
  const auto grammar = CompileExpression(E::FreeText({{"<tool_call>", call}}, true));
  const std::string good =
      "Let me see <tool <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>";
  ExpectTakes(grammar, {"", "Hello <tool_cal", good, good + "\nand" + good},
              {"<tool_call>", "<<tool_call>x", good.substr(0, good.size() - 1)});
  const auto once = CompileExpression(E::FreeText({{"<tool_call>", call}}, false));
  ExpectTakes(once, {good}, {good + "x"});
  const auto controls = CompileExpression(
      E::FreeText({{ControlTokenText("<|call|>"), E::Choice({E::Text("a"), E::Repeat(E::Text("b"), 2, 3)})}}, false));
  const auto trie = Vocabulary({"\xff<|call|>", "\xff<|other|>", "<|call|>"});
  GrammarMatcher matcher(controls, trie);
  EXPECT_FALSE(matcher.Allows(256));
  EXPECT_TRUE(matcher.Accept(257));  // its letters are only text
  EXPECT_TRUE(matcher.Accept(255));
  EXPECT_FALSE(matcher.Allows('x'));
  EXPECT_TRUE(matcher.Accept('b'));
  EXPECT_FALSE(matcher.MayEnd());
  EXPECT_TRUE(matcher.Accept('b'));
  EXPECT_TRUE(matcher.MayEnd());
}

TEST(GrammarExpression, ATriggerMayCountOnlyWhereTheTextBegins) {
  using E = GrammarExpression;
  const E rest = E::Once(E::Text(": \"f\"}"));
  const auto grammar = CompileExpression(
      E::FreeText({{"<call>", E::Text("x")}, {"{\"name\"", rest, true}, {"[{\"n", rest, true}}, true));
  ExpectTakes(grammar,
              {"", "{", "{\"nam", "{\"nose\": 1}", "see {\"name\": 1", "{\"name\": \"f\"}", "\n {\"name\": \"f\"}",
               "[{\"n: \"f\"}", "<call>x {\"name\"", "{\"na<call>x", "{\"<<call>x<call>x", "[[{\"n"},
              {"{\"name\"", "{\"name\": 1", "{\"name\": \"f\"}x", " [{\"n\"", "{\"na<call>y", "<call>"});
  // Made once, however often it is there.
  const E large = E::Text(std::string(20000, 'a'));
  EXPECT_NE(Refusal([&] {
              std::vector<E> parts(20, large);
              CompileExpression(E::Choice(parts));
            }),
            "");
  const std::vector<E> shared(20, E::Once(large));
  EXPECT_TRUE(Takes(CompileExpression(E::Choice(shared)), std::string(20000, 'a')));
}

TEST(GrammarExpression, UntilAMarkAllIsFreeAndTheMarkMustCome) {
  using E = GrammarExpression;
  const auto grammar = CompileExpression(E::Sequence({E::Until({"</think>"}), E::Space(), E::Text("yes")}));
  ExpectTakes(grammar, {"</think>yes", "a </think </thin</think>\n  yes", "</think> yes"},
              {"", "a", "yes", "</think>", "a</think>no", "</think>\n\nyes"});
}

TEST(JsonSchema, ObjectsHaveTheirPropertiesInOrder) {
  const auto grammar = Schema(R"({"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "boolean"},
      "m": {"type": ["string", "null"]}}, "required": ["z", "m"], "additionalProperties": false})");
  ExpectTakes(grammar,
              {R"({"z": 1, "a": true, "m": "x"})", R"({"z":-12,"m":null})", "{\n  \"z\": 0,\n  \"m\": \"\"\n}"},
              {R"({"z": 1})", R"({"m": "x", "z": 1})", R"({"z": 1, "a": true})", R"({"z": 1.5, "m": null})",
               R"({"z": 01, "m": null})", R"({"z": 1, "m": null, "q": 2})", R"({, "z": 1, "m": null})"});
  ExpectTakes(Schema(R"({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}})"),
              {"{}", R"({"a": 1})", R"({"b": 2})", R"({"a": 1, "b": 2})"}, {R"({"b": 2, "a": 1})", R"({"a": 1,})"});
}

TEST(JsonSchema, OtherPropertiesHaveOtherNames) {
  const auto grammar = Schema(R"({"type": "object", "properties": {"ab": {"type": "integer"}, "a\"": {"type": "null"}},
      "required": ["ab"], "additionalProperties": {"type": "string"}})");
  ExpectTakes(grammar,
              {R"({"ab": 1})", R"({"ab": 1, "a": "x"})", R"({"ab": 1, "abc": "x", "b": ""})",
               R"({"ab": 1, "a\"": null, "": "y"})", R"({"ab": 1, "a\n": "x"})"},
              {R"({"ab": 1, "ab": "x"})", R"({"ab": 1, "a": 2})", R"({"ab": 1, "a\"": "x"})",
               R"({"ab": 1, "\u0061b": "x"})", R"({"a": "x"})"});
  ExpectTakes(Schema(R"({"type": "object", "additionalProperties": {"type": "integer"}})"),
              {"{}", R"({"x": 1, "y": 2})"}, {R"({"x": "1"})"});
  ExpectTakes(Schema(R"({"type": "object", "required": ["k"]})"), {R"({"k": [1]})"}, {"{}"});
}

TEST(JsonSchema, ArraysHaveTheirLengthsAndPrefixes) {
  ExpectTakes(Schema(R"({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3})"),
              {"[1, 2]", "[1,2,3]"}, {"[]", "[1]", "[1,2,3,4]", "[1,]"});
  ExpectTakes(
      Schema(
          R"({"type": "array", "prefixItems": [{"const": "a"}, {"type": "integer"}], "items": {"type": "null"}, "minItems": 1})"),
      {R"(["a"])", R"(["a", 1])", R"(["a", 1, null, null])"}, {"[]", R"([1])", R"(["a", null])", R"(["a", 1, 2])"});
  ExpectTakes(
      Schema(R"({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": false, "minItems": 2})"),
      {"[1, 2]"}, {"[1]", "[1,2,3]"});
  ExpectTakes(Schema(R"({"type": "array", "maxItems": 0})"), {"[]", "[ ]"}, {"[1]"});
  ExpectTakes(Schema(R"({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}})"),
              {"[]", "[[], [1]]"}, {"[1]"});
}

TEST(JsonSchema, ChoicesAndNamedValues) {
  ExpectTakes(Schema(R"({"enum": ["red", 3, null, {"a": [1]}, "\u00e9\""]})"),
              {"\"red\"", "3", "null", R"({"a":[1]})", "\"\u00e9\\\"\""}, {"\"re", "4", "\"blue\""});
  ExpectTakes(Schema(R"({"type": "string", "enum": ["a", 1]})"), {"\"a\""}, {"1"});
  ExpectTakes(Schema(R"({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"const": 1}}]})"), {"12", "[1]"},
              {"[2]", "\"\""});
  ExpectTakes(
      Schema(
          R"({"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}, "v": {"type": "integer"}}, "required": ["k", "v"]},
      {"type": "object", "properties": {"k": {"const": "b"}, "w": {"type": "null"}}, "required": ["k"]}, {"type": "string"}]})"),
      {R"({"k": "a", "v": 1})", R"({"k": "b"})", "\"x\""}, {R"({"k": "b", "v": 1})", R"({"k": "a"})"});
  ExpectTakes(Schema(R"({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
      {"properties": {"b": {"type": "null"}}, "required": ["b"]}], "properties": {"c": {"const": 1}}})"),
              {R"({"c": 1, "a": 1, "b": null})", R"({"a": 1, "b": null})"}, {R"({"a": 1})", R"({"b": null, "a": 1})"});
  ExpectTakes(Schema("true"), {"1", "[{}]", "\"x\""}, {"", "x"});
  ExpectTakes(Schema("{}"), {"null"}, {""});
}

TEST(JsonSchema, ReferencesMayBeRecursive) {
  ExpectTakes(
      Schema(R"({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"},
      "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["v", "next"], "additionalProperties": false}}})"),
      {R"({"v": 1, "next": null})", R"({"v": 1, "next": {"v": 2, "next": {"v": 3, "next": null}}})"},
      {R"({"v": 1})", R"({"v": 1, "next": {}})"});
  ExpectTakes(Schema(R"({"type": "array", "items": {"$ref": "#"}})"), {"[]", "[[], [[]]]"}, {"[1]"});
  ExpectTakes(
      Schema(
          R"({"properties": {"a": {"$ref": "#/definitions/x~1y", "description": "d"}}, "definitions": {"x/y": {"const": 5}}})"),
      {R"({"a": 5})"}, {R"({"a": 6})"});
}

TEST(JsonSchema, StringsHaveTheirLengthsPatternsAndFormats) {
  ExpectTakes(Schema(R"({"type": "string", "minLength": 2, "maxLength": 3})"),
              {"\"ab\"", "\"\u4e2d\u4e2d\u4e2d\"", "\"\\n\\u00e9\"", "\"\\ud83d\\ude00x\""},
              {"\"a\"", "\"abcd\"", "\"\\ud83dx\""});
  ExpectTakes(Schema(R"({"type": "string", "pattern": "^[A-Z]{2}-\\d+$"})"), {"\"AB-1\"", "\"ZZ-0123\""},
              {"\"AB-\"", "\"AB-1x\"", "\"aB-1\""});
  ExpectTakes(Schema(R"({"type": "string", "pattern": "b+"})"), {"\"b\"", "\"xxbbyy\""}, {"\"\"", "\"xy\""});
  ExpectTakes(Schema(R"({"type": "string", "pattern": "^(a|b\"|[^\\x00-\\x7f])(?:c?)+?\\s$"})"),
              {"\"a \"", "\"b\\\"cc\\t\"", "\"\u00e9c\\n\""}, {"\"b\\\"cc\"", "\"x \""});
  ExpectTakes(Schema(R"({"type": "string", "pattern": "^a|b$"})"), {"\"axx\"", "\"xxb\""}, {"\"xx\"", "\"xax\""});
  const std::vector<std::tuple<std::string, std::string, std::string>> formats = {
      {"date", "2024-02-28", "2024-02-30"},
      {"time", "23:59:59Z", "24:00:00Z"},
      {"date-time", "2024-12-31T00:00:00.5+01:00", "2024-12-31 00:00:00Z"},
      {"duration", "P1Y2M3DT4H5M6S", "P"},
      {"email", "a.b@example.org", "a@b@c"},
      {"hostname", "www.example.org", "-a.org"},
      {"ipv4", "255.0.10.99", "256.0.0.1"},
      {"ipv6", "2001:db8:0:0:0:0:0:1", "2001:db8"},
      {"uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"},
      {"uri", "https://example.org:80/a/b?c=d", "example"}};
  for (const auto& [name, good, bad] : formats) {
    ExpectTakes(Schema(R"({"type": "string", "format": ")" + name + "\"}"), {'"' + good + '"'}, {'"' + bad + '"'});
  }
}

TEST(JsonSchema, NumbersKeepToTheirBounds) {
  const auto check = [](const std::string& bounds, bool integer, const auto& holds) {
    const auto grammar =
        Schema(std::string(R"({"type": ")") + (integer ? "integer" : "number") + "\", " + bounds + "}");
    for (int i = -2200; i <= 2200; ++i) {
      if (integer) {
        ASSERT_EQ(Takes(grammar, std::to_string(i)), holds(i)) << bounds << " " << i;
        continue;
      }
      char text[32];
      for (const char* format : {"%.2f", "%.3f"}) {
        std::snprintf(text, sizeof(text), format, i / 100.0);
        if (std::string_view(text).starts_with("-0.00")) continue;
        ASSERT_EQ(Takes(grammar, text), holds(i / 100.0)) << bounds << " " << text;
      }
      if (i % 100 != 0) continue;
      ASSERT_EQ(Takes(grammar, std::to_string(i / 100)), holds(i / 100.0)) << bounds << " " << i / 100;
    }
  };
  check(R"("minimum": -37, "maximum": 1205)", true, [](int i) { return i >= -37 && i <= 1205; });
  check(R"("exclusiveMinimum": 0)", true, [](int i) { return i > 0; });
  check(R"("maximum": -8)", true, [](int i) { return i <= -8; });
  check(R"("exclusiveMaximum": 0.5, "minimum": -99.5)", true, [](int i) { return i <= 0 && i >= -99; });
  check(R"("minimum": 100, "maximum": 100)", true, [](int i) { return i == 100; });
  check(R"("minimum": 0.25, "maximum": 1.5)", false, [](double x) { return x >= 0.25 && x <= 1.5; });
  check(R"("exclusiveMinimum": 0, "exclusiveMaximum": 1)", false, [](double x) { return x > 0 && x < 1; });
  check(R"("minimum": -1.25)", false, [](double x) { return x >= -1.25; });
  check(R"("exclusiveMaximum": 12.3)", false, [](double x) { return x < 12.3; });
  check(R"("minimum": -20.5, "exclusiveMaximum": -3)", false, [](double x) { return x >= -20.5 && x < -3; });
  check(R"("exclusiveMinimum": 0.12, "maximum": 0.19)", false, [](double x) { return x > 0.12 && x <= 0.19; });
  ExpectTakes(Schema(R"({"type": "number"})"), {"0", "-1.5e10", "12E-3"}, {".5", "1.", "01", "+1"});
}

TEST(JsonSchema, WhatIsNotSupportedIsRefusedByItsPointer) {
  EXPECT_EQ(SchemaRefusal(R"({"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": true}}})"),
            "schema: \"#/properties/a~1b/uniqueItems\" is not supported; leave it out");
  EXPECT_NE(SchemaRefusal(R"({"not": {}})").find("\"#/not\" is not supported"), std::string::npos);
  EXPECT_NE(SchemaRefusal(R"({"type": "objct"})").find("\"#/type\" is none; allowed: object"), std::string::npos);
  EXPECT_NE(SchemaRefusal(R"({"$ref": "#/$defs/x"})").find("leads nowhere"), std::string::npos);
  EXPECT_NE(SchemaRefusal(R"({"$ref": "http://x"})").find("another document"), std::string::npos);
  EXPECT_NE(SchemaRefusal(R"({"oneOf": [{"type": "integer"}, {"type": "number"}]})").find("may fulfil both"),
            std::string::npos);
  EXPECT_NE(SchemaRefusal(R"({"type": "string", "format": "phone"})").find("allowed: date, time"), std::string::npos);
  EXPECT_NE(SchemaRefusal(R"-({"type": "string", "pattern": "a(?=b)"})-")
                .find("\"#/pattern\": the pattern is not supported at its character 3"),
            std::string::npos);
  EXPECT_NE(SchemaRefusal(R"-({"type": "string", "pattern": "(a)\\1"})-").find("this escape"), std::string::npos);
  EXPECT_NE(SchemaRefusal(R"({"type": "array", "minItems": 3, "maxItems": 2})").find("less than minItems"),
            std::string::npos);
  EXPECT_NE(SchemaRefusal(R"({"type": "object", "required": ["a"], "additionalProperties": false})")
                .find("no object can fulfil it"),
            std::string::npos);
  EXPECT_NE(SchemaRefusal(R"({"type": "integer", "minimum": 5, "maximum": 4})").find("no text can ever fulfil it"),
            std::string::npos);
  EXPECT_NE(SchemaRefusal(R"({"type": "string", "maxLength": 100000})").find("out of range"), std::string::npos);
  EXPECT_NE(SchemaRefusal(R"({"$ref": "#"})").find("calls itself"), std::string::npos);
  EXPECT_NE(SchemaRefusal(R"({"allOf": [{"$ref": "#"}]})"), "");
  EXPECT_NE(SchemaRefusal(R"({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})")
                .find("no text can ever fulfil it"),
            std::string::npos);
  EXPECT_NE(SchemaRefusal("[1]").find("is no schema"), std::string::npos);
  EXPECT_NE(SchemaRefusal("{").find("not valid JSON"), std::string::npos);
  EXPECT_NE(SchemaRefusal(R"({"a": 1, "a": 2})").find("twice"), std::string::npos);
  std::string deep;
  for (int i = 0; i < 60; ++i) deep += R"({"items": )";
  EXPECT_NE(SchemaRefusal(deep + "true" + std::string(60, '}')).find("nested deeper"), std::string::npos);
}

}  // namespace
}  // namespace phsa
