#include "data/document_reader.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "base/errors.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBufferBytes = 1 << 20;
// Enough that handing a batch over costs nothing beside tokenizing it, some 30 ms; little enough that threads end at
// about the same time.
constexpr size_t kBatchBytes = 1 << 20;
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
constexpr std::string_view kWhiteSpace = " \t\r\n";

void AddFiles(const std::string& path, std::vector<std::string>* files) {
  std::error_code error;
  if (path == "-" || !fs::is_directory(path, error)) {
    files->push_back(path);
    return;
  }
  std::vector<std::string> names;
  auto entry = fs::recursive_directory_iterator(path, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    if (entry->is_regular_file(error)) names.push_back(entry->path().string());
  }
  if (error) Throw(PHSA_IO, "{}: cannot be read: {}", path, error.message());
  if (names.empty()) ThrowInvalid("{}: there are no files in this folder", path);
  std::sort(names.begin(), names.end());
  files->insert(files->end(), names.begin(), names.end());
}

TextFormat FormatOfName(const fs::path& path) {
  fs::path name = path.filename();
  const std::string packed = name.extension();
  if (packed == ".xz" || packed == ".gz" || packed == ".zst") name = name.stem();
  const std::string extension = name.extension();
  if (extension == ".jsonl" || extension == ".ndjson") return TextFormat::kJsonLines;
  if (extension == ".txt" || extension == ".md") return TextFormat::kText;
  return TextFormat::kAuto;
}

void DropWhiteSpace(std::string_view* text) {
  text->remove_prefix(std::min(text->find_first_not_of(kWhiteSpace), text->size()));
}

// Whether a file that begins so holds JSON objects.
bool LooksLikeJson(std::string_view start) {
  DropWhiteSpace(&start);
  if (start.empty() || start[0] != '{') return false;
  start.remove_prefix(1);
  DropWhiteSpace(&start);
  return !start.empty() && (start[0] == '"' || start[0] == '}');
}

}  // namespace

DocumentReader::DocumentReader(const std::vector<std::string>& paths, TextFormat format)
    : format_(format), buffer_(kBufferBytes) {
  for (const std::string& path : paths) AddFiles(path, &files_);
  for (const std::string& file : files_) {
    std::error_code error;
    const uintmax_t size = fs::file_size(file, error);
    if (error) {  // a pipe, or nothing, which opening it will tell
      total_bytes_ = 0;
      return;
    }
    total_bytes_ += size;
  }
}

std::string DocumentReader::Where(const DocumentBatch::Document& document) const {
  const std::string& file = files_[document.source];
  const std::string name = file == "-" ? "standard input" : file;
  return document.line == 0 ? name : fmt::format("{}: line {}", name, document.line);
}

void DocumentReader::OpenNext() {
  stream_ = std::make_unique<InputStream>(files_[next_]);
  line_ = 0;
  Refill();
  if (rest_.starts_with(kByteOrderMark)) rest_.remove_prefix(kByteOrderMark.size());
  TextFormat format = format_;
  if (format == TextFormat::kAuto) format = FormatOfName(files_[next_]);
  json_lines_ = format == TextFormat::kJsonLines || (format == TextFormat::kAuto && LooksLikeJson(rest_));
  ++next_;
}

bool DocumentReader::Refill() {
  // As much as is known, so that the start of a file is judged by more than the first packet of a pipe.
  size_t size = 0;
  while (size < buffer_.size()) {
    const size_t count = stream_->Read(buffer_.data() + size, buffer_.size() - size);
    if (count == 0) break;
    size += count;
  }
  rest_ = {buffer_.data(), size};
  return size > 0;
}

void DocumentReader::Append(std::string_view part, size_t begin, DocumentBatch* batch) {
  if (batch->text.size() - begin + part.size() > kLongestDocument) {
    if (json_lines_) {
      ThrowInvalid("{}: line {} is longer than {} MiB", stream_->name(), line_ + 1, kLongestDocument >> 20);
    }
    ThrowInvalid("{}: is longer than {} MiB, and a text file is one document; split it, or make it JSON lines",
                 stream_->name(), kLongestDocument >> 20);
  }
  batch->text += part;
}

void DocumentReader::ReadLines(DocumentBatch* batch) {
  size_t begin = batch->text.size();
  const auto end_line = [&] {
    ++line_;
    if (batch->text.find_first_not_of(kWhiteSpace, begin) == std::string::npos) {
      batch->text.resize(begin);
    } else {
      batch->documents.push_back({begin, batch->text.size() - begin, next_ - 1, line_});
      begin = batch->text.size();
    }
  };
  while (batch->text.size() < kBatchBytes || begin < batch->text.size()) {
    if (rest_.empty() && !Refill()) {
      end_line();
      finished_bytes_ += stream_->position();
      stream_.reset();
      return;
    }
    const size_t end = rest_.find('\n');
    Append(rest_.substr(0, end), begin, batch);
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + 1);
    if (end != std::string_view::npos) end_line();
  }
}

void DocumentReader::ReadText(DocumentBatch* batch) {
  const size_t begin = batch->text.size();
  do {
    Append(rest_, begin, batch);
  } while (Refill());
  batch->documents.push_back({begin, batch->text.size() - begin, next_ - 1, 0});
  finished_bytes_ += stream_->position();
  stream_.reset();
}

bool DocumentReader::Next(DocumentBatch* batch) {
  batch->text.clear();
  batch->documents.clear();
  while (batch->text.size() < kBatchBytes && (stream_ != nullptr || next_ < files_.size())) {
    if (stream_ == nullptr) OpenNext();
    json_lines_ ? ReadLines(batch) : ReadText(batch);
  }
  batch->position = finished_bytes_ + (stream_ ? stream_->position() : 0);
  return !batch->documents.empty();
}

}  // namespace phsa
