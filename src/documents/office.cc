// DOCX and EPUB: zip archives of XML and XHTML.
#include <algorithm>
#include <array>
#include <map>

#include "base/errors.h"
#include "base/percent.h"
#include "documents/document.h"
#include "documents/markup.h"
#include "documents/text_builder.h"
#include "documents/zip_archive.h"

namespace phsa {
namespace {

constexpr size_t kMostSections = 20000;

std::string Attribute(const Attributes& attributes, std::string_view name) {
  for (const auto& [own, value] : attributes) {
    if (own == name) return value;
  }
  return "";
}

// The text of WordprocessingML: runs of w:t in paragraphs w:p, of which there were `paragraph` before.
void AddWordParagraphs(const std::string& name, std::string_view xml, int32_t& paragraph, TextBuilder& builder) {
  int32_t in_text = 0, in_fallback = 0, in_table = 0;
  XmlHandler handler;
  handler.begin = [&](std::string_view element, const Attributes&) {
    if (element == "p") {
      ++paragraph;
      in_table > 0 ? builder.Line() : builder.Paragraph();
    } else if (element == "t") {
      ++in_text;
    } else if (element == "Fallback") {
      ++in_fallback;  // says once more what the choice before it says
    } else if (element == "tbl") {
      ++in_table;
      builder.Paragraph();
    } else if (element == "tab" || element == "tc") {
      builder.Space();
    } else if (element == "br" || element == "cr" || element == "tr") {
      builder.Line();
    }
  };
  handler.end = [&](std::string_view element) {
    if (element == "t") --in_text;
    if (element == "Fallback") --in_fallback;
    if (element == "tbl") --in_table;
  };
  handler.text = [&](std::string_view text) {
    if (in_text > 0 && in_fallback == 0) builder.Add(text, std::max(1, paragraph));
  };
  ReadXml(name, xml, handler);
}

// "OEBPS/text/a%20b.xhtml" of "text/a%20b.xhtml#part" in OEBPS/content.opf.
std::string Resolve(const std::string& base, std::string_view reference) {
  const std::string path = WithoutPercents(reference.substr(0, reference.find('#')));
  if (!path.empty() && path[0] == '/') return path.substr(1);
  std::vector<std::string> parts;
  const std::string joined = base.substr(0, base.rfind('/') == std::string::npos ? 0 : base.rfind('/') + 1) + path;
  for (size_t begin = 0; begin <= joined.size();) {
    const size_t end = std::min(joined.find('/', begin), joined.size());
    const std::string part = joined.substr(begin, end - begin);
    if (part == "..") {
      if (!parts.empty()) parts.pop_back();
    } else if (!part.empty() && part != ".") {
      parts.push_back(part);
    }
    begin = end + 1;
  }
  return fmt::format("{}", fmt::join(parts, "/"));
}

}  // namespace

void AddWordText(const std::string& name, std::string_view xml, TextBuilder& builder) {
  int32_t paragraph = 0;
  AddWordParagraphs(name, xml, paragraph, builder);
}

Document DocxDocument(std::string name, std::string_view bytes) {
  Document document;
  document.name = std::move(name);
  document.unit = PlaceUnit::kParagraph;
  ZipArchive archive(document.name, bytes);
  TextBuilder builder(document);
  int32_t paragraph = 0;
  const std::optional<std::string> body = archive.Read("word/document.xml");
  if (!body) ThrowInvalid("{}: is a zip archive without word/document.xml, so it is no DOCX", document.name);
  AddWordParagraphs(document.name, *body, paragraph, builder);
  for (const char* notes : {"word/footnotes.xml", "word/endnotes.xml"}) {
    if (const std::optional<std::string> xml = archive.Read(notes)) {
      AddWordParagraphs(document.name, *xml, paragraph, builder);
    }
  }
  CheckHasText(document, "");
  return document;
}

Document EpubDocument(std::string name, std::string_view bytes) {
  Document document;
  document.name = std::move(name);
  document.unit = PlaceUnit::kSection;
  ZipArchive archive(document.name, bytes);
  const auto read = [&](const std::string& member) {
    std::optional<std::string> part = archive.Read(member);
    if (!part) ThrowInvalid("{}: has no part {}; the book is damaged", document.name, Quoted(member));
    return *part;
  };
  std::string package;
  XmlHandler container;
  container.begin = [&](std::string_view element, const Attributes& attributes) {
    if (element == "rootfile" && package.empty()) package = Attribute(attributes, "full-path");
  };
  ReadXml(document.name, read("META-INF/container.xml"), container);

  std::map<std::string, std::string> files;  // by id
  std::vector<std::string> order;
  XmlHandler spine;
  spine.begin = [&](std::string_view element, const Attributes& attributes) {
    if (element == "item") files[Attribute(attributes, "id")] = Attribute(attributes, "href");
    if (element == "itemref") order.push_back(Attribute(attributes, "idref"));
    if (order.size() > kMostSections) ThrowInvalid("{}: has more than {} parts", document.name, kMostSections);
  };
  ReadXml(document.name, read(package), spine);

  TextBuilder builder(document);
  int32_t section = 0;
  for (const std::string& id : order) {
    ++section;
    const auto file = files.find(id);
    // A part that is not there is not read, as other readers do.
    if (file == files.end()) continue;
    if (const std::optional<std::string> page = archive.Read(Resolve(package, file->second))) {
      builder.Paragraph();
      AddHtml(document.name, *page, section, builder);
    }
  }
  CheckHasText(document, "; it may be a book of pictures");
  return document;
}

}  // namespace phsa
