#include "eval/sources.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "base/dtype.h"
#include "engine/text_cache.h"
#include "eval/query_blocks.h"
#include "eval/recall.h"
#include "eval/sentences.h"
#include "fake_engine.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> Cut(const std::string& text, SentenceKind kind = SentenceKind::kProse) {
  std::vector<std::string> out;
  size_t begin = 0;
  for (const size_t end : SentenceEnds(text, kind)) {
    out.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return out;
}

using Strings = std::vector<std::string>;

TEST(Sentences, EndAtPointsAndEmptyLinesAndNotWithinWords) {
  EXPECT_EQ(Cut("The tower is high. Dr. A. Smith built it for 3.5 million.\nIt was\nwhite!  \"Is it?\" he asked."),
            (Strings{"The tower is high. ", "Dr. A. Smith built it for 3.5 million.\n", "It was\nwhite!  ",
                     "\"Is it?\" he asked."}));
  EXPECT_EQ(Cut("A heading of words\n\nThen a text.\n- one item of a list\n- another item\n"),
            (Strings{"A heading of words\n\n", "Then a text.\n", "- one item of a list\n", "- another item\n"}));
  EXPECT_EQ(Cut("灯塔很高。它是白色的！谁建造了它？“一位工程师。”他说。"),
            (Strings{"灯塔很高。", "它是白色的！", "谁建造了它？", "“一位工程师。”他说。"}));
}

TEST(Sentences, OfCodeAreLines) { EXPECT_EQ(Cut("a = 1. \nb\n", SentenceKind::kLines), (Strings{"a = 1. \n", "b\n"})); }

TEST(Sentences, CoverAnyTextInPiecesThatAreNotLong) {
  std::mt19937 random(4);
  const Strings parts = {
      "a", " ", ".", "\n", "。", "é", "\"", "- ", "Dr", "word", std::string(900, 'x'), std::string(900, ' ')};
  for (int i = 0; i < 500; ++i) {
    std::string text;
    for (size_t n = random() % 60; n > 0; --n) text += parts[random() % parts.size()];
    for (const SentenceKind kind : {SentenceKind::kProse, SentenceKind::kLines}) {
      std::string all;
      for (const std::string& one : Cut(text, kind)) {
        EXPECT_FALSE(one.empty());
        EXPECT_LE(one.size(), kLongestSentence + 24);
        all += one;
      }
      EXPECT_EQ(all, text);
    }
  }
}

TEST(SourceFinder, SaysWhichTokensASentenceIs) {
  const Tokenizer tokenizer = SmallTokenizer();
  const std::string text = "aaaaa bbbbb ccccc.\n\nddddd eeeee fffff. ";
  const std::vector<int32_t> prompt = tokenizer.Encode("xx. " + text + "zz", SpecialTokens::kAsText);
  SourceFinder finder(tokenizer, prompt);
  const std::optional<SourceText> found = finder.Find(text, SentenceKind::kProse);
  ASSERT_TRUE(found);
  ASSERT_EQ(found->sentences.size(), 2u);
  EXPECT_EQ(found->sentences[0].begin, 0u);
  EXPECT_EQ(found->sentences[0].first, 4);
  EXPECT_EQ(found->sentences[0].last, 4 + 19);
  EXPECT_EQ(found->sentences[1].first, 4 + 20);
  EXPECT_EQ(found->end, 4 + 38);
  EXPECT_FALSE(SourceFinder(tokenizer, prompt).Find("not there", SentenceKind::kProse));
}

TEST(SourceFinder, FindsATextThatTheTemplateTrimmedOrTheTokenizerNormalised) {
  const Tokenizer tokenizer = SmallTokenizer();
  const std::vector<int32_t> prompt = tokenizer.Encode("x aaaaa é bbbbb.", SpecialTokens::kAsText);
  const std::string trimmed = "\n\n aaaaa é bbbbb. \n", decomposed = "aaaaa e\xcc\x81 bbbbb.";
  const auto one = SourceFinder(tokenizer, prompt).Find(trimmed, SentenceKind::kProse);
  ASSERT_TRUE(one);
  EXPECT_EQ(one->sentences[0].begin, 3u);
  EXPECT_EQ(one->sentences[0].first, 2);
  const auto other = SourceFinder(tokenizer, prompt).Find(decomposed, SentenceKind::kProse);
  ASSERT_TRUE(other);
  EXPECT_EQ(other->sentences.back().end, decomposed.size());
}

