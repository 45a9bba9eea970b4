#include "io/store_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/errors.h"

namespace phsa {

StoreFiles StoreFilesOf(const PackagedModel& model) {
  StoreFiles files;
  files.folder = CacheFolder() / "models";
  files.file = files.folder / model.file;
  files.partial = files.folder / (model.file + ".part");
  files.work = files.folder / (model.name + ".fetch");
  files.lock = files.folder / (model.name + ".lock");
  return files;
}

StoreLock::StoreLock(const std::filesystem::path& path, const std::function<void()>& wait) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  if (error) Throw(PHSA_IO, "{}: cannot be created: {}", path.parent_path().string(), error.message());
  for (;;) {
    descriptor_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (descriptor_ < 0) Throw(PHSA_IO, "{}: cannot be written: {}", path.string(), std::strerror(errno));
    while (flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
      const int reason = errno;
      try {
        if (reason != EWOULDBLOCK && reason != EINTR) {
          Throw(PHSA_IO, "{}: cannot be locked: {}", path.string(), std::strerror(reason));
        }
        wait();
      } catch (...) {
        close(descriptor_);
        throw;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    // Whoever held it before may have removed the file: then this lock is on a file that nobody else will find.
    struct stat ours {
    }, named{};
    const bool same = fstat(descriptor_, &ours) == 0 && stat(path.c_str(), &named) == 0 &&
                      ours.st_ino == named.st_ino && ours.st_dev == named.st_dev;
    if (same) return;
    close(descriptor_);
  }
}

StoreLock::~StoreLock() { close(descriptor_); }

}  // namespace phsa
