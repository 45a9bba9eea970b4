#include <gtest/gtest.h>
#include <unistd.h>
#include <zip.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "documents/document.h"
#include "phsa/error.h"
#include "refusal.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

const std::function<void()> kNoPoll = [] {};

template <class Fn>
void ExpectRefused(const Fn& fn, const std::vector<std::string>& parts) {
  const std::string message = Refusal(fn);
  for (const std::string& part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
}

// What PlaceOf says of the first `needle` in the text; 0: it is not there.
int32_t PlaceOf(const Document& document, const std::string& needle) {
  const size_t at = document.text.find(needle);
  return at == std::string::npos ? 0 : document.PlaceOf(at);
}

std::string Zip(const std::map<std::string, std::string>& members) {
  zip_error_t error;
  zip_error_init(&error);
  zip_source_t* const source = zip_source_buffer_create(nullptr, 0, 0, &error);
  zip_source_keep(source);
  zip_t* const archive = zip_open_from_source(source, ZIP_TRUNCATE, &error);
  for (const auto& [name, text] : members) {
    zip_file_add(archive, name.c_str(), zip_source_buffer(archive, text.data(), text.size(), 0), 0);
  }
  EXPECT_EQ(zip_close(archive), 0);
  std::string bytes;
  zip_source_open(source);
  char part[4096];
  for (zip_int64_t count; (count = zip_source_read(source, part, sizeof(part))) > 0;) {
    bytes.append(part, static_cast<size_t>(count));
  }
  zip_source_close(source);
  zip_source_free(source);
  zip_error_fini(&error);
  return bytes;
}

std::string Docx(const std::string& body) {
  return Zip({{"word/document.xml",
               "<?xml version=\"1.0\"?><w:document xmlns:w=\"http://schemas.openxmlformats.org/wordprocessingml/2006/"
               "main\"><w:body>" +
                   body + "</w:body></w:document>"}});
}

std::map<std::string, std::string> BookParts() {
  return {
      {"mimetype", "application/epub+zip"},
      {"META-INF/container.xml",
       "<container xmlns=\"urn:oasis:names:tc:opendocument:xmlns:container\"><rootfiles><rootfile "
       "full-path=\"OEBPS/content.opf\"/></rootfiles></container>"},
      {"OEBPS/content.opf",
       "<package xmlns=\"http://www.idpf.org/2007/opf\"><manifest><item id=\"b\" href=\"text/second%20part.xhtml\"/>"
       "<item id=\"a\" href=\"../first.xhtml\"/></manifest><spine><itemref idref=\"a\"/><itemref idref=\"gone\"/>"
       "<itemref idref=\"b\"/></spine></package>"},
      {"first.xhtml", "<html><body><p>The bees&nbsp;woke.</p></body></html>"},
      {"OEBPS/text/second part.xhtml",
       "<?xml version=\"1.0\"?><html xmlns=\"http://www.w3.org/1999/xhtml\"><body><h1>Two</h1><p>The hive "
       "slept.</p></body></html>"}};
}

// One page a text, as small as a PDF can be; its cross-reference table is left out, which poppler mends.
std::string Pdf(const std::vector<std::string>& pages) {
  std::string objects = "%PDF-1.4\n1 0 obj\n<< /Type /Catalog /Pages 2 0 R >>\nendobj\n", kids;
  int number = 4;
  for (const std::string& text : pages) {
    const std::string stream = "BT /F1 12 Tf 72 720 Td (" + text + ") Tj ET";
    kids += std::to_string(number) + " 0 R ";
    objects += std::to_string(number) + " 0 obj\n<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents " +
               std::to_string(number + 1) + " 0 R /Resources << /Font << /F1 3 0 R >> >> >>\nendobj\n";
    objects += std::to_string(number + 1) + " 0 obj\n<< /Length " + std::to_string(stream.size()) + " >>\nstream\n" +
               stream + "\nendstream\nendobj\n";
    number += 2;
  }
  objects += "2 0 obj\n<< /Type /Pages /Count " + std::to_string(pages.size()) + " /Kids [" + kids +
             "] >>\nendobj\n3 0 obj\n<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>\nendobj\n";
  return objects + "trailer\n<< /Root 1 0 R /Size " + std::to_string(number) + " >>\n%%EOF\n";
}

bool HasPdftotext() { return std::system("pdftotext -v >/dev/null 2>&1") == 0; }

TEST(Documents, TextIsAsItIsAndItsPlacesAreLines) {
  const Document document = ReadDocument("a.txt", "\xef\xbb\xbfOne.\nTwo.\n\nFour é.\n", kNoPoll);
  EXPECT_EQ(document.text, "One.\nTwo.\n\nFour é.\n");
  EXPECT_EQ(document.unit, PlaceUnit::kLine);
  EXPECT_FALSE(document.code);
  EXPECT_EQ(PlaceOf(document, "One"), 1);
  EXPECT_EQ(PlaceOf(document, "Two"), 2);
  EXPECT_EQ(PlaceOf(document, "é"), 4);
  EXPECT_TRUE(ReadDocument("a.py", "x = 1\n", kNoPoll).code);
}

TEST(Documents, HtmlIsItsTextWithoutScriptsAndPlacesAreItsLines) {
  const Document document =
      ReadDocument("page",
                   "<!DOCTYPE html>\n<html><head><title>Bees</title>\n<script>var x = '<p>no</p>';</script></head>\n"
                   "<body><p>The <b>tower</b> is\n  41&nbsp;m high &amp; white.<br>New line</p>\n\n<pre>a  b\nc</pre>\n"
                   "<ul><li>one<li>two</ul></body>",
                   kNoPoll);
  EXPECT_EQ(document.text, "Bees\n\nThe tower is 41 m high & white.\nNew line\n\na  b\nc\n\none\ntwo");
  EXPECT_EQ(PlaceOf(document, "Bees"), 2);
  EXPECT_EQ(PlaceOf(document, "The tower"), 4);
  EXPECT_EQ(PlaceOf(document, "one"), 9);
}

TEST(Documents, HtmlOfAnotherEncodingSaysSo) {
  const Document latin = HtmlDocument("a.html", "<meta charset=iso-8859-1><p>caf\xe9</p>");
  EXPECT_EQ(latin.text, "café");
  const Document chinese = HtmlDocument("b.html", "<meta charset=gbk><p>\xce\xd2\xc3\xc7</p>");
  EXPECT_EQ(chinese.text, "我们");
}

TEST(Documents, DocxHasParagraphsTablesAndNoFallbacks) {
  const Document document = ReadDocument(
      "report.docx",
      Docx("<w:p><w:r><w:t>First </w:t></w:r><w:r><w:t xml:space=\"preserve\">one.</w:t></w:r></w:p>"
           "<w:p><w:r><w:t>Second</w:t><w:tab/><w:t>part &amp; more.</w:t></w:r></w:p>"
           "<w:p><w:r><w:delText>gone</w:delText><w:instrText>PAGE</w:instrText></w:r></w:p>"
           "<mc:AlternateContent xmlns:mc=\"x\"><mc:Choice><w:p><w:r><w:t>Once.</w:t></w:r></w:p></mc:Choice>"
           "<mc:Fallback><w:p><w:r><w:t>Once.</w:t></w:r></w:p></mc:Fallback></mc:AlternateContent>"
           "<w:tbl><w:tr><w:tc><w:p><w:r><w:t>left</w:t></w:r></w:p></w:tc></w:tr></w:tbl>"),
      kNoPoll);
  EXPECT_EQ(document.text, "First one.\n\nSecond part & more.\n\nOnce.\n\nleft");
  EXPECT_EQ(document.unit, PlaceUnit::kParagraph);
  EXPECT_EQ(PlaceOf(document, "First"), 1);
  EXPECT_EQ(PlaceOf(document, "part"), 2);
}

TEST(Documents, EpubIsReadInTheOrderOfItsSpine) {
  const Document document = ReadDocument("book.epub", Zip(BookParts()), kNoPoll);
  EXPECT_EQ(document.text, "The bees woke.\n\nTwo\n\nThe hive slept.");
  EXPECT_EQ(document.unit, PlaceUnit::kSection);
  EXPECT_EQ(PlaceOf(document, "bees"), 1);
  EXPECT_EQ(PlaceOf(document, "slept"), 3);
}

TEST(Documents, PdfIsReadByPages) {
  if (!HasPdftotext()) GTEST_SKIP() << "pdftotext is not here";
  const Document document = ReadDocument("paper.pdf", Pdf({"The first page.", "The second page."}), kNoPoll);
  EXPECT_EQ(document.unit, PlaceUnit::kPage);
  EXPECT_EQ(PlaceOf(document, "first"), 1);
  EXPECT_EQ(PlaceOf(document, "second"), 2);
  ExpectRefused([&] { ReadDocument("scan.pdf", Pdf({""}), kNoPoll); }, {"scan.pdf", "no text"});
  ExpectRefused([&] { ReadDocument("cut.pdf", "%PDF-1.7 and nothing else", kNoPoll); }, {"cut.pdf", "PDF"});
}

TEST(Documents, AFolderStandsForTheDocumentsInIt) {
  const fs::path folder = fs::temp_directory_path() / ("phsa-documents-" + std::to_string(getpid()));
  fs::create_directories(folder / "b" / ".hidden");
  const auto write = [&](const char* name, const std::string& text) { std::ofstream(folder / name) << text; };
  write("z.md", "Last.");
  write("b/a.cc", "int a;");
  write("b/.hidden/c.txt", "Unseen.");
  write("picture.png", std::string("\x89PNG\0\0", 6));
  fs::create_symlink(folder, folder / "b" / "around");
  std::string noted;
  const std::vector<Document> documents = ReadDocuments(
      {folder.string()}, [&](const std::string& text) { noted += text; }, kNoPoll);
  ASSERT_EQ(documents.size(), 2u);
  EXPECT_EQ(documents[0].text, "int a;");
  EXPECT_EQ(documents[1].text, "Last.");
  EXPECT_NE(noted.find("picture.png"), std::string::npos);
  fs::remove_all(folder);
  ExpectRefused(
      [&] {
        ReadDocuments(
            {folder.string()}, [](const std::string&) {}, kNoPoll);
      },
      {"No such file"});
}

TEST(Documents, WhatIsNoDocumentIsRefusedByName) {
  ExpectRefused([&] { ReadDocument("x.bin", std::string("ab\0cd", 5), kNoPoll); }, {"x.bin", "neither"});
  ExpectRefused([&] { ReadDocument("x.txt", "caf\xe9", kNoPoll); }, {"x.txt", "offset 3"});
  ExpectRefused([&] { ReadDocument("x.txt", " \n", kNoPoll); }, {"x.txt", "no text"});
  ExpectRefused([&] { ReadDocument("x.doc", "\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1....", kNoPoll); }, {"x.doc", "DOCX"});
  ExpectRefused([&] { ReadDocument("x.zip", Zip({{"a.txt", "a"}}), kNoPoll); }, {"x.zip", "unpack"});
  ExpectRefused([&] { ReadDocument("x.html", "<script>only()</script>", kNoPoll); }, {"x.html", "no text"});
}

TEST(Documents, HostileArchivesEndInAMessage) {
  // A hundred kilobytes that unpack to a hundred megabytes.
  std::map<std::string, std::string> bomb = {{"word/document.xml", std::string(size_t{100} << 20, ' ')}};
  ExpectRefused([&] { ReadDocument("bomb.docx", Zip(bomb), kNoPoll); }, {"bomb.docx", "64 MiB"});

  const std::string whole = Docx("<w:p><w:r><w:t>Text that is compressed, text that is compressed.</w:t></w:r></w:p>");
  for (size_t size = 4; size < whole.size(); size += 7) {
    EXPECT_THROW(ReadDocument("cut.docx", whole.substr(0, size), kNoPoll), Error) << size;
  }
  for (size_t at = 30; at < whole.size(); at += 3) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x5a);
    try {
      ReadDocument("damaged.docx", damaged, kNoPoll);
    } catch (const Error&) {
      continue;
    }
  }
  std::map<std::string, std::string> book = BookParts();
  book["META-INF/container.xml"] = "<container><rootfile full-path=\"../../etc/passwd\"/></container>";
  ExpectRefused([&] { ReadDocument("book.epub", Zip(book), kNoPoll); }, {"book.epub", "passwd"});
}

