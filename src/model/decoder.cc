#include "model/decoder.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <set>

#include "base/dtype.h"
#include "base/errors.h"
#include "ops/layers.h"

namespace phsa {
namespace {

// Logits of many rows are made this many at a time: a whole chunk of them would take more memory than the weights.
constexpr int32_t kLogitRows = 32;

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
    case WeightType::kInt8: return wanted_int8;
    case WeightType::kInt4: return wanted;
  }
  return wanted;
}

const float* Data(const Vector& vector) { return vector.empty() ? nullptr : vector.data(); }

struct BufferSizes {
  size_t residual, projected, queries, keys, intermediate, cos_sin, logits, attention_queries, linear, low_rank, added;
};

BufferSizes SizesOf(const ModelConfig& config, int32_t kv_dtype, int32_t max_rows, const AdapterSizes& adapter,
                    int32_t num_threads) {
  const auto m = static_cast<size_t>(max_rows);
  const auto q_width = static_cast<size_t>(config.num_q_heads) * static_cast<size_t>(config.head_dim);
  const auto kv_width = static_cast<size_t>(config.num_kv_heads) * static_cast<size_t>(config.head_dim);
  std::set<int32_t> columns = adapter.ranks;
  columns.insert({config.hidden, config.intermediate, static_cast<int32_t>(q_width)});
  size_t linear = 0;
  for (const WeightType weights : {WeightType::kF32, WeightType::kBf16, WeightType::kInt8, WeightType::kInt4}) {
    for (const ActivationType activations : {ActivationType::kF32, ActivationType::kBf16, ActivationType::kInt8}) {
      if (weights == WeightType::kF32 && activations != ActivationType::kF32) continue;
      if (weights == WeightType::kBf16 && activations != ActivationType::kBf16) continue;
      for (const int32_t cols : columns) {
        linear = std::max(linear, LinearWorkspaceSize(weights, activations, max_rows, cols, num_threads));
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
          .intermediate = m * static_cast<size_t>(config.intermediate) * sizeof(float),
          .cos_sin = m * static_cast<size_t>(config.head_dim) * sizeof(float),
          .logits = logit_rows * static_cast<size_t>(config.vocab_size) * sizeof(float),
          .attention_queries = m * q_width * DtypeSize(kv_dtype),
          .linear = linear,
          .low_rank = m * static_cast<size_t>(adapter.rows) * sizeof(float),
          .added = adapter.rows > 0 ? m * widest * sizeof(float) : 0};
}

}  // namespace

Buffer::Buffer(size_t bytes) : size_(bytes) {
  data_.reset(static_cast<uint8_t*>(::operator new[](std::max<size_t>(bytes, 64), std::align_val_t{64})));
}

void Buffer::Free::operator()(uint8_t* data) const { ::operator delete[](data, std::align_val_t{64}); }

// Items of the batch, one behind the other, that are read in the same way.
struct Decoder::Group {
  const TextAttention* attention = nullptr;  // null: the decoder's own
  const PageLayout* layout = nullptr;
  size_t first_item = 0, num_items = 0;
  int32_t first_row = 0, num_rows = 0;
  std::vector<Plan> plans;                           // one for each of the settings that the layers have
  std::vector<std::vector<TokensRead>> tokens_read;  // of a layer with that plan, for each item
  std::vector<size_t> plan_of_layer;
};

struct Decoder::Rows {
  int32_t count = 0;
  std::vector<int32_t> tokens, positions;
  std::vector<int64_t> cache_rows;  // where each row's keys lie, in elements of the cache
  std::vector<int32_t> q_lens, kv_lens, page_table;
  int64_t page_table_stride = 0;
  std::vector<Group> groups;
  const KvCache* cache = nullptr;
};

Decoder::Decoder(const ModelConfig& config, const Weights& weights, const LayerSettings& settings, int32_t kv_dtype,
                 int32_t max_rows, ThreadPool& threads)
    : config_(config),
      weights_(weights),
      settings_(settings),
      kv_dtype_(kv_dtype),
      max_rows_(max_rows),
      threads_(threads),
      rope_(MakeRope(config)) {
  const BufferSizes sizes = SizesOf(config, kv_dtype, max_rows, weights.adapter, threads.num_threads());
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
}

uint64_t Decoder::WorkspaceBytes(const ModelConfig& config, int32_t kv_dtype, int32_t max_rows,
                                 const AdapterSizes& adapter, int32_t num_threads) {
  const BufferSizes s = SizesOf(config, kv_dtype, max_rows, adapter, num_threads);
  return 2 * s.residual + s.projected + s.queries + 2 * s.keys + 2 * s.intermediate + s.cos_sin + s.logits +
         2 * s.attention_queries + s.linear + s.low_rank + s.added;
}

void Decoder::Append(std::span<const BatchItem> batch, Rows& rows) {
  PHSA_CHECK(!batch.empty());
  rows.cache = &batch.front().sequence->cache();
  size_t pages_needed = 0, most_pages = 0;
  for (const BatchItem& item : batch) {
    PHSA_CHECK(!item.tokens.empty() && &item.sequence->cache() == rows.cache);
    rows.count += static_cast<int32_t>(item.tokens.size());
    const size_t pages = PagesFor(static_cast<size_t>(item.sequence->length()) + item.tokens.size());
    pages_needed += item.sequence->PagesToAppend(static_cast<int32_t>(item.tokens.size()));
    most_pages = std::max(most_pages, pages);
    for (const int32_t token : item.tokens) PHSA_CHECK(token >= 0 && token < config_.vocab_size);
  }
  PHSA_CHECK(rows.count <= max_rows_);
  if (pages_needed > static_cast<size_t>(rows.cache->free_pages())) {
    ThrowInvalid(
        "{} more tokens do not fit into the KV cache, which has room for {} more; a larger context (-c) has more",
        rows.count, rows.cache->free_tokens());
  }
  rows.page_table_stride = static_cast<int64_t>(most_pages);
  rows.page_table.assign(batch.size() * most_pages, 0);
  std::vector<uint8_t> flags;
  for (size_t i = 0; i < batch.size(); ++i) {
    Sequence& sequence = *batch[i].sequence;
    const int32_t first = sequence.length();
    if (rows.groups.empty() || rows.groups.back().attention != sequence.attention()) {
      Group& group = rows.groups.emplace_back();
      group.attention = sequence.attention();
      group.layout = &sequence.layout();
      group.first_item = i;
      group.first_row = static_cast<int32_t>(rows.tokens.size());
    }
    ++rows.groups.back().num_items;
    rows.groups.back().num_rows += static_cast<int32_t>(batch[i].tokens.size());
    const std::vector<uint8_t>& punctuation =
        sequence.attention() != nullptr ? sequence.attention()->punctuation : punctuation_;
    flags.clear();
    if (!punctuation.empty()) {
      for (const int32_t token : batch[i].tokens) flags.push_back(punctuation[static_cast<size_t>(token)]);
    }
    sequence.Append(batch[i].tokens, flags);
    rows.q_lens.push_back(static_cast<int32_t>(batch[i].tokens.size()));
    rows.kv_lens.push_back(sequence.length());
    std::copy(sequence.pages().begin(), sequence.pages().end(),
              rows.page_table.begin() + static_cast<int64_t>(i * most_pages));
    for (int32_t position = first; position < sequence.length(); ++position) {
      rows.tokens.push_back(sequence.tokens()[static_cast<size_t>(position)]);
      rows.positions.push_back(position);
      rows.cache_rows.push_back(rows.cache->TokenElement(sequence.pages()[static_cast<size_t>(position / kPageTokens)],
                                                         position % kPageTokens));
    }
  }

  for (Group& group : rows.groups) PlanGroup(rows, group);
}

void Decoder::PlanGroup(Rows& rows, Group& group) {
  const LayerSettings& layer_settings = group.attention != nullptr ? group.attention->settings : settings_;
  const int32_t* const q_lens = rows.q_lens.data() + group.first_item;
  const int32_t* const kv_lens = rows.kv_lens.data() + group.first_item;
  size_t workspace = 0;
  std::vector<const Settings*> plan_settings;  // those that the layers have, each once
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    const Settings& settings = layer_settings.ForLayer(layer);
    const auto known = std::find_if(plan_settings.begin(), plan_settings.end(),
                                    [&](const Settings* other) { return *other == settings; });
    group.plan_of_layer.push_back(static_cast<size_t>(known - plan_settings.begin()));
    if (known != plan_settings.end()) continue;
    PlanDesc desc;
    desc.settings = settings;
    desc.dtype = kv_dtype_;
    desc.num_q_heads = config_.num_q_heads;
    desc.num_kv_heads = config_.num_kv_heads;
    desc.head_dim = config_.head_dim;
    desc.num_seqs = static_cast<int32_t>(group.num_items);
    desc.q_lens = q_lens;
    desc.kv_lens = kv_lens;
    desc.page_size = kPageTokens;
    desc.max_threads = threads_.num_threads();
    group.plans.emplace_back(desc);
    plan_settings.push_back(&settings);
    workspace = std::max(workspace, group.plans.back().WorkspaceSize());
    // A plan says what all of its sequences read together, so each has one of its own.
    std::vector<TokensRead>& read = group.tokens_read.emplace_back(group.num_items);
    desc.num_seqs = 1;
    for (size_t i = 0; i < group.num_items; ++i) {
      desc.q_lens = q_lens + i;
      desc.kv_lens = kv_lens + i;
      Plan(desc).TokensRead(nullptr, &read[i].read, &read[i].dense);
    }
  }
  if (attention_workspace_.size() < workspace) {
    attention_workspace_ = {};  // first give back, then take
    attention_workspace_ = Buffer(workspace + workspace / 4);
  }
}

