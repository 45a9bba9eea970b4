#include "server/service.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "eval/inspect_report.h"
#include "io/sha256.h"
#include "server/answers.h"
#include "server/generation.h"
#include "server/messages_api.h"
#include "server/responses_api.h"
#include "server/static_files.h"

namespace phsa::server {
namespace {

// Ways to read that are kept; each has a table of the vocabulary's size.
constexpr size_t kMaxAttentions = 32;
constexpr const char* kRetryAfterSeconds = "2";
constexpr std::string_view kModels = "/v1/models/";

// The page loads nothing from elsewhere and runs no script but its own files.
constexpr const char* kPagePolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

std::string PathOf(const std::string& target) { return target.substr(0, target.find_first_of("?#")); }

// Takes as long whatever the key is and wherever it differs.
bool SameKey(const std::string& a, const std::string& b) {
  Sha256 first, second;
  first.Update(a.data(), a.size());
  second.Update(b.data(), b.size());
  const std::string x = first.Hex(), y = second.Hex();
  unsigned difference = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    difference |= static_cast<unsigned>(static_cast<uint8_t>(x[i]) ^ static_cast<uint8_t>(y[i]));
  }
  return difference == 0;
}

bool IsJson(std::string type) {
  type.resize(std::min(type.size(), type.find(';')));
  while (!type.empty() && type.back() == ' ') type.pop_back();
  std::transform(type.begin(), type.end(), type.begin(), [](unsigned char c) { return std::tolower(c); });
  return type == "application/json";
}

std::string Unescaped(std::string_view path) {
  std::string out;
  for (size_t i = 0; i < path.size(); ++i) {
    const auto digit = [&](size_t at) {
      const char c = at < path.size() ? path[at] : ' ';
      return c >= '0' && c <= '9'   ? c - '0'
             : c >= 'a' && c <= 'f' ? c - 'a' + 10
             : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                    : -1;
    };
    if (path[i] == '%' && digit(i + 1) >= 0 && digit(i + 2) >= 0) {
      out += static_cast<char>(digit(i + 1) * 16 + digit(i + 2));
      i += 2;
    } else {
      out += path[i];
    }
  }
  return out;
}

HttpResponse JsonResponse(const Json& json) {
  HttpResponse response;
  response.body = JsonBody(json);
  return response;
}

class InspectCall : public TaskListener, public std::enable_shared_from_this<InspectCall> {
 public:
  InspectCall(InspectRequest request, std::shared_ptr<Exchange> exchange)
      : request_(std::move(request)), exchange_(std::move(exchange)) {}

  void OnPart(size_t, AnswerPart) override {}
  void OnEnd(size_t, GenerateResult, const AnswerTimes&) override {}
  void OnInspection(Inspection inspection) override {
    exchange_->Post([self = shared_from_this(), inspection = std::move(inspection)]() mutable {
      if (inspection.result.reason == StopReason::kInterrupted) {
        self->exchange_->Answer(ErrorResponse(HttpError(503, StatusText(503))));
        return;
      }
      // What was given as the answer was read with the prompt.
      inspection.prompt_tokens = self->request_.prompt_tokens;
      inspection.result.text = self->request_.answer + inspection.result.text;
      HttpResponse response;
      response.body = InspectionJson(inspection);
      self->exchange_->Answer(std::move(response));
    });
  }
  void OnFailure(std::exception_ptr error) override {
    exchange_->Post([self = shared_from_this(), error = std::move(error)] {
      self->exchange_->Answer(ErrorResponse(FromException(error)));
    });
  }

 private:
  const InspectRequest request_;
  const std::shared_ptr<Exchange> exchange_;
};

bool IsDense(const LayerSettings& settings) {
  return settings.base.policy == Policy::kDense && settings.layers.empty();
}

[[noreturn]] void ThrowFull() {
  HttpError error(429, "the queue is full; try again a little later", "", "queue_full");
  error.headers = {{"Retry-After", kRetryAfterSeconds}};
  throw error;
}

}  // namespace

struct Service::Route {
  const char* path;
  const char* method;
  bool open;  // without the key
  HttpResponse (Service::*answer)(const HttpRequest&);
  void (Service::*begin)(const HttpRequest&, std::shared_ptr<Exchange>, const Cancelled&);  // where it takes longer
};

