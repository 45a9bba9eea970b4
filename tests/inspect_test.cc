#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <random>

#include "base/dtype.h"
#include "base/utf8.h"
#include "eval/inspect.h"
#include "eval/inspect_html.h"
#include "eval/inspect_report.h"
#include "eval/perplexity.h"
#include "eval/query_blocks.h"
#include "eval/recall.h"
#include "fake_engine.h"

// After engine/session.h, where an enumerator would shadow a constant of it.
#include "attention/reference.h"

namespace phsa {
namespace {

const std::vector<Policy> kSparse = PoliciesThat(IsSparse);

std::unique_ptr<Engine> MakeEngine(const Settings& settings, int32_t chunk = 512,
                                   WeightsMode weights = WeightsMode::kF32) {
  EngineOptions options = FakeOptions(1024, chunk, settings);
  options.weights = weights;
  return LoadedEngine(options);
}

std::vector<int32_t> RandomTokens(size_t count) {
  std::mt19937 random(5);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % kEnd);
  return tokens;
}

GenerateOptions Greedy(int32_t tokens) {
  GenerateOptions options;
  options.max_tokens = tokens;
  options.sampler.temperature = 0;
  options.ignore_eos = true;
  return options;
}

// The share of each head's softmax over all keys up to the query that falls on the tokens it reads, from the
// definition: double precision, one key at a time, the tokens as the reference lists them.
double DirectRecall(const LayerAttention& attention, const ModelConfig& config, int32_t row, int32_t head) {
  const ForwardParams& p = attention.params;
  const int32_t position = attention.kv_lens[0] - attention.q_lens[0] + row;
  const int32_t kv_head = head / (config.num_q_heads / config.num_kv_heads);
  const reference::Method method = reference::MethodOf(attention.settings, kv_head, config.head_dim, PHSA_F32);
  const int32_t heads = attention.plan.SelectionHeads(), slots = attention.plan.SelectionSlots();
  std::vector<int32_t> chosen;
  for (int32_t slot = 0; slot < slots; ++slot) {
    const int32_t block = p.selection[(int64_t{row} * heads + head / (config.num_q_heads / heads)) * slots + slot];
    if (block >= 0) chosen.push_back(block);
  }
  const std::vector<int32_t> read = reference::Tokens(method, chosen, position);
  const auto* q = static_cast<const float*>(p.q) + row * p.q_token_stride + head * p.q_head_stride;
  std::vector<double> mass;
  double largest = -INFINITY;
  for (int32_t token = 0; token <= position; ++token) {
    const auto* k = static_cast<const float*>(p.kv.k) + p.kv.page_table[token / kPageTokens] * p.kv.k_page_stride +
                    token % kPageTokens * p.kv.k_token_stride + kv_head * p.kv.k_head_stride;
    double dot = 0;
    for (int32_t c = 0; c < config.head_dim; ++c) dot += static_cast<double>(q[c]) * static_cast<double>(k[c]);
    mass.push_back(dot * method.scale);
    largest = std::max(largest, mass.back());
  }
  double all = 0, own = 0;
  for (double& m : mass) all += m = std::exp(m - largest);
  for (const int32_t token : read) own += mass[static_cast<size_t>(token)];
  return own / all;
}

TEST(Recall, IsTheShareOfTheSoftmaxOnTheTokensThatAreRead) {
  const std::vector<int32_t> tokens = RandomTokens(600);
  for (const Policy policy : kSparse) {
    for (const GroupReduce reduce : {GroupReduce::kSum, GroupReduce::kNone}) {
      Settings settings = SmallSettings(policy, 3);
      settings.group_reduce = reduce;
      const std::unique_ptr<Engine> engine = MakeEngine(settings, 250);
      const ModelConfig& config = engine->config();
      RecallProbe probe(config, PHSA_F32);
      double least = 1, worst = 0;
      {
        const Observing observing(engine->decoder(), [&](const LayerAttention& attention) {
          const int32_t rows = std::min(attention.q_lens[0], 40);
          const std::span<const float> recall = probe.Measure(attention, rows);
          for (int32_t i = 0; i < rows; i += 13) {
            for (int32_t head = 0; head < config.num_q_heads; ++head) {
              const double direct = DirectRecall(attention, config, attention.q_lens[0] - rows + i, head);
              const double ours = static_cast<double>(recall[static_cast<size_t>(i * config.num_q_heads + head)]);
              worst = std::max(worst, std::abs(direct - ours));
              least = std::min(least, direct);
            }
          }
        });
        Session session(*engine);
        session.Prefill(
            tokens, {}, [](int32_t, int32_t, const LogitsRow&) {}, BatchItem::Logits::kNone);
      }
      EXPECT_LT(worst, 1e-5) << Name(policy);
      EXPECT_LT(least, 0.9) << Name(policy);  // or nothing was compared
    }
  }
}

RecallMeter MeterOf(Engine& engine, std::span<const int32_t> tokens) {
  RecallMeter meter(engine.config(), engine.cache().layout().dtype);
  Perplexity(engine, tokens, {}, &meter);
  return meter;
}

TEST(Recall, IsOneWhereEverythingIsRead) {
  const std::vector<int32_t> tokens = RandomTokens(500);
  for (const auto& [policy, top_k] :
       {std::pair{Policy::kDense, 0}, {Policy::kPhsa, 1000}, {Policy::kQuest, 1000}, {Policy::kInfllm2_64, 1000}}) {
    const std::unique_ptr<Engine> engine = MakeEngine(SmallSettings(policy, top_k));
    const RecallMeter::Part total = MeterOf(*engine, tokens).total();
    EXPECT_NEAR(*total.all.value(), 1, 1e-6) << Name(policy);
    EXPECT_EQ(total.all.count, 500 * 2 * 4);  // queries, layers, query heads
    EXPECT_FALSE(total.sparse.value());
  }
}

TEST(Recall, OfSparseQueriesLeavesOutThoseThatReadEverything) {
  const std::vector<int32_t> tokens = RandomTokens(500);
  const std::unique_ptr<Engine> engine = MakeEngine(SmallSettings(Policy::kPhsa, 2));
  const RecallMeter meter = MeterOf(*engine, tokens);
  const RecallMeter::Part total = meter.total();
  // Block 0 is init, three are local, two are chosen: from block 6 on something is left out.
  EXPECT_EQ(total.sparse.count, (500 - 6 * 16) * 2 * 4);
  const double rest = static_cast<double>(total.all.count - total.sparse.count);
  EXPECT_NEAR(total.all.sum - total.sparse.sum, rest, 1e-3);
  EXPECT_LT(*total.sparse.value(), 0.9);
  RecallMeter::Part layers;
  for (int32_t layer = 0; layer < 2; ++layer) {
    RecallMeter::Part heads;
    for (int32_t head = 0; head < 2; ++head) heads += meter.head(layer, head);
    EXPECT_EQ(heads.all.sum, meter.layer(layer).all.sum);
    layers += heads;
  }
  EXPECT_NEAR(layers.sparse.sum, total.sparse.sum, 1e-9);
}

TEST(Recall, DoesNotDependOnChunksNorChangesTheRun) {
  const std::vector<int32_t> tokens = RandomTokens(400);
  const Settings settings = SmallSettings(Policy::kPhsa, 2);
  const std::unique_ptr<Engine> whole = MakeEngine(settings), parts = MakeEngine(settings, 37);
  const double unwatched = Perplexity(*whole, tokens, {}).loss;
  RecallMeter meter(whole->config(), PHSA_F32);
  EXPECT_EQ(Perplexity(*whole, tokens, {}, &meter).loss, unwatched);
  EXPECT_EQ(meter.total().all.sum, MeterOf(*parts, tokens).total().all.sum);
}

TEST(QueryBlocks, AgreeWithTheReference) {
  std::mt19937 random(3);
  for (int i = 0; i < 2000; ++i) {
    Settings settings = SmallSettings(kSparse[random() % kSparse.size()], static_cast<int32_t>(random() % 6));
    settings.init_tokens = static_cast<int32_t>(random() % 4) * settings.block_size;
    settings.local_tokens = static_cast<int32_t>(random() % 4) * settings.block_size;
    settings.dense_below = static_cast<int32_t>(random() % 3) * 128;
    const auto position = static_cast<int32_t>(random() % 1500);
    const reference::Method method = reference::MethodOf(settings, 0, 64, PHSA_F32);
    const std::vector<double> scores(static_cast<size_t>(position / settings.block_size), 1.0);
    const std::vector<int32_t> chosen = reference::Select(method, scores, position);
    const std::vector<int32_t> read = reference::Tokens(method, chosen, position);

    const QueryBlocks blocks(settings, position);
    EXPECT_EQ(blocks.TokensRead(static_cast<int64_t>(chosen.size())), static_cast<int64_t>(read.size()));
    EXPECT_EQ(blocks.reads_all(), read.size() == static_cast<size_t>(position) + 1);
    if (!blocks.dense() && !chosen.empty()) {
      EXPECT_EQ(blocks.init_end(), chosen.front());  // all scores are equal: the lowest candidates
      EXPECT_LT(chosen.back(), blocks.local_begin());
    }
  }
}

TEST(QueryBlocks, SparsityIsThePapers) {
  LayerSettings settings;  // its 32k setting
  EXPECT_NEAR(BudgetSparsity(settings, 28, 32768), 1 - 896.0 / 32768, 1e-12);
  EXPECT_EQ(BudgetSparsity(settings, 28, 800), 0);
  settings.layers[0].policy = Policy::kDense;
  EXPECT_NEAR(BudgetSparsity(settings, 2, 32768), (1 - 896.0 / 32768) / 2, 1e-12);
  settings.layers.clear();
  settings.base.policy = Policy::kStreaming;
  EXPECT_NEAR(BudgetSparsity(settings, 28, 32768), 1 - 640.0 / 32768, 1e-12);
}

TEST(Inspect, KeepsWhatTheAttentionChose) {
  for (const int32_t chunk : {64, 512}) {
    Settings settings = SmallSettings(Policy::kPhsa, 3);
    settings.punctuation = "en";
    const std::unique_ptr<Engine> engine = MakeEngine(settings, chunk);
    const std::vector<int32_t> prompt = RandomTokens(300);
    const Inspection inspection = Inspect(*engine, prompt, 50, Greedy(4), {});
    ASSERT_EQ(inspection.tokens.size(), 304u);
    // The answer's last token was not read: it is nobody's query.
    ASSERT_EQ(inspection.queries.size(), 50u + 3u);
    for (size_t i = 0; i < inspection.queries.size(); ++i) {
      EXPECT_EQ(inspection.queries[i].position, static_cast<int32_t>(250 + i));
      ASSERT_EQ(inspection.queries[i].layers.size(), 2u);
    }

    // The same text at once, watched by someone else.
    const std::unique_ptr<Engine> again = MakeEngine(settings);
    const Observing observing(again->decoder(), [&](const LayerAttention& attention) {
      for (const QueryChoice& query : inspection.queries) {
        const LayerChoice& layer = query.layers[static_cast<size_t>(attention.layer)];
        ASSERT_EQ(layer.heads.size(), 2u);
        for (size_t head = 0; head < 2; ++head) {
          const size_t at = (static_cast<size_t>(query.position) * 2 + head) * 3;
          const int32_t* blocks = attention.params.selection + at;
          EXPECT_EQ(layer.heads[head].blocks, std::vector<int32_t>(blocks, blocks + 3));
          const float* scores = attention.params.selection_scores + at;
          EXPECT_EQ(layer.heads[head].scores, std::vector<float>(scores, scores + 3));
          ASSERT_EQ(layer.heads[head].recall.size(), 2u);
        }
      }
    });
    Session session(*again);
    session.Prefill(
        inspection.tokens, {}, [](int32_t, int32_t, const LogitsRow&) {}, BatchItem::Logits::kNone);

    EXPECT_GT(inspection.Recall(), 0.1);
    EXPECT_LT(inspection.Recall(), 0.9);
    EXPECT_EQ(Choosers(inspection), 53 * 2 * 2);
    int64_t times = 0;
    for (const ChosenBlock& block : MostChosen(inspection, 1000)) times += block.count;
    EXPECT_EQ(times, 53 * 2 * 2 * 3);
    for (size_t i = 0; i < prompt.size(); ++i) {
      EXPECT_EQ(inspection.flags[i] != 0, InPunctuationSet("en", engine->tokenizer().TokenBytes(prompt[i]))) << i;
    }
  }
}

TEST(Inspect, OfATextThatWasReadBeforeReadsTheWatchedQueriesOnlyAndSaysTheSame) {
  EngineOptions options = FakeOptions(1024, 100, SmallSettings(Policy::kPhsa, 3));
  options.cache_texts = 2;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  const std::vector<int32_t> tokens = RandomTokens(600);
  const std::string expected = InspectionJson(Inspect(*engine, tokens, 9, Greedy(0), {}));
  Session session(*engine);
  session.Generate(std::span(tokens).first(595), Greedy(30), {});
  Sequence text = session.sequence().Fork();
  std::vector<int32_t> done;
  GenerateCallbacks callbacks;
  callbacks.prefill = [&](int32_t count, int32_t) { done.push_back(count); };
  EXPECT_EQ(InspectionJson(Inspect(*engine, tokens, 9, Greedy(0), callbacks, nullptr, &text)), expected);
  EXPECT_EQ(done, std::vector<int32_t>{591});
  EXPECT_EQ(text.tokens(), tokens);
  // Nothing of it is of use, or not all.
  Sequence empty(engine->cache());
  EXPECT_EQ(InspectionJson(Inspect(*engine, tokens, 9, Greedy(0), {}, nullptr, &empty)), expected);
  empty.Truncate(77);
  EXPECT_EQ(InspectionJson(Inspect(*engine, tokens, 9, Greedy(0), {}, nullptr, &empty)), expected);
}

TEST(Inspect, ReadsAsManyTokensAsTheDecoderCounts) {
  for (const Policy policy : kSparse) {
    const std::unique_ptr<Engine> engine = MakeEngine(SmallSettings(policy, 3));
    const Inspection inspection = Inspect(*engine, RandomTokens(300), 300, Greedy(0), {});
    EXPECT_EQ(inspection.Read().read, engine->decoder().tokens_read().read) << Name(policy);
    EXPECT_EQ(inspection.Read().dense, engine->decoder().tokens_read().dense);
  }
}

TEST(Inspect, BlocksOfSeveralSizesAreCountedInTheSmallest) {
  Settings settings = SmallSettings(Policy::kPhsa, 3);
  const std::unique_ptr<Engine> engine = MakeEngine(settings);
  LayerSettings attention;
  attention.base = settings;
  attention.layers[1] = settings;
  attention.layers[1].block_size = 32;
  attention.layers[1].init_tokens = attention.layers[1].local_tokens = 32;
  engine->SetAttention(attention);
  const Inspection inspection = Inspect(*engine, RandomTokens(300), 1, Greedy(0), {});
  EXPECT_EQ(inspection.BlockSize(), 16);
  int64_t times = 0;
  for (const ChosenBlock& block : MostChosen(inspection, 1000)) times += block.count;
  EXPECT_EQ(times, 2 * 3 + 2 * 3 * 2);
}

int32_t Id(std::string_view bytes) {
  static const Tokenizer tokenizer = SmallTokenizer();
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    if (tokenizer.TokenBytes(id) == bytes) return id;
  }
  ADD_FAILURE() << bytes;
  return 0;
}

