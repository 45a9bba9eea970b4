#include "model/cpu/cpu_backend.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

#include "base/buffer.h"
#include "base/dtype.h"
#include "base/errors.h"
#include "base/memory.h"
#include "io/architecture.h"
#include "model/cpu/experts.h"
#include "model/rope.h"
#include "ops/layers.h"

namespace phsa {
namespace {

// Logits of many rows are made this many at a time: a whole chunk of them would take more memory than the weights.
constexpr int32_t kLogitRows = 32;

constexpr WeightType kWeightTypes[] = {WeightType::kF32,  WeightType::kBf16, WeightType::kInt8,  WeightType::kInt4,
                                       WeightType::kInt6, WeightType::kInt5, WeightType::kInt4K, WeightType::kInt5K};
static_assert(std::size(kWeightTypes) == kNumWeightTypes);

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point& from) {
  const Clock::time_point now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - from).count();
  from = now;
  return seconds;
}

// f32 and bf16 weights have one type of activations; the packed ones leave a choice.
ActivationType ActivationsFor(WeightType weights, ActivationType wanted, ActivationType wanted_int8) {
  switch (weights) {
    case WeightType::kF32: return ActivationType::kF32;
    case WeightType::kBf16: return ActivationType::kBf16;
    case WeightType::kInt5:
    case WeightType::kInt5K:
    case WeightType::kInt6:
    case WeightType::kInt8: return wanted_int8;
    case WeightType::kInt4:
    case WeightType::kInt4K: return wanted;
  }
  return wanted;
}

const float* Data(const Vector& vector) { return vector.empty() ? nullptr : vector.data(); }

struct BufferSizes {
  size_t residual, projected, queries, keys, intermediate, cos_sin, logits, attention_queries, linear, low_rank, added,
      routed;
};

BufferSizes SizesOf(const ModelConfig& config, int32_t kv_dtype, int32_t max_rows, const AdapterSizes& adapter,
                    int32_t num_threads) {
  const auto m = static_cast<size_t>(max_rows);
  const auto q_width = static_cast<size_t>(config.num_q_heads) * static_cast<size_t>(config.head_dim);
  const auto kv_width = static_cast<size_t>(config.num_kv_heads) * static_cast<size_t>(config.head_dim);
  std::set<int32_t> columns = adapter.ranks;
  columns.insert({config.hidden, config.intermediate, static_cast<int32_t>(q_width)});
  if (config.num_experts > 0) columns.insert(config.expert_width);
  size_t linear = 0;
  for (const WeightType weights : kWeightTypes) {
    for (const ActivationType activations : {ActivationType::kF32, ActivationType::kBf16, ActivationType::kInt8}) {
      if (!HasProduct(weights, activations)) continue;
      for (const int32_t cols : columns) {
        const bool of_file = config.num_experts > 0 && (cols == config.hidden || cols == config.expert_width);
        linear = std::max(linear, LinearWorkspaceSize(weights, activations, max_rows, cols, num_threads, of_file));
      }
    }
  }
  const size_t widest = std::max(
      {q_width + 2 * kv_width, static_cast<size_t>(config.hidden), 2 * static_cast<size_t>(config.intermediate)});
  const auto logit_rows = static_cast<size_t>(std::min(max_rows, kLogitRows));
  return {.residual = m * static_cast<size_t>(config.hidden) * sizeof(float),
          .projected = m * static_cast<size_t>(config.hidden) * sizeof(float),
          .queries = m * q_width * sizeof(float),
          .keys = m * kv_width * sizeof(float),
          .intermediate = m * static_cast<size_t>(std::max(config.intermediate, config.expert_width)) * sizeof(float),
          .cos_sin = MakeLayerRopes(config).all.size() * m * static_cast<size_t>(config.head_dim) * sizeof(float),
          .logits = logit_rows * static_cast<size_t>(config.vocab_size) * sizeof(float),
          .attention_queries = m * q_width * DtypeSize(AttentionType(kv_dtype)),
          .linear = linear,
          .low_rank = m * static_cast<size_t>(adapter.rows) * sizeof(float),
          .added = adapter.rows > 0 ? m * widest * sizeof(float) : 0,
          .routed = config.num_experts > 0
                        ? m * static_cast<size_t>(config.num_experts + 2 * config.hidden) * sizeof(float)
                        : 0};
}

// Keys whose projection has a bias, or whose heads are normed with weights, have channels a hundred times as large as
// others, for every token; 8-bit codes would lose all others beside them. So channels are divided by their usual size
// before they become codes, and those of the queries multiplied with it: scores stay what they are. Both channels of a
// pair that RoPE turns have one.
struct KeyScales {
  Vector of_queries, of_keys;  // [heads][head_dim]; empty: 1
};

