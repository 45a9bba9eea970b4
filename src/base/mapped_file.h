// A file of the user's, mapped read-only. What is in it is never trusted.
#ifndef PHSA_BASE_MAPPED_FILE_H_
#define PHSA_BASE_MAPPED_FILE_H_

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace phsa {

class MappedFile {
 public:
  // Throws phsa::Error naming the path and the reason (missing, a folder, not readable). An empty file maps to size 0.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  const std::string& path() const { return path_; }
  // Tells the system that these bytes will not be read again soon, so that a repacked file does not fill memory twice.
  void Release(const uint8_t* begin, size_t size) const;

 private:
  std::string path_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// From now on, reading bytes of a MappedFile that its file no longer has (it was cut while in use, or its disk fails:
// SIGBUS) prints one line that names the file. Then the process exits with 1, or, where the process is not ours alone,
// goes on to whatever handled the signal before.
enum class AfterCutFile : uint8_t { kExit, kHandOn };
void ReportCutFiles(AfterCutFile then);

// The whole file as text, or all that a pipe has; refuses files above `limit` bytes.
std::string ReadTextFile(const std::filesystem::path& path, size_t limit);

}  // namespace phsa

#endif  // PHSA_BASE_MAPPED_FILE_H_
