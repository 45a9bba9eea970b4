#include "eval/perplexity.h"

#include <chrono>
#include <cmath>

#include "base/errors.h"

namespace phsa {

double PerplexityResult::perplexity() const { return std::exp(loss); }

PerplexityResult Perplexity(Engine& engine, std::span<const int32_t> tokens, const GenerateCallbacks& callbacks,
                            RecallMeter* recall) {
  PHSA_CHECK(tokens.size() >= 2);
  const auto start = std::chrono::steady_clock::now();
  Session session(engine);
  PerplexityResult result;
  double sum = 0;
  const LogitsSink sink = [&](int32_t, int32_t row, const LogitsRow& logits) {
    result.top_tokens.push_back(logits.Likeliest());
    const auto next = static_cast<size_t>(row) + 1;
    if (next == tokens.size()) return;
    const double loss = logits.LogSumExp() - static_cast<double>(logits[tokens[next]]);
    sum += loss;
    result.losses.push_back(static_cast<float>(loss));
  };
  AttentionObserver observer;
  if (recall != nullptr) observer = [recall](const LayerAttention& attention) { recall->Add(attention); };
  const Observing observing(engine.decoder(), std::move(observer));
  const TokensRead before = engine.decoder().tokens_read();
  if (!session.Prefill(tokens, callbacks, sink, BatchItem::Logits::kAll)) return {};
  result.tokens = static_cast<int32_t>(tokens.size());
  result.loss = sum / static_cast<double>(tokens.size() - 1);
  const TokensRead& read = engine.decoder().tokens_read();
  result.tokens_read = {read.read - before.read, read.dense - before.dense};
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace phsa