KeyScales KeyScalesOf(const LayerWeights& layer, const ModelConfig& config) {
  const Vector& sizes = layer.k_norm.empty() ? layer.k_bias : layer.k_norm;
  KeyScales out;
  if (sizes.empty()) return out;
  const auto dim = static_cast<size_t>(config.head_dim), half = dim / 2;
  const auto kv_heads = static_cast<size_t>(config.num_kv_heads), q_heads = static_cast<size_t>(config.num_q_heads);
  out.of_keys.resize(kv_heads * dim);
  out.of_queries.resize(q_heads * dim);
  for (size_t head = 0; head < kv_heads; ++head) {
    const float* const own = sizes.data() + (layer.k_norm.empty() ? head * dim : 0);
    std::vector<float> squares(half);
    for (size_t i = 0; i < half; ++i) squares[i] = (own[i] * own[i] + own[half + i] * own[half + i]) / 2;
    std::vector<float> sorted = squares;
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<int64_t>(half / 2), sorted.end());
    // A norm's weights are all of a channel's size; a bias stands beside what differs from token to token, which is
    // about as large as a usual bias.
    const float beside = layer.k_norm.empty() ? sorted[half / 2] : 0;
    for (size_t i = 0; i < dim; ++i) {
      const float size = std::sqrt(squares[i % half] + beside);
      const bool usable = std::isfinite(size) && size > 1e-6f;
      out.of_keys[head * dim + i] = usable ? 1 / size : 1;
      const size_t group = q_heads / kv_heads;
      for (size_t q = head * group; q < (head + 1) * group; ++q) out.of_queries[q * dim + i] = usable ? size : 1;
    }
  }
  return out;
}

class CpuModelBackend final : public ModelBackend {
 public:
  CpuModelBackend(const ModelConfig& config, Weights weights, const BackendOptions& options, ThreadPool& threads);

  int32_t device() const override { return PHSA_DEVICE_CPU; }
  std::string device_name() const override { return "cpu"; }
  int32_t max_rows() const override { return max_rows_; }
  bool SetAdapter(const ModelSource& source) override;
  void AddAdapter(const Adapter& adapter) override;
  std::unique_ptr<PageMemory> MakePages(size_t page_bytes, int32_t num_pages) override {
    return MakeHostPages(page_bytes, num_pages);
  }
  void Begin(const StepRows& rows) override;
  bool RunLayers(const StepRows&) override { return false; }
  void QueriesKeysValues(int32_t layer) override;
  void Attend(int32_t layer, const StepGroup& group, const Plan& plan, AttentionTrace* trace) override;
  void OutputAndMlp(int32_t layer) override;
  void Logits(const std::function<void(size_t wanted, const LogitsRow& logits)>& use) override;
  std::span<const float> Hidden() const override {
    return {normed_.floats(), static_cast<size_t>(rows_->count) * static_cast<size_t>(config_.hidden)};
  }
  void TimeStages(bool apart) override { stages_apart_ = apart; }
  const StepTimes& times() const override { return times_; }

 private:
  // What adapters add to some products.
  struct Added {
    int32_t layer;
    LowRank LayerWeights::*which;
  };
  // y = x · Wᵀ + bias for each of the outputs, with what the rows' adapters add to them; changes `outputs`.
  void Project(const float* x, int64_t x_stride, int32_t m, ActivationType activations, ActivationType activations_int8,
               std::span<LinearOutput> outputs, const Added& added);
  // The same with one adapter, or none, for all rows, and without any.
  void ProjectAlike(const float* x, int64_t x_stride, int32_t m, ActivationType activations,
                    ActivationType activations_int8, std::span<LinearOutput> outputs, const LowRank* adapter);
  void ProjectPlain(const float* x, int64_t x_stride, int32_t m, ActivationType activations,
                    ActivationType activations_int8, std::span<const LinearOutput> outputs);
  void Multiply(const float* x, int64_t x_stride, int32_t m, ActivationType activations,
                std::span<const LinearOutput> outputs);
  // projected_ = the experts of normed_'s rows.
  void RunExperts(const LayerWeights& w);
  // Keys or values, [row][kv_head][head_dim], as codes into the cache's pages.
  void StoreHeadCodes(const float* x, const void* codes, const uint16_t* of_codes, const KvScales& scales);
  // gate_ = the gate of both halves of an MLP, [m][rows of the halves], which `halves` puts into gate_ and up_. added:
  // what adapters add to them, or null.
  void RunGated(const float* x, int32_t m, std::span<LinearOutput> halves, const Added* added);
  // out = the gate of gate and up, [m][width] each.
  void RunGate(const float* gate, const float* up, int32_t m, int32_t width, float* out,
               const phsa_executor& executor) const;
  // What a half of a layer adds to the residual stream, in projected_, as it is added.
  void FinishHalf(const Vector& post_norm);
  size_t table_size() const { return static_cast<size_t>(max_rows_) * static_cast<size_t>(config_.head_dim); }
  const LowRank& AdapterOf(const StepGroup& group, const Added& added) const {
    const Weights& weights = group.adapter == 0 ? weights_ : *adapters_[static_cast<size_t>(group.adapter) - 1];
    return weights.layers[static_cast<size_t>(added.layer)].*added.which;
  }
  AdapterSizes AllAdapters() const;
  void MakeRoomForAdapters();