const std::vector<Service::Route>& Service::Routes() {
  static const std::vector<Route> routes = {
      {"/health", "GET", true, &Service::Health, nullptr},
      {"/version", "GET", false, &Service::Version, nullptr},
      {"/metrics", "GET", false, &Service::MetricsText, nullptr},
      {"/openapi.json", "GET", true, &Service::OpenApi, nullptr},
      {"/v1/models", "GET", false, &Service::Models, nullptr},
      {"/v1/models/{model}", "GET", false, &Service::Models, nullptr},
      {"/tokenizer_info", "GET", false, &Service::TokenizerInfo, nullptr},
      {"/tokenize", "POST", false, &Service::Tokenize, nullptr},
      {"/detokenize", "POST", false, &Service::Detokenize, nullptr},
      {"/apply-template", "POST", false, &Service::ApplyTemplate, nullptr},
      {"/v1/completions", "POST", false, nullptr, &Service::Completions},
      {"/v1/chat/completions", "POST", false, nullptr, &Service::Chat},
      {"/v1/responses", "POST", false, nullptr, &Service::Responses},
      {"/v1/messages", "POST", false, nullptr, &Service::Messages},
      {"/v1/messages/count_tokens", "POST", false, &Service::CountTokens, nullptr},
      {"/inspect", "POST", false, nullptr, &Service::Inspect},
      {"/", "GET", true, &Service::Page, nullptr},
  };
  return routes;
}

const Service::Route* Service::FindRoute(const std::string& target) {
  const std::string path = PathOf(target);
  const bool is_model = path.starts_with(kModels) && path.size() > kModels.size();
  const bool is_file = FindStaticFile(path) != nullptr;
  for (const Route& route : Routes()) {
    if (path == route.path) return &route;
    if (is_model && route.path == std::string_view("/v1/models/{model}")) return &route;
    if (is_file && route.path == std::string_view("/")) return &route;
  }
  return nullptr;
}

std::string Service::CountedPath(const std::string& target) {
  const Route* const route = FindRoute(target);
  return route != nullptr ? route->path : "other";
}

Service::Service(ServedModel model, ServiceOptions options, Worker& worker, Metrics& metrics)
    : model_(std::move(model)),
      options_(std::move(options)),
      hosts_(options_.hosts),
      worker_(worker),
      metrics_(metrics),
      started_(std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
                   .count()),
      tested_tokens_(TestedTokens(model_.engine.config())) {}

void Service::CheckHead(const HttpRequest& request) const {
  if (options_.api_key.empty() && !hosts_.Allows(request.host)) {
    throw HttpError(403,
                    fmt::format("this server is not known as {}; ask for localhost or 127.0.0.1, or start it with "
                                "--allow-host and that name, or with a key",
                                Quoted(request.host)),
                    "", "host_not_allowed");
  }
  const Route* const route = FindRoute(request.target);
  if (route == nullptr) throw HttpError(404, StatusText(404));
  const bool get = std::string_view(route->method) == "GET";
  if (request.method != route->method && !(get && request.method == "HEAD") && request.method != "OPTIONS") {
    HttpError error(405, StatusText(405));
    error.headers = {{"Allow", get ? "GET, HEAD, OPTIONS" : "POST, OPTIONS"}};
    throw error;
  }
  if (request.method == "OPTIONS") return;  // a browser asks without the key
  if (!options_.api_key.empty() && !route->open && !SameKey(request.authorization, "Bearer " + options_.api_key)) {
    HttpError error(401, StatusText(401), "", "invalid_api_key");
    error.headers = {{"WWW-Authenticate", "Bearer"}};
    throw error;
  }
  if (!get && !IsJson(request.content_type)) throw HttpError(415, StatusText(415));
  if (route->begin != nullptr) CheckDraining();
}

void Service::CheckDraining() const {
  if (!draining_) return;
  HttpError error(503, StatusText(503));
  error.headers = {{"Retry-After", kRetryAfterSeconds}};
  throw error;
}

std::vector<std::pair<std::string, std::string>> Service::CommonHeaders(const HttpRequest& request) const {
  std::vector<std::pair<std::string, std::string>> headers = {{"Server", "phsa/" + options_.version},
                                                              {"X-Content-Type-Options", "nosniff"},
                                                              {"Referrer-Policy", "no-referrer"}};
  if (options_.cors_origin.empty()) return headers;
  headers.emplace_back("Vary", "Origin");
  if (request.origin.empty() || (options_.cors_origin != "*" && request.origin != options_.cors_origin)) return headers;
  headers.emplace_back("Access-Control-Allow-Origin", options_.cors_origin);
  headers.emplace_back("Access-Control-Expose-Headers", "Retry-After");
  if (request.method == "OPTIONS") {
    headers.emplace_back("Access-Control-Allow-Methods", "GET, HEAD, POST, OPTIONS");
    headers.emplace_back("Access-Control-Allow-Headers", "authorization, content-type, x-api-key, anthropic-version");
    headers.emplace_back("Access-Control-Max-Age", "600");
  }
  return headers;
}

