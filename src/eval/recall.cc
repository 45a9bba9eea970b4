#include "eval/recall.h"

#include <algorithm>
#include <cmath>

#include "attention/policies.h"
#include "base/dtype.h"
#include "base/errors.h"

namespace phsa {

RecallProbe::RecallProbe(const ModelConfig& config, int32_t kv_type)
    : num_q_heads_(config.num_q_heads),
      num_kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim),
      kv_type_(kv_type) {}

std::span<const float> RecallProbe::Measure(const LayerAttention& attention, int32_t rows) {
  PHSA_CHECK(attention.q_lens.size() == 1 && rows >= 1 && rows <= attention.q_lens[0]);
  const ForwardParams& read = attention.params;
  const int64_t first = attention.q_lens[0] - rows;
  PlanDesc desc;
  desc.settings = DenseSettings();
  desc.dtype = AttentionType(kv_type_);
  desc.kv_dtype = kv_type_;
  desc.num_q_heads = num_q_heads_;
  desc.num_kv_heads = num_kv_heads_;
  desc.head_dim = head_dim_;
  desc.num_seqs = 1;
  desc.q_lens = &rows;
  desc.kv_lens = attention.kv_lens.data();
  desc.page_size = kPageTokens;
  desc.max_threads = read.executor.num_threads;
  const Plan plan(desc);

  const int64_t width = int64_t{num_q_heads_} * head_dim_;
  const auto count = static_cast<size_t>(rows) * static_cast<size_t>(num_q_heads_);
  const size_t element = DtypeSize(desc.dtype), out_bytes = static_cast<size_t>(rows * width) * element;
  if (out_.size() < out_bytes) out_ = Buffer(out_bytes);
  if (workspace_.size() < plan.WorkspaceSize()) workspace_ = Buffer(plan.WorkspaceSize());
  dense_lse_.resize(count);
  auto forward = Init<ForwardParams>();
  forward.q = static_cast<const uint8_t*>(read.q) + static_cast<size_t>(first * read.q_token_stride) * element;
  forward.q_token_stride = read.q_token_stride;
  forward.q_head_stride = read.q_head_stride;
  forward.kv = read.kv;
  forward.kv_scales = read.kv_scales;
  forward.out = out_.data();  // not the layer's: the model goes on with that
  forward.out_token_stride = width;
  forward.out_head_stride = head_dim_;
  forward.lse = dense_lse_.data();
  forward.workspace = workspace_.data();
  forward.workspace_size = workspace_.size();
  forward.executor = read.executor;
  plan.Forward(forward);

  recall_.resize(count);
  const float* const lse = read.lse + first * num_q_heads_;
  for (size_t i = 0; i < count; ++i) recall_[i] = std::min(1.0f, std::exp(lse[i] - dense_lse_[i]));
  return recall_;
}

RecallMeter::RecallMeter(const ModelConfig& config, int32_t kv_type)
    : probe_(config, kv_type),
      num_layers_(config.num_layers),
      num_q_heads_(config.num_q_heads),
      num_kv_heads_(config.num_kv_heads),
      heads_(static_cast<size_t>(config.num_layers) * static_cast<size_t>(config.num_kv_heads)) {}

void RecallMeter::Add(const LayerAttention& attention) {
  const int32_t rows = attention.q_lens[0], first_position = attention.kv_lens[0] - rows;
  const std::span<const float> recall = probe_.Measure(attention, rows);
  const int32_t group = num_q_heads_ / num_kv_heads_;
  const BlockRules rules = RulesOf(attention.settings);
  for (int32_t row = 0; row < rows; ++row) {
    const bool sparse = !rules.ReadsAll((first_position + row) / attention.settings.block_size);
    for (int32_t head = 0; head < num_q_heads_; ++head) {
      const Mean one = {recall[static_cast<size_t>(row * num_q_heads_ + head)], 1};
      Part& part = heads_[static_cast<size_t>(attention.layer * num_kv_heads_ + head / group)];
      part.all += one;
      if (sparse) part.sparse += one;
    }
  }
}

RecallMeter::Part RecallMeter::total() const {
  Part sum;
  for (const Part& part : heads_) sum += part;
  return sum;
}

RecallMeter::Part RecallMeter::layer(int32_t layer) const {
  Part sum;
  for (int32_t kv_head = 0; kv_head < num_kv_heads_; ++kv_head) sum += head(layer, kv_head);
  return sum;
}

const RecallMeter::Part& RecallMeter::head(int32_t layer, int32_t kv_head) const {
  return heads_[static_cast<size_t>(layer * num_kv_heads_ + kv_head)];
}

}  // namespace phsa
