// A loaded model with all that it takes to use it: tokenizer, chat template, weights, KV cache, threads.
#ifndef PHSA_ENGINE_ENGINE_H_
#define PHSA_ENGINE_ENGINE_H_

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/device_choice.h"
#include "engine/memory_needs.h"
#include "grammar/token_trie.h"
#include "io/model_source.h"
#include "model/decoder.h"
#include "model/kv_file.h"
#include "phsa/punctuation.h"
#include "phsa/settings.h"
#include "phsa/threads.h"
#include "tokenizer/tokenizer.h"

namespace phsa {

// Tokens: fewer than this are prefilled again sooner than a text waits for another one that has them, or copies their
// page.
inline constexpr size_t kWorthSharing = 16;

struct EngineOptions {
  WeightsMode weights = WeightsMode::kAuto;
  std::string device = "auto";      // auto, cpu, cuda, cuda:N: ChooseDevice
  std::optional<int32_t> kv_dtype;  // none: DefaultKvType
  int32_t context = 0;              // tokens of the longest text; 0: the model's, or as many as fit into memory
  int32_t cache_tokens = 0;         // tokens that the KV cache holds, of all texts together; 0: `cache_texts` says
  // The KV cache holds as many longest texts, or as much of them as fits into memory; 0: as many as a step can read.
  int32_t cache_texts = 1;
  int32_t threads = 0;  // 0: one per core
  int32_t chunk = 0;    // tokens of a prefill step; 0: 512 on the CPU, 8192 on a GPU
  LayerSettings attention;
  bool other_attention = false;  // pages have room for texts with another attention: MakeAttention
};

Tokenizer LoadTokenizer(const ModelSource& source);
BpeVocabulary GgufVocabulary(const ModelSource& source);  // of a GGUF file
// Which of its tokens are punctuation.
PunctuationTable PunctuationOf(const Tokenizer& tokenizer, const std::string& set);

class Engine {
 public:
  // What it needs is counted and checked here; `source` stays open for the engine's life.
  Engine(std::unique_ptr<ModelSource> source, Tokenizer tokenizer, const EngineOptions& options);

  const MemoryNeeds& memory() const { return memory_; }
  const ModelConfig& config() const { return source_->config(); }
  const ModelSource& source() const { return *source_; }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  const EngineOptions& options() const { return options_; }
  const DeviceChoice& device() const { return device_; }
  ThreadPool& threads() { return threads_; }
  // Throws phsa::Error where one of the tokens is not in the model's vocabulary; `text` says whose they are.
  void CheckTokens(std::span<const int32_t> tokens, const std::string& text) const;
  // What grammars know of the tokenizer: control tokens by their text (grammar/token_trie.h), those that end a text not
  // at all. Made when it is first asked for. Any thread may call it.
  std::shared_ptr<const TokenTrie> token_trie() const;
  std::string TooLongAdvice() const;  // what to do about a text that the context does not hold

  // Another adapter that texts may name (MakeAttention), beside the one that the model was opened with. Before Load.
  // Returns its number, 1 and up. Throws phsa::Error where it is not for this model, does not fit, or the device adds
  // adapters to its weights.
  int32_t AddAdapter(const std::filesystem::path& folder);
  // What the settings of texts are judged by that name this adapter; 0: config().
  ModelConfig ConfigOf(int32_t adapter) const;

  // Reads the weights. False where `progress` asked to stop. Before this, decoder(), cache() and device_name() are not
  // there.
  bool Load(const LoadProgress& progress);
  // In place of Load: what holds this model's weights already.
  void Use(std::unique_ptr<ModelBackend> backend);
  std::string device_name() const { return backend_->device_name(); }  // "cpu", or what the GPU calls itself
  // What the cache's contents depend on besides the tokens, for texts with this attention; none: the engine's own.
  KvIdentity cache_identity(const TextAttention* attention = nullptr) const;
  // Other settings for the attention. The weights stay; the cache is a new, empty one: sequences of the old one must
  // be gone. The settings that it has already change nothing. Throws phsa::Error, and changes nothing, where the
  // settings do not suit the model.
  void SetAttention(const LayerSettings& attention);
  // Another adapter for the same weights (empty: none), with `attention` in place of the settings so far. On a GPU,
  // which adds an adapter to its weights, those are loaded again. The cache is a new, empty one, as with SetAttention.
  // Throws phsa::Error, and all is as it was, where the adapter is not for this model.
  void SetAdapter(const std::filesystem::path& folder,
                  const std::function<LayerSettings(const ModelConfig& config)>& attention);
  // Another attention beside the engine's own, for sequences of its cache. Any thread may call it. Throws
  // phsa::Error where the settings do not suit the model, or their representatives need more room than pages have.
  // `adapter`: of AddAdapter, or 0.
  std::shared_ptr<const TextAttention> MakeAttention(const LayerSettings& attention, int32_t adapter = 0) const;
  Decoder& decoder() { return *decoder_; }
  KvCache& cache() { return *cache_; }
  const KvCache& cache() const { return *cache_; }

 private:
  // One for each token of the model's vocabulary; empty where nothing needs them.
  std::vector<uint8_t> PunctuationFlags(const LayerSettings& attention) const;
  void CheckDevice(const LayerSettings& attention) const;  // throws phsa::Error where it cannot attend so
  struct AttentionState;                                   // what follows from the attention's settings
  AttentionState StateFor(const LayerSettings& attention) const;
  void Exchange(AttentionState& other);
  void UseAdapter();  // of source_
  void MakeCache();
  std::unique_ptr<ModelSource> source_;
  EngineOptions options_;
  DeviceChoice device_;
  BackendOptions backend_options_;
  Tokenizer tokenizer_;
  ThreadPool threads_;
  MemoryNeeds memory_;
  std::vector<uint8_t> punctuation_;
  std::vector<std::unique_ptr<Adapter>> adapters_;  // that texts may name
  std::unique_ptr<ModelBackend> backend_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<Decoder> decoder_;
  mutable std::map<const Adapter*, KvIdentity> identities_;  // of the weights with each adapter
  mutable std::mutex trie_mutex_;
  mutable std::shared_ptr<const TokenTrie> trie_;
};

}  // namespace phsa

#endif  // PHSA_ENGINE_ENGINE_H_
