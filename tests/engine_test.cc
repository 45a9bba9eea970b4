#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <map>

#include "base/dtype.h"
#include "base/memory.h"
#include "engine/attention_choice.h"
#include "engine/memory_needs.h"
#include "engine/sampler.h"
#include "engine/sampling_choice.h"
#include "engine/scheduler.h"
#include "engine/serving_needs.h"
#include "engine/session.h"
#include "engine/speculation.h"
#include "engine/stop_strings.h"
#include "fake_engine.h"
#include "io/json.h"
#include "io/model_store.h"
#include "refusal.h"

namespace phsa {
namespace {

int32_t Next(Sampler& sampler, const std::vector<float>& logits, std::span<const int32_t> seen = {}) {
  return sampler.Next(HostLogitsRow(logits), static_cast<int32_t>(logits.size()), seen);
}

SamplerSettings Everything(uint64_t seed) {
  return {.temperature = 1, .top_k = 0, .top_p = 1, .min_p = 0, .repetition_penalty = 1, .seed = seed};
}

TEST(Sampler, TemperatureZeroTakesTheLowestOfTheMostLikely) {
  SamplerSettings settings;
  settings.temperature = 0;
  Sampler sampler(settings);
  const std::vector<float> logits = {0, 3, 1, 3};
  EXPECT_EQ(Next(sampler, logits), 1);
}

TEST(Sampler, FrequenciesFollowTheProbabilities) {
  Sampler sampler(Everything(3));
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.2f)};
  std::map<int32_t, int> counts;
  for (int i = 0; i < 20000; ++i) ++counts[Next(sampler, logits)];
  EXPECT_NEAR(counts[0] / 20000.0, 0.5, 0.02);
  EXPECT_NEAR(counts[1] / 20000.0, 0.3, 0.02);
  EXPECT_NEAR(counts[2] / 20000.0, 0.2, 0.02);
}

// Which tokens come up at all.
std::vector<int32_t> Reached(const SamplerSettings& settings, const std::vector<float>& logits,
                             std::span<const int32_t> seen = {}) {
  Sampler sampler(settings);
  std::map<int32_t, int> counts;
  for (int i = 0; i < 4000; ++i) ++counts[Next(sampler, logits, seen)];
  std::vector<int32_t> ids;
  for (const auto& [id, count] : counts) ids.push_back(id);
  return ids;
}

TEST(Sampler, EachFilterKeepsWhatItSays) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.4f), std::log(0.3f), std::log(0.2f)};
  SamplerSettings settings = Everything(1);
  EXPECT_EQ(Reached(settings, logits), (std::vector<int32_t>{0, 1, 2, 3}));
  settings.top_k = 2;
  EXPECT_EQ(Reached(settings, logits), (std::vector<int32_t>{1, 2}));
  settings = Everything(1);
  settings.top_p = 0.65f;  // 0.4 is not enough, 0.7 is
  EXPECT_EQ(Reached(settings, logits), (std::vector<int32_t>{1, 2}));
  settings = Everything(1);
  settings.min_p = 0.4f;  // of 0.4: at least 0.16
  EXPECT_EQ(Reached(settings, logits), (std::vector<int32_t>{1, 2, 3}));
}

TEST(Sampler, TheSeedDecidesTheAnswer) {
  const std::vector<float> logits(100, 0.0f);
  const auto draw = [&](uint64_t seed) {
    Sampler sampler(Everything(seed));
    std::vector<int32_t> ids;
    for (int i = 0; i < 20; ++i) ids.push_back(Next(sampler, logits));
    return ids;
  };
  EXPECT_EQ(draw(5), draw(5));
  EXPECT_NE(draw(5), draw(6));
}

TEST(Sampler, ThePenaltyCountsEachTokenOnceAndBothSigns) {
  SamplerSettings settings;
  settings.temperature = 0;
  settings.repetition_penalty = 2;
  Sampler sampler(settings);
  const std::vector<int32_t> seen = {0, 0, 0};
  EXPECT_EQ(Next(sampler, {3.0f, 1.4f}, seen), 0);  // 3 / 2, not 3 / 8
  EXPECT_EQ(Next(sampler, {3.0f, 1.6f}, seen), 1);
  EXPECT_EQ(Next(sampler, {-1.0f, -1.9f}, seen), 1);  // -1 · 2 < -1.9
}

TEST(Sampler, ThePenaltyPassesOverTokensThatCannotBeChosen) {
  SamplerSettings settings;
  settings.temperature = 0;
  settings.repetition_penalty = 2;
  // A prompt may have ids of the model's padding, which have no logits here.
  const std::vector<int32_t> seen = {7, 0};
  Sampler sampler(settings);
  EXPECT_EQ(Next(sampler, {3.0f, 1.6f}, seen), 1);
}

