#include "documents/document.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/errors.h"
#include "base/mapped_file.h"
#include "base/utf8.h"
#include "documents/markup.h"
#include "documents/text_builder.h"
#include "documents/zip_archive.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf", kWord97 = "\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1";
constexpr size_t kPdfHeaderWithin = 1024;  // as readers of PDF allow

std::string Extension(const std::string& name) {
  std::string extension = fs::path(name).extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return extension;
}

bool IsCode(const std::string& name) {
  static constexpr std::array<std::string_view, 52> kExtensions = {
      ".c",   ".h",     ".cc",    ".cpp",  ".cxx", ".hpp",  ".hh",   ".cu",    ".cuh",  ".py",  ".pyi",
      ".js",  ".mjs",   ".ts",    ".tsx",  ".jsx", ".java", ".kt",   ".scala", ".go",   ".rs",  ".rb",
      ".php", ".swift", ".m",     ".mm",   ".cs",  ".fs",   ".hs",   ".ml",    ".lua",  ".pl",  ".r",
      ".jl",  ".sh",    ".bash",  ".zsh",  ".sql", ".css",  ".scss", ".json",  ".yaml", ".yml", ".toml",
      ".ini", ".cfg",   ".cmake", ".make", ".csv", ".tsv",  ".log",  ".xml"};
  static constexpr std::array<std::string_view, 3> kNames = {"Makefile", "CMakeLists.txt", "Dockerfile"};
  const std::string extension = Extension(name), own = fs::path(name).filename().string();
  return std::find(kExtensions.begin(), kExtensions.end(), extension) != kExtensions.end() ||
         std::find(kNames.begin(), kNames.end(), own) != kNames.end();
}

bool BeginsWithTag(std::string_view bytes, std::string_view tag) {
  if (bytes.starts_with(kByteOrderMark)) bytes.remove_prefix(kByteOrderMark.size());
  bytes.remove_prefix(std::min(bytes.find_first_not_of(" \t\r\n"), bytes.size()));
  if (bytes.size() < tag.size()) return false;
  return std::equal(tag.begin(), tag.end(), bytes.begin(),
                    [](char a, char b) { return a == (b >= 'A' && b <= 'Z' ? static_cast<char>(b - 'A' + 'a') : b); });
}

std::string ReadBytes(const std::string& path) {
  if (path != "-") return ReadTextFile(path, kLargestDocumentFile);
  std::string bytes;
  std::array<char, 1 << 16> part;
  for (size_t count; (count = std::fread(part.data(), 1, part.size(), stdin)) > 0;) {
    bytes.append(part.data(), count);
    if (bytes.size() > kLargestDocumentFile) {
      ThrowInvalid("standard input: more than {} MiB; give a part of it", kLargestDocumentFile >> 20);
    }
  }
  return bytes;
}

