// Where the tensors of a model lie in a GPU's memory, and what their rows are there: all that needs no device.
#ifndef PHSA_MODEL_CUDA_WEIGHT_LAYOUT_H_
#define PHSA_MODEL_CUDA_WEIGHT_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/carver.h"
#include "model/weights.h"
#include "ops/cuda/matrix_view.h"

namespace phsa::cuda {

// Matrices are bf16 or int8, the biases of products with a bf16 result are bf16, all else is f32. Null: the model has
// none.
struct DeviceLayer {
  const float* attention_norm = nullptr;  // [hidden]
  MatrixView qkv;                         // [(heads + 2 · kv_heads) · head_dim][hidden]
  const void* qkv_bias = nullptr;
  const float *q_norm = nullptr, *k_norm = nullptr;  // [head_dim]
  MatrixView o;                                      // [hidden][heads · head_dim]
  const float* o_bias = nullptr;
  const float* sinks = nullptr;                                     // [heads]
  const float *attention_post_norm = nullptr, *mlp_norm = nullptr;  // [hidden]
  MatrixView gate_up;                                               // [2 · intermediate][hidden]
  const void* gate_up_bias = nullptr;
  MatrixView down;  // [hidden][intermediate]
  const float* down_bias = nullptr;
  // In place of those, in a layer with experts.
  struct Experts {
    const float *router = nullptr, *router_bias = nullptr;  // [experts][hidden], [experts]
    const void* gate_up = nullptr;                          // bf16 [experts][2 · width][hidden]
    const float* gate_up_bias = nullptr;                    // [experts][2 · width]
    const void* down = nullptr;                             // bf16 [experts][hidden][width]
    const float* down_bias = nullptr;                       // [experts][hidden]
  } experts;
  const float* mlp_post_norm = nullptr;  // [hidden]
};

// What the two halves of a layer are multiplied by before they are added to the residual stream. Where a norm comes
// before, it has that in it.
float HalfScale(const ModelConfig& config, const float* post_norm);

// Rows of a tensor one behind the other: in their place, or on their way to it.
struct PackedRows {
  WeightType type = WeightType::kBf16;  // or kF32, kInt8
  uint8_t* data = nullptr;              // [rows][cols]; int8: codes plus 128
  uint16_t* scales = nullptr;           // int8: f16 [rows][cols / kWeightGroup]
  float* factors = nullptr;             // int8: [rows]
  float scale = 1;                      // of a vector: what its numbers are multiplied by on their way
};

// Bytes of one row, scales and factor included.
size_t PackedRowBytes(WeightType type, int64_t cols);

// The memory of all weights. Products that read the same x lie side by side. With WeightsMode::kInt8 the matrices of
// the layers are int8; the embedding, which is looked up, and the lm_head, which is one product, stay bf16, a router
// f32.
class WeightLayout {
 public:
  // `memory`: aligned to 256; null where nothing but sizes are wanted.
  WeightLayout(const ModelSource& source, WeightsMode mode, uint8_t* memory);

  std::map<std::string, PackedRows> places;  // by the tensors' names
  std::vector<DeviceLayer> layers;
  size_t bytes = 0;
  size_t largest_int8 = 0;  // elements of the largest int8 matrix; 0: there is none

 private:
  // A tensor of a matrix, or of a vector, which has one column.
  struct Part {
    std::string name;
    int64_t rows;
  };
  // Memory for these tensors, one behind the other; null where the model has none of them.
  MatrixView Take(const std::vector<Part>& parts, int64_t cols, WeightType type);
  DeviceLayer::Experts TakeExperts(const ModelConfig& config, int32_t layer);

  Carver carver_;
  std::set<std::string> names_;  // of the tensors that the model has
};

// What an adapter adds to a matrix; a rank of 0: nothing.
struct AdapterDelta {
  std::vector<float> a, b;  // [rank][cols], [rows][rank]
  size_t rank = 0;
  float scale = 0;
};
AdapterDelta ReadDelta(const ModelSource& source, const std::string& name);

// Row `row` of a matrix, with what an adapter adds to it, as row `at` of `to`. int8: the codes and scales of a Q8_0
// file stay as they are where nothing is added; all else is rounded as on the CPU.
void PackRow(const ModelTensor& tensor, const ModelConfig& config, const AdapterDelta& delta, int64_t row,
             const PackedRows& to, int64_t at);

}  // namespace phsa::cuda

#endif  // PHSA_MODEL_CUDA_WEIGHT_LAYOUT_H_
