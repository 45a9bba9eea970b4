#include "eval/tune.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "byte_vocabulary.h"
#include "eval/niah/random.h"
#include "eval/perplexity.h"
#include "eval/tune_meter.h"
#include "eval/tune_report.h"
#include "fake_model.h"
#include "refusal.h"

namespace phsa {
namespace {

// A made-up model: how much worse settings are is a function of them, and each sample adds noise that it adds to all.
class Scorer {
 public:
  explicit Scorer(std::function<double(const Settings&)> loss, double noise = 0.3)
      : loss_(std::move(loss)), noise_(noise) {}

  TuneCallbacks callbacks() {
    TuneCallbacks out;
    out.measure = [this](std::span<const LayerSettings> all,
                         int32_t samples) -> std::optional<std::vector<TuneLosses>> {
      if (--rounds_left_ < 0) return std::nullopt;
      std::vector<TuneLosses> losses;
      for (const LayerSettings& one : all) {
        TuneLosses here;
        for (int32_t task = 0; task < 3; ++task) {
          here.tasks.emplace_back();
          for (int32_t i = 0; i < samples; ++i) {
            NiahRandom shared(fmt::format("{} {}", task, i)), own(fmt::format("{} {} {}", task, i, Text(one)));
            here.tasks.back().push_back(loss_(one.base) + noise_ * shared.Unit() + noise_ / 20 * own.Unit());
          }
        }
        here.prose = {loss_(one.base) / 100};
        losses.push_back(std::move(here));
        readings_[Text(one)] = std::max(readings_[Text(one)], samples);
      }
      return losses;
    };
    out.round = [this](const std::string& stage, size_t candidates, int32_t samples) {
      rounds.push_back({stage, candidates, samples});
    };
    return out;
  }
  static std::string Text(const LayerSettings& one) { return SettingsToJson(one); }
  void StopAfter(int count) { rounds_left_ = count; }
  // Samples of one task that were read, of all settings.
  int64_t samples() const {
    int64_t sum = 0;
    for (const auto& [text, count] : readings_) sum += count;
    return sum;
  }

  struct Round {
    std::string stage;
    size_t candidates;
    int32_t samples;
  };
  std::vector<Round> rounds;