std::function<void()> Service::Handle(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange) {
  try {
    CheckHead(request);
    const Route& route = *FindRoute(request.target);
    if (request.method == "OPTIONS") {
      HttpResponse response;
      response.status = 204;
      response.headers = {{"Allow", std::string_view(route.method) == "GET" ? "GET, HEAD, OPTIONS" : "POST, OPTIONS"}};
      exchange->Answer(std::move(response));
    } else if (route.answer != nullptr) {
      exchange->Answer((this->*route.answer)(request));
    } else {
      const auto cancelled = std::make_shared<std::atomic<bool>>(false);
      (this->*route.begin)(request, exchange, cancelled);
      return [cancelled] { *cancelled = true; };
    }
  } catch (...) {
    exchange->Answer(ErrorResponse(FromException(std::current_exception()), request.target));
  }
  return {};
}

HttpResponse Service::Page(const HttpRequest& request) {
  const StaticFile& file = *FindStaticFile(PathOf(request.target));
  HttpResponse response;
  response.content_type = file.content_type;
  response.body = file.text;
  response.headers = {{"Content-Security-Policy", kPagePolicy},
                      {"X-Frame-Options", "DENY"},
                      {"Cross-Origin-Opener-Policy", "same-origin"},
                      {"Cache-Control", "no-cache"}};
  return response;
}

HttpResponse Service::OpenApi(const HttpRequest&) {
  Json api = Json::parse(OpenApiText());
  api["info"]["version"] = options_.version;
  // What only a loaded model knows.
  api["components"]["schemas"]["Token"]["maximum"] = model_.engine.tokenizer().vocab_size() - 1;
  return JsonResponse(api);
}

HttpResponse Service::Health(const HttpRequest&) {
  const std::string failure = worker_.device_failure();
  Json body = {{"status", draining_ ? "stopping" : failure.empty() ? "ok" : "failed"}};
  if (!failure.empty()) body["message"] = failure;
  HttpResponse response = JsonResponse(body);
  if (body["status"] != "ok") response.status = 503;
  return response;
}

HttpResponse Service::Version(const HttpRequest&) { return JsonResponse({{"version", options_.version}}); }

HttpResponse Service::MetricsText(const HttpRequest&) {
  HttpResponse response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  response.body = metrics_.Text();
  return response;
}

HttpResponse Service::Models(const HttpRequest& request) {
  const MemoryPlan& plan = model_.engine.plan();
  const Settings& settings = model_.engine.options().attention.base;
  const Json model = {{"id", model_.id},
                      {"object", "model"},
                      {"created", started_},
                      {"owned_by", "phsa"},
                      {"max_model_len", plan.context},
                      {"phsa",
                       {{"attention", Name(settings.policy)},
                        {"settings", Json::parse(SettingsToJson(model_.engine.options().attention))},
                        {"device", model_.engine.device_name()},
                        {"weights", plan.weight_types},
                        {"kv_type", plan.kv_type},
                        {"cache_tokens", plan.cache_tokens},
                        {"tested_tokens", tested_tokens_ ? Json(*tested_tokens_) : Json()},
                        {"chat_template", model_.chat_template ? Json(model_.chat_template->name()) : Json()}}}};
  const std::string path = PathOf(request.target);
  if (!path.starts_with(kModels)) return JsonResponse({{"object", "list"}, {"data", Json::array({model})}});
  if (Unescaped(std::string_view(path).substr(kModels.size())) == model_.id) return JsonResponse(model);
  throw HttpError(404, fmt::format("there is no such model; the one that is served is {}", Quoted(model_.id)), "model",
                  "model_not_found");
}

HttpResponse Service::TokenizerInfo(const HttpRequest&) {
  const Tokenizer& tokenizer = model_.engine.tokenizer();
  const auto token = [&](int32_t id) { return id >= 0 ? Json(TokenText(tokenizer, id)) : Json(); };
  const std::string& chat = model_.engine.source().chat_template();
  return JsonResponse({{"bos_token", token(tokenizer.bos())},
                       {"eos_token", token(tokenizer.eos())},
                       {"pad_token", nullptr},
                       {"chat_template", chat.empty() ? Json() : Json(chat)},
                       {"vocab_size", tokenizer.vocab_size()}});
}

