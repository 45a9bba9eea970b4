#include "base/cores.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace phsa {
namespace {

std::vector<int> OwnCpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  constexpr int kMost = 8192;
  cpu_set_t* const set = CPU_ALLOC(kMost);
  if (set != nullptr) {
    const size_t size = CPU_ALLOC_SIZE(kMost);
    CPU_ZERO_S(size, set);
    if (sched_getaffinity(0, size, set) == 0) {
      for (int cpu = 0; cpu < kMost; ++cpu) {
        if (CPU_ISSET_S(cpu, size, set)) cpus.push_back(cpu);
      }
    }
    CPU_FREE(set);
  }
#endif
  if (cpus.empty()) cpus.resize(std::max(1U, std::thread::hardware_concurrency()), -1);
  return cpus;
}

}  // namespace

int32_t PhysicalCores(const std::filesystem::path& root, const std::vector<int>& cpus) {
  std::set<std::string> siblings;  // of each core: the CPUs that it is
  int32_t unknown = 0;
  for (const int cpu : cpus) {
    std::ifstream file(root / "sys/devices/system/cpu" / ("cpu" + std::to_string(cpu)) /
                       "topology/thread_siblings_list");
    std::string list;
    if (cpu >= 0 && file >> list) {
      siblings.insert(list);
    } else {
      ++unknown;
    }
  }
  int32_t cores = static_cast<int32_t>(siblings.size()) + unknown;
  // "200000 100000": so many microseconds of CPU time in each so many; "max 100000": any.
  double quota = 0, period = 0;
  std::ifstream limit(root / "sys/fs/cgroup/cpu.max");
  if (limit >> quota >> period && quota > 0 && period > 0) {
    cores = std::min(cores, static_cast<int32_t>(std::min(std::ceil(quota / period), 8192.0)));
  }
  return std::max(cores, 1);
}

int32_t PhysicalCores() { return PhysicalCores("/", OwnCpus()); }

int32_t UsableCpus() { return static_cast<int32_t>(OwnCpus().size()); }

}  // namespace phsa
