#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "attention/policies.h"
#include "base/dtype.h"
#include "base/errors.h"
#include "base/mapped_file.h"
#include "engine/attention_choice.h"
#include "io/sha256.h"
#include "model/cpu/cpu_backend.h"
#include "model/cuda/cuda_backend.h"

namespace phsa {
namespace {

// Far above any vocabulary's; a file beyond it is not a tokenizer.
constexpr size_t kMaxTokenizerBytes = size_t{512} << 20;

// Tokens of a prefill step, where nobody says. A GPU wants many rows to be busy.
constexpr int32_t kCpuChunk = 512, kCudaChunk = 8192;

BackendOptions OptionsOfBackend(const EngineOptions& options, const DeviceChoice& device) {
  BackendOptions out;
  out.weights = options.weights;
  out.kv_dtype = options.kv_dtype.value_or(DefaultKvType(options.weights, device.device));
  const int32_t chunk = device.device == PHSA_DEVICE_CPU ? kCpuChunk : kCudaChunk;
  out.max_rows = options.chunk > 0 ? options.chunk : chunk;
  out.device_index = device.index;
  return out;
}

// What settings can get wrong about this model; the rest is judged where they are read.
void CheckAttention(const LayerSettings& attention, const ModelConfig& config) {
  if (!attention.layers.empty() && attention.layers.rbegin()->first >= config.num_layers) {
    ThrowInvalid("the attention's settings name layer {}; the model has layers 0 to {}",
                 attention.layers.rbegin()->first, config.num_layers - 1);
  }
  for (const auto& [layer, settings] : attention.layers) {
    if (settings.punctuation != attention.base.punctuation) {
      ThrowInvalid(
          "the attention's settings give layer {} the punctuation {}, the whole {}; the set is one for all layers",
          layer, Quoted(settings.punctuation), Quoted(attention.base.punctuation));
    }
  }
}

// What a layer of a page has for representatives at least: what the policies take with the preset's blocks, and what
// the model carries for those who ask for phsa. More parts than that would cost every text memory: who wants them
// starts with them.
size_t RepresentativeRoom(const ModelConfig& config, const EngineOptions& options, int32_t kv_dtype) {
  if (!options.other_attention) return 0;
  size_t room = PageLayout::RepresentativeRoom(config, options.attention, kv_dtype);
  const auto make_room = [&](const LayerSettings& settings) {
    room = std::max(room, PageLayout::RepresentativeRoom(config, settings, kv_dtype));
  };
  make_room(ResolveAttention({.policy = Name(kOwnPolicy)}, config, config.context));
  for (const PolicyRow& row : kPolicies) {
    if (row.own_block == 0) continue;
    LayerSettings own;
    own.base.policy = row.policy;
    own.base.block_size = row.own_block;
    make_room(own);
  }
  return room;
}

MemoryNeeds MemoryFor(const ModelSource& source, const EngineOptions& options, const DeviceChoice& device,
                      const BackendOptions& backend, int32_t num_threads) {
  const ModelConfig& config = source.config();
  const int32_t kv_dtype = backend.kv_dtype;
  const bool on_gpu = device.device == PHSA_DEVICE_CUDA;
  const PageLayout layout(config, options.attention, kv_dtype, RepresentativeRoom(config, options, kv_dtype));
  const BackendSizes sizes = on_gpu ? cuda::Sizes(source, backend) : CpuBackendSizes(source, backend, num_threads);
  MemoryNeeds needs;
  if (on_gpu) needs.gpu = cuda::Devices()[static_cast<size_t>(device.index)].name;
  needs.weights = sizes.weights;
  needs.weight_types = sizes.weight_types;
  needs.kv_type = DtypeName(kv_dtype);
  needs.workspace = sizes.workspace;
  needs.available = sizes.available;
  needs.context = options.context;
  needs.cache_tokens = options.cache_tokens;
  if (needs.context == 0 && needs.cache_tokens > 0) needs.context = std::min(config.context, needs.cache_tokens);
  if (needs.context == 0) {
    const uint64_t fixed = needs.weights + needs.workspace;
    const uint64_t pages = needs.available > fixed ? (needs.available - fixed) / layout.page_bytes : 0;
    needs.context =
        static_cast<int32_t>(std::min<uint64_t>(static_cast<uint64_t>(config.context), pages * kPageTokens));
    needs.context = std::max(needs.context, kPageTokens);  // CheckFits says the rest
  }
  if (needs.cache_tokens == 0) {
    // One text whatever there is: CheckFits says the rest.
    const uint64_t fixed = needs.weights + needs.workspace;
    const uint64_t room = needs.available > fixed ? (needs.available - fixed) / layout.page_bytes * kPageTokens : 0;
    const int32_t texts = options.cache_texts > 0 ? options.cache_texts : std::max(1, backend.max_rows / needs.context);
    const uint64_t wanted = static_cast<uint64_t>(needs.context) * static_cast<uint64_t>(texts);
    const uint64_t most = std::min<uint64_t>({wanted, room, INT32_MAX - kPageTokens});
    needs.cache_tokens = std::max(needs.context, static_cast<int32_t>(most));
  }
  const auto pages = uint64_t{PagesFor(static_cast<size_t>(needs.cache_tokens))};
  needs.representatives = pages * layout.representative_bytes;
  needs.key_values = pages * (layout.page_bytes - layout.representative_bytes);
  return needs;
}

}  // namespace

PunctuationTable PunctuationOf(const Tokenizer& tokenizer, const std::string& set) {
  std::vector<std::string> tokens;
  std::vector<uint8_t> special;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    tokens.emplace_back(tokenizer.TokenBytes(id));
    special.push_back(tokenizer.IsSpecial(id) ? 1 : 0);
  }
  return {set, tokens, special};
}

