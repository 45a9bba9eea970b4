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

// A folder likewise: its files are written into place(), beside where it will be.
class NewFolder {
 public:
  // `replace`: a folder that is there already is moved away when this one is kept, and removed; else it is refused.
  NewFolder(const std::filesystem::path& path, bool replace);
  ~NewFolder();  // what was not kept is removed; a folder that was there before stays as it was
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::filesystem::path& place() const { return temporary_; }
  void Keep();

 private:
  std::filesystem::path path_, temporary_;
  bool kept_ = false;
};

}  // namespace phsa

#endif  // PHSA_BASE_NEW_FILE_H_