TEST(TokenTexts, CharactersThatTokensShareStandWholeAtTheLast) {
  const std::vector<int32_t> tokens = {Id("a"),    Id("\xc3"), Id("\xa9"), Id("\xf0"),
                                       Id("\x9f"), Id("\x98"), Id("\x80"), Id("b")};
  EXPECT_EQ(TokenTexts(SmallTokenizer(), tokens), (std::vector<std::string>{"a", "", "é", "", "", "", "😀", "b"}));
}

TEST(TokenTexts, BytesThatAreNoCharacterAreReplaced) {
  const std::string bad = "\xef\xbf\xbd";
  // Cut off by another character, by a control token, by the end; and a byte that cannot begin one.
  const std::vector<int32_t> tokens = {Id("\xc3"), Id("a"), Id("\xf0"), kEnd, Id("\xa9"), Id("\xc3")};
  EXPECT_EQ(TokenTexts(SmallTokenizer(), tokens), (std::vector<std::string>{"", bad + "a", bad, "<|end|>", bad, bad}));
}

// An inspection of a text that tries to leave its place.
Inspection Hostile() {
  const std::unique_ptr<Engine> engine = MakeEngine(SmallSettings(Policy::kPhsa, 2));
  Inspection inspection = Inspect(*engine, RandomTokens(200), 2, Greedy(0), {});
  const std::vector<std::string> texts = {"</script>",    "<script>alert(1)</script>",
                                          "<!--",         "-->",
                                          "]]>",          "&lt;",
                                          "\xe2\x80\xa8", "\xe2\x80\xa9",
                                          "\x1b[2J",      std::string("\0", 1),
                                          "\"\\",         "\xe2\x80\xae",
                                          "\r\n\t",       "\xc2\x9b",
                                          "汉",           "{\"here\": \"the data\"}"};
  for (size_t i = 0; i < inspection.text.size(); ++i) inspection.text[i] = texts[i % texts.size()];
  inspection.model = "</title><b>\x1b[0m";
  return inspection;
}