TEST(Documents, EntitiesThatAFileDeclaresAreNotExpanded) {
  std::string laughs = "<!DOCTYPE d [<!ENTITY a \"ha\">";
  for (char c = 'b'; c < 'n'; ++c) {
    laughs += std::string("<!ENTITY ") + c + " \"";
    for (int i = 0; i < 10; ++i) laughs += std::string("&") + static_cast<char>(c - 1) + ";";
    laughs += "\">";
  }
  laughs += "<!ENTITY file SYSTEM \"file:///etc/passwd\">]>";
  for (const char* entity : {"&m;", "&file;"}) {
    const std::string xml = laughs + "<d><p><t>" + entity + "x</t></p></d>";
    try {
      const Document document = ReadDocument("laughs.docx", Zip({{"word/document.xml", xml}}), kNoPoll);
      EXPECT_EQ(document.text, "x");
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("laughs.docx"), std::string::npos);
    }
  }
}

TEST(Documents, ElementsWithoutEndAreRefused) {
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "<b>";
  ExpectRefused([&] { ReadDocument("deep.html", deep + "text", kNoPoll); }, {"deep.html", "within each other"});
  std::string xml;
  for (int i = 0; i < 100000; ++i) xml += "<b>";
  ExpectRefused([&] { ReadDocument("deep.docx", Zip({{"word/document.xml", xml}}), kNoPoll); }, {"deep.docx"});
}

}  // namespace
}  // namespace phsa