 private:
  std::function<double(const Settings&)> loss_;
  double noise_;
  int rounds_left_ = 1000;
  std::map<std::string, int32_t> readings_;
};

TuneOptions Options(double budget = 0.05, int32_t length = 8192) {
  TuneOptions options;
  options.budget = budget;
  options.length = length;
  options.num_layers = 6;
  return options;
}

double Off(double a, double b) { return std::abs(std::log2(a) - std::log2(b)); }

TEST(Tune, TheBestSettingsOfAMadeUpModelAreFound) {
  // What is best is not where the search begins, and the samples' noise is larger than most differences.
  Scorer scorer([](const Settings& s) {
    return Off(s.parts, 4) * 0.2 + Off(s.init_tokens, 64) * 0.1 + Off(s.local_tokens, 64) * 0.15 +
           std::abs(s.lambda - 0.75) +
           (s.parts == 1       ? 0.3
            : s.survivors == 0 ? 0.1
                               : Off(s.survivors, 128) * 0.05);
  });
  const std::optional<TuneResult> result = Tune(Options(), scorer.callbacks());
  ASSERT_TRUE(result.has_value());
  const Settings& best = result->best.base;
  EXPECT_EQ(best.parts, 4);
  EXPECT_EQ(best.init_tokens, 64);
  EXPECT_EQ(best.local_tokens, 64);
  EXPECT_EQ(best.lambda, 0.75f);
  EXPECT_EQ(best.survivors, 128);
  EXPECT_EQ(best.policy, Policy::kPhsa);
}

TEST(Tune, TheBudgetIsSpentAndKept) {
  for (const auto& [budget, length] : std::vector<std::pair<double, int32_t>>{
           {0.05, 8192}, {0.0279, 32768}, {0.1, 4096}, {0.016, 4096}, {0.5, 1024}}) {
    Scorer scorer([](const Settings& s) { return -0.001 * s.top_k; });
    const std::optional<TuneResult> result = Tune(Options(budget, length), scorer.callbacks());
    ASSERT_TRUE(result.has_value());
    const double block = 16.0 / length;
    EXPECT_GT(ShareAtEnd(result->best, 6, length), budget - 2 * block);
    for (const TuneTrial& trial : result->trials) {
      EXPECT_LE(ShareAtEnd(trial.attention, 6, length), budget + 1e-9) << trial.stage;
      EXPECT_GE(trial.attention.base.top_k, 1);
      Validate(trial.attention.base);
    }
  }
}

TEST(Tune, TheShareIsWhatTheLastQueryReads) {
  LayerSettings settings;  // init 128, local 512, K = 16, and the query's own block
  EXPECT_DOUBLE_EQ(ShareAtEnd(settings, 4, 32768), 912.0 / 32768);
  settings.layers[1] = settings.base;
  settings.layers[1].policy = Policy::kDense;
  EXPECT_DOUBLE_EQ(ShareAtEnd(settings, 4, 32768), (3 * 912.0 / 32768 + 1) / 4);
}

TEST(Tune, ManyAreTriedOnFewSamplesAndFewOnMany) {
  Scorer scorer([](const Settings& s) { return s.parts * 0.01 + Off(s.local_tokens, 128) * 0.1; });
  TuneOptions options = Options();
  options.samples = 40;
  const std::optional<TuneResult> result = Tune(options, scorer.callbacks());
  ASSERT_TRUE(result.has_value());
  int64_t settings = 0;
  std::set<std::string> tried;
  for (const TuneTrial& trial : result->trials) settings += tried.insert(Scorer::Text(trial.attention)).second;
  EXPECT_GE(settings, 15);
  EXPECT_LT(scorer.samples(), settings * options.samples / 2) << "everything on all samples is what halving saves";
  for (size_t i = 1; i < scorer.rounds.size(); ++i) {
    const Scorer::Round &before = scorer.rounds[i - 1], &now = scorer.rounds[i];
    if (before.stage != now.stage) continue;
    EXPECT_LE(now.candidates, (before.candidates + 1) / 2);
    EXPECT_GT(now.samples, before.samples);
  }
  for (const TuneTrial& trial : result->trials) {
    if (trial.stage == "final") {
      EXPECT_EQ(trial.samples, 40);
    }
  }
}

TEST(Tune, OfSettingsThatAreAsGoodTheCheapestWin) {
  Scorer scorer([](const Settings& s) { return s.parts == 1 ? 0.5 : 0; }, 0);
  const std::optional<TuneResult> result = Tune(Options(), scorer.callbacks());
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->best.base.parts, 2);
  // As few blocks for the parts as K allows.
  EXPECT_EQ(result->best.base.survivors, result->best.base.top_k <= 32 ? 32 : 64);
}

TEST(Tune, WhatTheDeviceCannotDoIsNotTried) {
  Scorer scorer([](const Settings& s) { return s.parts == 1 ? 0.5 : 0; });
  TuneCallbacks callbacks = scorer.callbacks();
  callbacks.fits = [](const LayerSettings& one) { return one.base.parts == 1; };
  const std::optional<TuneResult> result = Tune(Options(), callbacks);
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->best.base.parts, 1);
  for (const TuneTrial& trial : result->trials) EXPECT_EQ(trial.attention.base.parts, 1);
  callbacks.fits = [](const LayerSettings&) { return false; };
  EXPECT_NE(Refusal([&] { Tune(Options(), callbacks); }).find("none of the settings"), std::string::npos);
}

