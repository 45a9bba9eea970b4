// A LoRA adapter in PEFT's form: adapter_config.json and adapter_model.safetensors, and beside them phsa.json with the
// attention's settings, where it was trained with some.
#ifndef PHSA_IO_ADAPTER_H_
#define PHSA_IO_ADAPTER_H_

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "io/tensor.h"

namespace phsa {

// What is added to a matrix W: scale · B · A.
struct LowRankTensors {
  Tensor a;  // [rank][cols of W]
  Tensor b;  // [rows of W][rank], the rows in Hugging Face's order
  float scale = 1;
  int64_t rank() const { return a.shape[0]; }
};

// A or B as numbers, in the tensor's shape.
std::vector<float> ReadLowRank(const Tensor& tensor);

class Adapter {
 public:
  // The model that it is for: the shape of a tensor by Hugging Face's name, empty where there is none.
  struct Base {
    std::string path;
    int32_t num_layers = 0;
    std::function<std::vector<int64_t>(const std::string& name)> shape;
  };
  // Reads and checks everything but the numbers. Throws phsa::Error: what is not in PEFT's form, what does not fit the
  // model, and by its name every feature of PEFT's that would compute something else than W + scale · B · A.
  static std::unique_ptr<Adapter> Open(const std::filesystem::path& folder, const Base& base);

  const std::string& path() const { return path_; }
  const std::string& base_model() const { return base_model_; }        // as the adapter names it; may be empty
  const std::string& phsa_settings() const { return phsa_settings_; }  // phsa.json's text; empty: there is none
  uint64_t file_bytes() const { return file_->size(); }
  // By the name of the model's tensor, "model.layers.0.self_attn.q_proj.weight"; null: it stays as it is.
  const LowRankTensors* Find(std::string_view name) const;
  void Release() const { file_->Release(file_->data(), file_->size()); }  // its pages may leave memory
  const std::map<std::string, LowRankTensors, std::less<>>& matrices() const { return matrices_; }
  std::string Text() const;  // "rank 16, 210 matrices, f32"

 private:
  Adapter() = default;
  void ReadTensors(const Base& base);
  std::string path_, base_model_, phsa_settings_;
  std::unique_ptr<MappedFile> file_;  // the tensors point into it and at its path
  std::map<std::string, LowRankTensors, std::less<>> matrices_;
};

// Whether the folder holds an adapter, for messages to whoever gave it in place of a model.
bool IsAdapterFolder(const std::filesystem::path& folder);

}  // namespace phsa

#endif  // PHSA_IO_ADAPTER_H_
