// Recall: the share of dense attention's mass that the tokens which a query reads hold. It is exp(lse - dense lse),
// where the dense log-sum-exp belongs to the same query and keys: those of the run that is watched.
#ifndef PHSA_EVAL_RECALL_H_
#define PHSA_EVAL_RECALL_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "model/decoder.h"

namespace phsa {

// While it lives, `observer` watches the decoder.
class Observing {
 public:
  Observing(Decoder& decoder, AttentionObserver observer) : decoder_(decoder) { decoder_.Observe(std::move(observer)); }
  ~Observing() { decoder_.Observe({}); }
  Observing(const Observing&) = delete;
  Observing& operator=(const Observing&) = delete;

 private:
  Decoder& decoder_;
};

// Runs dense attention on what a layer's attention read, for its log-sum-exp.
class RecallProbe {
 public:
  RecallProbe(const ModelConfig& config, int32_t kv_type);  // of the cache
  // Of the last `rows` queries of a step with one sequence: [rows][q head], at most 1, valid until the next call.
  std::span<const float> Measure(const LayerAttention& attention, int32_t rows);

 private:
  int32_t num_q_heads_, num_kv_heads_, head_dim_, kv_type_;
  Buffer out_, workspace_;
  std::vector<float> dense_lse_, recall_;
};

// The mean over queries, layers and query heads of all steps of a run.
class RecallMeter {
 public:
  RecallMeter(const ModelConfig& config, int32_t kv_type);
  void Add(const LayerAttention& attention);  // an AttentionObserver, for steps with one sequence

  struct Mean {
    double sum = 0;
    int64_t count = 0;
    void operator+=(const Mean& other) { sum += other.sum, count += other.count; }
    std::optional<double> value() const {
      return count > 0 ? std::optional(sum / static_cast<double>(count)) : std::nullopt;
    }
  };
  // Over all queries, and over those that leave something out: the others' recall is 1 and says nothing.
  struct Part {
    Mean all, sparse;
    void operator+=(const Part& other) { all += other.all, sparse += other.sparse; }
  };
  int32_t num_layers() const { return num_layers_; }
  int32_t num_kv_heads() const { return num_kv_heads_; }
  Part total() const;
  Part layer(int32_t layer) const;
  const Part& head(int32_t layer, int32_t kv_head) const;

 private:
  RecallProbe probe_;
  int32_t num_layers_, num_q_heads_, num_kv_heads_;
  std::vector<Part> heads_;  // [layer][kv_head]
};

}  // namespace phsa

#endif  // PHSA_EVAL_RECALL_H_