// Regular files of a folder and its folders, by name; links are not followed, so that there is no way round.
std::vector<std::string> FilesIn(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code error;
  for (auto entry = fs::recursive_directory_iterator(folder, error);
       !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    const bool hidden = entry->path().filename().string().starts_with('.');
    if (hidden) {
      if (entry->is_directory()) entry.disable_recursion_pending();
      continue;
    }
    if (entry->is_regular_file(error) && !entry->is_symlink(error)) files.push_back(entry->path().string());
    if (files.size() > kMostDocuments) {
      ThrowInvalid("{}: has more than {} files; give some of its folders", folder, kMostDocuments);
    }
  }
  if (error) Throw(PHSA_IO, "{}: cannot be read: {}", folder, error.message());
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

const char* Name(PlaceUnit unit) {
  switch (unit) {
    case PlaceUnit::kLine: return "line";
    case PlaceUnit::kPage: return "page";
    case PlaceUnit::kParagraph: return "paragraph";
    case PlaceUnit::kSection: return "section";
  }
  return "place";
}

int32_t Document::PlaceOf(size_t offset) const {
  const auto next =
      std::upper_bound(marks.begin(), marks.end(), offset, [](size_t at, const Mark& mark) { return at < mark.begin; });
  return next == marks.begin() ? 1 : std::prev(next)->number;
}

Document TextDocument(std::string name, std::string_view bytes) {
  Document document;
  document.name = std::move(name);
  document.code = IsCode(document.name);
  if (bytes.starts_with(kByteOrderMark)) bytes.remove_prefix(kByteOrderMark.size());
  if (bytes.size() > kLongestDocumentText) {
    ThrowInvalid("{}: holds more than {} MiB of text; give a part of it", document.name, kLongestDocumentText >> 20);
  }
  if (bytes.find('\0') != std::string_view::npos) {
    ThrowInvalid("{}: is neither text nor a PDF, EPUB, DOCX or HTML document", document.name);
  }
  int32_t line = 1;
  document.marks.push_back({0, line});
  for (size_t at = 0; at < bytes.size();) {
    const Utf8Step step = ScanUtf8(bytes, at);
    if (step.kind != Utf8Step::Kind::kCharacter) {
      ThrowInvalid("{}: the byte at offset {} is not UTF-8; convert the text first (iconv does)", document.name, at);
    }
    at += step.size;
    if (step.code == '\n') document.marks.push_back({at, ++line});
  }
  document.text = bytes;
  CheckHasText(document, "");
  return document;
}

Document HtmlDocument(std::string name, std::string_view bytes) {
  Document document;
  document.name = std::move(name);
  TextBuilder builder(document);
  AddHtml(document.name, bytes, 0, builder);
  CheckHasText(document, "; a page that is made by scripts is empty without them");
  return document;
}

Document ReadDocument(std::string name, std::string_view bytes, const std::function<void()>& poll) {
  if (bytes.substr(0, kPdfHeaderWithin).find("%PDF-") != std::string_view::npos) {
    return PdfDocument(std::move(name), bytes, poll);
  }
  if (bytes.starts_with("PK\x03\x04") || bytes.starts_with("PK\x05\x06")) {
    ZipArchive archive(name, bytes);
    if (archive.Read("word/document.xml")) return DocxDocument(std::move(name), bytes);
    if (archive.Read("META-INF/container.xml")) return EpubDocument(std::move(name), bytes);
    ThrowInvalid("{}: is a zip archive, and neither DOCX nor EPUB; unpack it and give what is in it", name);
  }
  if (bytes.starts_with(kWord97)) {
    ThrowInvalid("{}: is in the format of Word before 2007; save it as DOCX", name);
  }
  const std::string extension = Extension(name);
  const bool html = extension == ".html" || extension == ".htm" || extension == ".xhtml";
  if (html || BeginsWithTag(bytes, "<!doctype html") || BeginsWithTag(bytes, "<html")) {
    return HtmlDocument(std::move(name), bytes);
  }
  return TextDocument(std::move(name), bytes);
}

std::vector<Document> ReadDocuments(const std::vector<std::string>& paths,
                                    const std::function<void(const std::string& text)>& note,
                                    const std::function<void()>& poll) {
  std::vector<Document> documents;
  size_t sum = 0;
  const auto add = [&](Document document) {
    sum += document.text.size();
    if (sum > kLongestDocumentText || documents.size() == kMostDocuments) {
      ThrowInvalid("{} and the documents before it hold more than {} MiB of text; give fewer", document.name,
                   kLongestDocumentText >> 20);
    }
    documents.push_back(std::move(document));
  };
  for (const std::string& path : paths) {
    std::error_code error;
    if (path == "-" || !fs::is_directory(path, error)) {
      const std::string name = path == "-" ? "standard input" : path;
      add(ReadDocument(name, ReadBytes(path), poll));
      continue;
    }
    std::vector<std::string> skipped;
    const size_t before = documents.size();
    for (const std::string& file : FilesIn(path)) {
      poll();
      try {
        add(ReadDocument(file, ReadBytes(file), poll));
      } catch (const Error& failed) {
        if (sum > kLongestDocumentText) throw;
        skipped.emplace_back(failed.what());
      }
    }
    if (documents.size() == before) {
      ThrowInvalid("{}: there is no document in this folder{}{}", path, skipped.empty() ? "" : "; for one, ",
                   skipped.empty() ? "" : skipped.front());
    }
    if (!skipped.empty()) note(fmt::format("{}: {} files are no documents: {}", path, skipped.size(), skipped.front()));
  }
  return documents;
}

}  // namespace phsa
