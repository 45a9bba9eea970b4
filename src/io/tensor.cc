// The block formats of GGUF. Scales are f16; a block's codes are stored low halves first: byte i of a 4-bit block of n
// holds the codes of elements i and i + n / 2.
#include "io/tensor.h"

#include <bit>
#include <cstring>

#include "base/dtype.h"
#include "base/errors.h"

namespace phsa {
namespace {

constexpr int kSmall = 32;   // elements of a block of Q4_0 … Q8_0, and of a sub-block of Q4_K and Q5_K
constexpr int kSuper = 256;  // elements of a block of Q4_K … Q6_K

struct TypeTraits {
  const char* name;
  int32_t block_elements;
  size_t block_bytes;
};

constexpr TypeTraits kTraits[] = {
    {"f32", 1, 4},
    {"f16", 1, 2},
    {"bf16", 1, 2},
    {"q4_0", kSmall, 2 + 16},
    {"q4_1", kSmall, 2 + 2 + 16},
    {"q5_0", kSmall, 2 + 4 + 16},
    {"q5_1", kSmall, 2 + 2 + 4 + 16},
    {"q8_0", kSmall, 2 + 32},
    {"q4_k", kSuper, 2 + 2 + 12 + 128},
    {"q5_k", kSuper, 2 + 2 + 12 + 32 + 128},
    {"q6_k", kSuper, 128 + 64 + 16 + 2},
};

const TypeTraits& Traits(TensorType type) {
  const auto index = static_cast<size_t>(type);
  PHSA_CHECK(index < std::size(kTraits));
  return kTraits[index];
}

template <class T>
T Load(const uint8_t* data) {
  T value;
  std::memcpy(&value, data, sizeof(value));
  return value;
}

float LoadF16(const uint8_t* data) { return F32FromF16(Load<uint16_t>(data)); }

// F32FromF16 without branches, so that the loop over a tensor becomes SIMD.
void DequantizeF16(const uint8_t* __restrict data, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = Load<uint16_t>(data + 2 * i);
    const uint32_t exponent = bits & 0x7c00u;
    const uint32_t shifted = (bits & 0x7fffu) << 13;
    const uint32_t rebias = exponent == 0x7c00u ? 224u << 23 : 112u << 23;
    const uint32_t denormal =
        std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(bits & 0x3ffu)) * 0x1p-24f);
    const uint32_t magnitude = exponent == 0 ? denormal : shifted + rebias;
    out[i] = std::bit_cast<float>(magnitude | ((bits & 0x8000u) << 16));
  }
}

void DequantizeBf16(const uint8_t* __restrict data, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] = F32FromBf16(Load<uint16_t>(data + 2 * i));
}

// The 4-bit codes of one block of n elements.
template <int n>
void UnpackNibbles(const uint8_t* __restrict packed, uint8_t* __restrict codes) {
  for (int i = 0; i < n / 2; ++i) codes[i] = packed[i] & 0x0f;
  for (int i = 0; i < n / 2; ++i) codes[i + n / 2] = packed[i] >> 4;
}

// The fifth bit of element i is bit i of `high`.
void UnpackFives(const uint8_t* __restrict packed, uint32_t high, uint8_t* __restrict codes) {
  UnpackNibbles<kSmall>(packed, codes);
  for (int i = 0; i < kSmall; ++i) codes[i] = static_cast<uint8_t>(codes[i] | ((high >> i & 1u) << 4));
}

// scale · (code − zero). Small integers are exact in f32: the only rounding is the product's.
template <int n>
void Scale(const uint8_t* __restrict codes, float scale, int zero, float* __restrict out) {
  for (int i = 0; i < n; ++i) out[i] = scale * static_cast<float>(codes[i] - zero);
}

template <int n>
void ScaleAndShift(const uint8_t* __restrict codes, float scale, float shift, float* __restrict out) {
  for (int i = 0; i < n; ++i) out[i] = scale * static_cast<float>(codes[i]) + shift;
}

