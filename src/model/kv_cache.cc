#include "model/kv_cache.h"

#include <algorithm>
#include <utility>

#include "base/carver.h"
#include "base/dtype.h"
#include "base/errors.h"
#include "model/distinct_settings.h"

namespace phsa {
PlanDesc PagedPlan(const ModelConfig& config, const Settings& settings, int32_t kv_type) {
  PlanDesc desc;
  desc.settings = settings;
  desc.dtype = AttentionType(kv_type);
  desc.kv_dtype = kv_type;
  desc.num_q_heads = config.num_q_heads;
  desc.num_kv_heads = config.num_kv_heads;
  desc.head_dim = config.head_dim;
  desc.scale = config.attention_scale;
  desc.page_size = kPageTokens;
  return desc;
}

int32_t KvTypeFromName(std::string_view name) {
  for (const int32_t dtype : {PHSA_F32, PHSA_F16, PHSA_BF16, PHSA_INT8}) {
    if (name == DtypeName(dtype)) return dtype;
  }
  ThrowInvalid("{} is {}; allowed: f32, f16, bf16, int8", Option{"kv_type"}, Quoted(name));
}

PageLayout::PageLayout(const ModelConfig& config, const LayerSettings& settings, int32_t type, size_t room)
    : kv_type(type),
      dtype(AttentionType(type)),
      num_layers(config.num_layers),
      num_kv_heads(config.num_kv_heads),
      head_dim(config.head_dim) {
  const size_t element = DtypeSize(dtype);
  const size_t rows = kPageTokens * static_cast<size_t>(num_kv_heads);
  const size_t keys = Aligned(DtypeSize(kv_type) * rows * static_cast<size_t>(head_dim));
  const size_t scales = kv_type == PHSA_INT8 ? Aligned(rows * sizeof(uint16_t)) : 0;
  page_bytes = Aligned(kPageTokens);  // flags
  for (int32_t i = 0; i < num_layers; ++i) {
    // The attention says how wide representatives are and how many of them a page completes; a plan of one page asks.
    PlanDesc desc = PagedPlan(config, SettingsOfLayer(config, settings, i), kv_type);
    const int32_t tokens = kPageTokens;
    desc.num_seqs = 1;
    desc.q_lens = desc.kv_lens = &tokens;
    const Plan plan(desc);
    Layer layer;
    layer.keys = page_bytes;
    layer.values = layer.keys + keys;
    layer.key_scales = layer.values + keys;
    layer.value_scales = layer.key_scales + scales;
    layer.representatives = layer.value_scales + scales;
    size_t bytes = Aligned(room);
    if (plan.SelectionSlots() > 0) {
      layer.rep_width = plan.RepWidth();
      layer.rep_rows = kPageTokens / plan.RepStride();
      overhang = std::max(overhang, kPageTokens - static_cast<int32_t>(plan.NumReps()) * plan.RepStride());
      bytes = std::max(bytes, Aligned(element * static_cast<size_t>(layer.rep_rows) *
                                      static_cast<size_t>(num_kv_heads) * static_cast<size_t>(layer.rep_width)));
    }
    page_bytes = layer.representatives + bytes;
    representative_bytes += bytes;
    key_value_bytes += 2 * (keys + scales);
    layers.push_back(layer);
  }
}

size_t PageLayout::RepresentativeRoom(const ModelConfig& config, const LayerSettings& settings, int32_t kv_type) {
  const PageLayout layout(config, settings, kv_type);
  size_t most = 0;
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    const size_t end = i + 1 < layout.layers.size() ? layout.layers[i + 1].keys : layout.page_bytes;
    most = std::max(most, end - layout.layers[i].representatives);
  }
  return most;
}

KvCache::KvCache(PageLayout layout, int32_t num_pages, std::unique_ptr<PageMemory> memory)
    : layout_(std::move(layout)),
      page_elements_(static_cast<int64_t>(layout_.page_bytes / DtypeSize(layout_.kv_type))),
      num_pages_(num_pages),
      memory_(std::move(memory)) {
  PHSA_CHECK(num_pages > 0 && memory_ != nullptr);
  free_.resize(static_cast<size_t>(num_pages));
  owners_.resize(static_cast<size_t>(num_pages));
  for (int32_t i = 0; i < num_pages; ++i) free_[static_cast<size_t>(i)] = num_pages - 1 - i;
}

int32_t KvCache::TakePage() {
  if (free_.empty()) {
    ThrowInvalid("the KV cache is full ({} tokens); a larger {} has more room", int64_t{num_pages_} * kPageTokens,
                 Option{"context"});
  }
  const int32_t page = free_.back();
  free_.pop_back();
  owners_[static_cast<size_t>(page)] = 1;
  return page;
}