void Decoder::Embed(const Rows& rows) {
  for (int32_t row = 0; row < rows.count; ++row) {
    weights_.embedding.GetRow(rows.tokens[static_cast<size_t>(row)],
                              residual_.floats() + int64_t{row} * config_.hidden);
  }
  RopeTable(rows.positions.data(), rows.count, rope_.frequencies.data(), config_.head_dim / 2, rope_.factor,
            cos_sin_.floats(), threads_.executor());
}

void Decoder::Multiply(const float* x, int64_t x_stride, int32_t m, ActivationType activations,
                       std::span<const LinearOutput> outputs) {
  Linear(x, x_stride, m, activations, outputs, linear_workspace_.data(), linear_workspace_.size(), threads_.executor());
}

void Decoder::Project(const float* x, int64_t x_stride, int32_t m, ActivationType activations,
                      ActivationType activations_int8, std::span<LinearOutput> outputs, const LowRank* adapter) {
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
  // Products of one weight type go in one call; a file may mix types within a layer.
  std::vector<LinearOutput> call;
  size_t done = 0;
  for (const WeightType type : {WeightType::kF32, WeightType::kBf16, WeightType::kInt8, WeightType::kInt4}) {
    call.clear();
    for (const LinearOutput& output : outputs) {
      if (output.weights->type() == type) call.push_back(output);
    }
    if (call.empty()) continue;
    Multiply(x, x_stride, m, ActivationsFor(type, activations, activations_int8), call);
    done += call.size();
    if (done == outputs.size()) break;
  }
  if (!adapts || m == 1) return;
  const float* added = added_.floats();
  for (const LowRank::Part& part : adapter->parts) {
    const LinearOutput& output = outputs[part.output];
    AddRows(output.y, output.y_stride, added, part.b.rows(), m, part.b.rows(), threads_.executor());
    added += int64_t{m} * part.b.rows();
  }
}