  const ModelConfig& config_;
  const WeightsMode mode_;
  Weights weights_;
  std::vector<std::unique_ptr<const Weights>> adapters_;  // that texts may name, beside the one in weights_
  const int32_t kv_dtype_, dtype_, max_rows_;             // of keys and values; of queries and what they give
  ThreadPool& threads_;
  const LayerRopes ropes_;
  const Gate gate_kind_;
  const StepRows* rows_ = nullptr;  // of the step
  // [max_rows][…]: the residual stream and its norm (hidden), q/k/v (heads), the MLP's two halves (intermediate).
  Buffer residual_, normed_, queries_, keys_, values_, gate_, up_, projected_, cos_sin_, logits_;
  Buffer attention_queries_, attention_out_;  // [max_rows][q heads · head_dim] of dtype_
  std::vector<KeyScales> key_scales_;         // of layers with 8-bit keys
  std::vector<int64_t> scale_rows_;           // of 8-bit keys and values, [row]: KvCache::ScaleElement
  Buffer linear_workspace_, attention_workspace_;
  Buffer routed_;            // experts: [max_rows][experts] logits, then rows of one expert in and out, [hidden]
  Buffer low_rank_, added_;  // [max_rows][adapter rows], [max_rows][widths of the outputs of one x]
  bool stages_apart_ = false;
  std::vector<int32_t> selection_;  // between stages
  StepTimes times_;
};

CpuModelBackend::CpuModelBackend(const ModelConfig& config, Weights weights, const BackendOptions& options,
                                 ThreadPool& threads)
    : config_(config),
      mode_(options.weights),
      weights_(std::move(weights)),
      kv_dtype_(options.kv_dtype),
      dtype_(AttentionType(options.kv_dtype)),
      max_rows_(options.max_rows),
      threads_(threads),
      ropes_(MakeLayerRopes(config)),
      gate_kind_(ArchitectureOf(config).gate) {
  if (kv_dtype_ == PHSA_INT8) {
    for (const LayerWeights& layer : weights_.layers) key_scales_.push_back(KeyScalesOf(layer, config));
  }
  const BufferSizes sizes = SizesOf(config, kv_dtype_, max_rows_, weights_.adapter, threads.num_threads());
  residual_ = Buffer(sizes.residual);
  normed_ = Buffer(sizes.residual);
  projected_ = Buffer(sizes.projected);
  queries_ = Buffer(sizes.queries);
  keys_ = Buffer(sizes.keys);
  values_ = Buffer(sizes.keys);
  gate_ = Buffer(sizes.intermediate);
  up_ = Buffer(sizes.intermediate);
  cos_sin_ = Buffer(sizes.cos_sin);
  logits_ = Buffer(sizes.logits);
  attention_queries_ = Buffer(sizes.attention_queries);
  attention_out_ = Buffer(sizes.attention_queries);
  linear_workspace_ = Buffer(sizes.linear);
  low_rank_ = Buffer(sizes.low_rank);
  added_ = Buffer(sizes.added);
  routed_ = Buffer(sizes.routed);
}

bool CpuModelBackend::SetAdapter(const ModelSource& source) {
  phsa::SetAdapter(source, mode_, weights_);
  MakeRoomForAdapters();
  return true;
}

void CpuModelBackend::AddAdapter(const Adapter& adapter) {
  adapters_.push_back(std::make_unique<const Weights>(ReadAdapter(adapter, config_, mode_)));
  MakeRoomForAdapters();
}

AdapterSizes CpuModelBackend::AllAdapters() const {
  AdapterSizes all = weights_.adapter;
  for (const auto& one : adapters_) {
    all.rows = std::max(all.rows, one->adapter.rows);
    all.ranks.insert(one->adapter.ranks.begin(), one->adapter.ranks.end());
  }
  return all;
}

