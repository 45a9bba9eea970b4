#include "eval/compare.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "eval/compare_report.h"
#include "eval/compare_sections.h"
#include "eval/flops.h"
#include "eval/plot.h"
#include "eval/speed.h"
#include "fake_engine.h"
#include "refusal.h"

// After engine/session.h, where an enumerator would shadow a constant of it.
#include "attention/reference.h"

namespace phsa {
namespace {

std::unique_ptr<Engine> MakeEngine(std::unique_ptr<FakeModel> model = std::make_unique<FakeModel>()) {
  return LoadedEngine(FakeOptions(1024, 64), std::move(model));
}

bool Contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

// FLOPs

// From the definition: the reference says which tokens a query reads, and every product is counted where it happens.
AttentionFlops CountOneByOne(const Settings& settings, const ModelConfig& config, int32_t tokens) {
  AttentionFlops flops;
  for (int32_t kv_head = 0; kv_head < config.num_kv_heads; ++kv_head) {
    const reference::Method method = reference::MethodOf(settings, kv_head, config.head_dim, PHSA_F32);
    const bool chooses = method.representation != Representation::kNone && method.top_k > 0;
    const bool pooled = method.representation == Representation::kPooled;
    const int32_t row = method.block / method.parts, stride = pooled ? 16 : row, span = pooled ? 32 : row;
    for (int32_t first = 0; chooses && first + span <= tokens; first += stride) {
      for (int32_t key = 0; key < span; ++key) flops.representatives += 2 * config.head_dim;
    }
    for (int32_t head = 0; head < config.num_q_heads / config.num_kv_heads; ++head) {
      for (int32_t position = 0; position < tokens; ++position) {
        const int32_t own = position / method.block;
        std::vector<double> scores(static_cast<size_t>(own), 0.0);
        std::vector<int32_t> chosen;
        if (chooses) chosen = reference::Select(method, scores, position);
        const std::vector<int32_t> read = method.dense || position < method.dense_below
                                              ? std::vector<int32_t>(static_cast<size_t>(position) + 1)
                                              : reference::Tokens(method, chosen, position);
        for (size_t i = 0; i < read.size(); ++i) flops.attention += 4 * config.head_dim;
        if (!chooses || read.size() == static_cast<size_t>(position) + 1) continue;
        for (int32_t first = 0; first + span <= own * method.block; first += stride) {
          flops.scores += (method.representation == Representation::kBounds ? 3 : 2) * config.head_dim;
        }
      }
    }
  }
  return flops;
}

TEST(Flops, AreThoseThatALoopOverAllProductsCounts) {
  ModelConfig config = FakeModel().config();
  for (const Policy policy : PoliciesThat(Runs)) {
    for (const int32_t top_k : {0, 3, 1000}) {
      for (const int32_t dense_below : {0, 128}) {
        for (const int32_t tokens : {1, 15, 16, 333, 640}) {
          Settings settings = SmallSettings(policy, top_k);
          settings.dense_below = dense_below;
          settings.parts = tokens == 640 ? 4 : 1;
          const AttentionFlops one = CountOneByOne(settings, config, tokens);
          const AttentionFlops all = CountAttentionFlops({settings, {}}, config, tokens);
          const std::string where = fmt::format("{} K={} dense_below={} {}", Name(policy), top_k, dense_below, tokens);
          EXPECT_EQ(all.attention, config.num_layers * one.attention) << where;
          EXPECT_EQ(all.scores, config.num_layers * one.scores) << where;
          EXPECT_EQ(all.representatives, config.num_layers * one.representatives) << where;
        }
      }
    }
  }
}

TEST(Flops, OfAttentionAreTheTokensThatARunRead) {
  const std::unique_ptr<Engine> engine = MakeEngine();
  const std::vector<int32_t> tokens = Tokens(700);
  for (const Policy policy : PoliciesThat(Runs)) {
    engine->SetAttention({SmallSettings(policy, 4), {}});
    const TokensRead before = engine->decoder().tokens_read();
    Session session(*engine);
    session.Prefill(
        tokens, {}, [](int32_t, int32_t, const LogitsRow&) {}, BatchItem::Logits::kNone);
    const double read = static_cast<double>(engine->decoder().tokens_read().read - before.read);
    EXPECT_EQ(CountAttentionFlops({SmallSettings(policy, 4), {}}, engine->config(), 700).attention,
              4 * engine->config().head_dim * read)
        << Name(policy);
  }
}

TEST(Flops, LayersWithSettingsOfTheirOwnCountThese) {
  const ModelConfig config = FakeModel().config();
  LayerSettings mixed{SmallSettings(Policy::kPhsa, 4), {{1, SmallSettings(Policy::kDense, 0)}}};
  const double sparse = CountAttentionFlops({SmallSettings(Policy::kPhsa, 4), {}}, config, 600).total();
  const double dense = CountAttentionFlops({SmallSettings(Policy::kDense, 0), {}}, config, 600).total();
  EXPECT_DOUBLE_EQ(CountAttentionFlops(mixed, config, 600).total(), (sparse + dense) / 2);
  EXPECT_DOUBLE_EQ(dense, 2.0 * 4 * 64 * 4 * 600 * 601 / 2);
}

// Speed

TEST(Speed, OnePassMeasuresAllLengthsAndCountsWhatWasRead) {
  const std::unique_ptr<Engine> engine = MakeEngine();
  engine->SetAttention({SmallSettings(Policy::kPhsa, 2), {}});
  const ModelConfig& config = engine->config();
  SpeedMeter meter(*engine, {});
  const std::vector<int32_t> lengths = {100, 300};
  const std::vector<SpeedRow> rows = meter.Prefill(64, lengths, 3);
  ASSERT_EQ(rows.size(), 2u);
  const auto reads = [&](int32_t tokens) {
    return CountAttentionFlops({SmallSettings(Policy::kPhsa, 2), {}}, config, tokens).attention / (4 * config.head_dim);
  };
  for (const SpeedRow& row : rows) {
    ASSERT_EQ(row.seconds.size(), 3u);
    EXPECT_EQ(static_cast<double>(row.tokens_read.read), 3 * (reads(64 + row.tokens) - reads(64)));
    EXPECT_GE(row.best(), row.mean());
    EXPECT_GE(row.mean(), row.slowest());
  }
  for (size_t i = 0; i < 3; ++i) EXPECT_LT(rows[0].seconds[i], rows[1].seconds[i]);
  const SpeedRow written = meter.Decode(300, 5, 2);
  EXPECT_EQ(written.seconds.size(), 2u);
  EXPECT_EQ(static_cast<double>(written.tokens_read.read), 2 * (reads(305) - reads(300)));
  const nlohmann::ordered_json json = SpeedToJson(written);
  EXPECT_EQ(json["test"], "tg");
  EXPECT_EQ(json["depth"], 300);
  EXPECT_EQ(json["tokens_per_s"].get<double>(), written.best());
}

TEST(Speed, AStoppedMeasurementKeepsWholeRunsOnly) {
  const std::unique_ptr<Engine> engine = MakeEngine();
  int32_t steps = 0;
  GenerateCallbacks callbacks;
  callbacks.stop = [&] { return ++steps > 4; };  // one step to prepare, then 64, 128, and not 256
  SpeedMeter meter(*engine, callbacks);
  const std::vector<int32_t> lengths = {64, 128, 256};
  const std::vector<SpeedRow> rows = meter.Prefill(0, lengths, 2);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].seconds.size(), 1u);
  EXPECT_EQ(rows[1].tokens, 128);
  EXPECT_TRUE(meter.Decode(0, 4, 1).seconds.empty());
}

