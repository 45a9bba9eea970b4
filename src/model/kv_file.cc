#include "model/kv_file.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/dtype.h"
#include "base/errors.h"
#include "base/mapped_file.h"
#include "base/new_file.h"
#include "io/sha256.h"

namespace phsa {
namespace {

constexpr std::string_view kMagic = "PHSA KV cache 1\n";
constexpr size_t kMaxHeader = size_t{1} << 20;
constexpr const char* kReadAgain = "remove the file, and the text is prefilled again";
// Enough of a tensor to tell two models apart, little enough to read at once: 20 MB of a model with 300 tensors.
constexpr size_t kWindowBytes = 4096, kWindows = 16;

std::string LayoutInWords(const PageLayout& layout) {
  return fmt::format("{} pages of {} tokens, {} bytes: {} layers, {} KV heads, head_dim {}", DtypeName(layout.kv_type),
                     kPageTokens, layout.page_bytes, layout.num_layers, layout.num_kv_heads, layout.head_dim);
}

// A page of which only the first `tokens` are this text's: what earlier texts left behind does not go into a file.
void ClearBeyond(const PageLayout& layout, size_t tokens, std::span<uint8_t> page) {
  const size_t row = DtypeSize(layout.kv_type) * static_cast<size_t>(layout.head_dim);
  const auto heads = static_cast<size_t>(layout.num_kv_heads);
  const auto clear = [&](size_t begin, size_t end) {
    std::fill(page.begin() + static_cast<int64_t>(begin), page.begin() + static_cast<int64_t>(end), uint8_t{0});
  };
  clear(tokens, kPageTokens);  // flags
  for (const PageLayout::Layer& layer : layout.layers) {
    const auto clear_rows = [&](size_t part, size_t bytes) {
      for (size_t head = 0; head < heads; ++head) {
        clear(part + (head * kPageTokens + tokens) * bytes, part + (head + 1) * kPageTokens * bytes);
      }
    };
    for (const size_t part : {layer.keys, layer.values}) clear_rows(part, row);
    if (layout.kv_type == PHSA_INT8) {
      for (const size_t part : {layer.key_scales, layer.value_scales}) clear_rows(part, sizeof(uint16_t));
    }
    const auto rows = static_cast<size_t>(layer.rep_rows);
    if (rows == 0) continue;
    const size_t width = DtypeSize(layout.dtype) * static_cast<size_t>(layer.rep_width) * heads;
    clear(layer.representatives + tokens * rows / kPageTokens * width, layer.representatives + rows * width);
  }
}

void AddText(std::string_view text, Sha256& hash) {
  // With its length, so that two texts are not the same as two others that are cut elsewhere.
  const uint64_t size = text.size();
  hash.Update(&size, sizeof(size));
  hash.Update(text.data(), text.size());
}

void AddDescription(const Tensor& tensor, Sha256& hash) {
  AddText(fmt::format("{} {} {} {}", tensor.name, static_cast<int>(tensor.type), tensor.bytes,
                      fmt::join(tensor.shape, ",")),
          hash);
}

std::string WeightsFingerprint(const ModelSource& source) {
  Sha256 hash;
  for (const Tensor* tensor : source.Tensors()) {
    AddDescription(*tensor, hash);
    if (tensor->bytes <= kWindowBytes * kWindows) {
      hash.Update(tensor->data, tensor->bytes);
      continue;
    }
    for (size_t i = 0; i < kWindows; ++i) {  // the first and the last bytes are among them
      hash.Update(tensor->data + (tensor->bytes - kWindowBytes) / (kWindows - 1) * i, kWindowBytes);
    }
    hash.Update(tensor->data + tensor->bytes - kWindowBytes, kWindowBytes);
  }
  return hash.Hex();
}

// All of it: two adapters of one training may begin alike.
std::string AdapterFingerprint(const Adapter& adapter) {
  Sha256 hash;
  for (const auto& [name, matrix] : adapter.matrices()) {
    for (const Tensor* tensor : {&matrix.a, &matrix.b}) {
      AddDescription(*tensor, hash);
      hash.Update(tensor->data, tensor->bytes);
    }
    hash.Update(&matrix.scale, sizeof(matrix.scale));
  }
  return hash.Hex();
}

std::string TokenizerFingerprint(const ModelSource& source) {
  Sha256 hash;
  if (const auto& gguf = source.gguf_tokenizer()) {
    AddText(gguf->model, hash);
    AddText(gguf->pre, hash);
    for (const std::string& token : gguf->tokens) AddText(token, hash);
    for (const std::string& merge : gguf->merges) AddText(merge, hash);
    AddText(fmt::format("{} {} {} {} {}", fmt::join(gguf->token_types, ","), gguf->bos, gguf->eos, gguf->add_bos,
                        gguf->add_eos),
            hash);
  } else if (source.tokenizer_json()) {
    const MappedFile file(*source.tokenizer_json());
    hash.Update(file.data(), file.size());
    AddText(source.tokenizer_config(), hash);
  } else {
    return "none";
  }
  return hash.Hex();
}

std::string RopeInWords(const ModelConfig& config) {
  const RopeScaling& scaling = config.rope_scaling;
  std::string out = fmt::format("base {}", config.rope_base);
  const auto add = [&](const char* name, const auto& value) { out += fmt::format(", {} {}", name, value); };
  const auto add_given = [&](const char* name, const std::optional<float>& value) {
    if (value) add(name, *value);
  };
  switch (scaling.kind) {
    case RopeScaling::Kind::kNone:
    case RopeScaling::Kind::kLongRope: add_given("attention factor", scaling.attention_factor); break;
    case RopeScaling::Kind::kLinear: add("linear", scaling.factor); break;
    case RopeScaling::Kind::kLlama3:
      add("llama3", scaling.factor);
      add("from", scaling.original_context);
      add("low", scaling.low_freq_factor);
      add("high", scaling.high_freq_factor);
      break;
    case RopeScaling::Kind::kYarn:
      add("yarn", scaling.factor);
      add("from", scaling.original_context);
      add("fast", scaling.beta_fast);
      add("slow", scaling.beta_slow);
      add_given("attention factor", scaling.attention_factor);
      add_given("mscale", scaling.mscale);
      add_given("mscale of all dimensions", scaling.mscale_all_dim);
      if (!scaling.truncate) out += ", not truncated";
      break;
  }
  if (!scaling.frequency_factors.empty()) {
    Sha256 hash;
    hash.Update(scaling.frequency_factors.data(), scaling.frequency_factors.size() * sizeof(float));
    add("factors", hash.Hex());
  }
  if (config.interleaved_rope_rows) out += ", over neighbours";
  if (config.rotary_dim > 0) add("dimensions", config.rotary_dim);
  if (config.window_rope_base) add("base of windows", *config.window_rope_base);
  for (int32_t i = 0; i < config.num_layers; ++i) {
    const LayerTraits traits = config.Layer(i);
    if (traits.window > 0) out += fmt::format(", layer {} window {}", i, traits.window);
    if (!traits.rope) out += fmt::format(", layer {} without", i);
  }
  return out;
}

std::optional<size_t> ToNumber(std::string_view text) {
  size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

// The header's lines, and where the rest of the file begins.
class Header {
 public:
  explicit Header(const MappedFile& file) : path_(file.path()) {
    const std::string_view text(reinterpret_cast<const char*>(file.data()), std::min(file.size(), kMaxHeader));
    if (!text.starts_with(kMagic)) ThrowInvalid("{}: not a KV cache of this program; {}", path_, kReadAgain);
    const size_t end = text.find("\n\n");
    if (end == std::string_view::npos) ThrowInvalid("{}: cut within its header; {}", path_, kReadAgain);
    lines_ = text.substr(kMagic.size() - 1, end + 1 - (kMagic.size() - 1));
    size_ = end + 2;
  }
  size_t size() const { return size_; }
  std::string_view Value(const std::string& name) const {
    const std::string key = fmt::format("\n{}: ", name);
    const size_t at = lines_.find(key);
    if (at == std::string_view::npos)
      ThrowInvalid("{}: its header does not say {}; {}", path_, Quoted(name), kReadAgain);
    const size_t begin = at + key.size();
    return lines_.substr(begin, lines_.find('\n', begin) - begin);
  }
  size_t Number(const std::string& name) const {
    const std::optional<size_t> value = ToNumber(Value(name));
    if (!value) ThrowInvalid("{}: {} is {} in its header; {}", path_, name, Quoted(Value(name)), kReadAgain);
    return *value;
  }

 private:
  const std::string& path_;
  std::string_view lines_;  // each with a line break before and after it
  size_t size_ = 0;
};

}  // namespace

KvIdentity ModelIdentity(const ModelSource& source, const Adapter* adapter) {
  const ModelConfig& c = source.config();
  return {{"model", WeightsFingerprint(source)},
          {"architecture",
           fmt::format("{}, {} layers, {} wide, feed-forward {}, {} query heads, {} KV heads of {}, vocabulary {}{}",
                       c.architecture, c.num_layers, c.hidden, c.intermediate, c.num_q_heads, c.num_kv_heads,
                       c.head_dim, c.vocab_size, c.tied_embeddings ? ", tied" : "")},
          {"RMS epsilon", fmt::format("{}", c.rms_eps)},
          {"RoPE", RopeInWords(c)},
          {"adapter", adapter != nullptr ? AdapterFingerprint(*adapter) : "none"},
          {"tokenizer", TokenizerFingerprint(source)}};
}

void SaveSequence(const Sequence& sequence, const KvIdentity& identity, const std::filesystem::path& path) {
  const KvCache& cache = sequence.cache();
  const std::vector<int32_t>& tokens = sequence.tokens();
  std::vector<uint8_t> page(cache.layout().page_bytes);
  const auto for_each_part = [&](const auto& use) {
    use(tokens.data(), tokens.size() * sizeof(int32_t));
    for (size_t i = 0; i < sequence.pages().size(); ++i) {
      cache.memory().Read(sequence.pages()[i], 0, page);
      // The last page may hold more than this text.
      const size_t used = std::min<size_t>(tokens.size() - i * kPageTokens, kPageTokens);
      if (used < kPageTokens) ClearBeyond(cache.layout(), used, page);
      use(page.data(), page.size());
    }
  };
  Sha256 hash;
  for_each_part([&](const void* data, size_t size) { hash.Update(data, size); });
  std::string header(kMagic);
  for (const auto& [name, value] : identity) header += fmt::format("{}: {}\n", name, value);
  header +=
      fmt::format("layout: {}\ntokens: {}\nsha256: {}\n\n", LayoutInWords(cache.layout()), tokens.size(), hash.Hex());
  PHSA_CHECK(header.size() <= kMaxHeader);
  NewFile file(path);
  file.Write(header);
  for_each_part([&](const void* data, size_t size) { file.Write(data, size); });
  file.Keep();
}

std::vector<int32_t> SavedTokens(const std::filesystem::path& path) {
  const MappedFile file(path);
  const Header header(file);
  const size_t count = header.Number("tokens");
  if (count > (file.size() - header.size()) / sizeof(int32_t)) ThrowInvalid("{}: cut; {}", file.path(), kReadAgain);
  std::vector<int32_t> tokens(count);
  std::memcpy(tokens.data(), file.data() + header.size(), count * sizeof(int32_t));
  return tokens;
}

void RestoreSequence(Sequence& sequence, const KvIdentity& identity, std::span<const int32_t> wanted,
                     const std::filesystem::path& path) {
  PHSA_CHECK(sequence.length() == 0);
  const MappedFile file(path);
  const Header header(file);
  KvIdentity expected = identity;
  expected.emplace_back("layout", LayoutInWords(sequence.cache().layout()));
  for (const auto& [name, value] : expected) {
    if (header.Value(name) != value) {
      ThrowInvalid("{}: made with another {}: {}; now it is {}; {}", file.path(), name,
                   Quoted(header.Value(name), kQuotedPath), Quoted(value, kQuotedPath),
                   "give another file, or remove this one");
    }
  }
  const size_t count = header.Number("tokens");
  const size_t page_bytes = sequence.cache().layout().page_bytes;
  // Bounded before it is multiplied: a header may claim anything.
  const size_t rest = file.size() - header.size();
  const size_t pages = PagesFor(count);
  if (count > rest / sizeof(int32_t) || pages > rest / page_bytes ||
      rest != count * sizeof(int32_t) + pages * page_bytes) {
    ThrowInvalid("{}: cut, or not all its own: {} bytes do not hold {} tokens; {}", file.path(), rest, count,
                 kReadAgain);
  }
  const uint8_t* const begin = file.data() + header.size();
  Sha256 hash;
  hash.Update(begin, rest);
  if (header.Value("sha256") != hash.Hex()) {
    ThrowInvalid("{}: its contents were changed or damaged; {}", file.path(), kReadAgain);
  }
  std::vector<int32_t> tokens(count);
  std::memcpy(tokens.data(), begin, count * sizeof(int32_t));
  sequence.Append(std::span(tokens).first(CommonPrefix(tokens, wanted)));
  const uint8_t* page = begin + count * sizeof(int32_t);
  for (const int32_t own : sequence.pages()) {
    sequence.cache().memory().Write(own, 0, {page, page_bytes});
    page += page_bytes;
  }
}

}  // namespace phsa