void KvCache::ReturnPage(int32_t page) {
  if (--owners_[static_cast<size_t>(page)] == 0) free_.push_back(page);
}

KeyValues KvCache::View(int32_t layer, const int32_t* page_table, int64_t page_table_stride,
                        const PageLayout& layout) const {
  const PageLayout::Layer& at = layout.layers[static_cast<size_t>(layer)];
  uint8_t* const memory = memory_->data();
  auto kv = Init<KeyValues>();
  kv.k = memory + at.keys;
  kv.v = memory + at.values;
  kv.k_token_stride = kv.v_token_stride = layout_.head_dim;
  kv.k_head_stride = kv.v_head_stride = head_stride();
  kv.k_page_stride = kv.v_page_stride = page_elements();
  kv.flags = memory;
  kv.flags_page_stride = static_cast<int64_t>(layout_.page_bytes);
  if (at.rep_width > 0) {
    kv.reps = memory + at.representatives;
    kv.rep_head_stride = at.rep_width;
    kv.rep_row_stride = int64_t{layout_.num_kv_heads} * at.rep_width;
    kv.rep_page_stride = static_cast<int64_t>(layout_.page_bytes / DtypeSize(layout_.dtype));
  }
  kv.page_table = page_table;
  kv.page_table_stride = page_table_stride;
  return kv;
}

KvScales KvCache::Scales(int32_t layer) const {
  KvScales scales{};
  if (layout_.kv_type != PHSA_INT8) return scales;
  const PageLayout::Layer& at = layout_.layers[static_cast<size_t>(layer)];
  scales.k = reinterpret_cast<const uint16_t*>(memory_->data() + at.key_scales);
  scales.v = reinterpret_cast<const uint16_t*>(memory_->data() + at.value_scales);
  scales.token_stride = 1;
  scales.head_stride = kPageTokens;
  scales.page_stride = scale_page_stride();
  return scales;
}

Sequence::Sequence(KvCache& cache, std::shared_ptr<const TextAttention> attention)
    : cache_(&cache), attention_(std::move(attention)) {
  PHSA_CHECK(layout().page_bytes == cache.layout().page_bytes);
}

Sequence::Sequence(Sequence&& other) noexcept
    : cache_(other.cache_),
      attention_(other.attention_),  // NOLINT: what is left behind is an empty text of the same kind
      tokens_(std::move(other.tokens_)),
      pages_(std::move(other.pages_)) {
  other.tokens_.clear();
  other.pages_.clear();
}

Sequence& Sequence::operator=(Sequence&& other) noexcept {
  std::swap(cache_, other.cache_);
  attention_.swap(other.attention_);
  tokens_.swap(other.tokens_);
  pages_.swap(other.pages_);
  return *this;
}

Sequence Sequence::Fork() const {
  Sequence fork(*cache_, attention_);
  fork.tokens_ = tokens_;
  fork.pages_ = pages_;
  for (const int32_t page : pages_) cache_->SharePage(page);
  return fork;
}

size_t Sequence::PagesToAppend(int32_t count) const {
  if (count <= 0) return 0;
  size_t taken = PagesFor(tokens_.size() + static_cast<size_t>(count)) - pages_.size();
  for (size_t i = FirstWrittenPage(); i < pages_.size(); ++i) taken += cache_->IsShared(pages_[i]) ? 1 : 0;
  return taken;
}

size_t Sequence::FirstWrittenPage() const {
  const auto overhang = static_cast<size_t>(layout().overhang);
  return (tokens_.size() - std::min(tokens_.size(), overhang)) / kPageTokens;
}

void Sequence::Append(std::span<const int32_t> tokens) {
  if (tokens.empty()) return;
  if (PagesToAppend(static_cast<int32_t>(tokens.size())) > static_cast<size_t>(cache_->free_pages())) {
    ThrowInvalid("{} more tokens do not fit into the KV cache, which has room for {}; a larger {} has more",
                 tokens.size(), cache_->free_tokens(), Option{"context"});
  }
  for (size_t i = FirstWrittenPage(); i < pages_.size(); ++i) {
    if (!cache_->IsShared(pages_[i])) continue;
    const int32_t own = cache_->TakePage();
    cache_->memory().Copy(pages_[i], own);
    cache_->ReturnPage(pages_[i]);
    pages_[i] = own;
  }
  const size_t needed = PagesFor(tokens_.size() + tokens.size());
  while (pages_.size() < needed) pages_.push_back(cache_->TakePage());
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
}

void Sequence::Truncate(int32_t length) {
  PHSA_CHECK(length >= 0 && length <= this->length());
  tokens_.resize(static_cast<size_t>(length));
  while (pages_.size() > PagesFor(tokens_.size())) {
    cache_->ReturnPage(pages_.back());
    pages_.pop_back();
  }
}

}  // namespace phsa
