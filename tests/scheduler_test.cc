#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <new>
#include <numeric>
#include <regex>
#include <stdexcept>

#include "engine/prefill_pace.h"
#include "failing_backend.h"
#include "fake_engine.h"
#include "refusal.h"
#include "test_backend.h"

namespace phsa {
namespace {

GenerateOptions Greedy(int32_t max_tokens) {
  GenerateOptions options;
  options.max_tokens = max_tokens;
  options.sampler.temperature = 0;
  return options;
}

GenerateOptions Sampled(int32_t max_tokens, uint64_t seed) {
  GenerateOptions options;
  options.max_tokens = max_tokens;
  options.sampler = {
      .temperature = 1, .top_k = 0, .top_p = 0.95f, .min_p = 0, .repetition_penalty = 1.1f, .seed = seed};
  return options;
}

Request MakeRequest(std::vector<int32_t> prompt, GenerateOptions options) {
  Request request;
  request.prompt = std::move(prompt);
  request.options = std::move(options);
  return request;
}

GenerateResult Lone(Engine& engine, const Request& request) {
  return Session(engine).Generate(request.prompt, request.options, {});
}

void ExpectSameAnswer(const GenerateResult& result, const GenerateResult& expected) {
  EXPECT_EQ(result.tokens, expected.tokens);
  EXPECT_EQ(result.text, expected.text);
  EXPECT_STREQ(Name(result.reason), Name(expected.reason));
  EXPECT_EQ(result.prompt_tokens, expected.prompt_tokens);
  if (result.reused_tokens == 0) {
    EXPECT_EQ(result.tokens_read.read, expected.tokens_read.read);
    EXPECT_EQ(result.tokens_read.dense, expected.tokens_read.dense);
  }
}

// Prompts of all lengths, some with a common beginning; greedy and sampled; answers that end in all ways.
std::vector<Request> MixedRequests(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Request> requests;
  const std::vector<int32_t> beginning = Tokens(140, 50);
  for (uint32_t i = 0; i < 14; ++i) {
    std::vector<int32_t> prompt = Tokens(1 + random() % (i % 4 == 0 ? 400 : 60), random());
    if (i % 3 == 0) prompt = Joined(beginning, prompt);
    const auto max_tokens = static_cast<int32_t>(i == 5 ? 1 : 5 + random() % 40);
    requests.push_back(MakeRequest(prompt, i % 2 == 0 ? Greedy(max_tokens) : Sampled(max_tokens, i)));
    requests.back().options.ignore_eos = i % 5 == 0;
    if (i % 4 == 1) requests.back().options.stops = {"a", "x5"};
  }
  return requests;
}

std::unique_ptr<FakeModel> ModelWithEnds() {
  auto model = std::make_unique<FakeModel>();
  model->config_for_test().eos_ids = {3, 40, kEnd};
  return model;
}

TEST(Scheduler, AnswersAreThoseOfLoneSessions) {
  std::map<StopReason, int> reasons;
  for (const Policy policy : {Policy::kDense, Policy::kPhsa, Policy::kInfllm2_64}) {
    for (const int32_t chunk : {5, 64, 512}) {
      EngineOptions options = FakeOptions(640, chunk, SmallSettings(policy, 1));
      options.cache_tokens = 4096;
      const std::unique_ptr<Engine> engine = LoadedEngine(options, ModelWithEnds());
      const std::vector<Request> requests = MixedRequests(21);
      std::vector<GenerateResult> expected;
      expected.reserve(requests.size());
      for (const Request& request : requests) expected.push_back(Lone(*engine, request));
      for (const int32_t max_running : {1, 3, 16}) {
        std::vector<Request> watched = requests;
        std::vector<std::string> texts(requests.size());
        for (size_t i = 0; i < watched.size(); ++i) {
          watched[i].text = [&texts, i](std::string_view text) { texts[i] += text; };
        }
        const StepWatch watch(engine->decoder());
        const std::vector<GenerateResult> results = GenerateAll(*engine, watched, max_running);
        ASSERT_EQ(results.size(), requests.size());
        for (size_t i = 0; i < results.size(); ++i) {
          SCOPED_TRACE(std::string(Name(policy)) + " " + std::to_string(chunk) + " " + std::to_string(i));
          ExpectSameAnswer(results[i], expected[i]);
          EXPECT_EQ(texts[i], results[i].text);
          EXPECT_GT(results[i].prefill_seconds, 0);
          ++reasons[results[i].reason];
        }
        for (const auto& step : watch.steps) {
          EXPECT_LE(StepWatch::Rows(step), chunk);
          EXPECT_LE(step.size(), static_cast<size_t>(max_running));
        }
        EXPECT_EQ(engine->cache().free_pages(), engine->cache().num_pages());
      }
    }
  }
  EXPECT_GT(reasons[StopReason::kEndOfText], 0);
  EXPECT_GT(reasons[StopReason::kStopString], 0);
  EXPECT_GT(reasons[StopReason::kMaxTokens], 0);
}

TEST(Scheduler, TextsFollowTheirGrammarsInBatchesAndAlone) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(640), ModelWithEnds());
  const auto grammar = CompileGbnf("root ::= word (\", \" word)* \".\"\nword ::= [a-fx] [a-z0-9é]{1,6}", "grammar");
  const std::regex whole("[a-fx]([a-z0-9]|é){1,6}(, [a-fx]([a-z0-9]|é){1,6})*\\.");
  const auto endless = CompileGbnf("root ::= [a-z ]*", "grammar");
  std::vector<Request> requests = MixedRequests(5);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].options.stops.clear();
    if (i % 3 != 2) requests[i].options.grammar = i % 6 == 4 ? endless : grammar;
    if (i % 4 == 3) requests[i].options.log_probabilities = 2;
    if (i % 4 == 1) requests[i].options.sampler.top_k = 10;
    requests[i].options.max_tokens = static_cast<int32_t>(10 + 10 * i);
  }
  std::vector<GenerateResult> expected;
  for (const Request& request : requests) expected.push_back(Lone(*engine, request));
  std::vector<std::string> streamed(requests.size());
  std::vector<Request> watched = requests;
  for (size_t i = 0; i < watched.size(); ++i) {
    watched[i].text = [&streamed, i](std::string_view text) { streamed[i] += text; };
  }
  const std::vector<GenerateResult> results = GenerateAll(*engine, watched, 5);
  int ended = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectSameAnswer(results[i], expected[i]);
    EXPECT_EQ(streamed[i], results[i].text);
    if (requests[i].options.log_probabilities) {
      EXPECT_EQ(results[i].log_probabilities.size(), results[i].tokens.size());
    }
    if (requests[i].options.grammar == grammar) {
      const bool is_whole = std::regex_match(results[i].text, whole);
      EXPECT_EQ(is_whole, results[i].reason == StopReason::kEndOfText) << results[i].text;
      ended += is_whole ? 1 : 0;
    } else if (requests[i].options.grammar == endless) {
      EXPECT_TRUE(std::regex_match(results[i].text, std::regex("[a-z ]*"))) << results[i].text;
    }
    if (requests[i].options.grammar != nullptr && results[i].reason != StopReason::kEndOfText) {
      EXPECT_EQ(results[i].reason, StopReason::kMaxTokens);
    }
  }
  EXPECT_GT(ended, 2);
}

