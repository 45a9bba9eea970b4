// The decoder: tokens in, logits out. One step takes a batch of sequences, each with a chunk of new tokens: prefill,
// decode and several users at once are the same thing.
#ifndef PHSA_MODEL_DECODER_H_
#define PHSA_MODEL_DECODER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "model/kv_cache.h"
#include "model/rope.h"
#include "model/weights.h"
#include "phsa/threads.h"

namespace phsa {

// Bytes aligned to 64, without the cost of clearing them.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
  uint8_t* data() const { return data_.get(); }
  float* floats() const { return reinterpret_cast<float*>(data_.get()); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(uint8_t* data) const;
  };
  std::unique_ptr<uint8_t[], Free> data_;
  size_t size_ = 0;
};

// Seconds spent in the parts of a step, summed over steps.
struct StepTimes {
  double products = 0, attention = 0, other = 0;
  double selection = 0;  // representatives, scores and top-K; part of `attention` unless the stages are timed apart
};

struct BatchItem {
  Sequence* sequence = nullptr;
  std::span<const int32_t> tokens;  // appended to the sequence; at least one
  enum class Logits : uint8_t { kNone, kLast, kAll } logits = Logits::kLast;
  int32_t first_row = 0;  // kAll: the logits of this row and those behind it
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

// What the attention of one layer did in a step, for those who look at it. `params` are what it was called with: q and
// kv as it read them; out, lse, selection and selection_scores as it wrote them (selection is null where nothing is
// chosen). Valid during the call.
struct LayerAttention {
  int32_t layer;
  const Plan& plan;
  const Settings& settings;
  const ForwardParams& params;
  std::span<const int32_t> q_lens, kv_lens;  // of the batch's sequences
};
using AttentionObserver = std::function<void(const LayerAttention&)>;

// Logits of row `row` of item `item`, [vocab], valid during the call.
using LogitsSink = std::function<void(int32_t item, int32_t row, const float* logits)>;

class Decoder {
 public:
  // `max_rows`: the most tokens of a step. settings: how each layer reads the cache, for sequences that do not say.
  Decoder(const ModelConfig& config, const Weights& weights, const LayerSettings& settings, int32_t kv_dtype,
          int32_t max_rows, ThreadPool& threads);

  // `flags`: whether each token of the vocabulary is punctuation; empty: none is.
  void SetPunctuation(std::vector<uint8_t> flags) { punctuation_ = std::move(flags); }
  const std::vector<uint8_t>& punctuation() const { return punctuation_; }
  // Called after each layer's attention, once for each way in which the step's sequences are read; empty: nobody looks.
  // Returns who looked before.
  AttentionObserver Observe(AttentionObserver observer) { return std::exchange(observer_, std::move(observer)); }
  // Runs the attention stage by stage, so that `times` has the selection apart: the same results, a little later.
  void TimeStages(bool apart) { stages_apart_ = apart; }
  // Sequences may be read in different ways; those that are read alike are best side by side in the batch. Throws
  // phsa::Error where a sequence does not fit into its cache; then no sequence has changed.
  void Step(std::span<const BatchItem> batch, const LogitsSink& sink);

  int32_t max_rows() const { return max_rows_; }
  const StepTimes& times() const { return times_; }
  const TokensRead& tokens_read() const { return tokens_read_; }
  // Of the last step, for each item of its batch.
  std::span<const TokensRead> step_tokens_read() const { return step_tokens_read_; }
  // Bytes of all buffers that a decoder with these sizes holds, without making one.
  static uint64_t WorkspaceBytes(const ModelConfig& config, int32_t kv_dtype, int32_t max_rows,
                                 const AdapterSizes& adapter, int32_t num_threads);

 private:
  struct Rows;  // the batch of the step, packed
  struct Group;
  void Append(std::span<const BatchItem> batch, Rows& rows);
  void PlanGroup(Rows& rows, Group& group);
  void Embed(const Rows& rows);
  void Layer(int32_t index, const Rows& rows);
  void Attend(int32_t index, const Rows& rows, const Group& group);
  void EmitLogits(std::span<const BatchItem> batch, const Rows& rows, const LogitsSink& sink);
  // y = x · Wᵀ + bias for each of the outputs, with what the adapter adds to them; changes `outputs`.
  void Project(const float* x, int64_t x_stride, int32_t m, ActivationType activations, ActivationType activations_int8,
               std::span<LinearOutput> outputs, const LowRank* adapter);
  void Multiply(const float* x, int64_t x_stride, int32_t m, ActivationType activations,
                std::span<const LinearOutput> outputs);

  const ModelConfig& config_;
  const Weights& weights_;
  LayerSettings settings_;
  int32_t kv_dtype_, max_rows_;
  ThreadPool& threads_;
  RopeFrequencies rope_;
  std::vector<uint8_t> punctuation_;
  // [max_rows][…]: the residual stream and its norm (hidden), q/k/v (heads), the MLP's two halves (intermediate).
  Buffer residual_, normed_, queries_, keys_, values_, gate_, up_, projected_, cos_sin_, logits_;
  Buffer attention_queries_, attention_out_;  // [max_rows][q heads · head_dim] in the cache's dtype
  Buffer linear_workspace_, attention_workspace_;
  Buffer low_rank_, added_;  // [max_rows][adapter rows], [max_rows][widths of the outputs of one x]
  AttentionObserver observer_;
  bool stages_apart_ = false;
  std::vector<float> lse_, selection_scores_;  // for the observer
  std::vector<int32_t> selection_;             // for the observer, and between stages
  StepTimes times_;
  TokensRead tokens_read_;
  std::vector<TokensRead> step_tokens_read_;
};

}  // namespace phsa

#endif  // PHSA_MODEL_DECODER_H_