// The head of a block of Q4_K and Q5_K: two f16 factors and, for each of eight sub-blocks, a 6-bit scale and a 6-bit
// minimum in 12 bytes. The low six bits of bytes 0 to 3 are the scales, of 4 to 7 the minima of the first four; those
// of the last four have their low halves in bytes 8 to 11 and their two high bits on top of bytes 0 to 7.
constexpr size_t kSuperHead = 2 + 2 + 12;

void UnpackSuperHead(const uint8_t* block, float* scales, float* mins) {
  const float scale = LoadF16(block);
  const float min = LoadF16(block + 2);
  const uint8_t* packed = block + 4;
  for (int i = 0; i < 4; ++i) {
    const int high_scale = (packed[8 + i] & 0x0f) | (packed[i] >> 6 << 4);
    const int high_min = (packed[8 + i] >> 4) | (packed[4 + i] >> 6 << 4);
    scales[i] = scale * static_cast<float>(packed[i] & 0x3f);
    scales[4 + i] = scale * static_cast<float>(high_scale);
    mins[i] = -(min * static_cast<float>(packed[4 + i] & 0x3f));
    mins[4 + i] = -(min * static_cast<float>(high_min));
  }
}

void DequantizeQ4K(const uint8_t* block, float* out) {
  float scales[8], mins[8];
  uint8_t codes[2 * kSmall];
  UnpackSuperHead(block, scales, mins);
  for (int pair = 0; pair < 4; ++pair) {
    UnpackNibbles<2 * kSmall>(block + kSuperHead + pair * kSmall, codes);
    ScaleAndShift<kSmall>(codes, scales[2 * pair], mins[2 * pair], out + pair * 64);
    ScaleAndShift<kSmall>(codes + kSmall, scales[2 * pair + 1], mins[2 * pair + 1], out + pair * 64 + kSmall);
  }
}

// As Q4_K, with a fifth bit: that of element i of sub-block s is bit s of byte i.
void DequantizeQ5K(const uint8_t* block, float* out) {
  const uint8_t* high = block + kSuperHead;
  float scales[8], mins[8];
  uint8_t codes[2 * kSmall];
  UnpackSuperHead(block, scales, mins);
  for (int pair = 0; pair < 4; ++pair) {
    UnpackNibbles<2 * kSmall>(high + kSmall + pair * kSmall, codes);
    for (int half = 0; half < 2; ++half) {
      const int sub = 2 * pair + half;
      uint8_t* sub_codes = codes + half * kSmall;
      for (int i = 0; i < kSmall; ++i) {
        sub_codes[i] = static_cast<uint8_t>(sub_codes[i] | ((high[i] >> sub & 1) << 4));
      }
      ScaleAndShift<kSmall>(sub_codes, scales[sub], mins[sub], out + sub * kSmall);
    }
  }
}

// Two halves of 128 elements. In each, 64 bytes of low nibbles (elements 0 to 63, then 64 to 127), 32 bytes with the
// two high bits of elements i, i + 32, i + 64 and i + 96, and one 8-bit scale for every 16.
void DequantizeQ6K(const uint8_t* block, float* out) {
  const float scale = LoadF16(block + 208);
  uint8_t codes[kSuper / 2];
  for (int half = 0; half < 2; ++half) {
    const uint8_t* high = block + 128 + half * 32;
    UnpackNibbles<kSuper / 2>(block + half * 64, codes);
    for (int part = 0; part < 4; ++part) {
      for (int i = 0; i < 32; ++i) {
        codes[part * 32 + i] = static_cast<uint8_t>(codes[part * 32 + i] | ((high[i] >> (2 * part) & 3) << 4));
      }
    }
    for (int group = 0; group < 8; ++group) {
      const auto group_scale = static_cast<int8_t>(block[192 + half * 8 + group]);
      Scale<16>(codes + group * 16, scale * static_cast<float>(group_scale), 32, out + half * 128 + group * 16);
    }
  }
}