TEST(Sampler, FrequencyAndPresenceCountTheAnswerAlone) {
  const std::vector<int32_t> seen = {0, 0, 0, 1, 1, 2}, answer = {1, 1, 2, 9};  // 9: one that cannot be chosen
  const auto next = [&](float frequency, float presence, const std::vector<float>& logits) {
    SamplerSettings settings;
    settings.temperature = 0;
    settings.frequency_penalty = frequency;
    settings.presence_penalty = presence;
    Sampler sampler(settings);
    return sampler.Next(HostLogitsRow(logits), static_cast<int32_t>(logits.size()), seen, answer);
  };
  EXPECT_EQ(next(0.5f, 0, {1.9f, 3.0f, 2.3f}), 1);  // 1.9, 3 - 2 · 0.5, 2.3 - 0.5
  EXPECT_EQ(next(0.5f, 0, {2.1f, 3.0f, 2.3f}), 0) << "what only the prompt has is as it was";
  EXPECT_EQ(next(0, 0.5f, {2.4f, 3.0f, 2.3f}), 1);  // 2.4, 2.5, 1.8: once, however often
  EXPECT_EQ(next(0, 0.5f, {2.6f, 3.0f, 2.3f}), 0);
  EXPECT_EQ(next(-1, 0, {5.0f, 3.2f, 3.0f}), 1) << "below zero they ask for more of the same";
}

TEST(Sampler, ABiasIsAddedBeforeThePenaltiesAndTheTemperature) {
  SamplerSettings settings;
  settings.temperature = 0;
  settings.logit_bias = {{1, -100.0f}, {2, 1.5f}, {77, 100.0f}};  // 77 cannot be chosen
  Sampler biased(settings);
  EXPECT_EQ(Next(biased, {1.0f, 50.0f, 0.0f}), 2);
  EXPECT_EQ(Next(biased, {1.0f, 50.0f, -1.0f}), 0);
  settings.repetition_penalty = 2;
  Sampler both(settings);
  const std::vector<int32_t> seen = {2};
  EXPECT_EQ(Next(both, {0.6f, 0.0f, 0.0f}, seen), 2);  // (0 + 1.5) / 2, not 0 / 2 + 1.5
  EXPECT_EQ(Next(both, {0.8f, 0.0f, 0.0f}, seen), 0);
}

TEST(Sampler, LogitsThatAreNoNumbersAreRefusedOrPassedOver) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  Sampler sampler(Everything(1));
  EXPECT_EQ(Next(sampler, {nan, 1.0f, -infinity}), 1);
  EXPECT_NE(Refusal([&] { Next(sampler, {nan, -infinity}); }).find("finite"), std::string::npos);
}

TEST(Sampler, SettingsOutOfRangeAreRefusedByName) {
  const auto refused = [](auto change) {
    SamplerSettings settings;
    change(settings);
    return Refusal([&] { Validate(settings); });
  };
  EXPECT_NE(refused([](auto& s) { s.temperature = -1; }).find("temperature is"), std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.top_p = 0; }).find("top_p is"), std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.top_p = std::nanf(""); }).find("top_p is"), std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.min_p = 2; }).find("min_p is"), std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.top_k = -1; }).find("top_k is"), std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.repetition_penalty = 0; }).find("repetition_penalty is"), std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.frequency_penalty = 3; }).find("frequency_penalty"), std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.presence_penalty = std::nanf(""); }).find("presence_penalty"), std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.logit_bias = {{5, 101.0f}}; }).find("logit_bias of token 5"), std::string::npos);
}

TEST(StopStrings, TextIsHeldBackOnlyWhileItMayBeAStopString) {
  StopStrings stops({"END", "\n\n"});
  EXPECT_EQ(stops.Next("abE"), "ab");
  EXPECT_EQ(stops.Next("N"), "");
  EXPECT_EQ(stops.Next("x"), "ENx");
  EXPECT_EQ(stops.Next("line\n"), "line");
  EXPECT_EQ(stops.Next("more E"), "\nmore ");
  EXPECT_EQ(stops.Next("ND and on"), "");
  EXPECT_TRUE(stops.stopped());
  EXPECT_EQ(stops.Next("never"), "");
  EXPECT_EQ(stops.Finish(), "");
}

TEST(StopStrings, TheEarliestStopStringCounts) {
  StopStrings stops({"later", "soon"});
  EXPECT_EQ(stops.Next("it comes soon, not later"), "it comes ");
  EXPECT_TRUE(stops.stopped());
}

TEST(StopStrings, WhatWasHeldBackComesAtTheEnd) {
  StopStrings stops({"END"});
  EXPECT_EQ(stops.Next("the EN"), "the ");
  EXPECT_EQ(stops.Finish(), "EN");
  StopStrings none({});
  EXPECT_EQ(none.Next("END"), "END");
}

