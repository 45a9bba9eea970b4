#include "server/service.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/utf8.h"
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
constexpr std::string_view kModels = "/v1/models/", kDocuments = "/documents";
constexpr const char *kJson = "application/json", *kBytes = "application/octet-stream";
constexpr size_t kLongestDocumentName = 1024;

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

// What a request says of its body, in lower case and without parameters.
std::string TypeOf(std::string type) {
  type.resize(std::min(type.size(), type.find(';')));
  while (!type.empty() && type.back() == ' ') type.pop_back();
  std::transform(type.begin(), type.end(), type.begin(), [](unsigned char c) { return std::tolower(c); });
  return type;
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

// Of "path?key=value&…"; empty where the key is not there.
std::string QueryValue(std::string_view target, std::string_view key) {
  const size_t question = target.find('?');
  std::string_view rest = question == std::string_view::npos ? "" : target.substr(question + 1);
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find('&'));
    if (one.starts_with(key) && one.substr(key.size()).starts_with('=')) return Unescaped(one.substr(key.size() + 1));
    rest.remove_prefix(std::min(one.size() + 1, rest.size()));
  }
  return "";
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

  void Begin() {
    if (request_.stream) exchange_->BeginStream();
  }

  void OnPart(size_t, AnswerPart) override {}
  void OnPrefill(size_t, int32_t done, int32_t total) override {
    if (!request_.stream) return;
    exchange_->Post([self = shared_from_this(), done, total] {
      self->SendEvent(JsonBody({{"phsa", {{"prefill", {{"done", done}, {"total", total}}}}}}));
    });
  }
  void OnEnd(size_t, GenerateResult, const AnswerTimes&) override {}
  void OnInspection(Inspection inspection) override {
    exchange_->Post([self = shared_from_this(), inspection = std::move(inspection)]() mutable {
      if (inspection.result.reason == StopReason::kInterrupted) {
        self->Fail(HttpError(503, StatusText(503)));
        return;
      }
      // What was given as the answer was read with the prompt.
      inspection.prompt_tokens = self->request_.prompt_tokens;
      inspection.result.text = self->request_.answer + inspection.result.text;
      if (self->request_.stream) {
        self->SendEvent(InspectionJson(inspection));
        self->exchange_->Write("data: [DONE]\n\n");
        self->exchange_->EndStream();
        return;
      }
      HttpResponse response;
      response.body = InspectionJson(inspection);
      self->exchange_->Answer(std::move(response));
    });
  }
  void OnFailure(std::exception_ptr error) override {
    exchange_->Post([self = shared_from_this(), error = std::move(error)] { self->Fail(FromException(error)); });
  }

 private:
  void SendEvent(const std::string& json) { exchange_->Write("data: " + json + "\n\n"); }
  void Fail(const HttpError& error) {
    if (!request_.stream) {
      exchange_->Answer(ErrorResponse(error));
      return;
    }
    SendEvent(JsonBody(ErrorJson(error)));
    exchange_->EndStream();
  }

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
      {"/documents", "POST", false, nullptr, &Service::ReadDocument},
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
  // Neither is a type that a page of another site may send without asking.
  const bool bytes = route->path == kDocuments;
  if (!get && TypeOf(request.content_type) != (bytes ? kBytes : kJson)) {
    throw HttpError(
        415, bytes ? "the body is the document's file; send Content-Type: application/octet-stream" : StatusText(415));
  }
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
  const SamplerSettings sampling = ResolveSampling({}, model_.engine.config());
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
                        {"sampling",
                         {{"temperature", Rounded(sampling.temperature)},
                          {"top_k", sampling.top_k},
                          {"top_p", Rounded(sampling.top_p)},
                          {"min_p", Rounded(sampling.min_p)},
                          {"repetition_penalty", Rounded(sampling.repetition_penalty)}}},
                        {"chat_tokens", model_.chat_tokens},
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

uint64_t Service::BodyLimit(const HttpRequest& request, uint64_t most) {
  return PathOf(request.target) == kDocuments ? std::max(most, kLargestDocumentBody) : most;
}

void Service::ReadDocument(const HttpRequest& request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled) {
  std::string name = QueryValue(request.target, "name");
  if (name.empty()) name = "document";
  if (name.size() > kLongestDocumentName || !IsUtf8(name)) {
    throw HttpError(400, fmt::format("name is no text in UTF-8 of at most {} bytes", kLongestDocumentName), "name",
                    "invalid_value");
  }
  if (!documents_.Submit(std::move(name), request.body, std::move(exchange), cancelled)) {
    metrics_.CountRefused();
    ThrowFull();
  }
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
  call->Begin();
}

}  // namespace phsa::server
