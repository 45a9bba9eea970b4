// A file that appears whole or not at all: it is written beside its place and takes it at the end.
#ifndef PHSA_BASE_NEW_FILE_H_
#define PHSA_BASE_NEW_FILE_H_

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace phsa {

// All of it, however the system takes it; false: errno says why.
bool WriteAll(int descriptor, const void* data, size_t size);

class NewFile {
 public:
  // All throw phsa::Error naming the path and the reason: no such folder, no permission, a full disk.
  explicit NewFile(const std::filesystem::path& path);
  ~NewFile();  // what was not kept is removed; a file that was there before stays as it was
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void Write(const void* data, size_t size);
  void Write(std::string_view text) { Write(text.data(), text.size()); }
  void Keep();  // on the disk, in its place; nothing can be written after it

 private:
  [[noreturn]] void Fail() const;
  std::string path_, temporary_;
  int descriptor_ = -1;
};

}  // namespace phsa

#endif  // PHSA_BASE_NEW_FILE_H_
