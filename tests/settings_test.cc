#include "phsa/settings.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "attention/policies.h"
#include "phsa/error.h"
#include "refusal.h"

namespace phsa {
namespace {

std::string AllPolicies() {
  std::string names;
  for (const PolicyRow& row : kPolicies) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return names;
}

std::string JsonRefusal(std::string_view json) {
  return Refusal([&] { SettingsFromJson(json); });
}

std::string ValidateRefusal(void (*change)(Settings*)) {
  Settings settings;
  change(&settings);
  return Refusal([&] { Validate(settings); });
}

TEST(Settings, TheDefaultsAreThePapers32kSettingWithTheMeasuredLambda) {
  const Settings settings;
  EXPECT_EQ(settings.policy, Policy::kPhsa);
  EXPECT_EQ(settings.block_size, 16);
  EXPECT_EQ(settings.init_tokens, 128);
  EXPECT_EQ(settings.local_tokens, 512);
  EXPECT_EQ(settings.top_k, 16);
  EXPECT_EQ(settings.lambda, 0.9f);
  EXPECT_NO_THROW(Validate(settings));
}

TEST(Settings, ThePresetChangesAt4096Tokens) {
  for (const int64_t context : {int64_t{1}, int64_t{4096}}) {
    EXPECT_EQ(Settings::Preset(context).init_tokens, 16);
    EXPECT_EQ(Settings::Preset(context).local_tokens, 128);
    EXPECT_EQ(Settings::Preset(context).top_k, 16);
  }
  for (const int64_t context : {int64_t{4097}, std::numeric_limits<int64_t>::max()}) {
    EXPECT_EQ(Settings::Preset(context), Settings{});
  }
  EXPECT_EQ(Refusal([] { Settings::Preset(0); }), "settings: context_tokens is 0; allowed: 1 and up");
}

TEST(Settings, ValuesOutsideTheirRangeAreRefusedWithTheAllowedOnes) {
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->top_k = -1; }), "settings: top_k is -1; allowed: 0 to 65536");
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->top_k = 65537; }), "settings: top_k is 65537; allowed: 0 to 65536");
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->block_size = 0; }), "settings: block is 0; allowed: 16, 32, 64");
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->block_size = 48; }), "settings: block is 48; allowed: 16, 32, 64");
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->init_tokens = -16; }),
            "settings: init is -16; allowed: multiples of 16 from 0 to 1073741824");
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->local_tokens = 100; }),
            "settings: local is 100; allowed: multiples of 16 from 0 to 1073741824");
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->dense_below = (1 << 30) + 16; }),
            "settings: dense_below is 1073741840; allowed: multiples of 16 from 0 to 1073741824");
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->block_size = 32, s->init_tokens = 16; }),
            "settings: init is 16; allowed: multiples of 32 from 0 to 1073741824");
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->lambda = 1.5f; }), "settings: lambda is 1.5; allowed: 0 to 1");
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->lambda = std::numeric_limits<float>::quiet_NaN(); }),
            "settings: lambda is nan; allowed: 0 to 1");
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->lambda = -std::numeric_limits<float>::infinity(); }),
            "settings: lambda is -inf; allowed: 0 to 1");
  EXPECT_EQ(ValidateRefusal([](Settings* s) {
              s->head_lambda = {0.5f, -0.5f};
            }),
            "settings: head_lambda[1] is -0.5; allowed: 0 to 1");
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->policy = static_cast<Policy>(99); }),
            "settings: attention is 99; allowed: " + AllPolicies());
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->group_reduce = static_cast<GroupReduce>(-1); }),
            "settings: group_reduce is -1; allowed: sum, max, none");
  EXPECT_EQ(ValidateRefusal([](Settings* s) { s->policy = Policy::kInfllm2_64; }),
            "settings: block is 16; allowed with infllm2-64: 64");
  EXPECT_NE(ValidateRefusal([](Settings* s) { s->punctuation.clear(); }).find("punctuation is \"\""),
            std::string::npos);
  EXPECT_NE(ValidateRefusal([](Settings* s) { s->punctuation.assign(1, '\xff'); }).find("\\xff"), std::string::npos);
}

