// How much memory there is.
#ifndef PHSA_BASE_MEMORY_H_
#define PHSA_BASE_MEMORY_H_

#include <cstdint>
#include <filesystem>

namespace phsa {

// Bytes that can still be had: the system's, or what the tightest of the control groups around this process leaves, of
// either version, nested ones included (containers, systemd's MemoryMax). `root`: where /proc and the mounts are found.
uint64_t AvailableMemory(const std::filesystem::path& root = "/");

}  // namespace phsa

#endif  // PHSA_BASE_MEMORY_H_