TEST(MemoryNeeds, WhatDoesNotFitIsRefusedWithBothNumbers) {
  MemoryNeeds needs;
  needs.weights = 3'000'000'000;
  needs.key_values = 2'000'000'000;
  needs.context = 4096;
  needs.available = 4'500'000'000;
  const std::string message = Refusal([&] { CheckFits(needs); });
  EXPECT_NE(message.find("5.00 GB of 4.50 GB"), std::string::npos) << message;
  needs.available = 5'000'000'000;
  CheckFits(needs);
  EXPECT_GT(AvailableMemory(), 0u);
}

TEST(Engine, TheCacheMayHoldMoreThanTheLongestText) {
  EngineOptions options = FakeOptions(256);
  const auto needs = [&] { return Engine(std::make_unique<FakeModel>(), SmallTokenizer(), options).memory(); };
  const MemoryNeeds one_text = needs();
  EXPECT_EQ(one_text.cache_tokens, 256);
  options.cache_tokens = 1024;
  const MemoryNeeds four_texts = needs();
  EXPECT_EQ(four_texts.context, 256);
  EXPECT_EQ(four_texts.cache_tokens, 1024);
  EXPECT_EQ(four_texts.key_values, 4 * one_text.key_values);
  EXPECT_NE(four_texts.Text().find("1024 tokens in texts of up to 256"), std::string::npos) << four_texts.Text();
  const std::unique_ptr<Engine> engine = LoadedEngine(options);
  EXPECT_EQ(engine->cache().num_pages(), 8);
  engine->SetAttention({SmallSettings(Policy::kPhsa, 1), {}});
  EXPECT_EQ(engine->cache().num_pages(), 8);
  EXPECT_NE(Refusal([&] { Session(*engine).Generate(Tokens(256), {}, {}); }).find("holds 256"), std::string::npos);

  options.context = 0;
  EXPECT_EQ(needs().context, 1024) << "the model's is longer, but would not fit";
  options.cache_tokens = 10000;
  EXPECT_EQ(needs().context, 4096) << "the model's";
  options.context = 2048;
  options.cache_tokens = 2000;
  const std::string message = Refusal(needs);
  EXPECT_NE(message.find("2000"), std::string::npos) << message;
  EXPECT_NE(message.find("2048"), std::string::npos) << message;
}

TEST(ServingNeeds, OneGpuTakesWhatTheEngineCounts) {
  EngineOptions options = FakeOptions(1024);
  options.attention = {SmallSettings(Policy::kPhsa, 2), {}};
  options.attention.base.parts = 4;
  options.weights = WeightsMode::kF32;
  options.kv_dtype = PHSA_F32;
  const Engine engine(std::make_unique<FakeModel>(), SmallTokenizer(), options);
  const MemoryNeeds& ours = engine.memory();
  ServingOptions serving;
  serving.context = 1024;
  serving.kv_dtype = serving.weight_dtype = PHSA_F32;
  const ServingNeeds needs = NeedsOfServing(FakeModel(), options.attention, serving);
  constexpr uint64_t kFlags = 1024;  // a byte a token, which the engine counts with keys and values
  EXPECT_EQ(needs.key_values + kFlags, ours.key_values);
  EXPECT_EQ(needs.representatives, ours.representatives);
  EXPECT_GT(needs.representatives, 0u);
  EXPECT_NEAR(static_cast<double>(needs.weights), static_cast<double>(ours.weights), 0.05 * ours.weights);

  // What a token reads: init, local, its own block and the chosen ones, and all representatives.
  const uint64_t token = 2 * 2 * 2 * 64 * sizeof(float);  // K and V of 2 layers and 2 heads of 64
  const Settings& settings = options.attention.base;
  const int64_t tokens = settings.init_tokens + settings.local_tokens + 16 + 2 * 16;
  EXPECT_EQ(needs.read_key_values, static_cast<uint64_t>(tokens) * token);
  EXPECT_EQ(needs.read_representatives, 1024 / 16 * 4 * token / 2);
  const ServingNeeds dense = NeedsOfServing(FakeModel(), {SmallSettings(Policy::kDense, 0), {}}, serving);
  EXPECT_EQ(dense.read_key_values, 1024 * token);
  EXPECT_EQ(dense.read_representatives + dense.representatives, 0u);
  EXPECT_EQ(dense.key_values, needs.key_values);
}