TEST(Settings, TheEndsOfEveryRangeAreAllowed) {
  Settings settings;
  settings.block_size = 64;
  settings.init_tokens = settings.local_tokens = settings.dense_below = 1 << 30;
  settings.top_k = 65536;
  settings.lambda = 1;
  settings.head_lambda = {0, 1};
  EXPECT_NO_THROW(Validate(settings));
  settings.init_tokens = settings.local_tokens = settings.dense_below = settings.top_k = 0;
  settings.lambda = 0;
  EXPECT_NO_THROW(Validate(settings));
}

TEST(Settings, Infllm2On64TokenBlocksTakesTheBudgetsOfTheOtherPolicies) {
  Settings settings = {.policy = Policy::kInfllm2_64, .block_size = 64, .init_tokens = 16, .local_tokens = 144};
  EXPECT_NO_THROW(Validate(settings));
  settings.init_tokens = 8;
  EXPECT_EQ(Refusal([&] { Validate(settings); }), "settings: init is 8; allowed: multiples of 16 from 0 to 1073741824");
}

TEST(Settings, EachPolicyAndReductionIsFoundByItsName) {
  for (int32_t p = PHSA_POLICY_DENSE; p <= PHSA_POLICY_SEPLLM; ++p) {
    EXPECT_EQ(PolicyFromName(Name(static_cast<Policy>(p))), static_cast<Policy>(p));
  }
  for (int32_t r = PHSA_GROUP_SUM; r <= PHSA_GROUP_NONE; ++r) {
    EXPECT_EQ(GroupReduceFromName(Name(static_cast<GroupReduce>(r))), static_cast<GroupReduce>(r));
  }
  EXPECT_EQ(Refusal([] { PolicyFromName("unknown"); }),
            "settings: attention is \"unknown\"; allowed: " + AllPolicies());
  EXPECT_EQ(Refusal([] { GroupReduceFromName("mean"); }),
            "settings: group_reduce is \"mean\"; allowed: sum, max, none");
}

TEST(Settings, FromCRefusesAWrongSizeAndUnknownEnums) {
  phsa_settings c{};
  EXPECT_NE(Refusal([&] { Settings::FromC(c); }).find("struct_size is 0; allowed: "), std::string::npos);
  c.struct_size = sizeof(c);
  c.policy = 7;
  EXPECT_NE(Refusal([&] { Settings::FromC(c); }).find("policy is 7; allowed: 0 to 6 (dense, "), std::string::npos);
  c.policy = -1;
  EXPECT_NE(Refusal([&] { Settings::FromC(c); }).find("policy is -1"), std::string::npos);
  c.policy = PHSA_POLICY_QUEST;
  c.group_reduce = 3;
  EXPECT_NE(Refusal([&] { Settings::FromC(c); }).find("group_reduce is 3; allowed: 0 to 2 (sum, "), std::string::npos);
}

// But for the punctuation, which C does not have.
Settings EverySettingChanged() {
  Settings settings;
  settings.policy = Policy::kQuest;
  settings.block_size = 32;
  settings.init_tokens = 64;
  settings.local_tokens = 96;
  settings.top_k = 5;
  settings.lambda = 0.25f;
  settings.group_reduce = GroupReduce::kMax;
  settings.dense_below = 320;
  settings.parts = 4;
  settings.survivors = 128;
  return settings;
}

TEST(Settings, FromCKeepsEveryValue) {
  phsa_settings c{};
  c.struct_size = sizeof(c);
  c.policy = PHSA_POLICY_QUEST;
  c.block_size = 32;
  c.init_tokens = 64;
  c.local_tokens = 96;
  c.top_k = 5;
  c.lambda = 0.25f;
  c.group_reduce = PHSA_GROUP_MAX;
  c.dense_below = 320;
  c.parts = 4;
  c.survivors = 128;
  EXPECT_EQ(Settings::FromC(c), EverySettingChanged());
}

TEST(SettingsJson, AnEmptyObjectIsTheDefaults) { EXPECT_EQ(SettingsFromJson("{}"), LayerSettings{}); }