TEST(Speed, LogitsThatAreNotFiniteAreRefused) {
  auto model = std::make_unique<FakeModel>();
  const float infinite = INFINITY;
  std::memcpy(const_cast<uint8_t*>(model->Find("model.norm.weight")->data), &infinite, sizeof(infinite));
  const std::unique_ptr<Engine> engine = MakeEngine(std::move(model));
  SpeedMeter meter(*engine, {});
  EXPECT_TRUE(Contains(Refusal([&] { meter.Decode(0, 2, 1); }), "not all finite"));
}

// Plots

// Whether elements nest, attributes are quoted, and no character stands where XML forbids it.
bool WellFormed(const std::string& xml) {
  std::vector<std::string> open;
  bool any = false;
  for (size_t at = 0; at < xml.size();) {
    if (xml[at] != '<') {
      if (open.empty() && !std::isspace(static_cast<unsigned char>(xml[at]))) return false;
      if (xml[at] == '&' && xml.find(';', at) > at + 6) return false;
      ++at;
      continue;
    }
    const bool closes = xml[at + 1] == '/';
    size_t end = at + 1;
    for (bool quoted = false; end < xml.size() && (quoted || xml[end] != '>'); ++end) {
      if (xml[end] == '"') quoted = !quoted;
      if (xml[end] == '<') return false;
    }
    if (end == xml.size()) return false;
    const std::string tag = xml.substr(at + (closes ? 2 : 1), end - at - (closes ? 2 : 1));
    const std::string name = tag.substr(0, tag.find_first_of(" /\n"));
    if (open.empty() && any) return false;  // one root
    any = true;
    if (closes) {
      if (open.empty() || open.back() != name) return false;
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end + 1;
  }
  return any && open.empty();
}

TEST(Plot, WellFormedSeesWhatIsNot) {
  EXPECT_TRUE(WellFormed("<a b=\"c > d\"><e/>&lt;</a>\n"));
  for (const char* bad : {"<a>", "<a></b>", "<a/><b/>", "<a b=\"<\"/>", "<a>&nothing</a>", "text", "<a></a>x"}) {
    EXPECT_FALSE(WellFormed(bad)) << bad;
  }
}

LineChart OddChart() {
  LineChart chart;
  chart.title = "tokens <per> \"second\" & more";
  chart.x_title = "x";
  chart.x_text = [](double x) { return TokensLabel(std::llround(x)); };
  chart.y_text = Thousands;
  chart.lines = {{"a <b>", {0, 0}, {{1024, 10, Interval{5, 12}}, {2048, 20, {}}}},
                 {"c\x01\xff", {2, 1}, {{1024, 100, {}}, {4096, NAN, {}}, {8192, INFINITY, {}}}},
                 {"none", {7, 9}, {}}};
  return chart;
}

TEST(Plot, LineChartsAreWellFormedWhateverTheyShow) {
  for (const bool log : {false, true}) {
    LineChart chart = OddChart();
    chart.log_x = chart.log_y = log;
    const std::string svg = LineChartSvg(chart);
    EXPECT_TRUE(WellFormed(svg)) << svg;
    EXPECT_TRUE(Contains(svg, "tokens &lt;per&gt; &quot;second&quot; &amp; more"));
    EXPECT_TRUE(Contains(svg, "c \xef\xbf\xbd"));
    EXPECT_FALSE(Contains(svg, "nan") || Contains(svg, "inf"));
    EXPECT_TRUE(Contains(svg, "a &lt;b&gt;, 2k: 20"));
    EXPECT_FALSE(Contains(svg, "8k"));  // no point is there
  }
  LineChart empty = OddChart();
  for (PlotLine& line : empty.lines) line.points.clear();
  EXPECT_TRUE(WellFormed(LineChartSvg(empty)));
  empty.lines.clear();
  EXPECT_TRUE(WellFormed(LineChartSvg(empty)));
  LineChart zero = OddChart();
  zero.lines = {{"zero", {}, {{0, 0, {}}}}};
  EXPECT_TRUE(WellFormed(LineChartSvg(zero)));
}

// Where the chart's markers lie: circles alone.
std::vector<std::pair<double, double>> Circles(const std::string& svg) {
  std::vector<std::pair<double, double>> found;
  for (size_t at = svg.find("<g><title>"); at != std::string::npos; at = svg.find("<g><title>", at + 1)) {
    const size_t x = svg.find("cx=\"", at), y = svg.find("cy=\"", at);
    found.emplace_back(std::stod(svg.substr(x + 4)), std::stod(svg.substr(y + 4)));
  }
  return found;
}

TEST(Plot, PointsLieWhereTheirNumbersAre) {
  LineChart chart = OddChart();
  chart.lines = {{"line", {}, {{1, 1, {}}, {10, 10, {}}, {100, 100, {}}}}};
  auto linear = Circles(LineChartSvg(chart));
  ASSERT_EQ(linear.size(), 3u);
  EXPECT_NEAR((linear[2].first - linear[1].first) / (linear[1].first - linear[0].first), 10, 0.2);
  EXPECT_NEAR((linear[1].second - linear[2].second) / (linear[0].second - linear[1].second), 10, 0.2);
  chart.log_x = chart.log_y = true;
  auto log = Circles(LineChartSvg(chart));
  EXPECT_NEAR(log[2].first - log[1].first, log[1].first - log[0].first, 0.2);
  EXPECT_NEAR(log[1].second - log[2].second, log[0].second - log[1].second, 0.2);
  EXPECT_GT(log[0].second, log[2].second);
}

TEST(Plot, ALineBelowAnotherIsWider) {
  LineChart chart = OddChart();
  chart.lines = {{"above", {1, 0}, {{1, 1, {}}, {10, 10, {}}}},
                 {"below", {2, 0}, {{1, 1, {}}, {5, 8, {}}, {10, 10, {}}}},
                 {"meets it once", {3, 0}, {{1, 7, {}}, {10, 10, {}}}},
                 {"dashed", {4, 1}, {{1, 1, {}}, {10, 10, {}}}}};
  const std::string svg = LineChartSvg(chart);
  EXPECT_TRUE(WellFormed(svg));
  const auto width = [&](int colour) {
    const size_t path = svg.find(fmt::format("<path class=\"stroke{}\"", colour)),
                 at = svg.find("stroke-width=\"", path);
    return std::stod(svg.substr(at + 14));
  };
  EXPECT_GT(width(2), width(1));
  EXPECT_EQ(width(3), width(1));
  EXPECT_EQ(width(4), width(1)) << "it shows between the dashes";
}

TEST(Plot, BarsStayInsideTheirAxis) {
  BarChart chart;
  chart.title = "found";
  chart.text = [](double share) { return fmt::format("{:.0f} %", 100 * share); };
  chart.bars = {{"none", "0 %", {}, 0, Interval{0, 0.3}},
                {"half <", "50 %", {1, 0}, 0.5, Interval{0.2, 0.8}},
                {"too many", "200 %", {2, 0}, 2, Interval{-1, 3}},
                {"not a number", "", {3, 0}, NAN, std::nullopt}};
  const std::string svg = BarChartSvg(chart);
  EXPECT_TRUE(WellFormed(svg)) << svg;
  for (size_t at = svg.find("width=\""); at != std::string::npos; at = svg.find("width=\"", at + 1)) {
    EXPECT_LE(std::stod(svg.substr(at + 7)), 400);
  }
  EXPECT_FALSE(Contains(svg, "nan"));
}

TEST(Plot, NumbersAsPeopleReadThem) {
  EXPECT_EQ(TokensLabel(0), "0");
  EXPECT_EQ(TokensLabel(512), "512");
  EXPECT_EQ(TokensLabel(8192), "8k");
  EXPECT_EQ(TokensLabel(1 << 20), "1M");
  EXPECT_EQ(TokensLabel(8160), "8160");
  EXPECT_EQ(Thousands(999.4), "999");
  EXPECT_EQ(Thousands(1234567), "1,234,567");
  EXPECT_EQ(Thousands(-1234), "-1,234");
  EXPECT_EQ(Thousands(-123), "-123");
}

// Losses

TEST(CompareLosses, IntervalsHoldTheTruthAboutAsOftenAsTheySay) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.1f, 1);
  int holds = 0;
  for (int trial = 0; trial < 400; ++trial) {
    std::vector<float> first(640), second(640);
    for (size_t i = 0; i < first.size(); ++i) {
      second[i] = normal(random);
      first[i] = second[i] + normal(random);  // the difference is 0.1
    }
    const std::optional<LossDifference> difference = CompareLosses(first, second);
    ASSERT_TRUE(difference.has_value());
    holds += difference->ci95.low <= 0.1 && 0.1 <= difference->ci95.high ? 1 : 0;
  }
  EXPECT_GE(holds, 365);
  EXPECT_LE(holds, 395);
}

