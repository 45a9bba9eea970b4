// The decoder: tokens in, logits out. One step takes a batch of sequences, each with a chunk of new tokens: prefill,
// decode and several users at once are the same thing.
#ifndef PHSA_MODEL_DECODER_H_
#define PHSA_MODEL_DECODER_H_

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "model/backend.h"
#include "model/kv_cache.h"
#include "model/logits_row.h"
#include "phsa/threads.h"

namespace phsa {

struct BatchItem {
  Sequence* sequence = nullptr;
  std::span<const int32_t> tokens;  // appended to the sequence; at least one
  enum class Logits : uint8_t { kNone, kLast, kAll } logits = Logits::kLast;
  int32_t first_row = 0;  // kAll: the logits of this row and those behind it
  // [hidden]: where what the model's last norm gives for each of the tokens is added, token after token, when all else
  // of the step is done; null: nowhere.
  double* hidden_sum = nullptr;
};

// Tokens that queries read, summed over steps, layers and query heads, and what dense attention would have read.
struct TokensRead {
  int64_t read = 0, dense = 0;
  double share() const { return dense > 0 ? static_cast<double>(read) / static_cast<double>(dense) : 1; }
  TokensRead& operator+=(const TokensRead& other) {
    read += other.read;
    dense += other.dense;
    return *this;
  }
};

// What the attention of one layer did in a step, for those who look at it. `params` has q and kv as it read them, and
// lse, selection and selection_scores as it wrote them (selection is null where nothing is chosen): all of it in host
// memory, wherever the attention ran, and with an executor to go on from there. Valid during the call.
struct LayerAttention {
  int32_t layer;
  const Plan& plan;
  const Settings& settings;
  const ForwardParams& params;
  std::span<const int32_t> q_lens, kv_lens;  // of the batch's sequences
};
using AttentionObserver = std::function<void(const LayerAttention&)>;

// Logits of row `row` of item `item`, valid during the call.
using LogitsSink = std::function<void(int32_t item, int32_t row, const LogitsRow& logits)>;

class Decoder {
 public:
  // settings: how each layer reads the cache, for sequences that do not say. `backend` computes; all caches have its
  // memory.
  Decoder(const ModelConfig& config, ModelBackend& backend, const LayerSettings& settings, ThreadPool& threads);

  // `flags`: whether each token of the vocabulary is punctuation; empty: none is.
  void SetPunctuation(std::vector<uint8_t> flags) { punctuation_ = std::move(flags); }
  const std::vector<uint8_t>& punctuation() const { return punctuation_; }
  // Called after each layer's attention, once for each attention that the step's sequences have; empty: no observer.
  // Returns the previous observer.
  AttentionObserver Observe(AttentionObserver observer) { return std::exchange(observer_, std::move(observer)); }
  // Runs the attention stage by stage, so that `times` has the selection apart: the same results, a little later.
  void TimeStages(bool apart) { backend_.TimeStages(apart); }
  // Sequences may differ in their attention; those with the same are best side by side in the batch. Throws
  // phsa::Error where a sequence does not fit into its cache or the device fails, and whatever `sink` throws; then all
  // sequences are as they were.
  void Step(std::span<const BatchItem> batch, const LogitsSink& sink);

  int32_t max_rows() const { return backend_.max_rows(); }
  const StepTimes& times() const { return backend_.times(); }
  const TokensRead& tokens_read() const { return tokens_read_; }
  // Of the last step, for each item of its batch.
  std::span<const TokensRead> step_tokens_read() const { return step_tokens_read_; }

 private:
  struct GroupPlans;
  void Run(std::span<const BatchItem> batch, const LogitsSink& sink);
  void AddHidden(std::span<const BatchItem> batch) const;
  void Append(std::span<const BatchItem> batch, StepRows& rows);
  void CountTokensRead(const StepRows& rows);
  GroupPlans PlanGroup(const StepRows& rows, const StepGroup& group) const;
  PlanDesc Describe(const StepRows& rows, size_t first_item, size_t num_items, const Settings& settings,
                    int32_t window) const;
  void Attend(int32_t layer, const StepRows& rows, const StepGroup& group, const Plan& plan);

  const ModelConfig& config_;
  ModelBackend& backend_;
  LayerSettings settings_;
  ThreadPool& threads_;
  std::vector<uint8_t> punctuation_;
  AttentionObserver observer_;
  AttentionTrace trace_;  // for the observer
  Buffer host_pages_;     // likewise, where the cache is not in host memory
  TokensRead tokens_read_;
  std::vector<TokensRead> step_tokens_read_;
};

}  // namespace phsa

#endif  // PHSA_MODEL_DECODER_H_
