#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/errors.h"

namespace phsa {
namespace {

// An open file and its size; closes itself.
class OpenFile {
 public:
  explicit OpenFile(const std::string& path) : path_(path), descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) ThrowInvalid("{}: cannot be opened: {}", path_, std::strerror(errno));
    struct stat status {};
    const bool known = fstat(descriptor_, &status) == 0;
    if (!known || !S_ISREG(status.st_mode)) {
      const int error = errno;
      close(descriptor_);
      if (!known) ThrowInvalid("{}: cannot be read: {}", path_, std::strerror(error));
      ThrowInvalid("{}: is {}, not a file", path_, S_ISDIR(status.st_mode) ? "a folder" : "a device or a pipe");
    }
    size_ = static_cast<size_t>(status.st_size);
  }
  ~OpenFile() { close(descriptor_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int descriptor() const { return descriptor_; }
  size_t size() const { return size_; }

 private:
  const std::string& path_;
  int descriptor_;
  size_t size_ = 0;
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path.string()) {
  const OpenFile file(path_);
  if (file.size() == 0) return;
  void* mapped = mmap(nullptr, file.size(), PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (mapped == MAP_FAILED) ThrowInvalid("{}: cannot be mapped: {}", path_, std::strerror(errno));
  data_ = static_cast<const uint8_t*>(mapped);
  size_ = file.size();
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<uint8_t*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void MappedFile::Release(const uint8_t* begin, size_t size) const {
  if (size == 0) return;
  PHSA_CHECK(begin >= data_ && size <= size_ && static_cast<size_t>(begin - data_) <= size_ - size);
  // Whole pages only: the first and the last may hold a neighbour's bytes.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t offset = static_cast<size_t>(begin - data_);
  const size_t first = (offset + page - 1) / page * page;
  const size_t last = (offset + size) / page * page;
  // Advice: that it failed changes nothing but memory use.
  if (first < last) madvise(const_cast<uint8_t*>(data_) + first, last - first, MADV_DONTNEED);
}

std::string ReadTextFile(const std::filesystem::path& path, size_t limit) {
  const std::string name = path.string();
  const OpenFile file(name);
  if (file.size() > limit) ThrowInvalid("{}: has {} bytes; allowed: at most {}", name, file.size(), limit);
  std::string text(file.size(), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = read(file.descriptor(), text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) ThrowInvalid("{}: cannot be read: {}", name, std::strerror(errno));
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  text.resize(done);
  return text;
}

}  // namespace phsa