void CpuModelBackend::MakeRoomForAdapters() {
  const BufferSizes sizes = SizesOf(config_, kv_dtype_, max_rows_, AllAdapters(), threads_.num_threads());
  linear_workspace_.Reserve(sizes.linear);
  low_rank_.Reserve(sizes.low_rank);
  added_.Reserve(sizes.added);
}

void CpuModelBackend::Begin(const StepRows& rows) {
  PHSA_CHECK(rows.count <= max_rows_ && rows.cache->layout().kv_type == kv_dtype_);
  rows_ = &rows;
  Clock::time_point clock = Clock::now();
  uint8_t* const pages = rows.cache->memory().data();
  for (size_t row = 0; row < rows.flags.size(); ++row) {
    pages[rows.cache->FlagByte(rows.cache_rows[row])] = rows.flags[row];
  }
  scale_rows_.clear();
  if (kv_dtype_ == PHSA_INT8) {
    for (const int64_t row : rows.cache_rows) scale_rows_.push_back(rows.cache->ScaleElement(row));
  }
  const int32_t hidden = config_.hidden;
  constexpr int32_t kRows = 4;
  threads_.Run((rows.count + kRows - 1) / kRows,
               [](void* arg, int32_t task, int32_t) {
                 CpuModelBackend& self = *static_cast<CpuModelBackend*>(arg);
                 const int32_t end = std::min(self.rows_->count, (task + 1) * kRows);
                 for (int32_t row = task * kRows; row < end; ++row) {
                   self.weights_.embedding.GetRow(self.rows_->tokens[static_cast<size_t>(row)],
                                                  self.residual_.floats() + int64_t{row} * self.config_.hidden);
                 }
               },
               this);
  if (config_.embedding_scale != 1) {
    ScaleRows(residual_.floats(), hidden, rows.count, hidden, config_.embedding_scale, threads_.executor());
  }
  for (size_t i = 0; i < ropes_.all.size(); ++i) {
    RopeTable(rows.positions.data(), rows.count, ropes_.all[i].frequencies.data(), config_.head_dim / 2,
              ropes_.all[i].factor, cos_sin_.floats() + i * table_size(), threads_.executor());
  }
  RmsNorm(residual_.floats(), hidden, rows.count, hidden, weights_.layers.front().attention_norm.data(),
          config_.rms_eps, normed_.floats(), hidden, threads_.executor());
  times_.other += SecondsSince(clock);
}

void CpuModelBackend::Multiply(const float* x, int64_t x_stride, int32_t m, ActivationType activations,
                               std::span<const LinearOutput> outputs) {
  Linear(x, x_stride, m, activations, outputs, linear_workspace_.data(), linear_workspace_.size(), threads_.executor());
}

void CpuModelBackend::Project(const float* x, int64_t x_stride, int32_t m, ActivationType activations,
                              ActivationType activations_int8, std::span<LinearOutput> outputs, const Added& added) {
  const std::vector<StepGroup>& groups = rows_->groups;
  const LowRank& first = AdapterOf(groups.front(), added);
  if (std::all_of(groups.begin(), groups.end(), [&](const auto& one) { return &AdapterOf(one, added) == &first; })) {
    ProjectAlike(x, x_stride, m, activations, activations_int8, outputs, &first);
    return;
  }
  // The weights are read once for all rows. A row's sum has the order that it has beside rows of its own kind, so that
  // it is the same to the last bit.
  std::vector<const float*> biases;
  for (LinearOutput& output : outputs) biases.push_back(std::exchange(output.bias, nullptr));
  ProjectPlain(x, x_stride, m, activations, activations_int8, outputs);
  for (const StepGroup& group : groups) {
    const LowRank& adapter = AdapterOf(group, added);
    const float* const own = x + group.first_row * x_stride;
    const int64_t rank = adapter.a.rows();
    const ActivationType type = ActivationsFor(adapter.a.type(), activations, activations_int8);
    if (rank > 0) {
      const LinearOutput low[] = {{&adapter.a, nullptr, low_rank_.floats(), rank}};
      Multiply(own, x_stride, group.num_rows, type, low);
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      const LinearOutput& output = outputs[i];
      float* const y = output.y + group.first_row * output.y_stride;
      const int32_t width = output.weights->rows();
      const auto part =
          std::find_if(adapter.parts.begin(), adapter.parts.end(), [&](const auto& one) { return one.output == i; });
      if (part != adapter.parts.end()) {
        const LinearOutput delta[] = {{&part->b, biases[i], added_.floats(), width}};
        Multiply(low_rank_.floats() + part->first, rank, group.num_rows, type, delta);
        AddRows(y, output.y_stride, added_.floats(), width, group.num_rows, width, threads_.executor());
      } else if (biases[i] != nullptr) {
        AddRows(y, output.y_stride, biases[i], 0, group.num_rows, width, threads_.executor());
      }
    }
  }
}

