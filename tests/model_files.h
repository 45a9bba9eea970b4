// Small model files for tests, right and wrong ones.
#ifndef PHSA_TESTS_MODEL_FILES_H_
#define PHSA_TESTS_MODEL_FILES_H_

#include <stdlib.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace phsa {

// A folder that is gone with all that is in it when the test ends.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "phsa-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path Write(const std::string& name, std::string_view content) const {
    std::filesystem::path path = path_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }

 private:
  std::filesystem::path path_;
};

template <class T>
std::string Bytes(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Writes GGUF byte by byte, so that every part of it can be made wrong.
class GgufWriter {
 public:
  enum Type : uint32_t { kUint8, kInt8, kUint16, kInt16, kUint32, kInt32, kFloat32, kBool, kString, kArray, kUint64 };

  struct TensorEntry {
    std::string name;
    std::vector<uint64_t> sizes;  // innermost first, as in the file
    uint32_t type;
    std::string data;
    std::optional<uint64_t> offset;  // where it claims to lie; by itself, after the one before
  };

  static std::string Text(std::string_view text) { return Bytes(uint64_t{text.size()}) + std::string(text); }

  void Add(std::string_view key, uint32_t type, std::string_view value) {
    metadata += Text(key) + Bytes(type) + std::string(value);
    ++metadata_count;
  }
  void AddInt(std::string_view key, uint32_t value) { Add(key, kUint32, Bytes(value)); }
  void AddFloat(std::string_view key, float value) { Add(key, kFloat32, Bytes(value)); }
  void AddBool(std::string_view key, bool value) { Add(key, kBool, Bytes(uint8_t{value})); }
  void AddText(std::string_view key, std::string_view value) { Add(key, kString, Text(value)); }
  void AddTexts(std::string_view key, const std::vector<std::string>& values) {
    std::string out = Bytes(uint32_t{kString}) + Bytes(uint64_t{values.size()});
    for (const std::string& value : values) out += Text(value);
    Add(key, kArray, out);
  }
  void AddInts(std::string_view key, const std::vector<int32_t>& values) {
    std::string out = Bytes(uint32_t{kInt32}) + Bytes(uint64_t{values.size()});
    for (const int32_t value : values) out += Bytes(value);
    Add(key, kArray, out);
  }
  void AddTensor(std::string name, std::vector<uint64_t> sizes, uint32_t type, std::string data) {
    tensors.push_back({std::move(name), std::move(sizes), type, std::move(data), std::nullopt});
  }

  std::string Finish() const {
    std::string out = "GGUF" + Bytes(version) + Bytes(uint64_t{tensors.size()}) + Bytes(metadata_count) + metadata;
    uint64_t offset = 0;
    std::string data;
    for (const TensorEntry& tensor : tensors) {
      out += Text(tensor.name) + Bytes(static_cast<uint32_t>(tensor.sizes.size()));
      for (const uint64_t size : tensor.sizes) out += Bytes(size);
      out += Bytes(tensor.type) + Bytes(tensor.offset.value_or(offset));
      data += tensor.data;
      data.resize((data.size() + alignment - 1) / alignment * alignment);
      offset = data.size();
    }
    out.resize((out.size() + alignment - 1) / alignment * alignment);
    // The last tensor has no padding: a cut anywhere loses something.
    if (!tensors.empty()) data.resize(data.size() - Padding(tensors.back().data.size()));
    return out + data;
  }

  uint32_t version = 3;
  uint64_t alignment = 32;
  std::string metadata;
  uint64_t metadata_count = 0;
  std::vector<TensorEntry> tensors;

 private:
  uint64_t Padding(uint64_t size) const { return (alignment - size % alignment) % alignment; }
};

// The numbers that GGUF has for its types.
inline constexpr uint32_t kGgufF32 = 0, kGgufF16 = 1, kGgufQ4_0 = 2, kGgufQ8_0 = 8, kGgufQ4_K = 12, kGgufBf16 = 30;

// A whole small model: width 32, 2 query heads and 1 KV head of 16, 8 tokens, one layer.
inline GgufWriter SmallGguf(const std::string& architecture = "llama") {
  GgufWriter gguf;
  gguf.AddText("general.architecture", architecture);
  gguf.AddText("general.name", "Small");
  gguf.AddInt(architecture + ".block_count", 1);
  gguf.AddInt(architecture + ".context_length", 128);
  gguf.AddInt(architecture + ".embedding_length", 32);
  gguf.AddInt(architecture + ".feed_forward_length", 64);
  gguf.AddInt(architecture + ".attention.head_count", 2);
  gguf.AddInt(architecture + ".attention.head_count_kv", 1);
  gguf.AddFloat(architecture + ".attention.layer_norm_rms_epsilon", 1e-5f);
  gguf.AddFloat(architecture + ".rope.freq_base", 50000);
  gguf.AddText("tokenizer.ggml.model", "gpt2");
  gguf.AddText("tokenizer.ggml.pre", "smollm");
  gguf.AddTexts("tokenizer.ggml.tokens", {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "c", "abc"});
  gguf.AddInts("tokenizer.ggml.token_type", {3, 3, 3, 1, 1, 1, 1, 1});
  gguf.AddTexts("tokenizer.ggml.merges", {"a b", "ab c"});
  gguf.AddInt("tokenizer.ggml.bos_token_id", 1);
  gguf.AddInt("tokenizer.ggml.eos_token_id", 2);
  gguf.AddBool("tokenizer.ggml.add_bos_token", false);
  gguf.AddText("tokenizer.chat_template", "{{ messages }}");
  gguf.AddTensor("token_embd.weight", {32, 8}, kGgufQ8_0, std::string(8 * 34, '\1'));
  gguf.AddTensor("blk.0.attn_norm.weight", {32}, kGgufF32, std::string(32 * 4, '\2'));
  gguf.AddTensor("blk.0.attn_q.weight", {32, 32}, kGgufQ4_0, std::string(32 * 18, '\3'));
  gguf.AddTensor("output_norm.weight", {32}, kGgufF16, std::string(32 * 2, '\4'));
  return gguf;
}

// A safetensors file of this header and data.
inline std::string Safetensors(std::string_view header, std::string_view data) {
  return Bytes(uint64_t{header.size()}) + std::string(header) + std::string(data);
}

}  // namespace phsa

#endif  // PHSA_TESTS_MODEL_FILES_H_
