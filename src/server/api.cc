#include "server/api.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/errors.h"
#include "base/utf8.h"
#include "io/json.h"
#include "phsa/punctuation.h"
#include "server/http_types.h"

namespace phsa::server {
namespace {

constexpr int32_t kDefaultCompletionTokens = 16;  // OpenAI's
constexpr size_t kMaxStops = 16, kMaxStopCharacters = 1000;
constexpr int32_t kMaxTokens = 1 << 30;
// An inspection's JSON: a chosen block with its score takes about 16 bytes.
constexpr int64_t kMaxInspectedChoices = int64_t{1} << 21;

// One object of a request.
class Fields {
 public:
  Fields(const Json& object, std::string place)
      : object_(object), fields_(object, "the request"), place_(std::move(place)) {}

  // What the engine or the tokenizer says of a field.
  template <class Fn>
  auto Named(const char* key, const Fn& fn) const {
    try {
      return fn();
    } catch (const Error& error) {
      throw HttpError(400, error.what(), Name(key), "invalid_value");
    }
  }

  const Json* Find(const char* key) const { return fields_.Find(key); }
  std::string Name(const char* key) const { return place_.empty() ? key : place_ + "." + key; }
  [[noreturn]] void Refuse(const char* key, const std::string& message) const {
    throw HttpError(400, Name(key) + message, Name(key), "invalid_value");
  }
  [[noreturn]] void RefuseValue(const char* key, const Json& value, const std::string& allowed) const {
    Refuse(key, fmt::format(" is {}; allowed: {}", JsonText(value), allowed));
  }

  std::optional<int32_t> Int(const char* key, int32_t low, int32_t high) const {
    return Named(key, [&] { return fields_.Int(key, low, high); });
  }
  std::optional<float> Float(const char* key, double low, double high) const {
    return Named(key, [&] { return fields_.Float(key, low, high); });
  }
  bool Bool(const char* key, bool otherwise) const {
    return Named(key, [&] { return fields_.Bool(key); }).value_or(otherwise);
  }
  std::optional<std::string> String(const char* key) const {
    return Named(key, [&] { return fields_.String(key); });
  }
  std::optional<Fields> Object(const char* key) const {
    const Json* const value = Find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_object()) RefuseValue(key, *value, "an object");
    return Fields(*value, Name(key));
  }
  // A field that would change the answer in a way that is not there: only what changes nothing is taken.
  void Neutral(const char* key, const Json& neutral) const {
    const Json* const value = Find(key);
    if (value != nullptr && *value != neutral) {
      Refuse(key, fmt::format(" is {}, which is not supported; leave it out", JsonText(*value)));
    }
  }
  const Json& object() const { return object_; }

 private:
  const Json& object_;
  JsonFields fields_;
  std::string place_;
};

// JSON knows one kind of number: 5.0 is 5.
void WholeNumbersAsIntegers(Json& value) {
  constexpr double kExact = 9007199254740992;  // 2^53
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (std::trunc(number) == number && std::abs(number) <= kExact) value = static_cast<int64_t>(number);
  } else if (value.is_structured()) {
    for (Json& inner : value) WholeNumbersAsIntegers(inner);  // as deep as the parser lets it be
  }
}

Json ParseBody(std::string_view body) {
  try {
    Json json = ParseJsonObject(body, "the request's body");
    WholeNumbersAsIntegers(json);
    return json;
  } catch (const Error& error) {
    throw HttpError(400, error.what());
  }
}

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

void CheckLength(const Fields& fields, const char* key, std::span<const int32_t> tokens, const ServedModel& model) {
  try {
    CheckPrompt(model.engine, tokens);
  } catch (const Error& error) {
    const bool is_long = tokens.size() >= static_cast<size_t>(model.engine.plan().context);
    throw HttpError(400, error.what(), fields.Name(key), is_long ? "context_length_exceeded" : "invalid_value");
  }
}

std::vector<Prompt> Prompts(const Fields& fields, const ServedModel& model) {
  static constexpr const char* kKey = "prompt";
  const Json* const value = fields.Find(kKey);
  if (value == nullptr) fields.Refuse(kKey, " is missing; give a text or a list of token ids");
  const Tokenizer& tokenizer = model.engine.tokenizer();
  const auto from_text = [&](const Json& text) {
    const auto& string = text.get_ref<const std::string&>();
    return Prompt{fields.Named(kKey, [&] { return WithBegin(tokenizer, string); }), string};
  };
  const auto from_tokens = [&](const Json& list) {
    Prompt prompt;
    prompt.tokens = TokenList(fields, kKey, list, model);
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
      if (value->size() > kMaxAnswers) {
        fields.Refuse(kKey, fmt::format(" has {} prompts; allowed: at most {}", value->size(), kMaxAnswers));
      }
      for (const Json& one : *value) {
        if (!one.is_string() && !one.is_array()) {
          fields.Refuse(kKey, fmt::format(" has {} in its list; allowed: texts, or lists of token ids", JsonText(one)));
        }
        prompts.push_back(one.is_string() ? from_text(one) : from_tokens(one));
      }
    }
  } else {
    fields.RefuseValue(kKey, *value, "a text, a list of texts, token ids, or lists of those");
  }
  for (const Prompt& prompt : prompts) CheckLength(fields, kKey, prompt.tokens, model);
  return prompts;
}

