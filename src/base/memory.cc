#include "base/memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace phsa {
namespace {

using std::filesystem::path;

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// A file with nothing but a number. "max", or no such file: there is no limit.
uint64_t ReadNumber(const path& file_path) {
  std::ifstream file(file_path);
  uint64_t value = 0;
  return file >> value ? value : kUnlimited;
}

// The number behind a word at the beginning of a line.
uint64_t ReadEntry(const path& file_path, std::string_view name, uint64_t otherwise) {
  std::ifstream file(file_path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    uint64_t value = 0;
    if (words >> key >> value && key == name) return value;
  }
  return otherwise;
}

bool Lists(const std::string& list, std::string_view name) {
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    if (part == name) return true;
  }
  return false;
}

// What the versions of control groups call things.
struct Version {
  const char *file_system, *limit, *used;
  // Of the group in /proc/self/cgroup: "0::/a" or "4:memory:/a".
  bool IsOwn(const std::string& controllers) const {
    return is_first() ? Lists(controllers, "memory") : controllers.empty();
  }
  // Of a mount, by its options.
  bool IsMount(const std::string& options) const { return !is_first() || Lists(options, "memory"); }
  bool is_first() const { return std::string_view(file_system) == "cgroup"; }
};
// Used is what cannot be had back: the page cache can.
constexpr Version kVersions[] = {{"cgroup2", "memory.max", "anon"}, {"cgroup", "memory.limit_in_bytes", "total_rss"}};

// The group of this process, from the root of the hierarchy; empty: none.
path OwnGroup(const path& root, const Version& version) {
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    if (version.IsOwn(line.substr(first + 1, second - first - 1))) return line.substr(second + 1);
  }
  return {};
}

struct Mount {
  path group, place;  // the group that is to be seen there
};
std::vector<Mount> Mounts(const path& root, const Version& version) {
  std::vector<Mount> mounts;
  std::ifstream file(root / "proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t bar = line.find(" - ");
    if (bar == std::string::npos) continue;
    std::istringstream before(line.substr(0, bar)), behind(line.substr(bar + 3));
    std::string id, parent, device, group, place, type, source, options;
    before >> id >> parent >> device >> group >> place;
    behind >> type >> source >> options;
    if (type == version.file_system && version.IsMount(options)) mounts.push_back({group, place});
  }
  return mounts;
}

// What the tightest group leaves, from where the groups can be seen down to this process's own.
uint64_t LeftByGroups(const path& root, const Version& version) {
  uint64_t left = kUnlimited;
  const path own = OwnGroup(root, version);
  for (const Mount& mount : Mounts(root, version)) {
    path group = root / mount.place.relative_path();
    const auto consider = [&] {
      const uint64_t limit = ReadNumber(group / version.limit);
      if (limit == kUnlimited) return;
      left = std::min(left, limit - std::min(limit, ReadEntry(group / "memory.stat", version.used, 0)));
    };
    consider();
    const path below = own.lexically_relative(mount.group);
    // A container may see its own group as the root, and be told of it from outside.
    if (below.empty() || *below.begin() == "..") continue;
    for (const path& part : below) {
      group /= part;
      consider();
    }
  }
  return left;
}

}  // namespace

uint64_t AvailableMemory(const path& root) {
  const uint64_t kibibytes = ReadEntry(root / "proc/meminfo", "MemAvailable:", kUnlimited / 1024);
  uint64_t available = kibibytes > kUnlimited / 1024 ? kUnlimited : kibibytes * 1024;
  for (const Version& version : kVersions) available = std::min(available, LeftByGroups(root, version));
  return available;
}

}  // namespace phsa