TEST(ServingNeeds, ACacheOfEveryTypeIsAsLargeAsWhatTheEngineTakesForIt) {
  for (const int32_t type : {PHSA_F32, PHSA_BF16, PHSA_INT8}) {
    EngineOptions options = FakeOptions(1024, 512, SmallSettings(Policy::kPhsa, 2));
    options.kv_dtype = type;
    const std::unique_ptr<Engine> engine = LoadedEngine(options);
    const KvCache& cache = engine->cache();
    ServingOptions serving;
    serving.context = 1024;
    serving.kv_dtype = type;
    const ServingNeeds needs = NeedsOfServing(FakeModel(), options.attention, serving);
    constexpr uint64_t kFlags = 1024;
    EXPECT_EQ(needs.key_values + needs.representatives + kFlags,
              static_cast<uint64_t>(cache.num_pages()) * cache.layout().page_bytes)
        << DtypeName(type);
    // Of 2 layers and 2 heads of 64, keys and values: 8-bit ones have a scale of two bytes each.
    const uint64_t row = type == PHSA_INT8 ? 64 + 2 : 64 * DtypeSize(type);
    EXPECT_EQ(needs.key_values, 1024 * 2 * 2 * 2 * row) << DtypeName(type);
    const Settings& settings = options.attention.base;
    const int64_t tokens = settings.init_tokens + settings.local_tokens + 16 + 2 * 16;
    EXPECT_EQ(needs.read_key_values, static_cast<uint64_t>(tokens) * 2 * 2 * 2 * row) << DtypeName(type);
  }
}

TEST(ServingNeeds, HeadsAndLayersAreSharedOut) {
  ServingOptions one, two, four, stages;
  one.context = two.context = four.context = stages.context = 2048;
  two.tensor = 2;
  four.tensor = 4;  // more than there are KV heads: two GPUs keep the same ones
  stages.pipeline = 2;
  const LayerSettings attention{SmallSettings(Policy::kPhsa, 2), {}};
  const auto needs = [&](const ServingOptions& options) { return NeedsOfServing(FakeModel(), attention, options); };
  EXPECT_EQ(needs(two).key_values * 2, needs(one).key_values);
  EXPECT_EQ(needs(two).representatives * 2, needs(one).representatives);
  EXPECT_EQ(needs(two).read_key_values * 2, needs(one).read_key_values);
  EXPECT_NEAR(static_cast<double>(needs(two).weights), needs(one).weights / 2.0, 0.02 * needs(one).weights);
  EXPECT_EQ(needs(four).key_values, needs(two).key_values);
  EXPECT_EQ(needs(stages).key_values * 2, needs(one).key_values);
  EXPECT_GT(needs(stages).weights * 2, needs(one).weights) << "tied embeddings are in the first and in the last stage";

  one.memory = needs(one).weights + 3 * (needs(one).key_values + needs(one).representatives) + 5;
  EXPECT_EQ(needs(one).texts, 3);
  one.reserved = 6;
  EXPECT_EQ(needs(one).texts, 2);
  one.memory = 1;
  EXPECT_EQ(needs(one).texts, 0);

  two.tensor = 3;
  const std::string heads = Refusal([&] { needs(two); });
  EXPECT_NE(heads.find("allowed: 1, 2, 4"), std::string::npos) << heads;
  stages.pipeline = 3;
  const std::string layers = Refusal([&] { needs(stages); });
  EXPECT_NE(layers.find("allowed: 1 to 2"), std::string::npos) << layers;
}

TEST(Session, TokensThatTheModelHasNotAreRefused) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(256));
  const std::vector<int32_t> prompt = {1, 2, 101};
  EXPECT_EQ(Refusal([&] { Session(*engine).Generate(prompt, {}, {}); }),
            "the prompt has the token 101; the model's are 0 to 100");
}

TEST(Session, AStopTokenEndsAnAnswerAndIsNotPartOfIt) {
  const auto engine = LoadedEngine(FakeOptions(128));
  const std::vector<int32_t> prompt = {1, 2, 3};
  GenerateOptions options;
  options.max_tokens = 12;
  options.sampler.temperature = 0;
  options.sampler.repetition_penalty = 1.5f;  // so that it does not say one thing only
  options.ignore_eos = true;
  const GenerateResult free = Session(*engine).Generate(prompt, options, {});
  ASSERT_EQ(free.tokens.size(), 12u);
  options.stop_tokens = {kEnd, free.tokens[5]};
  const auto first = std::ranges::find_first_of(free.tokens, options.stop_tokens);
  const GenerateResult stopped = Session(*engine).Generate(prompt, options, {});
  EXPECT_EQ(stopped.reason, StopReason::kStopToken);
  EXPECT_EQ(stopped.tokens, std::vector<int32_t>(free.tokens.begin(), first));
  options.stop_tokens = {101};
  EXPECT_EQ(Refusal([&] { Session(*engine).Generate(prompt, options, {}); }),
            "stop_token_ids has the token 101; the model's are 0 to 100");
  options.stop_tokens = {};
  options.sampler.logit_bias = {{-1, 1.0f}};
  EXPECT_EQ(Refusal([&] { Session(*engine).Generate(prompt, options, {}); }),
            "logit_bias has the token -1; the model's are 0 to 100");
}