TEST(CompareLosses, ShortTextsHaveNoInterval) {
  EXPECT_FALSE(CompareLosses(std::vector<float>(63), std::vector<float>(63)).has_value());
  const std::optional<LossDifference> same = CompareLosses(std::vector<float>(65, 2), std::vector<float>(65, 1.5f));
  ASSERT_TRUE(same.has_value());
  EXPECT_DOUBLE_EQ(same->mean, 0.5);
  EXPECT_NEAR(same->ci95.high - same->ci95.low, 0, 1e-12);
}

// The report

NiahRecord Needle(const LayerSettings& attention, int32_t sample, bool found) {
  NiahRecord record;
  record.task = NiahTask::kSingle2;
  record.length = 4096;
  record.sample = sample;
  record.attention = attention;
  record.references = {"1234567"};
  record.depths = {50};
  record.found = {found};
  record.tokens = 4000;
  record.read = 10;
  record.dense = 100;
  return record;
}

SpeedRow Row(SpeedTest test, int32_t tokens, int32_t depth, std::vector<double> seconds) {
  SpeedRow row;
  row.test = test;
  row.tokens = tokens;
  row.depth = depth;
  row.seconds = std::move(seconds);
  row.tokens_read = {1, 4};
  return row;
}

// Dense and PHSA as if they had been measured: PHSA reads twice as fast, writes as fast, and loses 9 of 10 needles.
CompareResult Example() {
  CompareResult result;
  result.about.model = "odd <script>alert(1)</script> | model";
  result.about.device = "cpu";
  result.about.cpu = "a CPU";
  result.about.command = "phsa compare -m 'a b'";
  result.about.date = "today";
  result.about.threads = 1;
  result.about.num_layers = 2;
  result.about.context = 8192;
  const std::vector<LayerSettings> attention = {Canonical({SmallSettings(Policy::kDense, 0), {}}),
                                                Canonical({SmallSettings(Policy::kPhsa, 2), {}})};
  result.policies = {{"dense", attention[0], true, {"auto (dense)"}}, {"PHSA K=2", attention[1], false, {}}};
  CompareAnswers& answers = result.answers.emplace();
  answers.questions = {{"Who?", "Ada", {}}, {"Why | so?", "", {}}};
  answers.results.resize(2);
  for (auto& results : answers.results) {
    for (const char* text : {"It was <b>ada</b>.", "No | idea\n*really*"}) {
      GenerateResult one;
      one.text = text;
      one.prompt_tokens = 1000;
      one.prefill_seconds = 2;
      results.push_back(one);
    }
  }
  answers.results[1][0].text = "Nobody.";
  CompareSpeed& speed = result.speed.emplace();
  speed.repeats = 2;
  speed.decode_tokens = 8;
  speed.rows = {{Row(SpeedTest::kPrefill, 1024, 0, {1.0, 1.1}), Row(SpeedTest::kPrefill, 4096, 0, {8.0, 8.2}),
                 Row(SpeedTest::kDecode, 8, 4096, {1.0, 1.2})},
                {Row(SpeedTest::kPrefill, 1024, 0, {1.0, 1.1}), Row(SpeedTest::kPrefill, 4096, 0, {4.0, 4.4}),
                 Row(SpeedTest::kDecode, 8, 4096, {0.9, 1.1})}};
  CompareNiah& niah = result.niah.emplace();
  niah.samples = 10;
  for (int32_t sample = 0; sample < 10; ++sample) {
    niah.records.Add(Needle(attention[0], sample, true), "test");
    niah.records.Add(Needle(attention[1], sample, sample == 0), "test");
  }
  CompareText& text = result.text.emplace();
  text.name = "a text";
  text.tokens = 129;
  text.perplexity = text.recall = true;
  text.results.resize(2);
  text.recalls.resize(2);
  for (size_t i = 0; i < 2; ++i) {
    PerplexityResult& one = text.results[i].emplace();
    one.tokens = 129;
    one.loss = i == 0 ? 2.0 : 2.1;
    one.losses.assign(128, static_cast<float>(one.loss));
    one.tokens_read = {i == 0 ? 100 : 25, 100};
  }
  text.recalls[1] = {0.9, 0.8, {0.95, 0.65}};
  CompareFlops& flops = result.flops.emplace();
  flops.lengths = {4096, 1 << 17};
  flops.counts = {{{1e9, 0, 0}, {1e12, 0, 0}}, {{5e8, 1e7, 1e6}, {4e10, 9e9, 1e9}}};
  return result;
}

