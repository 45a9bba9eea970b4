// Reading documents and writing token folders; the program around them is tested in tests/e2e/test_prepare.py.
#include <gtest/gtest.h>
#include <lzma.h>
#include <zlib.h>
#include <zstd.h>

#include <array>
#include <random>

#include "base/mapped_file.h"
#include "data/document_reader.h"
#include "data/input_stream.h"
#include "data/json_line.h"
#include "data/overlap.h"
#include "data/prepare.h"
#include "data/token_folder.h"
#include "model_files.h"
#include "refusal.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

// Text that packs to about a third.
std::string SomeText(size_t size) {
  std::mt19937 random(1);
  std::string text;
  while (text.size() < size) text += std::array{"one ", "two, ", "three ", "four.\n", "5 "}[random() % 5];
  text.resize(size);
  return text;
}

std::string Xz(const std::string& text) {
  std::string out(lzma_stream_buffer_bound(text.size()), '\0');
  size_t size = 0;
  EXPECT_EQ(lzma_easy_buffer_encode(0, LZMA_CHECK_CRC32, nullptr, reinterpret_cast<const uint8_t*>(text.data()),
                                    text.size(), reinterpret_cast<uint8_t*>(out.data()), &size, out.size()),
            LZMA_OK);
  out.resize(size);
  return out;
}

std::string Gzip(const std::string& text) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 1, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

std::string Zstd(const std::string& text) {
  ZSTD_CCtx* const context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress2(context, out.data(), out.size(), text.data(), text.size()));
  ZSTD_freeCCtx(context);
  return out;
}

std::string ReadAll(const fs::path& path, size_t at_once) {
  InputStream stream(path.string());
  std::string text, part(at_once, '\0');
  while (const size_t count = stream.Read(part.data(), part.size())) text.append(part, 0, count);
  return text;
}

class Packed : public testing::TestWithParam<std::string (*)(const std::string&)> {};
INSTANTIATE_TEST_SUITE_P(InputStream, Packed, testing::Values(Xz, Gzip, Zstd));

TEST_P(Packed, ComesBackWhateverIsReadAtOnce) {
  const TempFolder folder;
  const std::string text = SomeText(1 << 20);
  const fs::path path = folder.Write("file", GetParam()(text));
  for (const size_t at_once : {size_t{1000}, size_t{1} << 16, size_t{4} << 20}) EXPECT_EQ(ReadAll(path, at_once), text);
  EXPECT_EQ(ReadAll(folder.Write("empty", GetParam()("")), 100), "");
}

TEST_P(Packed, SeveralInARowAreOneFile) {
  const TempFolder folder;
  const std::string text = SomeText(5000);
  const fs::path path = folder.Write("file", GetParam()(text) + GetParam()("") + GetParam()("end"));
  EXPECT_EQ(ReadAll(path, 1 << 12), text + "end");
}

TEST_P(Packed, IsRefusedWhereverItIsCut) {
  const TempFolder folder;
  const std::string packed = GetParam()(SomeText(3000));
  // Of fewer bytes one cannot tell what they were.
  for (size_t size = 6; size < packed.size(); size += 1 + size / 16) {
    const fs::path path = folder.Write("file", packed.substr(0, size));
    EXPECT_NE(Refusal([&] { ReadAll(path, 1 << 12); }).find("is cut: it ends at byte " + std::to_string(size)),
              std::string::npos)
        << size;
  }
}

TEST_P(Packed, IsRefusedWhereAByteIsChanged) {
  const TempFolder folder;
  const std::string text = SomeText(3000), packed = GetParam()(text);
  for (size_t at = 12; at < packed.size(); at += 7) {
    std::string changed = packed;
    changed[at] = static_cast<char>(~changed[at]);
    const fs::path path = folder.Write("file", changed);
    EXPECT_NE(Refusal([&] { ReadAll(path, 1 << 12); }).find(path.string()), std::string::npos) << at;
  }
}

