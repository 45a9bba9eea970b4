// Any bytes are either refused with phsa::Error or read into text that is UTF-8, with places in order. The first byte
// says as what: a page, or the XML of a DOCX, which is packed here as a fuzzer finds no checksums. PDF is poppler's.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/utf8.h"
#include "documents/document.h"
#include "documents/markup.h"
#include "documents/text_builder.h"
#include "documents/zip_archive.h"
#include "phsa/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    phsa::Document document;
    switch (data[0] % 5) {
      case 0: document = phsa::HtmlDocument("fuzz.html", bytes); break;
      case 1: document = phsa::TextDocument("fuzz.txt", bytes); break;
      case 2: document = phsa::DocxDocument("fuzz.docx", bytes); break;
      case 3: document = phsa::EpubDocument("fuzz.epub", bytes); break;
      default: {
        document.name = "fuzz.xml";
        phsa::TextBuilder builder(document);
        phsa::AddWordText("fuzz.xml", bytes, builder);
        break;
      }
    }
    if (!phsa::IsUtf8(document.text)) std::abort();
    for (size_t i = 0; i < document.marks.size(); ++i) {
      if (document.marks[i].begin > document.text.size()) std::abort();
      if (i > 0 && (document.marks[i].begin < document.marks[i - 1].begin ||
                    document.marks[i].number <= document.marks[i - 1].number)) {
        std::abort();
      }
    }
  } catch (const phsa::Error&) {
    return 0;
  }
  return 0;
}