std::unique_ptr<Engine> MakeEngine(const Settings& settings, int32_t chunk = 512, int32_t kv_type = PHSA_F32) {
  EngineOptions options = FakeOptions(1024, chunk, settings);
  options.kv_dtype = kv_type;
  return LoadedEngine(options);
}

// One query's or key's channel: queries beside 8-bit keys are bf16, and these are codes with a scale.
double QueryAt(const ForwardParams& p, int32_t kv_type, int64_t at) {
  if (kv_type == PHSA_F32) return static_cast<const float*>(p.q)[at];
  return F32FromBf16(static_cast<const uint16_t*>(p.q)[at]);
}

double KeyAt(const ForwardParams& p, int32_t kv_type, int64_t page, int32_t token, int32_t head, int32_t channel) {
  const int64_t at = page * p.kv.k_page_stride + token * p.kv.k_token_stride + head * p.kv.k_head_stride + channel;
  if (kv_type == PHSA_F32) return static_cast<const float*>(p.kv.k)[at];
  const KvScales& scales = p.kv_scales;
  const uint16_t scale = scales.k[page * scales.page_stride + token * scales.token_stride + head * scales.head_stride];
  return static_cast<const int8_t*>(p.kv.k)[at] * double{F32FromBf16(scale)};
}

// Sentences of `size` tokens from token `first` on.
SourceText EvenText(int32_t first, int32_t count, int32_t size) {
  SourceText text;
  for (int32_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i) * 100;
    text.sentences.push_back({at, at + 100, first + i * size, first + (i + 1) * size - 1});
  }
  text.end = first + count * size;
  return text;
}

// From the definition, in double precision: what each sentence has of all that counts.
std::vector<double> Expected(Engine& engine, const std::vector<int32_t>& tokens, const SourceText& text,
                             int32_t first_query) {
  const ModelConfig& config = engine.config();
  const int32_t kv_type = engine.cache().layout().kv_type;
  std::vector<double> total(text.sentences.size());
  const Observing observing(engine.decoder(), [&](const LayerAttention& attention) {
    const ForwardParams& p = attention.params;
    ASSERT_EQ(attention.q_lens[0], attention.kv_lens[0]);
    for (int32_t head = 0; head < config.num_q_heads; ++head) {
      const int32_t kv_head = head / (config.num_q_heads / config.num_kv_heads);
      const auto mass = [&](int32_t row, int32_t token) {
        const QueryBlocks blocks(attention.settings, row);
        const int32_t block = token / attention.settings.block_size;
        bool read = blocks.reads_all() || block < blocks.init_end() || block >= blocks.local_begin();
        const int32_t heads = attention.plan.SelectionHeads(), slots = attention.plan.SelectionSlots();
        for (int32_t slot = 0; slot < slots && p.selection != nullptr; ++slot) {
          const int64_t list = int64_t{row} * heads + head / (config.num_q_heads / heads);
          read = read || p.selection[list * slots + slot] == block;
        }
        if (!read) return 0.0;
        const int64_t q = row * p.q_token_stride + head * p.q_head_stride, page = p.kv.page_table[token / kPageTokens];
        double dot = 0;
        for (int32_t c = 0; c < config.head_dim; ++c) {
          dot += QueryAt(p, kv_type, q + c) * KeyAt(p, kv_type, page, token % kPageTokens, kv_head, c);
        }
        return std::exp(dot / std::sqrt(config.head_dim) -
                        static_cast<double>(p.lse[int64_t{row} * config.num_q_heads + head]));
      };
      for (size_t s = 0; s < text.sentences.size(); ++s) {
        for (int32_t row = first_query; row < static_cast<int32_t>(tokens.size()); ++row) {
          double own = 0;
          for (int32_t token = text.sentences[s].first; token <= text.sentences[s].last; ++token) {
            double others = 0, count = 0;
            for (int32_t other = text.end - 32; other < text.end; ++other) {
              if (other - token < 64) continue;
              others += mass(other, token);
              ++count;
            }
            own += std::max(0.0, mass(row, token) - (count > 0 ? others / count : 0));
          }
          total[s] += own * own;
        }
      }
    }
  });
  Session session(engine);
  session.Prefill(
      tokens, {}, [](int32_t, int32_t, const LogitsRow&) {}, BatchItem::Logits::kNone);
  const double sum = std::accumulate(total.begin(), total.end(), 0.0);
  for (double& value : total) value /= sum;
  return total;
}