TEST(SettingsJson, EveryKeyIsRead) {
  const LayerSettings settings = SettingsFromJson(R"({
    "attention": "quest", "block": 32, "init": 64, "local": 96, "top_k": 5, "lambda": 0.25,
    "group_reduce": "max", "dense_below": 320, "parts": 4, "survivors": 128, "punctuation": "en+zh"})");
  Settings expected = EverySettingChanged();
  expected.punctuation = "en+zh";
  EXPECT_EQ(settings.base, expected);
  EXPECT_TRUE(settings.layers.empty());
}

TEST(SettingsJson, OverridesStartFromTheBaseWhereverTheyStandInTheText) {
  const LayerSettings settings =
      SettingsFromJson(R"({"layers": {"0": {"attention": "dense"}, "3-5": {"top_k": 32}}, "init": 32, "top_k": 8})");
  EXPECT_EQ(settings.layers.size(), 4u);
  EXPECT_EQ(settings.ForLayer(0).policy, Policy::kDense);
  EXPECT_EQ(settings.ForLayer(0).top_k, 8);
  EXPECT_EQ(settings.ForLayer(1), settings.base);
  for (const int32_t layer : {3, 4, 5}) {
    EXPECT_EQ(settings.ForLayer(layer).top_k, 32);
    EXPECT_EQ(settings.ForLayer(layer).init_tokens, 32);
    EXPECT_EQ(settings.ForLayer(layer).policy, Policy::kPhsa);
  }
  EXPECT_EQ(settings.ForLayer(6), settings.base);
}

TEST(SettingsJson, LambdaMayBeAListOfOnePerHead) {
  const LayerSettings settings =
      SettingsFromJson(R"({"lambda": [0.5, 1, 0], "layers": {"1": {"lambda": 0.75}, "2": {"lambda": [0.1]}}})");
  EXPECT_EQ(settings.base.head_lambda, (std::vector<float>{0.5f, 1, 0}));
  EXPECT_TRUE(settings.ForLayer(1).head_lambda.empty());
  EXPECT_EQ(settings.ForLayer(1).lambda, 0.75f);
  EXPECT_EQ(settings.ForLayer(2).head_lambda, std::vector<float>{0.1f});
}

TEST(SettingsJson, Infllm2On64TokenBlocksNeedsNoBlockSize) {
  EXPECT_EQ(SettingsFromJson(R"({"attention": "infllm2-64"})").base.block_size, 64);
  EXPECT_EQ(SettingsFromJson(R"({"layers": {"1": {"attention": "infllm2-64"}}})").ForLayer(1).block_size, 64);
  EXPECT_EQ(JsonRefusal(R"({"attention": "infllm2-64", "block": 16})"),
            "settings: block is 16; allowed with infllm2-64: 64");
}

TEST(SettingsJson, WhatIsWrittenIsReadBackTheSame) {
  LayerSettings settings;
  settings.base.lambda = 0.1f;
  settings.base.top_k = 3;
  settings.base.punctuation = "a \"file\"，\n.txt";
  settings.layers[0] = settings.base;
  settings.layers[2] = settings.base;
  settings.layers[2].policy = Policy::kDense;
  settings.layers[3] = settings.layers[2];
  settings.layers[4] = settings.base;
  settings.layers[4].policy = Policy::kInfllm2_64;
  settings.layers[4].block_size = 64;
  settings.layers[7] = settings.base;
  settings.layers[7].head_lambda = {0.3f, 0.7f};
  settings.layers[9] = settings.base;
  settings.layers[9].lambda = 1.0f / 3;
  const std::string json = SettingsToJson(settings);
  EXPECT_EQ(SettingsFromJson(json), settings) << json;
  EXPECT_NE(json.find(R"("2-3":{"attention":"dense"})"), std::string::npos) << json;
  EXPECT_EQ(SettingsToJson(SettingsFromJson(json)), json);
}

