// The KV cache: pages that hold keys, values, punctuation flags and representatives of their tokens for all layers, so
// that whatever is done with tokens (append, truncate, share, save) is done with pages.
#ifndef PHSA_MODEL_KV_CACHE_H_
#define PHSA_MODEL_KV_CACHE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "io/model_source.h"
#include "model/page_memory.h"
#include "phsa/attention.h"
#include "phsa/settings.h"

namespace phsa {

// Tokens of a page: a whole number of every policy's blocks, small enough that a short answer wastes little.
inline constexpr int32_t kPageTokens = 128;
inline constexpr size_t PagesFor(size_t tokens) { return tokens / kPageTokens + (tokens % kPageTokens != 0 ? 1 : 0); }

// A plan of a model's attention over such pages of a cache of that type; lengths and device are for the caller to add.
PlanDesc PagedPlan(const ModelConfig& config, const Settings& settings, int32_t kv_type);

int32_t KvTypeFromName(std::string_view name);  // phsa_dtype of f32, f16, bf16, int8; throws phsa::Error

// What queries, representatives and the attention's output have beside keys and values of that type: 8-bit ones are
// computed with as bf16.
inline constexpr int32_t AttentionType(int32_t kv_type) { return kv_type == PHSA_INT8 ? PHSA_BF16 : kv_type; }

// Where things lie in a page; all in bytes, every part aligned to 64.
//   [flags: kPageTokens][layer 0: K [kv_head][token][head_dim], V likewise, of 8-bit K and V the scales
//   [kv_head][token] of K, then of V, representatives [row][kv_head][width]][layer 1] …
// A token's scales are its own, so that what its neighbours in the page are changes nothing, and stand apart, so that
// rows of codes begin where vectors do.
struct PageLayout {
  // `room`: bytes that each layer of a page has for representatives at least. Layouts of a model with the same room
  // agree in all offsets as long as it suffices.
  PageLayout(const ModelConfig& config, const LayerSettings& settings, int32_t kv_type, size_t room = 0);
  // The room that the representatives of these settings take.
  static size_t RepresentativeRoom(const ModelConfig& config, const LayerSettings& settings, int32_t kv_type);

  int32_t kv_type = PHSA_F32;  // of K and V
  int32_t dtype = PHSA_F32;    // AttentionType of it
  int32_t num_layers = 0, num_kv_heads = 0, head_dim = 0;
  struct Layer {
    size_t keys = 0, values = 0, key_scales = 0, value_scales = 0, representatives = 0;  // offsets
    int32_t rep_width = 0, rep_rows = 0;  // 0: nothing is chosen in this layer
  };
  std::vector<Layer> layers;
  // Tokens of the page behind it that a page's last representatives cover (infllm2-64's span two blocks). As long as
  // they are not there, texts that share the page may still differ in it.
  int32_t overhang = 0;
  size_t page_bytes = 0;
  size_t key_value_bytes = 0, representative_bytes = 0;  // of a page, all layers
};

// How a text is read, where that is not how the decoder reads texts unless told.
struct TextAttention {
  LayerSettings settings;
  std::vector<uint8_t> punctuation;  // whether each token of the vocabulary is; empty: none is
  PageLayout layout;                 // with the same offsets as that of the cache
  // Which adapter is added to the weights: Engine::AddAdapter. 0: the one that the model was opened with, or none.
  int32_t adapter = 0;
};

class KvCache {
 public:
  // `memory`: of `num_pages` such pages (ModelBackend::MakePages).
  KvCache(PageLayout layout, int32_t num_pages, std::unique_ptr<PageMemory> memory);
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const PageLayout& layout() const { return layout_; }
  int32_t num_pages() const { return num_pages_; }
  int32_t free_pages() const { return static_cast<int32_t>(free_.size()); }
  int64_t free_tokens() const { return int64_t{free_pages()} * kPageTokens; }

  // A page has as many owners as sequences that hold it. One with several is only read.
  int32_t TakePage();  // one owner; throws phsa::Error where none is left
  void SharePage(int32_t page) { ++owners_[static_cast<size_t>(page)]; }
  void ReturnPage(int32_t page);  // one owner less; the last one frees it
  bool IsShared(int32_t page) const { return owners_[static_cast<size_t>(page)] > 1; }
  PageMemory& memory() const { return *memory_; }

  // What the attention of a layer reads, where the memory is; the page tables are the caller's, and lie there too.
  // `layout`: that of the texts.
  KeyValues View(int32_t layer, const int32_t* page_table, int64_t page_table_stride, const PageLayout& layout) const;
  // The scales of its 8-bit keys and values; of other types there are none.
  KvScales Scales(int32_t layer) const;
  // Where token `offset` of `page` lies, in elements from View(layer).k or .v; heads are kPageTokens · head_dim apart.
  int64_t TokenElement(int32_t page, int32_t offset) const {
    return page * page_elements() + int64_t{offset} * layout_.head_dim;
  }
  int64_t head_stride() const { return int64_t{kPageTokens} * layout_.head_dim; }
  // Where the flag of the token at this TokenElement lies, in bytes from memory().data().
  int64_t FlagByte(int64_t token_element) const {
    return token_element / page_elements() * static_cast<int64_t>(layout_.page_bytes) +
           token_element % page_elements() / layout_.head_dim;
  }
  // Where the scales of the token at this TokenElement lie from those of Scales(layer).
  int64_t ScaleElement(int64_t token_element) const {
    return token_element / page_elements() * scale_page_stride() + token_element % page_elements() / layout_.head_dim;
  }

 private:
  int64_t page_elements() const { return page_elements_; }
  int64_t scale_page_stride() const { return static_cast<int64_t>(layout_.page_bytes / sizeof(uint16_t)); }
  PageLayout layout_;
  int64_t page_elements_;  // of the cache's type
  int32_t num_pages_;
  std::unique_ptr<PageMemory> memory_;
  std::vector<int32_t> free_, owners_;
};

// Tokens that two texts share from their beginnings.
inline size_t CommonPrefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  return static_cast<size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

// The tokens of one text, and their pages.
class Sequence {
 public:
  // `attention`: none where it is read as the decoder reads texts unless told.
  explicit Sequence(KvCache& cache, std::shared_ptr<const TextAttention> attention = nullptr);
  ~Sequence() { Truncate(0); }
  Sequence(Sequence&& other) noexcept;
  Sequence& operator=(Sequence&& other) noexcept;
  // The same text again, to go on from in another way. Pages are shared; a sequence that writes into a shared one
  // copies it first.
  Sequence Fork() const;

  int32_t length() const { return static_cast<int32_t>(tokens_.size()); }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  const std::vector<int32_t>& pages() const { return pages_; }
  KvCache& cache() const { return *cache_; }
  const TextAttention* attention() const { return attention_.get(); }
  const PageLayout& layout() const { return attention_ != nullptr ? attention_->layout : cache_->layout(); }

  // Pages that appending `count` tokens takes from the cache, copies of shared ones that it writes into included.
  size_t PagesToAppend(int32_t count) const;
  // Makes room for these tokens and notes them; a step of the decoder writes their flags, keys and values.
  void Append(std::span<const int32_t> tokens);
  void Truncate(int32_t length);

 private:
  // The first page that appending writes into, keys or representatives; pages_.size() where that is a new one.
  size_t FirstWrittenPage() const;
  KvCache* cache_;
  std::shared_ptr<const TextAttention> attention_;
  std::vector<int32_t> tokens_, pages_;
};

}  // namespace phsa

#endif  // PHSA_MODEL_KV_CACHE_H_
