#include "base/simd_highway.h"
//
#include "base/simd.h"

#if HWY_ARCH_X86 && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "base/errors.h"

namespace phsa {
namespace {

constexpr const char* kNames[kSimdTargets] = {"avx3_amx", "avx3_bf16", "avx3_vnni", "avx3",     "avx2",
                                              "sse4",     "neon",      "portable",  "reference"};

#if HWY_ARCH_X86
// Whether there are matrix tiles of both types, and the system lets this process use them: it has to be asked, once.
bool HasAmx() {
#if defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  if ((d & (kBf16 | kTile | kInt8)) != (kBf16 | kTile | kInt8)) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

std::vector<Simd> FindTargets() {
  std::vector<Simd> all;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const Simd simd = SimdOf(target);
#if HWY_ARCH_X86
    // What Highway 1.0 does not know.
    if (simd == Simd::kAvx3) {
      const bool vnni = __builtin_cpu_supports("avx512vnni") != 0, bf16 = __builtin_cpu_supports("avx512bf16") != 0;
      if (vnni && bf16 && HasAmx()) all.push_back(Simd::kAvx3Amx);
      if (vnni && bf16) all.push_back(Simd::kAvx3Bf16);
      if (vnni) all.push_back(Simd::kAvx3Vnni);
    }
#endif
    all.push_back(simd);
  }
  all.push_back(Simd::kReference);
  return all;
}

Simd Find(std::string_view name, std::string_view asked_by) {
  for (const Simd target : SimdTargets()) {
    if (name == Name(target)) return target;
  }
  ThrowInvalid("{}: no target {} on this machine; allowed: {}", asked_by, Quoted(name), SimdNames());
}

Simd FromEnvironment() {
  const char* backend = std::getenv("PHSA_BACKEND");
  const char* target = std::getenv("PHSA_TARGET");
  if (backend != nullptr && *backend != '\0') {
    if (std::string_view(backend) == "reference") return Simd::kReference;
    if (std::string_view(backend) != "cpu") {
      ThrowInvalid("PHSA_BACKEND is {}; allowed: reference, cpu", Quoted(backend));
    }
  }
  if (target != nullptr && *target != '\0') return Find(target, "PHSA_TARGET");
  return SimdTargets().front();
}

constexpr int32_t kUnchosen = -1;
std::atomic<int32_t> g_chosen{kUnchosen};

}  // namespace

const char* Name(Simd target) { return kNames[static_cast<size_t>(target)]; }

const std::vector<Simd>& SimdTargets() {
  static const std::vector<Simd> targets = FindTargets();
  return targets;
}

std::string SimdNames() {
  std::string names;
  for (const Simd target : SimdTargets()) names += (names.empty() ? "" : " ") + std::string(Name(target));
  return names;
}

Simd ActiveSimd() {
  int32_t chosen = g_chosen.load(std::memory_order_acquire);
  if (chosen == kUnchosen) {
    chosen = static_cast<int32_t>(FromEnvironment());
    g_chosen.store(chosen, std::memory_order_release);
  }
  return static_cast<Simd>(chosen);
}

void SetSimd(std::string_view name) {
  g_chosen.store(static_cast<int32_t>(Find(name, "set_target")), std::memory_order_release);
}

}  // namespace phsa
