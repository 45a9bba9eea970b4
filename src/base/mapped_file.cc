#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/errors.h"

namespace phsa {
namespace {

// An open file and its size; closes itself. A pipe, where one will do, has the size 0.
class OpenFile {
 public:
  enum class Kind : uint8_t { kFile, kFileOrPipe };
  OpenFile(const std::string& path, Kind kind) : path_(path), descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) ThrowInvalid("{}: cannot be opened: {}", path_, std::strerror(errno));
    struct stat status {};
    const bool known = fstat(descriptor_, &status) == 0;
    const bool pipe = S_ISFIFO(status.st_mode) || S_ISSOCK(status.st_mode);
    if (!known || !(S_ISREG(status.st_mode) || (pipe && kind == Kind::kFileOrPipe))) {
      const int error = errno;
      close(descriptor_);
      if (!known) ThrowInvalid("{}: cannot be read: {}", path_, std::strerror(error));
      ThrowInvalid("{}: is {}, not a file", path_, S_ISDIR(status.st_mode) ? "a folder" : "a device or a pipe");
    }
    size_ = pipe ? 0 : static_cast<size_t>(status.st_size);
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

// What the handler of SIGBUS may look at: no locks, no memory of its own. Files beyond the table's end go unnamed; a
// model has a file or one per shard.
struct MappedRange {
  std::atomic<const uint8_t*> data{nullptr};
  size_t size = 0;
  std::array<char, 1024> path{};
};
std::array<MappedRange, 512> g_mapped;
std::mutex g_mapped_mutex;  // held by those who write

void Remember(const uint8_t* data, size_t size, std::string_view path) {
  const std::lock_guard lock(g_mapped_mutex);
  for (MappedRange& range : g_mapped) {
    if (range.data.load() != nullptr) continue;
    range.size = size;
    // The end of a path says the most.
    path.remove_prefix(path.size() - std::min(path.size(), range.path.size() - 1));
    range.path.fill(0);
    std::copy(path.begin(), path.end(), range.path.begin());
    range.data.store(data);
    return;
  }
}

void Forget(const uint8_t* data) {
  const std::lock_guard lock(g_mapped_mutex);
  for (MappedRange& range : g_mapped) {
    if (range.data.load() == data) range.data.store(nullptr);
  }
}

std::atomic<AfterCutFile> g_after_cut_file{AfterCutFile::kExit};
struct sigaction g_before {};

void WriteError(std::string_view text) {
  [[maybe_unused]] const ssize_t ignored = write(STDERR_FILENO, text.data(), text.size());
}

void OnBusError(int signal, siginfo_t* info, void* context) {
  const auto* address = static_cast<const uint8_t*>(info->si_addr);
  for (const MappedRange& range : g_mapped) {
    const uint8_t* const data = range.data.load();
    if (data == nullptr || address < data || address >= data + range.size) continue;
    WriteError("phsa: ");
    WriteError(range.path.data());
    WriteError(": was cut while in use, or its disk fails; copy or fetch it again\n");
    if (g_after_cut_file.load() == AfterCutFile::kExit) _exit(1);
    break;
  }
  if ((g_before.sa_flags & SA_SIGINFO) != 0) {
    g_before.sa_sigaction(signal, info, context);
  } else if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN) {
    g_before.sa_handler(signal);
  } else {
    std::signal(signal, SIG_DFL);  // the read is tried again, and ends the process
  }
}

}  // namespace

void ReportCutFiles(AfterCutFile then) {
  g_after_cut_file = then;
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action {};
    action.sa_sigaction = OnBusError;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, &g_before);
  });
}

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path.string()) {
  const OpenFile file(path_, OpenFile::Kind::kFile);
  if (file.size() == 0) return;
  void* mapped = mmap(nullptr, file.size(), PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (mapped == MAP_FAILED) ThrowInvalid("{}: cannot be mapped: {}", path_, std::strerror(errno));
  data_ = static_cast<const uint8_t*>(mapped);
  size_ = file.size();
  Remember(data_, size_, path_);
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  Forget(data_);
  munmap(const_cast<uint8_t*>(data_), size_);
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
  const OpenFile file(name, OpenFile::Kind::kFileOrPipe);
  if (file.size() > limit) ThrowInvalid("{}: has {} bytes; allowed: at most {}", name, file.size(), limit);
  // What is there at the end counts: a pipe tells no size, and a file may grow or shrink meanwhile.
  constexpr size_t kPiece = 1 << 16;
  std::string text(file.size() + 1, '\0');
  size_t done = 0;
  for (;;) {
    if (done == text.size()) text.resize(done + std::max(kPiece, done / 2));
    const ssize_t count = read(file.descriptor(), text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) ThrowInvalid("{}: cannot be read: {}", name, std::strerror(errno));
    if (count == 0) break;
    done += static_cast<size_t>(count);
    if (done > limit) ThrowInvalid("{}: has more than {} bytes; allowed: at most {}", name, limit, limit);
  }
  text.resize(done);
  return text;
}

}  // namespace phsa