TEST(Scheduler, ATextMayEndWhereItsGrammarMayAndNowhereElse) {
  auto model = ModelWithEnds();
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(640), std::move(model));
  // Whatever the model would like: an end is the only way on, or none is.
  Request request = MakeRequest(Tokens(20, 1), Greedy(50));
  request.options.grammar = CompileGbnf("root ::= \"abc\" [a-c]{3} \"!\"?", "grammar");
  // This vocabulary cannot write "!".
  const GenerateResult result = Lone(*engine, request);
  EXPECT_EQ(result.text.substr(0, 3), "abc");
  EXPECT_EQ(result.text.size(), 6u);
  EXPECT_EQ(result.reason, StopReason::kEndOfText);
  request.options.grammar = CompileGbnf("root ::= \"ab\" \"!\"", "grammar");
  EXPECT_NE(Refusal([&] { Lone(*engine, request); }).find("no token of the model can write"), std::string::npos);
  // Where others are in work, that one ends alone.
  std::vector<Request> both = {request, MakeRequest(Tokens(9, 2), Greedy(9))};
  Scheduler scheduler(*engine, 2);
  const int64_t bad = scheduler.Add(both[0]), good = scheduler.Add(both[1]);
  while (scheduler.Step()) {
  }
  EXPECT_THROW(scheduler.Take(bad), Error);
  EXPECT_EQ(scheduler.Take(good)->tokens, Lone(*engine, both[1]).tokens);
  // A stop token is an end like the model's own, and comes no earlier.
  request.options.grammar = CompileGbnf("root ::= [a-b] \"eee\" \"a\"*", "grammar");
  request.options.stop_tokens = {0};
  request.options.ignore_eos = true;
  EXPECT_EQ(Lone(*engine, request).reason, StopReason::kStopToken);
  EXPECT_EQ(Lone(*engine, request).text, "beee");
}

TEST(Scheduler, RequestsJoinAndLeaveBetweenSteps) {
  EngineOptions options = FakeOptions(640, 64);
  options.cache_tokens = 4096;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  const Request early = MakeRequest(Tokens(30, 1), Greedy(40)), late = MakeRequest(Tokens(50, 2), Sampled(10, 4));
  const GenerateResult expected_early = Lone(*engine, early), expected_late = Lone(*engine, late);
  Scheduler scheduler(*engine, 4);
  EXPECT_FALSE(scheduler.Step());
  const int64_t first = scheduler.Add(early);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(scheduler.Step());
  const int64_t second = scheduler.Add(late);
  EXPECT_EQ(scheduler.waiting(), 1);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(scheduler.Step());
  EXPECT_EQ(scheduler.running(), 1) << "one is done, the other goes on";
  const std::optional<GenerateResult> done = scheduler.Take(second);
  ASSERT_TRUE(done.has_value());
  ExpectSameAnswer(*done, expected_late);
  EXPECT_FALSE(scheduler.Take(second).has_value()) << "once";
  EXPECT_FALSE(scheduler.Take(first).has_value()) << "not yet";
  while (scheduler.Step()) {
  }
  ExpectSameAnswer(*scheduler.Take(first), expected_early);
}

TEST(Scheduler, ALongPromptHoldsNobodyUp) {
  EngineOptions options = FakeOptions(1024, 32);
  options.cache_tokens = 4096;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  Scheduler scheduler(*engine, 4);  // unhurried
  const int64_t answering = scheduler.Add(MakeRequest(Tokens(10, 1), Greedy(12)));
  EXPECT_TRUE(scheduler.Step());
  const int64_t long_prompt = scheduler.Add(MakeRequest(Tokens(900, 2), Greedy(2)));
  const int64_t short_prompt = scheduler.Add(MakeRequest(Tokens(20, 3), Greedy(2)));
  StepWatch watch(engine->decoder());
  for (int i = 0; i < 11; ++i) EXPECT_TRUE(scheduler.Step());
  EXPECT_TRUE(scheduler.Take(answering).has_value()) << "a token in every step";
  EXPECT_TRUE(scheduler.Take(short_prompt).has_value()) << "it has its share of the rows";
  EXPECT_EQ(watch.steps.front(), (std::vector<int32_t>{1, 15, 16}));
  for (const auto& step : watch.steps) EXPECT_EQ(StepWatch::Rows(step), 32) << "no row is left unused";
  while (scheduler.Step()) {
  }
  EXPECT_TRUE(scheduler.Take(long_prompt).has_value());
}

// A step takes `fixed` seconds and `each` for every token of a prompt. Returns the tokens of its last steps.
size_t Settled(double fixed, double each, size_t first, size_t most) {
  PrefillPace pace(0.25);
  size_t tokens = first;
  for (int i = 0; i < 120; ++i) {
    pace.Measured(tokens, fixed + each * static_cast<double>(tokens));
    tokens = pace.Tokens(most);
  }
  return tokens;
}

