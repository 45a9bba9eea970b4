// A small random model in memory, for tests that need one without files.
#ifndef PHSA_TESTS_FAKE_MODEL_H_
#define PHSA_TESTS_FAKE_MODEL_H_

#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "io/model_source.h"

namespace phsa {

class FakeModel : public ModelSource {
 public:
  explicit FakeModel(const std::string& architecture = "qwen3") {
    path_ = "fake";
    format_ = "none";
    ModelConfig& c = config_;
    c.architecture = architecture;
    c.name = "fake";
    c.num_layers = 2;
    c.hidden = 64;
    c.intermediate = 96;
    c.vocab_size = 101;
    c.context = 4096;
    c.num_q_heads = 4;
    c.num_kv_heads = 2;
    c.head_dim = 64;
    c.tied_embeddings = true;
    const int64_t q = int64_t{c.num_q_heads} * c.head_dim, kv = int64_t{c.num_kv_heads} * c.head_dim;
    Add("model.embed_tokens.weight", {c.vocab_size, c.hidden});
    Add("model.norm.weight", {c.hidden});
    for (int32_t i = 0; i < c.num_layers; ++i) {
      const std::string at = "model.layers." + std::to_string(i) + ".";
      Add(at + "input_layernorm.weight", {c.hidden});
      Add(at + "post_attention_layernorm.weight", {c.hidden});
      Add(at + "self_attn.q_proj.weight", {q, c.hidden});
      Add(at + "self_attn.k_proj.weight", {kv, c.hidden});
      Add(at + "self_attn.v_proj.weight", {kv, c.hidden});
      Add(at + "self_attn.o_proj.weight", {c.hidden, q});
      Add(at + "mlp.gate_proj.weight", {c.intermediate, c.hidden});
      Add(at + "mlp.up_proj.weight", {c.intermediate, c.hidden});
      Add(at + "mlp.down_proj.weight", {c.hidden, c.intermediate});
      if (architecture == "qwen3") {
        Add(at + "self_attn.q_norm.weight", {c.head_dim});
        Add(at + "self_attn.k_norm.weight", {c.head_dim});
      }
    }
  }

  void Add(const std::string& name, std::vector<int64_t> shape) {
    size_t count = 1;
    for (const int64_t n : shape) count *= static_cast<size_t>(n);
    std::vector<float>& values = data_.emplace_back(count);
    std::normal_distribution<float> normal(shape.size() == 1 ? 1.0f : 0.0f, 0.15f);
    for (float& value : values) value = normal(random_);
    Tensor& tensor = tensors_[name];
    tensor.name = name;
    tensor.type = TensorType::kF32;
    tensor.shape = std::move(shape);
    tensor.data = reinterpret_cast<const uint8_t*>(values.data());
    tensor.bytes = count * sizeof(float);
    tensor.file = "fake";
  }
  void Remove(const std::string& name) { tensors_.erase(name); }
  ModelConfig& config_for_test() { return config_; }

  const Tensor* Find(std::string_view name) const override {
    const auto it = tensors_.find(std::string(name));
    return it == tensors_.end() ? nullptr : &it->second;
  }
  std::vector<const Tensor*> Tensors() const override {
    std::vector<const Tensor*> all;
    for (const auto& [name, tensor] : tensors_) all.push_back(&tensor);
    return all;
  }
  void Release(const Tensor&) const override {}
  std::vector<std::pair<std::string, std::string>> Metadata() const override { return {}; }

 private:
  std::mt19937 random_{7};
  std::deque<std::vector<float>> data_;
  std::map<std::string, Tensor> tensors_;
};

// A text for it.
inline std::vector<int32_t> Tokens(size_t count, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 101);
  return tokens;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace phsa

#endif  // PHSA_TESTS_FAKE_MODEL_H_
