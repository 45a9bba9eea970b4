// Highway's targets as ours, for files that it compiles once per target: to be included before its headers.
#ifndef PHSA_BASE_SIMD_HIGHWAY_H_
#define PHSA_BASE_SIMD_HIGHWAY_H_

// Arrays of vectors need vectors of a known size, so the scalable targets are out. SSSE3 adds nothing over SSE4 here.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3)
#include <hwy/targets.h>

#include "base/simd.h"

namespace phsa {

inline Simd SimdOf(int64_t highway_target) {
  switch (highway_target) {
#if HWY_ARCH_X86
    case HWY_AVX3: return Simd::kAvx3;
    case HWY_AVX2: return Simd::kAvx2;
    case HWY_SSE4: return Simd::kSse4;
#endif
#if HWY_ARCH_ARM
    case HWY_NEON: return Simd::kNeon;
#endif
    default: return Simd::kPortable;
  }
}

// Calls body(target) for each target that the file was compiled for and this CPU runs, while HWY_DYNAMIC_DISPATCH takes
// that one.
template <class Body>
void ForEachHighwayTarget(const Body& body) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    body(SimdOf(target));
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace phsa

#endif  // PHSA_BASE_SIMD_HIGHWAY_H_
