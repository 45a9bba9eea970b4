#include "engine/session.h"

#include <algorithm>
#include <chrono>

#include "base/errors.h"
#include "engine/stop_strings.h"

namespace phsa {
namespace {

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

const char* Name(StopReason reason) {
  switch (reason) {
    case StopReason::kEndOfText: return "end of text";
    case StopReason::kStopString: return "stop string";
    case StopReason::kMaxTokens: return "-n reached";
    case StopReason::kContextFull: return "context full";
    case StopReason::kInterrupted: return "interrupted";
  }
  return "";
}

std::optional<int32_t> Session::Prefill(std::span<const int32_t> tokens, const GenerateCallbacks& callbacks,
                                        const LogitsSink& sink, BatchItem::Logits logits) {
  const auto& have = sequence_.tokens();
  size_t shared = 0;
  // All logits: every token is read. Otherwise at least the last one, whose logits are wanted.
  if (logits != BatchItem::Logits::kAll) {
    const size_t most = std::min(have.size(), tokens.size() - 1);
    while (shared < most && have[shared] == tokens[shared]) ++shared;
  }
  sequence_.Truncate(static_cast<int32_t>(shared));
  const auto chunk = static_cast<size_t>(engine_.decoder().max_rows());
  for (size_t first = shared; first < tokens.size(); first += chunk) {
    if (callbacks.stop && callbacks.stop()) return std::nullopt;
    if (callbacks.prefill) callbacks.prefill(static_cast<int32_t>(first), static_cast<int32_t>(tokens.size()));
    const size_t count = std::min(chunk, tokens.size() - first);
    const bool last = first + count == tokens.size();
    const BatchItem item{&sequence_, tokens.subspan(first, count),
                         last || logits == BatchItem::Logits::kAll ? logits : BatchItem::Logits::kNone};
    engine_.decoder().Step({&item, 1}, [&](int32_t i, int32_t row, const float* values) {
      sink(i, static_cast<int32_t>(first) + row, values);
    });
  }
  return static_cast<int32_t>(shared);
}

void Session::Save(const std::filesystem::path& path) const { SaveSequence(sequence_, engine_.cache_identity(), path); }

int32_t Session::Restore(const std::filesystem::path& path, std::span<const int32_t> prompt) {
  sequence_.Truncate(0);
  RestoreSequence(sequence_, engine_.cache_identity(), prompt, path);
  return sequence_.length();
}

GenerateResult Session::Generate(std::span<const int32_t> prompt, const GenerateOptions& options,
                                 const GenerateCallbacks& callbacks) {
  const int32_t context = engine_.plan().context;
  if (prompt.empty()) ThrowInvalid("the prompt has no tokens; give some text");
  if (prompt.size() >= static_cast<size_t>(context)) {
    ThrowInvalid("the prompt has {} tokens, and the context holds {} with at least one for the answer; {}",
                 prompt.size(), context,
                 context < engine_.config().context ? "ask for a larger context (-c)" : "give a shorter text");
  }
  GenerateResult result;
  result.prompt_tokens = static_cast<int32_t>(prompt.size());
  Sampler sampler(options.sampler);
  StreamDecoder decoder(engine_.tokenizer());
  StopStrings stops(options.stops);
  const auto emit = [&](const std::string& text) {
    if (text.empty()) return;
    result.text += text;
    if (callbacks.text) callbacks.text(text);
  };
  const auto& eos_ids = engine_.config().eos_ids;
  const int32_t vocab = engine_.config().vocab_size;
  const int32_t known_tokens = engine_.tokenizer().vocab_size();
  int32_t next = -1;
  const LogitsSink sample = [&](int32_t, int32_t, const float* logits) {
    // Models pad their vocabulary: ids that the tokenizer does not have cannot be text.
    next = sampler.Next({logits, static_cast<size_t>(std::min(vocab, known_tokens))}, sequence_.tokens());
  };

  const TokensRead before = engine_.decoder().tokens_read();
  const double start = Now();
  const std::optional<int32_t> reused = Prefill(prompt, callbacks, sample, BatchItem::Logits::kLast);
  if (!reused) {
    result.reason = StopReason::kInterrupted;
    return result;
  }
  result.reused_tokens = *reused;
  const double first_token = Now();
  result.prefill_seconds = first_token - start;
  for (;;) {
    if (!options.ignore_eos && std::find(eos_ids.begin(), eos_ids.end(), next) != eos_ids.end()) {
      result.reason = StopReason::kEndOfText;
      break;
    }
    if (static_cast<int32_t>(result.tokens.size()) >= options.max_tokens) {
      result.reason = StopReason::kMaxTokens;
      break;
    }
    result.tokens.push_back(next);
    emit(stops.Next(decoder.Next(next)));
    if (stops.stopped()) {
      result.reason = StopReason::kStopString;
      break;
    }
    if (callbacks.stop && callbacks.stop()) {
      result.reason = StopReason::kInterrupted;
      break;
    }
    if (sequence_.length() >= context) {
      result.reason = StopReason::kContextFull;
      break;
    }
    // The last token that is asked for need not be read.
    if (static_cast<int32_t>(result.tokens.size()) == options.max_tokens) continue;
    const BatchItem item{&sequence_, {&result.tokens.back(), 1}, BatchItem::Logits::kLast};
    engine_.decoder().Step({&item, 1}, sample);
  }
  emit(stops.Next(decoder.Finish()));
  emit(stops.Finish());
  result.decode_seconds = Now() - first_token;
  const TokensRead& read = engine_.decoder().tokens_read();
  result.tokens_read = {read.read - before.read, read.dense - before.dense};
  return result;
}

}  // namespace phsa