TEST(Session, AnInterruptedPrefillSaysWhatItDid) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(256, 16));
  Session session(*engine);
  std::vector<int32_t> prompt(100);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i % 20);
  GenerateOptions options;
  options.max_tokens = 1;
  session.Generate(std::span(prompt).first(20), options, {});
  int32_t steps = 0;
  GenerateCallbacks callbacks;
  callbacks.stop = [&] { return ++steps > 3; };
  const GenerateResult result = session.Generate(prompt, options, callbacks);
  EXPECT_EQ(result.reason, StopReason::kInterrupted);
  EXPECT_EQ(result.prompt_tokens, 100);
  EXPECT_EQ(result.reused_tokens, 20);
  EXPECT_EQ(session.sequence().length(), 20 + 3 * 16);
  EXPECT_GT(result.prefill_seconds, 0);
  EXPECT_GT(result.tokens_read.read, 0);
}

// `before` tokens that repeat nothing, then the part again and again; how many tokens pass until the watch notices.
size_t TokensUntilNoticed(size_t before, size_t part, size_t most) {
  RepetitionWatch watch;
  std::vector<int32_t> tokens;
  while (tokens.size() < most) {
    const size_t at = tokens.size();
    tokens.push_back(static_cast<int32_t>(at < before ? 10'000 + at : (at - before) % part));
    if (watch.Next(tokens)) return at + 1 - before;
  }
  return most;
}

TEST(PromptLookup, ADraftIsWhatFollowedTheLongestAgreement) {
  PromptLookup lookup;
  const auto append = [&](std::initializer_list<int32_t> tokens) {
    for (const int32_t token : tokens) lookup.Append(token);
  };
  const auto draft = [&](size_t most) {
    const std::span<const int32_t> tokens = lookup.Draft(most);
    return std::vector<int32_t>(tokens.begin(), tokens.end());
  };
  EXPECT_EQ(draft(4), std::vector<int32_t>{});
  append({9, 1, 2, 3, 4, 5, 8, 1, 2, 3, 6, 7});
  EXPECT_EQ(draft(4), std::vector<int32_t>{});  // 3, 6, 7 stands nowhere else
  append({5, 1, 2, 3});
  EXPECT_EQ(draft(2), (std::vector<int32_t>{6, 7}));  // the latest of two that agree in three
  append({0, 9, 1, 2, 3});
  EXPECT_EQ(draft(3), (std::vector<int32_t>{4, 5, 8}));  // four agree there, three in the later ones
  append({4});
  EXPECT_EQ(draft(100).size(), 17u);  // to the end of the text
  EXPECT_EQ(draft(0).size(), 0u);
}

TEST(SpeculationPace, WrongDraftsCostAtMostTwoPercentAndOneStepAndRightOnesLengthen) {
  SpeculationPace wrong;
  double spent = 0, plain = 0;
  EXPECT_EQ(wrong.Most(), 0u);  // nothing is known of steps yet
  for (int i = 0; i < 1000; ++i) {
    const size_t tried = wrong.Most();
    const double seconds = 1 + 0.3 * static_cast<double>(tried);
    if (tried == 0) {
      wrong.Plain(seconds);
    } else {
      wrong.Tried(tried, 0, seconds);
    }
    spent += seconds;
    plain += 1;
  }
  EXPECT_GT(spent, plain);  // some were tried
  EXPECT_LE(spent, 1.02 * plain + 1.3);

  SpeculationPace right;
  right.Plain(1);
  size_t longest = 0;
  for (int i = 0; i < 40; ++i) {
    const size_t tried = std::max<size_t>(right.Most(), 1);
    right.Tried(tried, tried, 1 + 0.2 * static_cast<double>(tried));
    longest = std::max(longest, tried);
  }
  EXPECT_EQ(longest, 16u);
}

// Prompts that repeat themselves, so that there is something to look up.
std::vector<int32_t> RepeatingTokens(uint32_t seed) {
  const std::vector<int32_t> part = Tokens(60, seed);
  std::vector<int32_t> text;
  for (int i = 0; i < 4; ++i) text.insert(text.end(), part.begin(), part.end());
  return text;
}

TEST(Session, SpeculationWritesTheTextOfPlainDecoding) {
  for (const Policy policy : {Policy::kDense, Policy::kPhsa, Policy::kInfllm2_64}) {
    const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(1024, 32, SmallSettings(policy, 2)));
    int32_t accepted = 0, wrong = 0;
    for (uint32_t seed = 1; seed <= 8; ++seed) {
      GenerateOptions options;
      options.max_tokens = 200;
      options.ignore_eos = true;
      options.sampler = {.temperature = seed % 2 == 0 ? 0.4f : 0.0f, .seed = seed};
      options.sampler.repetition_penalty = seed % 4 == 3 ? 1.2f : 1.0f;
      options.log_probabilities = 2;
      if (seed == 5) options.stops = {"x7"};
      const std::vector<int32_t> prompt = RepeatingTokens(seed);
      const GenerateResult plain = Session(*engine).Generate(prompt, options, {});
      options.speculation = Speculation::kNgram;
      Session session(*engine);
      std::string told;
      GenerateCallbacks callbacks;
      callbacks.text = [&](std::string_view text) { told += text; };
      const GenerateResult fast = session.Generate(prompt, options, callbacks);
      EXPECT_EQ(plain.tokens, fast.tokens);
      EXPECT_EQ(plain.text, fast.text);
      EXPECT_EQ(plain.text, told);
      EXPECT_EQ(plain.reason, fast.reason);
      ASSERT_EQ(plain.log_probabilities.size(), fast.log_probabilities.size());
      for (size_t i = 0; i < plain.log_probabilities.size(); ++i) {
        EXPECT_EQ(plain.log_probabilities[i].value, fast.log_probabilities[i].value) << i;
      }
      // What was read is the text, and it goes on from there as it would have.
      std::vector<int32_t> text = Joined(prompt, fast.tokens);
      text.resize(static_cast<size_t>(session.sequence().length()));
      EXPECT_EQ(session.sequence().tokens(), text);
      text = Joined(prompt, fast.tokens);
      text.push_back(3);
      GenerateOptions greedy;
      greedy.max_tokens = 5;
      greedy.ignore_eos = true;
      greedy.sampler.temperature = 0;
      EXPECT_EQ(session.Generate(text, greedy, {}).tokens, Session(*engine).Generate(text, greedy, {}).tokens);
      accepted += fast.accepted_tokens;
      wrong += fast.drafted_tokens - fast.accepted_tokens;

      Request request;
      request.prompt = prompt;
      request.options = options;
      std::vector<Request> requests;
      requests.push_back(std::move(request));
      const GenerateResult served = GenerateAll(*engine, std::move(requests), 4).front();
      EXPECT_EQ(plain.tokens, served.tokens);
      EXPECT_EQ(plain.text, served.text);
      EXPECT_EQ(plain.reason, served.reason);
    }
    EXPECT_GT(accepted, 0);
    EXPECT_GT(wrong, 0);
  }
}

TEST(Session, SpeculationFillsTheContextToItsLastToken) {
  const std::unique_ptr<Engine> engine = LoadedEngine(FakeOptions(300, 32));
  GenerateOptions options;
  options.max_tokens = 1000;
  options.ignore_eos = true;
  options.sampler.temperature = 0;
  const GenerateResult plain = Session(*engine).Generate(RepeatingTokens(1), options, {});
  options.speculation = Speculation::kNgram;
  const GenerateResult fast = Session(*engine).Generate(RepeatingTokens(1), options, {});
  EXPECT_EQ(plain.tokens, fast.tokens);
  EXPECT_EQ(fast.reason, StopReason::kContextFull);
}

TEST(Speculation, NamesThatThereAreNotAreRefused) {
  EXPECT_EQ(Refusal([] { (void)SpeculationFromName("eagle"); }), "speculate is \"eagle\"; allowed: none, ngram");
}

TEST(RepetitionWatch, APartThatStandsThereFourTimesIsALoop) {
  EXPECT_EQ(TokensUntilNoticed(0, 1, 1000), 160u);
  EXPECT_EQ(TokensUntilNoticed(33, 1, 1000), 160u);
  EXPECT_EQ(TokensUntilNoticed(7, 40, 1000), 160u);
  EXPECT_EQ(TokensUntilNoticed(7, 41, 1000), 164u);
  EXPECT_EQ(TokensUntilNoticed(100, 256, 3000), 1024u);
  EXPECT_EQ(TokensUntilNoticed(0, 257, 5000), 5000u);
}

TEST(RepetitionWatch, RowsThatDifferInOneTokenAreNoLoop) {
  RepetitionWatch watch;
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < 3000; ++i) {
    tokens.push_back(i % 12 == 11 ? 1000 + i : i % 12);
    EXPECT_FALSE(watch.Next(tokens));
  }
}