// Of a text of 330 tokens and an answer of eleven.
void CheckSources(Policy policy, int32_t chunk, int32_t kv_type) {
  const std::unique_ptr<Engine> engine = MakeEngine(SmallSettings(policy, 3), chunk, kv_type);
  const std::vector<int32_t> tokens = Tokens(330);
  const SourceText text = EvenText(5, 20, 15);  // up to token 305
  const std::unique_ptr<Engine> whole = MakeEngine(SmallSettings(policy, 3), 512, kv_type);
  const std::vector<double> expected = Expected(*whole, tokens, text, 319);

  Session session(*engine);
  session.Prefill(
      tokens, {}, [](int32_t, int32_t, const LogitsRow&) {}, BatchItem::Logits::kNone);
  const std::vector<Passage> passages =
      FindSources(*engine, session.sequence(), 320, 11, {&text, 1}, {}, {.most = 100, .least = 1e-4});
  EXPECT_EQ(session.sequence().tokens(), tokens);
  ASSERT_FALSE(passages.empty());
  double sum = 0;
  for (const Passage& passage : passages) {
    double own = 0;
    for (size_t s = passage.begin / 100; s < passage.end / 100; ++s) own += expected[s];
    EXPECT_NEAR(passage.weight, own, 5e-3) << Name(policy);
    sum += passage.weight;
    EXPECT_LE(passage.weight, passages.front().weight);
  }
  EXPECT_GT(sum, 0.9);
  EXPECT_LE(sum, 1 + 1e-9);
  // In small steps the same, but for what products of other shapes round; and it is said which tokens of the answer
  // it was for.
  SourceSearch search(*engine, session.sequence().length(), 320, 11, {text},
                      {.most = 100, .least = 1e-4, .step_pairs = 3000});
  int steps = 1;
  while (search.Step(session.sequence())) ++steps;
  EXPECT_GT(steps, 5);
  const std::vector<Passage> again = search.Passages();
  ASSERT_EQ(again.size(), passages.size());
  for (size_t i = 0; i < again.size(); ++i) {
    EXPECT_NEAR(again[i].weight, passages[i].weight, 1e-3);
    ASSERT_FALSE(again[i].used_by.empty());
    ASSERT_EQ(again[i].used_by.size(), passages[i].used_by.size());
    double shares = 0;
    for (size_t k = 0; k < again[i].used_by.size(); ++k) {
      EXPECT_NEAR(again[i].used_by[k].share, passages[i].used_by[k].share, 1e-2);
      EXPECT_LT(again[i].used_by[k].token, 11);
      if (k > 0) {
        EXPECT_GT(again[i].used_by[k].token, again[i].used_by[k - 1].token);
      }
      shares += again[i].used_by[k].share;
    }
    EXPECT_LE(shares, 1 + 1e-9);
  }
}

TEST(Sources, AreTheSentencesWithTheMassThatTheAnswerAloneGives) {
  for (const Policy policy : {Policy::kDense, Policy::kPhsa, Policy::kInfllm2_64, Policy::kStreaming}) {
    for (const int32_t chunk : {512, 16}) CheckSources(policy, chunk, PHSA_F32);
  }
}

TEST(Sources, OfACacheOf8BitsAreThoseThatItsAttentionRead) {
  for (const Policy policy : {Policy::kDense, Policy::kPhsa}) CheckSources(policy, 512, PHSA_INT8);
}

