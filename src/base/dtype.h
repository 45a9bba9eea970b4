// The element types of q, k, v and representatives, and rows of 8-bit codes, converted one scalar at a time without
// help from the hardware: for the reference, for tests and for the rare scalar tails of the kernels.
#ifndef PHSA_BASE_DTYPE_H_
#define PHSA_BASE_DTYPE_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "base/errors.h"
#include "phsa/c.h"

namespace phsa {

inline bool IsDtype(int32_t dtype) { return dtype == PHSA_F32 || dtype == PHSA_F16 || dtype == PHSA_BF16; }

inline constexpr size_t DtypeSize(int32_t dtype) { return dtype == PHSA_F32 ? 4 : dtype == PHSA_INT8 ? 1 : 2; }

inline const char* DtypeName(int32_t dtype) {
  switch (dtype) {
    case PHSA_F32: return "f32";
    case PHSA_F16: return "f16";
    case PHSA_BF16: return "bf16";
    case PHSA_INT8: return "int8";
    default: return "unknown";
  }
}

// Half the distance from 1 to the next number: the largest relative error of rounding to nearest.
inline constexpr double DtypeEpsilon(int32_t dtype) {
  return dtype == PHSA_F32 ? 0x1p-24 : dtype == PHSA_F16 ? 0x1p-11 : 0x1p-8;
}

inline constexpr float F32FromBf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline constexpr uint16_t Bf16FromF32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  // Rounding a NaN's mantissa up could carry it into infinity; keep its sign and make it quiet.
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline constexpr float F32FromF16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // zero or a denormal: exact
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

inline constexpr uint16_t F16FromF32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and up round to infinity
  if (magnitude >= 0x38800000u) {                       // 2^-14 and up: normal in f16
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
  }
  // Denormal in f16: a multiple of 2^-24. Adding 0.5 makes the f32 addition round at exactly that bit.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f)));
}

// Element `index` of an array of that dtype.
inline float LoadElement(int32_t dtype, const void* data, int64_t index) {
  switch (dtype) {
    case PHSA_F32: return static_cast<const float*>(data)[index];
    case PHSA_F16: return F32FromF16(static_cast<const uint16_t*>(data)[index]);
    case PHSA_BF16: return F32FromBf16(static_cast<const uint16_t*>(data)[index]);
    default: PHSA_CHECK(!"dtype");
  }
  return 0;
}

inline void StoreElement(int32_t dtype, void* data, int64_t index, float value) {
  switch (dtype) {
    case PHSA_F32: static_cast<float*>(data)[index] = value; return;
    case PHSA_F16: static_cast<uint16_t*>(data)[index] = F16FromF32(value); return;
    case PHSA_BF16: static_cast<uint16_t*>(data)[index] = Bf16FromF32(value); return;
    default: PHSA_CHECK(!"dtype");
  }
}

// The nearest value that the dtype has; by way of f32, as everything that stores to a cache does.
inline float RoundTo(int32_t dtype, float value) {
  switch (dtype) {
    case PHSA_F32: return value;
    case PHSA_F16: return F32FromF16(F16FromF32(value));
    case PHSA_BF16: return F32FromBf16(Bf16FromF32(value));
    default: PHSA_CHECK(!"dtype");
  }
  return 0;
}

// Rows of PHSA_INT8: what a code stands for, as a number of `dtype`. Seven bits by eight: the product itself is exact.
inline float FromCode(int8_t code, uint16_t scale, int32_t dtype) {
  return RoundTo(dtype, static_cast<float>(code) * F32FromBf16(scale));
}

// The scale (bits of bf16) of a row whose largest magnitude is `largest`: rounded up, so that no code leaves ±127. NaN
// where it is not finite, 0 where it is so small that the scale has no inverse.
inline constexpr uint16_t CodeScale(float largest) {
  if (!(largest <= std::numeric_limits<float>::max())) return 0x7fc0u;
  if (largest <= 0x1p-100f) return 0;
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(largest / 127) + 0xffffu) >> 16);
}

}  // namespace phsa

#endif  // PHSA_BASE_DTYPE_H_