void CpuModelBackend::ProjectAlike(const float* x, int64_t x_stride, int32_t m, ActivationType activations,
                                   ActivationType activations_int8, std::span<LinearOutput> outputs,
                                   const LowRank* adapter) {
  const bool adapts = adapter != nullptr && adapter->a.rows() > 0;
  if (adapts) {
    // First, so that what is added to one row can go with its product in the place of the bias; added to several rows
    // afterwards it is the same sum, to the last bit.
    const int64_t rank = adapter->a.rows();
    const LinearOutput low[] = {{&adapter->a, nullptr, low_rank_.floats(), rank}};
    const ActivationType type = ActivationsFor(adapter->a.type(), activations, activations_int8);
    Multiply(x, x_stride, m, type, low);
    float* added = added_.floats();
    for (const LowRank::Part& part : adapter->parts) {
      LinearOutput& output = outputs[part.output];
      const LinearOutput delta[] = {{&part.b, output.bias, added, part.b.rows()}};
      Multiply(low_rank_.floats() + part.first, rank, m, type, delta);
      output.bias = m == 1 ? added : nullptr;
      added += int64_t{m} * part.b.rows();
    }
  }
  ProjectPlain(x, x_stride, m, activations, activations_int8, outputs);
  if (!adapts || m == 1) return;
  const float* added = added_.floats();
  for (const LowRank::Part& part : adapter->parts) {
    const LinearOutput& output = outputs[part.output];
    AddRows(output.y, output.y_stride, added, part.b.rows(), m, part.b.rows(), threads_.executor());
    added += int64_t{m} * part.b.rows();
  }
}

void CpuModelBackend::ProjectPlain(const float* x, int64_t x_stride, int32_t m, ActivationType activations,
                                   ActivationType activations_int8, std::span<const LinearOutput> outputs) {
  // Products of one weight type go in one call; a file may mix types within a layer.
  std::vector<LinearOutput> call;
  size_t done = 0;
  for (const WeightType type : kWeightTypes) {
    call.clear();
    for (const LinearOutput& output : outputs) {
      if (output.weights->type() == type) call.push_back(output);
    }
    if (call.empty()) continue;
    Multiply(x, x_stride, m, ActivationsFor(type, activations, activations_int8), call);
    done += call.size();
    if (done == outputs.size()) break;
  }
}

void CpuModelBackend::QueriesKeysValues(int32_t layer) {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const phsa_executor executor = threads_.executor();
  const KvCache& cache = *rows_->cache;
  const int32_t m = rows_->count;
  const int32_t q_width = config_.num_q_heads * config_.head_dim, kv_width = config_.num_kv_heads * config_.head_dim;
  Clock::time_point clock = Clock::now();
  LinearOutput qkv[] = {{&w.q, Data(w.q_bias), queries_.floats(), q_width},
                        {&w.k, Data(w.k_bias), keys_.floats(), kv_width},
                        {&w.v, Data(w.v_bias), values_.floats(), kv_width}};
  Project(normed_.floats(), config_.hidden, m, weights_.activations.qkv, weights_.activations.layer_int8, qkv,
          {layer, &LayerWeights::qkv_adapter});
  times_.products += SecondsSince(clock);

  const KeyValues kv = cache.View(layer, rows_->page_table.data(), rows_->page_table_stride, cache.layout());
  RopeParams rope;
  rope.m = m;
  rope.head_dim = config_.head_dim;
  rope.cos_sin = cos_sin_.floats() + ropes_.of_layer[static_cast<size_t>(layer)] * table_size();
  rope.eps = config_.rms_eps;
  const KeyScales* const key_scales = kv_dtype_ == PHSA_INT8 ? &key_scales_[static_cast<size_t>(layer)] : nullptr;
  rope.mix = key_scales != nullptr;
  if (key_scales != nullptr) rope.channel_scale = Data(key_scales->of_queries);
  rope.out_dtype = dtype_;
  rope.x = queries_.floats();
  rope.x_stride = q_width;
  rope.heads = config_.num_q_heads;
  rope.norm = Data(w.q_norm);
  rope.out = attention_queries_.data();
  rope.out_row_stride = q_width;
  rope.out_head_stride = config_.head_dim;
  Rope(rope, executor);
  rope.x = keys_.floats();
  rope.x_stride = kv_width;
  rope.heads = config_.num_kv_heads;
  rope.norm = Data(w.k_norm);
  if (key_scales != nullptr) {
    rope.channel_scale = Data(key_scales->of_keys);
    rope.out_dtype = PHSA_F32;
    rope.out = keys_.floats();
    rope.out_row_stride = kv_width;
    Rope(rope, executor);
    const KvScales scales = cache.Scales(layer);
    StoreHeadCodes(keys_.floats(), kv.k, scales.k, scales);
    StoreHeadCodes(values_.floats(), kv.v, scales.v, scales);
    times_.other += SecondsSince(clock);
    return;
  }
  rope.out = const_cast<void*>(kv.k);
  rope.out_rows = rows_->cache_rows.data();
  rope.out_head_stride = cache.head_stride();
  Rope(rope, executor);
  for (int32_t head = 0; head < config_.num_kv_heads; ++head) {
    auto* const out = static_cast<uint8_t*>(const_cast<void*>(kv.v)) +
                      static_cast<size_t>(head * cache.head_stride()) * DtypeSize(kv_dtype_);
    StoreRows(values_.floats() + head * config_.head_dim, kv_width, m, config_.head_dim, kv_dtype_, out,
              rows_->cache_rows.data(), 0, executor);
  }
  times_.other += SecondsSince(clock);
}

