// Text as a reader finds it, piece by piece: white space collapses, paragraphs are an empty line apart.
#ifndef PHSA_DOCUMENTS_TEXT_BUILDER_H_
#define PHSA_DOCUMENTS_TEXT_BUILDER_H_

#include <algorithm>
#include <string>
#include <string_view>

#include "documents/document.h"

namespace phsa {

class TextBuilder {
 public:
  // `document`: its name is there already; text and marks are added to it.
  explicit TextBuilder(Document& document) : document_(document) {}

  // `text`: UTF-8; bytes that are none become U+FFFD. `place`: where it stands. Throws phsa::Error where the document
  // becomes too long.
  void Add(std::string_view text, int32_t place, bool keep_white_space = false);
  void Space() { space_ = true; }
  void Line() { breaks_ = std::max(breaks_, 1); }
  void Paragraph() { breaks_ = 2; }

 private:
  void Put(std::string_view text, int32_t place);
  Document& document_;
  bool space_ = false;
  int32_t breaks_ = 0;  // line breaks that come before the next text
};

// Throws phsa::Error where the document has no text.
void CheckHasText(const Document& document, const char* advice);

}  // namespace phsa

#endif  // PHSA_DOCUMENTS_TEXT_BUILDER_H_