void Decoder::Layer(int32_t index, const Rows& rows) {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(index)];
  const phsa_executor executor = threads_.executor();
  const int32_t m = rows.count, hidden = config_.hidden, intermediate = config_.intermediate;
  const int32_t q_width = config_.num_q_heads * config_.head_dim, kv_width = config_.num_kv_heads * config_.head_dim;
  Clock::time_point clock = Clock::now();

  if (index == 0) {
    RmsNorm(residual_.floats(), hidden, m, hidden, w.attention_norm.data(), config_.rms_eps, normed_.floats(), hidden,
            executor);
  }
  times_.other += SecondsSince(clock);

  LinearOutput qkv[] = {{&w.q, Data(w.q_bias), queries_.floats(), q_width},
                        {&w.k, Data(w.k_bias), keys_.floats(), kv_width},
                        {&w.v, Data(w.v_bias), values_.floats(), kv_width}};
  Project(normed_.floats(), hidden, m, weights_.activations.qkv, weights_.activations.layer_int8, qkv, &w.qkv_adapter);
  times_.products += SecondsSince(clock);

  const KeyValues kv = rows.cache->View(index, rows.page_table.data(), rows.page_table_stride, rows.cache->layout());
  RopeParams rope;
  rope.m = m;
  rope.head_dim = config_.head_dim;
  rope.cos_sin = cos_sin_.floats();
  rope.eps = config_.rms_eps;
  rope.out_dtype = kv_dtype_;
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
  rope.out = const_cast<void*>(kv.k);
  rope.out_rows = rows.cache_rows.data();
  rope.out_head_stride = rows.cache->head_stride();
  Rope(rope, executor);
  for (int32_t head = 0; head < config_.num_kv_heads; ++head) {
    auto* const out = static_cast<uint8_t*>(const_cast<void*>(kv.v)) +
                      static_cast<size_t>(head * rows.cache->head_stride()) * DtypeSize(kv_dtype_);
    StoreRows(values_.floats() + head * config_.head_dim, kv_width, m, config_.head_dim, kv_dtype_, out,
              rows.cache_rows.data(), 0, executor);
  }
  times_.other += SecondsSince(clock);

  for (const Group& group : rows.groups) Attend(index, rows, group);
  clock = Clock::now();

  // The queries are read; their buffer takes the attention's output as f32.
  LoadRows(kv_dtype_, attention_out_.data(), q_width, m, q_width, queries_.floats(), q_width, executor);
  times_.other += SecondsSince(clock);
  LinearOutput output[] = {{&w.o, Data(w.o_bias), projected_.floats(), hidden}};
  Project(queries_.floats(), q_width, m, weights_.activations.other, weights_.activations.layer_int8, output,
          &w.o_adapter);
  times_.products += SecondsSince(clock);

  AddRmsNorm(residual_.floats(), hidden, projected_.floats(), hidden, m, hidden, w.mlp_norm.data(), config_.rms_eps,
             normed_.floats(), hidden, executor);
  times_.other += SecondsSince(clock);
  LinearOutput halves[] = {{&w.gate, Data(w.gate_bias), gate_.floats(), intermediate},
                           {&w.up, Data(w.up_bias), up_.floats(), intermediate}};
  Project(normed_.floats(), hidden, m, weights_.activations.gate_up, weights_.activations.layer_int8, halves,
          &w.gate_up_adapter);
  times_.products += SecondsSince(clock);
  SiluMul(gate_.floats(), intermediate, up_.floats(), intermediate, m, intermediate, gate_.floats(), intermediate,
          executor);
  times_.other += SecondsSince(clock);
  LinearOutput down[] = {{&w.down, Data(w.down_bias), projected_.floats(), hidden}};
  Project(gate_.floats(), intermediate, m, weights_.activations.other, weights_.activations.layer_int8, down,
          &w.down_adapter);
  times_.products += SecondsSince(clock);

  // The next layer's norm, or the model's last one, in the same pass over the residual stream.
  const Vector& next = index + 1 < config_.num_layers ? weights_.layers[static_cast<size_t>(index) + 1].attention_norm
                                                      : weights_.final_norm;
  AddRmsNorm(residual_.floats(), hidden, projected_.floats(), hidden, m, hidden, next.data(), config_.rms_eps,
             normed_.floats(), hidden, executor);
  times_.other += SecondsSince(clock);
}