void CpuModelBackend::StoreHeadCodes(const float* x, const void* codes, const uint16_t* of_codes,
                                     const KvScales& scales) {
  const int32_t dim = config_.head_dim, heads = config_.num_kv_heads;
  for (int32_t head = 0; head < heads; ++head) {
    auto* const to = static_cast<int8_t*>(const_cast<void*>(codes)) + head * rows_->cache->head_stride();
    StoreCodes(x + head * dim, int64_t{heads} * dim, rows_->count, dim, to, rows_->cache_rows.data(),
               const_cast<uint16_t*>(of_codes) + head * scales.head_stride, scale_rows_.data(), threads_.executor());
  }
}

void CpuModelBackend::Attend(int32_t layer, const StepGroup& group, const Plan& plan, AttentionTrace* trace) {
  // Texts grow: with some room to spare, it need not be taken anew for every token.
  if (attention_workspace_.size() < plan.WorkspaceSize()) {
    attention_workspace_.Reserve(plan.WorkspaceSize() + plan.WorkspaceSize() / 4);
  }
  const int32_t q_width = config_.num_q_heads * config_.head_dim;
  const size_t first = static_cast<size_t>(group.first_row) * static_cast<size_t>(q_width) * DtypeSize(dtype_);
  auto forward = Init<ForwardParams>();
  forward.q = attention_queries_.data() + first;
  forward.q_token_stride = q_width;
  forward.q_head_stride = config_.head_dim;
  forward.kv = rows_->cache->View(
      layer, rows_->page_table.data() + static_cast<int64_t>(group.first_item) * rows_->page_table_stride,
      rows_->page_table_stride, *group.layout);
  forward.kv_scales = rows_->cache->Scales(layer);
  forward.out = attention_out_.data() + first;
  forward.out_token_stride = q_width;
  forward.out_head_stride = config_.head_dim;
  forward.workspace = attention_workspace_.data();
  forward.workspace_size = attention_workspace_.size();
  forward.executor = threads_.executor();
  forward.sinks = Data(weights_.layers[static_cast<size_t>(layer)].sinks);
  const auto count = static_cast<size_t>(group.num_rows);
  const size_t slots = count * static_cast<size_t>(plan.SelectionHeads()) * static_cast<size_t>(plan.SelectionSlots());
  const bool apart = stages_apart_ && slots > 0;
  if (apart) {
    selection_.resize(slots);
    forward.selection = selection_.data();
  }
  if (trace != nullptr) {
    trace->queries = forward.q;
    trace->lse.resize(count * static_cast<size_t>(config_.num_q_heads));
    trace->selection.resize(slots);
    trace->selection_scores.resize(slots);
    forward.lse = trace->lse.data();
    if (slots > 0) {
      forward.selection = trace->selection.data();
      forward.selection_scores = trace->selection_scores.data();
    }
  }
  Clock::time_point clock = Clock::now();
  if (apart) {
    plan.Represent(forward);
    plan.Select(forward);
    times_.selection += SecondsSince(clock);
    plan.Attend(forward);
  } else {
    plan.Forward(forward);
  }
  times_.attention += SecondsSince(clock);
}

void CpuModelBackend::FinishHalf(const Vector& post_norm) {
  const int32_t m = rows_->count, hidden = config_.hidden;
  if (!post_norm.empty()) {
    RmsNorm(projected_.floats(), hidden, m, hidden, post_norm.data(), config_.rms_eps, projected_.floats(), hidden,
            threads_.executor());
  }
  if (config_.residual_scale != 1) {
    ScaleRows(projected_.floats(), hidden, m, hidden, config_.residual_scale, threads_.executor());
  }
}

