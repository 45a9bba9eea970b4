#include "base/memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

namespace phsa {
namespace {

uint64_t ReadNumber(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : std::numeric_limits<uint64_t>::max();
}

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

}  // namespace phsa