TEST(InspectionHtml, TextCannotLeaveTheData) {
  const Inspection inspection = Hostile();
  const std::string page = InspectionHtml(inspection);
  const std::string open = R"(<script type="application/json" id="data">)", close = "</script>";
  const size_t begin = page.find(open) + open.size(), end = page.find(close, begin);
  ASSERT_NE(page.find(open), std::string::npos);
  const std::string json = page.substr(begin, end - begin);
  for (const char* word : {"<", ">", "&", "\xe2\x80\xa8", "\xe2\x80\xa9"}) {
    EXPECT_EQ(json.find(word), std::string::npos) << word;
  }
  const auto data = nlohmann::json::parse(json);
  EXPECT_EQ(data["text"].get<std::vector<std::string>>(), inspection.text);
  EXPECT_EQ(data["model"], inspection.model);
  // What comes before and after is the page, whatever the text: the same for a harmless one.
  Inspection other = inspection;
  std::fill(other.text.begin(), other.text.end(), "a");
  const std::string harmless = InspectionHtml(other);
  EXPECT_EQ(harmless.substr(0, begin), page.substr(0, begin));
  const size_t rest = page.size() - end;
  EXPECT_EQ(harmless.substr(harmless.size() - rest), page.substr(end));
}

TEST(InspectionHtml, NeedsNothingFromElsewhere) {
  const std::string page = InspectionHtml(Hostile());
  for (const char* word : {"http:", "https:", " src=", " href=", "@import", "url(", "fetch(", "innerHTML", "eval("}) {
    EXPECT_EQ(page.find(word), std::string::npos) << word;
  }
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
}

