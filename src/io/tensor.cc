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
constexpr int kSuper = 256;  // elements of a block of Q2_K … Q6_K and IQ4_XS

struct TypeTraits {
  const char* name;
  int32_t block_elements;
  size_t block_bytes;
};

constexpr TypeTraits kTraits[kTensorTypes] = {
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
    {"q2_k", kSuper, 16 + 64 + 2 + 2},
    {"q3_k", kSuper, 32 + 64 + 12 + 2},
    {"iq4_nl", kSmall, 2 + 16},
    {"iq4_xs", kSuper, 2 + 2 + 4 + 128},
    {"mxfp4", kSmall, 1 + 16},
    {"u8", 1, 1},
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

void UnpackSixBits(const uint8_t* block, uint8_t* scales, uint8_t* mins) {
  const uint8_t* packed = block + 4;
  for (int i = 0; i < 4; ++i) {
    scales[i] = packed[i] & 0x3f;
    scales[4 + i] = static_cast<uint8_t>((packed[8 + i] & 0x0f) | (packed[i] >> 6 << 4));
    mins[i] = packed[4 + i] & 0x3f;
    mins[4 + i] = static_cast<uint8_t>((packed[8 + i] >> 4) | (packed[4 + i] >> 6 << 4));
  }
}

void UnpackSuperHead(const uint8_t* block, float* scales, float* mins) {
  const float scale = LoadF16(block);
  const float min = LoadF16(block + 2);
  uint8_t six_scales[8], six_mins[8];
  UnpackSixBits(block, six_scales, six_mins);
  for (int i = 0; i < 8; ++i) {
    scales[i] = scale * static_cast<float>(six_scales[i]);
    mins[i] = -(min * static_cast<float>(six_mins[i]));
  }
}

void UnpackQ4K(const uint8_t* block, uint8_t* codes) {
  for (int pair = 0; pair < 4; ++pair) {
    UnpackNibbles<2 * kSmall>(block + kSuperHead + pair * kSmall, codes + pair * 2 * kSmall);
  }
}

// As Q4_K, with a fifth bit: that of element i of sub-block s is bit s of byte i.
void UnpackQ5K(const uint8_t* block, uint8_t* codes) {
  const uint8_t* high = block + kSuperHead;
  for (int pair = 0; pair < 4; ++pair) {
    UnpackNibbles<2 * kSmall>(high + kSmall + pair * kSmall, codes + pair * 2 * kSmall);
  }
  for (int i = 0; i < kSuper; ++i) {
    codes[i] = static_cast<uint8_t>(codes[i] | ((high[i % kSmall] >> (i / kSmall) & 1) << 4));
  }
}

// Of Q4_K and Q5_K, whose codes are known.
void ScaleSuper(const uint8_t* block, const uint8_t* codes, float* out) {
  float scales[8], mins[8];
  UnpackSuperHead(block, scales, mins);
  for (int sub = 0; sub < 8; ++sub) {
    ScaleAndShift<kSmall>(codes + sub * kSmall, scales[sub], mins[sub], out + sub * kSmall);
  }
}

// Two halves of 128 elements. In each, 64 bytes of low nibbles (elements 0 to 63, then 64 to 127), 32 bytes with the
// two high bits of elements i, i + 32, i + 64 and i + 96, and one 8-bit scale for every 16.
void UnpackQ6K(const uint8_t* block, uint8_t* codes) {
  for (int half = 0; half < 2; ++half, codes += kSuper / 2) {
    const uint8_t* high = block + 128 + half * 32;
    UnpackNibbles<kSuper / 2>(block + half * 64, codes);
    for (int part = 0; part < 4; ++part) {
      for (int i = 0; i < 32; ++i) {
        codes[part * 32 + i] = static_cast<uint8_t>(codes[part * 32 + i] | ((high[i] >> (2 * part) & 3) << 4));
      }
    }
  }
}

void DequantizeQ6K(const uint8_t* block, float* out) {
  uint8_t codes[kSuper];
  UnpackQ6K(block, codes);
  const float scale = LoadF16(block + 208);
  for (int group = 0; group < 16; ++group) {
    const float of_group = scale * static_cast<float>(static_cast<int8_t>(block[192 + group]));
    Scale<16>(codes + group * 16, of_group, 32, out + group * 16);
  }
}

// Element i of part p (0 to 3) of a half has bits 2p and 2p + 1 of the half's byte i; every 16 have a 4-bit scale and,
// above it, a 4-bit minimum.
void DequantizeQ2K(const uint8_t* block, float* out) {
  const float scale = LoadF16(block + 80), min = LoadF16(block + 82);
  for (int i = 0; i < kSuper; ++i) {
    const uint8_t head = block[i / 16];
    const int code = block[16 + i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3;
    const float group_scale = scale * static_cast<float>(head & 15), group_min = min * static_cast<float>(head >> 4);
    out[i] = group_scale * static_cast<float>(code) - group_min;
  }
}

// The low bits as in Q2_K, behind 32 bytes whose bit i / 32 of byte i % 32 is clear where 4 is to be taken off. The
// sixteen 6-bit scales: low nibbles of 8 bytes, then their high ones, and two high bits in 4 bytes.
void DequantizeQ3K(const uint8_t* block, float* out) {
  const uint8_t* packed = block + 96;
  const float scale = LoadF16(block + 108);
  for (int i = 0; i < kSuper; ++i) {
    const int group = i / 16;
    const int low = group < 8 ? packed[group] & 15 : packed[group - 8] >> 4;
    const int high = packed[8 + group % 4] >> (2 * (group / 4)) & 3;
    const int code =
        (block[32 + i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3) - ((block[i % 32] >> (i / 32) & 1) != 0 ? 0 : 4);
    out[i] = scale * static_cast<float>((low | high << 4) - 32) * static_cast<float>(code);
  }
}

// What the 4-bit codes of these types stand for: IQ4's values, and twice those of a 4-bit float (E2M1).
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kFp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void LookUp(const uint8_t* packed, const int8_t* table, int8_t* codes) {
  uint8_t index[kSmall];
  UnpackNibbles<kSmall>(packed, index);
  for (int i = 0; i < kSmall; ++i) codes[i] = table[index[i]];
}

// Half of the power of two that the byte names, as its values are twice theirs.
float Mxfp4Scale(uint8_t exponent) {
  return std::bit_cast<float>(exponent < 2 ? 0x00200000u << exponent : static_cast<uint32_t>(exponent - 1) << 23);
}

// One block of the types of UnpackInt8.
void UnpackBlock(TensorType type, const uint8_t* block, int8_t* codes, float* scales) {
  switch (type) {
    case TensorType::kQ8_0:
      scales[0] = LoadF16(block);
      std::memcpy(codes, block + 2, kSmall);
      return;
    case TensorType::kIq4Nl:
      scales[0] = LoadF16(block);
      LookUp(block + 2, kIq4Values, codes);
      return;
    case TensorType::kMxfp4:
      scales[0] = Mxfp4Scale(block[0]);
      LookUp(block + 1, kFp4Values, codes);
      return;
    default: break;
  }
  // IQ4_XS: the 6-bit scales of eight sub-blocks, two high bits each in 16 bits, then the low nibbles.
  const float scale = LoadF16(block);
  const auto high = Load<uint16_t>(block + 2);
  for (int sub = 0; sub < 8; ++sub) {
    const int low = block[4 + sub / 2] >> (4 * (sub % 2)) & 15;
    scales[sub] = scale * static_cast<float>((low | (high >> (2 * sub) & 3) << 4) - 32);
    LookUp(block + 8 + sub * 16, kIq4Values, codes + sub * kSmall);
  }
}

bool HasInt8Codes(TensorType type) {
  return type == TensorType::kQ8_0 || type == TensorType::kIq4Nl || type == TensorType::kIq4Xs ||
         type == TensorType::kMxfp4;
}

void DequantizeBlock(TensorType type, const uint8_t* block, float* out) {
  uint8_t codes[kSuper];
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
    case TensorType::kQ8_0:
    case TensorType::kIq4Nl:
    case TensorType::kIq4Xs:
    case TensorType::kMxfp4: {
      int8_t values[kSuper];
      float scales[kSuper / kSmall];
      UnpackBlock(type, block, values, scales);
      for (int i = 0; i < Traits(type).block_elements; ++i) {
        out[i] = static_cast<float>(values[i]) * scales[i / kSmall];
      }
      return;
    }
    case TensorType::kQ2_K: return DequantizeQ2K(block, out);
    case TensorType::kQ3_K: return DequantizeQ3K(block, out);
    case TensorType::kQ4_K: UnpackQ4K(block, codes); return ScaleSuper(block, codes, out);
    case TensorType::kQ5_K: UnpackQ5K(block, codes); return ScaleSuper(block, codes, out);
    case TensorType::kQ6_K: return DequantizeQ6K(block, out);
    case TensorType::kU8:
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

const uint8_t* Blocks(const Tensor& tensor, int64_t first, int64_t count, std::vector<uint8_t>& scratch) {
  const TypeTraits& traits = Traits(tensor.type);
  PHSA_CHECK(first % traits.block_elements == 0 && count % traits.block_elements == 0);
  const int64_t first_block = first / traits.block_elements, blocks = count / traits.block_elements;
  const auto block_bytes = static_cast<int64_t>(traits.block_bytes);
  if (tensor.scales == nullptr) return tensor.data + first_block * block_bytes;
  constexpr int kHalf = kSmall / 2;
  scratch.resize(static_cast<size_t>(blocks * block_bytes));
  uint8_t* out = scratch.data();
  for (int64_t block = first_block; block < first_block + blocks; ++block, out += block_bytes) {
    const uint8_t* const pairs = tensor.data + block * kHalf;
    out[0] = tensor.scales[block];
    for (int i = 0; i < kHalf; ++i) {
      const int low = pairs[i / 2] >> (4 * (i % 2)) & 15, high = pairs[kHalf / 2 + i / 2] >> (4 * (i % 2)) & 15;
      out[1 + i] = static_cast<uint8_t>(low | high << 4);
    }
  }
  return scratch.data();
}

bool UnpackCodes(TensorType type, const uint8_t* data, int64_t count, uint8_t* codes, float* scales, float* mins) {
  const bool five = type == TensorType::kQ5_0 || type == TensorType::kQ5_1;
  if (!five && type != TensorType::kQ4_0 && type != TensorType::kQ4_1) return false;
  const bool centred = type == TensorType::kQ4_0 || type == TensorType::kQ5_0;
  const TypeTraits& traits = Traits(type);
  PHSA_CHECK(count >= 0 && count % kSmall == 0);
  for (int64_t i = 0; i < count; i += kSmall, ++scales, ++mins, data += traits.block_bytes) {
    *scales = LoadF16(data);
    *mins = centred ? (five ? -16 : -8) * *scales : LoadF16(data + 2);
    const uint8_t* const packed = data + (centred ? 2 : 4);
    if (five) {
      UnpackFives(packed + 4, Load<uint32_t>(packed), codes + i);
    } else {
      UnpackNibbles<kSmall>(packed, codes + i);
    }
  }
  return true;
}

bool UnpackSuper(TensorType type, const uint8_t* data, int64_t count, uint8_t* codes, uint16_t* factors,
                 uint16_t* min_factors, uint8_t* scales, uint8_t* mins) {
  if (type != TensorType::kQ4_K && type != TensorType::kQ5_K) return false;
  PHSA_CHECK(count >= 0 && count % kSuper == 0);
  for (int64_t i = 0; i < count; i += kSuper, data += Traits(type).block_bytes) {
    *factors++ = Load<uint16_t>(data);
    *min_factors++ = Load<uint16_t>(data + 2) ^ 0x8000u;
    UnpackSixBits(data, scales + i / kSmall, mins + i / kSmall);
    if (type == TensorType::kQ4_K) {
      UnpackQ4K(data, codes + i);
    } else {
      UnpackQ5K(data, codes + i);
    }
  }
  return true;
}

bool UnpackInt6(TensorType type, const uint8_t* data, int64_t count, uint8_t* codes, uint16_t* factors,
                int8_t* scales) {
  if (type != TensorType::kQ6_K) return false;
  PHSA_CHECK(count >= 0 && count % kSuper == 0);
  for (int64_t i = 0; i < count; i += kSuper, data += Traits(type).block_bytes) {
    UnpackQ6K(data, codes + i);
    *factors++ = Load<uint16_t>(data + 208);
    std::memcpy(scales + i / 16, data + 192, 16);
  }
  return true;
}

bool UnpackInt8(TensorType type, const uint8_t* data, int64_t count, int8_t* codes, float* scales) {
  if (!HasInt8Codes(type)) return false;
  const TypeTraits& traits = Traits(type);
  PHSA_CHECK(count >= 0 && count % traits.block_elements == 0);
  for (int64_t i = 0; i < count; i += traits.block_elements) {
    UnpackBlock(type, data, codes + i, scales + i / kSmall);
    data += traits.block_bytes;
  }
  return true;
}

}  // namespace phsa
