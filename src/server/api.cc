#include "server/api.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <utility>

#include "attention/policies.h"
#include "base/errors.h"
#include "base/utf8.h"
#include "phsa/punctuation.h"
#include "server/answer_sources.h"
#include "server/chat_input.h"
#include "server/fields.h"

namespace phsa::server {
namespace {

constexpr int32_t kDefaultCompletionTokens = 16;  // OpenAI's
constexpr size_t kMaxStops = 16, kMaxStopCharacters = 1000;
// An inspection's JSON: a chosen block with its score takes about 16 bytes.
constexpr int64_t kMaxInspectedChoices = int64_t{1} << 21;

std::vector<int32_t> WithBegin(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> ids = tokenizer.Encode(text, SpecialTokens::kRecognise);
  if (tokenizer.add_bos() && tokenizer.bos() >= 0) ids.insert(ids.begin(), tokenizer.bos());
  return ids;
}

std::vector<int32_t> TokenList(const Fields& fields, const char* key, const Json& list, const ServedModel& model) {
  std::vector<int32_t> tokens;
  tokens.reserve(list.size());
  const int32_t vocab = model.engine.tokenizer().vocab_size();
  for (const Json& value : list) {
    const bool whole = value.is_number_integer() && (value.is_number_unsigned() || value.get<int64_t>() >= 0);
    if (!whole || value.get<uint64_t>() >= static_cast<uint64_t>(vocab)) {
      fields.Refuse(key, fmt::format(" has the token {}; the model's are 0 to {}", JsonText(value), vocab - 1));
    }
    tokens.push_back(value.get<int32_t>());
  }
  return tokens;
}

std::vector<Prompt> Prompts(const Fields& fields, const char* key, int32_t most, const ServedModel& model) {
  const Json* const value = fields.Find(key);
  if (value == nullptr) fields.Refuse(key, " is missing; give a text or a list of token ids");
  const Tokenizer& tokenizer = model.engine.tokenizer();
  const auto from_text = [&](const Json& text) {
    const auto& string = text.get_ref<const std::string&>();
    return Prompt{fields.Named(key, [&] { return WithBegin(tokenizer, string); }), string};
  };
  const auto from_tokens = [&](const Json& list) {
    Prompt prompt;
    prompt.tokens = TokenList(fields, key, list, model);
    prompt.text = tokenizer.Decode(prompt.tokens, false);
    return prompt;
  };
  std::vector<Prompt> prompts;
  if (value->is_string()) {
    prompts.push_back(from_text(*value));
  } else if (value->is_array() && !value->empty()) {
    if (value->front().is_number()) {
      prompts.push_back(from_tokens(*value));
    } else {
      if (value->size() > static_cast<size_t>(most)) {
        fields.Refuse(key, fmt::format(" has {} texts; allowed: at most {}", value->size(), most));
      }
      for (const Json& one : *value) {
        if (!one.is_string() && !one.is_array()) {
          fields.Refuse(key, fmt::format(" has {} in its list; allowed: texts, or lists of token ids", JsonText(one)));
        }
        prompts.push_back(one.is_string() ? from_text(one) : from_tokens(one));
      }
    }
  } else {
    fields.RefuseValue(key, *value, "a text, a list of texts, token ids, or lists of those");
  }
  for (const Prompt& prompt : prompts) CheckLength(fields, key, prompt.tokens, model);
  return prompts;
}

std::vector<std::string> Stops(const Fields& fields, const char* key) {
  const Json* const value = fields.Find(key);
  std::vector<std::string> stops;
  if (value == nullptr) return stops;
  if (!value->is_string() && !value->is_array()) fields.RefuseValue(key, *value, "a text or a list of texts");
  const Json list = value->is_string() ? Json::array({*value}) : *value;
  if (list.size() > kMaxStops) {
    fields.Refuse(key, fmt::format(" has {} texts; allowed: at most {}", list.size(), kMaxStops));
  }
  for (const Json& one : list) {
    if (!one.is_string()) fields.Refuse(key, fmt::format(" has {} in its list; allowed: texts", JsonText(one)));
    stops.push_back(one.get<std::string>());
    const size_t characters = DecodeUtf8(stops.back()).value_or(U"").size();
    if (characters > kMaxStopCharacters) {
      fields.Refuse(key,
                    fmt::format(" has a text of {} characters; allowed: at most {}", characters, kMaxStopCharacters));
    }
  }
  return stops;
}

std::optional<uint64_t> Seed(const Fields& fields) {
  const Json* const value = fields.Find("seed");
  if (value == nullptr) return std::nullopt;
  if (!value->is_number_integer()) fields.RefuseValue("seed", *value, "a whole number");
  return value->get<uint64_t>();
}

// The settings of a request, one by one. The ranges are judged where all settings are; these only keep the numbers in
// their types.
void ReadSetting(const PolicySetting& row, const Fields& own, AttentionChoice* asked) {
  asked->policy = own.String(row.name).value_or("");
}
void ReadSetting(const ReduceSetting& row, const Fields& own, AttentionChoice* asked) {
  if (const auto value = own.String(row.name)) asked->given[row.name] = *value;
}
void ReadSetting(const IntSetting& row, const Fields& own, AttentionChoice* asked) {
  if (const auto value = own.Int(row.name, row.choices[0] > 0 ? 1 : 0, INT32_MAX)) asked->given[row.name] = *value;
}
void ReadSetting(const LambdaSetting& row, const Fields& own, AttentionChoice* asked) {
  if (const auto value = own.Float(row.name, 0, 1)) asked->given[row.name] = *value;
}
void ReadSetting(const TextSetting& row, const Fields& own, AttentionChoice* asked) {
  const auto set = own.String(row.name);
  if (!set) return;
  // A file of the server's disk is not for its clients to name.
  const std::vector<std::string> sets = PunctuationSetNames();
  if (std::find(sets.begin(), sets.end(), *set) == sets.end()) {
    own.Refuse(row.name, fmt::format(" is {}; allowed: {}", Quoted(*set), fmt::join(sets, ", ")));
  }
  asked->given[row.name] = *set;
}

// What the object "phsa" says of the attention; what it leaves out is the server's.
AttentionChoice AskedAttention(const Fields& fields) {
  static constexpr const char* kOthers[] = {"sources", "progress"};
  AttentionChoice asked;
  asked.policy.clear();
  const std::optional<Fields> own = fields.Object("phsa");
  if (!own) return asked;
  for (const auto& [key, value] : own->object().items()) {
    bool known = std::find(std::begin(kOthers), std::end(kOthers), key) != std::end(kOthers);
    ForEachSetting([&, &name = key](const SettingInfo& row) { known = known || name == row.name; });
    if (!known) {
      fields.Refuse("phsa",
                    fmt::format(" has {}; allowed: {}, {}", Quoted(key), SettingNames(), fmt::join(kOthers, ", ")));
    }
  }
  (void)own->Bool("progress", false);  // judged also where nothing is streamed
  ForEachSetting([&](const auto& row) { ReadSetting(row, *own, &asked); });
  const PolicyRow* const named = FindPolicy(asked.policy);
  const auto block = asked.given.find("block");
  if (block != asked.given.end() && !(asked.given.contains("init") && asked.given.contains("local"))) {
    const int32_t tokens = std::get<int32_t>(block->second);
    if (BudgetUnit(named != nullptr ? named->policy : kOwnPolicy, tokens) != kLeastBlock) {
      own->Refuse("block", fmt::format(" is {}, and init and local must be multiples of it; give all three", tokens));
    }
  }
  return asked;
}

// The request's over the server's own flags.
AttentionChoice Over(const AttentionChoice& asked, AttentionChoice choice) {
  if (!asked.policy.empty()) choice.policy = asked.policy;
  for (const auto& [name, value] : asked.given) choice.given[name] = value;
  return choice;
}

LayerSettings Resolve(const Fields& fields, const AttentionChoice& choice, const ServedModel& model) {
  return fields.Named("phsa", [&] {
    return ResolveAttention(choice, model.engine.ConfigOf(model.adapter), model.engine.memory().context);
  });
}

// What the request sets must not be lost on dense attention; what the server's flags say may be for other requests.
LayerSettings Attention(const Fields& fields, const ServedModel& model) {
  const AttentionChoice asked = AskedAttention(fields), choice = Over(asked, model.attention);
  LayerSettings settings = Resolve(fields, choice, model);
  if (IsDense(settings)) fields.Named("phsa", [&] { RefuseWithoutEffect(asked, {&settings, 1}); });
  return settings;
}

// What comes between the prompt and the suffix, for models that were trained to fill in.
void FillIn(const Fields& fields, const std::string& suffix, const ServedModel& model, GenerationRequest* request) {
  static constexpr const char* kKey = "suffix";
  struct Marks {
    const char *prefix, *suffix, *middle;
  };
  static constexpr Marks kMarks[] = {{"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"},
                                     {"<fim_prefix>", "<fim_suffix>", "<fim_middle>"}};
  static constexpr const char* kEnds[] = {"<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
                                          "<|cursor|>",    "<fim_pad>",   "<reponame>",    "<file_sep>"};
  const Tokenizer& tokenizer = model.engine.tokenizer();
  const auto marks = std::find_if(std::begin(kMarks), std::end(kMarks), [&](const Marks& one) {
    return tokenizer.TokenId(one.prefix) >= 0 && tokenizer.TokenId(one.suffix) >= 0 &&
           tokenizer.TokenId(one.middle) >= 0;
  });
  if (marks == std::end(kMarks))
    fields.Refuse(kKey, " is given, and the model has no tokens for filling in; leave it out");
  const Json* const prompt = fields.Find("prompt");
  if (prompt == nullptr || !prompt->is_string()) fields.Refuse(kKey, " is given; then the prompt is one text");
  if (request->echo) fields.Refuse("echo", " and suffix are both there; give one");
  Prompt& own = request->prompts.emplace_back();
  own.text = prompt->get<std::string>();
  const auto append = [&](const char* key, const std::string& text) {
    const std::vector<int32_t> ids = fields.Named(key, [&] { return tokenizer.Encode(text, SpecialTokens::kAsText); });
    own.tokens.insert(own.tokens.end(), ids.begin(), ids.end());
  };
  own.tokens.push_back(tokenizer.TokenId(marks->prefix));
  append("prompt", own.text);
  own.tokens.push_back(tokenizer.TokenId(marks->suffix));
  append(kKey, suffix);
  own.tokens.push_back(tokenizer.TokenId(marks->middle));
  CheckLength(fields, "prompt", own.tokens, model);
  for (const char* end : kEnds) {
    if (const int32_t id = tokenizer.TokenId(end); id >= 0) request->options.stop_tokens.push_back(id);
  }
}

std::vector<std::pair<int32_t, float>> LogitBias(const Fields& fields, const ServedModel& model) {
  static constexpr const char* kKey = "logit_bias";
  std::vector<std::pair<int32_t, float>> biases;
  const std::optional<Fields> object = fields.Object(kKey);
  if (!object) return biases;
  const int32_t vocab = model.engine.tokenizer().vocab_size();
  if (object->object().size() > kMaxLogitBias) {
    fields.Refuse(kKey, fmt::format(" has {} tokens; allowed: at most {}", object->object().size(), kMaxLogitBias));
  }
  for (const auto& [key, value] : object->object().items()) {
    int32_t token = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), token);
    const bool whole = error == std::errc() && end == key.data() + key.size() && std::to_string(token) == key;
    if (!whole || token < 0 || token >= vocab) {
      fields.Refuse(kKey, fmt::format(" has the token {}; the model's are 0 to {}", Quoted(key), vocab - 1));
    }
    biases.emplace_back(token, object->Float(key.c_str(), -100, 100).value_or(0));
  }
  return biases;
}

