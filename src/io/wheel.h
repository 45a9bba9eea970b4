// A file inside a wheel (a zip archive).
#ifndef PHSA_IO_WHEEL_H_
#define PHSA_IO_WHEEL_H_

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace phsa {

// Hands the file's bytes to `sink`, piece by piece. Throws phsa::Error where the archive cannot be read, or where the
// file is missing or does not have `bytes` bytes.
void ReadWheelMember(const std::filesystem::path& wheel, const std::string& member, uint64_t bytes,
                     const std::function<void(const uint8_t*, size_t)>& sink);

}  // namespace phsa

#endif  // PHSA_IO_WHEEL_H_
