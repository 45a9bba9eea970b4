#include "engine/memory_plan.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

#include "base/errors.h"

namespace phsa {
namespace {

uint64_t ReadNumber(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : std::numeric_limits<uint64_t>::max();
}

std::string Gigabytes(uint64_t bytes) { return fmt::format("{:.2f} GB", static_cast<double>(bytes) / 1e9); }

}  // namespace

uint64_t AvailableMemory() {
  uint64_t available = std::numeric_limits<uint64_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    std::istringstream words(line);
    std::string key;
    uint64_t kibibytes = 0;
    if (words >> key >> kibibytes && key == "MemAvailable:") available = kibibytes * 1024;
  }
  // Version 2 of control groups, as seen from inside a container. What the page cache holds counts as used there but
  // can be had, so only the limit is compared.
  const uint64_t limit = ReadNumber("/sys/fs/cgroup/memory.max");
  return std::min(available, limit);
}

std::string MemoryPlan::Text() const {
  const std::string texts = cache_tokens > context ? fmt::format(" in texts of up to {}", context) : "";
  std::string text = fmt::format("memory: weights {} ({}), KV cache {} for {} tokens{} ({})", Gigabytes(weights),
                                 weight_types, Gigabytes(key_values), cache_tokens, texts, kv_type);
  if (representatives > 0) text += fmt::format(", representatives {}", Gigabytes(representatives));
  text +=
      fmt::format(", workspace {}: {} of {} available", Gigabytes(workspace), Gigabytes(total()), Gigabytes(available));
  return text;
}

void CheckFits(const MemoryPlan& plan) {
  if (plan.total() <= plan.available) return;
  ThrowInvalid("{}: it does not fit; a smaller context (-c), --kv-type bf16 or --weights int8 needs less", plan.Text());
}

}  // namespace phsa