// What response_format or grammar asks for; none: any text.
std::optional<AnswerForm> AskedForm(const Fields& fields, std::string_view body, const ServedModel& model) {
  static constexpr const char* kGrammar = "grammar";
  std::optional<AnswerForm> form;
  if (const std::optional<Fields> format = fields.Object("response_format")) {
    const std::optional<Fields> described = format->Object("json_schema");
    form = described ? ReadFormat(*format, *described, {"response_format", "json_schema"}, body, model)
                     : ReadFormat(*format, *format, {"response_format"}, body, model);
  }
  const std::optional<std::string> text = fields.String(kGrammar);
  if (!text) return form;
  if (form) fields.Refuse(kGrammar, " and response_format are both there; give one");
  return fields.Named(kGrammar,
                      [&] { return MakeForm("gbnf " + *text, GrammarExpression::Gbnf(*text, kGrammar), model); });
}

void CheckAnswers(const Fields& fields, const GenerationRequest& request) {
  const size_t answers = request.prompts.size() * static_cast<size_t>(request.n);
  if (answers > kMaxAnswers) {
    fields.Refuse("n", fmt::format(" times the number of prompts is {}; allowed: at most {}", answers, kMaxAnswers));
  }
}

}  // namespace

GenerationRequest ReadCommon(const Fields& fields, const ServedModel& model, const char* stops) {
  GenerationRequest request;
  (void)fields.String("model");  // it has been found
  request.n = fields.Int("n", 1, kMaxAnswers).value_or(1);
  request.stream = fields.Bool("stream", false);
  if (const auto options = fields.Object("stream_options")) {
    request.include_usage = options->Bool("include_usage", false);
  }
  request.return_token_ids = fields.Bool("return_token_ids", false);
  request.options.stops = Stops(fields, stops);
  request.options.ignore_eos = fields.Bool("ignore_eos", false);
  SamplingChoice& sampling = request.sampling;
  sampling.temperature = fields.Float("temperature", 0, 2);
  sampling.top_p = fields.Float("top_p", 0.001, 1);
  sampling.min_p = fields.Float("min_p", 0, 1);
  sampling.top_k = fields.Int("top_k", -1, INT32_MAX);
  if (sampling.top_k == -1) sampling.top_k = 0;  // vLLM's word for all
  sampling.repetition_penalty = fields.Float("repetition_penalty", 0.01, 100);
  sampling.seed = Seed(fields);
  sampling.frequency_penalty = fields.Float("frequency_penalty", -2, 2).value_or(0);
  sampling.presence_penalty = fields.Float("presence_penalty", -2, 2).value_or(0);
  sampling.logit_bias = LogitBias(fields, model);
  request.options.sampler =
      fields.Named("temperature", [&] { return ResolveSampling(sampling, model.engine.config()); });
  request.attention = Attention(fields, model);
  request.sources = ReadSources(fields);
  if (const std::optional<Fields> own = fields.Object("phsa")) request.progress = own->Bool("progress", false);
  return request;
}