TEST(AttentionChoice, WhatTheEngineDoesNotRunIsNotOffered) {
  for (const char* name : {"sepllm", "flash"}) {
    AttentionChoice choice;
    choice.policy = name;
    EXPECT_EQ(Refusal([&] { ResolveAttention(choice, FakeModel().config(), 256); }),
              fmt::format("attention is \"{}\"; allowed: auto, {}", name, PolicyNames()));
  }
}

AttentionChoice ChoiceFromJson(const Json& arguments) {
  AttentionChoice choice;
  choice.policy = arguments.value("attention", "auto");
  const std::map<std::string, std::function<void(const Json&)>> readers = {
      {"attention", [](const Json&) {}},
      {"top_k", [&](const Json& value) { choice.given["top_k"] = value.get<int32_t>(); }},
      {"local", [&](const Json& value) { choice.given["local"] = value.get<int32_t>(); }},
      {"parts", [&](const Json& value) { choice.given["parts"] = value.get<int32_t>(); }},
      {"preset", [&](const Json& value) { choice.preset = value.get<std::string>(); }},
  };
  for (const auto& [key, value] : arguments.items()) readers.at(key)(value);
  return choice;
}

// phsa.settings.resolve reads the same file in python/tests/test_settings.py.
TEST(AttentionChoice, TheRuleIsThatOfTheTable) {
  const Json cases = Json::parse(std::ifstream(PHSA_TEST_DATA "/attention_rule.json"));
  ASSERT_GT(cases.size(), 10u);
  for (const Json& one : cases) {
    SCOPED_TRACE(one["name"].get<std::string>());
    ModelConfig config;
    if (one.contains("carried")) config.phsa_settings = one["carried"].dump();
    AttentionChoice choice = ChoiceFromJson(one.value("arguments", Json::object()));
    if (one.contains("settings")) choice.config_json = one["settings"].dump();
    const auto resolve = [&] {
      LayerSettings settings = ResolveAttention(choice, config, one.value("context", 8192));
      RefuseWithoutEffect(choice, {&settings, 1});
      return settings;
    };
    if (one.contains("refused")) {
      const std::string message = Refusal(resolve);
      EXPECT_NE(message.find(one["refused"].get<std::string>()), std::string::npos) << message;
      EXPECT_NE(message.find("phsa"), std::string::npos) << "it says what to do: " << message;
      continue;
    }
    const Json settings = Json::parse(SettingsToJson(resolve()));
    for (const auto& [key, value] : one["expected"].items()) EXPECT_EQ(settings[key], value) << key;
    EXPECT_EQ(settings.contains("layers"), one["expected"].contains("layers")) << settings;
  }
}