BpeVocabulary GgufVocabulary(const ModelSource& source) {
  if (!source.gguf_tokenizer()) ThrowInvalid("{}: the file holds no tokenizer", source.path());
  const GgufTokenizer& gguf = *source.gguf_tokenizer();
  BpeVocabulary vocabulary;
  vocabulary.model = gguf.model;
  vocabulary.pre = gguf.pre;
  vocabulary.tokens = gguf.tokens;
  vocabulary.token_types = gguf.token_types;
  vocabulary.merges = gguf.merges;
  vocabulary.scores = gguf.scores;
  vocabulary.add_space_prefix = gguf.add_space_prefix;
  vocabulary.one_space = gguf.one_space;
  vocabulary.charsmap = gguf.charsmap;
  vocabulary.unknown = gguf.unknown;
  vocabulary.bos = gguf.bos;
  vocabulary.eos = gguf.eos;
  vocabulary.add_bos = gguf.add_bos;
  vocabulary.add_eos = gguf.add_eos;
  return vocabulary;
}

Tokenizer LoadTokenizer(const ModelSource& source) {
  if (source.gguf_tokenizer()) return Tokenizer::FromVocabulary(GgufVocabulary(source), source.path());
  if (!source.tokenizer_json()) {
    ThrowInvalid("{}: there is no tokenizer.json in the folder; fetch it from where the model came from",
                 source.path());
  }
  return Tokenizer::FromJson(ReadTextFile(*source.tokenizer_json(), kMaxTokenizerBytes), source.tokenizer_config(),
                             source.tokenizer_json()->string());
}

Engine::Engine(std::unique_ptr<ModelSource> source, Tokenizer tokenizer, const EngineOptions& options)
    : source_(std::move(source)),
      options_(options),
      device_(ChooseDevice(options.device, *source_, {options.weights, options.kv_dtype, options.attention})),
      backend_options_(OptionsOfBackend(options, device_)),
      tokenizer_(std::move(tokenizer)),
      threads_(options.threads) {
  const ModelConfig& model = source_->config();
  if (options_.context < 0 || options_.context > model.context) {
    ThrowInvalid("{} is {}; the model's context is {} tokens", Option{"context"}, options_.context, model.context);
  }
  if (options_.cache_tokens < 0 || (options_.cache_tokens > 0 && options_.cache_tokens < options_.context)) {
    ThrowInvalid("the cache is to hold {} tokens, and the context is {}; it must hold one text of that length",
                 options_.cache_tokens, options_.context);
  }
  if (options_.chunk < 0 || options_.chunk > 65536) {
    ThrowInvalid("{} is {}; allowed: 1 to 65536, or 0 for what suits the device", Option{"chunk"}, options_.chunk);
  }
  if (tokenizer_.vocab_size() > model.vocab_size) {
    ThrowInvalid("{}: the tokenizer has {} tokens, the model only {}; they do not belong together", source_->path(),
                 tokenizer_.vocab_size(), model.vocab_size);
  }
  CheckAttention(options_.attention, model);
  punctuation_ = PunctuationFlags(options_.attention);
  const auto needs = [&](bool experts_in_file) {
    backend_options_.experts_in_file = experts_in_file;
    return MemoryFor(*source_, options_, device_, backend_options_, threads_.num_threads());
  };
  memory_ = needs(false);
  // A copy of all experts is faster, where there is room for it and for a text of some length.
  constexpr int32_t kSomeLength = 4096;
  if (!Fits(memory_) || (options_.context == 0 && memory_.context < std::min(model.context, kSomeLength))) {
    memory_ = needs(true);
  }
  CheckFits(memory_);
  source_->SetContext(memory_.context);
}