GenerationRequest ParseCompletion(std::string_view body, const ServedModel& model) {
  const Json json = ParseBody(body);
  const Fields fields(json, "");
  GenerationRequest request = ReadCommon(fields, model);
  if (const auto form = AskedForm(fields, body, model)) request.options.grammar = form->grammar;
  request.options.max_tokens = fields.Int("max_tokens", 0, kMaxTokens).value_or(kDefaultCompletionTokens);
  request.echo = fields.Bool("echo", false);
  request.options.log_probabilities = fields.Int("logprobs", 0, kMaxTopLogProbabilities);
  request.options.prompt_log_probabilities = request.echo && request.options.log_probabilities.has_value();
  fields.Neutral("best_of", request.n);
  const std::optional<std::string> suffix = fields.String("suffix");
  if (suffix && !suffix->empty()) {
    FillIn(fields, *suffix, model, &request);
  } else {
    request.prompts = Prompts(fields, "prompt", kMaxAnswers, model);
  }
  CheckAnswers(fields, request);
  for (size_t i = 0; request.sources && i < request.prompts.size(); ++i) {
    Prompt& prompt = request.prompts[i];
    const std::string place = request.prompts.size() > 1 ? fmt::format("prompt[{}]", i) : "prompt";
    SetSources({{{place, std::nullopt, prompt.text}, true}}, model.engine.tokenizer(), *request.sources, &prompt);
  }
  return request;
}

