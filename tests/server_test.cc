#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <thread>

#include "failing_backend.h"
#include "fake_engine.h"
#include "grammar/matcher.h"
#include "io/json.h"
#include "other_device.h"
#include "refusal.h"
#include "server/allowed_hosts.h"
#include "server/answer_form.h"
#include "server/answer_sources.h"
#include "server/answers.h"
#include "server/api.h"
#include "server/metrics.h"
#include "server/service.h"
#include "server/worker.h"
#include "test_backend.h"

namespace phsa::server {
namespace {

EngineOptions Options() {
  EngineOptions options = FakeOptions(512);
  options.cache_texts = 4;
  options.other_attention = true;
  return options;
}

class Api : public ::testing::Test {
 protected:
  Api() : engine(LoadedEngine(Options())), model{*engine, "fake", ChatTemplate::ByName("chatml"), {}, 64} {}

  // The field that is refused.
  template <class Parse>
  std::string Refused(const Parse& parse, const std::string& body) {
    try {
      parse(body, model);
    } catch (const HttpError& error) {
      EXPECT_EQ(error.status(), 400);
      EXPECT_FALSE(std::string(error.what()).empty());
      return error.param();
    }
    return "nothing";
  }

  std::unique_ptr<Engine> engine;
  ServedModel model;
};

TEST_F(Api, APromptIsATextOrTokensOrAListOfEither) {
  const auto tokens = [&](const std::string& prompt) {
    std::vector<std::vector<int32_t>> all;
    for (const Prompt& one : ParseCompletion("{\"prompt\": " + prompt + "}", model).prompts) all.push_back(one.tokens);
    return all;
  };
  const std::vector<std::vector<int32_t>> one = {{0, 1, 2}}, two = {{0, 1, 2}, {3}};
  EXPECT_EQ(tokens("\"abc\""), one);
  EXPECT_EQ(tokens("[0, 1, 2]"), one);
  EXPECT_EQ(tokens("[0, 1.0, 2]"), one);
  EXPECT_EQ(tokens("[\"abc\", \"d\"]"), two);
  EXPECT_EQ(tokens("[[0, 1, 2], [3]]"), two);
  EXPECT_EQ(tokens("[[0, 1, 2], \"d\"]"), two);
}

TEST_F(Api, WhatIsNotSaidIsTheServersOwn) {
  const GenerationRequest completion = ParseCompletion(R"({"prompt": "abc", "n": null, "user": "me"})", model);
  EXPECT_EQ(completion.options.max_tokens, 16);
  EXPECT_EQ(completion.n, 1);
  EXPECT_FALSE(completion.stream);
  EXPECT_FALSE(completion.options.log_probabilities);
  EXPECT_EQ(completion.attention.base.policy, Policy::kDense);
}

TEST_F(Api, EchoWithLogprobsScoresThePrompt) {
  EXPECT_TRUE(
      ParseCompletion(R"({"prompt": "a", "echo": true, "logprobs": 0})", model).options.prompt_log_probabilities);
  EXPECT_FALSE(ParseCompletion(R"({"prompt": "a", "echo": true})", model).options.prompt_log_probabilities);
  EXPECT_FALSE(ParseCompletion(R"({"prompt": "a", "logprobs": 1})", model).options.prompt_log_probabilities);
}

TEST_F(Api, SettingsOfTheAttentionChangeTheServersOwn) {
  model.attention.policy = "phsa";
  model.attention.given["lambda"] = 0.5f;
  const LayerSettings settings =
      ParseCompletion(R"({"prompt": "a", "top_k": 7, "phsa": {"top_k": 3, "init": 16}})", model).attention;
  EXPECT_EQ(settings.base.policy, Policy::kPhsa);
  EXPECT_EQ(settings.base.top_k, 3);
  EXPECT_EQ(settings.base.init_tokens, 16);
  EXPECT_EQ(settings.base.lambda, 0.5f);
  const std::string dense = R"({"prompt": "a", "phsa": {"attention": "dense"}})";
  EXPECT_EQ(ParseCompletion(dense, model).attention.base.policy, Policy::kDense);
}

TEST_F(Api, ASettingOfDenseAttentionIsRefused) {
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "phsa": {"attention": "dense", "top_k": 3}})"), "phsa");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "phsa": {"top_k": 3}})"), "phsa");
  // What the server was started with may be for other requests.
  model.attention.policy = "phsa";
  model.attention.given["top_k"] = 3;
  EXPECT_EQ(ParseCompletion(R"({"prompt": "a", "phsa": {"attention": "dense"}})", model).attention.base.policy,
            Policy::kDense);
  EXPECT_EQ(ParseCompletion(R"({"prompt": "a", "phsa": {"attention": "infllm2"}})", model).attention.base.top_k, 3);
}

TEST_F(Api, AFileOfTheServerIsNoPunctuation) {
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "phsa": {"punctuation": "/etc/hostname"}})"),
            "phsa.punctuation");
}

