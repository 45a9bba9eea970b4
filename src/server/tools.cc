#include "server/tools.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <utility>

namespace phsa::server {
namespace {

constexpr std::string_view kSpace = " \t\r\n", kBetween = " \t\r\n,;[]";

std::mt19937_64& Random() {
  thread_local std::mt19937_64 random{(uint64_t{std::random_device{}()} << 32) ^ std::random_device{}()};
  return random;
}

bool IsMistral(CallFormat format) { return format == CallFormat::kMistral || format == CallFormat::kMistralNamed; }

// How much of the end of `text` may be the beginning of one of the marks.
template <class Marks>
size_t HeldBack(std::string_view text, const Marks& marks) {
  size_t held = 0;
  for (const std::string_view mark : marks) {
    for (size_t size = std::min(mark.size() - 1, text.size()); size > held; --size) {
      if (mark.starts_with(text.substr(text.size() - size))) held = size;
    }
  }
  return held;
}

// Follows a JSON value byte by byte, to see where it ends.
class JsonEnd {
 public:
  // Whether the value, an object or a list, is complete with this byte.
  bool Take(char c) {
    if (in_string_) {
      if (escaped_) {
        escaped_ = false;
      } else if (c == '\\') {
        escaped_ = true;
      } else if (c == '"') {
        in_string_ = false;
      }
      return false;
    }
    if (c == '"') in_string_ = true;
    if (c == '{' || c == '[') ++depth_;
    if (c == '}' || c == ']') --depth_;
    return depth_ <= 0;
  }

 private:
  int64_t depth_ = 0;
  bool in_string_ = false, escaped_ = false;
};

// {"name": "x", "arguments": — the beginning of a call whose arguments follow at once. Nothing: not yet, or never.
struct CallHead {
  std::string name;
  size_t size;  // up to the arguments' bracket
};
std::optional<CallHead> HeadOf(std::string_view text) {
  size_t at = 0;
  const auto skip = [&] { at = std::min(text.find_first_not_of(kSpace, at), text.size()); };
  const auto take = [&](char c) {
    skip();
    if (at == text.size() || text[at] != c) return false;
    ++at;
    return true;
  };
  const auto string = [&]() -> std::optional<std::string> {
    skip();
    const size_t begin = at;
    if (!take('"')) return std::nullopt;
    for (; at < text.size() && text[at] != '"'; ++at) {
      if (text[at] == '\\') ++at;
    }
    if (at >= text.size()) return std::nullopt;
    ++at;
    const auto value = nlohmann::json::parse(text.substr(begin, at - begin), nullptr, false);
    if (!value.is_string()) return std::nullopt;
    return value.get<std::string>();
  };
  if (!take('{')) return std::nullopt;
  std::optional<std::string> name;
  for (;;) {
    const std::optional<std::string> key = string();
    if (!key || !take(':')) return std::nullopt;
    if (*key == "arguments" || *key == "parameters") {
      skip();
      if (!name || at == text.size() || text[at] != '{') return std::nullopt;
      return CallHead{*name, at};
    }
    const std::optional<std::string> value = string();
    if (!value || !take(',')) return std::nullopt;
    if (*key == "name") name = value;
  }
}

}  // namespace

CallFormat CallFormatOf(std::string_view template_text, bool has_tools) {
  const auto has = [&](std::string_view part) { return template_text.find(part) != std::string_view::npos; };
  if (!has_tools || has(kCallOpen)) return CallFormat::kTags;
  if (!has(kMistralMark)) return CallFormat::kJson;
  return has(kArgumentsMark) ? CallFormat::kMistralNamed : CallFormat::kMistral;
}

const Tool* ToolUse::Find(std::string_view name) const {
  const auto found = std::ranges::find(tools, name, &Tool::name);
  return found != tools.end() ? &*found : nullptr;
}

bool ToolUse::Allows(std::string_view name) const {
  return Find(name) != nullptr && (allowed.empty() || std::ranges::find(allowed, name) != allowed.end());
}

struct ReplyParser::State {
  enum class Mode : uint8_t { kStart, kReasoning, kContentStart, kContent, kCalls, kObject, kArguments, kObjectEnd };