GenerationRequest ParseChat(std::string_view body, const ServedModel& model) {
  const Json json = ParseBody(body);
  const Fields fields(json, "");
  GenerationRequest request = ReadCommon(fields, model);
  const std::optional<AnswerForm> form = AskedForm(fields, body, model);
  request.chat = true;
  const std::optional<int32_t> tokens = fields.Int("max_tokens", 0, kMaxTokens);
  request.options.max_tokens =
      fields.Int("max_completion_tokens", 0, kMaxTokens).value_or(tokens.value_or(model.chat_tokens));
  const bool log_probabilities = fields.Bool("logprobs", false);
  const std::optional<int32_t> top = fields.Int("top_logprobs", 0, kMaxTopLogProbabilities);
  if (log_probabilities) request.options.log_probabilities = top.value_or(0);
  fields.Neutral("functions", Json::array());
  SetChat(fields, "messages", ReadChatInput(fields, body, model), form, model, &request);
  CheckAnswers(fields, request);
  return request;
}

EmbeddingsRequest ParseEmbeddings(std::string_view body, const ServedModel& model) {
  const Json json = ParseBody(body);
  const Fields fields(json, "");
  if (model.engine.device().device != PHSA_DEVICE_CPU) {
    throw HttpError(400, "a GPU keeps no hidden states of all tokens; a server on the CPU has embeddings");
  }
  EmbeddingsRequest request;
  (void)fields.String("model");
  request.prompts = Prompts(fields, "input", kMaxEmbeddings, model);
  const int32_t hidden = model.engine.config().hidden;
  request.dimensions = fields.Int("dimensions", 1, hidden).value_or(hidden);
  const std::string format = fields.String("encoding_format").value_or("float");
  if (format != "float" && format != "base64") {
    fields.Refuse("encoding_format", fmt::format(" is {}; allowed: float, base64", Quoted(format)));
  }
  request.base64 = format == "base64";
  (void)ReadSources(fields);  // there is no answer that could have any
  request.attention = Attention(fields, model);
  return request;
}