std::string AllFindings(const CompareResult& result) {
  std::string all;
  for (const CompareSection& section : TellComparison(result).sections) {
    for (const std::string& finding : section.findings) all += finding + "\n";
  }
  return all;
}

TEST(CompareReport, SaysWhatTheNumbersSay) {
  const std::string text = AllFindings(Example());
  EXPECT_TRUE(Contains(text, "prefill of 4,096 tokens: 2.00 times as fast as dense (1,024 against 512 tokens/s)"))
      << text;
  EXPECT_TRUE(
      Contains(text, "decode after 4,096: 2 runs overlap with dense's and do not tell (9 against 8 tokens/s at best)"))
      << text;
  EXPECT_TRUE(Contains(text, "PHSA K=2 found 10 %, dense 100 %: fewer, beyond chance")) << text;
  EXPECT_TRUE(Contains(text, "8.17 against 7.39 with dense attention, +10.5 %")) << text;
  EXPECT_TRUE(Contains(text, "PHSA K=2 reads 25.0 % of the tokens, and they hold 90.0 %")) << text;
  EXPECT_TRUE(Contains(text, "At 128k, PHSA K=2 needs 5.0 % of dense attention's FLOPs, one in 20")) << text;
}

TEST(CompareReport, ARowSaysTheOneConfigurationThatAllItsNumbersAreOf) {
  CompareResult result = Example();
  const CompareTable summary = TellComparison(result).summary;
  EXPECT_EQ(summary.columns[1], "settings");
  EXPECT_EQ(summary.rows[0][1], "reads everything");
  EXPECT_EQ(summary.rows[1][1], SettingsInWords(result.policies[1].attention));
  const CompareSection settings = TellComparison(result).sections.back();
  EXPECT_EQ(settings.tables.front().rows.size(), result.policies.size());
  EXPECT_TRUE(Contains(settings.notes.front(), "auto (dense) is the same as dense here"));
}

