// Calls and thoughts in an answer's text, as models write them.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "server/tools.h"

namespace phsa::server {
namespace {

ToolUse Use(CallFormat format, bool parallel = true) {
  ToolUse use;
  use.tools = {{"f", ""}, {"g", ""}};
  use.choice = ToolUse::Choice::kAuto;
  use.parallel = parallel;
  use.format = format;
  return use;
}

std::string Shown(const Reply& reply) {
  std::string text = reply.reasoning.empty() ? "" : "(" + reply.reasoning + ")";
  text += reply.content;
  for (const ToolCall& call : reply.calls) text += "|" + call.name + call.arguments;
  return text;
}

// Whole, and byte by byte: the same.
std::string Parsed(const ToolUse& use, std::string_view text, bool thinks = false, bool thinking = false) {
  Reply whole;
  ReplyParser at_once(use, thinks, thinking);
  Append(at_once.Feed(text), &whole);
  Append(at_once.Finish(), &whole);
  for (const size_t step : {size_t{1}, size_t{3}, size_t{7}}) {
    Reply reply;
    ReplyParser parser(use, thinks, thinking);
    for (size_t at = 0; at < text.size(); at += step) Append(parser.Feed(text.substr(at, step)), &reply);
    Append(parser.Finish(), &reply);
    EXPECT_EQ(Shown(reply), Shown(whole)) << text << " in steps of " << step;
  }
  return Shown(whole);
}

TEST(Tools, CallsInTagsAreFound) {
  const ToolUse use = Use(CallFormat::kTags);
  const std::string call =
      "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}<\\\"\", \"b\": [{}]}}\n</tool_call>";
  const std::string found = "|f{\"a\": \"}<\\\"\", \"b\": [{}]}";
  EXPECT_EQ(Parsed(use, call), found);
  EXPECT_EQ(Parsed(use, "I look.\n" + call + "\n"), "I look." + found);
  EXPECT_EQ(Parsed(use, call + "\n" + call), found + found);
  EXPECT_EQ(Parsed(Use(CallFormat::kTags, false), call + "\n" + call), found);
  EXPECT_EQ(Parsed(use, "<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"g\"}</tool_call>"), "|g{\"a\":1}");
  EXPECT_EQ(Parsed(use, "<tool_call>{\"name\": \"g\"}</tool_call>"), "|g{}");
  EXPECT_EQ(Parsed(use, R"(<tool_call>{"name": "g", "arguments": "{\"a\": 1}"}</tool_call>)"), "|g{\"a\":1}");
  EXPECT_EQ(Parsed(use, "<tool_call>{\"name\": \"g\", \"arguments\": {\"a\": 1}, \"id\": \"7\"}</tool_call> Done."),
            " Done.|g{\"a\": 1}");
}

TEST(Tools, WhatIsNoCallStaysText) {
  const ToolUse use = Use(CallFormat::kTags);
  for (const char* text :
       {"Plain.", " a < b, <tool, <tool_cal", "<tool_call>", "<tool_call>\nnothing</tool_call> x",
        "<tool_call>{\"name\": \"unknown\", \"arguments\": {}}</tool_call>", "<tool_call>{\"name\": \"f\"",
        "<tool_call>{\"name\": 1}</tool_call>", "{}", "[]", "[1]", "{\"a\": 1} and more", "[", "  \n "}) {
    EXPECT_EQ(Parsed(use, text), text);
  }
  ToolUse none = use;
  none.choice = ToolUse::Choice::kNone;
  const char* const call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n";
  EXPECT_EQ(Parsed(none, call), call);
  // Cut short: what came of it is passed on.
  EXPECT_EQ(Parsed(use, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"x"), "|f{\"a\": \"x");
}

TEST(Tools, CallsThatAreJsonOrMistralsAreFound) {
  const ToolUse json = Use(CallFormat::kJson), mistral = Use(CallFormat::kMistral);
  EXPECT_EQ(Parsed(json, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}"), "|f{\"a\": 1}");
  EXPECT_EQ(Parsed(json, " {\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}"), "|f{}|g{}");
  EXPECT_EQ(Parsed(json, "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {\"a\": 1}}"),
            "|f{\"a\": 1}");
  EXPECT_EQ(Parsed(json, "[{\"name\": \"f\", \"arguments\": {}}]"), "|f{}");
  EXPECT_EQ(
      Parsed(mistral,
             "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": [1]}}, {\"name\": \"g\", \"arguments\": {}}]"),
      "|f{\"a\": [1]}|g{}");
  EXPECT_EQ(Parsed(mistral, "Look.[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g{\"b\": {}}"),
            "Look.|f{\"a\": 1}|g{\"b\": {}}");
  EXPECT_EQ(Parsed(mistral, "[TOOL_CALLS]nobody{}"), "[TOOL_CALLS]nobody{}");
  for (const CallFormat format : {CallFormat::kTags, CallFormat::kMistral}) {
    EXPECT_EQ(NewCallId(format).size(), format == CallFormat::kMistral ? 9u : 29u);
  }
}

TEST(Tools, ThoughtsAreToldApart) {
  const ToolUse use = Use(CallFormat::kTags);
  EXPECT_EQ(Parsed({}, "<think>\nhm, a < b\n</think>\n\nYes.\n", true), "(hm, a < b)Yes.\n");
  EXPECT_EQ(Parsed({}, "hm</think>Yes", true, true), "(hm)Yes");
  EXPECT_EQ(Parsed({}, "only thought </thin", true, true), "(only thought </thin)");
  EXPECT_EQ(Parsed({}, "<think>a</think>", false), "<think>a</think>");
  EXPECT_EQ(Parsed({}, "No <think>a</think>", true), "No <think>a</think>");
  EXPECT_EQ(
      Parsed(use, "<think>\nhm\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>", true),
      "(hm)|f{}");
  EXPECT_EQ(Parsed(use, "<think>\n\n</think>\n\n{\"name\": \"f\", \"arguments\": {}}", true), "|f{}");
}

TEST(Tools, WhereAGrammarHoldsTheAnswerOnlyWhatItTakesForACallIsOne) {
  for (const CallFormat format : {CallFormat::kTags, CallFormat::kJson, CallFormat::kMistral}) {
    ToolUse use = Use(format);
    use.guided = true;
    EXPECT_EQ(Parsed(use, R"({"name": "f", "arguments": {}})"), "|f{}");
    EXPECT_EQ(Parsed(use,
                     "\n"
                     R"({"name": "f", "parameters": {"a": 1}})"),
              "|f{\"a\": 1}");
    EXPECT_EQ(Parsed(use, R"([{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}])"), "|f{}|g{}");
    EXPECT_EQ(Parsed(use, R"({"type": "function", "name": "f", "parameters": {}})"), "|f{}");
    for (const char* said : {R"({"arguments": {}, "name": "f"})", R"([ {"name": "f", "arguments": {}}])", R"({"nam)"}) {
      EXPECT_EQ(Parsed(use, said), said);
    }
    use.json_calls = false;
    const std::string json = R"({"name": "f", "arguments": {}})";
    EXPECT_EQ(Parsed(use, json), format == CallFormat::kJson ? "|f{}" : json);
  }
  ToolUse tags = Use(CallFormat::kTags);
  tags.guided = true;
  const std::string other = R"([TOOL_CALLS] [{"name": "f", "arguments": {}}])";
  EXPECT_EQ(Parsed(tags, other), other);
  tags.allowed = {"g"};
  EXPECT_EQ(Parsed(tags, R"({"name": "g", "arguments": {}})"), "|g{}");
}

TEST(Tools, TheFormatIsTheTemplates) {
  EXPECT_EQ(CallFormatOf("… [TOOL_CALLS] … [ARGS] …", true), CallFormat::kMistralNamed);
  EXPECT_EQ(CallFormatOf("… <tool_call> …", true), CallFormat::kTags);
  EXPECT_EQ(CallFormatOf("… [TOOL_CALLS] …", true), CallFormat::kMistral);
  EXPECT_EQ(CallFormatOf("… <|python_tag|> …", true), CallFormat::kJson);
  EXPECT_EQ(CallFormatOf("… [TOOL_CALLS] …", false), CallFormat::kTags);  // in words
}

}  // namespace
}  // namespace phsa::server