InspectRequest ParseInspect(std::string_view body, const ServedModel& model) {
  const Json json = ParseBody(body);
  const Fields fields(json, "");
  const bool chat = fields.Find("messages") != nullptr;
  if (!chat) (void)ReadVariables(fields, body);  // judged also where no template reads them
  if (chat && fields.Find("prompt") != nullptr) fields.Refuse("prompt", " and messages are both there; give one");
  const Tokenizer& tokenizer = model.engine.tokenizer();
  InspectRequest request;
  if (chat) {
    request.tokens = ChatTokens(fields, ReadChatInput(fields, body, model), model, true);
  } else {
    std::vector<Prompt> prompts = Prompts(fields, "prompt", kMaxAnswers, model);
    if (prompts.size() != 1) fields.Refuse("prompt", " has several prompts; allowed: one");
    request.tokens = std::move(prompts.front().tokens);
  }
  request.prompt_tokens = static_cast<int32_t>(request.tokens.size());

  const Json* const answer = fields.Find("answer");
  std::vector<int32_t> given;
  if (answer != nullptr && answer->is_string()) {
    request.answer = answer->get<std::string>();
    given = fields.Named("answer", [&] { return tokenizer.Encode(request.answer, SpecialTokens::kAsText); });
  } else if (answer != nullptr && answer->is_array()) {
    given = TokenList(fields, "answer", *answer, model);
    request.answer = tokenizer.Decode(given, true);
  } else if (answer != nullptr) {
    fields.RefuseValue("answer", *answer, "a text or a list of token ids");
  }
  if (given.size() > kMaxInspectedTokens) {
    fields.Refuse("answer", fmt::format(" has {} tokens; allowed: at most {}", given.size(), kMaxInspectedTokens));
  }
  request.tokens.insert(request.tokens.end(), given.begin(), given.end());
  CheckLength(fields, chat ? "messages" : "prompt", request.tokens, model);

  // The prompt's last token, whose choice the answer begins with, and the answer's own.
  const auto whole = static_cast<int32_t>(request.tokens.size());
  const int32_t otherwise = static_cast<int32_t>(given.size()) + 1;
  request.last = std::min(whole, fields.Int("last", 1, kMaxInspectedTokens + 1).value_or(otherwise));
  request.options.max_tokens = fields.Int("max_tokens", 0, kMaxInspectedTokens).value_or(0);
  request.stream = fields.Bool("stream", false);
  request.options.sampler.temperature = 0;

  AttentionChoice choice = Over(AskedAttention(fields), model.attention);
  request.attention = Resolve(fields, choice, model);
  const ModelConfig& config = model.engine.config();
  const auto dense = [&] { return IsDense(request.attention, config.num_layers); };
  if (dense() && choice.policy == "auto") {
    choice.policy = Name(kOwnPolicy);
    request.attention = Resolve(fields, choice, model);
  }
  if (dense()) {
    fields.Refuse("phsa", " asks for dense attention, which reads everything and chooses nothing; allowed here: " +
                              PolicyNames(IsSparse));
  }
  int64_t choices = 0;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    const Settings& settings = request.attention.ForLayer(layer);
    const int64_t heads = settings.group_reduce == GroupReduce::kNone ? config.num_q_heads : config.num_kv_heads;
    choices += heads * std::min<int64_t>(settings.top_k, whole / settings.block_size + 1);
  }
  choices *= int64_t{request.last} + request.options.max_tokens;
  if (choices > kMaxInspectedChoices) {
    fields.Refuse("last", fmt::format(" and max_tokens ask for the choices of {} tokens, {} blocks with their scores; "
                                      "allowed: at most {}",
                                      request.last + request.options.max_tokens, choices, kMaxInspectedChoices));
  }
  return request;
}