TEST(CompareReport, ColoursTellThePolicyAndDashesTellK) {
  CompareResult result = Example();
  const auto add = [&](const char* label, Policy policy, int32_t top_k, int32_t dense_below) {
    LayerSettings attention{SmallSettings(policy, top_k), {}};
    attention.base.dense_below = dense_below;
    result.policies.push_back({label, Canonical(attention), false, {}});
    result.flops->counts.push_back(result.flops->counts[1]);
  };
  add("PHSA K=4", Policy::kPhsa, 4, 0);
  add("auto (PHSA K=4)", Policy::kPhsa, 4, 128);
  add("InfLLM v2 K=4", Policy::kInfllm2, 4, 0);
  add("InfLLM v2 K=2", Policy::kInfllm2, 2, 0);
  result.answers->results.resize(6);
  result.speed->rows.resize(6);
  result.text->results.resize(6);
  result.text->recalls.resize(6);
  std::string chart;  // of the FLOPs, which all have
  for (const CompareSection& section : TellComparison(result).sections) {
    if (section.title.starts_with("FLOPs")) chart = section.charts.front();
  }
  // The line before a label in the legend, and its marker.
  const auto legend = [&](const std::string& label) {
    const size_t text = chart.find(">" + label + "<"), line = chart.rfind("<line", text);
    return chart.substr(line, text - line);
  };
  const auto attribute = [&](const std::string& label, const std::string& name) {
    const std::string svg = legend(label);
    const size_t at = svg.find(name + "=\"");
    if (at == std::string::npos) return std::string();
    return svg.substr(at, svg.find('"', at + name.size() + 2) - at);
  };
  for (const char* name : {"class", "stroke"}) {
    EXPECT_EQ(attribute("PHSA K=2", name), attribute("PHSA K=4", name));
    EXPECT_EQ(attribute("InfLLM v2 K=2", name), attribute("InfLLM v2 K=4", name));
    EXPECT_NE(attribute("InfLLM v2 K=2", name), attribute("PHSA K=2", name));
  }
  EXPECT_EQ(attribute("PHSA K=2", "stroke-dasharray"), attribute("InfLLM v2 K=2", "stroke-dasharray"));
  EXPECT_EQ(attribute("PHSA K=4", "stroke-dasharray"), attribute("InfLLM v2 K=4", "stroke-dasharray"));
  EXPECT_NE(attribute("PHSA K=2", "stroke-dasharray"), attribute("PHSA K=4", "stroke-dasharray"));
  EXPECT_FALSE(Contains(legend("PHSA K=4"), "fill-opacity"));
  EXPECT_TRUE(Contains(legend("auto (PHSA K=4)"), "fill-opacity"));
}