HttpResponse Service::Tokenize(const HttpRequest& request) {
  const TokenizeRequest parsed = ParseTokenize(request.body, model_);
  Json body = {
      {"tokens", parsed.tokens}, {"count", parsed.tokens.size()}, {"max_model_len", model_.engine.plan().context}};
  if (parsed.with_pieces) {
    Json& pieces = body["pieces"] = Json::array();
    for (const int32_t token : parsed.tokens) pieces.push_back(TokenText(model_.engine.tokenizer(), token));
  }
  return JsonResponse(body);
}

HttpResponse Service::Detokenize(const HttpRequest& request) {
  const std::string text = model_.engine.tokenizer().Decode(ParseDetokenize(request.body, model_), false);
  return JsonResponse({{"content", text}, {"prompt", text}});  // llama.cpp's name, and vLLM's
}

HttpResponse Service::ApplyTemplate(const HttpRequest& request) {
  return JsonResponse({{"prompt", ParseApplyTemplate(request.body, model_)}});
}

std::shared_ptr<const TextAttention> Service::AttentionFor(const LayerSettings& settings) {
  const LayerSettings& own = model_.engine.options().attention;
  // Dense attention is one, whatever else its settings say.
  if (settings == own || (IsDense(settings) && IsDense(own))) return nullptr;
  const std::lock_guard lock(attentions_mutex_);
  const auto known = std::find_if(attentions_.begin(), attentions_.end(),
                                  [&](const auto& attention) { return attention->settings == settings; });
  if (known != attentions_.end()) {
    attentions_.splice(attentions_.begin(), attentions_, known);
    return attentions_.front();
  }
  try {
    attentions_.push_front(model_.engine.MakeAttention(settings));
  } catch (const Error& error) {
    throw HttpError(400, error.what(), "phsa", "invalid_value");
  }
  if (attentions_.size() > kMaxAttentions) attentions_.pop_back();
  return attentions_.front();
}

void Service::Completions(const HttpRequest& request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled) {
  Generate(ParseCompletion(request.body, model_), std::move(exchange), cancelled);
}

void Service::Chat(const HttpRequest& request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled) {
  Generate(ParseChat(request.body, model_), std::move(exchange), cancelled);
}

void Service::NotePastTested(size_t tokens) {
  if (!tested_tokens_ || tokens <= static_cast<size_t>(*tested_tokens_) || !options_.note) return;
  if (noted_past_tested_.exchange(true)) return;
  options_.note(PastTestedTokens(model_.engine.config(), *tested_tokens_, static_cast<int64_t>(tokens)));
}

void Service::Generate(GenerationRequest request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled) {
  Submit(std::make_shared<Generation>(model_, std::move(request), std::move(exchange), cancelled), cancelled);
}

template <class Answer>
void Service::Submit(const std::shared_ptr<Answer>& answer, const Cancelled& cancelled) {
  const std::shared_ptr<const TextAttention> attention = AttentionFor(answer->request().attention);
  for (const Prompt& prompt : answer->request().prompts) NotePastTested(prompt.tokens.size());
  // What the worker says comes to this thread too, so that it finds the stream begun.
  if (!worker_.Submit(answer->Tasks(attention), answer, cancelled)) {
    metrics_.CountRefused();
    ThrowFull();
  }
  answer->Begin();
}

void Service::Responses(const HttpRequest& request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled) {
  Submit(MakeResponsesReply(model_, ParseResponses(request.body, model_), std::move(exchange), cancelled), cancelled);
}

void Service::Messages(const HttpRequest& request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled) {
  Submit(MakeMessagesReply(model_, ParseMessages(request.body, model_), std::move(exchange), cancelled), cancelled);
}

HttpResponse Service::CountTokens(const HttpRequest& request) {
  return JsonResponse({{"input_tokens", CountMessages(request.body, model_)}});
}

void Service::Inspect(const HttpRequest& request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled) {
  InspectRequest parsed = ParseInspect(request.body, model_);
  InspectTask task;
  task.prompt = parsed.tokens;
  task.last = parsed.last;
  task.options = parsed.options;
  task.attention = AttentionFor(parsed.attention);
  const auto call = std::make_shared<InspectCall>(std::move(parsed), std::move(exchange));
  if (!worker_.SubmitInspection(std::move(task), call, cancelled)) {
    metrics_.CountRefused();
    ThrowFull();
  }
}

}  // namespace phsa::server