TokenizeRequest ParseTokenize(std::string_view body, const ServedModel& model) {
  const Json json = ParseBody(body);
  const Fields fields(json, "");
  TokenizeRequest request;
  request.with_pieces = fields.Bool("with_pieces", false);
  const bool add_generation_prompt = fields.Bool("add_generation_prompt", true);
  const bool add_special = fields.Bool("add_special", false),
             add_special_tokens = fields.Bool("add_special_tokens", false);
  const auto special = fields.Bool("parse_special", true) ? SpecialTokens::kRecognise : SpecialTokens::kAsText;
  const std::optional<std::string> content = fields.String("content"), prompt = fields.String("prompt");
  if (fields.Find("messages") != nullptr) {
    request.tokens = ChatTokens(fields, ReadChatInput(fields, body, model), model, add_generation_prompt);
    return request;
  }
  const char* const key = content ? "content" : "prompt";
  const std::optional<std::string>& text = content ? content : prompt;
  if (!text) fields.Refuse(key, " is missing; give content, prompt or messages");
  const Tokenizer& tokenizer = model.engine.tokenizer();
  request.tokens = fields.Named(key, [&] { return tokenizer.Encode(*text, special); });
  if ((add_special || add_special_tokens) && tokenizer.add_bos() && tokenizer.bos() >= 0) {
    request.tokens.insert(request.tokens.begin(), tokenizer.bos());
  }
  return request;
}

std::vector<int32_t> ParseDetokenize(std::string_view body, const ServedModel& model) {
  const Json json = ParseBody(body);
  const Fields fields(json, "");
  const Json* const tokens = fields.Find("tokens");
  if (tokens == nullptr) fields.Refuse("tokens", " is missing; give a list of token ids");
  if (!tokens->is_array()) fields.RefuseValue("tokens", *tokens, "a list of token ids");
  return TokenList(fields, "tokens", *tokens, model);
}

std::string ParseApplyTemplate(std::string_view body, const ServedModel& model) {
  const Json json = ParseBody(body);
  const Fields fields(json, "");
  const ChatInput input = ReadChatInput(fields, body, model);
  const bool add_generation_prompt = fields.Bool("add_generation_prompt", true);
  return fields.Named("messages", [&] {
    return TemplateOf(model).Render(input.messages, add_generation_prompt, model.engine.tokenizer(), input.variables);
  });
}

}  // namespace phsa::server