std::string Content(const Fields& message) {
  static constexpr const char* kKey = "content";
  const Json* const value = message.Find(kKey);
  if (value == nullptr) return "";
  if (value->is_string()) return value->get<std::string>();
  if (!value->is_array()) message.RefuseValue(kKey, *value, "a text, or a list of parts of the type text");
  std::string text;
  for (const Json& part : *value) {
    const auto type = part.is_object() ? part.find("type") : part.end();
    const auto own = part.is_object() ? part.find("text") : part.end();
    if (!part.is_object() || type == part.end() || *type != "text" || own == part.end() || !own->is_string()) {
      message.Refuse(kKey, R"( has a part that is no text; allowed: {"type": "text", "text": "…"})");
    }
    text += own->get_ref<const std::string&>();
  }
  return text;
}

std::vector<ChatMessage> Messages(const Fields& fields) {
  static constexpr const char* kKey = "messages";
  static constexpr std::array<std::string_view, 4> kRoles = {"system", "developer", "user", "assistant"};
  const Json* const value = fields.Find(kKey);
  if (value == nullptr) fields.Refuse(kKey, " is missing; give a list of messages");
  if (!value->is_array() || value->empty()) fields.RefuseValue(kKey, *value, "a list with at least one message");
  std::vector<ChatMessage> messages;
  for (size_t i = 0; i < value->size(); ++i) {
    const Json& one = (*value)[i];
    if (!one.is_object()) fields.Refuse(kKey, fmt::format("[{}] is {}; allowed: an object", i, JsonText(one)));
    const Fields message(one, fields.Name(fmt::format("messages[{}]", i).c_str()));
    const std::optional<std::string> role = message.String("role");
    if (!role || std::find(kRoles.begin(), kRoles.end(), *role) == kRoles.end()) {
      message.Refuse(
          "role", fmt::format(" is {}; allowed: system, developer, user, assistant", role ? Quoted(*role) : "missing"));
    }
    messages.push_back({*role == "developer" ? "system" : *role, Content(message)});
  }
  return messages;
}

const ChatTemplate& Template(const ServedModel& model) {
  if (model.chat_template) return *model.chat_template;
  throw HttpError(400,
                  "the model carries no chat template that is known; start the server with --chat-template, or use "
                  "/v1/completions");
}

ChatVariables Variables(const Fields& fields) {
  ChatVariables variables;
  if (const auto kwargs = fields.Object("chat_template_kwargs")) {
    variables.enable_thinking = kwargs->Bool("enable_thinking", true);
  }
  return variables;
}

std::vector<int32_t> ChatTokens(const Fields& fields, const ServedModel& model, bool add_generation_prompt) {
  const ChatTemplate& chat = Template(model);
  const std::vector<ChatMessage> messages = Messages(fields);
  return fields.Named("messages", [&] {
    return chat.Encode(messages, add_generation_prompt, model.engine.tokenizer(), Variables(fields));
  });
}

