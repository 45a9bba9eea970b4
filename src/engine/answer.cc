#include "engine/answer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/errors.h"

namespace phsa {

const char* Name(StopReason reason) {
  switch (reason) {
    case StopReason::kEndOfText: return "end of text";
    case StopReason::kStopString: return "stop string";
    case StopReason::kStopToken: return "stop token";
    case StopReason::kMaxTokens: return "max_tokens reached";
    case StopReason::kContextFull: return "context full";
    case StopReason::kInterrupted: return "interrupted";
    case StopReason::kLoop: return "repeats itself";
  }
  return "";
}

void CheckPrompt(const Engine& engine, std::span<const int32_t> prompt) {
  const int32_t context = engine.memory().context;
  if (prompt.empty()) ThrowInvalid("the prompt has no tokens; give some text");
  if (prompt.size() >= static_cast<size_t>(context)) {
    ThrowInvalid("the prompt has {} tokens, and the context holds {} with at least one for the answer; {}",
                 prompt.size(), context, engine.TooLongAdvice());
  }
  engine.CheckTokens(prompt, "the prompt");
}

void CheckSpeculation(const Engine& engine, Speculation speculation) {
  if (speculation == Speculation::kNone || engine.device().device == PHSA_DEVICE_CPU) return;
  ThrowInvalid(
      "{} works on the CPU, where a step of several tokens gives the bits of several steps; leave it out, or ask for "
      "{}",
      Option{"speculate"}, Option{"device", "cpu"});
}

// The grammar's tokens, and those that end the answer where the text may end.
class Answer::GrammarFilter final : public TokenFilter {
 public:
  GrammarFilter(const std::shared_ptr<const Grammar>& grammar, const std::shared_ptr<const TokenTrie>& trie,
                std::vector<int32_t> ends)
      : matcher_(grammar, trie), ends_(std::move(ends)), size_(trie->vocab_size()) {}

  bool Allows(int32_t token) override {
    return std::ranges::find(ends_, token) != ends_.end() ? matcher_.MayEnd() : matcher_.Allows(token);
  }
  std::span<const uint64_t> Mask() override {
    const std::span<const uint64_t> mask = matcher_.Mask();
    mask_.assign(mask.begin(), mask.end());
    const bool may_end = matcher_.MayEnd();
    for (const int32_t token : ends_) {
      if (token < 0 || token >= size_) continue;
      const uint64_t bit = uint64_t{1} << (token % 64);
      uint64_t& word = mask_[static_cast<size_t>(token) / 64];
      word = may_end ? word | bit : word & ~bit;
    }
    if (std::ranges::all_of(mask_, [](uint64_t word) { return word == 0; })) {
      ThrowInvalid("the grammar goes on with what no token of the model can write (or nests deeper than {} levels)",
                   kMaxGrammarDepth);
    }
    return mask_;
  }
  void Accept(int32_t token) { PHSA_CHECK(matcher_.Accept(token)); }
  bool MustEnd() const { return matcher_.MustEnd(); }

 private:
  GrammarMatcher matcher_;
  const std::vector<int32_t> ends_;
  const int32_t size_;
  std::vector<uint64_t> mask_;
};

Answer::~Answer() = default;

Answer::Answer(const Engine& engine, const GenerateOptions& options, std::function<void(std::string_view)> text)
    : engine_(engine),
      options_(options),
      text_(std::move(text)),
      sampler_(options.sampler),
      decoder_(engine.tokenizer()),
      stops_(options.stops) {
  CheckSpeculation(engine, options.speculation);
  engine.CheckTokens(options.stop_tokens, "stop_token_ids");
  std::vector<int32_t> biased;
  for (const auto& [token, bias] : options.sampler.logit_bias) biased.push_back(token);
  engine.CheckTokens(biased, "logit_bias");
  if (options.grammar != nullptr) {
    std::vector<int32_t> ends = options.stop_tokens;
    if (!options.ignore_eos) ends.insert(ends.end(), engine.config().eos_ids.begin(), engine.config().eos_ids.end());
    grammar_ = std::make_unique<GrammarFilter>(options.grammar, engine.token_trie(), std::move(ends));
  }
}

void Answer::Choose(const LogitsRow& logits, std::span<const int32_t> text) {
  // Models pad their vocabulary: ids that the tokenizer does not have cannot be text.
  const int32_t known = std::min(engine_.config().vocab_size, engine_.tokenizer().vocab_size());
  next_ = sampler_.Next(logits, known, text, result_.tokens, grammar_.get());
  if (options_.log_probabilities) next_log_probability_ = LogProbability(logits, next_);
}

void Answer::ScorePrompt(const LogitsRow& logits, int32_t next) {
  result_.prompt_log_probabilities.push_back(LogProbability(logits, next));
}

TokenLogProbability Answer::LogProbability(const LogitsRow& logits, int32_t token) const {
  const double sum = logits.LogSumExp();
  if (!std::isfinite(sum)) ThrowNoFiniteLogits();
  const auto log_probability = [&](float logit) { return static_cast<float>(static_cast<double>(logit) - sum); };
  TokenLogProbability out;
  out.value = log_probability(logits[token]);
  // Ids that the tokenizer does not have have no text to be shown by.
  const int32_t known = std::min(engine_.config().vocab_size, engine_.tokenizer().vocab_size());
  const auto count = static_cast<size_t>(std::clamp(options_.log_probabilities.value_or(0), 0, known));
  for (const TokenLogit& one : logits.Top(count, known)) out.top.emplace_back(one.token, log_probability(one.logit));
  return out;
}

bool Answer::Take(int32_t length) {
  const std::optional<StopReason> reason = TakeToken(length);
  if (reason) Finish(*reason);
  return !reason;
}

std::optional<StopReason> Answer::TakeToken(int32_t length) {
  const auto is_one_of = [&](const std::vector<int32_t>& ids) { return std::ranges::find(ids, next_) != ids.end(); };
  if (!options_.ignore_eos && is_one_of(engine_.config().eos_ids)) return StopReason::kEndOfText;
  if (is_one_of(options_.stop_tokens)) return StopReason::kStopToken;
  const auto max_tokens = static_cast<size_t>(std::max(0, options_.max_tokens));
  if (result_.tokens.size() >= max_tokens) return StopReason::kMaxTokens;
  if (grammar_ != nullptr) grammar_->Accept(next_);
  result_.tokens.push_back(next_);
  if (options_.log_probabilities) result_.log_probabilities.push_back(std::move(next_log_probability_));
  Emit(stops_.Next(decoder_.Next(next_)));
  if (stops_.stopped()) return StopReason::kStopString;
  if (grammar_ != nullptr && grammar_->MustEnd()) return StopReason::kEndOfText;
  if (options_.stop_loops && repetition_.Next(result_.tokens)) return StopReason::kLoop;
  if (length >= engine_.memory().context) return StopReason::kContextFull;
  // The last token that is asked for need not be read.
  if (result_.tokens.size() == max_tokens) return StopReason::kMaxTokens;
  return std::nullopt;
}

void Answer::Interrupt() { Finish(StopReason::kInterrupted); }

void Answer::Finish(StopReason reason) {
  result_.reason = reason;
  Emit(stops_.Next(decoder_.Finish()));
  Emit(stops_.Finish());
}

void Answer::Emit(const std::string& text) {
  if (text.empty()) return;
  result_.text += text;
  if (text_) text_(text);
}

}  // namespace phsa