void DequantizeBlock(TensorType type, const uint8_t* block, float* out) {
  uint8_t codes[kSmall];
  switch (type) {
    case TensorType::kQ4_0:
      UnpackNibbles<kSmall>(block + 2, codes);
      Scale<kSmall>(codes, LoadF16(block), 8, out);
      return;
    case TensorType::kQ4_1:
      UnpackNibbles<kSmall>(block + 4, codes);
      ScaleAndShift<kSmall>(codes, LoadF16(block), LoadF16(block + 2), out);
      return;
    case TensorType::kQ5_0:
      UnpackFives(block + 6, Load<uint32_t>(block + 2), codes);
      Scale<kSmall>(codes, LoadF16(block), 16, out);
      return;
    case TensorType::kQ5_1:
      UnpackFives(block + 8, Load<uint32_t>(block + 4), codes);
      ScaleAndShift<kSmall>(codes, LoadF16(block), LoadF16(block + 2), out);
      return;
    case TensorType::kQ8_0: {
      const float scale = LoadF16(block);
      for (int i = 0; i < kSmall; ++i) out[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
      return;
    }
    case TensorType::kQ4_K: return DequantizeQ4K(block, out);
    case TensorType::kQ5_K: return DequantizeQ5K(block, out);
    case TensorType::kQ6_K: return DequantizeQ6K(block, out);
    case TensorType::kF32:
    case TensorType::kF16:
    case TensorType::kBf16: break;
  }
  PHSA_CHECK(!"a type of blocks");
}

}  // namespace

const char* TensorTypeName(TensorType type) { return Traits(type).name; }
int32_t TensorTypeBlockElements(TensorType type) { return Traits(type).block_elements; }
size_t TensorTypeBlockBytes(TensorType type) { return Traits(type).block_bytes; }

void Dequantize(TensorType type, const uint8_t* data, int64_t count, float* out) {
  const TypeTraits& traits = Traits(type);
  PHSA_CHECK(count >= 0 && count % traits.block_elements == 0);
  switch (type) {
    case TensorType::kF32:
      if (count > 0) std::memcpy(out, data, static_cast<size_t>(count) * sizeof(float));
      return;
    case TensorType::kF16: return DequantizeF16(data, count, out);
    case TensorType::kBf16: return DequantizeBf16(data, count, out);
    default: break;
  }
  for (int64_t i = 0; i < count; i += traits.block_elements) {
    DequantizeBlock(type, data, out + i);
    data += traits.block_bytes;
  }
}

bool UnpackInt4(TensorType type, const uint8_t* data, int64_t count, uint8_t* codes, float* scales, float* mins) {
  if (type != TensorType::kQ4_0 && type != TensorType::kQ4_1 && type != TensorType::kQ4_K) return false;
  const TypeTraits& traits = Traits(type);
  PHSA_CHECK(count >= 0 && count % traits.block_elements == 0);
  for (int64_t i = 0; i < count; i += traits.block_elements) {
    const int64_t group = i / kSmall;
    switch (type) {
      case TensorType::kQ4_0:
        scales[group] = LoadF16(data);
        mins[group] = -8 * scales[group];
        UnpackNibbles<kSmall>(data + 2, codes + i);
        break;
      case TensorType::kQ4_1:
        scales[group] = LoadF16(data);
        mins[group] = LoadF16(data + 2);
        UnpackNibbles<kSmall>(data + 4, codes + i);
        break;
      default:
        UnpackSuperHead(data, scales + group, mins + group);
        for (int pair = 0; pair < 4; ++pair) {
          UnpackNibbles<2 * kSmall>(data + kSuperHead + pair * kSmall, codes + i + pair * 2 * kSmall);
        }
        break;
    }
    data += traits.block_bytes;
  }
  return true;
}

bool UnpackInt8(TensorType type, const uint8_t* data, int64_t count, int8_t* codes, float* scales) {
  if (type != TensorType::kQ8_0) return false;
  PHSA_CHECK(count >= 0 && count % kSmall == 0);
  for (int64_t i = 0; i < count; i += kSmall) {
    scales[i / kSmall] = LoadF16(data);
    std::memcpy(codes + i, data + 2, kSmall);
    data += Traits(type).block_bytes;
  }
  return true;
}

}  // namespace phsa