TEST(InspectionHtml, HasTheChoices) {
  const std::unique_ptr<Engine> engine = MakeEngine(SmallSettings(Policy::kPhsa, 2));
  const Inspection inspection = Inspect(*engine, RandomTokens(200), 2, Greedy(0), {});
  const std::string page = InspectionHtml(inspection);
  const size_t begin = page.find("id=\"data\">") + 10;
  const auto data = nlohmann::json::parse(page.substr(begin, page.find("</script>", begin) - begin));
  for (size_t i = 0; i < 2; ++i) {
    for (size_t l = 0; l < 2; ++l) {
      const LayerChoice& layer = inspection.queries[i].layers[l];
      const auto& shown = data["queries"][i]["layers"][l];
      EXPECT_EQ(shown[0], 0);
      EXPECT_EQ(shown[1], 1);
      EXPECT_EQ(shown[2], layer.blocks.local_begin());
      for (size_t h = 0; h < 2; ++h) {
        EXPECT_EQ(shown[4 + h][0].get<std::vector<int32_t>>(), layer.heads[h].blocks);
        for (size_t k = 0; k < 2; ++k) {
          EXPECT_NEAR(shown[4 + h][1][k].get<double>() * 1e-5, layer.heads[h].scores[k], 1e-5);
          EXPECT_NEAR(shown[3][2 * h + k].get<double>() * 1e-4, layer.heads[h].recall[k], 1e-4);
        }
      }
    }
  }
}