void Engine::CheckTokens(std::span<const int32_t> tokens, const std::string& text) const {
  for (const int32_t token : tokens) {
    if (token >= 0 && token < config().vocab_size) continue;
    ThrowInvalid("{} has the token {}; the model's are 0 to {}", text, token, config().vocab_size - 1);
  }
}

std::shared_ptr<const TokenTrie> Engine::token_trie() const {
  const std::lock_guard lock(trie_mutex_);
  if (trie_ == nullptr) {
    std::vector<std::string> bytes(static_cast<size_t>(std::min(config().vocab_size, tokenizer_.vocab_size())));
    for (size_t i = 0; i < bytes.size(); ++i) {
      const auto id = static_cast<int32_t>(i);
      if (std::ranges::find(config().eos_ids, id) != config().eos_ids.end()) continue;
      bytes[i] = tokenizer_.TokenBytes(id);
      if (tokenizer_.IsSpecial(id)) bytes[i].insert(bytes[i].begin(), kControlByte);
    }
    trie_ = std::make_shared<const TokenTrie>(bytes);
  }
  return trie_;
}

std::string Engine::TooLongAdvice() const {
  return memory_.context < config().context ? fmt::format("ask for a larger {}", Option{"context"})
                                            : "give a shorter text";
}

void Engine::CheckDevice(const LayerSettings& attention) const {
  const std::string why = UnsupportedAttention(attention, config(), backend_options_.kv_dtype, device_.device);
  if (!why.empty()) Throw(PHSA_UNSUPPORTED, "{}; {} runs it", why, Option{"device", "cpu"});
}

struct Engine::AttentionState {
  EngineOptions options;
  MemoryNeeds memory;
  std::vector<uint8_t> punctuation;
};

Engine::AttentionState Engine::StateFor(const LayerSettings& attention) const {
  CheckAttention(attention, config());
  CheckDevice(attention);
  AttentionState state;
  state.options = options_;
  state.options.attention = attention;
  state.options.context = memory_.context;  // as they were, whatever the new pages weigh
  state.options.cache_tokens = memory_.cache_tokens;
  state.memory = MemoryFor(*source_, state.options, device_, backend_options_, threads_.num_threads());
  state.memory.available = memory_.available;  // before the weights were loaded
  CheckFits(state.memory);
  state.punctuation = PunctuationFlags(attention);
  return state;
}

void Engine::Exchange(AttentionState& other) {
  std::swap(punctuation_, other.punctuation);
  std::swap(options_, other.options);
  std::swap(memory_, other.memory);
}

void Engine::SetAttention(const LayerSettings& attention) {
  if (attention == options_.attention) return;
  AttentionState state = StateFor(attention);
  Exchange(state);
  if (decoder_ == nullptr) return;
  try {
    MakeCache();
  } catch (...) {
    // A device may have less left than it had. The cache as it was fits again.
    Exchange(state);
    MakeCache();
    throw;
  }
}

void Engine::UseAdapter() {
  decoder_.reset();  // they refer to the backend
  cache_.reset();
  if (backend_ != nullptr && backend_->SetAdapter(*source_)) {
    MakeCache();
    return;
  }
  backend_.reset();  // first give back, then take
  Load([](double) { return true; });
}

void Engine::SetAdapter(const std::filesystem::path& folder,
                        const std::function<LayerSettings(const ModelConfig& config)>& attention) {
  PHSA_CHECK(decoder_ != nullptr);
  const std::filesystem::path before = source_->adapter() != nullptr ? source_->adapter()->path() : "";
  source_->SetAdapter(folder);
  identities_.clear();  // they are known by where adapters lie
  AttentionState state;
  try {
    state = StateFor(attention(config()));
  } catch (...) {
    source_->SetAdapter(before);
    throw;
  }
  Exchange(state);
  try {
    UseAdapter();
  } catch (...) {
    Exchange(state);
    source_->SetAdapter(before);
    UseAdapter();
    throw;
  }
}

bool Engine::Load(const LoadProgress& progress) {
  const auto make = device_.device == PHSA_DEVICE_CUDA ? cuda::MakeBackend : MakeCpuBackend;
  std::unique_ptr<ModelBackend> backend = make(*source_, backend_options_, threads_, progress);
  if (backend == nullptr) return false;
  Use(std::move(backend));
  return true;
}

