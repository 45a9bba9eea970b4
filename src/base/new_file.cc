#include "base/new_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/errors.h"

namespace phsa {

bool WriteAll(int descriptor, const void* data, size_t size) {
  const char* const bytes = static_cast<const char*>(data);
  for (size_t done = 0; done < size;) {
    const ssize_t count = write(descriptor, bytes + done, size - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    done += static_cast<size_t>(count);
  }
  return true;
}

NewFile::NewFile(const std::filesystem::path& path)
    : path_(path.string()), temporary_(fmt::format("{}.{}.part", path_, getpid())) {
  // A rename would replace a folder's or a device's name, too.
  if (std::filesystem::exists(path) && !std::filesystem::is_regular_file(path)) {
    ThrowInvalid("{}: is a folder or a device; give the name of a file", path_);
  }
  descriptor_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) Fail();
}

NewFile::~NewFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  unlink(temporary_.c_str());
}

void NewFile::Write(const void* data, size_t size) {
  if (!WriteAll(descriptor_, data, size)) Fail();
}

void NewFile::Keep() {
  if (fsync(descriptor_) != 0 || rename(temporary_.c_str(), path_.c_str()) != 0) Fail();
  close(descriptor_);
  descriptor_ = -1;
}

void NewFile::Fail() const {
  Throw(PHSA_IO, "{}: cannot be written: {}; free some space or give another place", path_, std::strerror(errno));
}

NewFolder::NewFolder(const std::filesystem::path& path, bool replace)
    : path_(path.has_filename() ? path : path.parent_path()),  // "folder/" is "folder"
      temporary_(fmt::format("{}.{}.part", path_.string(), getpid())) {
  std::error_code error;
  const bool exists = std::filesystem::exists(path_, error);
  if (exists && !std::filesystem::is_directory(path_, error)) {
    ThrowInvalid("{}: is a file; give the name of a folder", path_.string());
  }
  if (exists && !replace) ThrowInvalid("{}: is there already", path_.string());
  std::filesystem::remove_all(temporary_, error);
  if (!std::filesystem::create_directory(temporary_, error)) {
    Throw(PHSA_IO, "{}: cannot be made: {}; give another place", temporary_.string(), error.message());
  }
}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!kept_) std::filesystem::remove_all(temporary_, ignored);
}

void NewFolder::Keep() {
  const std::filesystem::path old = fmt::format("{}.{}.old", path_.string(), getpid());
  std::error_code error;
  const bool replaces = std::filesystem::exists(path_, error);
  if (replaces) std::filesystem::rename(path_, old, error);
  if (!error) std::filesystem::rename(temporary_, path_, error);
  if (error) {
    const std::string reason = error.message();
    if (replaces) std::filesystem::rename(old, path_, error);
    Throw(PHSA_IO, "{}: cannot be put in its place: {}", path_.string(), reason);
  }
  kept_ = true;
  if (replaces) std::filesystem::remove_all(old, error);
}

}  // namespace phsa
