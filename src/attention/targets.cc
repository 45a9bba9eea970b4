#include "attention/targets.h"

#include <atomic>
#include <cstdlib>
#include <vector>

#include "attention/cpu/kernels.h"
#include "base/errors.h"

namespace phsa {
namespace {

struct Target {
  std::string name;
  const Backend* backend;
  const cpu::Kernels* kernels;  // null for the reference
};

const std::vector<Target>& Targets() {
  static const std::vector<Target> targets = [] {
    std::vector<Target> all;
    for (const cpu::Kernels* kernels : cpu::AvailableKernels()) {
      all.push_back({kernels->name, &CpuBackend(), kernels});
    }
    all.push_back({"reference", &ReferenceBackend(), nullptr});
    return all;
  }();
  return targets;
}

const Target& Find(std::string_view name, std::string_view asked_by) {
  for (const Target& target : Targets()) {
    if (target.name == name) return target;
  }
  ThrowInvalid("{}: no target {} on this machine; allowed: {}", asked_by, Quoted(name), TargetNames());
}

// The environment is read once, at first use; a wrong value is an error at every call until it is mended.
const Target* FromEnvironment() {
  const char* backend = std::getenv("PHSA_BACKEND");
  const char* target = std::getenv("PHSA_TARGET");
  if (backend != nullptr && *backend != '\0') {
    if (std::string_view(backend) == "reference") return &Find("reference", "PHSA_BACKEND");
    if (std::string_view(backend) != "cpu") {
      ThrowInvalid("PHSA_BACKEND is {}; allowed: reference, cpu", Quoted(backend));
    }
  }
  if (target != nullptr && *target != '\0') return &Find(target, "PHSA_TARGET");
  return &Targets().front();
}

std::atomic<const Target*> g_chosen{nullptr};

const Target& Chosen() {
  if (const Target* chosen = g_chosen.load(std::memory_order_acquire)) return *chosen;
  const Target* first = FromEnvironment();
  g_chosen.store(first, std::memory_order_release);
  return *first;
}

}  // namespace

std::string TargetNames() {
  std::string names;
  for (const Target& target : Targets()) {
    if (!names.empty()) names += ' ';
    names += target.name;
  }
  return names;
}

std::string TargetName() { return Chosen().name; }

void SetTarget(std::string_view name) { g_chosen.store(&Find(name, "set_target"), std::memory_order_release); }

const Backend& ActiveBackend() { return *Chosen().backend; }

namespace cpu {
const Kernels& ActiveKernels() { return *Chosen().kernels; }
}  // namespace cpu

}  // namespace phsa
