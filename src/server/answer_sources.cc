#include "server/answer_sources.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/utf8.h"

namespace phsa::server {
namespace {

constexpr int32_t kMostSources = 50;

// Offsets of a text as Python counts (characters) and as JavaScript does (UTF-16).
class Offsets {
 public:
  explicit Offsets(std::string_view text) : text_(text) {}
  // Adds the range of these bytes to an object; `begin` is not before the range that was added last, or it begins anew.
  void AddRange(size_t begin, size_t end, Json* object) {
    if (begin < byte_) byte_ = characters_ = units_ = 0;
    Advance(begin);
    (*object)["start"] = characters_;
    (*object)["start_utf16"] = units_;
    Advance(end);
    (*object)["end"] = characters_;
    (*object)["end_utf16"] = units_;
  }

 private:
  void Advance(size_t end) {
    while (byte_ < end) {
      const Utf8Step step = ScanUtf8(text_, byte_);
      byte_ += step.size;
      ++characters_;
      units_ += step.kind == Utf8Step::Kind::kCharacter && step.code > 0xffff ? 2 : 1;
    }
  }

  const std::string_view text_;
  size_t byte_ = 0, characters_ = 0, units_ = 0;
};

// The bytes of an answer's text that each of its tokens wrote.
std::vector<std::pair<size_t, size_t>> BytesOfTokens(const GenerateResult& result, const Tokenizer& tokenizer) {
  StreamDecoder decoder(tokenizer);
  std::vector<std::pair<size_t, size_t>> bytes;
  size_t at = 0;
  for (const int32_t token : result.tokens) {
    const size_t size = decoder.Next(token).size();
    // What a stop text cut off was not said.
    bytes.emplace_back(std::min(at, result.text.size()), std::min(at + size, result.text.size()));
    at += size;
  }
  return bytes;
}

double Weight(double value) { return std::round(value * 1e4) / 1e4; }

// The answer's words that used a passage; those side by side are one range.
Json UsesJson(const Passage& passage, const std::vector<std::pair<size_t, size_t>>& tokens, size_t content_begin,
              std::string_view content) {
  Json uses = Json::array();
  Offsets offsets(content);
  int32_t before = -2;
  size_t begin = 0;
  double share = 0;
  for (const Passage::Use& use : passage.used_by) {
    const auto [first, last] = tokens[static_cast<size_t>(use.token)];
    if (first < content_begin || last > content_begin + content.size() || first == last) continue;
    const bool joins = use.token == before + 1 && !uses.empty();
    if (!joins) {
      uses.push_back(Json::object());
      begin = first;
      share = 0;
    }
    share += use.share;
    offsets.AddRange(begin - content_begin, last - content_begin, &uses.back());
    uses.back()["weight"] = Weight(share);
    before = use.token;
  }
  return uses;
}

}  // namespace

std::optional<SourceOptions> ReadSources(const Fields& fields) {
  static constexpr const char* kKey = "sources";
  const std::optional<Fields> own = fields.Object("phsa");
  const Json* const value = own ? own->Find(kKey) : nullptr;
  if (value == nullptr) return std::nullopt;
  SourceOptions options;
  if (value->is_boolean()) return value->get<bool>() ? std::optional(options) : std::nullopt;
  if (!value->is_number_integer()) own->RefuseValue(kKey, *value, "true, false, or how many at most");
  options.most = static_cast<size_t>(*own->Int(kKey, 0, kMostSources));
  return options.most > 0 ? std::optional(options) : std::nullopt;
}

size_t QuestionBegin(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t last = text.find_last_not_of(kSpace);
  if (last == std::string_view::npos) return 0;
  size_t line = std::string_view::npos;  // behind the last line break
  for (size_t at = text.rfind('\n', last); at != std::string_view::npos && at > 0; at = text.rfind('\n', at - 1)) {
    if (line == std::string_view::npos) line = at + 1;
    const size_t before = text.find_last_not_of(" \t\r", at - 1);
    if (before == std::string_view::npos || text[before] == '\n') return at + 1;
  }
  return line == std::string_view::npos ? 0 : line;
}

void SetSources(const std::vector<CandidateText>& texts, const Tokenizer& tokenizer, const SourceOptions& options,
                Prompt* prompt) {
  auto task = std::make_shared<SourceTask>();
  task->options = options;
  SourceFinder finder(tokenizer, prompt->tokens);
  for (const CandidateText& one : texts) {
    std::string_view text = one.given.text;
    if (one.ends_with_question) text = text.substr(0, QuestionBegin(text));
    std::optional<SourceText> found = finder.Find(text, SentenceKind::kProse);
    if (!found || found->sentences.empty()) continue;
    prompt->given.push_back(one.given);
    task->texts.push_back(std::move(*found));
  }
  prompt->sources = std::move(task);
}

Json SourcesJson(const Prompt& prompt, const AnswerSources& sources, size_t choice, const GenerateResult& result,
                 std::string_view content, const Tokenizer& tokenizer) {
  Json list = Json::array();
  const std::vector<std::pair<size_t, size_t>> tokens = BytesOfTokens(result, tokenizer);
  const size_t content_begin = result.text.find(content);
  for (const Passage& passage : sources.passages) {
    const GivenText& given = prompt.given[passage.text];
    Json source = {{"choice", choice},
                   {"message", given.message ? Json(*given.message) : Json()},
                   {"in", given.place},
                   {"text", given.text.substr(passage.begin, passage.end - passage.begin)},
                   {"weight", Weight(passage.weight)},
                   {"used_by", Json::array()}};
    Offsets(given.text).AddRange(passage.begin, passage.end, &source);
    if (content_begin != std::string::npos) {
      source["used_by"] = UsesJson(passage, tokens, content_begin, content);
    }
    list.push_back(std::move(source));
  }
  return list;
}

}  // namespace phsa::server