  const ToolUse& use;
  bool thinks;
  Mode mode = Mode::kStart;
  std::string text;     // not yet taken apart
  std::string object;   // of a call
  std::string opening;  // what came before it and belongs to it, for where it is no call after all
  JsonEnd end;
  bool in_tags = false;        // the calls are between <tool_call> and </tool_call>
  bool names_call = false;     // the call's name stands before its arguments, not in an object
  bool thought_began = false;  // something of it was said
  bool after_thought = false;  // and nothing behind it yet
  bool list_may_begin = false;
  bool object_is_long = false;
  std::string space;  // said, but only where something follows
  int32_t calls = 0;
  bool skipped = false;  // this call is one too many
  std::vector<ReplyPiece> pieces;

  void Say(ReplyPiece::Kind kind, std::string said) {
    if (said.empty()) return;
    if (!pieces.empty() && pieces.back().kind == kind) {
      pieces.back().text += said;
    } else {
      pieces.push_back({kind, std::move(said)});
    }
  }

  // White space at the end waits: before a call it is dropped.
  void SayContent(std::string_view said) {
    if (said.empty()) return;
    if (!use.active()) {
      Say(ReplyPiece::Kind::kContent, std::string(said));
      return;
    }
    const size_t last = said.find_last_not_of(kSpace);
    if (last == std::string_view::npos) {
      space += said;
      return;
    }
    Say(ReplyPiece::Kind::kContent, space + std::string(said.substr(0, last + 1)));
    space = said.substr(last + 1);
  }

  void BeginCall(const std::string& name) {
    skipped = calls > 0 && !use.parallel;
    if (skipped) return;
    space.clear();
    ++calls;
    pieces.push_back({ReplyPiece::Kind::kCall, name, NewCallId(use.format)});
  }
  void Arguments(std::string said) {
    if (!skipped) Say(ReplyPiece::Kind::kArguments, std::move(said));
  }