TEST(CompareReport, ClaimsNoMoreThanWasMeasured) {
  CompareResult result = Example();
  result.niah->records = {};
  for (int32_t sample = 0; sample < 3; ++sample) {
    result.niah->records.Add(Needle(result.policies[0].attention, sample, true), "test");
    result.niah->records.Add(Needle(result.policies[1].attention, sample, sample > 0), "test");
  }
  result.text->results[1]->loss = 2.001;
  for (size_t i = 0; i < 128; ++i) result.text->results[1]->losses[i] = i / 4 % 2 == 0 ? 1.9f : 2.102f;
  std::string text = AllFindings(result);
  EXPECT_TRUE(Contains(text, "found 67 %, dense 100 %: 3 samples are not enough to tell them apart")) << text;
  EXPECT_TRUE(Contains(text, "this text does not tell them apart")) << text;
  EXPECT_TRUE(Contains(TellComparison(result).warnings.front(), "never trained"));
  result.policies.erase(result.policies.begin());
  result.about.interrupted = true;
  for (auto* rows : {&result.speed->rows}) rows->erase(rows->begin());
  result.answers.reset();
  result.niah.reset();
  result.text.reset();
  result.flops.reset();
  text = AllFindings(result);
  EXPECT_TRUE(Contains(text, "Dense attention was not measured")) << text;
  EXPECT_FALSE(Contains(text, "times as fast"));
  EXPECT_TRUE(Contains(TellComparison(result).warnings.front(), "interrupted"));
}

TEST(CompareReport, AnInterruptedRunHasAReportOfWhatThereIs) {
  CompareResult result = Example();
  result.answers->results = {{}, {}};
  result.speed->rows = {{}, {}};
  result.niah->records = {};
  result.text->results = {std::nullopt, std::nullopt};
  result.text->recalls = {std::nullopt, std::nullopt};
  const CompareStory story = TellComparison(result);
  EXPECT_FALSE(CompareHtml(story).empty());
  EXPECT_FALSE(CompareMarkdown(story).empty());
  EXPECT_TRUE(nlohmann::json::parse(CompareJson(result))["speed"].empty());
  result.text->results = Example().text->results;
  result.text->results[0].reset();  // dense was not finished
  EXPECT_FALSE(Contains(AllFindings(result), "with dense attention"));
}

