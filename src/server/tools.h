// Functions that a chat may call: what a request says of them, and the calls that an answer makes, found in its text
// as it comes.
#ifndef PHSA_SERVER_TOOLS_H_
#define PHSA_SERVER_TOOLS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace phsa::server {

struct Tool {
  std::string name;
  std::string parameters = {};  // the JSON text of its schema; empty: none
  std::optional<std::string> description = {};
  std::string place = {};  // the schema's field in the request
  bool strict = false;     // its calls fulfil the schema, or the request is refused
};

// How a model writes its calls; decided by its template.
enum class CallFormat : uint8_t {
  kTags,          // <tool_call>{"name": …, "arguments": …}</tool_call>
  kJson,          // an object, or several, instead of an answer; behind <|python_tag|> too
  kMistral,       // [TOOL_CALLS] and a list of objects, or a name and its arguments
  kMistralNamed,  // [TOOL_CALLS]name[ARGS]{…}; where nothing holds the answer to it, as kMistral
};
CallFormat CallFormatOf(std::string_view template_text, bool has_tools);

// What a request lets an answer do.
struct ToolUse {
  enum class Choice : uint8_t { kNone, kAuto, kRequired };
  std::vector<Tool> tools;
  Choice choice = Choice::kNone;
  std::vector<std::string> allowed = {};  // only these may be called; empty: all
  bool parallel = true;                   // several calls in an answer
  CallFormat format = CallFormat::kTags;
  // A grammar holds the answer to calls of these tools: only what it takes for a call is one.
  bool guided = false;
  bool json_calls = true;  // guided: an answer that begins as one of kCallBeginnings is a call in every format
  bool active() const { return choice != Choice::kNone && !tools.empty(); }
  const Tool* Find(std::string_view name) const;
  bool Allows(std::string_view name) const;  // it is there and may be called
};

// How an answer begins that is a call without any mark, where a grammar holds it to that.
inline constexpr std::string_view kCallBeginnings[] = {R"({"name")", R"([{"name")", R"({"type": "function")"};
inline constexpr std::string_view kThink = "<think>", kThinkEnd = "</think>", kCallOpen = "<tool_call>",
                                  kCallClose = "</tool_call>", kMistralMark = "[TOOL_CALLS]",
                                  kPythonMark = "<|python_tag|>", kArgumentsMark = "[ARGS]";

struct ToolCall {
  std::string id, name, arguments;
};

// A piece of an answer. Calls are begun in order; arguments belong to the last one.
struct ReplyPiece {
  enum class Kind : uint8_t { kReasoning, kContent, kCall, kArguments };
  Kind kind;
  std::string text = {};     // of kCall: the function's name
  std::string call_id = {};  // of kCall
};

// Takes an answer's text as it comes and gives its pieces: thoughts, what is said, calls.
class ReplyParser {
 public:
  // `thinks`: thoughts between <think> and </think> are told apart; `thinking`: the prompt opened them already.
  ReplyParser(const ToolUse& use, bool thinks, bool thinking);
  ~ReplyParser();
  ReplyParser(ReplyParser&&) noexcept;
  ReplyParser& operator=(ReplyParser&&) noexcept;

  std::vector<ReplyPiece> Feed(std::string_view text);
  std::vector<ReplyPiece> Finish();  // nothing follows
  int32_t calls() const;             // so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Marks of calls and thoughts that a tokenizer may have as control tokens, which leave no text behind.
inline constexpr std::string_view kCallMarks[] = {kMistralMark, kPythonMark, kArgumentsMark, kCallOpen,
                                                  kCallClose,   kThink,      kThinkEnd};

// Puts those marks back into an answer's text as it comes.
class CallMarks {
 public:
  explicit CallMarks(const Tokenizer& tokenizer);
  bool any() const { return !marks_.empty(); }  // a control token is one
  // `text`: what is new of the answer's text, `tokens`: of its tokens.
  std::string Restore(std::span<const int32_t> tokens, std::string_view text);

 private:
  struct Due {
    size_t place;  // in the text
    std::string_view mark;
  };
  const Tokenizer* tokenizer_;
  std::vector<std::pair<int32_t, std::string_view>> marks_;
  std::vector<int32_t> tokens_;
  std::vector<Due> due_;
  size_t given_ = 0;  // bytes of text
};

// An answer that is whole.
struct Reply {
  std::string reasoning, content;
  std::vector<ToolCall> calls;
};
void Append(const std::vector<ReplyPiece>& pieces, Reply* reply);

std::string NewId(const char* prefix);  // "chatcmpl-0123…"
std::string NewCallId(CallFormat format);

}  // namespace phsa::server

#endif  // PHSA_SERVER_TOOLS_H_