TEST_F(Api, AWrongFieldIsNamed) {
  EXPECT_EQ(Refused(ParseCompletion, "{}"), "prompt");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": [101]})"), "prompt");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "temperature": -1})"), "temperature");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "logit_bias": {"5": "x"}})"), "logit_bias.5");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "logit_bias": {"101": 1}})"), "logit_bias");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "logit_bias": {"05": 1}})"), "logit_bias");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "logit_bias": [1]})"), "logit_bias");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "presence_penalty": 2.5})"), "presence_penalty");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "grammar": "root ::= x"})"), "grammar");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "response_format": {"type": "xml"}})"), "response_format.type");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "response_format": {"type": "json_schema"}})"),
            "response_format");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "response_format": {"type": "json_schema", "json_schema":
      {"name": "x", "schema": {"type": "strin"}}}})"),
            "response_format");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "grammar": "root ::= [a]", "response_format":
      {"type": "json_object"}})"),
            "grammar");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "stream_options": {"include_usage": 1}})"),
            "stream_options.include_usage");
  EXPECT_EQ(Refused(ParseChat, R"({"messages": [{"role": "user", "content": "a"}, {"role": "x"}]})"),
            "messages[1].role");
  EXPECT_EQ(Refused(ParseInspect, R"({"prompt": "a", "messages": [{"role": "user", "content": "a"}]})"), "prompt");
  EXPECT_EQ(Refused(ParseInspect, R"({"prompt": "a", "answer": 5})"), "answer");
  EXPECT_EQ(Refused(ParseTokenize, R"({"content": 5})"), "content");
  EXPECT_EQ(Refused(ParseDetokenize, R"({"tokens": "a"})"), "tokens");
  EXPECT_EQ(Refused(ParseApplyTemplate, R"({"messages": 1})"), "messages");
  EXPECT_EQ(Refused(ParseCompletion, "[]"), "");
}

TEST_F(Api, ASchemaHasItsPropertiesInTheOrderOfTheBodyAndIsCompiledOnce) {
  const auto parse = [&](const std::string& body) { return ParseCompletion(body, model).options.grammar; };
  const std::string body = R"({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema":
      {"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}}, "required": ["a", "b"]}}}, "x": {"y": 1}})";
  const auto grammar = parse(body);
  ASSERT_NE(grammar, nullptr);
  EXPECT_EQ(parse(body), grammar);
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 128; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  GrammarMatcher matcher(grammar, std::make_shared<const TokenTrie>(tokens));
  for (const char c : std::string(R"({"b":1,"a":2})")) ASSERT_TRUE(matcher.Accept(c)) << c;
  EXPECT_TRUE(matcher.MustEnd());
  EXPECT_NE(parse(R"({"prompt": "a", "response_format": {"type": "json_object"}})"), nullptr);
  EXPECT_EQ(parse(R"({"prompt": "a", "response_format": {"type": "text"}})"), nullptr);
  EXPECT_NE(parse(R"({"prompt": "a", "grammar": "root ::= [a-z]+"})"), nullptr);
}

// What an answer with tools may be, by the letters.
class ChatGrammarTest : public Api {
 protected:
  ChatGrammarTest() {
    request.chat = true;
    const char* const city = R"({"type": "object", "properties": {"city": {"enum": ["Bern", "Rom"]}},
                                 "required": ["city"]})";
    request.tools.tools = {{.name = "look", .parameters = city, .place = "tools[0]"}, {.name = "now"}};
    request.tools.choice = ToolUse::Choice::kAuto;
  }

  void Compile(const std::optional<AnswerForm>& form = std::nullopt) { grammar = ChatGrammar(form, model, &request); }
  bool Takes(const std::string& text) const {
    GrammarMatcher matcher(grammar, trie);
    for (const char c : text) {
      if (!matcher.Accept(static_cast<uint8_t>(c))) return false;
    }
    return matcher.MayEnd();
  }
  void Expect(const std::vector<std::string>& good, const std::vector<std::string>& bad) const {
    for (const std::string& text : good) EXPECT_TRUE(Takes(text)) << text;
    for (const std::string& text : bad) EXPECT_FALSE(Takes(text)) << text;
  }
  // A call of `look`, as JSON.
  static std::string Object(const std::string& city, const std::string& key = "arguments") {
    return R"({"name": "look", ")" + key + R"(": {"city": ")" + city + "\"}}";
  }
  static std::string Tagged(const std::string& call) { return "<tool_call>\n" + call + "\n</tool_call>"; }

  GenerationRequest request;
  std::shared_ptr<const Grammar> grammar;
  std::shared_ptr<const TokenTrie> trie = [] {
    std::vector<std::string> bytes;
    for (int byte = 0; byte < 255; ++byte) bytes.emplace_back(1, static_cast<char>(byte));
    return std::make_shared<const TokenTrie>(bytes);
  }();
};

TEST_F(ChatGrammarTest, ACallThatBeginsIsOneOfAToolAndFulfilsItsSchema) {
  const std::string call = Object("Bern"), now = R"({"name": "now", "arguments": {}})";
  Compile();
  EXPECT_TRUE(request.tools.guided);
  Expect({"", "Hello <tool", Tagged(call), "I look.\n" + Tagged(call) + "\n" + Tagged(now) + " So.", call, now,
          Object("Rom", "parameters"), "[" + call + ", " + now + "]",
          R"({"type": "function", "name": "now", "parameters": {}})", R"({"answer": 1})"},
         {Tagged(Object("Ulm")), Tagged(R"({"name": "other", "arguments": {}})"), "<tool_call>", Tagged("{}"),
          Object("Ulm"), R"({"name": "now", "arguments": {"a": 1}})", R"({"name": "Anna"})", call + " and more"});
  request.tools.parallel = false;
  Compile();
  Expect({Tagged(call), "So " + Tagged(now), call},
         {Tagged(call) + "\n" + Tagged(now), Tagged(call) + "x", "[" + call + ", " + now + "]"});
  request.tools.allowed = {"now"};
  Compile();
  Expect({Tagged(now), "x"}, {Tagged(call)});
}

