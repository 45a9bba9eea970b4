// The weights of a decoder, packed for this CPU. A reader has the whole model here: shapes beside every name.
#ifndef PHSA_MODEL_WEIGHTS_H_
#define PHSA_MODEL_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "io/model_source.h"
#include "ops/linear.h"
#include "phsa/threads.h"

namespace phsa {

// --weights. auto keeps what the file has: 4-bit weights stay 4-bit, those of 5 and 6 bits too where that is fast,
// others of up to 8 bits become int8, f16 and bf16 become bf16, and multiplies them with the most precise activations
// that are fast on this CPU. int8 packs everything at 8 bits or less and multiplies integers.
enum class WeightsMode : uint8_t { kAuto, kF32, kBf16, kInt8 };
WeightsMode WeightsModeFromName(std::string_view name);
const char* Name(WeightsMode mode);

using Vector = std::vector<float>;
struct TensorName;

// What an adapter adds to products that read one x: y[output] += b · (a · x)[first …]. Beside the weights and not
// merged into them, so that 4-bit ones stay as they are (docs/adapters.md has the numbers).
struct LowRank {
  struct Part {
    size_t output = 0;  // which of the products: of q, k and v, k is 1
    int32_t first = 0;  // row of a
    Matrix b;           // [rows of the product][rank], with the adapter's scale in it
  };
  Matrix a;  // [all ranks][cols]; no rows: nothing is added
  std::vector<Part> parts;
};

// What the products of an adapter need room for; nothing without one.
struct AdapterSizes {
  int32_t rows = 0;         // the most that a LowRank::a has
  std::set<int32_t> ranks;  // columns of the LowRank::Part::b
};

struct LayerWeights {
  Vector attention_norm;          // [hidden]
  Matrix q, k, v;                 // [heads · head_dim][hidden], [kv_heads · head_dim][hidden] × 2
  Vector q_bias, k_bias, v_bias;  // empty: none
  Vector q_norm, k_norm;          // [head_dim] or empty
  Matrix o;                       // [hidden][heads · head_dim]
  Vector o_bias;
  Vector sinks;                // [heads] or empty
  Vector attention_post_norm;  // [hidden] or empty
  Vector mlp_norm;             // [hidden]
  Matrix gate, up;             // [intermediate][hidden]
  Matrix down;                 // [hidden][intermediate]
  // In place of those three, in a layer with experts.
  Matrix router;  // [experts][hidden], f32
  Vector router_bias;
  struct Expert {
    Matrix gate, up;                       // [expert_width][hidden]
    Matrix down;                           // [hidden][expert_width]
    Vector gate_bias, up_bias, down_bias;  // empty: none
  };
  std::vector<Expert> experts;
  Vector gate_bias, up_bias, down_bias;
  Vector mlp_post_norm;  // [hidden] or empty
  LowRank qkv_adapter, o_adapter, gate_up_adapter, down_adapter;
};

// What activations are rounded to where they meet 4- and 8-bit weights. int8 is faster and coarser, and where it is
// used decides what it costs: on SmolLM2, 96.7 % of the most likely tokens stay the same with int8 everywhere; the q, k
// and v products and the logits cause most of that, the MLP's gate least.
struct Activations {
  ActivationType qkv = ActivationType::kF32, gate_up = ActivationType::kF32, other = ActivationType::kF32,
                 logits = ActivationType::kF32;
  // For the 8-bit weights of a layer in place of `other` and `qkv`: bf16 takes twice as long to unpack there.
  ActivationType layer_int8 = ActivationType::kF32;
};

struct Weights {
  Matrix embedding;   // [vocab][hidden]
  Matrix lm_head;     // [vocab][hidden]; no rows: the embedding is used
  Vector final_norm;  // [hidden]
  std::vector<LayerWeights> layers;
  Activations activations;
  AdapterSizes adapter;

  const Matrix& logits() const { return lm_head.rows() > 0 ? lm_head : embedding; }
};

// A tensor that the model needs, as it lies in the file.
struct ModelTensor {
  std::string name;  // Hugging Face's
  const Tensor* tensor = nullptr;
  int64_t rows = 0, cols = 0;  // of a matrix; a vector has rows = 0
  int64_t first_row = 0;       // of several that lie in one tensor
  bool turned_heads = false;   // rows of q and k, whose order in a head is that of their RoPE
  bool from_one = false;       // a vector to which 1 is to be added
  int64_t row_step = 1;        // 2: every other row is another tensor's
  int64_t across = 0;          // not 0: the tensor has matrices of [cols][across], and our rows are their columns
  float divisor = 1;           // of a vector
};
// What one expert's gate, up or down is called, as if each had a tensor of its own; ".weight" or ".bias" follow.
std::string ExpertTensor(int32_t layer, int32_t expert, TensorName name);
// All of them. Throws phsa::Error for missing tensors and wrong shapes.
std::vector<ModelTensor> ModelTensors(const ModelSource& source);
// The row of the file (of a vector: the element) that is our row. Ours are Hugging Face's, but for q and k of families
// whose RoPE turns neighbours or a part of a head: there the pairs that it turns lie half a head apart.
int64_t FileRow(const ModelTensor& tensor, const ModelConfig& config, int64_t row);
// Our row `row` of a matrix as blocks of its type: where it lies, or put together in `scratch`.
const uint8_t* RowBlocks(const ModelTensor& tensor, const ModelConfig& config, int64_t row,
                         std::vector<uint8_t>& scratch);
// Hugging Face's row of a q or k projection, in its own files of the family, that is our row: what adapters count by.
int64_t HuggingFaceRow(const ModelConfig& config, std::string_view name, int64_t row);
// A vector in our order.
std::vector<float> ReadVector(const ModelTensor& tensor, const ModelConfig& config);
// The same, as the model uses it.
std::vector<float> UsedVector(const ModelTensor& tensor, const ModelConfig& config);

// What the model has beyond Llama's steps, in words ("sliding windows, GELU"); empty: nothing.
std::string SpecialSteps(const ModelConfig& config);

// How a tensor of this type is packed.
WeightType PackedType(TensorType file, WeightsMode mode);

// Bytes that the packed weights will take, and the words for it ("int4, int8"); reads no data.
struct WeightsSize {
  uint64_t bytes = 0;
  uint64_t file_bytes = 0;  // of experts that the file has as they are multiplied
  std::string types;
  AdapterSizes adapter;
};
// `experts_in_file`: experts that the file has as they are multiplied, f32 or bf16 row behind row, are not copied: the
// system reads what a token needs of them, and may drop it again. One row of x then takes up to four times as long.
WeightsSize SizeOfWeights(const ModelSource& source, WeightsMode mode, bool experts_in_file = false);

uint64_t AdapterBytes(const Adapter& adapter, WeightsMode mode, size_t num_layers);  // packed
// Weights of which nothing is there but what this adapter adds.
Weights ReadAdapter(const Adapter& adapter, const ModelConfig& config, WeightsMode mode);
// What the adapter of `source` adds, in place of what another one added before; without one, nothing is added.
void SetAdapter(const ModelSource& source, WeightsMode mode, Weights& weights);

// Reads and packs everything; with `experts_in_file`, `source` must live as long. Throws phsa::Error for missing
// tensors and wrong shapes. `progress` gets the share done and returns false to stop: then the result is empty.
using LoadProgress = std::function<bool(double share)>;
Weights LoadWeights(const ModelSource& source, WeightsMode mode, ThreadPool& threads, const LoadProgress& progress,
                    bool experts_in_file = false);

}  // namespace phsa

#endif  // PHSA_MODEL_WEIGHTS_H_
