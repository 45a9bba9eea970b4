#include "documents/markup.h"

#include <libxml/HTMLparser.h>
#include <libxml/parser.h>
#include <libxml/parserInternals.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>

#include "base/errors.h"
#include "base/utf8.h"

namespace phsa {
namespace {

// Elements within elements: more is no page, and takes the parser a time that grows with the square.
constexpr int32_t kDeepest = 1000;
constexpr size_t kPiece = 1 << 16;

std::string_view View(const xmlChar* text) { return reinterpret_cast<const char*>(text); }
std::string_view View(const xmlChar* text, int length) {
  return {reinterpret_cast<const char*>(text), static_cast<size_t>(length)};
}

void Ignore(void*, const char*, ...) {}  // NOLINT(cert-dcl50-cpp): libxml2's type for messages

void InitParser() {
  static std::once_flag once;
  std::call_once(once, xmlInitParser);
}

struct FreeContext {
  void operator()(xmlParserCtxtPtr context) const {
    xmlFreeDoc(context->myDoc);  // made for the entities that a file declares, and not the context's own
    xmlFreeParserCtxt(context);
  }
};
using Context = std::unique_ptr<xmlParserCtxt, FreeContext>;

// What one of the parser's callbacks throws must not fly through C: it is kept, and the parser stopped.
template <class State, class Fn>
void Guarded(State& state, const Fn& fn) {
  if (state.error != nullptr) return;
  try {
    fn();
  } catch (...) {
    state.error = std::current_exception();
    xmlStopParser(state.context);
  }
}

template <class State>
void Deeper(State& state, const std::string& name) {
  if (++state.depth > kDeepest) {
    ThrowInvalid("{}: has more than {} elements within each other; it is no document", name, kDeepest);
  }
}

template <size_t kSize>
bool IsOneOf(std::string_view name, const std::array<std::string_view, kSize>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// What is never read, lines, and what begins a paragraph.
constexpr std::array<std::string_view, 9> kSkipped = {"script", "style",  "template", "noscript", "svg",
                                                      "math",   "iframe", "object",   "select"};
constexpr std::array<std::string_view, 6> kLineElements = {"li", "tr", "dt", "dd", "option", "caption"};
constexpr std::array<std::string_view, 30> kBlockElements = {
    "title",   "p",      "div",        "section", "article", "header", "footer", "main",     "nav",        "aside",
    "h1",      "h2",     "h3",         "h4",      "h5",      "h6",     "ul",     "ol",       "dl",         "table",
    "address", "figure", "figcaption", "form",    "hr",      "pre",    "body",   "fieldset", "blockquote", "details"};

struct HtmlState {
  const std::string& name;
  TextBuilder& builder;
  int32_t section;
  xmlParserCtxtPtr context = nullptr;
  std::exception_ptr error;
  int32_t depth = 0, skipped = 0, kept = 0;  // elements that are open: all, such as are skipped, <pre>
};

void Break(HtmlState& state, std::string_view element) {
  if (element == "br" || IsOneOf(element, kLineElements)) {
    state.builder.Line();
  } else if (IsOneOf(element, kBlockElements)) {
    state.builder.Paragraph();
  } else if (element == "td" || element == "th") {
    state.builder.Space();
  }
}

void BeginHtml(void* user, const xmlChar* element, const xmlChar**) {
  auto& state = *static_cast<HtmlState*>(user);
  Guarded(state, [&] {
    Deeper(state, state.name);
    const std::string_view own = View(element);
    if (IsOneOf(own, kSkipped)) ++state.skipped;
    if (own == "pre") ++state.kept;
    Break(state, own);
  });
}

void EndHtml(void* user, const xmlChar* element) {
  auto& state = *static_cast<HtmlState*>(user);
  Guarded(state, [&] {
    --state.depth;
    const std::string_view own = View(element);
    if (IsOneOf(own, kSkipped)) state.skipped = std::max(0, state.skipped - 1);
    if (own == "pre") state.kept = std::max(0, state.kept - 1);
    if (own != "br") Break(state, own);
  });
}

void HtmlText(void* user, const xmlChar* text, int length) {
  auto& state = *static_cast<HtmlState*>(user);
  Guarded(state, [&] {
    if (state.skipped > 0) return;
    const std::string_view own = View(text, length);
    int32_t place = state.section;
    if (place == 0 && state.context->input != nullptr) {
      // The parser stands behind the text, whose first words count.
      const auto breaks = static_cast<int32_t>(std::count(own.begin(), own.end(), '\n'));
      const size_t first = own.find_first_not_of(" \t\r\n\f");
      const auto skipped = static_cast<int32_t>(
          std::count(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(std::min(first, own.size())), '\n'));
      place = std::max(1, state.context->input->line - breaks + skipped);
    }
    state.builder.Add(own, place, state.kept > 0);
  });
}

void FeedInPieces(std::string_view bytes, const std::function<bool(const char*, int, int)>& feed) {
  for (size_t at = 0; at < bytes.size(); at += kPiece) {
    const size_t size = std::min(kPiece, bytes.size() - at);
    if (!feed(bytes.data() + at, static_cast<int>(size), 0)) return;
  }
  feed(nullptr, 0, 1);
}

struct XmlState {
  const std::string& name;
  const XmlHandler& handler;
  xmlParserCtxtPtr context = nullptr;
  std::exception_ptr error;
  int32_t depth = 0;
};

void BeginXml(void* user, const xmlChar* element, const xmlChar*, const xmlChar*, int, const xmlChar**, int count, int,
              const xmlChar** values) {
  auto& state = *static_cast<XmlState*>(user);
  Guarded(state, [&] {
    Deeper(state, state.name);
    Attributes attributes;  // five pointers each: name, prefix, namespace, value, its end
    for (int i = 0; i < count; ++i, values += 5) {
      attributes.emplace_back(View(values[0]), View(values[3], static_cast<int>(values[4] - values[3])));
    }
    if (state.handler.begin) state.handler.begin(View(element), attributes);
  });
}

void EndXml(void* user, const xmlChar* element, const xmlChar*, const xmlChar*) {
  auto& state = *static_cast<XmlState*>(user);
  Guarded(state, [&] {
    --state.depth;
    if (state.handler.end) state.handler.end(View(element));
  });
}

void XmlText(void* user, const xmlChar* text, int length) {
  auto& state = *static_cast<XmlState*>(user);
  Guarded(state, [&] {
    if (state.handler.text) state.handler.text(View(text, length));
  });
}

}  // namespace

void AddHtml(const std::string& name, std::string_view bytes, int32_t section, TextBuilder& builder) {
  InitParser();
  HtmlState state{name, builder, section};
  htmlSAXHandler sax{};
  sax.startElement = BeginHtml;
  sax.endElement = EndHtml;
  sax.characters = HtmlText;
  sax.ignorableWhitespace = HtmlText;
  sax.warning = Ignore;
  sax.error = Ignore;
  sax.fatalError = Ignore;
  // What is UTF-8 needs no other encoding, whatever a page says of itself.
  const xmlCharEncoding encoding = IsUtf8(bytes) ? XML_CHAR_ENCODING_UTF8 : XML_CHAR_ENCODING_NONE;
  const Context context(htmlCreatePushParserCtxt(&sax, &state, nullptr, 0, nullptr, encoding));
  if (context == nullptr) Throw(PHSA_OUT_OF_MEMORY, "{}: there is no memory to read it", name);
  state.context = context.get();
  htmlCtxtUseOptions(context.get(), HTML_PARSE_NONET | HTML_PARSE_NOERROR | HTML_PARSE_NOWARNING);
  FeedInPieces(bytes, [&](const char* piece, int size, int last) {
    htmlParseChunk(context.get(), piece, size, last);
    return state.error == nullptr;
  });
  if (state.error != nullptr) std::rethrow_exception(state.error);
}

void ReadXml(const std::string& name, std::string_view bytes, const XmlHandler& handler) {
  InitParser();
  XmlState state{name, handler};
  xmlSAXHandler sax{};
  sax.initialized = XML_SAX2_MAGIC;
  sax.startElementNs = BeginXml;
  sax.endElementNs = EndXml;
  sax.characters = XmlText;
  sax.cdataBlock = XmlText;
  sax.warning = Ignore;
  sax.error = Ignore;
  sax.fatalError = Ignore;
  // No handler for declarations: an entity that the file declares is one that nobody knows.
  const Context context(xmlCreatePushParserCtxt(&sax, &state, nullptr, 0, nullptr));
  if (context == nullptr) Throw(PHSA_OUT_OF_MEMORY, "{}: there is no memory to read it", name);
  state.context = context.get();
  xmlCtxtUseOptions(context.get(), XML_PARSE_NONET | XML_PARSE_NOERROR | XML_PARSE_NOWARNING);
  FeedInPieces(bytes, [&](const char* piece, int size, int last) {
    return xmlParseChunk(context.get(), piece, size, last) == 0 && state.error == nullptr;
  });
  if (state.error != nullptr) std::rethrow_exception(state.error);
  if (context->wellFormed == 0) {
    const int line = context->lastError.line;
    ThrowInvalid("{}: is no XML that can be read, from line {} on; the file is damaged", name, std::max(1, line));
  }
}

}  // namespace phsa
