#include "documents/zip_archive.h"

#include <zip.h>

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace phsa {
namespace {

// Of one member, and of all that are read of an archive: a kilobyte can unpack to a gigabyte.
constexpr size_t kLargestMember = size_t{64} << 20, kLargestSum = size_t{256} << 20;
constexpr size_t kPiece = 1 << 16;

struct CloseFile {
  void operator()(zip_file_t* file) const { zip_fclose(file); }
};

}  // namespace

struct ZipArchive::Impl {
  zip_t* archive = nullptr;
  size_t sum = 0;
  ~Impl() {
    if (archive != nullptr) zip_discard(archive);
  }
};

ZipArchive::ZipArchive(std::string name, std::string_view bytes)
    : name_(std::move(name)), impl_(std::make_unique<Impl>()) {
  zip_error_t error;
  zip_error_init(&error);
  zip_source_t* const source = zip_source_buffer_create(bytes.data(), bytes.size(), 0, &error);
  if (source != nullptr) impl_->archive = zip_open_from_source(source, ZIP_RDONLY, &error);
  if (impl_->archive == nullptr) {
    const std::string why = zip_error_strerror(&error);
    if (source != nullptr) zip_source_free(source);
    zip_error_fini(&error);
    ThrowInvalid("{}: is a zip archive that cannot be read: {}; the file is damaged", name_, why);
  }
  zip_error_fini(&error);
}

ZipArchive::~ZipArchive() = default;

std::optional<std::string> ZipArchive::Read(const std::string& member) {
  const zip_int64_t index = zip_name_locate(impl_->archive, member.c_str(), 0);
  if (index < 0) return std::nullopt;
  const auto fail = [&](const std::string& why) {
    ThrowInvalid("{}: its part {} cannot be read: {}", name_, Quoted(member), why);
  };
  const std::unique_ptr<zip_file_t, CloseFile> file(
      zip_fopen_index(impl_->archive, static_cast<zip_uint64_t>(index), 0));
  if (file == nullptr) fail(zip_strerror(impl_->archive));
  std::string out;
  for (;;) {
    const size_t size = out.size();
    out.resize(size + kPiece);
    const zip_int64_t count = zip_fread(file.get(), out.data() + size, kPiece);
    if (count < 0) fail(zip_file_strerror(file.get()));
    out.resize(size + static_cast<size_t>(std::max<zip_int64_t>(count, 0)));
    if (count <= 0) break;
    impl_->sum += static_cast<size_t>(count);
    if (out.size() > kLargestMember || impl_->sum > kLargestSum) {
      fail(fmt::format("it unpacks to more than {} MiB, which is no document",
                       (out.size() > kLargestMember ? kLargestMember : kLargestSum) >> 20));
    }
  }
  return out;
}

}  // namespace phsa