TEST(AttentionChoice, PackagedModelsAreDenseUntilPhsaIsAskedFor) {
  for (const PackagedModel& model : PackagedModels()) {
    if (model.settings.empty()) continue;
    SCOPED_TRACE(model.name);
    ModelConfig config;
    config.context = 8192;
    config.phsa_settings = model.settings;
    const LayerSettings unasked = ResolveAttention({}, config, 4096);
    EXPECT_EQ(unasked.base.policy, Policy::kDense);
    EXPECT_TRUE(unasked.layers.empty());
    EXPECT_NE(CarriedSettings(config).find("parts"), std::string::npos);
    AttentionChoice choice;
    choice.policy = "phsa";
    const LayerSettings asked = ResolveAttention(choice, config, 4096);
    EXPECT_EQ(asked.base.policy, Policy::kPhsa);
    const auto has_parts = [](const auto& layer) { return layer.second.parts > 1; };
    EXPECT_TRUE(asked.base.parts > 1 || std::any_of(asked.layers.begin(), asked.layers.end(), has_parts));
  }
}

TEST(AttentionChoice, WrongValuesAreNamed) {
  const ModelConfig config;
  AttentionChoice choice;
  choice.policy = "fast";
  EXPECT_NE(Refusal([&] { ResolveAttention(choice, config, 4096); }).find("fast"), std::string::npos);
  choice.policy = "phsa";
  choice.given["top_k"] = -1;
  EXPECT_NE(Refusal([&] { ResolveAttention(choice, config, 4096); }).find("-1"), std::string::npos);
}