void CpuModelBackend::RunGate(const float* gate, const float* up, int32_t m, int32_t width, float* out,
                              const phsa_executor& executor) const {
  switch (gate_kind_) {
    case Gate::kSilu: return SiluMul(gate, width, up, width, m, width, out, width, executor);
    case Gate::kGeluTanh: return GeluMul(gate, width, up, width, m, width, out, width, executor);
    case Gate::kClampedSwiglu:
      return ClampedSwiglu(gate, width, up, width, m, width, config_.swiglu_alpha, config_.swiglu_limit, out, width,
                           executor);
  }
}

void CpuModelBackend::RunGated(const float* x, int32_t m, std::span<LinearOutput> halves, const Added* added) {
  const int32_t hidden = config_.hidden, width = halves[0].weights->rows();
  const WeightType type = halves[0].weights->type();
  const std::vector<StepGroup>& groups = rows_->groups;
  const bool adapts = added != nullptr && std::any_of(groups.begin(), groups.end(), [&](const StepGroup& group) {
                        return AdapterOf(group, *added).a.rows() > 0;
                      });
  if (!adapts && halves[1].weights->type() == type) {
    // Each thread gates what it has made: a pass of its own would be a twentieth of a decode step on sixteen cores.
    const LinearGate gate = {[](const void* context, const float* of_gate, const float* up, int32_t n, float* out) {
                               static_cast<const CpuModelBackend*>(context)->RunGate(of_gate, up, 1, n, out, {});
                             },
                             this};
    Linear(x, hidden, m, ActivationsFor(type, weights_.activations.gate_up, weights_.activations.layer_int8), halves,
           linear_workspace_.data(), linear_workspace_.size(), threads_.executor(), &gate);
    return;
  }
  if (added != nullptr) {
    Project(x, hidden, m, weights_.activations.gate_up, weights_.activations.layer_int8, halves, *added);
  } else {
    ProjectPlain(x, hidden, m, weights_.activations.gate_up, weights_.activations.layer_int8, halves);
  }
  RunGate(gate_.floats(), up_.floats(), m, width, gate_.floats(), threads_.executor());
}

void CpuModelBackend::RunExperts(const LayerWeights& w) {
  const int32_t m = rows_->count, hidden = config_.hidden, width = config_.expert_width;
  float* const logits = routed_.floats();
  float* const in = logits + int64_t{max_rows_} * config_.num_experts;
  float* const out = in + int64_t{max_rows_} * hidden;
  Clock::time_point clock = Clock::now();
  LinearOutput router[] = {{&w.router, Data(w.router_bias), logits, config_.num_experts}};
  ProjectPlain(normed_.floats(), hidden, m, ActivationType::kF32, ActivationType::kF32, router);
  const std::vector<ExpertRows> routes = RouteToExperts(config_, logits, m);
  std::fill_n(projected_.floats(), int64_t{m} * hidden, 0.0f);
  // One expert after the other, so that a row's sum has one order, whatever other rows there are.
  for (size_t e = 0; e < routes.size(); ++e) {
    const auto count = static_cast<int32_t>(routes[e].rows.size());
    if (count == 0) continue;
    for (int32_t i = 0; i < count; ++i) {
      const float* const row = normed_.floats() + int64_t{routes[e].rows[static_cast<size_t>(i)]} * hidden;
      std::copy_n(row, hidden, in + int64_t{i} * hidden);
    }
    const LayerWeights::Expert& expert = w.experts[e];
    LinearOutput halves[] = {{&expert.gate, Data(expert.gate_bias), gate_.floats(), width},
                             {&expert.up, Data(expert.up_bias), up_.floats(), width}};
    RunGated(in, count, halves, nullptr);
    LinearOutput down[] = {{&expert.down, Data(expert.down_bias), out, hidden}};
    ProjectPlain(gate_.floats(), width, count, weights_.activations.other, weights_.activations.layer_int8, down);
    for (int32_t i = 0; i < count; ++i) {
      const float weight = routes[e].weights[static_cast<size_t>(i)];
      const float* const from = out + int64_t{i} * hidden;
      float* const to = projected_.floats() + int64_t{routes[e].rows[static_cast<size_t>(i)]} * hidden;
      for (int32_t c = 0; c < hidden; ++c) to[c] += weight * from[c];
    }
  }
  times_.products += SecondsSince(clock);
}