  // The object is whole and was not begun as a call.
  void WholeObject() {
    const auto parsed = nlohmann::ordered_json::parse(object, nullptr, false);
    const auto said = [&] {
      SayContent(std::exchange(opening, {}) + object);
      mode = Mode::kContent;
    };
    if (!parsed.is_object() || !parsed.contains("name") || !parsed["name"].is_string()) return said();
    const std::string name = parsed["name"].get<std::string>();
    if (!use.Allows(name)) return said();
    const char* const key = parsed.contains("arguments") ? "arguments" : "parameters";
    nlohmann::ordered_json arguments = parsed.contains(key) ? parsed[key] : nlohmann::ordered_json::object();
    if (arguments.is_string()) arguments = nlohmann::ordered_json::parse(arguments.get<std::string>(), nullptr, false);
    if (arguments.is_null()) arguments = nlohmann::ordered_json::object();
    if (!arguments.is_object()) return said();
    BeginCall(name);
    Arguments(arguments.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    opening.clear();
    mode = Mode::kCalls;
  }

  // One step; false: nothing can be done without more text.
  bool Step(bool last) {
    switch (mode) {
      case Mode::kStart: {
        if (!thinks) {
          mode = Mode::kContentStart;
          return true;
        }
        const size_t begin = text.find_first_not_of(kSpace);
        const std::string_view rest =
            begin == std::string::npos ? std::string_view() : std::string_view(text).substr(begin);
        if (rest.starts_with(kThink)) {
          text.erase(0, begin + kThink.size());
          mode = Mode::kReasoning;
          return true;
        }
        if (!last && kThink.starts_with(rest)) return false;
        mode = Mode::kContentStart;
        return true;
      }
      case Mode::kReasoning: return StepReasoning(last);
      case Mode::kContentStart: {
        const size_t begin = text.find_first_not_of(kSpace);
        if (begin == std::string::npos && !last) return false;
        // Calls that are no more than JSON take the place of the answer.
        if (use.active() && use.guided && begin != std::string::npos) {
          const Beginning call = BeginsAsCall(std::string_view(text).substr(begin));
          if (call == Beginning::kMaybe && !last) return false;
          if (call == Beginning::kYes) {
            opening = text.substr(0, begin);
            text.erase(0, begin);
            mode = Mode::kCalls;
            return true;
          }
        } else if (use.active() && begin != std::string::npos && (text[begin] == '{' || text[begin] == '[')) {
          const bool mark = std::string_view(text).substr(begin).starts_with(kMistralMark);
          const bool maybe = !mark && !last && kMistralMark.starts_with(std::string_view(text).substr(begin));
          if (maybe) return false;
          if (!mark && (text[begin] == '{' || JsonList(begin, last))) {
            opening = text.substr(0, begin);
            text.erase(0, begin);
            mode = Mode::kCalls;
            return true;
          }
          if (!mark && list_may_begin) return false;
        }
        mode = Mode::kContent;
        return true;
      }
      case Mode::kContent: return StepContent(last);
      case Mode::kCalls: return StepCalls(last);
      case Mode::kObject: return StepObject(last);
      case Mode::kArguments: {
        size_t taken = 0;
        bool whole = false;
        while (taken < text.size() && !whole) whole = end.Take(text[taken++]);
        Arguments(text.substr(0, taken));
        text.erase(0, taken);
        if (!whole) return false;
        mode = names_call ? Mode::kCalls : Mode::kObjectEnd;
        return true;
      }
      case Mode::kObjectEnd: {
        // What else the call's object says, up to its bracket.
        const size_t close = text.find('}');
        text.erase(0, close == std::string::npos ? text.size() : close + 1);
        if (close == std::string::npos) return false;
        mode = Mode::kCalls;
        return true;
      }
    }
    return false;
  }

  enum class Beginning : uint8_t { kNo, kMaybe, kYes };
  Beginning BeginsAsCall(std::string_view answer) const {
    Beginning result = Beginning::kNo;
    if (use.format != CallFormat::kJson && !use.json_calls) return result;
    for (const std::string_view one : kCallBeginnings) {
      if (answer.starts_with(one)) return Beginning::kYes;
      if (one.starts_with(answer)) result = Beginning::kMaybe;
    }
    return result;
  }

  // Whether a list of objects begins there.
  bool JsonList(size_t begin, bool last) {
    const size_t next = text.find_first_not_of(kSpace, begin + 1);
    list_may_begin = next == std::string::npos && !last;
    return next != std::string::npos && text[next] == '{';
  }

  bool StepReasoning(bool last) {
    static constexpr std::array<std::string_view, 1> kMarks = {kThinkEnd};
    if (!thought_began) {
      const size_t begin = text.find_first_not_of('\n');
      text.erase(0, std::min(begin, text.size()));
      if (text.empty()) return false;
      thought_began = true;
    }
    const size_t close = text.find(kThinkEnd);
    const size_t until = close != std::string::npos ? close : last ? text.size() : text.size() - HeldBack(text, kMarks);
    std::string said = space + text.substr(0, until);
    const size_t kept = said.find_last_not_of(kSpace);
    space = kept == std::string::npos ? said : said.substr(kept + 1);
    said.resize(kept == std::string::npos ? 0 : kept + 1);
    Say(ReplyPiece::Kind::kReasoning, std::move(said));
    text.erase(0, until);
    if (close == std::string::npos) return false;
    text.erase(0, kThinkEnd.size());
    space.clear();
    mode = Mode::kContentStart;
    after_thought = true;
    return true;
  }

  bool StepContent(bool last) {
    if (after_thought) {
      // The empty lines behind a thought are nobody's.
      text.erase(0, std::min(text.find_first_not_of('\n'), text.size()));
      if (text.empty()) return false;
      after_thought = false;
    }
    if (!use.active()) {
      SayContent(text);
      text.clear();
      return false;
    }
    static constexpr std::array<std::string_view, 3> kAll = {kCallOpen, kMistralMark, kPythonMark};
    // The one that the grammar answers with a call, or all.
    const size_t own = IsMistral(use.format) ? 1 : use.format == CallFormat::kJson ? 2 : 0;
    const std::span<const std::string_view> marks = use.guided ? std::span(kAll).subspan(own, 1) : std::span(kAll);
    size_t first = std::string::npos;
    std::string_view mark;
    for (const std::string_view one : marks) {
      const size_t found = text.find(one);
      if (found < first) {
        first = found;
        mark = one;
      }
    }
    const size_t until = first != std::string::npos ? first : last ? text.size() : text.size() - HeldBack(text, marks);
    SayContent(std::string_view(text).substr(0, until));
    text.erase(0, until);
    if (first == std::string::npos) return false;
    text.erase(0, mark.size());
    opening = mark;
    in_tags = mark == kCallOpen;
    mode = Mode::kCalls;
    return true;
  }

  // Between calls, or before the first.
  bool StepCalls(bool last) {
    size_t begin = 0;
    bool waits = false;
    while (begin < text.size() && !waits) {
      const std::string_view rest = std::string_view(text).substr(begin);
      if (rest.starts_with(kMistralMark)) {
        begin += kMistralMark.size();
      } else if (!last && rest.front() == '[' && kMistralMark.starts_with(rest)) {
        waits = true;
      } else if (kBetween.find(rest.front()) != std::string_view::npos) {
        ++begin;
      } else {
        break;
      }
    }
    opening += text.substr(0, begin);
    text.erase(0, begin);
    if (waits) return false;
    if (text.empty()) {
      if (last && calls == 0) {
        SayContent(std::exchange(opening, {}));
        mode = Mode::kContent;
      }
      return false;
    }
    const std::string_view rest = text;
    if (rest.front() == '{') {
      object.clear();
      end = {};
      names_call = false;
      mode = Mode::kObject;
      return true;
    }
    for (const std::string_view close : {kCallClose, kPythonMark}) {
      if (rest.starts_with(close)) {
        text.erase(0, close.size());
        opening.clear();
        mode = close == kCallClose ? Mode::kContent : Mode::kCalls;
        return true;
      }
      if (!last && close.starts_with(rest)) return false;
    }
    // A name and its arguments, as newer Mistral models write them.
    if (IsMistral(use.format) && !in_tags) {
      const size_t bracket = rest.find('{');
      const size_t args = rest.find(kArgumentsMark);
      if (bracket == std::string_view::npos && !last && rest.size() < 200) return false;
      if (bracket != std::string_view::npos) {
        std::string name(rest.substr(0, std::min(bracket, args)));
        while (!name.empty() && kSpace.find(name.back()) != std::string_view::npos) name.pop_back();
        if (use.Allows(name)) {
          BeginCall(name);
          text.erase(0, bracket);
          opening.clear();
          end = {};
          names_call = true;
          mode = Mode::kArguments;
          return true;
        }
      }
    }
    // No call: it was said.
    text = opening + text;
    opening.clear();
    const std::string all = std::exchange(text, {});
    // What opened it must not open it again.
    const size_t safe = std::min(all.size(), std::max<size_t>(1, all.find_first_not_of("<[{", 0)));
    SayContent(std::string_view(all).substr(0, safe));
    text = all.substr(safe);
    mode = Mode::kContent;
    return true;
  }

  bool StepObject(bool last) {
    size_t taken = 0;
    bool whole = false;
    while (taken < text.size() && !whole) {
      const char c = text[taken++];
      whole = end.Take(c);
      // As soon as it is known whose arguments begin, they go out as they come.
      if (c == '{' && !whole && !object_is_long) {
        const std::string so_far = object + text.substr(0, taken);
        const std::optional<CallHead> head = HeadOf(so_far);
        if (head && head->size + 1 == so_far.size() && use.Allows(head->name)) {
          BeginCall(head->name);
          text = "{" + text.substr(taken);
          object.clear();
          opening.clear();
          end = {};
          mode = Mode::kArguments;
          return true;
        }
        // Only a head is short; deep values are not looked through again and again.
        object_is_long = so_far.size() > 4096;
      }
    }
    object += text.substr(0, taken);
    text.erase(0, taken);
    if (whole) {
      object_is_long = false;
      WholeObject();
      return true;
    }
    if (last) {
      SayContent(std::exchange(opening, {}) + object);
      object.clear();
      mode = Mode::kContent;
      return true;
    }
    return false;
  }
};

ReplyParser::ReplyParser(const ToolUse& use, bool thinks, bool thinking) : state_(new State{use, thinks || thinking}) {
  if (thinking) state_->mode = State::Mode::kReasoning;
}
ReplyParser::~ReplyParser() = default;
ReplyParser::ReplyParser(ReplyParser&&) noexcept = default;
ReplyParser& ReplyParser::operator=(ReplyParser&&) noexcept = default;

int32_t ReplyParser::calls() const { return state_->calls; }

std::vector<ReplyPiece> ReplyParser::Feed(std::string_view text) {
  state_->text += text;
  while (state_->Step(false)) {
  }
  return std::exchange(state_->pieces, {});
}

std::vector<ReplyPiece> ReplyParser::Finish() {
  while (state_->Step(true)) {
  }
  if (state_->calls == 0 && state_->mode != State::Mode::kReasoning && !state_->space.empty()) {
    state_->Say(ReplyPiece::Kind::kContent, std::exchange(state_->space, {}));
  }
  return std::exchange(state_->pieces, {});
}

CallMarks::CallMarks(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {
  for (const std::string_view mark : kCallMarks) {
    const int32_t id = tokenizer.TokenId(mark);
    if (id >= 0 && tokenizer.IsSpecial(id)) marks_.emplace_back(id, mark);
  }
}

std::string CallMarks::Restore(std::span<const int32_t> tokens, std::string_view text) {
  if (!any()) return std::string(text);
  for (const int32_t token : tokens) {
    const auto mark = std::find_if(marks_.begin(), marks_.end(), [&](const auto& one) { return one.first == token; });
    if (mark != marks_.end()) due_.push_back({tokenizer_->Decode(tokens_, true).size(), mark->second});
    tokens_.push_back(token);
  }
  std::string restored;
  size_t at = 0;
  while (!due_.empty() && due_.front().place <= given_ + text.size()) {
    const size_t place = std::max(due_.front().place, given_ + at) - given_;
    restored += text.substr(at, place - at);
    restored += due_.front().mark;
    at = place;
    due_.erase(due_.begin());
  }
  restored += text.substr(at);
  given_ += text.size();
  return restored;
}

void Append(const std::vector<ReplyPiece>& pieces, Reply* reply) {
  for (const ReplyPiece& piece : pieces) {
    switch (piece.kind) {
      case ReplyPiece::Kind::kReasoning: reply->reasoning += piece.text; break;
      case ReplyPiece::Kind::kContent: reply->content += piece.text; break;
      case ReplyPiece::Kind::kCall: reply->calls.push_back({piece.call_id, piece.text, ""}); break;
      case ReplyPiece::Kind::kArguments: reply->calls.back().arguments += piece.text; break;
    }
  }
}

std::string NewId(const char* prefix) { return fmt::format("{}{:016x}{:016x}", prefix, Random()(), Random()()); }

std::string NewCallId(CallFormat format) {
  // Mistral's templates take ids of nine letters and digits, and no others.
  if (!IsMistral(format)) return fmt::format("call_{:016x}{:08x}", Random()(), Random()() >> 32);
  constexpr std::string_view kLetters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  std::string id;
  for (int i = 0; i < 9; ++i) id += kLetters[Random()() % kLetters.size()];
  return id;
}

}  // namespace phsa::server