TEST(PrefillPace, ComesToRestWhereAStepTakesItsTimeFromEitherSide) {
  for (const double fixed : {0.0, 0.02, 0.15}) {
    for (const double each : {0.0001, 0.0005, 0.002}) {
      const auto ideal = static_cast<size_t>((PrefillPace::kAim * 0.25 - fixed) / each);
      for (const size_t first : {size_t{1}, size_t{100}, size_t{8192}}) {
        const size_t tokens = Settled(fixed, each, first, 100'000);
        EXPECT_LE(tokens, ideal + 1) << fixed << " " << each << " " << first;
        EXPECT_GE(tokens + 3, ideal) << fixed << " " << each << " " << first;
      }
    }
  }
}

TEST(PrefillPace, APromptGoesOnHoweverSlowTheMachineAndNoFurtherThanAStepCan) {
  EXPECT_EQ(Settled(3, 1, 512, 512), PrefillPace::kLeastTokens);
  EXPECT_EQ(Settled(3, 1, 512, 5), 5u);
  EXPECT_EQ(Settled(0.001, 0.0001, 1, 512), 512u);
  EXPECT_EQ(PrefillPace(0.25).Tokens(512), 512u) << "nothing is known yet";
  PrefillPace unhurried(0);
  unhurried.Measured(512, 100);
  EXPECT_EQ(unhurried.Tokens(512), 512u);
  PrefillPace pace(0.25);
  pace.Measured(512, 1);
  pace.Measured(0, 3);  // answers alone say nothing of prompts
  EXPECT_EQ(pace.Tokens(512), static_cast<size_t>(PrefillPace::kAim * 128));
}

TEST(PrefillPace, OneStepThatWasFastByChanceDoesNotMakeTheNextTooLong) {
  PrefillPace pace(0.25);
  pace.Measured(100, 0.2);
  const size_t tokens = pace.Tokens(512);
  pace.Measured(tokens, 0.05);
  EXPECT_LE(pace.Tokens(512), 110u);
  pace.Measured(100, 0.05);
  EXPECT_EQ(pace.Tokens(512), static_cast<size_t>(PrefillPace::kAim * 500)) << "twice is no chance";
  pace.Measured(400, 0.8);
  EXPECT_LE(pace.Tokens(512), 110u) << "a slow one counts at once";
}

// Time that passes as the decoder reads: so much for each token.
class ReadingClock {
 public:
  ReadingClock(Decoder& decoder, double seconds_per_token) : decoder_(decoder) {
    decoder.Observe([this, seconds_per_token](const LayerAttention& attention) {
      if (attention.layer != 0) return;
      const auto& rows = attention.q_lens;
      steps.push_back(seconds_per_token * std::accumulate(rows.begin(), rows.end(), 0));
      now += steps.back();
    });
  }
  ~ReadingClock() { decoder_.Observe({}); }

  double now = 0;
  std::vector<double> steps;  // how long each took

 private:
  Decoder& decoder_;
};

TEST(Scheduler, WhileSomebodyAnswersPromptsAreReadInStepsThatTakeTheirTime) {
  EngineOptions options = FakeOptions(2048, 512);
  options.cache_tokens = 8192;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  Request answering = MakeRequest(Tokens(100, 1), Sampled(30, 4));
  answering.options.ignore_eos = true;
  const Request reading = MakeRequest(Tokens(1500, 2), Greedy(4)), also = MakeRequest(Tokens(700, 3), Greedy(4));
  const std::vector<GenerateResult> expected = {Lone(*engine, answering), Lone(*engine, reading), Lone(*engine, also)};
  ReadingClock clock(engine->decoder(), 0.005);  // 50 tokens in a quarter of a second
  Scheduler scheduler(*engine, 4, {.step_seconds = 0.25, .clock = [&] { return clock.now; }});
  const int64_t first = scheduler.Add(answering);
  scheduler.Step();
  EXPECT_EQ(clock.steps, std::vector<double>{0.5}) << "nobody waits: as much as there is";
  const int64_t second = scheduler.Add(reading), third = scheduler.Add(also);
  clock.steps.clear();
  std::optional<GenerateResult> answer;
  while (!answer) {
    scheduler.Step();
    answer = scheduler.Take(first);
  }
  EXPECT_EQ(clock.steps.size(), 29u) << "a token in every step";
  for (const double seconds : clock.steps) {
    EXPECT_LE(seconds, 0.26);
    EXPECT_GE(seconds, 0.15);
  }
  clock.steps.clear();
  scheduler.Step();
  EXPECT_EQ(clock.steps.front(), 512 * 0.005) << "nobody waits any more";
  while (scheduler.Step()) {
  }
  ExpectSameAnswer(*answer, expected[0]);
  ExpectSameAnswer(*scheduler.Take(second), expected[1]);
  ExpectSameAnswer(*scheduler.Take(third), expected[2]);
}

TEST(Scheduler, ACancelledRequestLeavesTheOthersAlone) {
  EngineOptions options = FakeOptions(640, 64);
  options.cache_tokens = 4096;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  std::vector<Request> requests;
  std::vector<GenerateResult> expected;
  for (uint32_t i = 0; i < 4; ++i) {
    requests.push_back(MakeRequest(Tokens(20 + i, i), Sampled(30, i)));
    expected.push_back(Lone(*engine, requests.back()));
  }
  Scheduler scheduler(*engine, 3);
  std::vector<int64_t> ids;
  ids.reserve(requests.size());
  for (const Request& request : requests) ids.push_back(scheduler.Add(request));
  for (int i = 0; i < 8; ++i) scheduler.Step();
  scheduler.Cancel(ids[1]);
  scheduler.Cancel(ids[3]);  // still waiting
  scheduler.Cancel(12345);
  while (scheduler.Step()) {
  }
  ExpectSameAnswer(*scheduler.Take(ids[0]), expected[0]);
  ExpectSameAnswer(*scheduler.Take(ids[2]), expected[2]);
  const std::optional<GenerateResult> cancelled = scheduler.Take(ids[1]), never_began = scheduler.Take(ids[3]);
  EXPECT_EQ(cancelled->reason, StopReason::kInterrupted);
  EXPECT_EQ(cancelled->tokens, std::vector<int32_t>(expected[1].tokens.begin(), expected[1].tokens.begin() + 8));
  EXPECT_EQ(expected[1].text.rfind(cancelled->text, 0), 0u);
  EXPECT_EQ(never_began->reason, StopReason::kInterrupted);
  EXPECT_TRUE(never_began->tokens.empty());
}

TEST(Scheduler, StopIsAskedBeforeEveryStepAlsoOfThoseThatWait) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(640, 16));
  const StepWatch watch(engine->decoder());
  Scheduler scheduler(*engine, 1);
  Request reading = MakeRequest(Tokens(200, 1), Greedy(5)), waiting = MakeRequest(Tokens(10, 2), Greedy(5));
  reading.stop = [&] { return watch.steps.size() == 3; };
  waiting.stop = [&] { return watch.steps.size() == 2; };
  const int64_t first = scheduler.Add(reading), second = scheduler.Add(waiting);
  EXPECT_TRUE(scheduler.Step());
  EXPECT_TRUE(scheduler.Step());
  EXPECT_TRUE(scheduler.Step());
  EXPECT_EQ(scheduler.Take(second)->reason, StopReason::kInterrupted);
  EXPECT_FALSE(scheduler.Step());
  EXPECT_EQ(scheduler.Take(first)->reason, StopReason::kInterrupted);
  EXPECT_EQ(watch.steps.size(), 3u);
}

TEST(Scheduler, AnswersEndWhereTheContextIsFull) {
  EngineOptions options = FakeOptions(256, 64);
  options.cache_tokens = 1024;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  std::vector<Request> requests;
  std::vector<GenerateResult> expected;
  for (uint32_t i = 0; i < 3; ++i) {
    requests.push_back(MakeRequest(Tokens(235 + 10 * i, i), Greedy(1 << 30)));
    expected.push_back(Lone(*engine, requests.back()));
    EXPECT_EQ(expected.back().reason, StopReason::kContextFull);
    EXPECT_EQ(expected.back().tokens.size(), 22 - 10 * i);
  }
  const std::vector<GenerateResult> results = GenerateAll(*engine, requests, 3);
  for (size_t i = 0; i < 3; ++i) ExpectSameAnswer(results[i], expected[i]);
}

TEST(Scheduler, WhatAFinishedTextSharesIsNotReadAgain) {
  for (const Policy policy : {Policy::kDense, Policy::kInfllm2_64}) {
    EngineOptions options = FakeOptions(1024, 512, SmallSettings(policy, 1));
    options.cache_tokens = 8192;
    const std::unique_ptr<Engine> engine = LoadedEngine(options);
    const Request question = MakeRequest(Tokens(256, 1), Greedy(70));
    const GenerateResult answer = Lone(*engine, question);
    // As in a conversation: the text so far, and more; and another one from the same beginning.
    const Request more = MakeRequest(Joined(Joined(question.prompt, answer.tokens), Tokens(150, 2)), Sampled(80, 1));
    const Request other = MakeRequest(Joined(question.prompt, Tokens(200, 3)), Sampled(80, 2));
    const Request same = MakeRequest(question.prompt, Greedy(70));
    const GenerateResult expected_more = Lone(*engine, more), expected_other = Lone(*engine, other);
    Scheduler scheduler(*engine, 4);
    const int64_t first = scheduler.Add(question);
    while (scheduler.Step()) {
    }
    ExpectSameAnswer(*scheduler.Take(first), answer);
    const StepWatch watch(engine->decoder());
    const std::vector<int64_t> ids = {scheduler.Add(more), scheduler.Add(other), scheduler.Add(same)};
    scheduler.Step();
    // All but the answer's last token was read; the last token of a prompt is read again, for its logits.
    EXPECT_EQ(StepWatch::Rows(watch.steps.front()), 151 + 200 + 1);
    while (scheduler.Step()) {
    }
    const GenerateResult result_more = *scheduler.Take(ids[0]), result_other = *scheduler.Take(ids[1]);
    const GenerateResult result_same = *scheduler.Take(ids[2]);
    EXPECT_EQ(result_more.reused_tokens, 256 + 69);
    EXPECT_EQ(result_other.reused_tokens, 256);
    EXPECT_EQ(result_same.reused_tokens, 255);
    ExpectSameAnswer(result_more, expected_more);
    ExpectSameAnswer(result_other, expected_other);
    ExpectSameAnswer(result_same, answer);
    EXPECT_LT(result_more.tokens_read.dense, expected_more.tokens_read.dense);
  }
}