TEST(SettingsJson, TheNamesOfTheFirstVersionAreReadAndNotWritten) {
  const LayerSettings old = SettingsFromJson(
      R"({"block_size": 32, "init_tokens": 64, "local_tokens": 96, "layers": {"1": {"init_tokens": 0}}})");
  EXPECT_EQ(old, SettingsFromJson(R"({"block": 32, "init": 64, "local": 96, "layers": {"1": {"init": 0}}})"));
  EXPECT_EQ(SettingsToJson(old).find("_tokens"), std::string::npos);
  EXPECT_EQ(JsonRefusal(R"({"init_tokens": 8})"), "settings: init is 8; allowed: multiples of 16 from 0 to 1073741824");
  EXPECT_EQ(JsonRefusal(R"({"block": 16, "block_size": 16})"), "settings: block_size is given twice, as block too");
}

TEST(SettingsJson, PunctuationMayBeAListOfIds) {
  const LayerSettings settings = SettingsFromJson(R"({"punctuation": [11, 13], "tested_tokens": 4096})");
  EXPECT_EQ(settings.base.punctuation, "ids:11,13");
  EXPECT_NE(SettingsToJson(settings).find(R"("punctuation":[11,13])"), std::string::npos);
  EXPECT_EQ(SettingsFromJson(SettingsToJson(settings)), settings);
  EXPECT_EQ(SettingsFromJson(R"({"punctuation": []})").base.punctuation, "ids:");
  std::string many = "[100000";
  for (int i = 0; i < 3000; ++i) many += ",100000";
  EXPECT_NE(JsonRefusal("{\"punctuation\": " + many + "]}").find("16384 characters"), std::string::npos);
}

TEST(SettingsJson, NumbersAreWrittenAsPeopleWriteThem) {
  EXPECT_EQ(SettingsToJson(Settings{}),
            R"({"attention":"phsa","block":16,"init":128,"local":512,"top_k":16,"lambda":0.9,)"
            R"("group_reduce":"sum","dense_below":0,"parts":1,"survivors":0,"punctuation":"en+zh"})");
}

TEST(SettingsJson, MistakesAreNamedWithKeyValueAndAllowedValues) {
  const std::pair<const char*, std::string> cases[] = {
      {R"({"topk": 1})",
       "settings: \"topk\" is not a setting; allowed: attention, block, init, local, top_k, "
       "lambda, group_reduce, dense_below, parts, survivors, punctuation, tested_tokens, layers"},
      {R"({"layers": {"1": {"layers": {}}}})",
       "settings: layers \"1\": \"layers\" is not a setting; allowed: attention, block, init, "
       "local, top_k, lambda, group_reduce, dense_below, parts, survivors, punctuation"},
      {R"({"top_k": -1})", "settings: top_k is -1; allowed: 0 to 65536"},
      {R"({"top_k": 1.5})", "settings: top_k is 1.5; allowed: 0 to 65536"},
      {R"({"top_k": "16"})", "settings: top_k is \"16\"; allowed: 0 to 65536"},
      {R"({"top_k": true})", "settings: top_k is true; allowed: 0 to 65536"},
      {R"({"top_k": null})", "settings: top_k is null; allowed: 0 to 65536"},
      {R"({"top_k": [1]})", "settings: top_k is a list; allowed: 0 to 65536"},
      {R"({"top_k": 4294967312})", "settings: top_k is 4294967312; allowed: 0 to 65536"},
      {R"({"top_k": -4294967280})", "settings: top_k is -4294967280; allowed: 0 to 65536"},
      {R"({"top_k": 18446744073709551632})", "settings: top_k is 1.8446744073709552e+19; allowed: 0 to 65536"},
      {R"({"block": {}})", "settings: block is an object; allowed: 16, 32, 64"},
      {R"({"lambda": 2})", "settings: lambda is 2; allowed: a number from 0 to 1"},
      {R"({"lambda": "0.9"})",
       "settings: lambda is \"0.9\"; allowed: a number from 0 to 1, or a list of them, one per KV head"},
      {R"({"lambda": []})", "settings: lambda is a list of 0; allowed: one number per KV head, 1 to 4096"},
      {R"({"lambda": [0.5, "x"]})", "settings: lambda[1] is \"x\"; allowed: a number from 0 to 1"},
      {R"({"attention": "flash"})", "settings: attention is \"flash\"; allowed: " + AllPolicies()},
      {R"({"attention": 1})", "settings: attention is 1; allowed: " + AllPolicies()},
      {R"({"group_reduce": "mean"})", "settings: group_reduce is \"mean\"; allowed: sum, max, none"},
      {R"({"punctuation": 3})",
       "settings: punctuation is 3; allowed: the name of a set or of a file, or a list of ids"},
      {R"({"punctuation": [1, "x"]})", "settings: punctuation is \"x\"; allowed: a list of token ids"},
      {R"({"punctuation": [-1]})",
       "settings: punctuation is \"ids:-1\"; allowed after ids:: ids with commas between them"},
      {R"({"tested_tokens": 0})", "settings: tested_tokens is 0; allowed: 1 and up"},
      {R"({"layers": {"1": {"tested_tokens": 5}}})",
       "settings: layers \"1\": \"tested_tokens\" is not a setting; allowed: attention, block, init, "
       "local, top_k, lambda, group_reduce, dense_below, parts, survivors, punctuation"},
      {R"({"top_k": 1, "top_k": 2})", "settings: \"top_k\" is given twice"},
      {R"({"layers": []})",
       "settings: layers is a list; allowed: an object such as {\"0\": {\"attention\": \"dense\"}}"},
      {R"({"layers": {"1": 5}})", "settings: layers \"1\" is 5; allowed: an object of settings"},
      {R"({"layers": {"1": {}, "0-2": {}}})", "settings: layer 1 is given twice in layers, the second time by \"1\""},
      {R"({"layers": {"1": {}, "01": {}}})", "settings: layer 1 is given twice in layers, the second time by \"1\""},
      {R"({"layers": {"1": {"top_k": -1}}})", "settings: top_k is -1; allowed: 0 to 65536 (in layers \"1\")"},
      {"[]", "settings: the JSON text is a list; allowed: an object"},
      {"3", "settings: the JSON text is 3; allowed: an object"},
  };
  for (const auto& [json, message] : cases) EXPECT_EQ(JsonRefusal(json), message) << json;
}