TEST(InputStream, WhatIsNotPackedIsGivenAsItIs) {
  const TempFolder folder;
  for (const std::string& text : {std::string(), std::string("a"), SomeText(600'000)}) {
    EXPECT_EQ(ReadAll(folder.Write("file.xz", text), 1 << 16), text);
  }
  EXPECT_NE(Refusal([&] { ReadAll(folder.path() / "none", 1); }).find("No such file"), std::string::npos);
}

TEST(JsonLine, OnlyTheFieldOfTheObjectItselfCounts) {
  EXPECT_EQ(TextOfJsonLine(R"({"a": {"text": "x"}, "b": [{"text": "y"}], "text": "z\n\u00e9", "c": 1e4})", "text", ""),
            "z\n\xc3\xa9");
  EXPECT_EQ(TextOfJsonLine(R"({"text": "x", "text": "y"})", "text", ""), "y");
  const auto refusal = [](const char* line) { return Refusal([&] { TextOfJsonLine(line, "text", "file: line 7"); }); };
  EXPECT_EQ(refusal(R"([{"text": "x"}])"),
            "file: line 7: is not a JSON object; a line is an object with the text in it");
  EXPECT_EQ(refusal(R"({"text": "x", "text": 3})"),
            "file: line 7: the field \"text\" is a number; it must be a string");
  EXPECT_EQ(refusal(R"({"a": {"text": "x"}})"),
            "file: line 7: there is no field \"text\"; name the one with the text: field");
  EXPECT_NE(refusal("{\"text\": \"\xc3(\"}").find("not UTF-8: byte 11 of the line"), std::string::npos);
  EXPECT_NE(refusal(R"({"text": "x"})"
                    "x")
                .find("not valid JSON"),
            std::string::npos);
  // Nested far deeper than the stack would bear.
  EXPECT_NE(refusal(std::string(1'000'000, '[').c_str()).find("not valid JSON"), std::string::npos);
}

TEST(DocumentReader, BatchesHoldWholeDocumentsInOrder) {
  const TempFolder folder;
  std::string lines;
  for (int i = 0; i < 3000; ++i) lines += "{\"n\": \"" + std::string(i % 900, 'x') + std::to_string(i) + "\"}\n";
  const std::vector<std::string> files = {folder.Write("a.jsonl", lines), folder.Write("b.txt", SomeText(3 << 20)),
                                          folder.Write("c.jsonl", "\n{}\n  \n{}")};
  DocumentReader reader(files, TextFormat::kAuto);
  EXPECT_EQ(reader.total_bytes(), lines.size() + (3 << 20) + 9);
  std::vector<std::string> wheres;
  std::string all_lines;
  size_t batches = 0;
  for (DocumentBatch batch; reader.Next(&batch); ++batches) {
    for (const DocumentBatch::Document& document : batch.documents) {
      wheres.push_back(reader.Where(document));
      if (document.source == 0) all_lines += batch.text.substr(document.begin, document.size) + "\n";
      if (document.source == 1) {
        EXPECT_EQ(batch.text.substr(document.begin, document.size), SomeText(3 << 20));
      }
    }
  }
  EXPECT_EQ(all_lines, lines);
  ASSERT_EQ(wheres.size(), 3003u);
  EXPECT_EQ(wheres[2999], files[0] + ": line 3000");
  EXPECT_EQ(wheres[3000], files[1]);
  EXPECT_EQ(wheres[3001], files[2] + ": line 2");
  EXPECT_EQ(wheres[3002], files[2] + ": line 4");
  EXPECT_GE(batches, 3u);
}

TEST(DocumentReader, ADocumentThatIsTooLongIsRefused) {
  const TempFolder folder;
  const fs::path path = folder.path() / "file";
  std::ofstream(path) << "{\"text\": \"a\"}\n{\"text\": \"";
  fs::resize_file(path, DocumentReader::kLongestDocument + 100);  // zeros, which take no room on the disk
  for (const TextFormat format : {TextFormat::kJsonLines, TextFormat::kText}) {
    DocumentReader reader({path.string()}, format);
    DocumentBatch batch;
    const std::string message = Refusal([&] {
      while (reader.Next(&batch)) {
      }
    });
    EXPECT_NE(message.find(format == TextFormat::kText ? "make it JSON lines" : "line 2 is longer than 128 MiB"),
              std::string::npos)
        << message;
  }
}

TEST(Overlap, FindsAnotherEditionAndNotAPhrase) {
  OverlapFinder finder;
  EXPECT_TRUE(finder.empty());
  std::string text, other;
  for (int i = 0; i < 300; ++i) text += "Word" + std::to_string(i) + ", ";
  for (int i = 0; i < 3000; ++i) other += "other" + std::to_string(i) + " ";
  finder.Add(text);
  std::string edition = text;
  for (char& c : edition) c = c == ',' ? '\n' : static_cast<char>(std::toupper(c));
  EXPECT_TRUE(finder.Overlaps(edition));
  EXPECT_TRUE(finder.Overlaps(other + text));
  EXPECT_FALSE(finder.Overlaps(other));
  EXPECT_FALSE(finder.Overlaps(other + text.substr(0, 16 * 8)));
  EXPECT_FALSE(finder.Overlaps("Word1, Word2"));
  EXPECT_FALSE(finder.Overlaps(""));
  // Characters are words where nothing is between words.
  finder.Add("天地玄黃宇宙洪荒日月盈昃辰宿列張");
  EXPECT_TRUE(finder.Overlaps("天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。"));
}

TEST(TokenFolder, ADocumentLongerThanAShardHasOneOfItsOwn) {
  const TempFolder folder;
  TokenFolderInfo info;
  info.vocab_size = 70'000;
  info.end = 65'537;
  info.sources = {"a", "dir/b"};
  info.shard_tokens = 10;
  TokenFolder tokens(folder.path() / "out", info, false);
  tokens.Add(std::vector<int32_t>(4, 1), 0);
  tokens.Add(std::vector<int32_t>(4, 2), 1);
  tokens.Add(std::vector<int32_t>(20, 3), 1);
  tokens.Add(std::vector<int32_t>(1, 4), 1);
  EXPECT_FALSE(fs::exists(folder.path() / "out/index.json"));
  tokens.Complete();
  EXPECT_FALSE(fs::exists(folder.path() / "out/index.json"));
  tokens.Publish();
  EXPECT_EQ(tokens.documents(), 4u);
  EXPECT_EQ(tokens.tokens(), 33u);
  EXPECT_EQ(tokens.shards(), 3u);
  const std::string offsets = ReadTextFile(folder.path() / "out/shard-00000.offsets", 1000);
  uint64_t values[3];
  ASSERT_EQ(offsets.size(), sizeof(values));
  std::memcpy(values, offsets.data(), sizeof(values));
  EXPECT_EQ(values[0], 0u);
  EXPECT_EQ(values[1], 5u);
  EXPECT_EQ(values[2], 10u);
  const std::string ids = ReadTextFile(folder.path() / "out/shard-00002.tokens", 1000);
  uint32_t last[2];
  ASSERT_EQ(ids.size(), sizeof(last));
  std::memcpy(last, ids.data(), sizeof(last));
  EXPECT_EQ(last[0], 4u);
  EXPECT_EQ(last[1], 65'537u);
  const std::string index = ReadTextFile(folder.path() / "out/index.json", 10'000);
  EXPECT_NE(index.find(R"({"file":"b","documents":3,"tokens":28})"), std::string::npos) << index;
  EXPECT_NE(index.find(R"("dtype":"uint32")"), std::string::npos);
}

TEST(TokenFolder, WithoutPublishNothingIsLeft) {
  const TempFolder folder;
  const fs::path out = folder.path() / "a/out";
  TokenFolderInfo info;
  info.vocab_size = 10;
  info.sources = {"a"};
  info.shard_tokens = 2;
  {
    TokenFolder tokens(out, info, false);
    for (int i = 0; i < 5; ++i) tokens.Add(std::vector<int32_t>(2, 1), 0);
    EXPECT_NE(Refusal([&] { TokenFolder(out, info, true); }).find("another phsa prepare"), std::string::npos);
    tokens.Complete();
  }
  EXPECT_FALSE(fs::exists(out));
  {
    TokenFolder tokens(out, info, false);
    tokens.Add(std::vector<int32_t>(2, 1), 0);
    tokens.Complete();
    tokens.Publish();
  }
  EXPECT_NE(Refusal([&] { TokenFolder(out, info, false); }).find("force to replace"), std::string::npos);
  (void)TokenFolder(out, info, true);  // replaces nothing before it publishes
  EXPECT_TRUE(fs::exists(out / "index.json"));
  EXPECT_FALSE(fs::exists(out / ".part"));
}

Tokenizer SmallTokenizer() {
  BpeVocabulary vocabulary;
  vocabulary.model = "gpt2";
  vocabulary.pre = "gpt-2";
  for (char c = '!'; c <= '~'; ++c) vocabulary.tokens.emplace_back(1, c);
  vocabulary.tokens.insert(vocabulary.tokens.end(), {"\u0120", "\u010a", "ab", "<|im_end|>", "<|endoftext|>"});
  vocabulary.token_types.assign(vocabulary.tokens.size(), 1);
  vocabulary.token_types.end()[-1] = vocabulary.token_types.end()[-2] = 3;
  vocabulary.merges = {"a b"};
  vocabulary.eos = static_cast<int32_t>(vocabulary.tokens.size()) - 2;
  return Tokenizer::FromVocabulary(vocabulary, "test");
}

TEST(Prepare, TheEndOfATextIsNotTheEndOfATurn) {
  const Tokenizer tokenizer = SmallTokenizer();
  EXPECT_EQ(tokenizer.TokenBytes(EndOfText(tokenizer)), "<|endoftext|>");
}

TEST(Prepare, TheDigestTellsVocabulariesAndMergesApart) {
  EXPECT_EQ(TokenizerSha256(SmallTokenizer()), TokenizerSha256(SmallTokenizer()));
  BpeVocabulary other;
  other.model = "gpt2";
  other.pre = "gpt-2";
  other.tokens = {"a", "b", "ab"};
  const std::string without_merge = TokenizerSha256(Tokenizer::FromVocabulary(other, "test"));
  other.merges = {"a b"};
  EXPECT_NE(TokenizerSha256(Tokenizer::FromVocabulary(other, "test")), without_merge);
}

// For ThreadSanitizer, too.
TEST(Prepare, ThreadsGiveTheSameFilesAndTheFirstError) {
  const TempFolder folder;
  const Tokenizer tokenizer = SmallTokenizer();
  std::string lines;
  for (int i = 0; i < 20'000; ++i) {
    lines += "{\"text\": \"" + std::string(i % 300, i % 2 == 0 ? 'a' : 'b') + " ab " + std::to_string(i) + "\"}\n";
  }
  const fs::path good = folder.Write("good.jsonl", lines);
  const fs::path bad = folder.Write("bad.jsonl", lines + "{\"no\": 1}\n" + lines + "{\"text\": 2}\n");
  const auto prepare = [&](const fs::path& file, int32_t threads, const fs::path& out) {
    DocumentReader reader({file.string()}, TextFormat::kAuto);
    TokenFolderInfo info;
    info.vocab_size = tokenizer.vocab_size();
    info.end = EndOfText(tokenizer);
    info.sources = reader.files();
    info.shard_tokens = 1'000'000;
    PrepareOptions options;
    options.threads = threads;
    options.held_out_share = 0.2;
    TokenFolder train(out, info, true), held_out(out / "held", info, true);
    const PrepareResult result =
        PrepareTokens(tokenizer, reader, options, train, &held_out,
                      [](const PrepareProgress& now) { EXPECT_LE(now.bytes, now.total_bytes); });
    EXPECT_EQ(result.documents, 20'000u);
    EXPECT_EQ(train.documents() + held_out.documents(), 20'000u);
    EXPECT_NEAR(static_cast<double>(held_out.documents()), 4000, 300);
    train.Complete();
    train.Publish();
  };
  for (const int32_t threads : {1, 2, 5}) {
    const fs::path out = folder.path() / std::to_string(threads);
    prepare(good, threads, out);
    for (const char* name : {"index.json", "shard-00000.tokens", "shard-00001.offsets"}) {
      EXPECT_EQ(ReadTextFile(out / name, 1 << 26), ReadTextFile(folder.path() / "1" / name, 1 << 26)) << name;
    }
    EXPECT_NE(Refusal([&] { prepare(bad, threads, folder.path() / "bad"); }).find("bad.jsonl: line 20001: there is no"),
              std::string::npos);
  }
}

TEST(Prepare, WhatTheCallerThrowsEndsTheWork) {
  const TempFolder folder;
  const Tokenizer tokenizer = SmallTokenizer();
  std::string lines;
  for (int i = 0; i < 100'000; ++i) lines += "{\"text\": \"" + std::string(60, 'a') + "\"}\n";
  DocumentReader reader({folder.Write("a.jsonl", lines).string()}, TextFormat::kAuto);
  TokenFolderInfo info;
  info.vocab_size = tokenizer.vocab_size();
  info.sources = reader.files();
  info.shard_tokens = 1'000'000;
  PrepareOptions options;
  options.threads = 2;
  TokenFolder train(folder.path() / "out", info, false);
  EXPECT_THROW(PrepareTokens(tokenizer, reader, options, train, nullptr, [](const PrepareProgress&) { throw 1; }), int);
}

}  // namespace
}  // namespace phsa
