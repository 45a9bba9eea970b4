// A tensor as it lies in a file, and how its elements become numbers.
#ifndef PHSA_IO_TENSOR_H_
#define PHSA_IO_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace phsa {

enum class TensorType : uint8_t {
  kF32,
  kF16,
  kBf16,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kQ2_K,
  kQ3_K,
  kIq4Nl,
  kIq4Xs,
  kMxfp4,
  kU8  // bytes that a safetensors file gives no meaning
};
inline constexpr int kTensorTypes = 17;

const char* TensorTypeName(TensorType type);       // "f32" … "mxfp4"
int32_t TensorTypeBlockElements(TensorType type);  // 1, 32 or 256
size_t TensorTypeBlockBytes(TensorType type);

// A view into a mapped file; valid as long as its ModelSource.
struct Tensor {
  std::string name;  // as in the file
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;  // outermost first: a matrix is [rows, cols]; cols is a whole number of the type's blocks
  const uint8_t* data = nullptr;  // at any address: a file aligns nothing
  // Of MXFP4 in safetensors, [shape without its last, blocks of a row]: a byte for each block; `data` then has the 16
  // bytes of a block each, with elements 2i and 2i + 1 in byte i. Null: everything else, whose blocks lie whole.
  const uint8_t* scales = nullptr;
  size_t bytes = 0;
  uint64_t file_offset = 0;  // for messages
  const char* file = "";     // path, for messages
};

// `count` elements of a tensor from element `first` on, both whole numbers of blocks, as blocks of its type: where they
// lie, or put together in `scratch`.
const uint8_t* Blocks(const Tensor& tensor, int64_t first, int64_t count, std::vector<uint8_t>& scratch);

// `count` elements (a whole number of blocks) from `data`, bit for bit as the Python package gguf dequantises them.
void Dequantize(TensorType type, const uint8_t* data, int64_t count, float* out);

// The codes of Q4_0, Q4_1, Q5_0 and Q5_1, so that repacking rounds nothing: element i of group g = i / 32 is
// scales[g] · codes[i] + mins[g]. False (and nothing written) for all other types.
bool UnpackCodes(TensorType type, const uint8_t* data, int64_t count, uint8_t* codes, float* scales, float* mins);

// Q4_K and Q5_K likewise, with scales and minima of 6 bits and, for each 256, two factors in f16:
// factors[i / 256] · scales[g] · codes[i] + min_factors[i / 256] · mins[g].
bool UnpackSuper(TensorType type, const uint8_t* data, int64_t count, uint8_t* codes, uint16_t* factors,
                 uint16_t* min_factors, uint8_t* scales, uint8_t* mins);

// The types whose blocks are codes of up to 8 bits, or name such codes in a table, likewise: scales[g] · codes[i].
// Q8_0, IQ4_NL, IQ4_XS and MXFP4; false for all others.
bool UnpackInt8(TensorType type, const uint8_t* data, int64_t count, int8_t* codes, float* scales);

// Q6_K likewise, with a scale for each 16 and a factor for each 256: factors[i / 256] · scales[i / 16] · (codes[i] -
// 32).
bool UnpackInt6(TensorType type, const uint8_t* data, int64_t count, uint8_t* codes, uint16_t* factors, int8_t* scales);

}  // namespace phsa

#endif  // PHSA_IO_TENSOR_H_