TEST(Sources, OfACacheOf8BitsAreThoseOfAWholeOne) {
  std::vector<SourceText> texts;  // of a sentence each: none are joined
  for (int32_t i = 0; i < 20; ++i) texts.push_back(EvenText(5 + 15 * i, 1, 15));
  const auto weights = [&](int32_t kv_type) {
    const std::unique_ptr<Engine> engine = MakeEngine(SmallSettings(Policy::kDense, 0), 512, kv_type);
    Session session(*engine);
    session.Prefill(
        Tokens(330), {}, [](int32_t, int32_t, const LogitsRow&) {}, BatchItem::Logits::kNone);
    std::vector<double> out(texts.size());
    for (const Passage& passage :
         FindSources(*engine, session.sequence(), 320, 11, texts, {}, {.most = 100, .least = 1e-6})) {
      out[passage.text] = passage.weight;
    }
    return out;
  };
  const std::vector<double> whole = weights(PHSA_F32), codes = weights(PHSA_INT8);
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(codes[i], whole[i], 0.02) << i;
}

TEST(Sources, LeaveTheTextFitToGoOn) {
  const std::unique_ptr<Engine> engine = MakeEngine(SmallSettings(Policy::kPhsa, 2));
  GenerateOptions options;
  options.max_tokens = 20;
  options.sampler.temperature = 0;
  options.ignore_eos = true;
  const std::vector<int32_t> prompt = Tokens(300);
  const SourceText text = EvenText(10, 14, 20);
  Session watched(*engine);
  const GenerateResult first = watched.Generate(prompt, options, {});
  FindSources(*engine, watched.sequence(), first.prompt_tokens, static_cast<int32_t>(first.tokens.size()), {&text, 1},
              {});
  const std::vector<int32_t> more = Joined(Joined(prompt, first.tokens), Tokens(9, 3));
  const GenerateResult second = watched.Generate(more, options, {});
  EXPECT_GE(second.reused_tokens, 300 + 19);
  const std::unique_ptr<Engine> other = MakeEngine(SmallSettings(Policy::kPhsa, 2));
  EXPECT_EQ(Session(*other).Generate(more, options, {}).tokens, second.tokens);
}

TEST(Sources, OfNoAnswerOrNoTextAreNone) {
  const std::unique_ptr<Engine> engine = MakeEngine(SmallSettings(Policy::kDense, 0));
  Session session(*engine);
  session.Prefill(
      Tokens(100), {}, [](int32_t, int32_t, const LogitsRow&) {}, BatchItem::Logits::kNone);
  const SourceText text = EvenText(5, 4, 10), empty;
  EXPECT_TRUE(FindSources(*engine, session.sequence(), 100, 0, {&text, 1}, {}).empty());
  EXPECT_TRUE(FindSources(*engine, session.sequence(), 90, 10, {&empty, 1}, {}).empty());
  EXPECT_TRUE(FindSources(*engine, session.sequence(), 90, 10, {}, {}).empty());
  // A text at the very beginning, before which there is no other query.
  const SourceText first = EvenText(0, 1, 3);
  EXPECT_EQ(FindSources(*engine, session.sequence(), 4, 96, {&first, 1}, {}).size(), 1u);
}

class TextCacheTest : public ::testing::Test {
 protected:
  TextCacheTest() { fs::remove_all(folder); }
  ~TextCacheTest() override { fs::remove_all(folder); }
  TextCache Cache(uint64_t limit = uint64_t{1} << 30) {
    return {folder, limit, [this](const std::string& text) { notes += text + "\n"; }};
  }
  static void Read(Session& session, const std::vector<int32_t>& text) {
    session.Prefill(
        text, {}, [](int32_t, int32_t, const LogitsRow&) {}, BatchItem::Logits::kNone);
  }
  size_t Files() const {
    return fs::exists(folder) ? static_cast<size_t>(std::distance(fs::directory_iterator(folder), {})) : 0;
  }
  fs::path folder = fs::temp_directory_path() / ("phsa-text-cache-" + std::to_string(getpid()));
  std::string notes;
};

