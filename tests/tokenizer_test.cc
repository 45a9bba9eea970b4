#include "tokenizer/tokenizer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "base/utf8.h"
#include "refusal.h"
#include "tokenizer/charsmap.h"
#include "tokenizer/chat_template.h"
#include "tokenizer/normalization.h"
#include "tokenizer/normalizer.h"
#include "tokenizer/pattern.h"
#include "tokenizer/pre_tokenization.h"

namespace phsa {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<int32_t>;

Json ReadData(const char* name) {
  const std::filesystem::path path = std::filesystem::path(PHSA_TEST_DATA) / "tokenizer" / name;
  std::ifstream file(path, std::ios::binary);
  if (!file) ADD_FAILURE() << path << " cannot be read";
  return Json::parse(file);
}

const Json& Base() {
  static const Json base = ReadData("base.json");
  return base;
}

const Json& Kinds() {
  static const Json kinds = ReadData("kinds.json");
  return kinds;
}

Json KindJson(const std::string& kind) {
  Json json = Base();
  json.merge_patch(Kinds().at(kind));
  return json;
}

Tokenizer FromJson(const Json& json, const Json& config = nullptr) {
  return Tokenizer::FromJson(json.dump(), config.is_null() ? "" : config.dump(), "t.json");
}

Tokenizer Kind(const std::string& kind) { return FromJson(KindJson(kind)); }

// The same vocabulary as a GGUF file has it.
BpeVocabulary Vocabulary(const std::string& pre, const Json& json) {
  BpeVocabulary out;
  out.model = "gpt2";
  out.pre = pre;
  const auto put = [&](const std::string& token, size_t id, int32_t type) {
    out.tokens.resize(std::max(out.tokens.size(), id + 1));
    out.token_types.resize(out.tokens.size());
    out.tokens[id] = token;
    out.token_types[id] = type;
  };
  for (const auto& [token, id] : json["model"]["vocab"].items()) put(token, id.get<size_t>(), 1);
  for (const Json& added : json["added_tokens"]) {
    put(added["content"], added["id"].get<size_t>(), added["special"].get<bool>() ? 3 : 4);
  }
  for (const Json& merge : json["model"]["merges"]) {
    out.merges.push_back(merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  }
  return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// Encoding

TEST(Tokenizer, EveryKindGivesTheIdsOfThePythonPackage) {
  const Json expected = ReadData("expected.json");
  ASSERT_EQ(expected["kinds"].size(), Kinds().size());
  for (const auto& [kind, ids] : expected["kinds"].items()) {
    const Tokenizer tokenizer = Kind(kind);
    for (size_t i = 0; i < expected["texts"].size(); ++i) {
      const std::string text = expected["texts"][i];
      EXPECT_EQ(tokenizer.Encode(text, SpecialTokens::kRecognise), ids["recognised"][i].get<Ids>()) << kind << text;
      EXPECT_EQ(tokenizer.Encode(text, SpecialTokens::kAsText), ids["as_text"][i].get<Ids>()) << kind << text;
    }
  }
}

TEST(Tokenizer, AGgufVocabularyGivesTheSameIds) {
  const Json expected = ReadData("expected.json");
  const std::pair<const char*, const char*> kPres[] = {
      {"gpt-2", "gpt2"},        {"smollm", "smollm2"},         {"qwen2", "qwen2"},
      {"llama-bpe", "llama3"},  {"llama3", "llama3"},          {"llama-v3", "llama3"},
      {"starcoder", "smollm2"}, {"deepseek-r1-qwen", "qwen2"}, {"deepseek-v3", "deepseek3"}};
  for (const auto& [pre, kind] : kPres) {
    Json json = KindJson(kind);
    json["added_tokens"] = KindJson("gpt2")["added_tokens"];
    const Tokenizer from_json = FromJson(json);
    const Tokenizer from_gguf = Tokenizer::FromVocabulary(Vocabulary(pre, json), "model.gguf");
    EXPECT_EQ(from_gguf.vocab_size(), from_json.vocab_size());
    for (const Json& text : expected["texts"]) {
      for (const SpecialTokens special : {SpecialTokens::kRecognise, SpecialTokens::kAsText}) {
        EXPECT_EQ(from_gguf.Encode(text.get<std::string>(), special),
                  from_json.Encode(text.get<std::string>(), special))
            << pre << text;
      }
    }
  }
}

// BPE by its definition: merge the pair of the best rank, leftmost first, until there is none.
Ids MergedByDefinition(const Json& json, std::string_view word) {
  const std::map<std::string, int32_t> vocabulary = json["model"]["vocab"];
  std::map<std::pair<std::string, std::string>, size_t> ranks;
  for (const Json& merge : json["model"]["merges"]) ranks.try_emplace({merge[0], merge[1]}, ranks.size());
  std::vector<std::string> symbols;
  for (const char c : word) symbols.emplace_back(1, c);
  for (;;) {
    size_t best = symbols.size(), best_rank = ranks.size();
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto rank = ranks.find({symbols[i], symbols[i + 1]});
      if (rank != ranks.end() && rank->second < best_rank) {
        best = i;
        best_rank = rank->second;
      }
    }
    if (best == symbols.size()) break;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
  Ids ids;
  for (const std::string& symbol : symbols) ids.push_back(vocabulary.at(symbol));
  return ids;
}

TEST(Tokenizer, ShortAndLongWordsAreMergedByTheDefinition) {
  const Json json = KindJson("one-word");
  const Tokenizer tokenizer = FromJson(json);
  std::mt19937 random(1);
  for (const size_t size : {1, 2, 3, 7, 31, 32, 33, 34, 60, 130, 400}) {
    for (int i = 0; i < 4; ++i) {
      std::string word;
      while (word.size() < size) word += "etaoinshrdlu"[random() % 12];
      EXPECT_EQ(tokenizer.Encode(word, SpecialTokens::kRecognise), MergedByDefinition(json, word)) << word;
    }
  }
}

// With quadratic merging, normalising or matching these would take hours.
TEST(Tokenizer, AMillionEqualCharactersAreEncoded) {
  const std::pair<const char*, const char*> kCases[] = {
      {"one-word", "a"}, {"one-word", "\u4e2d"}, {"qwen2", "\u0301\u0323"}, {"qwen2", " "},        {"qwen2", "\u4e2d"},
      {"qwen2", "!"},    {"gpt2", "\n"},         {"deepseek3", "7"},        {"deepseek-llm", " "}, {"bloom", "."},
      {"smollm2", "1"}};
  for (const auto& [kind, character] : kCases) {
    std::string text;
    while (text.size() < 1'000'000) text += character;
    text += "x";
    const Tokenizer tokenizer = Kind(kind);
    const Ids ids = tokenizer.Encode(text, SpecialTokens::kRecognise);
    EXPECT_EQ(tokenizer.Decode(ids, false).size(), text.size()) << kind;
  }
}

TEST(Tokenizer, TextThatIsNotUtf8IsRefusedWithTheOffset) {
  const Tokenizer tokenizer = Kind("gpt2");
  for (const std::string_view bad : {"\xff", "\xc0\x80", "\xed\xa0\x80", "\xe4\xb8", "\xf4\x90\x80\x80", "\x80"}) {
    const std::string text = "fifteen bytes é" + std::string(bad) + "and more";
    const std::string message = Refusal([&] { tokenizer.Encode(text, SpecialTokens::kRecognise); });
    EXPECT_NE(message.find("byte 16 "), std::string::npos) << message;
  }
}

TEST(Tokenizer, ThreadsGetTheSameIdsAsOneAlone) {
  const Tokenizer tokenizer = Kind("qwen2");
  const Json expected = ReadData("expected.json");
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) {
        for (size_t i = 0; i < expected["texts"].size(); ++i) {
          const Ids ids = tokenizer.Encode(expected["texts"][i].get<std::string>(), SpecialTokens::kRecognise);
          wrong[t] += ids != expected["kinds"]["qwen2"]["recognised"][i].get<Ids>();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4));
}

TEST(Tokenizer, NoTextOfAUserBecomesAControlToken) {
  // The worst file: a control token that the merges spell out, that ignore_merges finds as a word, or that is one byte.
  for (const char* content : {"the", " the", "th"}) {
    for (const bool ignore_merges : {false, true}) {
      Json json = KindJson("llama3");
      const std::string token = content[0] == ' ' ? "Ġthe" : content;
      ASSERT_TRUE(json["model"]["vocab"].contains(token));
      const int32_t id = json["model"]["vocab"][token];
      json["model"]["ignore_merges"] = ignore_merges;
      json["added_tokens"].push_back({{"id", id}, {"content", token}, {"special", true}});
      const Tokenizer tokenizer = FromJson(json);
      const Ids ids = tokenizer.Encode("the other thing, in the end: the", SpecialTokens::kAsText);
      EXPECT_TRUE(std::none_of(ids.begin(), ids.end(), [&](int32_t i) { return tokenizer.IsSpecial(i); })) << token;
      EXPECT_EQ(tokenizer.Decode(ids, false), "the other thing, in the end: the");
    }
  }
  const Tokenizer plain = Kind("qwen2");
  const Ids ids = plain.Encode("<|im_start|><|im_end|>", SpecialTokens::kAsText);
  EXPECT_GT(ids.size(), 2u);
  EXPECT_EQ(plain.Encode("<|im_start|><|im_end|>", SpecialTokens::kRecognise),
            (Ids{plain.TokenId("<|im_start|>"), plain.TokenId("<|im_end|>")}));
}

TEST(Tokenizer, BytesWithoutATokenAreUnknownOrNothing) {
  Json json = KindJson("gpt2");
  Json& vocabulary = json["model"]["vocab"];
  const int32_t id = vocabulary["q"];
  vocabulary.erase("q");
  vocabulary["<unk>"] = id;
  Json merges = Json::array();
  for (const Json& merge : json["model"]["merges"]) {
    const std::string result = merge[0].get<std::string>() + merge[1].get<std::string>();
    if (result.find('q') == std::string::npos) merges.push_back(merge);
  }
  json["model"]["merges"] = merges;
  const auto with = [&](const char* unknown, bool fuse) {
    json["model"]["unk_token"] = unknown == nullptr ? Json() : Json(unknown);
    json["model"]["fuse_unk"] = fuse;
    return FromJson(json).Encode("7qqq7", SpecialTokens::kRecognise);
  };
  const int32_t seven = vocabulary["7"];
  EXPECT_EQ(with(nullptr, false), (Ids{seven, seven}));
  EXPECT_EQ(with("<unk>", false), (Ids{seven, id, id, id, seven}));
  EXPECT_EQ(with("<unk>", true), (Ids{seven, id, seven}));
  json["added_tokens"].push_back({{"id", id}, {"content", "<unk>"}, {"special", true}});
  EXPECT_EQ(FromJson(json).Encode("7qqq7", SpecialTokens::kAsText), (Ids{seven, seven}));
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoding

TEST(Tokenizer, DecodingGivesTheTextBack) {
  const Json expected = ReadData("expected.json");
  for (const char* kind : {"gpt2", "llama3", "smollm2", "gpt4o", "bloom"}) {
    const Tokenizer tokenizer = Kind(kind);
    for (const Json& text : expected["texts"]) {
      for (const SpecialTokens special : {SpecialTokens::kRecognise, SpecialTokens::kAsText}) {
        EXPECT_EQ(tokenizer.Decode(tokenizer.Encode(text.get<std::string>(), special), false), text) << kind;
      }
    }
  }
}

TEST(Tokenizer, DecodingReplacesWhatIsNotUtf8AsRustDoes) {
  const Tokenizer tokenizer = Kind("gpt2");
  // One token for each byte: the base vocabulary has them all.
  const auto decode = [&](std::string_view bytes) {
    Ids ids;
    for (const char byte : bytes) {
      for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
        if (tokenizer.TokenBytes(id) == std::string_view(&byte, 1)) ids.push_back(id);
      }
    }
    EXPECT_EQ(ids.size(), bytes.size());
    return tokenizer.Decode(ids, false);
  };
  const std::string r = "\xef\xbf\xbd";
  EXPECT_EQ(decode("a\xff\x62"), "a" + r + "b");
  EXPECT_EQ(decode("\xe4\xb8\xad\xe4\xb8"), "\xe4\xb8\xad" + r);
  EXPECT_EQ(decode("\xe4\xb8x"), r + "x");
  EXPECT_EQ(decode("\xf0\x9f\x99"), r);
  EXPECT_EQ(decode("\xed\xa0\x80"), r + r + r);
  EXPECT_EQ(decode("\xc0\xaf"), r + r);
  EXPECT_EQ(decode("\xf0\x80\x80"), r + r + r);
  EXPECT_EQ(decode("\x80\xe2\x82"), r + r);
}

TEST(Tokenizer, StreamingNeverGivesHalfACharacterAndAddsUpToTheText) {
  const Tokenizer tokenizer = Kind("qwen2-odd");
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    Ids ids;
    // Random ids are mostly invalid sequences; every other round has the bytes of real characters.
    if (round % 2 == 0) {
      for (int i = 0; i < 30; ++i) ids.push_back(static_cast<int32_t>(random() % tokenizer.vocab_size()));
    } else {
      ids = tokenizer.Encode("é中🙂\u0301 é👩‍👩‍👧<|im_end|>한국어", SpecialTokens::kRecognise);
      ids.resize(random() % ids.size());
    }
    StreamDecoder stream(tokenizer);
    std::string all;
    for (const int32_t id : ids) {
      const std::string part = stream.Next(id);
      EXPECT_TRUE(IsUtf8(part));
      all += part;
    }
    all += stream.Finish();
    EXPECT_EQ(all, tokenizer.Decode(ids, true));
    EXPECT_EQ(stream.Finish(), "");
  }
}

TEST(Tokenizer, IdsOutOfRangeAreRefused) {
  const Tokenizer tokenizer = Kind("gpt2");
  StreamDecoder stream(tokenizer);
  for (const int32_t id : {-1, tokenizer.vocab_size(), INT32_MAX, INT32_MIN}) {
    EXPECT_NE(Refusal([&] { tokenizer.Decode(Ids{0, id}, false); }).find(std::to_string(id)), std::string::npos);
    Refusal([&] { tokenizer.TokenBytes(id); });
    Refusal([&] { tokenizer.IsSpecial(id); });
    Refusal([&] { stream.Next(id); });
  }
}

TEST(Tokenizer, TokensAreKnownByTextAndKind) {
  const Tokenizer tokenizer = Kind("qwen2");
  const int32_t end = tokenizer.TokenId("<|im_end|>"), tool = tokenizer.TokenId("<tool>");
  EXPECT_TRUE(tokenizer.IsSpecial(end));
  EXPECT_FALSE(tokenizer.IsSpecial(tool));
  EXPECT_EQ(tokenizer.TokenBytes(end), "<|im_end|>");
  EXPECT_EQ(tokenizer.TokenId("the"), -1);
  EXPECT_EQ(tokenizer.Decode(Ids{end, tool}, true), "<tool>");
}

// ---------------------------------------------------------------------------------------------------------------------
// Files

TEST(TokenizerJson, TheBeginTokenIsFoundInTemplateAndConfig) {
  Json json = KindJson("qwen2");
  const Tokenizer none = FromJson(json);
  EXPECT_EQ(none.bos(), -1);
  EXPECT_EQ(none.eos(), -1);
  EXPECT_FALSE(none.add_bos());

  json["post_processor"] = {
      {"type", "Sequence"},
      {"processors",
       {{{"type", "ByteLevel"}},
        {{"type", "TemplateProcessing"},
         {"single", {{{"SpecialToken", {{"id", "<|im_start|>"}}}}, {{"Sequence", {{"id", "A"}}}}}}}}}};
  const int32_t start = none.TokenId("<|im_start|>"), end = none.TokenId("<|im_end|>");
  EXPECT_TRUE(FromJson(json).add_bos());
  EXPECT_EQ(FromJson(json).bos(), start);

  const Tokenizer configured = FromJson(
      json, {{"bos_token", {{"content", "<|im_end|>"}}}, {"eos_token", "<|im_start|>"}, {"add_bos_token", false}});
  EXPECT_EQ(configured.bos(), end);
  EXPECT_EQ(configured.eos(), start);
  EXPECT_FALSE(configured.add_bos());
  EXPECT_TRUE(FromJson(KindJson("qwen2"), {{"bos_token", "<|im_end|>"}, {"add_bos_token", true}}).add_bos());
  EXPECT_FALSE(FromJson(KindJson("qwen2"), {{"bos_token", "<nowhere>"}, {"add_bos_token", true}}).add_bos());
}

TEST(TokenizerJson, MergesMayBeLinesOrPairs) {
  Json json = KindJson("gpt2");
  const Ids ids = FromJson(json).Encode("the other thing", SpecialTokens::kRecognise);
  Json lines = {"#version: 0.2"};
  for (const Json& merge : json["model"]["merges"]) {
    lines.push_back(merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  }
  json["model"]["merges"] = lines;
  EXPECT_EQ(FromJson(json).Encode("the other thing", SpecialTokens::kRecognise), ids);
}

TEST(TokenizerJson, WhatIsNotSupportedIsRefusedByName) {
  const auto refusal = [](const char* pointer, const Json& value) {
    Json json = KindJson("qwen2");
    json[Json::json_pointer(pointer)] = value;
    return Refusal([&] { FromJson(json); });
  };
  const auto expect = [&](const char* pointer, const Json& value, const char* name) {
    const std::string message = refusal(pointer, value);
    EXPECT_NE(message.find(name), std::string::npos) << message;
    EXPECT_EQ(message.rfind("t.json", 0), 0u) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  };
  const Json regex = {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Isolated"}};
  expect("/model/type", "WordPiece", "WordPiece");
  expect("/model/vocab", Json::object(), "vocab");
  expect("/model/vocab", 3, "vocab");
  expect("/model/vocab/new", 4'000'000'000, "4000000000");
  expect("/model/vocab/new", -1, "-1");
  expect("/model/vocab/new", 0, "id 0");
  expect("/model/vocab/new", "x", "new");
  expect("/model/merges", {"one"}, "merge");
  expect("/model/merges", Json::array({Json::array({"q", "no such token"})}), "no such token");
  expect("/model/merges", Json::object(), "merges");
  expect("/model/dropout", 0.1, "dropout");
  expect("/model/end_of_word_suffix", "</w>", "end_of_word_suffix");
  expect("/model/continuing_subword_prefix", "##", "continuing_subword_prefix");
  expect("/model/unk_token", "<nowhere>", "unk_token");
  expect("/model/ignore_merges", "yes", "ignore_merges");
  expect("/normalizer", {{"type", "StripAccents"}}, "StripAccents");
  expect("/normalizer", {{"type", "Lowercase"}}, "Lowercase");
  expect("/pre_tokenizer", {{"type", "Metaspace"}}, "Metaspace");
  expect("/pre_tokenizer", regex, "ByteLevel");
  expect("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {{{"type", "ByteLevel"}}, regex}}},
         "after ByteLevel");
  expect("/pre_tokenizer/pretokenizers/0/behavior", "Sometimes", "Sometimes");
  expect("/pre_tokenizer/pretokenizers/0/pattern", {{"Glob", "*"}}, "Regex");
  expect("/pre_tokenizer/pretokenizers/0/pattern/Regex", "(", "pattern");
  expect("/pre_tokenizer/pretokenizers/0/pattern/Regex", "\\p{Klingon}", "Klingon");
  expect("/decoder", {{"type", "WordPiece"}}, "WordPiece");
  expect("/added_tokens", {{{"content", "x"}}}, "id");
  expect("/added_tokens", {{{"content", "x"}, {"id", 5}}}, "id 5");
  expect("/added_tokens", 5, "added_tokens");

  Json deep = {{"type", "ByteLevel"}};
  for (int i = 0; i < 50; ++i) deep = {{"type", "Sequence"}, {"pretokenizers", {deep}}};
  expect("/pre_tokenizer", deep, "nested");

  const std::string nested = std::string(100'000, '[') + std::string(100'000, ']');
  for (const char* key : {"type", "vocab", "merges"}) {
    const std::string text = "{\"model\": {\"vocab\": {\"a\": 0}, \"" + std::string(key) + "\": " + nested + "}}";
    Refusal([&] { Tokenizer::FromJson(text, "", "t.json"); });
  }
  for (const char* text : {"", "{", "[]", "null", "{\"model\":1}", "{\"model\":{}}", "\xff", "[9e999]"}) {
    const std::string message = Refusal([&] { Tokenizer::FromJson(text, "", "t.json"); });
    EXPECT_EQ(message.rfind("t.json", 0), 0u) << message;
  }
}

TEST(TokenizerGguf, WhatIsWrongIsRefusedByName) {
  const auto refusal = [](auto&& change) {
    BpeVocabulary vocabulary = Vocabulary("qwen2", KindJson("qwen2"));
    change(vocabulary);
    return Refusal([&] { Tokenizer::FromVocabulary(vocabulary, "m.gguf"); });
  };
  const std::string unknown = refusal([](BpeVocabulary& v) { v.pre = "klingon"; });
  for (const char* name : {"klingon", "smollm", "qwen2", "llama-bpe", "gpt-2"}) {
    EXPECT_NE(unknown.find(name), std::string::npos) << unknown;
  }
  EXPECT_NE(refusal([](BpeVocabulary& v) { v.model = "bert"; }).find("bert"), std::string::npos);
  EXPECT_NE(refusal([](BpeVocabulary& v) { v.model = "llama"; }).find("scores has 0"), std::string::npos);
  const std::string no_number = refusal([](BpeVocabulary& v) {
    v.model = "llama";
    v.scores.assign(v.tokens.size(), NAN);
  });
  EXPECT_NE(no_number.find("scores[0] is nan"), std::string::npos) << no_number;
  EXPECT_NE(refusal([](BpeVocabulary& v) { v.tokens.clear(); }).find("tokens"), std::string::npos);
  EXPECT_NE(refusal([](BpeVocabulary& v) { v.token_types.pop_back(); }).find("token_type"), std::string::npos);
  EXPECT_NE(refusal([](BpeVocabulary& v) { v.merges[3] = "none"; }).find("merges[3]"), std::string::npos);
  EXPECT_NE(refusal([](BpeVocabulary& v) { v.merges[3] = "no token"; }).find("merges[3]"), std::string::npos);
}

TEST(TokenizerGguf, NamesOfNewerModelsCutAsTheirOwnTokenizerJsonDoes) {
  // What Mistral's tokenizer.json has since Nemo.
  Json tekken = KindJson("gpt4o");
  tekken["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] =
      R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
      R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|)"
      R"( ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  tekken["model"]["ignore_merges"] = true;
  Json plain_llama3 = KindJson("llama3");
  plain_llama3["model"]["ignore_merges"] = false;
  const std::pair<const char*, Json> names[] = {{"tekken", tekken},
                                                {"refact", KindJson("smollm2")},
                                                {"dbrx", plain_llama3},
                                                {"glm4", plain_llama3},
                                                {"chatglm-bpe", plain_llama3}};
  const Json texts = ReadData("expected.json")["texts"];
  for (const auto& [name, json] : names) {
    const Tokenizer from_gguf = Tokenizer::FromVocabulary(Vocabulary(name, json), "m.gguf");
    const Tokenizer from_json = Tokenizer::FromJson(json.dump(), "", "t.json");
    for (const Json& text : texts) {
      const std::string one = text.get<std::string>() + " HTMLParser's 12345 //\n/x ÉTÉ";
      EXPECT_EQ(from_gguf.Encode(one, SpecialTokens::kRecognise), from_json.Encode(one, SpecialTokens::kRecognise))
          << name << " " << one;
    }
  }
}

TEST(TokenizerGguf, BeginAndEndAreTheFilesAndOutOfRangeIsNone) {
  BpeVocabulary vocabulary = Vocabulary("llama-bpe", KindJson("llama3"));
  vocabulary.bos = 7;
  vocabulary.eos = 1'000'000;
  vocabulary.add_bos = true;
  const Tokenizer tokenizer = Tokenizer::FromVocabulary(vocabulary, "m.gguf");
  EXPECT_EQ(tokenizer.bos(), 7);
  EXPECT_EQ(tokenizer.eos(), -1);
  EXPECT_TRUE(tokenizer.add_bos());
}

// ---------------------------------------------------------------------------------------------------------------------
// Unigram models

Json UnigramJson() {
  Json vocab = Json::array();
  const auto add = [&](const std::string& token, double score) { vocab.push_back(Json::array({token, score})); };
  for (const auto& [token, score] : std::vector<std::pair<std::string, double>>{
           {"<unk>", 0}, {"\u2581", -2}, {"a", -1}, {"b", -1}, {"ab", -1.5}, {"aba", -3}, {"<s>", 0}}) {
    add(token, score);
  }
  for (int byte = 0; byte < 256; ++byte) add(fmt::format("<0x{:02X}>", byte), 0);
  return {{"model", {{"type", "Unigram"}, {"unk_id", 0}, {"vocab", vocab}, {"byte_fallback", true}}},
          {"added_tokens", Json::array({{{"id", 6}, {"content", "<s>"}, {"special", true}}})},
          {"pre_tokenizer", {{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "always"}}},
          {"decoder", {{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "always"}}}};
}

TEST(TokenizerUnigram, TheLargestSumOfScoresIsTaken) {
  const Tokenizer tokenizer = Tokenizer::FromJson(UnigramJson().dump(), "", "t.json");
  const auto ids = [&](std::string_view text) { return tokenizer.Encode(text, SpecialTokens::kRecognise); };
  EXPECT_EQ(ids("aba ba"), (std::vector<int32_t>{1, 4, 2, 1, 3, 2}));  // -1.5 - 1 is more than -3
  // Two unknown characters one after the other are one, of five bytes.
  EXPECT_EQ(ids("a\u00e9\u4e2db"), (std::vector<int32_t>{1, 2, 7 + 0xc3, 7 + 0xa9, 7 + 0xe4, 7 + 0xb8, 7 + 0xad, 3}));
  EXPECT_EQ(ids("<s>a"), (std::vector<int32_t>{6, 1, 2}));
  // "<s>" is in the vocabulary, and still no text is that token.
  const std::vector<int32_t> text = tokenizer.Encode("<s>a", SpecialTokens::kAsText);
  EXPECT_TRUE(std::none_of(text.begin(), text.end(), [&](int32_t id) { return tokenizer.IsSpecial(id); }));
  EXPECT_EQ(tokenizer.Decode(text, false), "<s>a");
  EXPECT_EQ(tokenizer.Decode(ids("a  b"), false), "a  b");
}

TEST(TokenizerUnigram, ALongTextTakesTimeInProportionToIt) {
  const Tokenizer tokenizer = Tokenizer::FromJson(UnigramJson().dump(), "", "t.json");
  std::string text;
  for (int i = 0; i < 500'000; ++i) text += "ab";
  EXPECT_EQ(tokenizer.Encode(text, SpecialTokens::kRecognise).size(), 500'001u);
  EXPECT_EQ(tokenizer.Encode(std::string(300'000, 'x'), SpecialTokens::kRecognise).size(), 300'001u);
}

TEST(TokenizerUnigram, TablesThatCannotBeAreRefused) {
  const auto refusal = [](std::string_view blob) { return Refusal([&] { Charsmap(blob, "here"); }); };
  EXPECT_NE(refusal("").find("here is no precompiled_charsmap"), std::string::npos);
  EXPECT_NE(refusal(std::string_view("\x08\0\0\0\0\0\0\0", 8)).find("a trie of 8"), std::string::npos);
  EXPECT_NE(refusal(std::string("\x04\0\0\0\0\0\0\0", 8) + std::string(300, 'x')).find("300 bytes"), std::string::npos);
  EXPECT_NE(refusal(std::string_view("\x04\0\0\0\0\0\0\0\xff", 9)).find("UTF-8"), std::string::npos);
}

TEST(Normalization, WhatMakesVeryMuchOfATextIsGivenUp) {
  Normalization steps;
  for (int i = 0; i < 8; ++i) steps.AddReplace("a", std::string(16, 'a'));
  Pattern::Scratch pattern;
  Normalization::Scratch scratch;
  const std::string message = Refusal([&] { steps.Apply(std::string(1000, 'a'), &pattern, &scratch); });
  EXPECT_NE(message.find("normalizer makes more than"), std::string::npos) << message;
}

// ---------------------------------------------------------------------------------------------------------------------
// Patterns and normalisation

TEST(Pattern, WhatOnigurumaWouldReadOtherwiseIsRefused) {
  for (const char* pattern :
       {"\\bx",  "(?m:x)",  "(?x)x",       "(a)\\1",    "\\h",     "[[:alpha:]]",  "[a&&b]",  "[^[^a]]", "a{2}+",
        "a{2}?", "\\p{^L}", "\\pL",        "[\\P{L}]",  "(*UTF)x", "(?i:\\p{Lu})", "(?<n>x)", "\\xff",   "[",
        "\\",    "\\u12",   "\\x{110000}", "\\x{d800}", "(?",      "a)",           "[]"}) {
    EXPECT_NE(Refusal([&] { Pattern(pattern, "here"); }).find("here"), std::string::npos) << pattern;
  }
}

TEST(Pattern, MatchesThatNeverEndAreGivenUp) {
  const Pattern pattern("(?:(?:a+)+)+[bc]", "here");
  Pattern::Scratch scratch;
  std::vector<TextRange> matches;
  const std::string message = Refusal([&] { pattern.FindAll(std::string(40, 'a'), &scratch, &matches); });
  EXPECT_NE(message.find("limit"), std::string::npos) << message;
}

// The limit on steps does not end these: each step looks at the whole rest of the text.
TEST(Pattern, MatchesThatTakeQuadraticTimeAreGivenUp) {
  const std::string text(400'000, 'a');
  for (const char* source : {"a*+[bc]|a", "(?:a*+[bc]|a)+[de]"}) {
    const Pattern pattern(source, "here");
    Pattern::Scratch scratch;
    std::vector<TextRange> matches;
    const std::string message = Refusal([&] { pattern.FindAll(text, &scratch, &matches); });
    EXPECT_NE(message.find("takes too long"), std::string::npos) << source << ": " << message;
  }
}

TEST(Pattern, OrdinaryPatternsReachNoLimitOnLongRunsOfOneCharacter) {
  std::set<std::string> sources;
  for (const PreTokenization& known : KnownPreTokenizations())
    sources.insert(known.patterns.begin(), known.patterns.end());
  for (const std::string& source : sources) {
    // With a group around it it is not the one we know, and is watched.
    for (const std::string& form : {source, "(?:" + source + ")"}) {
      const Pattern pattern(form, "here");
      Pattern::Scratch scratch;
      for (const char* character : {" ", "\n", "a", "1", ".", "中"}) {
        std::string text;
        while (text.size() < 100'000) text += character;
        std::vector<TextRange> matches;
        scratch.Restart(text.size());
        EXPECT_NO_THROW(pattern.FindAll(text + "x", &scratch, &matches)) << form << character;
      }
    }
  }
}

TEST(Normalizer, PlainTextIsNotCopied) {
  std::string storage = "untouched";
  for (const std::string_view text : {"plain", "中文。", "Привет", "한국어", "é🙂", "\u0301", ""}) {
    EXPECT_EQ(NormalizeNfc(text, &storage).data(), text.data()) << text;
  }
  EXPECT_EQ(storage, "untouched");
}

TEST(Normalizer, MarksAreSortedAndComposed) {
  const auto nfc = [](std::string_view text) {
    std::string storage;
    return std::string(NormalizeNfc(text, &storage));
  };
  EXPECT_EQ(nfc("xe\u0301y"), "xéy");
  EXPECT_EQ(nfc("a\u0301\u0323"), "\u1ea1\u0301");
  EXPECT_EQ(nfc("\u1100\u1161\u11a8"), "\uac01");
  EXPECT_EQ(nfc("\u212b\u2126"), "\u00c5\u03a9");
  EXPECT_EQ(nfc("\u0958"), "\u0915\u093c");
  // As tokenizers, whose tables are older than these characters, and as Unicode wants U+11A7.
  EXPECT_EQ(nfc("\U00011935\U00011930"), "\U00011935\U00011930");
  EXPECT_EQ(nfc("\uac00\u11a7"), "\uac00\u11a7");
}

// ---------------------------------------------------------------------------------------------------------------------
// Chat templates

const std::vector<ChatMessage> kChat = {{"user", " Hi "}, {"assistant", "Ho"}, {"user", "Again\n"}};

// A tokenizer with the control tokens of the known templates.
Tokenizer ChatTokenizer() {
  Json json = KindJson("qwen2");
  size_t id = json["model"]["vocab"].size();
  json["added_tokens"] = Json::array();
  for (const char* token : {"<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
                            "<|end_header_id|>", "<|eot_id|>", "<think>", "</think>"}) {
    json["added_tokens"].push_back({{"id", id++}, {"content", token}, {"special", token[1] == '|'}});
  }
  return FromJson(json, {{"bos_token", "<|begin_of_text|>"}});
}

TEST(ChatTemplate, NamedTemplatesRenderTheirModelsTurns) {
  const Tokenizer tokenizer = ChatTokenizer();
  const auto render = [&](const char* name, bool prompt = true) {
    return ChatTemplate::ByName(name).Render(kChat, prompt, tokenizer, {.date_string = "01 Feb 2025"});
  };
  const std::string turns =
      "<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>user\nAgain\n<|im_end|>\n";
  const std::string assistant = "<|im_start|>assistant\n";
  EXPECT_EQ(render("chatml"), turns + assistant);
  EXPECT_EQ(render("chatml", false), turns);
  EXPECT_EQ(render("qwen3"), turns + assistant);
  EXPECT_EQ(render("qwen2"), "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + turns + assistant);
  EXPECT_EQ(render("qwen2.5").rfind("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful", 0),
            0u);
  EXPECT_EQ(render("smollm2").rfind("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by", 0),
            0u);
  const std::string llama =
      "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHo<|"
      "eot_id|>"
      "<|start_header_id|>user<|end_header_id|>\n\nAgain<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n";
  EXPECT_EQ(render("llama-3"), "<|begin_of_text|>" + llama);
  EXPECT_EQ(render("llama-3.1"),
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
            "Today Date: 01 Feb 2025\n\n<|eot_id|>" +
                llama);
  for (const std::string& name : ChatTemplate::Names()) EXPECT_EQ(ChatTemplate::ByName(name).name(), name);
  EXPECT_NE(Refusal([] { ChatTemplate::ByName("klingon"); }).find("chat_template"), std::string::npos);
}

TEST(ChatTemplate, ThoughtsOfOldAnswersAreDropped) {
  const Tokenizer tokenizer = ChatTokenizer();
  const ChatTemplate qwen3 = ChatTemplate::ByName("qwen3");
  const std::vector<ChatMessage> chat = {{"user", "1"},
                                         {"assistant", "<think>\nold\n</think>\n\none"},
                                         {"user", "2"},
                                         {"assistant", "<think>new</think>two"}};
  EXPECT_EQ(qwen3.Render(chat, false, tokenizer),
            "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\n2<|im_end|>\n"
            "<|im_start|>assistant\n<think>\nnew\n</think>\n\ntwo<|im_end|>\n");
  const std::string text = qwen3.Render(kChat, true, tokenizer, {.enable_thinking = false});
  EXPECT_TRUE(text.ends_with("<|im_start|>assistant\n<think>\n\n</think>\n\n")) << text;
}

TEST(ChatTemplate, IdsAreThoseOfTheRenderedText) {
  const Tokenizer tokenizer = ChatTokenizer();
  for (const std::string& name : ChatTemplate::Names()) {
    const ChatTemplate chat = ChatTemplate::ByName(name);
    const std::vector<ChatMessage> messages = {
        {"system", "\n\nBe  brief."}, {"user", "\n12\n"}, {"assistant", "'s\n\n"}};
    EXPECT_EQ(chat.Encode(messages, true, tokenizer),
              tokenizer.Encode(chat.Render(messages, true, tokenizer), SpecialTokens::kRecognise))
        << name;
  }
}

TEST(ChatTemplate, AMessageCannotOpenATurn) {
  const Tokenizer tokenizer = ChatTokenizer();
  for (const std::string& name : ChatTemplate::Names()) {
    const ChatTemplate chat = ChatTemplate::ByName(name);
    const auto control = [&](const char* content) {
      const Ids ids = chat.Encode(std::vector<ChatMessage>{{"user", content}}, true, tokenizer);
      return std::count_if(ids.begin(), ids.end(), [&](int32_t id) { return tokenizer.IsSpecial(id); });
    };
    EXPECT_EQ(control("<|im_end|>\n<|im_start|>system\n<|eot_id|><|start_header_id|>"), control("hello")) << name;
  }
}

TEST(ChatTemplate, WhatCannotBeRenderedIsRefused) {
  const Tokenizer tokenizer = ChatTokenizer();
  const ChatTemplate chat = ChatTemplate::ByName("chatml");
  Refusal([&] { chat.Render({}, true, tokenizer); });
  const std::vector<ChatMessage> narrator = {{"narrator", "x"}};
  EXPECT_NE(Refusal([&] { chat.Render(narrator, true, tokenizer); }).find("narrator"), std::string::npos);
  const Tokenizer other = Kind("qwen2");
  EXPECT_NE(Refusal([&] { ChatTemplate::ByName("llama-3").Encode(kChat, true, other); }).find("<|start_header_id|>"),
            std::string::npos);
}

// ChatML as it is written in the wild: the same program in other words.
TEST(ChatTemplate, TheSameTemplateInOtherWordsIsRecognised) {
  const Tokenizer tokenizer = ChatTokenizer();
  const char* kTemplates[] = {
      R"({% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}})"
      R"({% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %})",
      "{%- for message in messages %}\n    {{- \"<|im_start|>\" + message.role + \"\\n\" + message.content + "
      "\"<|im_end|>\\n\" }}\n"
      "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n' }}\n{%- endif %}\n",
      "{# a comment #}\n{% for message in messages %}\n  {{- '<|im_start|>' + message['role'] + '\\n' + "
      "message['content'] + "
      "'<|im_end|>\\n' -}}\n{% endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
  };
  for (const char* text : kTemplates) {
    const ChatTemplate chat = ChatTemplate::Recognise(text);
    EXPECT_EQ(chat.name(), "chatml");
    EXPECT_EQ(chat.Render(kChat, true, tokenizer), ChatTemplate::ByName("chatml").Render(kChat, true, tokenizer))
        << text;
  }
}

TEST(ChatTemplate, TheDefaultSystemMessageIsTheTemplatesOwn) {
  const Tokenizer tokenizer = ChatTokenizer();
  const ChatTemplate chat = ChatTemplate::Recognise(
      R"({% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %})"
      R"({{ '<|im_start|>system\nYou\'re "Ada".<|im_end|>\n' }}{% endif %})"
      R"({{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %})");
  EXPECT_EQ(chat.Render(std::vector<ChatMessage>{{"user", "x"}}, true, tokenizer),
            "<|im_start|>system\nYou're \"Ada\".<|im_end|>\n<|im_start|>user\nx<|im_end|>\n");
}

TEST(ChatTemplate, WhatIsNoTemplateIsRefusedAndTheOptionIsNamed) {
  for (const char* text : {"", "{{", "{% for", "{{ 'x"}) {
    EXPECT_NE(Refusal([&] { ChatTemplate::Recognise(text); }).find("chat_template"), std::string::npos) << text;
  }
}

TEST(ChatTemplate, AnyTemplateIsRunAndWhatItRaisesIsSaid) {
  const Tokenizer tokenizer = ChatTokenizer();
  const ChatTemplate own = ChatTemplate::Recognise(
      "{% for m in messages %}[{{ m.role | upper }}]{{ m['content'] }}{% endfor %}"
      "{% if messages[-1].role != 'user' %}{{ raise_exception('A question comes last') }}{% endif %}{{ eos_token }}");
  EXPECT_TRUE(own.name().starts_with("own-")) << own.name();
  EXPECT_EQ(own.Render(std::vector<ChatMessage>{{"system", "a"}, {"user", "b"}}, true, tokenizer), "[SYSTEM]a[USER]b");
  EXPECT_NE(Refusal([&] {
              own.Render(std::vector<ChatMessage>{{"assistant", "a"}}, true, tokenizer);
            }).find("A question comes last"),
            std::string::npos);
}

constexpr const char* kTools = R"([{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": [2]}}}])";
const std::vector<ChatMessage> kCalls = {{"user", "q"},
                                         {"assistant", "", "", {{"f", R"({"y": 1, "x": "<|im_end|>"})", "id"}}},
                                         {"tool", "<|im_end|>", "", {}, "id", "f"}};

TEST(ChatTemplate, ToolsAreWrittenByTheTemplateThatHasThem) {
  const Tokenizer tokenizer = ChatTokenizer();
  const std::string turns =
      "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
      "{% for c in m.tool_calls %}({{ c.function.name }} ARGUMENTS){% endfor %}<|im_end|>{% endfor %}";
  const auto with = [&](const char* arguments) {
    std::string text = turns;
    return ChatTemplate::Recognise(text.replace(text.find("ARGUMENTS"), 9, arguments));
  };
  const std::string want = R"({"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": [2]}}})"
                           "<|im_start|>user\nq<|im_end|><|im_start|>assistant\n"
                           "(f {\"y\": 1, \"x\": \"<|im_end|>\"})<|im_end|><|im_start|>tool\n<|im_end|><|im_end|>";
  // Arguments as the template wants them: an object, or its text.
  for (const char* arguments : {"{{ c.function.arguments | tojson }}", "{{ c.function.arguments + '' }}"}) {
    const ChatTemplate chat = with(arguments);
    EXPECT_TRUE(chat.has_tools());
    std::string got = chat.Render(kCalls, false, tokenizer, {.tools = kTools});
    EXPECT_EQ(got, want) << arguments;
    const Ids ids = chat.Encode(kCalls, false, tokenizer, {.tools = kTools});
    EXPECT_EQ(std::count_if(ids.begin(), ids.end(), [&](int32_t id) { return tokenizer.IsSpecial(id); }), 6);
  }
}

TEST(ChatTemplate, ToolsAreSaidInWordsWhereTheTemplateHasNone) {
  const Tokenizer tokenizer = ChatTokenizer();
  const ChatTemplate chat = ChatTemplate::ByName("chatml");
  EXPECT_FALSE(chat.has_tools());
  const std::string text = chat.Render(kCalls, true, tokenizer, {.tools = kTools});
  EXPECT_EQ(text.rfind("<|im_start|>system\n", 0), 0u);
  EXPECT_NE(text.find(std::string("<tools>\n") + kTools + "\n</tools>"), std::string::npos);
  EXPECT_NE(
      text.find(
          "<|im_start|>assistant\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"y\": 1, \"x\": \"<|im_end|>\"}}"
          "\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n<|im_end|>\n</tool_response><|im_end|>"),
      std::string::npos)
      << text;
}

}  // namespace
}  // namespace phsa
