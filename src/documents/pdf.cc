#include <stdlib.h>

#include <filesystem>
#include <system_error>

#include "base/errors.h"
#include "base/mapped_file.h"
#include "base/new_file.h"
#include "base/utf8.h"
#include "documents/document.h"
#include "documents/text_builder.h"
#include "io/child_process.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

// A folder of our own for what goes in and comes out.
class WorkFolder {
 public:
  WorkFolder() {
    std::error_code error;
    std::string path = (fs::temp_directory_path(error) / "phsa-XXXXXX").string();
    if (error || mkdtemp(path.data()) == nullptr) {
      Throw(PHSA_IO, "{}: no folder for a PDF's text can be made there; set TMPDIR to one that can be written", path);
    }
    path_ = path;
  }
  ~WorkFolder() {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// Seconds of CPU time, KiB of memory, and blocks of 512 bytes of output, so that a hostile file ends in a message. The
// shell only sets the limits: what it is given are its own words.
constexpr const char* kLimited =
    "ulimit -c 0; ulimit -t 120; ulimit -v 4194304; ulimit -f 262144; exec pdftotext -q -enc UTF-8 \"$1\" \"$2\"";
constexpr int kNotFound = 127;

}  // namespace

Document PdfDocument(std::string name, std::string_view bytes, const std::function<void()>& poll) {
  Document document;
  document.name = std::move(name);
  document.unit = PlaceUnit::kPage;
  const WorkFolder folder;
  const fs::path in = folder.path() / "in.pdf", out = folder.path() / "out.txt", log = folder.path() / "log";
  {
    NewFile file(in);
    file.Write(bytes);
    file.Keep();
  }
  ChildProcess child;
  child.command = {"/bin/sh", "-c", kLimited, "sh", in.string(), out.string()};
  child.log = log;
  const int code = RunChild(child, poll);
  if (code == kNotFound) {
    Throw(PHSA_UNSUPPORTED, "{}: reading PDF takes the program pdftotext, which is not here; install poppler-utils",
          document.name);
  }
  // pdftotext's own: 1 no PDF, 3 not allowed (a password).
  if (code == 1) ThrowInvalid("{}: is no PDF that can be opened: it is damaged, or needs a password", document.name);
  if (code == 3) ThrowInvalid("{}: does not allow its text to be read", document.name);
  if (code != 0) {
    ThrowInvalid("{}: cannot be read: pdftotext ended with {} (it may have 120 s and 4 GiB); the file is damaged",
                 document.name, code);
  }
  std::string text;
  try {
    text = ReadTextFile(out, kLongestDocumentText);
  } catch (const Error&) {
    ThrowInvalid("{}: holds more than {} MiB of text; give a part of it", document.name, kLongestDocumentText >> 20);
  }
  // Each page ends with a form feed.
  int32_t page = 1;
  for (size_t begin = 0; begin < text.size(); ++page) {
    const size_t end = std::min(text.find('\f', begin), text.size());
    document.marks.push_back({document.text.size(), page});
    for (size_t at = begin; at < end;) {
      const Utf8Step step = ScanUtf8(text, at);
      const bool character = step.kind == Utf8Step::Kind::kCharacter && step.code != 0;
      document.text += character ? std::string_view(text).substr(at, step.size) : "\xef\xbf\xbd";
      at += step.size;
    }
    if (!document.text.empty() && document.text.back() != '\n') document.text += '\n';
    begin = end + 1;
  }
  CheckHasText(document, "; it may be pictures of pages, which need a program that recognises text (OCR)");
  return document;
}

}  // namespace phsa
