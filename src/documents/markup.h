// HTML and XML through libxml2's streaming parsers, which build no tree: memory does not grow with the file. Nothing is
// loaded from anywhere, and no entity that a file declares is expanded.
#ifndef PHSA_DOCUMENTS_MARKUP_H_
#define PHSA_DOCUMENTS_MARKUP_H_

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "documents/text_builder.h"

namespace phsa {

// The text of an HTML page. `section`: the place of all of it; 0: places are its lines.
void AddHtml(const std::string& name, std::string_view bytes, int32_t section, TextBuilder& builder);

// The text of a DOCX's word/document.xml; places are its paragraphs. In office.cc.
void AddWordText(const std::string& name, std::string_view xml, TextBuilder& builder);

using Attributes = std::vector<std::pair<std::string, std::string>>;
struct XmlHandler {
  // Names without their namespace's prefix.
  std::function<void(std::string_view element, const Attributes& attributes)> begin;
  std::function<void(std::string_view element)> end;
  std::function<void(std::string_view text)> text;
};
// `name` is for messages. Throws phsa::Error where it is no XML, and what the handler throws.
void ReadXml(const std::string& name, std::string_view bytes, const XmlHandler& handler);

}  // namespace phsa

#endif  // PHSA_DOCUMENTS_MARKUP_H_
