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

}  // namespace phsa