TEST(Tune, LayersDifferWhereItPays) {
  TuneOptions options = Options();
  options.layers = true;
  for (const bool pays : {true, false}) {
    Scorer plain([](const Settings&) { return 0.0; }, 0);
    TuneCallbacks callbacks = plain.callbacks();
    callbacks.measure = [&](std::span<const LayerSettings> all, int32_t samples) {
      std::vector<TuneLosses> losses;
      for (const LayerSettings& one : all) {
        // The first layers want less, the others more.
        const double loss =
            one.layers.count(0) > 0 && one.layers.at(0).top_k < one.base.top_k ? (pays ? -0.1 : 0.1) : 0;
        losses.push_back({{std::vector<double>(static_cast<size_t>(samples), loss)}, {}});
      }
      return std::optional(losses);
    };
    const std::optional<TuneResult> result = Tune(options, callbacks);
    ASSERT_TRUE(result.has_value());
    EXPECT_EQ(result->best.layers.size(), pays ? 2u : 0u);
    EXPECT_LE(ShareAtEnd(result->best, 6, options.length), options.budget);
  }
}

TEST(Tune, ABudgetThatHoldsNothingOrEverythingIsRefused) {
  const auto refusal = [](double budget, int32_t length) {
    return Refusal([&] { CheckTuneOptions(Options(budget, length)); });
  };
  const std::string small = refusal(0.01, 4096);
  EXPECT_NE(small.find("budget 0.01 of 4096 tokens is 41 tokens"), std::string::npos) << small;
  EXPECT_NE(small.find("give budget 0.016 or more"), std::string::npos) << small;
  CheckTuneOptions(Options(0.016, 4096));
  for (const double budget : {0.0, -0.1, 1.0, 3.0, std::nan("")}) {
    EXPECT_NE(refusal(budget, 4096).find("between 0 and 1"), std::string::npos) << budget;
  }
}

TEST(Tune, AStoppedSearchGivesNothing) {
  for (int rounds = 0; rounds < 8; ++rounds) {
    Scorer scorer([](const Settings& s) { return s.parts * 0.1; });
    scorer.StopAfter(rounds);
    EXPECT_FALSE(Tune(Options(), scorer.callbacks()).has_value());
  }
}

TEST(Tune, LossesAndTheirDifferencesByHand) {
  const TuneLosses a{{{1, 3}, {2, 2}}, {0.1, 0.2}}, b{{{0, 1}, {2, 3}}, {0, 0}};
  EXPECT_DOUBLE_EQ(a.Loss(), 2 + 4 * 0.15);
  const TuneDifference d = ComparePaired(a, b);
  EXPECT_DOUBLE_EQ(d.mean, (1.5 - 0.5) / 2 + 4 * 0.15);
  // Differences 1 and 2, 0 and -1, 0.1 and 0.2: the variance of the mean of two is a quarter of their squared distance.
  EXPECT_NEAR(d.error, std::sqrt(0.25 / 4 + 0.25 / 4 + 16 * 0.0025), 1e-12);
  EXPECT_EQ(ComparePaired(a, a).mean, 0);
  EXPECT_TRUE(std::isinf(ComparePaired({{{1}}, {}}, {{{0}}, {}}).error));
}

// ---------------------------------------------------------------------------------------------------------------------
// Measuring

// A token for each byte.
Tokenizer ByteTokenizer() {
  BpeVocabulary vocabulary = ByteVocabulary();
  vocabulary.token_types.assign(vocabulary.tokens.size(), 1);
  return Tokenizer::FromVocabulary(vocabulary, "bytes");
}

constexpr int32_t kLength = 1024;

class TuneMeterTest : public ::testing::Test {
 protected:
  TuneMeterTest() {
    auto model = std::make_unique<FakeModel>();
    model->config_for_test().vocab_size = 256;
    model->Add("model.embed_tokens.weight", {256, model->config().hidden});
    EngineOptions options;
    options.weights = WeightsMode::kF32;
    options.threads = 1;
    options.context = kLength;
    engine_ = std::make_unique<Engine>(std::move(model), ByteTokenizer(), options);
    engine_->Load([](double) { return true; });
    NiahPromptOptions prompts;
    prompts.repeat = true;
    prompts_ = std::make_unique<NiahPrompts>(engine_->tokenizer(), &haystack_, prompts);
    std::vector<int32_t> text(2000);
    for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<int32_t>(i * i % 256);
    windows_ = ProseWindows(text, 1, 300, 4);
  }