int32_t Engine::AddAdapter(const std::filesystem::path& folder) {
  PHSA_CHECK(decoder_ == nullptr);
  std::unique_ptr<Adapter> adapter = source_->OpenAdapter(folder);
  if (device_.device != PHSA_DEVICE_CPU) {
    Throw(PHSA_UNSUPPORTED,
          "{}: on a GPU an adapter is added to the weights, so that there is one for all requests; give it as {}, or "
          "{}",
          adapter->path(), Option{"adapter"}, Option{"device", "cpu"});
  }
  MemoryNeeds needs = memory_;
  needs.weights += AdapterBytes(*adapter, options_.weights, static_cast<size_t>(config().num_layers));
  CheckFits(needs);
  memory_ = needs;
  adapters_.push_back(std::move(adapter));
  return static_cast<int32_t>(adapters_.size());
}

ModelConfig Engine::ConfigOf(int32_t adapter) const {
  return adapter == 0 ? config() : source_->ConfigWith(*adapters_[static_cast<size_t>(adapter) - 1]);
}

void Engine::Use(std::unique_ptr<ModelBackend> backend) {
  backend_ = std::move(backend);
  for (const auto& adapter : adapters_) backend_->AddAdapter(*adapter);
  MakeCache();
}

std::vector<uint8_t> Engine::PunctuationFlags(const LayerSettings& attention) const {
  if (IsDense(attention)) return {};
  std::vector<uint8_t> flags = PunctuationOf(tokenizer_, attention.base.punctuation).table();
  flags.resize(static_cast<size_t>(config().vocab_size));  // what the tokenizer does not know is no punctuation
  return flags;
}

KvIdentity Engine::cache_identity(const TextAttention* attention) const {
  const LayerSettings& settings = attention != nullptr ? attention->settings : options_.attention;
  const std::vector<uint8_t>& flags = attention != nullptr ? attention->punctuation : punctuation_;
  const bool dense = IsDense(settings);  // then the other settings mean nothing
  // A set may be a file, which may have changed.
  Sha256 punctuation;
  punctuation.Update(flags.data(), flags.size());
  const int32_t adapter = attention != nullptr ? attention->adapter : 0;
  const Adapter* const added = adapter > 0 ? adapters_[static_cast<size_t>(adapter) - 1].get() : source_->adapter();
  const auto known = identities_.find(added);
  KvIdentity identity =
      known != identities_.end() ? known->second : (identities_[added] = ModelIdentity(*source_, added));
  identity.emplace_back("weights", fmt::format("{} ({})", Name(options_.weights), memory_.weight_types));
  identity.emplace_back("attention", dense ? "dense" : SettingsToJson(settings));
  identity.emplace_back("punctuation", punctuation.Hex());
  return identity;
}

std::shared_ptr<const TextAttention> Engine::MakeAttention(const LayerSettings& attention, int32_t adapter) const {
  PHSA_CHECK(adapter >= 0 && static_cast<size_t>(adapter) <= adapters_.size());
  const int32_t kv_dtype = backend_options_.kv_dtype;
  CheckAttention(attention, config());
  CheckDevice(attention);
  const size_t room = RepresentativeRoom(config(), options_, kv_dtype);
  const size_t needed = PageLayout::RepresentativeRoom(config(), attention, kv_dtype);
  if (needed > room) {
    ThrowInvalid(
        "attention {}: its representatives take {} bytes of a page and layer, and pages have room for {}; start with "
        "these settings to make room for them",
        Name(attention.base.policy), needed, room);
  }
  return std::make_shared<const TextAttention>(
      TextAttention{attention, PunctuationFlags(attention), PageLayout(config(), attention, kv_dtype, room), adapter});
}

void Engine::MakeCache() {
  decoder_.reset();  // first give back, then take
  cache_.reset();
  const auto pages = static_cast<int32_t>(PagesFor(static_cast<size_t>(memory_.cache_tokens)));
  const int32_t kv_dtype = backend_options_.kv_dtype;
  PageLayout layout(config(), options_.attention, kv_dtype, RepresentativeRoom(config(), options_, kv_dtype));
  std::unique_ptr<PageMemory> memory = backend_->MakePages(layout.page_bytes, pages);
  cache_ = std::make_unique<KvCache>(std::move(layout), pages, std::move(memory));
  decoder_ = std::make_unique<Decoder>(config(), *backend_, options_.attention, threads_);
  decoder_->SetPunctuation(punctuation_);
}

}  // namespace phsa