TEST(Scheduler, ABeginningThatSeveralPromptsShareIsReadOnce) {
  EngineOptions options = FakeOptions(1024, 64);
  options.cache_tokens = 8192;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  const std::vector<int32_t> beginning = Tokens(300, 1);
  std::vector<Request> requests;
  std::vector<GenerateResult> expected;
  for (uint32_t i = 0; i < 4; ++i) {
    const std::vector<int32_t> own = {static_cast<int32_t>(i)};  // here they part
    requests.push_back(MakeRequest(Joined(Joined(beginning, own), Tokens(19, 10 + i)), Greedy(5)));
    expected.push_back(Lone(*engine, requests.back()));
  }
  const StepWatch watch(engine->decoder());
  const std::vector<GenerateResult> results = GenerateAll(*engine, requests, 4);
  for (size_t i = 0; i < 4; ++i) {
    ExpectSameAnswer(results[i], expected[i]);
    EXPECT_EQ(results[i].reused_tokens, i == 0 ? 0 : 300);
  }
  EXPECT_EQ(watch.all_rows(), 300 + 4 * 20 + 4 * 4);
}

TEST(Scheduler, TheOneThatOthersWaitForMayBeCancelled) {
  EngineOptions options = FakeOptions(1024, 64);
  options.cache_tokens = 8192;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  const std::vector<int32_t> beginning = Tokens(300, 1);
  const Request first = MakeRequest(Joined(beginning, Tokens(20, 2)), Greedy(5));
  const Request second = MakeRequest(Joined(beginning, Tokens(30, 3)), Greedy(5));
  const GenerateResult expected = Lone(*engine, second);
  Scheduler scheduler(*engine, 4);
  const int64_t leader = scheduler.Add(first), follower = scheduler.Add(second);
  scheduler.Step();
  scheduler.Step();
  scheduler.Cancel(leader);
  while (scheduler.Step()) {
  }
  const GenerateResult result = *scheduler.Take(follower);
  ExpectSameAnswer(result, expected);
  EXPECT_EQ(result.reused_tokens, 128) << "two chunks";
}

TEST(Scheduler, WhatDoesNotFitIntoTheCacheWaitsItsTurn) {
  for (const Policy policy : {Policy::kDense, Policy::kInfllm2_64}) {
    // Four pages: one request of 400 tokens, or two of 250.
    const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(512, 64, SmallSettings(policy, 1)));
    const std::vector<int32_t> beginning = Tokens(130, 5);
    std::vector<Request> requests;
    std::vector<GenerateResult> expected;
    for (uint32_t i = 0; i < 9; ++i) {
      const std::vector<int32_t> prompt = Tokens(i % 3 == 0 ? 380 : 90, i);
      requests.push_back(MakeRequest(i % 2 == 0 ? prompt : Joined(beginning, prompt), Sampled(30, i)));
      if (requests.back().prompt.size() > 400) requests.back().prompt.resize(400);
      expected.push_back(Lone(*engine, requests.back()));
    }
    const StepWatch watch(engine->decoder());
    const std::vector<GenerateResult> results = GenerateAll(*engine, requests, 8);
    for (size_t i = 0; i < results.size(); ++i) ExpectSameAnswer(results[i], expected[i]);
    size_t most = 0;
    for (const auto& step : watch.steps) most = std::max(most, step.size());
    EXPECT_GE(most, 2u);
    EXPECT_LT(most, 5u);
    EXPECT_EQ(engine->cache().free_pages(), 4);
  }
}

TEST(Scheduler, FinishedTextsMakeRoomTheOldestFirst) {
  // Eight pages; each request takes two, and keeps them until they are needed.
  EngineOptions options = FakeOptions(512, 512);
  options.cache_tokens = 1024;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  Scheduler scheduler(*engine, 4);
  const auto run = [&](uint32_t text) {
    const int64_t id = scheduler.Add(MakeRequest(Tokens(200, text), Greedy(3)));
    while (scheduler.Step()) {
    }
    return scheduler.Take(id)->reused_tokens;
  };
  for (uint32_t text = 0; text < 4; ++text) EXPECT_EQ(run(text), 0);
  EXPECT_EQ(engine->cache().free_pages(), 0);
  EXPECT_EQ(run(0), 199);  // now text 1 is the oldest
  EXPECT_EQ(run(4), 0);
  for (const uint32_t text : {2, 3, 0}) EXPECT_EQ(run(text), 199) << text;
  EXPECT_EQ(run(1), 0);
}

TEST(Scheduler, WhatSessionsRefuseIsRefused) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(256));
  Scheduler scheduler(*engine, 2);
  const auto refused = [&](Request request) { return Refusal([&] { scheduler.Add(std::move(request)); }); };
  const std::string message = refused(MakeRequest(Tokens(256), Greedy(5)));
  EXPECT_NE(message.find("256 tokens"), std::string::npos) << message;
  EXPECT_NE(message.find("holds 256"), std::string::npos) << message;
  EXPECT_NE(refused(MakeRequest({}, Greedy(5))).find("no tokens"), std::string::npos);
  EXPECT_NE(refused(MakeRequest({5, 101}, Greedy(5))).find("the token 101"), std::string::npos);
  GenerateOptions hot = Greedy(5);
  hot.sampler.temperature = -1;
  EXPECT_NE(refused(MakeRequest(Tokens(5), hot)).find("temperature"), std::string::npos);
  EXPECT_EQ(scheduler.waiting(), 0);
  EXPECT_NE(Refusal([&] { Scheduler(*engine, 0); }).find("allowed: 1"), std::string::npos);
  // Before any work, however far behind it is.
  const StepWatch watch(engine->decoder());
  Refusal([&] { GenerateAll(*engine, {MakeRequest(Tokens(5), Greedy(5)), MakeRequest({}, Greedy(5))}, 1); });
  EXPECT_TRUE(watch.steps.empty());
}

TEST(Scheduler, WhatGoesWrongWithOneRequestEndsThatOneOnly) {
  EngineOptions options = FakeOptions(640, 64);
  options.cache_tokens = 4096;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  const Request good = MakeRequest(Tokens(20, 1), Greedy(30));
  const GenerateResult expected = Lone(*engine, good);
  Request bad_text = MakeRequest(Tokens(20, 2), Greedy(30)), bad_stop = MakeRequest(Tokens(20, 3), Greedy(30));
  bad_text.text = [](std::string_view) { throw std::runtime_error("the reader is gone"); };
  bad_stop.stop = [calls = 0]() mutable -> bool {
    if (++calls > 5) throw std::runtime_error("nobody is there");
    return false;
  };
  Scheduler scheduler(*engine, 3);
  const int64_t first = scheduler.Add(bad_text), second = scheduler.Add(good), third = scheduler.Add(bad_stop);
  while (scheduler.Step()) {
  }
  EXPECT_THROW(scheduler.Take(first), std::runtime_error);
  EXPECT_FALSE(scheduler.Take(first).has_value());
  EXPECT_THROW(scheduler.Take(third), std::runtime_error);
  ExpectSameAnswer(*scheduler.Take(second), expected);
  EXPECT_THROW(GenerateAll(*engine, {good, bad_text}, 2), std::runtime_error);
}

// An engine whose steps fail as the test says.
struct FailingEngine {
  explicit FailingEngine(const EngineOptions& options)
      : engine(std::make_unique<FakeModel>(), SmallTokenizer(), options) {
    auto owned = std::make_unique<FailingBackend>(
        TestBackend(engine.source(), WeightsMode::kF32, PHSA_F32, options.chunk, engine.threads()));
    backend = owned.get();
    engine.Use(std::move(owned));
  }
  Engine engine;
  FailingBackend* backend = nullptr;
};