  TuneMeter Meter(NiahRecords& records, int64_t most = 1000000) {
    TuneMeterCallbacks callbacks;
    callbacks.progress = [](double share) {
      EXPECT_GE(share, 0);
      EXPECT_LE(share, 1 + 1e-9);
    };
    callbacks.record = [this](const NiahRecord&) { ++read_; };
    callbacks.prose = [this](const NiahProse&) { ++read_; };
    callbacks.stop = [this, most] { return read_ >= most; };
    return TuneMeter(*engine_, *prompts_, {NiahTask::kSingle1, NiahTask::kMultivalue}, kLength, windows_, records,
                     callbacks);
  }
  static LayerSettings Sparse(int32_t top_k) {
    LayerSettings settings;
    settings.base = Settings::Preset(kLength);
    settings.base.top_k = top_k;
    settings.base.punctuation = "none";
    return settings;
  }

  Haystack haystack_ = Haystack::BuiltIn();
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<NiahPrompts> prompts_;
  std::vector<std::vector<int32_t>> windows_;
  int64_t read_ = 0;
};

TEST_F(TuneMeterTest, SettingsThatReadEverythingLoseNothing) {
  NiahRecords records;
  const std::vector<LayerSettings> all = {Sparse(64), Sparse(1)};
  const auto losses = Meter(records).Measure(all, 4);
  ASSERT_TRUE(losses.has_value());
  ASSERT_EQ(losses->size(), 2u);
  EXPECT_EQ((*losses)[0].prose.size(), 1u);
  for (const std::vector<double>& task : (*losses)[0].tasks) {
    ASSERT_EQ(task.size(), 4u);
    for (const double loss : task) EXPECT_NEAR(loss, 0, 1e-4);
  }
  EXPECT_NEAR((*losses)[0].prose[0], 0, 1e-4);
  EXPECT_GT(std::abs((*losses)[1].tasks[0][0]), 1e-3);
  EXPECT_GT(std::abs((*losses)[1].prose[0]), 1e-4);
}

TEST_F(TuneMeterTest, WhatIsMeasuredIsNotMeasuredAgain) {
  NiahRecords records;
  const std::vector<LayerSettings> two = {Sparse(1), Sparse(2)};
  const auto first = Meter(records).Measure(two, 4);
  EXPECT_EQ(read_, 3 * (2 * 4 + 1)) << "dense attention is one of three";
  const auto again = Meter(records).Measure(two, 4);
  EXPECT_EQ(read_, 3 * (2 * 4 + 1));
  ASSERT_TRUE(first && again);
  EXPECT_EQ((*first)[1].tasks, (*again)[1].tasks);
  EXPECT_EQ((*first)[1].prose, (*again)[1].prose);
  Meter(records).Measure({&two[0], 1}, 8);
  EXPECT_EQ(read_, 3 * (2 * 4 + 1) + 2 * (2 * 4 + 1));
}

TEST_F(TuneMeterTest, AStoppedMeasurementGoesOn) {
  NiahRecords whole, parts;
  const LayerSettings sparse = Sparse(1);
  const auto expected = Meter(whole).Measure({&sparse, 1}, 4);
  for (int64_t most = 3;; most += 3) {
    read_ = 0;
    NiahRecords& records = parts;
    const auto losses = Meter(records, 3).Measure({&sparse, 1}, 4);
    if (!losses) {
      ASSERT_LT(most, 30);
      continue;
    }
    EXPECT_EQ(losses->front().tasks, expected->front().tasks);
    EXPECT_EQ(losses->front().prose, expected->front().prose);
    break;
  }
}