TEST(SettingsJson, LayersThatAreNoLayersAreRefused) {
  for (const char* key : {"", "-", "a", "1-", "-1", "5-3", "1-2-3", "+1", " 1", "1 ", "0x1", "4096", "0-99999999999"}) {
    const std::string message = JsonRefusal(R"({"layers": {")" + std::string(key) + R"(": {}}})");
    EXPECT_NE(message.find("allowed: a layer (\"3\") or a range (\"3-5\") within 0 to 4095"), std::string::npos)
        << message;
  }
}

TEST(SettingsJson, GarbageAndDeepNestingAreRefusedWithoutACrash) {
  const std::string deep(1000000, '[');
  std::string deep_objects;
  for (int n = 0; n < 100000; ++n) deep_objects += "{\"layers\":";
  const std::string texts[] = {"",
                               "{",
                               "nul",
                               "{\"a\":}",
                               "{\"top_k\": 1e999}",
                               "{} {}",
                               "\xff\xfe",
                               "{\"\xff\": 1}",
                               "{\"top_k\": NaN}",
                               deep,
                               deep_objects,
                               std::string(3, '\0')};
  for (const std::string& text : texts) EXPECT_NE(JsonRefusal(text).find("settings: "), std::string::npos);
  EXPECT_EQ(JsonRefusal(R"({"top_k": [[[[[]]]]]})"), "settings: nested deeper than 4 levels");

  // Whatever random edits make of a valid text, the answer is settings or an error.
  std::mt19937 random(1);
  const std::string valid = R"({"attention":"phsa","lambda":[0.5,1],"layers":{"0":{"top_k":2},"3-5":{"top_k":3}}})";
  for (int n = 0; n < 5000; ++n) {
    std::string text = valid;
    for (uint32_t edits = random() % 4 + 1; edits > 0; --edits) {
      text[random() % text.size()] =
          static_cast<char>(random() % 3 == 0 ? random() % 256 : valid[random() % valid.size()]);
    }
    try {
      Validate(SettingsFromJson(text).base);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), PHSA_INVALID_ARGUMENT);
    }
  }
}

}  // namespace
}  // namespace phsa
