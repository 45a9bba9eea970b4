// Matrix products: y = x · Wᵀ + bias, for one row (decode) and for many (prefill), on weights packed once at load.
//
// What a row of y holds depends on that row of x and on W alone: not on how many rows there are, not on the threads, to
// the last bit, on one machine. Chunks, batches and thread counts then change nothing that a model computes.
#ifndef PHSA_OPS_LINEAR_H_
#define PHSA_OPS_LINEAR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "phsa/c.h"

namespace phsa {

// How weights lie in memory. int8 and int4 have a scale for each group of 32 columns (int4: and a minimum), int6 one
// for each 16; its codes are 0 to 63 and stand for themselves less 32.
enum class WeightType : uint8_t { kF32, kBf16, kInt8, kInt4, kInt6 };

// What x is rounded to before it is multiplied. f32 weights take f32, bf16 weights bf16; int8 and int4 weights take
// any:
//   int8: one scale for each row and group of 32 columns; the sums within a group are exact integers.
//   bf16: the codes of the weights are exact in bf16; the sums within a group are f32.
//   f32:  for CPUs that have neither instruction.
// int6 takes bf16 and int8, where the CPU has both (ProductSupport::int6).
// The sums over groups are f32 and in order.
enum class ActivationType : uint8_t { kF32, kBf16, kInt8 };

const char* WeightTypeName(WeightType type);  // "f32", "bf16", "int8", "int4", "int6"

inline constexpr int32_t kWeightGroup = 32;
inline constexpr int32_t kInt6Group = 16;  // columns of an int6 scale
inline constexpr int32_t kPanelRows = 16;  // rows that lie interleaved

// A row of int8 weights as it is stored, here and on a GPU: w = factor · scale · code, the scale that of the column's
// group, in f16, the factor a power of two of the row that keeps its scales far from both ends of f16's range. Both
// return the factor. Values that are no finite numbers become 0.
float QuantizeInt8(const float* values, int32_t cols, int8_t* codes, uint16_t* scales);  // [cols], [cols], [groups]
// Where the codes are known: [groups], [groups].
float RoundInt8Scales(const float* scales, int32_t groups, uint16_t* rounded);

// W, [rows][cols]. Rows of different panels (row / kPanelRows) may be set by different threads at once.
class Matrix {
 public:
  Matrix() = default;
  Matrix(Matrix&&) = default;
  Matrix& operator=(Matrix&&) = default;
  Matrix(WeightType type, int32_t rows, int32_t cols);  // zero; throws Error(PHSA_OUT_OF_MEMORY)
  static size_t Bytes(WeightType type, int32_t rows, int32_t cols);
  // f32 or bf16 as a mapped file has them, [rows][cols] at any address: nothing is copied, and `data` must live as
  // long. Products have the same bits; rows are interleaved while they are multiplied, so that one row of x takes
  // longer.
  static Matrix OfFile(WeightType type, int32_t rows, int32_t cols, const uint8_t* data);

  void SetRow(int32_t row, const float* values);  // [cols]; f32, bf16: rounded; int8: quantised. Not for int4, int6.
  void SetRowInt8(int32_t row, const int8_t* codes, const float* scales);                      // [cols], [groups]
  void SetRowInt4(int32_t row, const uint8_t* codes, const float* scales, const float* mins);  // [cols], [groups] × 2
  void SetRowInt6(int32_t row, const uint8_t* codes, const float* scales);  // [cols], [cols / 16], rounded up
  void GetRow(int32_t row, float* values) const;  // [cols]: what the products multiply, as f32

  WeightType type() const { return type_; }
  int32_t rows() const { return rows_; }
  int32_t cols() const { return cols_; }
  size_t bytes() const;
  const uint8_t* panels() const;  // how they lie: cpu/kernels.h; not of a file
  bool of_file() const { return file_ != nullptr; }
  void Interleave(int32_t first_panel, int32_t count, uint8_t* panels) const;  // of a file
  const float* factors() const;                                                // [rows], int8, int4 and int6

 private:
  uint8_t* PanelOf(int32_t row) const;
  void StoreInt8(int32_t row, const int8_t* codes, const uint16_t* scales, float factor);
  WeightType type_ = WeightType::kF32;
  int32_t rows_ = 0, cols_ = 0;
  std::shared_ptr<uint8_t> data_;  // small ones share a piece of memory
  const uint8_t* file_ = nullptr;
};

// One product of a call: the calls of a layer that read the same x (q, k, v; gate, up) go together.
struct LinearOutput {
  const Matrix* weights = nullptr;  // all of one call have the same cols and type
  const float* bias = nullptr;      // [weights->rows()] or null
  float* y = nullptr;               // [m][weights->rows()]
  int64_t y_stride = 0;
};

// Bytes of workspace, aligned to 64, that a call with up to m rows of x, `cols` columns and this many threads needs;
// `of_file`: with matrices of files.
size_t LinearWorkspaceSize(WeightType weights, ActivationType activations, int32_t m, int32_t cols, int32_t num_threads,
                           bool of_file = false);

// x [m][cols], f32.
void Linear(const float* x, int64_t x_stride, int32_t m, ActivationType activations,
            std::span<const LinearOutput> outputs, void* workspace, size_t workspace_size,
            const phsa_executor& executor);

// What this CPU multiplies fastest: whether it has bf16 products, and 8-bit integer ones; and both with int6 weights.
struct ProductSupport {
  bool bf16 = false, int8 = false, int6 = false;
};
ProductSupport FastProducts();
// Whether there is a product of these two on this CPU.
bool HasProduct(WeightType weights, ActivationType activations);

}  // namespace phsa

#endif  // PHSA_OPS_LINEAR_H_