TEST_F(TuneMeterTest, TheLossOfAnAnswerIsThatOfItsReferences) {
  NiahRecords records;
  const LayerSettings sparse = Sparse(2);
  ASSERT_TRUE(Meter(records).Measure({&sparse, 1}, 2).has_value());
  for (const NiahRecord& record : records.all()) {
    const NiahSample sample = prompts_->Build(record.task, record.length, record.sample);
    std::vector<int32_t> tokens = sample.tokens;
    const std::vector<int32_t> answer = engine_->tokenizer().Encode(sample.answer, SpecialTokens::kAsText);
    tokens.insert(tokens.end(), answer.begin(), answer.end());
    engine_->SetAttention(record.attention);
    const PerplexityResult all = Perplexity(*engine_, tokens, {});
    double loss = 0;
    int32_t count = 0;
    for (size_t r = 0; r < sample.references.size(); ++r) {
      const size_t begin = sample.answer.find(sample.references[r]);  // a byte is a token
      ASSERT_NE(begin, std::string::npos);
      bool right = true;
      for (size_t i = begin; i < begin + sample.references[r].size(); ++i) {
        const size_t at = sample.tokens.size() + i;
        loss += static_cast<double>(all.losses[at - 1]);
        right = right && all.top_tokens[at - 1] == tokens[at];
        ++count;
      }
      EXPECT_EQ(record.found[r], right);
    }
    EXPECT_EQ(count, record.task == NiahTask::kMultivalue ? 28 : 7);
    ASSERT_TRUE(record.nll.has_value());
    EXPECT_NEAR(*record.nll, loss / count, 1e-3);
  }
}

TEST_F(TuneMeterTest, WindowsOfProseAreDrawnAndTheFirstOnesStay) {
  std::vector<int32_t> text(5000);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<int32_t>(i);
  const auto few = ProseWindows(text, 3, 1000, 2), many = ProseWindows(text, 3, 1000, 5);
  ASSERT_EQ(many.size(), 5u);
  EXPECT_EQ(few[1], many[1]);
  for (const auto& window : many) {
    ASSERT_EQ(window.size(), 1000u);
    EXPECT_EQ(window.back() - window.front(), 999);
  }
  EXPECT_NE(many[0], many[1]);
  EXPECT_NE(ProseWindows(text, 4, 1000, 1)[0], many[0]);
  EXPECT_EQ(ProseWindows(text, 3, 9000, 4).size(), 1u);
  EXPECT_TRUE(ProseWindows(std::span(text).first(200), 3, 1000, 2).empty());
}

TEST_F(TuneMeterTest, TheReportSaysWhatTheSamplesSay) {
  NiahRecords records;
  TuneMeter meter = Meter(records);
  TuneCallbacks callbacks;
  callbacks.measure = [&](std::span<const LayerSettings> all, int32_t samples) { return meter.Measure(all, samples); };
  TuneOptions options = Options(0.3, kLength);
  options.base.punctuation = "none";
  options.num_layers = 2;
  options.samples = 2;
  options.parts = {1, 2};
  options.lambdas = {1.0f};
  const std::optional<TuneResult> result = Tune(options, callbacks);
  ASSERT_TRUE(result.has_value());
  TuneAbout about;
  about.model = "a <b> model";
  about.budget = 0.3;
  about.length = kLength;
  about.samples = 2;
  about.num_layers = 2;
  about.prose = "prose.txt";
  about.tasks = {NiahTask::kSingle1, NiahTask::kMultivalue};
  const std::vector<TuneRow> rows = TuneRows(about, *result, records);
  ASSERT_EQ(rows.size(), result->trials.size() + 1);
  EXPECT_EQ(rows.front().share, 1);
  EXPECT_EQ(std::count_if(rows.begin(), rows.end(), [](const TuneRow& row) { return row.best; }), 1);
  const nlohmann::ordered_json json = TuneJson(about, rows);
  EXPECT_EQ(json["best"]["settings"], nlohmann::ordered_json::parse(SettingsToJson(result->best)));
  EXPECT_EQ(json["trials"].size(), result->trials.size());
  EXPECT_TRUE(json["best"]["tasks"].contains("multivalue"));
  const std::string table = TuneTable(about, rows), html = TuneHtml(about, rows);
  EXPECT_EQ(static_cast<size_t>(std::count(table.begin(), table.end(), '\n')), rows.size() + 2);
  EXPECT_NE(table.find("| dense |"), std::string::npos);
  EXPECT_NE(html.find("a &lt;b&gt; model"), std::string::npos);
  EXPECT_NE(html.find("<svg"), std::string::npos);
  EXPECT_EQ(html.find("{{"), std::string::npos);
}

}  // namespace
}  // namespace phsa