TEST(Scheduler, ARequestThatCannotBeReadEndsAloneAndChangesNoOther) {
  using Where = FailingBackend::Where;
  EngineOptions options = FakeOptions(640, 64);
  options.cache_tokens = 8192;
  options.other_attention = true;
  for (const Where where : {Where::kBegin, Where::kLayer, Where::kLogits}) {
    // In reading its prompt, and in writing its answer.
    for (const int32_t from : {0, 90}) {
      SCOPED_TRACE(std::to_string(static_cast<int>(where)) + " " + std::to_string(from));
      FailingEngine failing(options);
      Engine& engine = failing.engine;
      std::vector<Request> requests;
      std::vector<GenerateResult> expected;
      for (uint32_t i = 0; i < 7; ++i) {
        // The dice of the others must not be thrown twice.
        requests.push_back(MakeRequest(Tokens(30 + 9 * i, i), Sampled(20 + static_cast<int32_t>(i), i)));
        requests.back().options.ignore_eos = true;
        requests.back().options.log_probabilities = 2;
        expected.push_back(Lone(engine, requests.back()));
      }
      requests[3].options.prompt_log_probabilities = true;
      requests[3].options.sampler.temperature = 0;
      expected[3] = GenerateAll(engine, {requests[3]}, 1).front();
      Request bad = MakeRequest(Tokens(85, 40), Greedy(40));
      bad.options.ignore_eos = true;
      LayerSettings settings;
      settings.base = SmallSettings(Policy::kStreaming, 0);
      bad.attention = engine.MakeAttention(settings);  // by which its steps are known
      const Request before = MakeRequest(Tokens(300, 50), Greedy(3));

      Scheduler scheduler(engine, 8);
      const int64_t finished = scheduler.Add(before);
      while (scheduler.Step()) {
      }
      EXPECT_TRUE(scheduler.Take(finished));
      std::vector<int64_t> ids;
      int64_t bad_id = 0;
      for (size_t i = 0; i < requests.size(); ++i) {
        if (i == 4) bad_id = scheduler.Add(bad);
        ids.push_back(scheduler.Add(requests[i]));
      }
      int failures = 0;
      failing.backend->where = where;
      failing.backend->fails = [&](const StepRows& rows) {
        const bool fails = std::ranges::any_of(rows.groups, [&](const StepGroup& group) {
          return group.settings == &bad.attention->settings && rows.kv_lens[group.first_item] > from;
        });
        failures += fails ? 1 : 0;
        return fails;
      };
      while (scheduler.Step()) {
      }
      EXPECT_EQ(failures, 4) << "with seven others, with three, with one, alone";
      EXPECT_THROW(scheduler.Take(bad_id), std::bad_alloc);
      for (size_t i = 0; i < ids.size(); ++i) {
        const std::optional<GenerateResult> result = scheduler.Take(ids[i]);
        ASSERT_TRUE(result) << i;
        ExpectSameAnswer(*result, expected[i]);
        ASSERT_EQ(result->log_probabilities.size(), expected[i].log_probabilities.size());
        for (size_t t = 0; t < result->log_probabilities.size(); ++t) {
          EXPECT_EQ(result->log_probabilities[t].value, expected[i].log_probabilities[t].value);
        }
        ASSERT_EQ(result->prompt_log_probabilities.size(), expected[i].prompt_log_probabilities.size());
        for (size_t t = 0; t < result->prompt_log_probabilities.size(); ++t) {
          EXPECT_EQ(result->prompt_log_probabilities[t].value, expected[i].prompt_log_probabilities[t].value);
        }
      }
      // What was read before is still there.
      const int64_t again = scheduler.Add(before);
      while (scheduler.Step()) {
      }
      EXPECT_EQ(scheduler.Take(again)->reused_tokens, 299);
    }
  }
}

TEST(Scheduler, ADeviceThatFailsLosesNothingIfItWorksAgain) {
  using Where = FailingBackend::Where;
  for (const Where where : {Where::kLayer, Where::kLogits}) {
    FailingEngine failing(FakeOptions(512, 64));
    const std::vector<Request> requests = {MakeRequest(Tokens(100, 1), Sampled(80, 2)),
                                           MakeRequest(Tokens(90, 2), Sampled(80, 3))};
    const GenerateResult expected[] = {Lone(failing.engine, requests[0]), Lone(failing.engine, requests[1])};
    Scheduler scheduler(failing.engine, 2);
    const int64_t ids[] = {scheduler.Add(requests[0]), scheduler.Add(requests[1])};
    failing.backend->where = where;
    failing.backend->fail = [] { throw Error(PHSA_IO, "the device is gone"); };
    for (int i = 0; i < 20; ++i) {
      failing.backend->fails = [&](const StepRows&) { return i % 3 == 2; };
      if (i % 3 == 2) {
        EXPECT_THROW(scheduler.Step(), Error);
      } else {
        EXPECT_TRUE(scheduler.Step());
      }
    }
    EXPECT_EQ(scheduler.running(), 2);
    failing.backend->fails = {};
    while (scheduler.Step()) {
    }
    for (int i = 0; i < 2; ++i) ExpectSameAnswer(*scheduler.Take(ids[i]), expected[i]);
  }
}

TEST(Scheduler, ACacheThatOthersFilledIsAnErrorAndNoEndlessWait) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(512, 64));
  Sequence intruder(engine->cache());
  intruder.Append(Tokens(256));
  Scheduler scheduler(*engine, 2);
  const int64_t id = scheduler.Add(MakeRequest(Tokens(300), Greedy(10)));
  EXPECT_FALSE(scheduler.Step());
  const std::string message = Refusal([&] { scheduler.Take(id); });
  EXPECT_NE(message.find("309 tokens"), std::string::npos) << message;
  EXPECT_NE(message.find("room for 256"), std::string::npos) << message;
}

void ExpectSameLogProbabilities(const std::vector<TokenLogProbability>& values,
                                const std::vector<TokenLogProbability>& expected) {
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(values[i].value, expected[i].value) << i;
    EXPECT_EQ(values[i].top, expected[i].top) << i;
  }
}

// Answers that go on until the context is full, or nearly, with all that an answer remembers from token to token.
std::vector<Request> EndlessRequests() {
  std::vector<Request> requests;
  const auto endless = CompileGbnf("root ::= ([a-z]{3,5} \" \")*", "grammar");
  const std::vector<int32_t> beginning = Tokens(50, 50);
  for (uint32_t i = 0; i < 9; ++i) {
    std::vector<int32_t> prompt = Tokens(i == 4 ? 200 : 5 + 7 * i, i);
    if (i == 2 || i == 5 || i == 6) prompt = Joined(beginning, prompt);
    requests.push_back(MakeRequest(std::move(prompt), i % 4 == 0 ? Greedy(1 << 30) : Sampled(1 << 30, i)));
    GenerateOptions& options = requests.back().options;
    options.ignore_eos = true;
    if (i % 3 == 1) options.grammar = endless;
    if (i % 2 == 1) options.log_probabilities = 3;
    if (i == 3) options.max_tokens = 200;
    if (i == 4) options.stop_loops = true;
    if (i == 5) {
      options.sampler.frequency_penalty = 0.3f;
      options.sampler.presence_penalty = 0.5f;
      options.stops = {"nothing that comes", "x42x17"};
    }
    if (i == 7) options.prompt_log_probabilities = true;
  }
  return requests;
}

