#include "engine/speculation.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/errors.h"

namespace phsa {
namespace {

// Tokens that must stand there before: with two, most drafts are wrong.
constexpr size_t kGram = 3;
// Further back than this, and among more places, no better one is looked for.
constexpr size_t kLongest = 32;
constexpr int kPlaces = 32;
constexpr size_t kMostDrafted = 16;
constexpr double kShareToLose = 0.02;
// What a further row takes of a step before it was measured, and the weight of what was measured last.
constexpr double kRowShare = 0.3;
constexpr double kWeight = 0.2, kWeightOfTry = 0.1;

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

Speculation SpeculationFromName(std::string_view name) {
  if (name == "none") return Speculation::kNone;
  if (name == "ngram") return Speculation::kNgram;
  ThrowInvalid("{} is {}; allowed: none, ngram", Option{"speculate"}, Quoted(name));
}

uint64_t PromptLookup::Key() const {
  uint64_t key = 0;
  for (size_t i = text_.size() - kGram; i < text_.size(); ++i) key = key << 21 ^ static_cast<uint64_t>(text_[i]);
  return key;
}

void PromptLookup::Append(int32_t token) {
  text_.push_back(token);
  before_.resize(text_.size() + 1, -1);
  if (text_.size() < kGram) return;
  const auto end = static_cast<int32_t>(text_.size());
  const auto [found, is_new] = last_.try_emplace(Key(), end);
  if (is_new) return;
  before_.back() = found->second;
  found->second = end;
}

std::span<const int32_t> PromptLookup::Draft(size_t most) const {
  size_t best = 0, longest = 0;
  int32_t end = before_.empty() ? -1 : before_.back();
  for (int place = 0; end >= 0 && place < kPlaces; ++place, end = before_[static_cast<size_t>(end)]) {
    const auto at = static_cast<size_t>(end);
    size_t same = 0;
    while (same < std::min(at, kLongest) && text_[at - 1 - same] == text_[text_.size() - 1 - same]) ++same;
    if (same > longest) {
      longest = same;
      best = at;
    }
  }
  if (longest < kGram) return {};
  return std::span(text_).subspan(best, std::min(most, text_.size() - best));
}

size_t SpeculationPace::Most() const {
  if (plain_ <= 0) return 0;
  // A further token pays as long as it is right more often than its row costs. Where not even the first one does, one
  // is tried now and then: texts change.
  size_t count = 0;
  for (double all_right = right_; count < kMostDrafted && all_right * plain_ > row_; all_right *= right_) ++count;
  const double affordable = row_ > 0 ? std::floor(credit_ / row_) : static_cast<double>(kMostDrafted);
  return static_cast<size_t>(std::clamp(affordable, 0.0, static_cast<double>(std::max<size_t>(count, 1))));
}

void SpeculationPace::Plain(double seconds) {
  if (plain_ <= 0) {
    plain_ = credit_ = seconds;
    row_ = kRowShare * seconds;
    return;
  }
  seconds = std::min(seconds, 2 * plain_);  // something else took the CPU
  plain_ += kWeight * (seconds - plain_);
  credit_ = std::min(credit_ + kShareToLose * seconds, kMostDrafted * plain_);
}

void SpeculationPace::Tried(size_t tried, size_t right, double seconds) {
  if (tried == 0) return Plain(seconds);
  seconds = std::min(seconds, (2 + static_cast<double>(tried)) * plain_);
  const double row = std::max(0.0, seconds - plain_) / static_cast<double>(tried);
  row_ += kWeight * (row - row_);
  credit_ += static_cast<double>(right + 1) * plain_ - seconds;
  credit_ = std::min(credit_, kMostDrafted * plain_);
  for (size_t i = 0; i < std::min(tried, right + 1); ++i) right_ += kWeightOfTry * ((i < right ? 1.0 : 0.0) - right_);
}

size_t DraftRoom(Engine& engine, const GenerateOptions& options, const GenerateResult& result,
                 const Sequence& sequence) {
  const int64_t answer = static_cast<int64_t>(options.max_tokens) - static_cast<int64_t>(result.tokens.size()) - 1;
  const int64_t context = int64_t{engine.memory().context} - sequence.length() - 1;
  const int64_t rows = int64_t{engine.decoder().max_rows()} - 1;
  int64_t room = std::min({answer, context, rows, static_cast<int64_t>(kMostDrafted)});
  const size_t pages = sequence.PagesToAppend(1);
  while (room > 0 && sequence.PagesToAppend(static_cast<int32_t>(room) + 1) > pages) --room;
  return static_cast<size_t>(std::max<int64_t>(room, 0));
}

Drafts::Drafts(std::span<const int32_t> prompt) : prompt_tokens_(prompt.size()) {
  for (const int32_t token : prompt) lookup_.Append(token);
}

std::span<const int32_t> Drafts::Begin(const GenerateResult& result, int32_t before, size_t room) {
  began_ = Now();
  while (lookup_.size() < prompt_tokens_ + result.tokens.size()) {
    lookup_.Append(result.tokens[lookup_.size() - prompt_tokens_]);
  }
  tokens_.assign(1, result.tokens.back());
  const std::span<const int32_t> draft = lookup_.Draft(std::min(room, pace_.Most()));
  tokens_.insert(tokens_.end(), draft.begin(), draft.end());
  right_ = 0;
  cached_ = before;
  ended_ = false;
  return tokens_;
}

void Drafts::Row(Answer& answer, int32_t row, const LogitsRow& logits, std::span<const int32_t> text) {
  const auto index = static_cast<size_t>(row);
  if (ended_ || index > right_) return;  // it follows a draft that was wrong
  const int32_t length = cached_ + row + 1;
  answer.Choose(logits, text.first(static_cast<size_t>(length)));
  if (index + 1 == tokens_.size() || answer.chosen() != tokens_[index + 1]) return;
  ended_ = !answer.Take(length);
  if (!ended_) ++right_;
}

bool Drafts::End(Sequence& sequence, GenerateResult& result) {
  sequence.Truncate(cached_ + 1 + static_cast<int32_t>(right_));
  pace_.Tried(tokens_.size() - 1, right_, Now() - began_);
  result.drafted_tokens += static_cast<int32_t>(tokens_.size()) - 1;
  result.accepted_tokens += static_cast<int32_t>(right_);
  return !ended_;
}

}  // namespace phsa