TEST_F(TextCacheTest, ATextThatWasReadIsThereForTheNextProcess) {
  const std::vector<int32_t> text = Tokens(300), prompt = Joined(text, Tokens(20, 9));
  const Settings settings = SmallSettings(Policy::kPhsa, 2);
  GenerateOptions options;
  options.sampler.temperature = 0;
  options.max_tokens = 12;
  const std::unique_ptr<Engine> first = MakeEngine(settings), next = MakeEngine(settings);
  Session reader(*first), session(*next);
  EXPECT_EQ(Cache().Restore(*first, reader, text), 0);
  Read(reader, text);
  EXPECT_TRUE(Cache().Save(*first, reader, text));
  EXPECT_EQ(Cache().Restore(*next, session, text), 300);
  const GenerateResult result = session.Generate(prompt, options, {});
  EXPECT_EQ(result.reused_tokens, 300);
  EXPECT_EQ(result.tokens, reader.Generate(prompt, options, {}).tokens);
  EXPECT_EQ(notes, "");
  EXPECT_EQ(fs::status(folder).permissions() & fs::perms::others_all, fs::perms::none);
}

TEST_F(TextCacheTest, AnotherAttentionOrTextHasAFileOfItsOwn) {
  const std::vector<int32_t> text = Tokens(200);
  const std::unique_ptr<Engine> dense = MakeEngine(SmallSettings(Policy::kDense, 0)),
                                sparse = MakeEngine(SmallSettings(Policy::kPhsa, 2));
  for (Engine* engine : {dense.get(), sparse.get()}) {
    Session session(*engine);
    EXPECT_EQ(Cache().Restore(*engine, session, text), 0);
    Read(session, text);
    EXPECT_TRUE(Cache().Save(*engine, session, text));
  }
  Session session(*dense);
  EXPECT_EQ(Cache().Restore(*dense, session, Tokens(200, 5)), 0);
  EXPECT_EQ(Files(), 2u);
}

TEST_F(TextCacheTest, TheFileThatSharesTheMostIsFoundAndTheLongerTextTakesThePlaceOfWhatItBeginsWith) {
  EngineOptions options = FakeOptions(4096);
  options.attention.base = SmallSettings(Policy::kPhsa, 2);
  options.other_attention = true;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  LayerSettings dense;
  const auto other = engine->MakeAttention(dense);
  const std::vector<int32_t> text = Tokens(1500), longer = Joined(text, Tokens(1100, 4)), question = Tokens(50, 3);
  const auto save = [&](const std::vector<int32_t>& tokens, const std::shared_ptr<const TextAttention>& attention) {
    Session session(*engine, attention);
    Read(session, tokens);
    return Cache().Keep(*engine, session.sequence());
  };
  EXPECT_FALSE(Cache().Find(*engine, nullptr, text));
  EXPECT_TRUE(save(text, nullptr) && save(Joined(Tokens(1100), Tokens(1200, 6)), nullptr));
  EXPECT_EQ(Cache().Find(*engine, nullptr, Joined(text, question))->tokens, 1500u);
  EXPECT_EQ(Cache().Find(*engine, nullptr, longer)->tokens, 1500u);
  EXPECT_FALSE(Cache().Find(*engine, nullptr, Tokens(1500, 9)));
  EXPECT_FALSE(Cache().Find(*engine, other.get(), text));  // read in another way
  EXPECT_FALSE(Cache().Find(*engine, nullptr, std::span(text).first(TextCache::kWorthKeeping - 1)));
  EXPECT_TRUE(save(text, other));
  EXPECT_EQ(Files(), 3u);
  EXPECT_TRUE(save(longer, nullptr));
  EXPECT_EQ(Files(), 3u);  // the text that it begins with is in it
  EXPECT_FALSE(save(text, nullptr));
  EXPECT_FALSE(save(std::vector<int32_t>(text.begin(), text.begin() + 1000), nullptr));
  EXPECT_EQ(Files(), 3u);

  Session expected(*engine), again(*engine);
  GenerateOptions greedy;
  greedy.sampler.temperature = 0;
  greedy.max_tokens = 8;
  const std::vector<int32_t> prompt = Joined(text, question);
  const std::vector<int32_t> tokens = expected.Generate(prompt, greedy, {}).tokens;
  Cache().Restore(*engine, again.sequence(), prompt, *Cache().Find(*engine, nullptr, prompt));
  EXPECT_EQ(again.sequence().length(), 1500);
  EXPECT_EQ(again.Generate(prompt, greedy, {}).tokens, tokens);
  EXPECT_EQ(notes, "");
}