std::vector<std::string> Stops(const Fields& fields) {
  static constexpr const char* kKey = "stop";
  const Json* const value = fields.Find(kKey);
  std::vector<std::string> stops;
  if (value == nullptr) return stops;
  if (!value->is_string() && !value->is_array()) fields.RefuseValue(kKey, *value, "a text or a list of texts");
  const Json list = value->is_string() ? Json::array({*value}) : *value;
  if (list.size() > kMaxStops) {
    fields.Refuse(kKey, fmt::format(" has {} texts; allowed: at most {}", list.size(), kMaxStops));
  }
  for (const Json& one : list) {
    if (!one.is_string()) fields.Refuse(kKey, fmt::format(" has {} in its list; allowed: texts", JsonText(one)));
    stops.push_back(one.get<std::string>());
    const size_t characters = DecodeUtf8(stops.back()).value_or(U"").size();
    if (characters > kMaxStopCharacters) {
      fields.Refuse(kKey,
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

// What the object "phsa" says of the attention; what it leaves out is the server's.
AttentionChoice AskedAttention(const Fields& fields) {
  static constexpr std::array<std::string_view, 11> kKeys = {"attention",   "top_k",       "parts",       "survivors",
                                                             "lambda",      "init",        "local",       "block",
                                                             "dense_below", "punctuation", "group_reduce"};
  AttentionChoice asked;
  asked.policy.clear();
  const std::optional<Fields> own = fields.Object("phsa");
  if (!own) return asked;
  for (const auto& [key, value] : own->object().items()) {
    if (std::find(kKeys.begin(), kKeys.end(), key) == kKeys.end()) {
      fields.Refuse("phsa", fmt::format(" has {}; allowed: {}", Quoted(key), fmt::join(kKeys, ", ")));
    }
  }
  if (const auto policy = own->String("attention")) asked.policy = *policy;
  // The ranges are judged where all settings are; these only keep the numbers in their types.
  asked.top_k = own->Int("top_k", 0, INT32_MAX);
  asked.parts = own->Int("parts", 1, INT32_MAX);
  asked.survivors = own->Int("survivors", 0, INT32_MAX);
  asked.lambda = own->Float("lambda", 0, 1);
  asked.init = own->Int("init", 0, INT32_MAX);
  asked.local = own->Int("local", 0, INT32_MAX);
  asked.block = own->Int("block", 1, INT32_MAX);
  asked.dense_below = own->Int("dense_below", 0, INT32_MAX);
  const bool small_blocks = !asked.block || asked.block == 16 || asked.policy == "infllm2-64";
  if (!small_blocks && (!asked.init || !asked.local)) {
    own->Refuse("block",
                fmt::format(" is {}, and init and local must be multiples of it; give all three", *asked.block));
  }
  if (const auto set = own->String("punctuation")) {
    // A file of the server's disk is not for its clients to name.
    const std::vector<std::string> sets = PunctuationSetNames();
    if (std::find(sets.begin(), sets.end(), *set) == sets.end()) {
      own->Refuse("punctuation", fmt::format(" is {}; allowed: {}", Quoted(*set), fmt::join(sets, ", ")));
    }
    asked.punctuation = *set;
  }
  if (const auto reduce = own->String("group_reduce")) asked.group_reduce = *reduce;
  return asked;
}

// The request's over the server's own flags.
AttentionChoice Over(const AttentionChoice& asked, AttentionChoice choice) {
  const auto take = [](const auto& value, auto& field) {
    if (value) field = value;
  };
  if (!asked.policy.empty()) choice.policy = asked.policy;
  take(asked.top_k, choice.top_k);
  take(asked.parts, choice.parts);
  take(asked.survivors, choice.survivors);
  take(asked.lambda, choice.lambda);
  take(asked.init, choice.init);
  take(asked.local, choice.local);
  take(asked.block, choice.block);
  take(asked.dense_below, choice.dense_below);
  if (!asked.punctuation.empty()) choice.punctuation = asked.punctuation;
  if (!asked.group_reduce.empty()) choice.group_reduce = asked.group_reduce;
  return choice;
}

LayerSettings Resolve(const Fields& fields, const AttentionChoice& choice, const ServedModel& model) {
  return fields.Named("phsa",
                      [&] { return ResolveAttention(choice, model.engine.config(), model.engine.plan().context); });
}

// What the request sets must not be lost on dense attention; what the server's flags say may be for other requests.
LayerSettings Attention(const Fields& fields, const ServedModel& model) {
  const AttentionChoice asked = AskedAttention(fields), choice = Over(asked, model.attention);
  LayerSettings settings = Resolve(fields, choice, model);
  const bool dense = settings.base.policy == Policy::kDense && settings.layers.empty();
  if (dense) fields.Named("phsa", [&] { RefuseWithoutEffect(asked, {&settings, 1}, false); });
  return settings;
}

// What completions and chats have in common.
GenerationRequest Common(const Fields& fields, const ServedModel& model) {
  GenerationRequest request;
  (void)fields.String("model");  // any name is served by the one model that is there
  request.n = fields.Int("n", 1, kMaxAnswers).value_or(1);
  request.stream = fields.Bool("stream", false);
  if (const auto options = fields.Object("stream_options")) {
    request.include_usage = options->Bool("include_usage", false);
  }
  request.return_token_ids = fields.Bool("return_token_ids", false);
  request.options.stops = Stops(fields);
  request.options.ignore_eos = fields.Bool("ignore_eos", false);
  SamplingChoice& sampling = request.sampling;
  sampling.temperature = fields.Float("temperature", 0, 2);
  sampling.top_p = fields.Float("top_p", 0.001, 1);
  sampling.min_p = fields.Float("min_p", 0, 1);
  sampling.top_k = fields.Int("top_k", -1, INT32_MAX);
  if (sampling.top_k == -1) sampling.top_k = 0;  // vLLM's word for all
  sampling.repetition_penalty = fields.Float("repetition_penalty", 0.01, 100);
  sampling.seed = Seed(fields);
  fields.Neutral("frequency_penalty", 0);
  fields.Neutral("presence_penalty", 0);
  fields.Neutral("logit_bias", Json::object());
  request.options.sampler =
      fields.Named("temperature", [&] { return ResolveSampling(sampling, model.engine.config()); });
  request.attention = Attention(fields, model);
  return request;
}

void CheckAnswers(const Fields& fields, const GenerationRequest& request) {
  const size_t answers = request.prompts.size() * static_cast<size_t>(request.n);
  if (answers > kMaxAnswers) {
    fields.Refuse("n", fmt::format(" times the number of prompts is {}; allowed: at most {}", answers, kMaxAnswers));
  }
}

}  // namespace

GenerationRequest ParseCompletion(std::string_view body, const ServedModel& model) {
  const Json json = ParseBody(body);
  const Fields fields(json, "");
  GenerationRequest request = Common(fields, model);
  request.options.max_tokens = fields.Int("max_tokens", 0, kMaxTokens).value_or(kDefaultCompletionTokens);
  request.echo = fields.Bool("echo", false);
  request.options.log_probabilities = fields.Int("logprobs", 0, kMaxTopLogProbabilities);
  request.options.prompt_log_probabilities = request.echo && request.options.log_probabilities.has_value();
  fields.Neutral("suffix", "");
  fields.Neutral("best_of", request.n);
  request.prompts = Prompts(fields, model);
  CheckAnswers(fields, request);
  return request;
}

GenerationRequest ParseChat(std::string_view body, const ServedModel& model) {
  const Json json = ParseBody(body);
  const Fields fields(json, "");
  GenerationRequest request = Common(fields, model);
  request.chat = true;
  const std::optional<int32_t> tokens = fields.Int("max_tokens", 0, kMaxTokens);
  request.options.max_tokens =
      fields.Int("max_completion_tokens", 0, kMaxTokens).value_or(tokens.value_or(model.chat_tokens));
  const bool log_probabilities = fields.Bool("logprobs", false);
  const std::optional<int32_t> top = fields.Int("top_logprobs", 0, kMaxTopLogProbabilities);
  if (log_probabilities) request.options.log_probabilities = top.value_or(0);
  fields.Neutral("tools", Json::array());
  fields.Neutral("functions", Json::array());
  fields.Neutral("response_format", {{"type", "text"}});
  request.prompts.push_back({ChatTokens(fields, model, true), ""});
  CheckLength(fields, "messages", request.prompts.front().tokens, model);
  CheckAnswers(fields, request);
  return request;
}

InspectRequest ParseInspect(std::string_view body, const ServedModel& model) {
  const Json json = ParseBody(body);
  const Fields fields(json, "");
  const bool chat = fields.Find("messages") != nullptr;
  (void)Variables(fields);  // judged also where no template reads them
  if (chat && fields.Find("prompt") != nullptr) fields.Refuse("prompt", " and messages are both there; give one");
  const Tokenizer& tokenizer = model.engine.tokenizer();
  InspectRequest request;
  if (chat) {
    request.tokens = ChatTokens(fields, model, true);
  } else {
    std::vector<Prompt> prompts = Prompts(fields, model);
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
  request.options.sampler.temperature = 0;

  AttentionChoice choice = Over(AskedAttention(fields), model.attention);
  request.attention = Resolve(fields, choice, model);
  const ModelConfig& config = model.engine.config();
  const auto dense = [&](const LayerSettings& settings) {
    for (int32_t layer = 0; layer < config.num_layers; ++layer) {
      if (settings.ForLayer(layer).policy != Policy::kDense) return false;
    }
    return true;
  };
  if (dense(request.attention) && choice.policy == "auto") {
    choice.policy = "phsa";
    request.attention = Resolve(fields, choice, model);
  }
  if (dense(request.attention)) {
    fields.Refuse("phsa",
                  " asks for dense attention, which reads everything and chooses nothing; allowed here: phsa, "
                  "infllm2, infllm2-64, quest, streaming");
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
    request.tokens = ChatTokens(fields, model, add_generation_prompt);
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
  const ChatTemplate& chat = Template(model);
  const std::vector<ChatMessage> messages = Messages(fields);
  const bool add_generation_prompt = fields.Bool("add_generation_prompt", true);
  return fields.Named("messages", [&] {
    return chat.Render(messages, add_generation_prompt, model.engine.tokenizer(), Variables(fields));
  });
}

}  // namespace phsa::server
