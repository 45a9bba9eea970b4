#include "engine/session.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/speculation.h"

namespace phsa {
namespace {

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

int32_t Session::Reusable(std::span<const int32_t> tokens) const {
  // At least the last one is read: its logits are wanted.
  return static_cast<int32_t>(CommonPrefix(sequence_.tokens(), tokens.first(tokens.size() - 1)));
}

std::optional<int32_t> Session::Prefill(std::span<const int32_t> tokens, const GenerateCallbacks& callbacks,
                                        const LogitsSink& sink, BatchItem::Logits logits) {
  // All logits: every token is read.
  const size_t shared = logits == BatchItem::Logits::kAll ? 0 : static_cast<size_t>(Reusable(tokens));
  sequence_.Truncate(static_cast<int32_t>(shared));
  const auto chunk = static_cast<size_t>(engine_.decoder().max_rows());
  for (size_t first = shared; first < tokens.size(); first += chunk) {
    if (callbacks.stop && callbacks.stop()) return std::nullopt;
    if (callbacks.prefill) callbacks.prefill(static_cast<int32_t>(first), static_cast<int32_t>(tokens.size()));
    const size_t count = std::min(chunk, tokens.size() - first);
    const bool last = first + count == tokens.size();
    const BatchItem item{&sequence_, tokens.subspan(first, count),
                         last || logits == BatchItem::Logits::kAll ? logits : BatchItem::Logits::kNone};
    engine_.decoder().Step({&item, 1}, [&](int32_t i, int32_t row, const LogitsRow& values) {
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
  CheckPrompt(engine_, prompt);
  Answer answer(engine_, options, callbacks.text);
  GenerateResult& result = answer.result();
  result.prompt_tokens = static_cast<int32_t>(prompt.size());
  const LogitsSink choose = [&](int32_t, int32_t, const LogitsRow& logits) {
    answer.Choose(logits, sequence_.tokens());
  };

  const TokensRead before = engine_.decoder().tokens_read();
  const double start = Now();
  const auto note_tokens_read = [&] {
    const TokensRead& read = engine_.decoder().tokens_read();
    result.tokens_read = {read.read - before.read, read.dense - before.dense};
  };
  result.reused_tokens = Reusable(prompt);
  const bool prefilled = Prefill(prompt, callbacks, choose, BatchItem::Logits::kLast).has_value();
  const double first_token = Now();
  result.prefill_seconds = first_token - start;
  if (!prefilled) {
    note_tokens_read();
    answer.Interrupt();
    return result;
  }
  std::optional<Drafts> drafts;
  if (options.speculation == Speculation::kNgram) drafts.emplace(prompt);
  bool goes_on = answer.Take(sequence_.length());
  while (goes_on) {
    if (callbacks.stop && callbacks.stop()) {
      answer.Interrupt();
      break;
    }
    if (drafts) {
      const size_t room = DraftRoom(engine_, options, result, sequence_);
      const BatchItem item{&sequence_, drafts->Begin(result, sequence_.length(), room), BatchItem::Logits::kAll};
      engine_.decoder().Step({&item, 1}, [&](int32_t, int32_t row, const LogitsRow& logits) {
        drafts->Row(answer, row, logits, sequence_.tokens());
      });
      goes_on = drafts->End(sequence_, result) && answer.Take(sequence_.length());
      continue;
    }
    const BatchItem item{&sequence_, {&result.tokens.back(), 1}, BatchItem::Logits::kLast};
    engine_.decoder().Step({&item, 1}, choose);
    goes_on = answer.Take(sequence_.length());
  }
  result.decode_seconds = Now() - first_token;
  note_tokens_read();
  return std::move(result);
}

}  // namespace phsa
