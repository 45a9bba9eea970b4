// The documents of text files and JSON lines files, in order, as they are in the files.
#ifndef PHSA_DATA_DOCUMENT_READER_H_
#define PHSA_DATA_DOCUMENT_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/input_stream.h"

namespace phsa {

enum class TextFormat : uint8_t {
  kAuto,       // by the name (.jsonl, .ndjson, .txt, .md, also with .xz, .gz or .zst behind it), else by the content
  kText,       // a file is a document
  kJsonLines,  // a line is a document
};

// Several short documents, or a long one.
struct DocumentBatch {
  struct Document {
    size_t begin, size;  // in `text`
    size_t source;       // the number of its file
    uint64_t line;       // in JSON lines, from 1; 0: the document is a whole text file
  };
  std::string text;
  std::vector<Document> documents;
  uint64_t position = 0;  // how many bytes of the files were read when it was full
};

class DocumentReader {
 public:
  // A folder stands for all files in it and in its folders, in the order of their names.
  DocumentReader(const std::vector<std::string>& paths, TextFormat format);

  const std::vector<std::string>& files() const { return files_; }
  uint64_t total_bytes() const { return total_bytes_; }  // of all files; 0: not known

  // False: there are no more. Throws phsa::Error naming file and place.
  bool Next(DocumentBatch* batch);
  // "books.jsonl: line 3", as messages begin.
  std::string Where(const DocumentBatch::Document& document) const;

  // Of one document. What holds more is no document, but a file that should be in JSON lines.
  static constexpr size_t kLongestDocument = size_t{128} << 20;

 private:
  void OpenNext();
  bool Refill();  // false: the end of the file
  void ReadLines(DocumentBatch* batch);
  void ReadText(DocumentBatch* batch);
  void Append(std::string_view part, size_t begin, DocumentBatch* batch);

  std::vector<std::string> files_;
  TextFormat format_;
  uint64_t total_bytes_ = 0, finished_bytes_ = 0;

  size_t next_ = 0;  // the file that is opened next
  std::unique_ptr<InputStream> stream_;
  bool json_lines_ = false;
  uint64_t line_ = 0;
  std::vector<char> buffer_;
  std::string_view rest_;  // what of the buffer was not given yet
};

}  // namespace phsa

#endif  // PHSA_DATA_DOCUMENT_READER_H_
