// A zip archive in memory, of which nothing is believed: members are read up to a limit, whatever they claim.
#ifndef PHSA_DOCUMENTS_ZIP_ARCHIVE_H_
#define PHSA_DOCUMENTS_ZIP_ARCHIVE_H_

#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace phsa {

class ZipArchive {
 public:
  // `bytes` must outlive it. Throws phsa::Error where it is no archive.
  ZipArchive(std::string name, std::string_view bytes);
  ~ZipArchive();

  // The member's bytes; none where there is none of that name. Throws phsa::Error where it is damaged, encrypted, or
  // where it and those read before are larger than any document is.
  std::optional<std::string> Read(const std::string& member);

 private:
  struct Impl;
  std::string name_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phsa

#endif  // PHSA_DOCUMENTS_ZIP_ARCHIVE_H_