TEST(Scheduler, AnswersWhosePagesWereTakenGoOnAsIfNothingHadBeen) {
  int64_t preemptions = 0;
  for (const auto& [policy, chunk] : {std::pair(Policy::kDense, 64), {Policy::kPhsa, 5}, {Policy::kInfllm2_64, 64}}) {
    EngineOptions options = FakeOptions(512, chunk, SmallSettings(policy, 1));
    options.cache_tokens = 14 * kPageTokens;  // a text may come to four of them
    const std::unique_ptr<Engine> engine = LoadedEngine(options);
    const std::vector<Request> requests = EndlessRequests();
    std::vector<GenerateResult> expected;
    for (const Request& request : requests) {
      expected.push_back(request.options.prompt_log_probabilities ? GenerateAll(*engine, {request}, 1).front()
                                                                  : Lone(*engine, request));
    }
    for (const int32_t pages : {14, 7}) {
      SCOPED_TRACE(std::string(Name(policy)) + " " + std::to_string(pages));
      Sequence intruder(engine->cache());
      intruder.Append(Tokens(static_cast<size_t>((14 - pages) * kPageTokens)));
      Scheduler scheduler(*engine, 8);
      std::vector<std::string> streamed(requests.size());
      std::vector<std::vector<int32_t>> told(requests.size());
      std::vector<int64_t> ids;
      for (size_t i = 0; i < requests.size(); ++i) {
        Request request = requests[i];
        request.text = [&streamed, i](std::string_view text) { streamed[i] += text; };
        request.progress = [&told, i](const GenerateResult& so_far) {
          ASSERT_GE(so_far.tokens.size(), told[i].size());
          told[i].insert(told[i].end(), so_far.tokens.begin() + static_cast<std::ptrdiff_t>(told[i].size()),
                         so_far.tokens.end());
        };
        ids.push_back(scheduler.Add(std::move(request)));
      }
      while (scheduler.Step()) {
      }
      EXPECT_GT(scheduler.preemptions(), 0);
      preemptions += scheduler.preemptions();
      for (size_t i = 0; i < requests.size(); ++i) {
        SCOPED_TRACE(i);
        const std::optional<GenerateResult> result = scheduler.Take(ids[i]);
        ASSERT_TRUE(result);
        ExpectSameAnswer(*result, expected[i]);
        EXPECT_EQ(streamed[i], expected[i].text);
        EXPECT_EQ(told[i], expected[i].tokens);
        ExpectSameLogProbabilities(result->log_probabilities, expected[i].log_probabilities);
        ExpectSameLogProbabilities(result->prompt_log_probabilities, expected[i].prompt_log_probabilities);
      }
    }
    EXPECT_EQ(engine->cache().free_pages(), engine->cache().num_pages());
  }
  EXPECT_GT(preemptions, 8);
}

TEST(Scheduler, AnEmbeddingIsTheSameInChunksBesideOthersAndReadAgain) {
  EngineOptions options = FakeOptions(512, 512, SmallSettings(Policy::kPhsa, 1));
  options.cache_tokens = 14 * kPageTokens;
  const auto embed = [](uint32_t i) {
    Request request = MakeRequest(Tokens(i == 0 ? 1 : 90 * i, 7), Greedy(0));  // one begins as the others
    request.embed = true;
    return request;
  };
  std::vector<std::vector<float>> expected;
  const std::unique_ptr<Engine> whole = LoadedEngine(options);
  for (uint32_t i = 0; i < 5; ++i) {
    expected.push_back(GenerateAll(*whole, {embed(i)}, 1).front().embedding);
    ASSERT_EQ(expected.back().size(), static_cast<size_t>(whole->config().hidden));
    EXPECT_NEAR(std::inner_product(expected[i].begin(), expected[i].end(), expected[i].begin(), 0.0), 1, 1e-6);
    for (uint32_t j = 0; j < i; ++j) EXPECT_NE(expected[i], expected[j]);
  }
  options.chunk = 64;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  Scheduler scheduler(*engine, 16);
  for (const Request& request : EndlessRequests()) scheduler.Add(request);
  std::vector<int64_t> ids;
  for (int32_t step = 0; step < 900; ++step) {
    if (step % 100 == 50 && ids.size() < 10) ids.push_back(scheduler.Add(embed(static_cast<uint32_t>(ids.size()) % 5)));
    if (!scheduler.Step()) break;
  }
  while (scheduler.Step()) {
  }
  EXPECT_GT(scheduler.preemptions(), 0);
  ASSERT_GE(ids.size(), 5u);
  for (size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(scheduler.Take(ids[i])->embedding, expected[i % 5]) << i;
}

TEST(Scheduler, AHugeMaxTokensHoldsNobodyUpAndTheOldestNeverWaits) {
  EngineOptions options = FakeOptions(640, 64);
  options.cache_tokens = 12 * kPageTokens;  // an answer comes to five
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  std::vector<Request> requests;
  for (uint32_t i = 0; i < 5; ++i) {
    requests.push_back(MakeRequest(Tokens(60 + i, i), Sampled(i == 4 ? 10 : 1 << 30, i)));
    requests.back().options.ignore_eos = true;
  }
  std::vector<GenerateResult> expected;
  for (const Request& request : requests) expected.push_back(Lone(*engine, request));
  Scheduler scheduler(*engine, 8);
  std::vector<int64_t> ids;
  for (const Request& request : requests) ids.push_back(scheduler.Add(request));
  for (int i = 0; i < 14; ++i) scheduler.Step();
  EXPECT_EQ(scheduler.running(), 4) << "all began, and the small one has ended";
  const std::optional<GenerateResult> small = scheduler.Take(ids[4]);
  ASSERT_TRUE(small);
  ExpectSameAnswer(*small, expected[4]);
  size_t steps = 14;
  std::optional<GenerateResult> first;
  for (; !first; first = scheduler.Take(ids[0])) {
    ASSERT_TRUE(scheduler.Step());
    ++steps;
  }
  EXPECT_LE(steps, expected[0].tokens.size() + 5) << "a token in every step, beside those that its prompt took";
  ExpectSameAnswer(*first, expected[0]);
  EXPECT_GT(scheduler.preemptions(), 0);
  EXPECT_GT(scheduler.waiting(), 0);
  while (scheduler.Step()) {
  }
  for (size_t i = 1; i < 4; ++i) ExpectSameAnswer(*scheduler.Take(ids[i]), expected[i]);
}

TEST(Scheduler, OneWhosePagesWereTakenMayBeCancelledAndFailAsAnyOther) {
  EngineOptions options = FakeOptions(640, 64);
  options.cache_tokens = 768;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  Scheduler scheduler(*engine, 3);
  std::vector<int64_t> ids;
  std::vector<GenerateResult> expected;
  bool fails = false;
  for (uint32_t i = 0; i < 3; ++i) {
    Request request = MakeRequest(Tokens(100, i), Greedy(1 << 30));
    request.options.ignore_eos = true;
    expected.push_back(Lone(*engine, request));
    if (i == 1) {
      request.stop = [&fails]() -> bool { return fails ? throw std::runtime_error("nobody is there") : false; };
    }
    ids.push_back(scheduler.Add(std::move(request)));
  }
  do {
    ASSERT_TRUE(scheduler.Step());
  } while (scheduler.waiting() < 2);
  scheduler.Cancel(ids[2]);
  fails = true;
  while (scheduler.Step()) {
  }
  ExpectSameAnswer(*scheduler.Take(ids[0]), expected[0]);
  EXPECT_THROW(scheduler.Take(ids[1]), std::runtime_error);
  const GenerateResult cancelled = *scheduler.Take(ids[2]);
  EXPECT_EQ(cancelled.reason, StopReason::kInterrupted);
  EXPECT_GT(cancelled.tokens.size(), 50u);
  EXPECT_TRUE(expected[2].text.starts_with(cancelled.text));
}

TEST(Scheduler, PagesThatWerePromisedAreLeftByAnswersThatGrow) {
  EngineOptions options = FakeOptions(512, 64);
  options.cache_texts = 2;  // eight pages
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  Scheduler scheduler(*engine, 4);
  std::vector<int64_t> ids;
  std::vector<GenerateResult> expected;
  for (uint32_t i = 0; i < 2; ++i) {
    Request request = MakeRequest(Tokens(30, i), Sampled(1 << 30, i));
    request.options.ignore_eos = true;
    expected.push_back(Lone(*engine, request));
    ids.push_back(scheduler.Add(std::move(request)));
  }
  scheduler.Step();
  scheduler.Reserve(256);
  EXPECT_TRUE(scheduler.HasReserve());
  for (int i = 0; i < 500; ++i) {
    ASSERT_TRUE(scheduler.Step());
    EXPECT_GE(engine->cache().free_pages(), 2);
  }
  EXPECT_GT(scheduler.preemptions(), 0);
  // What was taken of them is not held a second time.
  Sequence other(engine->cache());
  other.Append(Tokens(256));
  while (scheduler.Step()) {
  }
  for (size_t i = 0; i < 2; ++i) ExpectSameAnswer(*scheduler.Take(ids[i]), expected[i]);
}

TEST(Scheduler, AnAnswerThatIsAloneStillWaitsForPagesThatWerePromised) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(512, 64));  // four pages
  Scheduler scheduler(*engine, 4);
  Request request = MakeRequest(Tokens(30), Greedy(1 << 30));
  request.options.ignore_eos = true;
  const GenerateResult expected = Lone(*engine, request);
  const int64_t id = scheduler.Add(std::move(request));
  scheduler.Step();
  scheduler.Reserve(128);
  EXPECT_TRUE(scheduler.HasReserve());
  for (int i = 0; i < 600; ++i) ASSERT_TRUE(scheduler.Step());
  EXPECT_FALSE(scheduler.Take(id));
  EXPECT_EQ(engine->cache().free_pages(), 1);
  scheduler.Reserve(0);
  while (scheduler.Step()) {
  }
  ExpectSameAnswer(*scheduler.Take(id), expected);
}

