#include "phsa/punctuation.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cctype>
#include <cstdint>
#include <filesystem>
#include <fstream>

#include "base/utf8.h"
#include "phsa/error.h"
#include "refusal.h"

namespace phsa {
namespace {

// A file that goes away with the test.
class File {
 public:
  explicit File(const std::string& text) {
    static int count = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("phsa_punctuation_" + std::to_string(getpid()) + "_" + std::to_string(count++));
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~File() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

//                                         0    1    2    3       4        5     6     7      8     9
const std::vector<std::string> kTokens = {",", ".", "a", "，", "\xff", " ,", ".\"", "\n", "12", "<end>"};

std::vector<int32_t> Ids(const std::string& set) { return PunctuationTable(set, kTokens).Ids(); }

TEST(Punctuation, EnIsTheThirtyTwoAsciiMarksAndNothingElse) {
  int count = 0;
  for (int c = 0; c < 256; ++c) {
    const bool in = InPunctuationSet("en", std::string(1, static_cast<char>(c)));
    EXPECT_EQ(in, c < 128 && std::ispunct(c)) << c;
    count += in;
  }
  EXPECT_EQ(count, 32);
  for (const char* token : {"", ",,", " ,", ", ", "，", "a", " "}) EXPECT_FALSE(InPunctuationSet("en", token)) << token;
}

TEST(Punctuation, ZhIsTheListedCharactersAlone) {
  const char* marks[] = {"，", "。", "！", "？", "；", "：", "、", "“",  "”",  "‘", "’", "（", "）", "《",
                         "》", "〈", "〉", "【", "】", "「", "」", "『", "』", "—", "…", "·",  "～"};
  for (const char* mark : marks) {
    EXPECT_TRUE(InPunctuationSet("zh", mark)) << mark;
    EXPECT_TRUE(InPunctuationSet("en+zh", mark)) << mark;
    EXPECT_FALSE(InPunctuationSet("en", mark)) << mark;
    EXPECT_FALSE(InPunctuationSet("zh", std::string(mark) + mark)) << mark;
  }
  for (const char* token : {",", "．", "中", "－", "", " ，"}) EXPECT_FALSE(InPunctuationSet("zh", token)) << token;
  EXPECT_TRUE(InPunctuationSet("en+zh", ","));
  EXPECT_FALSE(InPunctuationSet("en+zh", ",，"));
}

TEST(Punctuation, SentenceTakesOneLeadingSpaceAndBothWideFullStops) {
  for (const char* mark : {",", ".", ";", ":", "!", "?", "，", "。", "．", "；", "：", "！", "？"}) {
    EXPECT_TRUE(InPunctuationSet("sentence", mark)) << mark;
    EXPECT_TRUE(InPunctuationSet("sentence", std::string(" ") + mark)) << mark;
    EXPECT_FALSE(InPunctuationSet("sentence", std::string("  ") + mark)) << mark;
    EXPECT_FALSE(InPunctuationSet("sentence", std::string("\t") + mark)) << mark;
    EXPECT_FALSE(InPunctuationSet("sentence", std::string(mark) + " ")) << mark;
  }
  for (const char* token : {"", " ", "'", "、", "..", "—"}) EXPECT_FALSE(InPunctuationSet("sentence", token)) << token;
}

TEST(Punctuation, PureIsMarksOnlyOnceWhiteSpaceAroundThemIsGone) {
  for (const char* token : {".\"", ",\n", " (", "，”", "\t.\r\n", "\u3000。\u00a0", "...", "\u2028!"}) {
    EXPECT_TRUE(InPunctuationSet("pure", token)) << token;
  }
  for (const char* token : {"", " ", "\n\n", ". .", ".a", "1.", "\u200b.", "¿"}) {
    EXPECT_FALSE(InPunctuationSet("pure", token)) << token;
  }
}

TEST(Punctuation, NoneIsEmptyAndUnknownNamesAreRefusedWithTheKnownOnes) {
  EXPECT_FALSE(InPunctuationSet("none", ","));
  EXPECT_TRUE(Ids("none").empty());
  for (const char* name : {"EN", "en,zh", ""}) {
    EXPECT_NE(Refusal([&] { InPunctuationSet(name, ","); }).find("allowed: en, zh, en+zh, sentence, pure, none"),
              std::string::npos);
    EXPECT_NE(Refusal([&] { Ids(name); }).find("allowed: en, zh, en+zh, sentence, pure, none, or a file"),
              std::string::npos);
  }
  for (const std::string& name : PunctuationSetNames()) EXPECT_NO_THROW(Ids(name)) << name;
}

TEST(Punctuation, BytesThatAreNotValidUtf8NeverMatch) {
  const std::string bad[] = {
      "\xff",     "\x80",     "\xc0\xac", "\xe0\x80\xac",     "\xf0\x80\x80\xac",    "\xed\xa0\x80",
      "\xef\xbc", "\xe2\x80", ",\xff",    "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80"};
  for (const std::string& token : bad) {
    EXPECT_FALSE(IsUtf8(token));
    for (const std::string& set : PunctuationSetNames()) EXPECT_FALSE(InPunctuationSet(set, token)) << set;
  }
}

TEST(Punctuation, EveryCodePointIsDecodedAsItWasEncodedAndSurrogatesAreNot) {
  for (char32_t code = 0; code <= 0x10ffff; ++code) {
    std::string text;
    if (code < 0x80) {
      text = {static_cast<char>(code)};
    } else if (code < 0x800) {
      text = {static_cast<char>(0xc0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3f))};
    } else if (code < 0x10000) {
      text = {static_cast<char>(0xe0 | (code >> 12)), static_cast<char>(0x80 | ((code >> 6) & 0x3f)),
              static_cast<char>(0x80 | (code & 0x3f))};
    } else {
      text = {static_cast<char>(0xf0 | (code >> 18)), static_cast<char>(0x80 | ((code >> 12) & 0x3f)),
              static_cast<char>(0x80 | ((code >> 6) & 0x3f)), static_cast<char>(0x80 | (code & 0x3f))};
    }
    const bool surrogate = code >= 0xd800 && code <= 0xdfff;
    const auto decoded = DecodeUtf8(text);
    ASSERT_EQ(decoded.has_value(), !surrogate) << static_cast<uint32_t>(code);
    if (!surrogate) {
      ASSERT_EQ(*decoded, std::u32string(1, code));
    }
  }
}

TEST(Punctuation, TheTableHasTheIdsOfTheSetAscending) {
  EXPECT_EQ(Ids("en"), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(Ids("zh"), (std::vector<int32_t>{3}));
  EXPECT_EQ(Ids("en+zh"), (std::vector<int32_t>{0, 1, 3}));
  EXPECT_EQ(Ids("sentence"), (std::vector<int32_t>{0, 1, 3, 5}));
  EXPECT_EQ(Ids("pure"), (std::vector<int32_t>{0, 1, 3, 5, 6}));
}

TEST(Punctuation, AListOfIdsIsASet) {
  EXPECT_EQ(Ids("ids:5,2"), (std::vector<int32_t>{2, 5}));
  EXPECT_TRUE(Ids("ids:").empty());
  std::vector<uint8_t> special(kTokens.size());
  special[1] = 1;
  for (const char* set : {"ids:10", "ids:-1", "ids:x", "ids:1,", "ids:1"}) {
    EXPECT_NE(Refusal([&] { PunctuationTable(set, kTokens, special); }).find("0 to 9"), std::string::npos) << set;
  }
}

TEST(Punctuation, SpecialTokensAreNeverPunctuation) {
  std::vector<uint8_t> special(kTokens.size());
  special[1] = 1;
  EXPECT_EQ(PunctuationTable("en", kTokens, special).Ids(), std::vector<int32_t>{0});
  const File strings(".\n,\n");
  EXPECT_EQ(PunctuationTable(strings.path(), kTokens, special).Ids(), std::vector<int32_t>{0});
  const File ids("0\n1\n");
  EXPECT_NE(Refusal([&] { PunctuationTable(ids.path(), kTokens, special); }).find("line 2: id 1 is a special token"),
            std::string::npos);
  EXPECT_NE(Refusal([&] {
              PunctuationTable("en", kTokens, std::span(special).first(3));
            }).find("special has 3 entries; allowed: none, or 10"),
            std::string::npos);
}

TEST(Punctuation, FlagsAreLookedUpAndIdsOutsideTheVocabularyRefused) {
  const PunctuationTable table("en", kTokens);
  const std::vector<int32_t> ids = {2, 0, 0, 1, 9};
  std::vector<uint8_t> flags(ids.size());
  table.Flags(ids, flags.data());
  EXPECT_EQ(flags, (std::vector<uint8_t>{0, 1, 1, 1, 0}));
  for (const int32_t bad : {-1, 10, INT32_MIN, INT32_MAX}) {
    const std::vector<int32_t> one = {0, bad};
    EXPECT_EQ(Refusal([&] { table.Flags(one, flags.data()); }),
              "punctuation: token 1 has id " + std::to_string(bad) + "; allowed: 0 to 9");
  }
}

TEST(Punctuation, AFileHoldsIdsStringsAndJsonStrings) {
  const File file(
      "\xef\xbb\xbf# a comment\n"
      "0\n"
      "\n"
      "   \n"
      "，\r\n"
      " ,\n"
      "\"\\n\"\n"
      "\"12\"\n"
      "no token of this vocabulary\n"
      "#\n"
      ".\"");
  EXPECT_EQ(Ids(file.path()), (std::vector<int32_t>{0, 3, 5, 6, 7, 8}));
}

TEST(Punctuation, ALineThatIsOneDoubleQuoteIsThatString) {
  const File file("\"\n");
  const std::vector<std::string> tokens = {"a", "\""};
  EXPECT_EQ(PunctuationTable(file.path(), tokens).Ids(), std::vector<int32_t>{1});
}

TEST(Punctuation, FilesThatCannotBeMeantAreRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"10\n", "line 1: id 10 is not in the vocabulary; allowed: 0 to 9"},
      {"0\n99999999999999999999999999\n", "line 2: id 999999999999999999999999 is not in the vocabulary"},
      {"\"\\q\"\n", "line 1: \"\\\"\\\\q\\\"\" is not a JSON string with something in it"},
      {"\"\"\n", "line 1: \"\\\"\\\"\" is not a JSON string with something in it"},
      {"\"a\" \"b\"\n", "is not a JSON string"},
      {"zzz\n", "is a token of this vocabulary; \"none\" is the empty set"},
      {"", "is a token of this vocabulary; \"none\" is the empty set"},
      {"# nothing\n", "is a token of this vocabulary; \"none\" is the empty set"},
      {"\x7f\x45\x4c\x46\xff\xfe", "is not a text file in UTF-8"},
  };
  for (const auto& [text, message] : cases) {
    const File file(text);
    const std::string refusal = Refusal([&] { Ids(file.path()); });
    EXPECT_NE(refusal.find(message), std::string::npos) << refusal;
  }
  const File zeros(std::string("\0\0,\n", 4));
  EXPECT_NE(Refusal([&] { Ids(zeros.path()); }).find("is not a text file in UTF-8"), std::string::npos);
  EXPECT_NE(Refusal([] { Ids("/"); }).find("\"/\" is a directory"), std::string::npos);
  EXPECT_NE(Refusal([] { Ids("/dev/null"); }).find("\"/dev/null\" is not a regular file"), std::string::npos);
  EXPECT_NE(Refusal([] { Ids(std::string("en\0", 3)); }).find("neither a set nor a file"), std::string::npos);
}

TEST(Punctuation, AFileThatMayNotBeReadIsNamed) {
  const File file("0\n");
  std::filesystem::permissions(file.path(), std::filesystem::perms::none);
  if (std::ifstream(file.path())) GTEST_SKIP() << "this user may read everything";
  EXPECT_NE(Refusal([&] { Ids(file.path()); }).find("cannot be read; check its permissions"), std::string::npos);
}

}  // namespace
}  // namespace phsa