TEST_F(ChatGrammarTest, ACallThatIsAskedForIsAllThereIs) {
  const std::string call = Object("Bern"), now = R"({"name": "now", "arguments": {}})";
  request.tools.choice = ToolUse::Choice::kRequired;
  Compile();
  Expect({Tagged(call), Tagged(call) + "\n" + Tagged(now)},
         {"", "Hello", call, "x" + Tagged(call), Tagged(call) + "x"});
  request.tools.format = CallFormat::kJson;
  Compile();
  Expect({call, call + "; " + now, call + "\n" + now, "[" + call + "]", "<|python_tag|>" + call},
         {"", "Hello", Tagged(call), Object("Ulm"), "[]"});
  request.tools.format = CallFormat::kMistral;
  Compile();
  Expect({"[TOOL_CALLS] [" + call + ", " + now + "]", "[TOOL_CALLS][" + now + "]"}, {call, "[TOOL_CALLS]" + call, ""});
  request.tools.format = CallFormat::kMistralNamed;
  Compile();
  Expect({R"([TOOL_CALLS]look[ARGS]{"city": "Rom"}[TOOL_CALLS]now[ARGS]{})"},
         {R"([TOOL_CALLS]look[ARGS]{})", "[TOOL_CALLS]now", "[TOOL_CALLS][" + now + "]"});
  request.tools.parallel = false;
  request.tools.allowed = {"look"};
  Compile();
  Expect({R"([TOOL_CALLS]look[ARGS]{"city":"Rom"})"},
         {R"([TOOL_CALLS]now[ARGS]{})", R"([TOOL_CALLS]look[ARGS]{"city":"Rom"}[TOOL_CALLS]look[ARGS]{"city":"Rom"})"});
}

TEST_F(ChatGrammarTest, ThoughtsComeFirstAndAreFree) {
  const std::string call = Tagged(Object("Bern")), thought = "<think>\nhm " + Tagged("{}") + " {\n</think>\n\n";
  request.thinks = true;
  Compile();
  Expect({call, thought + call, thought + "Hello", thought + Object("Rom")},
         {thought + Tagged("{}"), thought + Object("Ulm"), "<think>hm"});
  request.tools.choice = ToolUse::Choice::kRequired;
  Compile();
  Expect({call, thought + call}, {thought + "Hello", "Hello", thought});
  request.thinking = true;
  Compile();
  Expect({"hm</think>\n" + call, "</think>" + call}, {call, "hm</think>Hello"});
  const AnswerForm form = MakeForm("gbnf", GrammarExpression::Gbnf("root ::= [0-9]+", "grammar"), model);
  request.tools.choice = ToolUse::Choice::kAuto;
  Compile(form);
  Expect({"</think>12", "</think>" + call}, {"12", "</think>x", "</think>" + Object("Bern"), "</think>12" + call});
  request.tools = {};
  Compile(form);
  Expect({"hm</think>\n\n12"}, {"12"});
  request.thinks = request.thinking = false;
  Compile(form);
  Expect({"12"}, {"</think>12"});
  EXPECT_EQ(ChatGrammar(std::nullopt, model, &request), nullptr);
}

TEST_F(ChatGrammarTest, WhatNoGrammarCanHoldIsFreeUnlessItMustBeFulfilled) {
  request.tools.tools[0].parameters = R"({"type": "object", "properties": {"a": {"not": {}}}})";
  const auto refusal = [&]() -> std::string {
    try {
      Compile();
    } catch (const HttpError& error) {
      EXPECT_EQ(error.status(), 400);
      EXPECT_EQ(error.param(), "tools[0]");
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal(), "");
  Expect({Tagged(R"({"name": "look", "arguments": {"a": [1]}})"), Tagged(R"({"name": "now", "arguments": {}})")},
         {Tagged(R"({"name": "look", "arguments": [1]})"), Tagged(R"({"name": "now", "arguments": {"a": 1}})")});
  request.tools.tools[0].strict = true;
  EXPECT_NE(refusal().find("#/properties/a/not"), std::string::npos) << refusal();
  request.tools.tools[0].strict = false;
  request.tools.choice = ToolUse::Choice::kRequired;
  EXPECT_NE(refusal().find("#/properties/a/not"), std::string::npos);
  request.tools.allowed = {"now"};
  EXPECT_EQ(refusal(), "");
  for (const char* schema : {R"({"type": "string"})", R"({"a": 1e999})", R"({"properties": []})"}) {
    request.tools.tools[0].parameters = schema;
    request.tools.allowed.clear();
    EXPECT_NE(refusal(), "") << schema;
    request.tools.choice = ToolUse::Choice::kAuto;
    EXPECT_EQ(refusal(), "") << schema;
    request.tools.choice = ToolUse::Choice::kRequired;
  }
}

TEST_F(Api, AQuestionIsBehindTheLastEmptyLineOrTheLastLineBreak) {
  const auto document = [](std::string_view text) { return text.substr(0, QuestionBegin(text)); };
  EXPECT_EQ(document("a\n\nb\nc\n \nWhat?\n"), "a\n\nb\nc\n \n");
  EXPECT_EQ(document("a\r\n\r\nb?"), "a\r\n\r\n");
  EXPECT_EQ(document("a\nb?"), "a\n");
  EXPECT_EQ(document("b?"), "");
  EXPECT_EQ(document("\n\nb?"), "\n\n");
  EXPECT_EQ(document(" \n"), "");
}

TEST_F(Api, SourcesAreSoughtInWhatWasSaidToTheModelWithoutItsQuestions) {
  model.chat_template = ChatTemplate::Recognise("{% for m in messages %}{{ m.content }}\n{% endfor %}");
  const auto given = [&](const std::string& body) {
    std::vector<std::string> places;
    const GenerationRequest parsed = ParseChat(body, model);
    for (const GivenText& text : parsed.prompts.front().given) places.push_back(text.place);
    return places;
  };
  const std::string messages = R"("messages": [{"role": "system", "content": "xxx yyy zzz."},
      {"role": "user", "content": "aaa bbb ccc.\n\nddd."}, {"role": "assistant", "content": "eee fff ggg."},
      {"role": "user", "content": "hhh."}])";
  const std::vector<std::string> expected = {"messages[0].content", "messages[1].content"};
  EXPECT_EQ(given("{" + messages + R"(, "phsa": {"sources": true}})"), expected);
  EXPECT_TRUE(given("{" + messages + "}").empty());
  EXPECT_TRUE(given("{" + messages + R"(, "phsa": {"sources": 0}})").empty());
  const GenerationRequest request =
      ParseCompletion(R"({"prompt": "aaa bbb ccc.\nddd.", "phsa": {"sources": 3}})", model);
  ASSERT_EQ(request.prompts.front().given.size(), 1u);
  EXPECT_EQ(request.prompts.front().sources->options.most, 3u);
  EXPECT_EQ(request.prompts.front().sources->texts.front().sentences.size(), 1u);
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "phsa": {"sources": 51}})"), "phsa.sources");
  EXPECT_EQ(Refused(ParseCompletion, R"({"prompt": "a", "phsa": {"sources": "x"}})"), "phsa.sources");
}