TEST(AttentionChoice, EverySettingThatNoPolicyUsesIsRefusedByItsName) {
  const auto refusal = [](const char* policy, const auto& set) {
    AttentionChoice choice;
    choice.policy = policy;
    set(choice);
    const LayerSettings settings = ResolveAttention(choice, ModelConfig(), 8192);
    try {
      RefuseWithoutEffect(choice, {&settings, 1});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refusal("dense", [](AttentionChoice& c) { c.given["top_k"] = 4; }),
            "top_k has no effect: the attention is dense; give attention phsa, infllm2, infllm2-64 or quest, or leave "
            "top_k out");
  EXPECT_NE(refusal("streaming", [](AttentionChoice& c) { c.given["top_k"] = 4; }), "");
  EXPECT_NE(refusal("infllm2", [](AttentionChoice& c) { c.given["lambda"] = 0.5f; }).find("lambda has no effect"),
            std::string::npos);
  EXPECT_NE(
      refusal("quest", [](AttentionChoice& c) { c.given["punctuation"] = "en"; }).find("punctuation has no effect"),
      std::string::npos);
  EXPECT_NE(refusal("auto", [](AttentionChoice& c) { c.given["init"] = 16; }).find("init has no effect"),
            std::string::npos);
  EXPECT_NE(refusal("dense", [](AttentionChoice& c) { c.given["dense_below"] = 64; }).find("dense_below has no effect"),
            std::string::npos);
  EXPECT_EQ(refusal("streaming", [](AttentionChoice& c) { c.given["local"] = 64; }), "");
  EXPECT_EQ(refusal("phsa", [](AttentionChoice& c) { c.given["lambda"] = 0.5f; }), "");
}

TEST(AttentionChoice, AModelCannotNameAFileOfThisMachine) {
  ModelConfig config;
  for (const char* carried :
       {R"({"punctuation": "/etc/hostname"})", R"({"layers": {"0": {"punctuation": "marks.txt"}}})"}) {
    config.phsa_settings = carried;
    for (const char* policy : {"auto", "phsa", "dense"}) {
      AttentionChoice choice;
      choice.policy = policy;
      const std::string message = Refusal([&] { ResolveAttention(choice, config, 4096); });
      EXPECT_NE(message.find("en+zh"), std::string::npos) << message;
    }
  }
  // Whoever runs it may.
  config.phsa_settings = R"({"punctuation": "zh"})";
  AttentionChoice choice;
  choice.config_json = R"({"punctuation": "marks.txt"})";
  EXPECT_EQ(ResolveAttention(choice, config, 4096).base.punctuation, "marks.txt");
}

TEST(AttentionChoice, WhatIsCarriedSaysHowFarItWasTested) {
  ModelConfig config;
  config.context = 8192;
  EXPECT_FALSE(TestedTokens(config));
  EXPECT_EQ(CarriedSettings(config), "");
  config.phsa_settings = R"({"top_k": 4, "tested_tokens": 4096})";
  EXPECT_EQ(TestedTokens(config), 4096);
  const Json carried = Json::parse(CarriedSettings(config));
  EXPECT_EQ(carried["tested_tokens"], 4096);
  EXPECT_EQ(carried["dense_below"], 0) << "what is saved is complete";
  EXPECT_EQ(carried["local"], 512);
  config.phsa_settings = R"({"tested_tokens": 0})";
  EXPECT_NE(Refusal([&] { ResolveAttention({}, config, 4096); }).find("tested_tokens"), std::string::npos);
}

TEST(Engine, ACacheIsOfOneModelOneAdapterAndOneWayToCompute) {
  const auto identity = [](const auto& change) {
    auto model = std::make_unique<FakeModel>("llama");
    EngineOptions options = FakeOptions(256, 512, SmallSettings(Policy::kPhsa, 2));
    change(model->config_for_test(), options);
    const KvIdentity all = Engine(std::move(model), SmallTokenizer(), options).cache_identity();
    return std::map<std::string, std::string>(all.begin(), all.end());
  };
  const auto same = identity([](ModelConfig&, EngineOptions&) {});
  const auto differs = [&](const char* name, const auto& change) {
    auto other = identity(change);
    EXPECT_NE(other.at(name), same.at(name)) << name;
    other[name] = same.at(name);
    EXPECT_EQ(other, same) << "only " << name << " differs";
  };
  differs("RoPE", [](ModelConfig& config, EngineOptions&) { config.rope_base = 500000; });
  differs("RoPE", [](ModelConfig& config, EngineOptions&) {
    config.rope_scaling.kind = RopeScaling::Kind::kLinear;
    config.rope_scaling.factor = 2;
  });
  differs("RoPE", [](ModelConfig& config, EngineOptions&) { config.rope_scaling.frequency_factors.assign(32, 2.0f); });
  differs("RMS epsilon", [](ModelConfig& config, EngineOptions&) { config.rms_eps = 1e-5f; });
  differs("attention", [](ModelConfig&, EngineOptions& options) { options.attention.base.top_k = 3; });
  differs("attention", [](ModelConfig&, EngineOptions& options) { options.attention.base.dense_below = 64; });
}

TEST(SamplingChoice, TheUsersCountFirstThenTheModelsThenOurs) {
  ModelConfig config;
  config.temperature = 0.3f;
  config.top_k = 5;
  SamplingChoice choice;
  choice.temperature = 0.0f;
  choice.seed = 42;
  const SamplerSettings settings = ResolveSampling(choice, config);
  EXPECT_EQ(settings.temperature, 0);
  EXPECT_EQ(settings.top_k, 5);
  EXPECT_EQ(settings.top_p, SamplerSettings().top_p);
  EXPECT_EQ(settings.seed, 42u);
  choice.seed.reset();
  EXPECT_NE(ResolveSampling(choice, config).seed, ResolveSampling(choice, config).seed) << "once in 4 billion runs";
  choice.top_p = 2.0f;
  EXPECT_NE(Refusal([&] { ResolveSampling(choice, config); }).find("top_p is 2"), std::string::npos);
}

}  // namespace
}  // namespace phsa