TEST_F(TextCacheTest, TextsThatDoNotAllFitAreNotWrittenAgainAndAgain) {
  EngineOptions options = FakeOptions(4096);
  options.cache_texts = 4;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  std::vector<std::unique_ptr<Session>> sessions;
  for (uint32_t seed = 0; seed < 4; ++seed) {
    sessions.push_back(std::make_unique<Session>(*engine));
    Read(*sessions.back(), Tokens(1500, seed));
  }
  EXPECT_TRUE(Cache().Keep(*engine, sessions[0]->sequence()));
  const TextCache cache = Cache(5 * fs::file_size(fs::directory_iterator(folder)->path()) / 2);
  int32_t written = 0;
  for (int32_t round = 0; round < 3; ++round) {
    for (const auto& session : sessions) written += cache.Keep(*engine, session->sequence()) ? 1 : 0;
  }
  EXPECT_EQ(written, 3);  // the first one is there
  EXPECT_EQ(Files(), 2u);
  EXPECT_EQ(notes, "");
}

TEST_F(TextCacheTest, WhatWasReadOfATextBeforeItWasStoppedCounts) {
  const std::unique_ptr<Engine> engine = MakeEngine(SmallSettings(Policy::kDense, 0));
  const std::vector<int32_t> text = Tokens(300), begin(text.begin(), text.begin() + 150);
  Session session(*engine), again(*engine);
  Read(session, begin);
  EXPECT_TRUE(Cache().Save(*engine, session, text));
  EXPECT_EQ(Cache().Restore(*engine, again, text), 150);
}

TEST_F(TextCacheTest, TheFileThatWasNotUsedForTheLongestTimeGoesFirst) {
  const std::unique_ptr<Engine> engine = MakeEngine(SmallSettings(Policy::kDense, 0));
  std::vector<std::vector<int32_t>> texts;
  const auto save = [&](uint32_t seed, uint64_t limit) {
    const std::vector<int32_t> text = Tokens(100, seed);
    Session session(*engine);
    Read(session, text);
    return Cache(limit).Save(*engine, session, text);
  };
  const auto there = [&](uint32_t seed) {
    Session session(*engine);
    return Cache().Restore(*engine, session, Tokens(100, seed)) > 0;
  };
  EXPECT_TRUE(save(1, uint64_t{1} << 30));
  const uint64_t size = fs::file_size(fs::directory_iterator(folder)->path());
  EXPECT_TRUE(save(2, uint64_t{1} << 30));
  for (const auto& file : fs::directory_iterator(folder)) {
    fs::last_write_time(file, fs::file_time_type::clock::now() - std::chrono::hours(5));
  }
  EXPECT_TRUE(there(1));  // used now
  EXPECT_TRUE(save(3, 5 * size / 2));
  EXPECT_TRUE(there(1) && there(3));
  EXPECT_FALSE(there(2));
  EXPECT_EQ(notes, "");
  EXPECT_FALSE(save(4, size / 2));
  EXPECT_NE(notes.find("not kept"), std::string::npos);
  EXPECT_EQ(Files(), 2u);
}

TEST_F(TextCacheTest, ADamagedFileIsRemovedAndTheTextReadAgain) {
  const std::unique_ptr<Engine> engine = MakeEngine(SmallSettings(Policy::kDense, 0));
  const std::vector<int32_t> text = Tokens(200);
  Session session(*engine), again(*engine);
  Read(session, text);
  EXPECT_TRUE(Cache().Save(*engine, session, text));
  const fs::path file = fs::directory_iterator(folder)->path();
  std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(-5, std::ios::end).put('x');
  EXPECT_EQ(Cache().Restore(*engine, again, text), 0);
  EXPECT_NE(notes.find("damaged"), std::string::npos) << notes;
  EXPECT_EQ(Files(), 0u);
  // A folder that cannot be made stops nothing.
  const TextCache nowhere("/dev/null/x", 1 << 30, [this](const std::string& note) { notes += note; });
  EXPECT_FALSE(nowhere.Save(*engine, session, text));
}

}  // namespace
}  // namespace phsa
