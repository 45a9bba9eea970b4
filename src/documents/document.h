// A document of any of the kinds that people have, as text, with the place in the original of every part of it.
#ifndef PHSA_DOCUMENTS_DOCUMENT_H_
#define PHSA_DOCUMENTS_DOCUMENT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace phsa {

// What its places count, from 1: lines of the file (text, source code, HTML), pages (PDF), paragraphs (DOCX) or the
// parts of a book in reading order (EPUB).
enum class PlaceUnit : uint8_t { kLine, kPage, kParagraph, kSection };
const char* Name(PlaceUnit unit);  // "line"

struct Document {
  std::string name;  // its path
  std::string text;  // UTF-8
  PlaceUnit unit = PlaceUnit::kLine;
  bool code = false;  // source code, in which a line says something of its own

  // From `begin` (a byte of the text) on it is place `number`. Ascending.
  struct Mark {
    size_t begin;
    int32_t number;
  };
  std::vector<Mark> marks;
  int32_t PlaceOf(size_t offset) const;
};

// Nobody's context holds more; a few bytes of a hostile file may claim to.
inline constexpr size_t kLongestDocumentText = size_t{64} << 20;
inline constexpr size_t kLargestDocumentFile = size_t{256} << 20;
inline constexpr size_t kMostDocuments = 10000;

// All throw phsa::Error naming the document and what is wrong with it: it is no such document, it is cut, too large, or
// holds no text. Where it is damaged in parts, what its library makes of it counts.
Document TextDocument(std::string name, std::string_view bytes);
Document HtmlDocument(std::string name, std::string_view bytes);  // XHTML too
Document DocxDocument(std::string name, std::string_view bytes);
Document EpubDocument(std::string name, std::string_view bytes);
// Through poppler's program pdftotext, in a process of its own with limits on its time and memory. `poll` is called
// several times a second, and what it throws ends it.
Document PdfDocument(std::string name, std::string_view bytes, const std::function<void()>& poll);

// By its first bytes and, where those say nothing, its name.
Document ReadDocument(std::string name, std::string_view bytes, const std::function<void()>& poll);

// Paths of files ("-" is standard input), and of folders, which stand for the documents in them and in their folders in
// the order of their names; not those whose names begin with a point, nor what is no document: `note` is told which.
std::vector<Document> ReadDocuments(const std::vector<std::string>& paths,
                                    const std::function<void(const std::string& text)>& note,
                                    const std::function<void()>& poll);

}  // namespace phsa

#endif  // PHSA_DOCUMENTS_DOCUMENT_H_