void CpuModelBackend::OutputAndMlp(int32_t layer) {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const phsa_executor executor = threads_.executor();
  const int32_t m = rows_->count, hidden = config_.hidden, intermediate = config_.intermediate;
  const int32_t q_width = config_.num_q_heads * config_.head_dim;
  Clock::time_point clock = Clock::now();
  // The queries are read; their buffer takes the attention's output as f32.
  LoadRows(dtype_, attention_out_.data(), q_width, m, q_width, queries_.floats(), q_width, executor);
  times_.other += SecondsSince(clock);
  LinearOutput output[] = {{&w.o, Data(w.o_bias), projected_.floats(), hidden}};
  Project(queries_.floats(), q_width, m, weights_.activations.other, weights_.activations.layer_int8, output,
          {layer, &LayerWeights::o_adapter});
  times_.products += SecondsSince(clock);

  FinishHalf(w.attention_post_norm);
  AddRmsNorm(residual_.floats(), hidden, projected_.floats(), hidden, m, hidden, w.mlp_norm.data(), config_.rms_eps,
             normed_.floats(), hidden, executor);
  times_.other += SecondsSince(clock);
  if (!w.experts.empty()) {
    RunExperts(w);
  } else {
    LinearOutput halves[] = {{&w.gate, Data(w.gate_bias), gate_.floats(), intermediate},
                             {&w.up, Data(w.up_bias), up_.floats(), intermediate}};
    const Added added = {layer, &LayerWeights::gate_up_adapter};
    RunGated(normed_.floats(), m, halves, &added);
    LinearOutput down[] = {{&w.down, Data(w.down_bias), projected_.floats(), hidden}};
    Project(gate_.floats(), intermediate, m, weights_.activations.other, weights_.activations.layer_int8, down,
            {layer, &LayerWeights::down_adapter});
    times_.products += SecondsSince(clock);
  }

  FinishHalf(w.mlp_post_norm);
  // The next layer's norm, or the model's last one, in the same pass over the residual stream.
  const Vector& next = layer + 1 < config_.num_layers ? weights_.layers[static_cast<size_t>(layer) + 1].attention_norm
                                                      : weights_.final_norm;
  AddRmsNorm(residual_.floats(), hidden, projected_.floats(), hidden, m, hidden, next.data(), config_.rms_eps,
             normed_.floats(), hidden, executor);
  times_.other += SecondsSince(clock);
}

void CpuModelBackend::Logits(const std::function<void(size_t wanted, const LogitsRow& logits)>& use) {
  const std::vector<StepRows::Wanted>& wanted = rows_->wanted;
  const int32_t hidden = config_.hidden;
  const auto vocab = static_cast<size_t>(config_.vocab_size);
  for (size_t first = 0; first < wanted.size(); first += kLogitRows) {
    const auto count = static_cast<int32_t>(std::min<size_t>(kLogitRows, wanted.size() - first));
    Clock::time_point clock = Clock::now();
    // Rows that are wanted, side by side; the residual stream is not needed any more.
    for (int32_t i = 0; i < count; ++i) {
      std::memcpy(residual_.floats() + int64_t{i} * hidden,
                  normed_.floats() + int64_t{wanted[first + static_cast<size_t>(i)].row} * hidden,
                  static_cast<size_t>(hidden) * sizeof(float));
    }
    LinearOutput output[] = {{&weights_.logits(), nullptr, logits_.floats(), config_.vocab_size}};
    ProjectPlain(residual_.floats(), hidden, count, weights_.activations.logits, weights_.activations.logits, output);
    times_.products += SecondsSince(clock);
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      use(first + i, HostLogitsRow({logits_.floats() + i * vocab, vocab}));
    }
  }
}

}  // namespace

BackendSizes CpuBackendSizes(const ModelSource& source, const BackendOptions& options, int32_t num_threads) {
  const WeightsSize weights = SizeOfWeights(source, options.weights, options.experts_in_file);
  const BufferSizes s = SizesOf(source.config(), options.kv_dtype, options.max_rows, weights.adapter, num_threads);
  BackendSizes sizes;
  sizes.weights = weights.bytes;
  sizes.weight_types = weights.types;
  sizes.workspace = 2 * s.residual + s.projected + s.queries + 2 * s.keys + 2 * s.intermediate + s.cos_sin + s.logits +
                    2 * s.attention_queries + s.linear + s.low_rank + s.added + s.routed;
  sizes.available = AvailableMemory();
  return sizes;
}

std::unique_ptr<ModelBackend> MakeCpuBackend(const ModelSource& source, const BackendOptions& options,
                                             ThreadPool& threads, const LoadProgress& progress) {
  bool stopped = false;
  const auto go_on = [&](double share) {
    stopped = !progress(share);
    return !stopped;
  };
  Weights weights = LoadWeights(source, options.weights, threads, go_on, options.experts_in_file);
  if (stopped) return nullptr;
  return std::make_unique<CpuModelBackend>(source.config(), std::move(weights), options, threads);
}

}  // namespace phsa