TEST(Scheduler, WhatIsDoneWithAnEndedTextGoesBeforeAnswersThatGrow) {
  // Five pages for two texts that share two of them, and write into the second.
  EngineOptions options = FakeOptions(512, 64);
  options.cache_tokens = 640;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  const std::vector<int32_t> beginning = Tokens(250);
  Request growing = MakeRequest(Joined(beginning, Tokens(1, 1)), Greedy(1 << 30));
  growing.options.ignore_eos = true;
  Request ending = MakeRequest(Joined(beginning, Tokens(1, 2)), Greedy(3));
  ending.options.ignore_eos = true;
  const GenerateResult expected = Lone(*engine, growing), expected_end = Lone(*engine, ending);
  int calls = 0;
  ending.after_from = 120;
  ending.after = [&](Sequence& text) {
    const std::vector<int32_t> tokens = text.tokens();
    text.Truncate(120);
    const BatchItem item{&text, std::span(tokens).subspan(120, 50), BatchItem::Logits::kNone};
    engine->decoder().Step({&item, 1}, [](int32_t, int32_t, const LogitsRow&) {});
    const BatchItem rest{&text, std::span(tokens).subspan(170, 60), BatchItem::Logits::kNone};
    engine->decoder().Step({&rest, 1}, [](int32_t, int32_t, const LogitsRow&) {});
    return ++calls < 40;
  };
  Scheduler scheduler(*engine, 4);
  const int64_t first = scheduler.Add(growing), second = scheduler.Add(ending);
  while (scheduler.Step()) {
  }
  EXPECT_EQ(calls, 40);
  ExpectSameAnswer(*scheduler.Take(first), expected);
  ExpectSameAnswer(*scheduler.Take(second), expected_end);
}

// The ways in which a server's requests may be read beside the engine's own.
std::vector<std::shared_ptr<const TextAttention>> Ways(const Engine& engine) {
  std::vector<std::shared_ptr<const TextAttention>> ways = {nullptr};
  for (const Policy policy : {Policy::kPhsa, Policy::kInfllm2, Policy::kInfllm2_64, Policy::kStreaming}) {
    LayerSettings settings;
    settings.base = SmallSettings(policy, 2);
    settings.base.punctuation = "en";
    ways.push_back(engine.MakeAttention(settings));
  }
  return ways;
}

TEST(Scheduler, TextsThatAreReadInDifferentWaysShareABatch) {
  EngineOptions options = FakeOptions(1024, 64);
  options.cache_texts = 8;
  options.other_attention = true;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  const auto ways = Ways(*engine);
  std::vector<Request> requests = MixedRequests(3);
  std::vector<GenerateResult> expected;
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].attention = ways[i % ways.size()];
    EngineOptions lone = FakeOptions(1024, 64);
    if (requests[i].attention != nullptr) lone.attention = requests[i].attention->settings;
    expected.push_back(Lone(*LoadedEngine(lone), requests[i]));
  }
  const std::vector<GenerateResult> results = GenerateAll(*engine, requests, 14);
  for (size_t i = 0; i < requests.size(); ++i) ExpectSameAnswer(results[i], expected[i]);
}

TEST(Scheduler, ATextIsNoUseToOneThatIsReadInAnotherWay) {
  EngineOptions options = FakeOptions(512, 64);
  options.cache_texts = 4;
  options.other_attention = true;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  const auto ways = Ways(*engine);
  Scheduler scheduler(*engine, 1);
  const auto reused = [&](const std::shared_ptr<const TextAttention>& way) {
    Request request = MakeRequest(Tokens(300), Greedy(4));
    request.attention = way;
    const int64_t id = scheduler.Add(std::move(request));
    while (scheduler.Step()) {
    }
    return scheduler.Take(id)->reused_tokens;
  };
  EXPECT_EQ(reused(ways[0]), 0);
  EXPECT_EQ(reused(ways[1]), 0);
  EXPECT_EQ(reused(ways[1]), 299);
  EXPECT_EQ(reused(ways[0]), 299);
}

TEST(Scheduler, RepresentativesThatPagesHaveNoRoomForAreRefused) {
  EngineOptions options = FakeOptions(512, 64);
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  LayerSettings quest;
  quest.base = SmallSettings(Policy::kQuest, 2);
  EXPECT_NE(Refusal([&] { engine->MakeAttention(quest); }).find("room"), std::string::npos);
  options.attention = quest;
  options.other_attention = true;
  EXPECT_NO_THROW(LoadedEngine(options)->MakeAttention(quest));
}

TEST(Scheduler, LogProbabilitiesAreTheSameReadAndWritten) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(512, 64));
  Request request = MakeRequest(Tokens(100), Greedy(30));
  request.options.ignore_eos = true;
  request.options.log_probabilities = 3;
  const GenerateResult written = GenerateAll(*engine, {request}, 1).front();
  ASSERT_EQ(written.log_probabilities.size(), written.tokens.size());
  Request score = MakeRequest(Joined(request.prompt, written.tokens), Greedy(0));
  score.options.log_probabilities = 3;
  score.options.prompt_log_probabilities = true;
  // The second one could take all of its beginning from the first.
  for (const GenerateResult& read : GenerateAll(*engine, {score, score}, 2)) {
    EXPECT_EQ(read.reused_tokens, 0);
    EXPECT_TRUE(read.tokens.empty());
    ASSERT_EQ(read.prompt_log_probabilities.size(), score.prompt.size() - 1);
    for (size_t i = 0; i < written.tokens.size(); ++i) {
      const TokenLogProbability& one = read.prompt_log_probabilities[request.prompt.size() - 1 + i];
      EXPECT_EQ(one.value, written.log_probabilities[i].value);
      EXPECT_EQ(one.top, written.log_probabilities[i].top);
      ASSERT_EQ(one.top.size(), 3u);
      EXPECT_EQ(one.top[0].first, written.tokens[i]);
      EXPECT_GE(one.top[0].second, one.top[1].second);
    }
  }
}