TEST(CompareReport, ThePageNeedsNothingFromElsewhereAndTextStaysText) {
  const std::string page = CompareHtml(TellComparison(Example()));
  EXPECT_FALSE(Contains(page, "<script"));
  EXPECT_FALSE(Contains(page, "<b>ada"));
  EXPECT_TRUE(Contains(page, "It was &lt;b&gt;ada&lt;/b&gt;."));
  EXPECT_TRUE(Contains(page, "default-src 'none'"));
  EXPECT_FALSE(Contains(page, "{{"));
  for (const char* elsewhere : {"src=", "href=", "url(", "@import", "https:"}) {
    EXPECT_FALSE(Contains(page, elsewhere)) << elsewhere;
  }
  for (size_t at = page.find("<svg"); at != std::string::npos; at = page.find("<svg", at + 1)) {
    EXPECT_TRUE(WellFormed(page.substr(at, page.find("</svg>", at) + 6 - at)));
  }
}

TEST(CompareReport, MarkdownTablesHaveTheirColumns) {
  const std::string text = CompareMarkdown(TellComparison(Example()));
  size_t columns = 0, tables = 0;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string line = text.substr(begin, end - begin);
    if (!line.starts_with('|')) {
      columns = 0;
      continue;
    }
    size_t bars = 0;
    for (size_t i = 0; i < line.size(); ++i) bars += line[i] == '|' && (i == 0 || line[i - 1] != '\\') ? 1 : 0;
    tables += columns == 0 ? 1 : 0;
    if (columns == 0) columns = bars;
    EXPECT_EQ(bars, columns) << line;
    EXPECT_EQ(line.back(), '|');
  }
  EXPECT_EQ(tables, 12u) << text;
  EXPECT_TRUE(Contains(text, "No \\| idea \\*really\\*"));
  EXPECT_TRUE(Contains(text, "odd \\<script\\>"));
  EXPECT_TRUE(Contains(text, "1,024 (2.00×)"));
}

TEST(CompareReport, JsonHasEveryNumber) {
  const auto json = nlohmann::json::parse(CompareJson(Example()));
  EXPECT_EQ(json["answers"][2]["right"], false);
  EXPECT_EQ(json["answers"][0]["right"], true);
  EXPECT_TRUE(json["answers"][1]["right"].is_null());
  EXPECT_EQ(json["speed"].size(), 6u);
  EXPECT_EQ(json["speed"][4]["times_dense"], 2.0);
  EXPECT_EQ(json["niah"][1]["policy"], "PHSA K=2");
  EXPECT_EQ(json["niah"][1]["score"], 0.1);
  EXPECT_EQ(json["niah"][1]["against"][0]["difference"], -0.9);
  EXPECT_NEAR(json["text"]["policies"][1]["loss_difference"].get<double>(), 0.1, 1e-12);
  EXPECT_EQ(json["text"]["policies"][1]["recall_sparse_by_layer"], nlohmann::json({0.95, 0.65}));
  EXPECT_EQ(json["flops"][3]["total"], 5e10);
  EXPECT_EQ(json["policies"][1]["settings"]["top_k"], 2);
  EXPECT_EQ(json["policies"][0]["settings"].dump(), R"({"attention":"dense"})");
}

TEST(SettingsText, SaysWhatAPolicyGoesBy) {
  Settings settings;
  EXPECT_EQ(SettingsInWords({settings, {}}), "init 128, local 512, K 16, λ 0.9, " + settings.punctuation);
  settings.dense_below = 1024;
  settings.group_reduce = GroupReduce::kMax;
  settings.block_size = 32;
  settings.head_lambda = {0.5f, 1};
  EXPECT_EQ(SettingsInWords({settings, {{3, Settings{}}}}), "init 128, local 512, K 16, block 32, λ per head, " +
                                                                settings.punctuation +
                                                                ", group max, dense below 1024; some layers differ");
  settings = Settings{};
  settings.policy = Policy::kStreaming;
  EXPECT_EQ(SettingsInWords({settings, {}}), "init 128, local 512");
}

TEST(SettingsText, EqualSettingsAreOneWithBothNames) {
  std::vector<NamedAttention> all;
  AddDistinct("dense", {SmallSettings(Policy::kDense, 2), {}}, &all);
  for (const int32_t top_k : {2, 4}) AddDistinct("phsa", {SmallSettings(Policy::kPhsa, top_k), {}}, &all);
  AddDistinct("auto", {SmallSettings(Policy::kDense, 7), {}}, &all);  // dense attention has no K
  for (const int32_t top_k : {2, 4}) AddDistinct("other", {SmallSettings(Policy::kPhsa, top_k), {}}, &all);
  AddDistinct("phsa", {SmallSettings(Policy::kPhsa, 2), {}}, &all);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(SameInWords(all), (std::vector<std::string>{"auto is the same as dense", "other is the same as phsa"}));
}

