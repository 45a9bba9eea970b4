#include <fmt/format.h>
#include <gtest/gtest.h>
#include <regex.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>

#include "byte_vocabulary.h"
#include "engine/session.h"
#include "eval/niah/export.h"
#include "eval/niah/heatmap.h"
#include "eval/niah/prompt.h"
#include "eval/niah/records.h"
#include "eval/niah/report.h"
#include "eval/niah/run.h"
#include "eval/niah/statistics.h"
#include "fake_model.h"
#include "io/sha256.h"
#include "refusal.h"

namespace phsa {
namespace {

constexpr NiahTask kAllTasks[] = {NiahTask::kSingle1,    NiahTask::kSingle2,   NiahTask::kSingle3,
                                  NiahTask::kMultikey1,  NiahTask::kMultikey2, NiahTask::kMultikey3,
                                  NiahTask::kMultivalue, NiahTask::kMultiquery};

// A token for each byte, and a few longer ones, so that tokens of a text are not just those of its sentences.
Tokenizer SmallTokenizer() {
  BpeVocabulary vocabulary = ByteVocabulary();
  for (const auto& [left, right] : std::vector<std::pair<std::string, std::string>>{
           {"t", "h"}, {"th", "e"}, {"i", "n"}, {"a", "n"}, {"an", "d"}, {"Ġ", "the"}, {".", "\""}, {"Ġ", "\""}}) {
    vocabulary.merges.push_back(fmt::format("{} {}", left, right));
    vocabulary.tokens.push_back(left + right);
  }
  vocabulary.token_types.assign(vocabulary.tokens.size(), 1);
  for (const char* control : {"<|im_start|>", "<|im_end|>"}) {
    vocabulary.tokens.emplace_back(control);
    vocabulary.token_types.push_back(3);
  }
  return Tokenizer::FromVocabulary(vocabulary, "small");
}

const Tokenizer& TheTokenizer() {
  static const Tokenizer tokenizer = SmallTokenizer();
  return tokenizer;
}

const Haystack& English() {
  static const Haystack haystack = Haystack::BuiltIn();
  return haystack;
}

const Haystack& Chinese() {
  static const Haystack haystack = [] {
    std::string text;
    for (int i = 0; i < 800; ++i) {
      text += "第" + std::to_string(i) + "天，他走了很远的路。“到了吗？”她问。\n";
    }
    return Haystack(text, "chinese.txt");
  }();
  return haystack;
}

NiahPrompts Prompts(NiahPromptOptions options = {}) {
  const bool english = options.language == NiahLanguage::kEnglish;
  return NiahPrompts(TheTokenizer(), english ? &English() : &Chinese(), std::move(options));
}

size_t Count(std::string_view text, std::string_view part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

bool Contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

// The match of an extended POSIX pattern and its groups; empty: there is none. Not std::regex: GCC 12 warns inside of
// it where a sanitizer is on, and it recurses once for each character.
std::vector<std::string> Match(const std::string& text, const std::string& pattern) {
  regex_t compiled;
  if (regcomp(&compiled, pattern.c_str(), REG_EXTENDED) != 0) {
    ADD_FAILURE() << "bad pattern " << pattern;
    return {};
  }
  std::vector<regmatch_t> parts(compiled.re_nsub + 1);
  std::vector<std::string> groups;
  if (regexec(&compiled, text.c_str(), parts.size(), parts.data(), 0) == 0) {
    for (const regmatch_t& part : parts) {
      groups.push_back(text.substr(static_cast<size_t>(part.rm_so), static_cast<size_t>(part.rm_eo - part.rm_so)));
    }
  }
  regfree(&compiled);
  return groups;
}

// ---------------------------------------------------------------------------------------------------------------------
// Haystacks

TEST(NiahHaystack, SentencesEndWhereReadersEndThem) {
  const std::vector<std::string> expected = {"Mr. Smith met C. F. Adams.", "\"Are you well?\"", "he asked!",
                                             "It cost 3.50 in all (so it did.)", "The end"};
  EXPECT_EQ(SplitSentences("Mr. Smith met\n C. F. Adams.  \"Are you well?\" he asked!\tIt cost 3.50 in all "
                           "(so it did.) The end"),
            expected);
}

TEST(NiahHaystack, ChineseSentencesEndWithoutASpace) {
  const std::vector<std::string> expected = {"他说：“走吧！”", "她没有动。", "为什么？！", "没人知道"};
  EXPECT_EQ(SplitSentences("他说：“走吧！”她没有动。为什么？！\n没人知道"), expected);
}

TEST(NiahHaystack, TextWithoutEndsIsCutBetweenWordsAndCharacters) {
  std::string words, characters;
  for (int i = 0; i < 2000; ++i) words += "word ";
  for (int i = 0; i < 3000; ++i) characters += "字";
  for (const std::string& text : {words, characters}) {
    const std::vector<std::string> sentences = SplitSentences(text);
    EXPECT_GE(sentences.size(), 4u);
    std::string joined;
    for (const std::string& sentence : sentences) {
      EXPECT_LE(sentence.size(), 2100u);
      EXPECT_TRUE(sentence.ends_with("word") || sentence.ends_with("字"));
      joined += sentence + (text == words ? " " : "");
    }
    EXPECT_EQ(joined, text);
  }
}

TEST(NiahHaystack, EmptyTextIsRefused) {
  EXPECT_TRUE(Contains(Refusal([] { Haystack(" \n\t", "empty.txt"); }), "empty.txt"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Tasks and prompts

TEST(NiahTask, NamesAreRulersAndOthersAreRefusedWithTheList) {
  std::vector<std::string> names;
  for (const NiahTask task : kAllTasks) {
    names.emplace_back(Name(task));
    EXPECT_EQ(NiahTaskFromName(Name(task)), task);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"single_1", "single_2", "single_3", "multikey_1", "multikey_2",
                                             "multikey_3", "multivalue", "multiquery"}));
  const std::string refusal = Refusal([] { NiahTaskFromName("single_4"); });
  for (const std::string& name : names) EXPECT_TRUE(Contains(refusal, name)) << refusal;
}

TEST(NiahPrompt, TheTextIsRulers) {
  const NiahSample sample = Prompts().Build(NiahTask::kSingle2, 4096, 0);
  const std::vector<std::string> match = Match(
      sample.text,
      "^A special magic number is hidden within the following text\\. Make sure to memorize it\\. I will quiz you "
      "about "
      "the number afterwards\\.\n[^\n]*One of the special magic numbers for ([a-z]+-[a-z]+) is: ([0-9]{7})\\.[^\n]*\n"
      "What is the special magic number for ([a-z]+-[a-z]+) mentioned in the provided text\\? The special magic number "
      "for ([a-z]+-[a-z]+) mentioned in the provided text is$");
  ASSERT_FALSE(match.empty()) << sample.text;
  EXPECT_EQ(match[1], match[3]);
  EXPECT_EQ(match[1], match[4]);
  EXPECT_EQ(sample.references, (std::vector<std::string>{match[2]}));
  EXPECT_EQ(sample.answer, " " + sample.references[0]);
  EXPECT_EQ(TheTokenizer().Encode(sample.text, SpecialTokens::kAsText), sample.tokens);
}

TEST(NiahPrompt, TasksHideAndAskWhatRulersDo) {
  struct Expected {
    NiahTask task;
    size_t needles, references;  // 0 needles: all lines are
    const char* value;
  };
  const char* const number = "[1-9][0-9]{6}";
  const char* const uuid = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}";
  for (const Expected& e :
       {Expected{NiahTask::kSingle1, 1, 1, number}, Expected{NiahTask::kSingle2, 1, 1, number},
        Expected{NiahTask::kSingle3, 1, 1, uuid}, Expected{NiahTask::kMultikey1, 4, 1, number},
        Expected{NiahTask::kMultikey2, 0, 1, number}, Expected{NiahTask::kMultikey3, 0, 1, uuid},
        Expected{NiahTask::kMultivalue, 4, 4, number}, Expected{NiahTask::kMultiquery, 4, 4, number}}) {
    const NiahSample sample = Prompts().Build(e.task, 4096, 3);
    const size_t needles = Count(sample.text, "One of the special magic ");
    if (e.needles > 0) {
      EXPECT_EQ(needles, e.needles) << Name(e.task);
    } else {
      EXPECT_EQ(needles + 2, Count(sample.text, "\n") + 1) << Name(e.task);
    }
    EXPECT_EQ(sample.references.size(), e.references) << Name(e.task);
    EXPECT_EQ(sample.depths.size(), e.references);
    EXPECT_EQ(std::set(sample.references.begin(), sample.references.end()).size(), e.references);
    for (const std::string& reference : sample.references) {
      EXPECT_FALSE(Match(reference, fmt::format("^{}$", e.value)).empty()) << reference;
      EXPECT_EQ(Count(sample.text, " is: " + reference + "."), 1u) << Name(e.task);
    }
    const bool one = e.references == 1;
    EXPECT_EQ(sample.text.starts_with("A special magic"), one);
    EXPECT_EQ(sample.text.starts_with("Some special magic"), !one);
    EXPECT_TRUE(
        sample.text.ends_with(one ? "mentioned in the provided text is" : "mentioned in the provided text are"));
  }
  EXPECT_FALSE(Match(Prompts().Build(NiahTask::kMultiquery, 4096, 0).text,
                     "for [a-z-]+, [a-z-]+, [a-z-]+, and [a-z-]+ mentioned")
                   .empty());
}

TEST(NiahPrompt, LengthIsKeptToASentence) {
  for (const NiahLanguage language : {NiahLanguage::kEnglish, NiahLanguage::kChinese}) {
    NiahPromptOptions options;
    options.language = language;
    const NiahPrompts prompts = Prompts(options);
    for (const NiahTask task : kAllTasks) {
      for (const int32_t length : {2000, 4096, 12345}) {
        for (const int32_t index : {0, 1, 2}) {
          const NiahSample sample = prompts.Build(task, length, index);
          const auto used = static_cast<int32_t>(sample.tokens.size()) + kNiahAnswerTokens;
          EXPECT_LE(used, length) << Name(task);
          EXPECT_GE(used, length - 1000) << Name(task);  // a token here is about a byte
          for (const std::string& reference : sample.references) EXPECT_TRUE(Contains(sample.text, reference));
        }
      }
    }
  }
}

// The share of the haystack, in pieces, that lies before the needle.
double DepthOf(const NiahSample& sample) {
  const size_t begin = sample.text.find('\n') + 1, end = sample.text.rfind('\n');
  const std::string hay = sample.text.substr(begin, end - begin);
  const size_t needle = hay.rfind("One of the", hay.find(sample.references[0]));
  const auto before = static_cast<double>(SplitSentences(hay.substr(0, needle)).size());
  return 100 * before / static_cast<double>(SplitSentences(hay).size() - 1);
}

TEST(NiahPrompt, NeedlesLieAtTheAskedDepth) {
  NiahPromptOptions options;
  options.depths = {0, 25, 50, 75, 100};
  const NiahPrompts prompts = Prompts(options);
  for (const NiahTask task : {NiahTask::kSingle1, NiahTask::kSingle2, NiahTask::kMultikey2, NiahTask::kSingle3}) {
    for (int32_t i = 0; i < 7; ++i) {
      const NiahSample sample = prompts.Build(task, 8192, i);
      const double depth = options.depths[static_cast<size_t>(i) % 5];
      EXPECT_EQ(sample.depths, (std::vector<double>{depth}));
      EXPECT_NEAR(DepthOf(sample), depth, 4) << Name(task) << " " << i;
    }
  }
}

TEST(NiahPrompt, DrawnDepthsAreRulersFortyAndReported) {
  const NiahPrompts prompts = Prompts();
  std::set<double> seen;
  for (int32_t i = 0; i < 300; ++i) {
    const NiahSample sample = prompts.Build(NiahTask::kSingle2, 1500, i);
    seen.insert(sample.depths[0]);
    if (i >= 20) continue;
    EXPECT_NEAR(DepthOf(sample), sample.depths[0], 25);  // of a handful of sentences
  }
  EXPECT_EQ(seen.size(), 40u);
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), 100);
  EXPECT_TRUE(seen.count(3) == 1 && seen.count(49) == 1 && seen.count(51) == 1);  // of 2.56…, 48.7 and 51.3
}

TEST(NiahPrompt, ASampleDependsOnTaskLengthSeedAndIndexAlone) {
  NiahPromptOptions other;
  other.seed = 2;
  const NiahPrompts prompts = Prompts(), again = Prompts(), other_seed = Prompts(other);
  prompts.Build(NiahTask::kMultikey2, 2000, 1);  // what was built before does not matter
  const NiahSample sample = prompts.Build(NiahTask::kSingle2, 2000, 5);
  EXPECT_EQ(sample.text, again.Build(NiahTask::kSingle2, 2000, 5).text);
  EXPECT_NE(sample.text, again.Build(NiahTask::kSingle2, 2000, 6).text);
  EXPECT_NE(sample.references, again.Build(NiahTask::kSingle2, 3000, 5).references);
  EXPECT_NE(sample.references, other_seed.Build(NiahTask::kSingle2, 2000, 5).references);
}

// Files of samples hold results for these prompts: what changes them makes old files wrong and needs a new format.
TEST(NiahPrompt, SamplesStayWhatTheyWere) {
  const auto hash = [](NiahTask task) {
    const std::string text = Prompts().Build(task, 4096, 7).text;
    Sha256 sha256;
    sha256.Update(text.data(), text.size());
    return sha256.Hex().substr(0, 16);
  };
  EXPECT_EQ(hash(NiahTask::kSingle1), "1b511590ac27ef85");
  EXPECT_EQ(hash(NiahTask::kMultikey1), "1604ee876140ffd5");
  EXPECT_EQ(hash(NiahTask::kMultikey3), "010ea5d8782ab53f");
}

TEST(NiahPrompt, StartsAtTheBeginningWhereAsked) {
  NiahPromptOptions options;
  options.random_start = false;
  options.depths = {100};
  const NiahPrompts prompts = Prompts(options);
  for (const int32_t i : {0, 1}) {
    EXPECT_TRUE(Contains(prompts.Build(NiahTask::kSingle2, 4096, i).text, "\n" + English().sentences()[0]));
  }
  EXPECT_FALSE(Contains(Prompts().Build(NiahTask::kSingle2, 4096, 0).text, English().sentences()[0]));
}

TEST(NiahPrompt, AShortHaystackIsRefusedOrRepeated) {
  const Haystack small("One sentence here. And one there. ", "small.txt");
  NiahPromptOptions options;
  const NiahPrompts prompts(TheTokenizer(), &small, options);
  const std::string refusal = Refusal([&] { prompts.Check(NiahTask::kSingle2, 4096); });
  for (const char* part : {"small.txt", "4096", "repeat_haystack", "lengths"}) {
    EXPECT_TRUE(Contains(refusal, part)) << refusal;
  }
  EXPECT_NO_THROW(prompts.Check(NiahTask::kSingle1, 4096));  // noise needs no text
  options.repeat = true;
  const NiahSample sample = NiahPrompts(TheTokenizer(), &small, options).Build(NiahTask::kSingle2, 4096, 0);
  EXPECT_GT(Count(sample.text, "And one there."), 50u);
  EXPECT_GE(sample.tokens.size() + kNiahAnswerTokens, 4000u);
}

TEST(NiahPrompt, WhatCannotBeBuiltIsRefused) {
  EXPECT_TRUE(Contains(Refusal([] { Prompts().Check(NiahTask::kSingle2, 300); }), "300"));
  NiahPromptOptions options;
  options.depths = {50};
  const NiahPrompts prompts = Prompts(options);
  EXPECT_TRUE(Contains(Refusal([&] { prompts.Check(NiahTask::kMultivalue, 8192); }), "depths places one needle"));
  EXPECT_NO_THROW(prompts.Check(NiahTask::kMultikey1, 8192));
  options.depths = {0, 101};
  EXPECT_TRUE(Contains(Refusal([&] { Prompts(options); }), "101"));
}

TEST(NiahPrompt, ChatPutsTheAnswerPrefixIntoTheModelsTurn) {
  NiahPromptOptions options;
  options.chat = ChatTemplate::ByName("chatml");
  const NiahSample sample = Prompts(options).Build(NiahTask::kSingle2, 4096, 0);
  const std::string text = TheTokenizer().Decode(sample.tokens, false);
  const char* const pattern =
      "provided text\\?<\\|im_end\\|>\n<\\|im_start\\|>assistant\nThe special magic number for [a-z-]+ mentioned in "
      "the "
      "provided text is$";
  EXPECT_FALSE(Match(text, pattern).empty()) << text.substr(text.size() - 300);
  EXPECT_LE(sample.tokens.size() + kNiahAnswerTokens, 4096u);
}

TEST(NiahPrompt, ChineseSamplesAreChinese) {
  NiahPromptOptions options;
  options.language = NiahLanguage::kChinese;
  const NiahSample sample = Prompts(options).Build(NiahTask::kMultiquery, 6000, 0);
  EXPECT_EQ(Count(sample.text, "的特殊魔法数字之一是："), 4u);
  EXPECT_TRUE(sample.text.ends_with("的特殊魔法数字是："));
  EXPECT_EQ(Prompts(options).Build(NiahTask::kSingle2, 6000, 0).answer.size(), 7u);  // no space before it
}

// ---------------------------------------------------------------------------------------------------------------------
// Statistics

TEST(NiahStatistics, WilsonIntervalsAreThoseOfTheBooks) {
  EXPECT_NEAR(WilsonInterval(0.8, 10).low, 0.4902, 1e-4);
  EXPECT_NEAR(WilsonInterval(0.8, 10).high, 0.9433, 1e-4);
  EXPECT_EQ(WilsonInterval(0, 10).low, 0);
  EXPECT_NEAR(WilsonInterval(0, 10).high, 0.2775, 1e-4);
  EXPECT_NEAR(WilsonInterval(1, 100).low, 0.9630, 1e-4);
  EXPECT_EQ(WilsonInterval(1, 100).high, 1);
}

TEST(NiahStatistics, McNemarByHand) {
  EXPECT_EQ(McNemarExact(0, 0), 1);
  EXPECT_EQ(McNemarExact(3, 3), 1);
  EXPECT_NEAR(McNemarExact(1, 9), 2 * (1 + 10) / 1024.0, 1e-12);
  EXPECT_NEAR(McNemarExact(9, 1), McNemarExact(1, 9), 1e-15);
  EXPECT_NEAR(McNemarExact(0, 5), 2 / 32.0, 1e-12);
  // 1500 of 3000 ± 60 is 2.2 standard deviations; 2^3000 is no double.
  EXPECT_NEAR(McNemarExact(1440, 1560), 0.0298, 2e-4);
}

TEST(NiahStatistics, PairedIntervalsAreBonettAndPrices) {
  std::vector<double> first(20, 1), second(20, 1);
  for (size_t i = 0; i < 5; ++i) second[i] = 0;
  first[5] = 0;
  const PairedDifference d = ComparePaired(first, second);
  EXPECT_EQ(d.better, 5);
  EXPECT_EQ(d.worse, 1);
  EXPECT_NEAR(d.mean, 0.2, 1e-12);
  // (5 + 1) / 22 − (1 + 1) / 22 ± 1.96 · √((8 / 22 − (4 / 22)²) / 22)
  EXPECT_NEAR(d.ci95.low, -0.05844, 1e-4);
  EXPECT_NEAR(d.ci95.high, 0.42208, 1e-4);
  EXPECT_NEAR(d.p, 2 * (1 + 6) / 64.0, 1e-12);
  const PairedDifference same = ComparePaired(first, first);
  EXPECT_LT(same.ci95.low, 0);
  EXPECT_GT(same.ci95.high, 0);
  EXPECT_EQ(same.p, 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Records

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "niah_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "no temporary folder";
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::filesystem::path operator/(const char* name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

std::string ReadAll(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteAll(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

LayerSettings Attention(Policy policy, int32_t top_k, float lambda = 1) {
  LayerSettings settings;
  settings.base = Settings::Preset(4096);
  settings.base.policy = policy;
  settings.base.top_k = top_k;
  settings.base.lambda = lambda;
  return Canonical(settings);
}

NiahRecord Record(int32_t sample, const LayerSettings& attention, bool found, int32_t length = 4096) {
  NiahRecord record;
  record.task = NiahTask::kSingle2;
  record.length = length;
  record.sample = sample;
  record.attention = attention;
  record.references = {"1234567"};
  record.depths = {double(sample % 5) * 25};
  record.found = {found};
  record.answer = found ? " 1234567" : " \"<\xff\n";  // a model may write anything
  record.tokens = 3968;
  record.read = 25;
  record.dense = 100;
  record.seconds = 0.5;
  return record;
}

NiahHeader TestHeader(int seed = 1) {
  return {{"model", "small"}, {"scoring", "strict"}, {"layers", 2}, {"seed", seed}};
}

TEST(NiahRecords, AFileGivesBackWhatWasWritten) {
  const Folder folder;
  const auto path = folder / "a.jsonl";
  const LayerSettings phsa = Attention(Policy::kPhsa, 2, 0.9f), dense = Attention(Policy::kDense, 7);
  {
    NiahRecords none;
    NiahWriter writer(path, TestHeader(), none);
    EXPECT_TRUE(none.all().empty());
    writer.Append(Record(0, phsa, true));
    writer.Append(Record(0, dense, false));
  }
  const NiahFile file = ReadNiahFile(path);
  NiahRecords records;
  for (const NiahRecord& record : file.records) records.Add(record, "a");
  EXPECT_EQ((*file.header)["model"], "small");
  ASSERT_EQ(records.all().size(), 2u);
  const NiahRecord& first = records.all()[0];
  EXPECT_EQ(first.attention, phsa);
  EXPECT_EQ(first.references, Record(0, phsa, true).references);
  EXPECT_EQ(first.answer, " 1234567");
  EXPECT_EQ(first.score(), 1);
  EXPECT_EQ(first.read, 25);
  EXPECT_TRUE(records.Contains(NiahTask::kSingle2, 4096, phsa, 0));
  EXPECT_FALSE(records.Contains(NiahTask::kSingle2, 4096, phsa, 1));
  // Dense attention has no K: another -K is the same.
  EXPECT_TRUE(records.Contains(NiahTask::kSingle2, 4096, Attention(Policy::kDense, 16), 0));
}

TEST(NiahRecords, AKilledRunGoesOnAfterItsLastWholeLine) {
  const Folder folder;
  const auto path = folder / "a.jsonl";
  const LayerSettings phsa = Attention(Policy::kPhsa, 2);
  {
    NiahRecords none;
    NiahWriter writer(path, TestHeader(), none);
    for (int32_t i = 0; i < 3; ++i) writer.Append(Record(i, phsa, true));
  }
  const std::string whole = ReadAll(path);
  const size_t header = whole.find('\n') + 1;
  for (size_t bytes = 0; bytes < whole.size(); bytes += 97) {
    WriteAll(path, whole.substr(0, bytes));
    const auto lines = static_cast<size_t>(std::count(whole.begin(), whole.begin() + static_cast<long>(bytes), '\n'));
    NiahRecords records;
    NiahWriter writer(path, TestHeader(), records);
    EXPECT_EQ(records.all().size(), bytes < header ? 0 : lines - 1);
    for (int32_t i = 0; i < 3; ++i) {
      if (!records.Contains(NiahTask::kSingle2, 4096, phsa, i)) writer.Append(Record(i, phsa, true));
    }
    EXPECT_EQ(ReadAll(path), whole);
  }
}

TEST(NiahRecords, SamplesOfAnotherRunAreNotMixedIn) {
  const Folder folder;
  const auto path = folder / "a.jsonl";
  {
    NiahRecords none;
    NiahWriter(path, TestHeader(1), none);
  }
  NiahRecords records;
  const std::string refusal = Refusal([&] { NiahWriter(path, TestHeader(2), records); });
  EXPECT_TRUE(Contains(refusal, "seed") && Contains(refusal, "1") && Contains(refusal, "2")) << refusal;
  NiahHeader more = TestHeader(1);
  more["chat"] = true;
  EXPECT_TRUE(Contains(Refusal([&] { NiahWriter(path, more, records); }), "chat"));
  EXPECT_TRUE(Contains(Refusal([&] { CheckSameHeader(TestHeader(1), "a", TestHeader(2), "b"); }), "seed"));
}

TEST(NiahRecords, FilesThatAreNotOursAreRefusedAndStay) {
  const Folder folder;
  const auto path = folder / "notes.txt";
  for (const char* text : {"dear diary", "dear diary\n", "{}\n", "{\"format\":\"other\"}\n"}) {
    WriteAll(path, text);
    NiahRecords records;
    EXPECT_TRUE(Contains(Refusal([&] { NiahWriter(path, TestHeader(), records); }), "notes.txt")) << text;
    EXPECT_EQ(ReadAll(path), text);
  }
}

TEST(NiahRecords, BrokenLinesAreNamed) {
  const Folder folder;
  const auto path = folder / "a.jsonl";
  {
    NiahRecords none;
    NiahWriter writer(path, TestHeader(), none);
    writer.Append(Record(0, Attention(Policy::kPhsa, 2), true));
  }
  const std::string whole = ReadAll(path);
  const size_t header = whole.find('\n') + 1;
  const std::string head = whole.substr(0, header), line = whole.substr(header);
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = line;
    EXPECT_TRUE(Contains(text, from)) << from;
    return text.replace(text.find(from), from.size(), to);
  };
  for (const std::string& bad :
       {std::string("x\n"), std::string("[]\n"), std::string("{}\n"), "{\"a\":" + std::string(100000, '[') + "\n",
        changed("single_2", "single_9"), changed("\"length\":4096", "\"length\":-1"),
        changed("\"length\":4096", "\"length\":99999999999999999999"), changed("\"sample\":0", "\"sample\":\"0\""),
        changed("\"found\":[true]", "\"found\":[true,true]"), changed("\"depths\":[0.0]", "\"depths\":[1e9]"),
        changed("\"attention\":\"phsa\"", "\"attention\":\"nothing\""), changed("\"read\":25", "\"read\":2.5"),
        changed("\"dense\":100", "\"dense\":18446744073709551615")}) {
    WriteAll(path, head + bad);
    EXPECT_TRUE(Contains(Refusal([&] { ReadNiahFile(path); }), "a.jsonl:2")) << bad.substr(0, 200);
  }
  const size_t layers = head.find("\"layers\":2");
  for (const char* bad : {"\"layers\":\"2\"", "\"layers\":99999999", "\"layer\":2"}) {
    std::string text = head;
    WriteAll(path, text.replace(layers, 10, bad) + line);
    EXPECT_TRUE(Contains(Refusal([&] { ReadNiahFile(path); }), "a.jsonl:1")) << bad;
  }
}

TEST(NiahRecords, FilesOfOneRunJoinAndConflictsAreRefused) {
  const LayerSettings phsa = Attention(Policy::kPhsa, 2);
  NiahRecords records;
  records.Add(Record(0, phsa, true), "a");
  records.Add(Record(0, phsa, true), "b");  // the same twice counts once
  records.Add(Record(1, phsa, true), "b");
  EXPECT_EQ(records.all().size(), 2u);
  EXPECT_TRUE(Contains(Refusal([&] { records.Add(Record(1, phsa, false), "c.jsonl:7"); }), "c.jsonl:7"));
}

TEST(NiahRecords, OneRunWritesAtATime) {
  const Folder folder;
  NiahRecords records;
  const NiahWriter writer(folder / "a.jsonl", TestHeader(), records);
  EXPECT_TRUE(Contains(Refusal([&] { NiahWriter(folder / "a.jsonl", TestHeader(), records); }), "another run writes"));
}

TEST(NiahRecords, WhatCannotBeWrittenIsRefused) {
  const Folder folder;
  NiahRecords records;
  EXPECT_TRUE(Contains(Refusal([&] { NiahWriter(folder / "no/a.jsonl", TestHeader(), records); }), "no/a.jsonl"));
  EXPECT_TRUE(Contains(Refusal([&] { NiahWriter(folder / ".", TestHeader(), records); }), "out "));
  EXPECT_TRUE(Contains(Refusal([&] { NiahWriter("/dev/null", TestHeader(), records); }), "plain file"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Reports

// Ten samples: dense finds all, InfLLM v2 the first four, PHSA the first eight.
NiahRecords Results() {
  NiahRecords records;
  for (int32_t i = 0; i < 10; ++i) {
    records.Add(Record(i, Attention(Policy::kPhsa, 2, 0.9f), i < 8), "");
    records.Add(Record(i, Attention(Policy::kInfllm2, 2), i < 4), "");
    records.Add(Record(i, Attention(Policy::kDense, 2), true), "");
  }
  return records;
}

std::vector<NiahRow> Rows(const NiahRecords& records) {
  std::vector<const NiahRecord*> all;
  for (const NiahRecord& record : records.all()) all.push_back(&record);
  return NiahRows(all, 2);
}

TEST(NiahReport, RowsSayWhatTheSamplesSay) {
  const NiahRecords records = Results();
  const std::vector<NiahRow> rows = Rows(records);
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].method, "dense");
  EXPECT_FALSE(rows[0].top_k);
  EXPECT_EQ(rows[1].method, "infllm2");
  EXPECT_EQ(rows[2].method, "phsa λ=0.9");
  EXPECT_EQ(*rows[2].top_k, 2);
  EXPECT_NEAR(rows[2].score, 0.8, 1e-12);
  EXPECT_NEAR(rows[2].ci95.low, 0.4902, 1e-4);
  EXPECT_NEAR(rows[2].read_share, 0.25, 1e-12);
  EXPECT_NEAR(rows[2].sparsity, 1 - (16 + 128 + 2 * 16) / 4096.0, 1e-12);
  EXPECT_EQ(rows[0].sparsity, 0);
  const std::vector<const NiahRow*> peers = NiahPeers(rows[2], rows);
  ASSERT_EQ(peers.size(), 2u);
  EXPECT_EQ(NiahPeers(rows[1], rows).size(), 1u);
  EXPECT_TRUE(NiahPeers(rows[0], rows).empty());
  const std::optional<PairedDifference> difference = Compare(rows[2], rows[1]);
  ASSERT_TRUE(difference);
  EXPECT_EQ(difference->better, 4);
  EXPECT_EQ(difference->worse, 0);
}

TEST(NiahReport, OnlySamplesThatBothHaveArePaired) {
  NiahRecords records;
  for (const int32_t i : {0, 1, 2, 5}) records.Add(Record(i, Attention(Policy::kPhsa, 2), true), "");
  for (const int32_t i : {5, 3, 1}) records.Add(Record(i, Attention(Policy::kInfllm2, 2), i == 1), "");
  const std::vector<NiahRow> rows = Rows(records);
  const std::optional<PairedDifference> difference = Compare(rows[1], rows[0]);
  ASSERT_TRUE(difference);
  EXPECT_EQ(difference->samples, 2);  // 1 and 5
  EXPECT_EQ(difference->better, 1);
}

TEST(NiahReport, JsonLinesHaveTheFieldsThatScriptsRead) {
  const NiahRecords records = Results();
  std::istringstream lines(NiahJsonLines(Rows(records)));
  std::vector<nlohmann::json> all;
  for (std::string line; std::getline(lines, line);) all.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(all.size(), 3u);
  for (const nlohmann::json& line : all) {
    for (const char* key : {"task", "length", "attention", "top_k", "lambda", "samples", "score", "ci95", "read_share",
                            "sparsity", "against"}) {
      EXPECT_TRUE(line.contains(key)) << key;
    }
    EXPECT_EQ(line["task"], "single_2");
    EXPECT_EQ(line["samples"], 10);
  }
  EXPECT_TRUE(all[0]["top_k"].is_null());
  EXPECT_EQ(all[1]["lambda"], 1);
  EXPECT_EQ(all[2]["lambda"].dump(), "0.9");
  EXPECT_EQ(all[2]["against"][1]["attention"], "infllm2");
  EXPECT_NEAR(all[2]["against"][1]["difference"].get<double>(), 0.4, 1e-12);
  EXPECT_NEAR(all[2]["against"][1]["p"].get<double>(), 0.125, 1e-12);
}

TEST(NiahReport, TablesHaveALinePerMethodAndAColumnPerK) {
  NiahRecords records = Results();
  for (int32_t i = 0; i < 10; ++i) records.Add(Record(i, Attention(Policy::kPhsa, 4, 0.9f), true), "");
  const std::string text = NiahTables(Rows(records), NiahScoring::kStrict);
  EXPECT_TRUE(Contains(text, "| method | no K | K=2 | K=4 |")) << text;
  EXPECT_TRUE(Contains(text, "| phsa λ=0.9 | – | 80.0 (49.0–94.3) | 100.0 (72.2–100.0) |")) << text;
  EXPECT_TRUE(Contains(text, "| infllm2 | – | 40.0 (16.8–68.7) | – |")) << text;
  EXPECT_TRUE(Contains(text, "| phsa λ=0.9 − infllm2 | – | +40.0 (")) << text;
  EXPECT_TRUE(Contains(text, "p = 0.125")) << text;
  EXPECT_TRUE(Contains(text, "10 samples")) << text;
}

TEST(NiahReport, RowsThatDifferInOtherSettingsAreToldApart) {
  NiahRecords records;
  LayerSettings wide = Attention(Policy::kPhsa, 2);
  wide.base.local_tokens = 512;
  records.Add(Record(0, Attention(Policy::kPhsa, 2), true), "");
  records.Add(Record(0, wide, true), "");
  const std::vector<NiahRow> rows = Rows(records);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_NE(rows[0].method, rows[1].method);
  EXPECT_EQ(rows[0].method, "phsa λ=1 (local 128)");
  EXPECT_EQ(rows[1].method, "phsa λ=1 (local 512)");
}

TEST(NiahReport, WhateverTellsTwoConfigurationsApartStandsInTableJsonAndHeatMap) {
  const auto changed = [](const std::function<void(LayerSettings&)>& change) {
    LayerSettings settings = Attention(Policy::kPhsa, 2, 0.9f);
    change(settings);
    return Canonical(settings);
  };
  const std::vector<LayerSettings> others = {
      changed([](LayerSettings& one) { one.base.dense_below = 1024; }),
      changed([](LayerSettings& one) { one.base.group_reduce = GroupReduce::kMax; }),
      changed([](LayerSettings& one) { one.base.block_size = 32, one.base.init_tokens = 32; }),
      changed([](LayerSettings& one) { one.layers[1] = Attention(Policy::kDense, 2).base; }),
      changed([](LayerSettings& one) {
        one.base.head_lambda = {0.5f, 0.6f};
      }),
      changed([](LayerSettings& one) { one.base.punctuation = "pure"; })};
  for (const LayerSettings& other : others) {
    // All needles are found with the one, none with the other: a picture that mixes them up shows it.
    NiahRecords records;
    for (int32_t i = 0; i < 5; ++i) {
      records.Add(Record(i, Attention(Policy::kPhsa, 2, 0.9f), true), "");
      records.Add(Record(i, other, false), "");
    }
    const std::vector<NiahRow> rows = Rows(records);
    const std::string where = SettingsToJson(other);
    ASSERT_EQ(rows.size(), 2u) << where;
    EXPECT_NE(rows[0].method, rows[1].method) << where;
    const std::string tables = NiahTables(rows, NiahScoring::kForced);
    EXPECT_TRUE(Contains(tables, "| " + rows[0].method + " |") && Contains(tables, "| " + rows[1].method + " |"))
        << tables;
    const std::string json = NiahJsonLines(rows), svg = NiahHeatMap(rows, "model", {});
    const auto first = nlohmann::json::parse(json.substr(0, json.find('\n')));
    const auto second = nlohmann::json::parse(json.substr(json.find('\n') + 1));
    EXPECT_NE(first["method"], second["method"]);
    EXPECT_NE(first["settings"], second["settings"]);
    EXPECT_EQ(first["settings"], nlohmann::json::parse(SettingsToJson(rows[0].attention)));
    EXPECT_EQ(Count(svg, "1 of 1 found</title>"), 5u) << where;
    EXPECT_EQ(Count(svg, "0 of 1 found</title>"), 5u) << where;
  }
}

TEST(NiahReport, NamesStayTheSameOverLengthsWithPresetsOfTheirOwn) {
  NiahRecords records;
  for (const int32_t length : {4096, 8192}) {
    LayerSettings settings = Attention(Policy::kPhsa, 2);
    settings.base.init_tokens = length / 64;
    LayerSettings late = settings;
    late.base.dense_below = 1024;
    records.Add(Record(0, settings, true, length), "");
    records.Add(Record(0, late, true, length), "");
  }
  const std::vector<NiahRow> rows = Rows(records);
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0].method, "phsa λ=1 (dense below 0)");
  EXPECT_EQ(rows[2].method, rows[0].method);
  EXPECT_EQ(rows[3].method, rows[1].method);
}

TEST(NiahReport, DepthsThatNoSampleHasAreNamed) {
  const NiahRecords records = Results();  // 0, 25, 50, 75 and 100 %
  EXPECT_EQ(NiahEmptyDepths(Rows(records), std::vector<double>{0, 10, 50, 62.5}), "10 %, 62.5 %");
  EXPECT_EQ(NiahEmptyDepths(Rows(records), std::vector<double>{0, 100}), "");
}

TEST(NiahHeatMap, EveryCellIsThere) {
  NiahRecords records = Results();
  for (int32_t i = 0; i < 5; ++i) records.Add(Record(i, Attention(Policy::kPhsa, 2, 0.9f), false, 8192), "");
  const std::string svg = NiahHeatMap(Rows(records), "a <small> & \"odd\" model", {});
  EXPECT_TRUE(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
  EXPECT_FALSE(Contains(svg, "<small>"));
  EXPECT_TRUE(Contains(svg, "a &lt;small&gt; &amp; &quot;odd&quot; model"));
  EXPECT_EQ(Count(svg, " of 2 found</title>"), 15u);  // three methods at 4k, five depths with two samples each
  EXPECT_EQ(Count(svg, "0 of 1 found</title>"), 5u);  // one at 8k
  for (const char* label : {">0 %<", ">25 %<", ">100 %<", ">4k<", ">8k<", ">phsa λ=0.9, K=2<"}) {
    EXPECT_TRUE(Contains(svg, label)) << label;
  }
  EXPECT_EQ(Count(svg, "no sample</title>"), 10u);  // two methods at 8k
  // A depth that was asked for and has no sample is a line of empty cells.
  const std::string grid = NiahHeatMap(Rows(records), "model", std::vector<double>{0, 60});
  EXPECT_TRUE(Contains(grid, ">60 %<"));
  EXPECT_EQ(Count(grid, "no sample</title>"), 10u + 6u);
}

TEST(NiahHeatMap, FilesAreRefusedByTheirEndingAndPlace) {
  const Folder folder;
  EXPECT_TRUE(Contains(Refusal([&] { CheckNiahHeatMapPath(folder / "map.png"); }), ".svg"));
  EXPECT_TRUE(Contains(Refusal([&] { CheckNiahHeatMapPath(folder / "no/map.svg"); }), "no/map.svg"));
  EXPECT_NO_THROW(CheckNiahHeatMapPath(folder / "map.svg"));
  EXPECT_TRUE(std::filesystem::is_empty(folder / "."));
  const NiahRecords records = Results();
  WriteNiahHeatMap(Rows(records), "m <b>", {}, folder / "map.html");
  const std::string html = ReadAll(folder / "map.html");
  EXPECT_TRUE(html.starts_with("<!DOCTYPE html>"));
  EXPECT_EQ(Count(html, "<figure>"), 3u) << "a panel each, so that they wrap";
  EXPECT_TRUE(Contains(html, "width=device-width") && Contains(html, "m &lt;b&gt;"));
  WriteNiahHeatMap(Rows(records), "m", {}, folder / "map.svg");
  for (const char* file : {"map.html", "map.svg"}) {
    EXPECT_TRUE(Contains(ReadAll(folder / file), "prefers-color-scheme: dark")) << file;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Running

TEST(NiahRun, ReferencesAreFoundWhateverTheirCase) {
  EXPECT_TRUE(NiahFound("It is: 12ab-CD34.", "12AB-cd34"));
  EXPECT_FALSE(NiahFound("It is: 12ab-CD3", "12AB-cd34"));
  EXPECT_FALSE(NiahFound("", "x"));
}

std::unique_ptr<Engine> SmallEngine(int32_t chunk = 512, int32_t cache_texts = 1) {
  auto model = std::make_unique<FakeModel>();
  model->config_for_test().vocab_size = 300;
  model->Add("model.embed_tokens.weight", {300, model->config().hidden});
  EngineOptions options;
  options.weights = WeightsMode::kF32;
  options.threads = 1;
  options.context = 1024;
  options.chunk = chunk;
  options.cache_texts = cache_texts;
  auto engine = std::make_unique<Engine>(std::move(model), SmallTokenizer(), options);
  engine->Load([](double) { return true; });
  return engine;
}

NiahRuns SmallRuns(NiahScoring scoring) {
  NiahRuns runs;
  runs.tasks = {NiahTask::kSingle1, NiahTask::kMultikey2};
  runs.scoring = scoring;
  runs.samples = 3;
  for (const LayerSettings& attention : {Attention(Policy::kDense, 1), Attention(Policy::kInfllm2, 1)}) {
    runs.configurations.push_back({1024, attention});
  }
  return runs;
}

// Runs until `most` answers are there.
bool RunSome(Engine& engine, const NiahRuns& runs, NiahRecords& records, size_t most = 1000000,
             const NiahPrompts& prompts = Prompts()) {
  size_t count = 0;
  NiahCallbacks callbacks;
  double share = 0;
  callbacks.progress = [&](const NiahProgress& progress) {
    EXPECT_GE(progress.share, share);
    EXPECT_LE(progress.share, 1);
    share = progress.share;
  };
  callbacks.record = [&](const NiahRecord&) { ++count; };
  callbacks.stop = [&] { return count >= most; };
  return RunNiah(engine, prompts, runs, records, callbacks);
}

void ExpectSame(const NiahRecords& a, const NiahRecords& b) {
  ASSERT_EQ(a.all().size(), b.all().size());
  const auto key = [](const NiahRecord& r) {
    return std::tuple(r.task, r.length, r.sample, SettingsToJson(r.attention), r.answer, r.found, r.tokens, r.read,
                      r.dense, r.references, r.depths);
  };
  std::set<decltype(key(a.all()[0]))> one, other;
  for (const NiahRecord& record : a.all()) one.insert(key(record));
  for (const NiahRecord& record : b.all()) other.insert(key(record));
  EXPECT_EQ(one, other);
}

TEST(NiahRun, AStoppedRunAndItsContinuationAreOneRun) {
  const std::unique_ptr<Engine> engine = SmallEngine();
  for (const NiahScoring scoring : {NiahScoring::kReferences, NiahScoring::kStrict, NiahScoring::kForced}) {
    const NiahRuns runs = SmallRuns(scoring);
    NiahRecords whole, parts;
    ASSERT_TRUE(RunSome(*engine, runs, whole));
    ASSERT_EQ(whole.all().size(), 12u);
    EXPECT_FALSE(RunSome(*engine, runs, parts, 5));
    EXPECT_EQ(parts.all().size(), 5u);
    EXPECT_TRUE(RunSome(*engine, runs, parts));
    ExpectSame(whole, parts);
  }
}

TEST(NiahRun, ShardsMakeTheWhole) {
  const std::unique_ptr<Engine> engine = SmallEngine();
  NiahRuns runs = SmallRuns(NiahScoring::kStrict);
  NiahRecords whole, parts;
  RunSome(*engine, runs, whole);
  runs.shards = 2;
  for (runs.shard = 0; runs.shard < 2; ++runs.shard) RunSome(*engine, runs, parts);
  ExpectSame(whole, parts);
}

// Whether the samples have no more than a question in common, or, begun alike as RULER begins them, most of their text.
TEST(NiahRun, SamplesReadTogetherGiveWhatTheyGiveAlone) {
  for (const bool random_start : {true, false}) {
    NiahPromptOptions options;
    options.random_start = random_start;
    const NiahPrompts prompts = Prompts(options);
    for (const NiahScoring scoring : {NiahScoring::kReferences, NiahScoring::kForced}) {
      NiahRuns runs = SmallRuns(scoring);
      runs.tasks = {NiahTask::kSingle1, NiahTask::kSingle2};
      runs.samples = 5;
      runs.configurations = {{1000, Attention(Policy::kPhsa, 2, 0.9f)},
                             {1000, Attention(Policy::kDense, 1)},
                             {600, Attention(Policy::kInfllm2, 1)}};
      NiahRecords alone, together;
      ASSERT_TRUE(RunSome(*SmallEngine(), runs, alone, 1000000, prompts));
      ASSERT_EQ(alone.all().size(), 30u);
      const std::unique_ptr<Engine> engine = SmallEngine(4096, 3);
      // It stops before the second batch, and goes on as if it had not.
      ASSERT_FALSE(RunSome(*engine, runs, together, 1, prompts));
      EXPECT_EQ(together.all().size(), 4u);  // of the shorter samples, as many as the cache holds
      ASSERT_TRUE(RunSome(*engine, runs, together, 1000000, prompts));
      ExpectSame(alone, together);
    }
  }
}

TEST(NiahRun, SamplesAreReadInOneStepWhereTheyFit) {
  const std::unique_ptr<Engine> engine = SmallEngine(4096, 4);
  NiahRuns runs = SmallRuns(NiahScoring::kForced);
  runs.tasks = {NiahTask::kSingle2};
  runs.configurations = {{1000, Attention(Policy::kDense, 1)}};
  runs.samples = 5;
  for (const int32_t batch : {0, 2}) {
    runs.batch = batch;
    engine->SetAttention(runs.configurations.front().attention);
    std::vector<size_t> steps;  // their texts
    engine->decoder().Observe([&](const LayerAttention& attention) {
      if (attention.layer == 0) steps.push_back(attention.q_lens.size());
    });
    NiahRecords records;
    ASSERT_TRUE(RunSome(*engine, runs, records));
    EXPECT_EQ(steps, batch == 0 ? (std::vector<size_t>{4, 1}) : (std::vector<size_t>{2, 2, 1}));
    engine->decoder().Observe({});
  }
}

TEST(NiahRun, DenseReadsAllAndSparseLess) {
  const std::unique_ptr<Engine> engine = SmallEngine();
  NiahRecords records;
  RunSome(*engine, SmallRuns(NiahScoring::kStrict), records);
  for (const NiahRecord& record : records.all()) {
    EXPECT_GT(record.dense, 0);
    if (record.attention.base.policy == Policy::kDense) {
      EXPECT_EQ(record.read, record.dense);
    } else {
      EXPECT_LT(record.read, record.dense * 6 / 10);
    }
  }
}

// What strict scoring says is what reading the answer with all logits says.
TEST(NiahRun, StrictAnswersAreTheLikeliestTokens) {
  const std::unique_ptr<Engine> engine = SmallEngine();
  NiahRecords records;
  NiahRuns runs = SmallRuns(NiahScoring::kStrict);
  runs.samples = 1;
  RunSome(*engine, runs, records);
  for (const NiahRecord& record : records.all()) {
    const NiahSample sample = Prompts().Build(record.task, record.length, record.sample);
    std::vector<int32_t> tokens = sample.tokens, likeliest;
    for (const int32_t token : TheTokenizer().Encode(sample.answer, SpecialTokens::kAsText)) tokens.push_back(token);
    tokens.pop_back();
    engine->SetAttention(record.attention);
    Session session(*engine);
    session.Prefill(
        tokens, {},
        [&](int32_t, int32_t row, const LogitsRow& logits) {
          if (row + 1 < static_cast<int32_t>(sample.tokens.size())) return;
          const std::span<const float> known = logits.All().first(static_cast<size_t>(TheTokenizer().vocab_size()));
          likeliest.push_back(static_cast<int32_t>(std::max_element(known.begin(), known.end()) - known.begin()));
        },
        BatchItem::Logits::kAll);
    EXPECT_EQ(likeliest.size(), sample.answer.size());
    EXPECT_EQ(TheTokenizer().Decode(likeliest, false), record.answer);
  }
}

TEST(NiahRun, LeadingSpacesAreThoseBeforeTheReference) {
  const auto encode = [](std::string_view text) { return TheTokenizer().Encode(text, SpecialTokens::kAsText); };
  EXPECT_EQ(LeadingSpaces(TheTokenizer(), encode(" 12")), 1);
  EXPECT_EQ(LeadingSpaces(TheTokenizer(), encode("12")), 0);
  EXPECT_EQ(LeadingSpaces(TheTokenizer(), encode(": 12")), 0);
  EXPECT_EQ(LeadingSpaces(TheTokenizer(), {}), 0);
}

TEST(NiahRun, ForcedScoringOverlooksOnlyTheSpace) {
  const std::unique_ptr<Engine> engine = SmallEngine();
  NiahRecords strict, forced;
  RunSome(*engine, SmallRuns(NiahScoring::kStrict), strict);
  RunSome(*engine, SmallRuns(NiahScoring::kForced), forced);
  ASSERT_EQ(strict.all().size(), forced.all().size());
  for (size_t i = 0; i < strict.all().size(); ++i) {
    const NiahRecord& record = forced.all()[i];
    EXPECT_EQ(strict.all()[i].answer, record.answer);
    const std::string right = Prompts().Build(record.task, record.length, record.sample).answer;
    ASSERT_EQ(right.front(), ' ');
    EXPECT_EQ(record.found[0], record.answer.substr(1) == right.substr(1)) << record.answer;
    EXPECT_EQ(strict.all()[i].found[0], record.answer == right) << record.answer;
  }
}

// Whoever runs the samples elsewhere has all that this program would have used, and the same numbers of tokens read.
TEST(NiahExport, HoldsSamplesAndWhatTheirRecordsWillBe) {
  const std::unique_ptr<Engine> engine = SmallEngine();
  NiahRuns runs = SmallRuns(NiahScoring::kForced);
  runs.configurations.push_back({1024, Attention(Policy::kPhsa, 2, 0.9f)});
  LayerSettings layered = Attention(Policy::kStreaming, 0);
  layered.layers[1] = Attention(Policy::kDense, 1).base;
  runs.configurations.push_back({1024, layered});
  NiahRecords records;
  ASSERT_TRUE(RunSome(*engine, runs, records));

  const Folder folder;
  const auto path = folder / "samples.jsonl";
  ExportNiah(*engine, Prompts(), runs, TestHeader(), path);
  std::ifstream file(path);
  std::string line;
  ASSERT_TRUE(std::getline(file, line));
  const auto header = nlohmann::json::parse(line);
  EXPECT_EQ(header.at("format"), "phsa niah samples 1");
  EXPECT_EQ(header.at("vocabulary"), std::min(300, TheTokenizer().vocab_size()));
  EXPECT_EQ(header.at("punctuation").at("en+zh"), PunctuationOf(TheTokenizer(), "en+zh").Ids());
  size_t exported = 0;
  while (std::getline(file, line)) {
    const auto sample = nlohmann::json::parse(line);
    EXPECT_EQ(sample.at("free_tokens"), 1);
    for (const auto& record : sample.at("records")) {
      const auto same = std::find_if(records.all().begin(), records.all().end(), [&](const NiahRecord& one) {
        return Name(one.task) == record.at("task") && one.sample == record.at("sample") &&
               nlohmann::json::parse(SettingsToJson(one.attention)) == record.at("attention");
      });
      ASSERT_NE(same, records.all().end()) << line;
      const NiahSample built = Prompts().Build(same->task, same->length, same->sample);
      EXPECT_EQ(sample.at("tokens"), built.tokens);
      EXPECT_EQ(sample.at("answer_tokens"), TheTokenizer().Encode(built.answer, SpecialTokens::kAsText));
      EXPECT_EQ(record.at("read"), same->read);
      EXPECT_EQ(record.at("dense"), same->dense);
      EXPECT_EQ(record.at("references"), same->references);
      EXPECT_EQ(record.at("tokens"), same->tokens);
      ++exported;
    }
  }
  EXPECT_EQ(exported, records.all().size());
  try {
    ExportNiah(*engine, Prompts(), runs, TestHeader(), "/no/such/folder/samples.jsonl");
    ADD_FAILURE() << "a file was written where there is no folder";
  } catch (const Error& error) {
    EXPECT_TRUE(Contains(error.what(), "/no/such/folder/samples.jsonl")) << error.what();
  }
}

}  // namespace
}  // namespace phsa