void Decoder::Attend(int32_t index, const Rows& rows, const Group& group) {
  const int32_t q_width = config_.num_q_heads * config_.head_dim;
  const size_t planned = group.plan_of_layer[static_cast<size_t>(index)];
  const Plan& plan = group.plans[planned];
  const size_t first = static_cast<size_t>(group.first_row) * static_cast<size_t>(q_width) * DtypeSize(kv_dtype_);
  auto forward = Init<ForwardParams>();
  forward.q = attention_queries_.data() + first;
  forward.q_token_stride = q_width;
  forward.q_head_stride = config_.head_dim;
  forward.kv =
      rows.cache->View(index, rows.page_table.data() + static_cast<int64_t>(group.first_item) * rows.page_table_stride,
                       rows.page_table_stride, *group.layout);
  forward.out = attention_out_.data() + first;
  forward.out_token_stride = q_width;
  forward.out_head_stride = config_.head_dim;
  forward.workspace = attention_workspace_.data();
  forward.workspace_size = attention_workspace_.size();
  forward.executor = threads_.executor();
  const auto count = static_cast<size_t>(group.num_rows);
  const size_t slots = count * static_cast<size_t>(plan.SelectionHeads()) * static_cast<size_t>(plan.SelectionSlots());
  const bool apart = stages_apart_ && slots > 0;
  if (slots > 0 && (observer_ || apart)) {
    selection_.resize(slots);
    forward.selection = selection_.data();
  }
  if (observer_) {
    lse_.resize(count * static_cast<size_t>(config_.num_q_heads));
    forward.lse = lse_.data();
    selection_scores_.resize(slots);
    if (slots > 0) forward.selection_scores = selection_scores_.data();
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
  for (size_t i = 0; i < group.num_items; ++i) {
    step_tokens_read_[group.first_item + i] += group.tokens_read[planned][i];
    tokens_read_ += group.tokens_read[planned][i];
  }
  if (!observer_) return;
  const LayerSettings& settings = group.attention != nullptr ? group.attention->settings : settings_;
  observer_({index, plan, settings.ForLayer(index), forward,
             std::span(rows.q_lens).subspan(group.first_item, group.num_items),
             std::span(rows.kv_lens).subspan(group.first_item, group.num_items)});
}

void Decoder::EmitLogits(std::span<const BatchItem> batch, const Rows& rows, const LogitsSink& sink) {
  struct Wanted {
    int32_t item, row, packed_row;
  };
  std::vector<Wanted> wanted;
  int32_t start = 0;
  for (size_t i = 0; i < batch.size(); ++i) {
    const int32_t count = rows.q_lens[i];
    for (int32_t row = 0; row < count; ++row) {
      if ((batch[i].logits == BatchItem::Logits::kAll && row >= batch[i].first_row) ||
          (batch[i].logits == BatchItem::Logits::kLast && row == count - 1)) {
        wanted.push_back({static_cast<int32_t>(i), row, start + row});
      }
    }
    start += count;
  }
  const int32_t hidden = config_.hidden;
  const int64_t vocab = config_.vocab_size;
  for (size_t first = 0; first < wanted.size(); first += kLogitRows) {
    const auto count = static_cast<int32_t>(std::min<size_t>(kLogitRows, wanted.size() - first));
    Clock::time_point clock = Clock::now();
    // Rows that are wanted, side by side; the residual stream is not needed any more.
    for (int32_t i = 0; i < count; ++i) {
      std::memcpy(residual_.floats() + int64_t{i} * hidden,
                  normed_.floats() + int64_t{wanted[first + static_cast<size_t>(i)].packed_row} * hidden,
                  static_cast<size_t>(hidden) * sizeof(float));
    }
    LinearOutput output[] = {{&weights_.logits(), nullptr, logits_.floats(), vocab}};
    Project(residual_.floats(), hidden, count, weights_.activations.logits, weights_.activations.logits, output,
            nullptr);
    times_.products += SecondsSince(clock);
    for (int32_t i = 0; i < count; ++i) {
      const Wanted& at = wanted[first + static_cast<size_t>(i)];
      sink(at.item, at.row, logits_.floats() + i * vocab);
    }
  }
}

void Decoder::Step(std::span<const BatchItem> batch, const LogitsSink& sink) {
  Rows rows;
  Append(batch, rows);
  step_tokens_read_.assign(batch.size(), {});
  Embed(rows);
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) Layer(layer, rows);
  EmitLogits(batch, rows, sink);
}

}  // namespace phsa