TEST_F(Api, PenaltiesAndBiasesAreTheSamplers) {
  const GenerationRequest request = ParseCompletion(
      R"({"prompt": "a", "frequency_penalty": 0.5, "presence_penalty": -1, "logit_bias": {"7": -100, "0": 1.5}})",
      model);
  EXPECT_EQ(request.options.sampler.frequency_penalty, 0.5f);
  EXPECT_EQ(request.options.sampler.presence_penalty, -1.0f);
  EXPECT_EQ(request.options.sampler.logit_bias, (std::vector<std::pair<int32_t, float>>{{0, 1.5f}, {7, -100.0f}}));
}

TEST_F(Api, APromptThatFillsTheContextIsRefusedWithBothNumbers) {
  const std::string body(511, 'a');
  EXPECT_EQ(ParseCompletion("{\"prompt\": \"" + body + "\"}", model).prompts.front().tokens.size(), 511u);
  try {
    ParseCompletion("{\"prompt\": \"a" + body + "a\"}", model);
    FAIL();
  } catch (const HttpError& error) {
    EXPECT_EQ(error.code(), "context_length_exceeded");
    EXPECT_NE(std::string(error.what()).find("513"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("512"), std::string::npos) << error.what();
  }
}

TEST_F(Api, AnInspectionShowsThePromptsLastTokenAndTheAnswer) {
  const InspectRequest request = ParseInspect(R"({"prompt": "abc", "answer": "de"})", model);
  EXPECT_EQ(request.prompt_tokens, 3);
  EXPECT_EQ(request.tokens.size(), 5u);
  EXPECT_EQ(request.last, 3);
  EXPECT_EQ(request.attention.base.policy, Policy::kPhsa);  // the server's own is dense
  EXPECT_EQ(Refused(ParseInspect, R"({"prompt": "abc", "phsa": {"attention": "dense"}})"), "phsa");
}

TEST_F(Api, TokensWithoutCharactersAreShownByTheirBytes) {
  const std::vector<int32_t> tokens = {0, 33, 34, kEnd};  // "a", the halves of "é", a control token
  EXPECT_EQ(TokenText(engine->tokenizer(), 33), "bytes:\\xc3");
  const std::vector<TokenLogProbability> values(4, {-1, {{1, -0.5f}, {0, -1}}});
  TextPosition position(engine->tokenizer());
  const ScoredText text{tokens, values};
  const Json json = CompletionLogProbabilities(engine->tokenizer(), {&text, 1}, position);
  EXPECT_EQ(json["text_offset"], Json({0, 1, 1, 2}));
  EXPECT_EQ(json["top_logprobs"][0], Json({{"a", -1.0}, {"b", -0.5}}));
  const ScoredText echoed{tokens, std::span(values).first(3), true};
  TextPosition other(engine->tokenizer());
  const Json first = CompletionLogProbabilities(engine->tokenizer(), {&echoed, 1}, other);
  EXPECT_TRUE(first["token_logprobs"][0].is_null());
  EXPECT_EQ(other.Next(0, true), 2 + 7);  // behind "<|end|>"
}

// Takes what a service answers.
class FakeExchange : public Exchange {
 public:
  void Post(std::function<void()> work) override {
    const std::lock_guard lock(mutex_);
    if (gone_) return;
    work_.push_back(std::move(work));
    more_.notify_all();
  }
  void Answer(HttpResponse response) override {
    response_ = std::move(response);
    done_ = true;
  }
  void BeginStream() override {}
  void Write(std::string text) override { response_.body += text; }
  void EndStream() override { done_ = true; }

  // Does what is posted until the answer is there.
  HttpResponse Wait() {
    while (!done_) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        if (!more_.wait_for(lock, std::chrono::seconds(60), [&] { return !work_.empty(); })) return {};
        work = std::move(work_.front());
        work_.pop_front();
      }
      work();
    }
    Leave();
    return response_;
  }

  // What is posted behind the answer, or when nobody waits, holds what holds this exchange: undone, it would keep both
  // for ever.
  void Leave() {
    std::deque<std::function<void()>> undone;
    const std::lock_guard lock(mutex_);
    gone_ = true;
    undone.swap(work_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::function<void()>> work_;
  HttpResponse response_;
  bool done_ = false;
  bool gone_ = false;
};

class ServiceTest : public ::testing::Test {
 protected:
  explicit ServiceTest(const ServiceOptions& options = {}, WorkerOptions limits = {})
      : engine(LoadedEngine(Options())),
        metrics("fake"),
        worker(*engine, limits, metrics),
        models(std::make_shared<LoadedModel>(ServedModel{*engine, "fake", ChatTemplate::ByName("chatml"), {}, 64},
                                             worker)),
        service(models, options, metrics) {}

  HttpResponse Ask(const std::string& method, const std::string& target, const std::string& body = "",
                   const std::string& authorization = "") {
    const auto exchange = std::make_shared<FakeExchange>();
    service.Handle({method, target, "application/json", authorization, "", body}, exchange);
    return exchange->Wait();
  }
  Json Post(const std::string& target, const std::string& body) {
    const HttpResponse response = Ask("POST", target, body);
    EXPECT_EQ(response.status, 200) << response.body;
    return Json::parse(response.body);
  }

  std::unique_ptr<Engine> engine;
  Metrics metrics;
  Worker worker;
  ModelPool models;
  Service service;
};

TEST_F(ServiceTest, PathsMethodsAndTypesAreJudgedByTheHead) {
  EXPECT_EQ(Ask("GET", "/health?x=1").status, 200);
  EXPECT_EQ(Ask("GET", "/none").status, 404);
  EXPECT_EQ(Ask("GET", "/v1/models/fa%6be").status, 200);
  EXPECT_EQ(Ask("GET", "/v1/models/other").status, 404);
  const HttpResponse wrong = Ask("PUT", "/v1/completions");
  EXPECT_EQ(wrong.status, 405);
  EXPECT_EQ(wrong.headers.front(), (std::pair<std::string, std::string>("Allow", "POST, OPTIONS")));
  const auto exchange = std::make_shared<FakeExchange>();
  service.Handle({"POST", "/tokenize", "text/plain", "", "", "{}"}, exchange);
  EXPECT_EQ(exchange->Wait().status, 415);
  EXPECT_EQ(Service::CountedPath("/v1/models/x"), "/v1/models/{model}");
  EXPECT_EQ(Service::CountedPath("/../../etc/passwd"), "other");
}

TEST_F(ServiceTest, AnswersAreThoseOfASession) {
  GenerateOptions options;
  options.max_tokens = 10;
  options.sampler.temperature = 0;
  const std::unique_ptr<Engine> own = LoadedEngine(Options());
  Session session(*own);
  const GenerateResult expected = session.Generate(std::vector<int32_t>{0, 1, 2}, options, {});
  const Json answer =
      Post("/v1/completions", R"({"prompt": "abc", "max_tokens": 10, "temperature": 0, "return_token_ids": true})");
  EXPECT_EQ(answer["choices"][0]["token_ids"], Json(expected.tokens));
  EXPECT_EQ(answer["choices"][0]["text"], expected.text);
  EXPECT_EQ(answer["usage"]["completion_tokens"], expected.tokens.size());
  EXPECT_NE(metrics.Text().find("vllm:generation_tokens_total{model_name=\"fake\"} 10"), std::string::npos);
}

TEST_F(ServiceTest, ThreadsThatAskAtOnceGetWhatALoneOneGets) {
  const auto ask = [&](size_t i) -> Json {
    const std::string prompt(100 + 30 * i, static_cast<char>('a' + i));
    const Json sparse = {{"attention", "phsa"}, {"init", 16}, {"local", 32}, {"top_k", 1}};
    const Json dense = {{"attention", "dense"}};
    const Json body = {
        {"prompt", prompt}, {"max_tokens", 12}, {"temperature", 0}, {"phsa", i % 2 == 0 ? dense : sparse}};
    return Post("/v1/completions", body.dump())["choices"];
  };
  std::vector<Json> alone;
  for (size_t i = 0; i < 6; ++i) alone.push_back(ask(i));
  std::vector<std::future<Json>> together;
  for (size_t i = 0; i < 6; ++i) together.push_back(std::async(std::launch::async, ask, i));
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(together[i].get(), alone[i]);
}

TEST_F(ServiceTest, NothingBeginsWhileTheServerStops) {
  service.Drain();
  EXPECT_EQ(Ask("POST", "/v1/completions", R"({"prompt": "a"})").status, 503);
  EXPECT_EQ(Ask("GET", "/health").status, 503);
  EXPECT_EQ(Ask("GET", "/metrics").status, 200);
}

TEST_F(ServiceTest, AnswersThatAreCancelledEndAndTellIt) {
  const auto exchange = std::make_shared<FakeExchange>();
  const auto cancel = service.Handle(
      {"POST", "/v1/completions", "application/json", "", "", R"({"prompt": "a", "max_tokens": 500, "n": 50})"},
      exchange);
  ASSERT_TRUE(cancel);
  cancel();
  EXPECT_EQ(exchange->Wait().status, 503);
  while (!worker.Idle()) std::this_thread::yield();
}

TEST_F(ServiceTest, DocumentsAreReadBesideEachOtherUntilTheServerStops) {
  const auto send = [&](const std::string& name, const std::string& bytes) {
    const auto exchange = std::make_shared<FakeExchange>();
    const auto cancel =
        service.Handle({"POST", "/documents?x&name=" + name, "application/octet-stream", "", "", bytes}, exchange);
    return std::pair(exchange, cancel);
  };
  std::vector<std::future<HttpResponse>> together;
  for (int i = 0; i < 6; ++i) {
    together.push_back(std::async(std::launch::async, [&, i] {
      return send("a%20" + std::to_string(i), std::string(1000, static_cast<char>('a' + i))).first->Wait();
    }));
  }
  for (size_t i = 0; i < together.size(); ++i) {
    const Json found = Json::parse(together[i].get().body);
    EXPECT_EQ(found["name"], "a " + std::to_string(i));
    EXPECT_EQ(found["text"], std::string(1000, static_cast<char>('a' + i)));
  }
  EXPECT_EQ(send("x", std::string("a\0", 2)).first->Wait().status, 400);
  // Nobody waits for the first one any more; the others may be more than can wait.
  std::vector<std::shared_ptr<FakeExchange>> open;
  const std::string long_text(8 << 20, 'a');
  const auto [left, cancel] = send("cancelled", long_text);
  cancel();
  left->Leave();
  for (int i = 0; i < 20; ++i) open.push_back(send("open", long_text).first);
  service.Stop();
  std::map<int, int> statuses;
  for (const auto& exchange : open) ++statuses[exchange->Wait().status];
  EXPECT_GE(statuses[429], 1);
  EXPECT_GE(statuses[503], 1);
  EXPECT_EQ(statuses[200] + statuses[429] + statuses[503], 20);
  EXPECT_EQ(send("late", "a").first->Wait().status, 429);
}

TEST(DeviceFailure, IsAnsweredAndShownByHealthUntilItWorksAgain) {
  Engine engine(std::make_unique<FakeModel>(), SmallTokenizer(), FakeOptions(300));
  auto owned = std::make_unique<OtherDevice>(
      engine.config(), TestBackend(engine.source(), WeightsMode::kF32, PHSA_F32, 512, engine.threads()));
  OtherDevice& device = *owned;
  engine.Use(std::move(owned));
  Metrics metrics("fake");
  Worker worker(engine, {}, metrics);
  ModelPool models(
      std::make_shared<LoadedModel>(ServedModel{engine, "fake", ChatTemplate::ByName("chatml"), {}, 64}, worker));
  Service service(models, {}, metrics);
  const auto ask = [&](const std::string& method, const std::string& target, const std::string& body) {
    const auto exchange = std::make_shared<FakeExchange>();
    service.Handle({method, target, "application/json", "", "", body}, exchange);
    return exchange->Wait();
  };
  const std::string question = R"({"prompt": "abcdefgh", "max_tokens": 4, "temperature": 0})";
  const HttpResponse before = ask("POST", "/v1/completions", question);
  ASSERT_EQ(before.status, 200) << before.body;

  device.failing_layer = 1;
  const HttpResponse failed = ask("POST", "/v1/completions", question);
  EXPECT_EQ(failed.status, 500);
  EXPECT_NE(failed.body.find("the other device failed"), std::string::npos) << failed.body;
  const HttpResponse sick = ask("GET", "/health", "");
  EXPECT_EQ(sick.status, 503);
  EXPECT_EQ(Json::parse(sick.body)["status"], "failed");

  device.failing_layer = -1;
  const HttpResponse after = ask("POST", "/v1/completions", question);
  ASSERT_EQ(after.status, 200) << after.body;
  EXPECT_EQ(Json::parse(after.body)["choices"], Json::parse(before.body)["choices"]);
  EXPECT_EQ(ask("GET", "/health", "").status, 200);
}

TEST(StepFailure, EndsTheRequestItIsDueToAndNoOther) {
  EngineOptions options = Options();
  Engine engine(std::make_unique<FakeModel>(), SmallTokenizer(), options);
  auto owned = std::make_unique<FailingBackend>(
      TestBackend(engine.source(), WeightsMode::kF32, PHSA_F32, 512, engine.threads()));
  FailingBackend& backend = *owned;
  engine.Use(std::move(owned));
  std::promise<void> all_there;
  std::shared_future<void> gate(all_there.get_future());
  std::atomic<bool> failing = false;
  backend.fail = [] { throw std::runtime_error("a step too far"); };
  backend.fails = [&](const StepRows& rows) {
    if (!failing) return false;
    gate.wait();  // so that the requests are there when the next step begins
    return std::ranges::count(rows.tokens, 25) > 0;
  };
  Metrics metrics("fake");
  Worker worker(engine, {}, metrics);
  ModelPool models(
      std::make_shared<LoadedModel>(ServedModel{engine, "fake", ChatTemplate::ByName("chatml"), {}, 64}, worker));
  Service service(models, {}, metrics);
  const auto begin = [&](const std::string& prompt) {
    auto exchange = std::make_shared<FakeExchange>();
    const Json body = {{"prompt", prompt}, {"max_tokens", 12}, {"temperature", 0}};
    service.Handle({"POST", "/v1/completions", "application/json", "", "", body.dump()}, exchange);
    return exchange;
  };
  const auto choices = [](const HttpResponse& response) {
    EXPECT_EQ(response.status, 200) << response.body;
    return Json::parse(response.body)["choices"][0]["text"];
  };
  std::vector<std::string> prompts;
  std::vector<Json> alone;
  for (size_t i = 0; i < 4; ++i) {
    prompts.emplace_back(40 + 30 * i, static_cast<char>('a' + i));
    alone.push_back(choices(begin(prompts[i])->Wait()));
    ASSERT_EQ(alone.back().get<std::string>().find('z'), std::string::npos) << "the failing one alone may have it";
  }
  const std::string known(200, 'q');
  choices(begin(known)->Wait());

  failing = true;
  std::vector<std::shared_ptr<FakeExchange>> waiting = {begin(prompts[0])};
  for (const std::string& prompt : {prompts[1], std::string("xyz"), prompts[2], prompts[3]}) {
    waiting.push_back(begin(prompt));
  }
  all_there.set_value();
  std::vector<HttpResponse> responses;
  for (const auto& exchange : waiting) responses.push_back(exchange->Wait());
  EXPECT_EQ(responses[2].status, 500);
  EXPECT_NE(responses[2].body.find("a step too far"), std::string::npos) << responses[2].body;
  responses.erase(responses.begin() + 2);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(choices(responses[i]), alone[i]);
  // The device is well, and what was read before is still there.
  const auto health = std::make_shared<FakeExchange>();
  service.Handle({"GET", "/health", "", "", "", ""}, health);
  EXPECT_EQ(health->Wait().status, 200);
  const HttpResponse again = begin(known)->Wait();
  EXPECT_EQ(Json::parse(again.body)["phsa"]["cached_prompt_tokens"], 199) << again.body;
}

// In which order tasks end.
class EndOrder : public TaskListener {
 public:
  void OnPart(size_t, AnswerPart) override {}
  void OnEnd(size_t index, GenerateResult result, const AnswerTimes&) override {
    const std::lock_guard lock(mutex_);
    ended_.emplace_back(index, std::move(result));
    more_.notify_all();
  }
  void OnInspection(Inspection) override {}
  void OnFailure(std::exception_ptr) override { FAIL(); }

  std::vector<std::pair<size_t, GenerateResult>> Wait(size_t count) {
    std::unique_lock lock(mutex_);
    more_.wait_for(lock, std::chrono::seconds(60), [&] { return ended_.size() == count; });
    return ended_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable more_;
  std::vector<std::pair<size_t, GenerateResult>> ended_;
};

TEST_F(ServiceTest, HugeMaxTokensHoldNobodyUpAndAnswersAreStillThoseOfLoneClients) {
  // Sixteen pages; seven answers that go on until the context is full take four each.
  constexpr size_t kHuge = 7;
  std::vector<Task> tasks;
  for (size_t i = 0; i < kHuge; ++i) {
    tasks.push_back({i, Tokens(20 + i, static_cast<uint32_t>(i)), {}, nullptr});
    tasks.back().options.max_tokens = 1 << 30;
    tasks.back().options.ignore_eos = true;
    tasks.back().options.sampler.seed = i;
  }
  tasks.push_back({kHuge, Tokens(10, 9), {}, nullptr});
  tasks.back().options.max_tokens = 3;
  tasks.back().options.ignore_eos = true;
  const std::vector<Task> asked = tasks;
  const auto listener = std::make_shared<EndOrder>();
  ASSERT_TRUE(worker.Submit(std::move(tasks), listener, std::make_shared<std::atomic<bool>>(false)));
  const auto ended = listener->Wait(asked.size());
  ASSERT_EQ(ended.size(), asked.size());
  EXPECT_EQ(ended.front().first, kHuge);
  while (!worker.Idle()) std::this_thread::yield();
  const std::string text = metrics.Text();
  const std::string name = "\nvllm:num_preemptions_total{model_name=\"fake\"} ";
  ASSERT_NE(text.find(name), std::string::npos);
  EXPECT_GT(std::stoi(text.substr(text.find(name) + name.size())), 0);
  const std::unique_ptr<Engine> own = LoadedEngine(Options());
  for (const auto& [index, result] : ended) {
    const GenerateResult lone = Session(*own).Generate(asked[index].prompt, asked[index].options, {});
    EXPECT_EQ(result.tokens, lone.tokens) << index;
    EXPECT_EQ(result.reason, lone.reason) << index;
  }
}

TEST(AllowedHosts, AreThisMachinesOwnAndThoseThatWereNamed) {
  const AllowedHosts hosts({"PC.example.org", "10.0.0.7", "[fe80::0:1]", "2001:db8::1"});
  for (const char* host : {"localhost", "localhost:8080", "LocalHost.:1", "127.0.0.1", "127.200.3.4:99", "[::1]",
                           "[0:0::1]:8080", "[::ffff:127.0.0.1]", "pc.example.org", "pc.EXAMPLE.org.:80", "10.0.0.7:80",
                           "[fe80::1]", "[2001:db8:0::1]:8080", ""}) {
    EXPECT_TRUE(hosts.Allows(host)) << host;
  }
  for (const char* host : {"evil.example",
                           "evil.example:8080",
                           "localhost.evil.example",
                           "127.0.0.1.evil.example",
                           "xlocalhost",
                           "0.0.0.0",
                           "127.1",
                           "2130706433",
                           "128.0.0.1",
                           "10.0.0.70",
                           "[::2]",
                           "[::]",
                           "::1",
                           "[::1",
                           "[::1]x",
                           "[::1]:8a",
                           "localhost:80:80",
                           "localhost:evil.example",
                           "localhost@evil.example",
                           "localhost evil",
                           "localhost/",
                           ".",
                           ":80",
                           "example.org",
                           "a.pc.example.org",
                           "localhost\n"}) {
    EXPECT_FALSE(hosts.Allows(host)) << host;
  }
  for (const char* name : {"", "http://a.example", "a.example:80", "a b", "*", "[::1", "[a]", "a/b"}) {
    const std::string message = Refusal([&] { AllowedHosts({"fine", name}); });
    EXPECT_NE(message.find("allow_host"), std::string::npos) << name;
  }
}

class NamedServiceTest : public ServiceTest {
 protected:
  NamedServiceTest() : ServiceTest({.api_key = "", .cors_origin = "*", .version = "1", .hosts = {"a.example"}}) {}
};

TEST_F(NamedServiceTest, OtherNamesAreRefusedBeforeAllElse) {
  const auto ask = [&](const std::string& method, const std::string& target, const std::string& host) {
    const auto exchange = std::make_shared<FakeExchange>();
    service.Handle({method, target, "application/json", "", "http://" + host, "", host}, exchange);
    return exchange->Wait();
  };
  for (const char* target : {"/", "/health", "/v1/models", "/nothing"}) {
    EXPECT_EQ(ask("GET", target, "evil.example:80").status, 403) << target;
  }
  // Neither a browser that asks first nor --cors, which is for pages that know this server's name, changes that.
  EXPECT_EQ(ask("OPTIONS", "/v1/completions", "evil.example").status, 403);
  EXPECT_EQ(ask("POST", "/v1/completions", "evil.example").status, 403);
  EXPECT_EQ(ask("GET", "/v1/models", "a.example:8080").status, 200);
  const HttpResponse refused = ask("GET", "/v1/models", "evil.example");
  const Json error = Json::parse(refused.body)["error"];
  EXPECT_EQ(error["code"], "host_not_allowed");
  EXPECT_EQ(error["type"], "invalid_request_error");
  EXPECT_NE(error["message"].get<std::string>().find("\"evil.example\""), std::string::npos) << error;
}

class LockedServiceTest : public ServiceTest {
 protected:
  LockedServiceTest() : ServiceTest({"secret", "https://a.example", "1.2.3"}, {1, 0}) {}
};

TEST_F(LockedServiceTest, TheKeyIsWanted) {
  EXPECT_EQ(Ask("GET", "/v1/models").status, 401);
  EXPECT_EQ(Ask("GET", "/v1/models", "", "Bearer secret").status, 200);
  EXPECT_EQ(Ask("GET", "/v1/models", "", "Bearer secret ").status, 401);
  EXPECT_EQ(Ask("GET", "/v1/models", "", "Bearer ").status, 401);
  const auto exchange = std::make_shared<FakeExchange>();
  service.Handle({"GET", "/v1/models", "", "Bearer secret", "", "", "any.example"}, exchange);
  EXPECT_EQ(exchange->Wait().status, 200) << "who has the key may call the server what he likes";
  EXPECT_EQ(Ask("GET", "/health").status, 200);
}

TEST_F(LockedServiceTest, OnlyTheOriginThatWasNamedMayAsk) {
  const auto allowed = [&](const std::string& origin) {
    for (const auto& [name, value] : service.CommonHeaders({"GET", "/", "", "", origin, ""})) {
      if (name == "Access-Control-Allow-Origin") return value;
    }
    return std::string();
  };
  EXPECT_EQ(allowed("https://a.example"), "https://a.example");
  EXPECT_EQ(allowed("https://b.example"), "");
  EXPECT_EQ(allowed(""), "");
}

TEST_F(LockedServiceTest, AFullQueueRefuses) {
  const auto first = std::make_shared<FakeExchange>();
  const HttpRequest request{"POST",
                            "/v1/completions",
                            "application/json",
                            "Bearer secret",
                            "",
                            R"({"prompt": "a", "max_tokens": 400, "ignore_eos": true})"};
  const auto cancel = service.Handle(request, first);
  const auto second = std::make_shared<FakeExchange>();
  service.Handle(request, second);
  const HttpResponse refused = second->Wait();
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(refused.headers.front().first, "Retry-After");
  cancel();
  first->Wait();
}

TEST(MetricsText, CountsAndHistogramsAddUp) {
  Metrics metrics("a\"b\\c");
  GenerateResult result;
  result.prompt_tokens = 100;
  result.reused_tokens = 40;
  result.tokens = {1, 2, 3};
  result.reason = StopReason::kMaxTokens;
  result.decode_seconds = 0.1;
  result.tokens_read = {30, 120};
  metrics.CountAnswer(result, {0.02, 0.5, 0.001}, 7);
  metrics.CountAnswer(result, {0.3, 0.5, 0.001}, 7);
  metrics.CountHttp("/health", 200);
  const std::string text = metrics.Text();
  const auto has = [&](const std::string& line) { return text.find(line + "\n") != std::string::npos; };
  const std::string label = R"({model_name="a\"b\\c")";
  EXPECT_TRUE(has("vllm:prompt_tokens_total" + label + "} 200")) << text;
  EXPECT_TRUE(has("vllm:prefix_cache_hits_total" + label + "} 80"));
  EXPECT_TRUE(has("vllm:time_to_first_token_seconds_bucket" + label + ",le=\"0.02\"} 1"));
  EXPECT_TRUE(has("vllm:time_to_first_token_seconds_bucket" + label + ",le=\"0.25\"} 1"));
  EXPECT_TRUE(has("vllm:time_to_first_token_seconds_bucket" + label + ",le=\"+Inf\"} 2"));
  EXPECT_TRUE(has("vllm:time_per_output_token_seconds_sum" + label + "} 0.1"));
  EXPECT_TRUE(has("vllm:request_success_total" + label + ",finished_reason=\"length\"} 2"));
  EXPECT_TRUE(has("phsa:read_share" + label + "} 0.25"));
  EXPECT_TRUE(has("phsa:blocks_chosen_total" + label + "} 14"));
  EXPECT_TRUE(has("phsa:http_responses_total" + label + ",path=\"/health\",code=\"200\"} 1"));
}

}  // namespace
}  // namespace phsa::server
