#include "engine/scorer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "engine/session.h"
#include "fake_engine.h"
#include "ops/layers.h"
#include "refusal.h"

namespace phsa {
namespace {

// From all logits of one text read alone, and the definition.
Score PlainScore(Engine& engine, const ScoreRequest& request) {
  const std::vector<int32_t> text = Joined(request.context, request.continuation);
  const int32_t vocab = engine.config().vocab_size;
  Score score;
  Session session(engine);
  const LogitsSink sink = [&](int32_t, int32_t row, const LogitsRow& row_logits) {
    const float* const logits = row_logits.All().data();
    const size_t next = static_cast<size_t>(row) + 1;
    if (next < request.context.size()) return;
    const double log_probability = static_cast<double>(logits[text[next]]) - LogSumExp(logits, vocab);
    score.log_likelihood += log_probability;
    score.token_log_probabilities.push_back(static_cast<float>(log_probability));
    for (int32_t id = 0; id < vocab; ++id) {
      if (logits[id] > logits[text[next]] || (logits[id] == logits[text[next]] && id < text[next])) {
        score.greedy = false;
      }
    }
  };
  session.Prefill(std::span(text).first(text.size() - 1), {}, sink, BatchItem::Logits::kAll);
  return score;
}

// Questions behind shared beginnings, with endings of all lengths, in no order: also contexts that begin others, equal
// requests, and endings that the model would have chosen.
std::vector<ScoreRequest> RandomRequests(Engine& engine, uint32_t seed) {
  std::mt19937 random(seed);
  const auto tokens = [&](size_t least, size_t most) {
    return Tokens(least + random() % (most - least + 1), random());
  };
  std::vector<ScoreRequest> requests;
  for (const size_t beginning : {0, 128, 300}) {
    const std::vector<int32_t> shared = Tokens(beginning, 77);
    for (int question = 0; question < 3; ++question) {
      const std::vector<int32_t> context = Joined(shared, tokens(1, 90));
      const size_t longest = question == 0 ? 1 : question == 1 ? 250 : 20;
      const std::vector<int32_t> stem = tokens(0, 20);
      for (int ending = 0; ending < 4; ++ending) {
        requests.push_back({context, ending < 2 ? tokens(1, longest) : Joined(stem, tokens(1, longest))});
      }
      requests.push_back(requests.back());
      requests.push_back({Joined(context, tokens(1, 30)), tokens(1, 5)});
      GenerateOptions greedy;
      greedy.sampler.temperature = 0;
      greedy.max_tokens = 3;
      requests.push_back({context, Session(engine).Generate(context, greedy, {}).tokens});
    }
  }
  std::shuffle(requests.begin(), requests.end(), random);
  return requests;
}

std::string Differences(const Score& score, const Score& expected) {
  std::string text;
  // The same logits to the last bit (ops/linear.h), and the same sum: nothing is left to round differently.
  if (!SameBits(score.token_log_probabilities, expected.token_log_probabilities)) text += "token_log_probabilities ";
  if (score.log_likelihood != expected.log_likelihood) text += "log_likelihood ";
  if (score.greedy != expected.greedy) text += "greedy ";
  return text;
}

TEST(Scorer, ScoresAreThoseOfEachTextReadAlone) {
  int greedy = 0;
  for (const Policy policy : {Policy::kDense, Policy::kPhsa, Policy::kInfllm2_64}) {
    std::vector<ScoreRequest> requests;
    std::vector<Score> expected;
    for (const auto& [chunk, cache_tokens] : {std::pair{512, 8192}, {100, 1024}, {7, 640}}) {
      EngineOptions options = FakeOptions(640, chunk, SmallSettings(policy, 1));
      options.cache_tokens = cache_tokens;
      const std::unique_ptr<Engine> engine = LoadedEngine(options);
      if (requests.empty()) {
        requests = RandomRequests(*engine, 11);
        expected.reserve(requests.size());
        for (const ScoreRequest& request : requests) expected.push_back(PlainScore(*engine, request));
      }
      const StepWatch watch(engine->decoder());
      const auto scores = ScoreAll(*engine, requests, {});
      ASSERT_TRUE(scores.has_value());
      ASSERT_EQ(scores->size(), requests.size());
      for (size_t i = 0; i < requests.size(); ++i) {
        EXPECT_EQ(Differences((*scores)[i], expected[i]), "") << Name(policy) << " " << chunk << " " << i;
        EXPECT_EQ((*scores)[i].token_log_probabilities.size(), requests[i].continuation.size());
        greedy += expected[i].greedy ? 1 : 0;
      }
      for (const auto& step : watch.steps) EXPECT_LE(StepWatch::Rows(step), chunk);
      EXPECT_EQ(engine->cache().free_pages(), engine->cache().num_pages());
    }
  }
  EXPECT_GE(greedy, 9 * 9) << "the endings that the model would have chosen";
}

TEST(Scorer, ALogProbabilityIsALogSoftmaxOverTheVocabulary) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(256));
  const std::vector<int32_t> context = Tokens(20);
  std::vector<ScoreRequest> requests;
  requests.reserve(static_cast<size_t>(engine->config().vocab_size));
  for (int32_t token = 0; token < engine->config().vocab_size; ++token) requests.push_back({context, {token}});
  const auto scores = ScoreAll(*engine, requests, {});
  double sum = 0;
  int likeliest = 0;
  for (const Score& score : *scores) {
    sum += std::exp(score.log_likelihood);
    likeliest += score.greedy ? 1 : 0;
  }
  EXPECT_NEAR(sum, 1, 1e-6);
  EXPECT_EQ(likeliest, 1);
}

