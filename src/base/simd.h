// The instruction sets that the CPU's kernels are compiled for: one list, and one choice, for the attention and for all
// other operations. Exported: the engine's Python module shares libphsa's.
#ifndef PHSA_BASE_SIMD_H_
#define PHSA_BASE_SIMD_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "phsa/c.h"

namespace phsa {

// Best first. Each of the first three has what comes after it, too. kReference is the attention's oracle in double
// precision; there the other operations take the best.
enum class Simd : int32_t { kAvx3Amx, kAvx3Bf16, kAvx3Vnni, kAvx3, kAvx2, kSse4, kNeon, kPortable, kReference };
inline constexpr int kSimdTargets = 9;

const char* Name(Simd target);  // "avx3_bf16", …

// Those that this machine runs, best first; the reference is the last.
PHSA_API const std::vector<Simd>& SimdTargets();
PHSA_API std::string SimdNames();  // separated by spaces

// The one in use: the best, or what the environment's PHSA_TARGET names, or the reference with PHSA_BACKEND=reference.
// The environment is read once; a wrong name throws phsa::Error, listing the names, at every call until it is mended.
PHSA_API Simd ActiveSimd();
PHSA_API void SetSimd(std::string_view name);  // throws phsa::Error, listing the names

}  // namespace phsa

#endif  // PHSA_BASE_SIMD_H_