TEST(InspectionText, HasNothingThatATerminalObeys) {
  const std::string text = InspectionText(Hostile());
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = ScanUtf8(text, at);
    ASSERT_EQ(step.kind, Utf8Step::Kind::kCharacter);
    EXPECT_TRUE(step.code == '\n' || (step.code >= 0x20 && step.code != 0x7f && step.code != 0x9b &&
                                      step.code != 0x202e && step.code != 0x2028))
        << at;
    at += step.size;
  }
}

TEST(InspectionJson, SaysWhatTheInspectionHas) {
  const std::unique_ptr<Engine> engine = MakeEngine(SmallSettings(Policy::kQuest, 2));
  const Inspection inspection = Inspect(*engine, RandomTokens(200), 1, Greedy(2), {});
  const auto json = nlohmann::json::parse(InspectionJson(inspection));
  EXPECT_EQ(json["attention"]["attention"], "quest");
  EXPECT_EQ(json["tokens"].get<std::vector<int32_t>>(), inspection.tokens);
  ASSERT_EQ(json["queries"].size(), 2u);
  EXPECT_FALSE(json["queries"][0]["answer"].get<bool>());
  EXPECT_TRUE(json["queries"][1]["answer"].get<bool>());
  const auto& layer = json["queries"][0]["layers"][1];
  EXPECT_EQ(layer["local"], (std::vector<int32_t>{10, 13}));  // token 199 is in block 12
  EXPECT_EQ(layer["heads"][1]["blocks"].get<std::vector<int32_t>>(), inspection.queries[0].layers[1].heads[1].blocks);
  EXPECT_NEAR(json["recall"].get<double>(), inspection.Recall(), 1e-6);
}

}  // namespace
}  // namespace phsa