TEST(Scorer, TheEndingsOfAQuestionGoThroughOneStep) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(1024, 64));
  const std::vector<int32_t> context = Tokens(150);
  const std::vector<ScoreRequest> requests = {
      {context, Tokens(9, 2)}, {context, Tokens(15, 3)}, {context, Tokens(12, 4)}, {context, Tokens(21, 5)}};
  const StepWatch watch(engine->decoder());
  ASSERT_TRUE(ScoreAll(*engine, requests, {}).has_value());
  ASSERT_EQ(watch.steps.size(), 4u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(watch.steps[i].size(), 1u) << "the context, in chunks";
  EXPECT_EQ(watch.steps[3].size(), 4u);
  EXPECT_EQ(StepWatch::Rows(watch.steps[3]), 8 + 14 + 11 + 20);
}

TEST(Scorer, EndingsOfOneTokenTakeNoStepOfTheirOwn) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(1024));
  const std::vector<int32_t> context = Tokens(150);
  const std::vector<ScoreRequest> requests = {{context, {1}}, {context, {2}}, {context, {3}}, {context, {4}}};
  const StepWatch watch(engine->decoder());
  ASSERT_TRUE(ScoreAll(*engine, requests, {}).has_value());
  EXPECT_EQ(watch.steps, (std::vector<std::vector<int32_t>>{{150}}));
}

TEST(Scorer, QuestionsGoTogetherAndTheirCommonBeginningIsReadOnce) {
  EngineOptions options = FakeOptions(1024);
  options.cache_tokens = 16384;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  const std::vector<int32_t> beginning = Tokens(400, 9);
  std::vector<ScoreRequest> requests;
  int32_t rows = 400;
  for (uint32_t question = 0; question < 20; ++question) {
    const std::vector<int32_t> context = Joined(beginning, Tokens(30, 100 + question));
    rows += 30;
    for (uint32_t ending = 0; ending < 4; ++ending) {
      requests.push_back({context, Tokens(11, 1000 + 4 * question + ending)});
      rows += 10;
    }
  }
  std::shuffle(requests.begin(), requests.end(), std::mt19937(3));
  const StepWatch watch(engine->decoder());
  ASSERT_TRUE(ScoreAll(*engine, requests, {}).has_value());
  // The first context of a batch goes on from the batch before, all but its last token.
  EXPECT_GE(watch.all_rows(), rows - 40);
  EXPECT_LE(watch.all_rows(), rows);
  EXPECT_LE(watch.steps.size(), 10u);
}

TEST(Scorer, WhatIsWrongIsRefusedBeforeAnyWork) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(256));
  const StepWatch watch(engine->decoder());
  const ScoreRequest good = {Tokens(10), Tokens(5)};
  const auto refused = [&](const ScoreRequest& bad) {
    const std::vector<ScoreRequest> requests = {good, bad};
    return Refusal([&] { ScoreAll(*engine, requests, {}); });
  };
  const std::string long_message = refused({Tokens(200), Tokens(58)});
  EXPECT_NE(long_message.find("request 1 has 257 tokens"), std::string::npos) << long_message;
  EXPECT_NE(long_message.find("256"), std::string::npos) << long_message;
  EXPECT_NE(refused({{}, Tokens(5)}).find("request 1 has no context"), std::string::npos);
  EXPECT_NE(refused({Tokens(5), {}}).find("request 1 has no continuation"), std::string::npos);
  EXPECT_NE(refused({{1, 101}, {1}}).find("request 1 has the token 101; the model's are 0 to 100"), std::string::npos);
  EXPECT_NE(refused({{1}, {-1}}).find("the token -1"), std::string::npos);
  EXPECT_TRUE(watch.steps.empty());
  // The last token is not read.
  const std::vector<ScoreRequest> full = {{Tokens(200), Tokens(57)}};
  EXPECT_TRUE(ScoreAll(*engine, full, {}).has_value());
  EXPECT_TRUE(ScoreAll(*engine, {}, {})->empty());
}

TEST(Scorer, StopsWhenAskedAndSaysHowFarItIs) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(256, 32));
  std::vector<ScoreRequest> requests;
  for (uint32_t i = 0; i < 10; ++i) requests.push_back({Tokens(40, i), Tokens(10, i)});
  ScoreCallbacks callbacks;
  std::vector<size_t> done;
  callbacks.progress = [&](size_t count, size_t total) {
    EXPECT_EQ(total, 10u);
    EXPECT_GT(count, done.empty() ? 0 : done.back());
    done.push_back(count);
  };
  EXPECT_TRUE(ScoreAll(*engine, requests, callbacks).has_value());
  EXPECT_EQ(done.back(), 10u);
  EXPECT_GT(done.size(), 2u);

  const StepWatch watch(engine->decoder());
  callbacks.progress = {};
  callbacks.stop = [&] { return watch.steps.size() == 3; };
  EXPECT_FALSE(ScoreAll(*engine, requests, callbacks).has_value());
  EXPECT_EQ(watch.steps.size(), 3u);
  EXPECT_EQ(engine->cache().free_pages(), engine->cache().num_pages());
}

TEST(Scorer, AModelThatGivesNoNumbersIsRefused) {
  auto model = std::make_unique<FakeModel>();
  auto* const norm = const_cast<uint8_t*>(model->Find("model.norm.weight")->data);
  const float nan = std::nanf("");
  std::memcpy(norm, &nan, sizeof(nan));
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(256), std::move(model));
  const std::vector<ScoreRequest> requests = {{Tokens(10), Tokens(5)}};
  EXPECT_NE(Refusal([&] { ScoreAll(*engine, requests, {}); }).find("finite"), std::string::npos);
}

}  // namespace
}  // namespace phsa