// The run

CompareRuns SmallRuns() {
  CompareRuns runs;
  for (const Policy policy : {Policy::kDense, Policy::kPhsa}) {
    AddDistinct(Name(policy), {SmallSettings(policy, 2), {}}, &runs.policies);
  }
  runs.answers.emplace();
  runs.answers->questions = {{"first", "", Tokens(200)}, {"second", "", Tokens(210)}};
  runs.answers->max_tokens = 4;
  runs.answers->context = 220;
  runs.speed.emplace();
  runs.speed->lengths = {128, 320};
  runs.speed->depths = {0, 300};
  runs.speed->decode_tokens = 3;
  runs.text.emplace();
  runs.text->name = "random tokens";
  runs.text->tokens = Tokens(300);
  runs.flops_lengths = {256, 1 << 20};
  return runs;
}

TEST(Compare, MeasuresEveryPartForEveryPolicy) {
  const std::unique_ptr<Engine> engine = MakeEngine();
  const CompareRuns runs = SmallRuns();
  double last = -1;
  bool forward = true;
  CompareCallbacks callbacks;
  callbacks.progress = [&](double share, const std::string&) {
    forward = forward && share <= 1 + 1e-9;
    last = share;
  };
  callbacks.stop = [] { return false; };
  const CompareResult result = RunCompare(*engine, runs, callbacks);
  EXPECT_TRUE(forward);
  EXPECT_GT(last, 0.8);
  EXPECT_FALSE(result.about.interrupted);
  ASSERT_EQ(result.policies.size(), 2u);
  EXPECT_EQ(result.dense(), 0u);
  for (size_t i = 0; i < 2; ++i) {
    ASSERT_EQ(result.answers->results[i].size(), 2u);
    EXPECT_EQ(result.answers->results[i][1].reused_tokens, 200) << "the text is read once";
    ASSERT_EQ(result.speed->rows[i].size(), 4u);
    for (const SpeedRow& row : result.speed->rows[i]) EXPECT_EQ(row.seconds.size(), 2u);
    EXPECT_EQ(result.speed->rows[i][1].tokens, 320);
    EXPECT_EQ(result.speed->rows[i][3].depth, 300);
    ASSERT_TRUE(result.text->results[i].has_value());
    ASSERT_EQ(result.text->results[i]->losses.size(), 299u);
    double sum = 0;
    for (const float loss : result.text->results[i]->losses) sum += static_cast<double>(loss);
    EXPECT_NEAR(sum / 299, result.text->results[i]->loss, 1e-5);
    EXPECT_EQ(result.flops->counts[i].size(), 2u);
  }
  EXPECT_FALSE(result.text->recalls[0].has_value());
  EXPECT_LT(*result.text->recalls[1]->sparse, 1);
  EXPECT_EQ(result.speed->rows[0][1].tokens_read.share(), 1);
  EXPECT_LT(result.speed->rows[1][1].tokens_read.share(), 0.5);
  EXPECT_EQ(runs.Context(), 320) << "the longest text of all parts";
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(result.policies[i].attention, runs.policies[i].attention);
}

TEST(Compare, AStoppedRunKeepsWhatIsDone) {
  const std::unique_ptr<Engine> engine = MakeEngine();
  const CompareRuns runs = SmallRuns();
  int32_t all = 0;
  CompareCallbacks callbacks;
  callbacks.progress = [](double, const std::string&) {};
  callbacks.stop = [&] { return ++all < 0; };
  RunCompare(*engine, runs, callbacks);
  size_t least = 0;
  for (int32_t limit = 0; limit < all; limit += 7) {
    int32_t asked = 0;
    callbacks.stop = [&] { return ++asked > limit; };
    const CompareResult result = RunCompare(*engine, runs, callbacks);
    EXPECT_TRUE(result.about.interrupted);
    size_t done = 0;
    for (size_t i = 0; i < 2; ++i) {
      done += result.answers->results[i].size() + (result.text->results[i] ? 1u : 0u);
      for (const SpeedRow& row : result.speed->rows[i]) done += row.seconds.size();
    }
    EXPECT_GE(done, least) << limit;
    least = done;
    EXPECT_FALSE(CompareMarkdown(TellComparison(result)).empty());
  }
  EXPECT_GT(least, 5u);
}

}  // namespace
}  // namespace phsa
