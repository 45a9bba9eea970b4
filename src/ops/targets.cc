#include "ops/targets.h"

#include <atomic>
#include <cstdlib>

#include "base/errors.h"
#include "ops/cpu/kernels.h"

namespace phsa {
namespace {

const ops::Kernels* Find(std::string_view name) {
  for (const ops::Kernels& kernels : ops::AvailableKernels()) {
    if (kernels.name == name) return &kernels;
  }
  return nullptr;
}

std::atomic<const ops::Kernels*> g_chosen{nullptr};

}  // namespace

std::vector<std::string> OpsTargetNames() {
  std::vector<std::string> names;
  for (const ops::Kernels& kernels : ops::AvailableKernels()) names.emplace_back(kernels.name);
  return names;
}

std::string OpsTargetName() { return ops::ActiveKernels().name; }

void SetOpsTarget(std::string_view name) {
  const ops::Kernels* found = Find(name);
  if (found == nullptr) {
    std::string names;
    for (const std::string& allowed : OpsTargetNames()) names += (names.empty() ? "" : " ") + allowed;
    ThrowInvalid("set_target: no target {} on this machine; allowed: {}", Quoted(name), names);
  }
  g_chosen.store(found, std::memory_order_release);
}

namespace ops {

const Kernels& ActiveKernels() {
  if (const Kernels* chosen = g_chosen.load(std::memory_order_acquire)) return *chosen;
  const char* asked = std::getenv("PHSA_TARGET");
  const Kernels* found = asked != nullptr ? Find(asked) : nullptr;
  const Kernels* first = found != nullptr ? found : &AvailableKernels().front();
  g_chosen.store(first, std::memory_order_release);
  return *first;
}

}  // namespace ops
}  // namespace phsa