TEST(Scheduler, ProgressHasEverythingInTheEnd) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(512, 64));
  Request request = MakeRequest(Tokens(40), Greedy(10));
  request.options.ignore_eos = true;
  size_t calls = 0;
  GenerateResult last;
  request.progress = [&](const GenerateResult& so_far) {
    EXPECT_GE(so_far.tokens.size(), last.tokens.size());
    last = so_far;
    ++calls;
  };
  const GenerateResult result = GenerateAll(*engine, {request}, 1).front();
  EXPECT_EQ(last.tokens, result.tokens);
  EXPECT_EQ(last.text, result.text);
  EXPECT_EQ(calls, 10u);
}

TEST(Scheduler, PagesThatAreReservedAreLeftFree) {
  EngineOptions options = FakeOptions(512, 64);
  options.cache_texts = 2;  // eight pages
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  Scheduler scheduler(*engine, 4);
  const auto add = [&] {
    Request request = MakeRequest(Tokens(200), Greedy(100));
    request.options.ignore_eos = true;
    return scheduler.Add(std::move(request));
  };
  const int64_t first = add();
  scheduler.Step();
  scheduler.Reserve(512);
  EXPECT_TRUE(scheduler.HasReserve());
  const int64_t second = add();
  scheduler.Step();
  EXPECT_EQ(scheduler.running(), 1);
  EXPECT_EQ(scheduler.waiting(), 1);
  while (!scheduler.Take(first)) scheduler.Step();
  Sequence other(engine->cache());
  other.Append(Tokens(512));
  other.Truncate(0);
  scheduler.Reserve(0);
  while (scheduler.Step()) {
  }
  EXPECT_TRUE(scheduler.Take(second));
}

TEST(Scheduler, WhatThereIsOfAPromptIsToldWhenItBeginsAndAfterEachStepButTheLast) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(512, 64));
  std::vector<std::pair<int32_t, int32_t>> told;
  Request request = MakeRequest(Tokens(200), Greedy(4));
  request.prefill = [&](int32_t done, int32_t total) { told.emplace_back(done, total); };
  Scheduler scheduler(*engine, 4);
  const int64_t first = scheduler.Add(request);
  while (!scheduler.Take(first)) scheduler.Step();
  EXPECT_EQ(told, (std::vector<std::pair<int32_t, int32_t>>{{0, 200}, {64, 200}, {128, 200}, {192, 200}}));
  // What is there already is said at once.
  told.clear();
  const int64_t second = scheduler.Add(request);
  while (!scheduler.Take(second)) scheduler.Step();
  EXPECT_EQ(told, (std::vector<std::pair<int32_t, int32_t>>{{199, 200}}));
}

TEST(Scheduler, WhoReservesPagesBeginsWithWhatIsThereAndHoldsOnlyTheRest) {
  EngineOptions options = FakeOptions(512, 64);  // four pages
  options.other_attention = true;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  Scheduler scheduler(*engine, 4);
  Request request = MakeRequest(Tokens(300), Greedy(10));
  request.options.ignore_eos = true;
  const int64_t id = scheduler.Add(request);
  while (!scheduler.Take(id)) scheduler.Step();
  const std::vector<int32_t> prompt = Tokens(300), other = Tokens(300, 9);
  EXPECT_EQ(scheduler.Known(prompt, nullptr), 300);
  EXPECT_EQ(scheduler.Known(std::span(prompt).first(250), nullptr), 250);
  EXPECT_EQ(scheduler.Known(other, nullptr), 0);
  const auto sparse = engine->MakeAttention({.base = SmallSettings(Policy::kPhsa, 2), .layers = {}});
  EXPECT_EQ(scheduler.Known(prompt, sparse.get()), 0);
  {
    Sequence none = scheduler.Begin(other, sparse);
    EXPECT_EQ(none.length(), 0);
    EXPECT_EQ(none.attention(), sparse.get());
  }

  // One page is free, and it is enough for who needs only the end of a text of three.
  scheduler.Reserve(128);
  EXPECT_TRUE(scheduler.HasReserve());
  Sequence text = scheduler.Begin(prompt, nullptr);
  EXPECT_EQ(text.length(), 300);
  EXPECT_EQ(text.tokens(), prompt);
  // A request that comes now takes the kept text's place, but neither what was begun nor the page that was promised.
  const int64_t waiting = scheduler.Add(MakeRequest(other, Greedy(3)));
  for (int i = 0; i < 20; ++i) scheduler.Step();
  EXPECT_FALSE(scheduler.Take(waiting));
  EXPECT_EQ(scheduler.waiting(), 1);
  EXPECT_EQ(engine->cache().free_pages(), 1);
  text.Append(Tokens(60, 3));  // its last page is the kept text's too, and is copied
  EXPECT_EQ(engine->cache().free_pages(), 0);
  scheduler.Reserve(0);
  scheduler.Keep(std::move(text));
  EXPECT_EQ(scheduler.Known(Joined(prompt, Tokens(60, 3)), nullptr), 360);
  while (scheduler.Step()) {
  }
  EXPECT_TRUE(scheduler.Take(waiting));
}

TEST(Scheduler, SomethingMayBeDoneWithTheTextOfAnEndedAnswerWhileOthersGoOn) {
  EngineOptions options = FakeOptions(640, 64);
  options.cache_tokens = 2048;
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  const Request plain = MakeRequest(Tokens(200), Greedy(30));
  const GenerateResult lone = Lone(*engine, plain);
  Scheduler scheduler(*engine, 4);
  int calls = 0, lengths = 0;
  Request request = plain;
  request.after = [&](Sequence& text) {
    lengths += text.length();
    // Reads its end again, as who looks at the attention does.
    const std::vector<int32_t> tokens = text.tokens();
    text.Truncate(190);
    const BatchItem item{&text, std::span(tokens).subspan(190), BatchItem::Logits::kNone};
    engine->decoder().Step({&item, 1}, [](int32_t, int32_t, const LogitsRow&) {});
    return ++calls < 3;
  };
  Request failing = MakeRequest(Tokens(50, 3), Greedy(4)), stopped = MakeRequest(Tokens(60, 5), Greedy(4));
  failing.after = [](Sequence&) -> bool { throw std::runtime_error("no"); };
  bool gone = false;
  stopped.stop = [&] { return gone; };
  stopped.after = [&](Sequence&) { return gone = true; };  // would go on for ever
  const Request other = MakeRequest(Tokens(200), Greedy(60));
  const int64_t first = scheduler.Add(request), bad = scheduler.Add(failing), left = scheduler.Add(stopped),
                beside = scheduler.Add(other);
  int steps = 0;
  while (calls == 0) {
    ASSERT_TRUE(scheduler.Step());
    ASSERT_LT(++steps, 1000);
    EXPECT_FALSE(scheduler.Take(first));
  }
  while (scheduler.Step()) ASSERT_LT(++steps, 1000);
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(lengths, 3 * (200 + 29));
  ExpectSameAnswer(*scheduler.Take(first), lone);
  EXPECT_THROW(scheduler.Take(bad), std::runtime_error);
  EXPECT_EQ(scheduler.Take(left)->tokens.size(), 4u);
  ExpectSameAnswer(*scheduler.Take(beside), Lone(*engine, other));
}

}  // namespace
}  // namespace phsa
