#include "model/decoder.h"

#include <algorithm>

#include "base/dtype.h"
#include "base/errors.h"
#include "model/distinct_settings.h"

namespace phsa {
namespace {

// A layer's part of the pages of a group's texts, as the host can read it: where the cache lies, or copied to `copy`.
// page_table: filled where it is a copy.
void HostView(const StepRows& rows, const StepGroup& group, int32_t layer, Buffer& copy,
              std::vector<int32_t>& page_table, ForwardParams& seen) {
  const KvCache& cache = *rows.cache;
  const int64_t stride = rows.page_table_stride;
  const int32_t* const table = rows.page_table.data() + static_cast<int64_t>(group.first_item) * stride;
  KeyValues& kv = seen.kv = cache.View(layer, table, stride, *group.layout);
  seen.kv_scales = cache.Scales(layer);
  if (cache.memory().on_host()) return;

  const PageLayout& layout = *group.layout;
  const auto index = static_cast<size_t>(layer);
  const size_t begin = layout.layers[index].keys;
  const size_t end = index + 1 < layout.layers.size() ? layout.layers[index + 1].keys : layout.page_bytes;
  const size_t flags = layout.layers.front().keys;  // they come first in a page
  const size_t bytes = flags + end - begin;
  page_table.assign(group.num_items * static_cast<size_t>(stride), 0);
  std::vector<int32_t> pages;
  for (size_t item = 0; item < group.num_items; ++item) {
    const size_t used = PagesFor(static_cast<size_t>(rows.kv_lens[group.first_item + item]));
    for (size_t i = item * static_cast<size_t>(stride); i < item * static_cast<size_t>(stride) + used; ++i) {
      page_table[i] = static_cast<int32_t>(pages.size());
      pages.push_back(table[i]);
    }
  }
  copy.Reserve(pages.size() * bytes);
  for (size_t i = 0; i < pages.size(); ++i) {
    uint8_t* const to = copy.data() + i * bytes;
    cache.memory().Read(pages[i], 0, {to, flags});
    cache.memory().Read(pages[i], begin, {to + flags, end - begin});
  }
  const PageLayout::Layer& at = layout.layers[index];
  uint8_t* const first = copy.data() + flags;
  kv.k = first;
  kv.v = first + (at.values - begin);
  kv.flags = copy.data();
  if (kv.reps != nullptr) kv.reps = first + (at.representatives - begin);
  kv.flags_page_stride = static_cast<int64_t>(bytes);
  kv.k_page_stride = kv.v_page_stride = static_cast<int64_t>(bytes / DtypeSize(layout.kv_type));
  kv.rep_page_stride = static_cast<int64_t>(bytes / DtypeSize(layout.dtype));
  if (layout.kv_type == PHSA_INT8) {
    seen.kv_scales.k = reinterpret_cast<const uint16_t*>(first + (at.key_scales - begin));
    seen.kv_scales.v = reinterpret_cast<const uint16_t*>(first + (at.value_scales - begin));
    seen.kv_scales.page_stride = static_cast<int64_t>(bytes / sizeof(uint16_t));
  }
  kv.page_table = page_table.data();
}

void FindWanted(std::span<const BatchItem> batch, StepRows& rows, std::vector<std::pair<int32_t, int32_t>>& places) {
  int32_t start = 0;
  for (size_t i = 0; i < batch.size(); ++i) {
    const int32_t count = rows.q_lens[i];
    const int32_t none = count;
    const int32_t first = batch[i].logits == BatchItem::Logits::kAll    ? batch[i].first_row
                          : batch[i].logits == BatchItem::Logits::kLast ? count - 1
                                                                        : none;
    for (int32_t row = first; row < count; ++row) {
      const int32_t next = row + 1 < count ? batch[i].tokens[static_cast<size_t>(row) + 1] : -1;
      rows.wanted.push_back({start + row, next});
      places.emplace_back(static_cast<int32_t>(i), row);
    }
    start += count;
  }
}

}  // namespace

// One for each of the settings that the layers have.
struct Decoder::GroupPlans {
  std::vector<Plan> plans;
  std::vector<size_t> of_layer;
};

Decoder::Decoder(const ModelConfig& config, ModelBackend& backend, const LayerSettings& settings, ThreadPool& threads)
    : config_(config), backend_(backend), settings_(settings), threads_(threads) {}

void Decoder::Append(std::span<const BatchItem> batch, StepRows& rows) {
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
  PHSA_CHECK(rows.count <= max_rows());
  if (pages_needed > static_cast<size_t>(rows.cache->free_pages())) {
    ThrowInvalid("{} more tokens do not fit into the KV cache, which has room for {} more; a larger {} has more",
                 rows.count, rows.cache->free_tokens(), Option{"context"});
  }
  rows.page_table_stride = static_cast<int64_t>(most_pages);
  rows.page_table.assign(batch.size() * most_pages, 0);
  const TextAttention* attention = nullptr;  // of the last group; null: the decoder's own
  for (size_t i = 0; i < batch.size(); ++i) {
    Sequence& sequence = *batch[i].sequence;
    const int32_t first = sequence.length();
    if (rows.groups.empty() || attention != sequence.attention()) {
      attention = sequence.attention();
      StepGroup& group = rows.groups.emplace_back();
      group.settings = attention != nullptr ? &attention->settings : &settings_;
      group.layout = &sequence.layout();
      group.adapter = attention != nullptr ? attention->adapter : 0;
      group.first_item = i;
      group.first_row = static_cast<int32_t>(rows.tokens.size());
    }
    ++rows.groups.back().num_items;
    rows.groups.back().num_rows += static_cast<int32_t>(batch[i].tokens.size());
    sequence.Append(batch[i].tokens);
    rows.q_lens.push_back(static_cast<int32_t>(batch[i].tokens.size()));
    rows.kv_lens.push_back(sequence.length());
    std::copy(sequence.pages().begin(), sequence.pages().end(),
              rows.page_table.begin() + static_cast<int64_t>(i * most_pages));
    const std::vector<uint8_t>& punctuation = attention != nullptr ? attention->punctuation : punctuation_;
    for (int32_t position = first; position < sequence.length(); ++position) {
      const int32_t token = sequence.tokens()[static_cast<size_t>(position)];
      rows.tokens.push_back(token);
      rows.positions.push_back(position);
      rows.flags.push_back(punctuation.empty() ? uint8_t{0} : punctuation[static_cast<size_t>(token)]);
      rows.cache_rows.push_back(rows.cache->TokenElement(sequence.pages()[static_cast<size_t>(position / kPageTokens)],
                                                         position % kPageTokens));
    }
  }
}

PlanDesc Decoder::Describe(const StepRows& rows, size_t first_item, size_t num_items, const Settings& settings,
                           int32_t window) const {
  PlanDesc desc = PagedPlan(config_, settings, rows.cache->layout().kv_type);
  desc.window = window;
  desc.num_seqs = static_cast<int32_t>(num_items);
  desc.q_lens = rows.q_lens.data() + first_item;
  desc.kv_lens = rows.kv_lens.data() + first_item;
  desc.max_threads = threads_.num_threads();
  return desc;
}

Decoder::GroupPlans Decoder::PlanGroup(const StepRows& rows, const StepGroup& group) const {
  DistinctSettings settings(*group.settings, config_);
  GroupPlans out;
  for (size_t i = 0; i < settings.all.size(); ++i) {
    PlanDesc desc = Describe(rows, group.first_item, group.num_items, *settings.all[i], settings.windows[i]);
    desc.device = backend_.device();
    out.plans.emplace_back(desc);
  }
  out.of_layer = std::move(settings.of_layer);
  return out;
}

void Decoder::CountTokensRead(const StepRows& rows) {
  step_tokens_read_.assign(rows.q_lens.size(), {});
  for (const StepGroup& group : rows.groups) {
    const DistinctSettings settings(*group.settings, config_);
    for (size_t i = 0; i < settings.all.size(); ++i) {
      const auto layers = std::count(settings.of_layer.begin(), settings.of_layer.end(), i);
      // A plan says what all of its sequences read together, so each has one of its own.
      for (size_t item = group.first_item; item < group.first_item + group.num_items; ++item) {
        TokensRead read;
        Plan(Describe(rows, item, 1, *settings.all[i], settings.windows[i]))
            .TokensRead(nullptr, &read.read, &read.dense);
        step_tokens_read_[item] += {read.read * layers, read.dense * layers};
      }
    }
  }
  for (const TokensRead& read : step_tokens_read_) tokens_read_ += read;
}

void Decoder::Attend(int32_t layer, const StepRows& rows, const StepGroup& group, const Plan& plan) {
  backend_.Attend(layer, group, plan, observer_ ? &trace_ : nullptr);
  if (!observer_) return;
  std::vector<int32_t> page_table;
  auto seen = Init<ForwardParams>();
  seen.q = trace_.queries;
  seen.q_token_stride = int64_t{config_.num_q_heads} * config_.head_dim;
  seen.q_head_stride = config_.head_dim;
  HostView(rows, group, layer, host_pages_, page_table, seen);
  seen.lse = trace_.lse.data();
  if (!trace_.selection.empty()) {
    seen.selection = trace_.selection.data();
    seen.selection_scores = trace_.selection_scores.data();
  }
  seen.executor = threads_.executor();
  observer_({layer, plan, SettingsOfLayer(config_, *group.settings, layer), seen,
             std::span(rows.q_lens).subspan(group.first_item, group.num_items),
             std::span(rows.kv_lens).subspan(group.first_item, group.num_items)});
}

void Decoder::Step(std::span<const BatchItem> batch, const LogitsSink& sink) {
  std::vector<int32_t> lengths;
  for (const BatchItem& item : batch) lengths.push_back(item.sequence->length());
  try {
    Run(batch, sink);
  } catch (...) {
    // Tokens whose keys may not be in the cache must not be taken for read: a text that begins with them would go on
    // from there.
    for (size_t i = 0; i < batch.size(); ++i) {
      Sequence& sequence = *batch[i].sequence;
      sequence.Truncate(std::min(sequence.length(), lengths[i]));
    }
    throw;
  }
}

void Decoder::Run(std::span<const BatchItem> batch, const LogitsSink& sink) {
  StepRows rows;
  Append(batch, rows);
  std::vector<std::pair<int32_t, int32_t>> places;  // item and row of those that are wanted
  FindWanted(batch, rows, places);
  std::vector<GroupPlans> plans;  // until the backend has done with them
  backend_.Begin(rows);
  if (observer_ || !backend_.RunLayers(rows)) {
    for (const StepGroup& group : rows.groups) plans.push_back(PlanGroup(rows, group));
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
      backend_.QueriesKeysValues(layer);
      for (size_t i = 0; i < rows.groups.size(); ++i) {
        Attend(layer, rows, rows.groups[i], plans[i].plans[plans[i].of_layer[static_cast<size_t>(layer)]]);
      }
      backend_.OutputAndMlp(layer);
    }
  }
  CountTokensRead(rows);  // while a device still works
  backend_.Logits([&](size_t i, const LogitsRow& logits) { sink(places[i].first, places[i].second, logits); });
  AddHidden(batch);
}

void Decoder::AddHidden(std::span<const BatchItem> batch) const {
  const auto wanted = [](const BatchItem& item) { return item.hidden_sum != nullptr; };
  if (std::none_of(batch.begin(), batch.end(), wanted)) return;
  const std::span<const float> hidden = backend_.Hidden();
  const float* row = hidden.data();
  for (const BatchItem& item : batch) {
    for (size_t i = 0; i < item.tokens.size(); ++i, row += config_.hidden) {
      if (!wanted(item)) continue;
      for (int32_t j = 0; j < config_.hidden; ++j) item.hidden_sum[j] += static_cast<double>(row[j]);
    }
  }
}

}  // namespace phsa
