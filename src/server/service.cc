#include "server/service.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/percent.h"
#include "base/utf8.h"
#include "eval/inspect_report.h"
#include "io/sha256.h"
#include "server/answers.h"
#include "server/embeddings_api.h"
#include "server/generation.h"
#include "server/messages_api.h"
#include "server/responses_api.h"
#include "server/static_files.h"

namespace phsa::server {
namespace {

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

// Of "path?key=value&…"; empty where the key is not there.
std::string QueryValue(std::string_view target, std::string_view key) {
  const size_t question = target.find('?');
  std::string_view rest = question == std::string_view::npos ? "" : target.substr(question + 1);
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find('&'));
    if (one.starts_with(key) && one.substr(key.size()).starts_with('='))
      return WithoutPercents(one.substr(key.size() + 1));
    rest.remove_prefix(std::min(one.size() + 1, rest.size()));
  }
  return "";
}

HttpResponse JsonResponse(const Json& json) {
  HttpResponse response;
  response.body = JsonBody(json);
  return response;
}

// What a body says its model is; empty: nothing, or it is no JSON, which who reads it will say.
std::string NameIn(const std::string& body) {
  const Json json = Json::parse(body, nullptr, false);
  if (!json.is_object()) return "";
  const auto name = json.find("model");
  return name != json.end() && name->is_string() ? name->get<std::string>() : "";
}

class InspectCall : public TaskListener, public std::enable_shared_from_this<InspectCall> {
 public:
  InspectCall(std::shared_ptr<const ServedModel> model, InspectRequest request, std::shared_ptr<Exchange> exchange)
      : held_(std::move(model)), request_(std::move(request)), exchange_(std::move(exchange)) {}

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

  const std::shared_ptr<const ServedModel> held_;  // so that the model stays in memory
  const InspectRequest request_;
  const std::shared_ptr<Exchange> exchange_;
};

[[noreturn]] void ThrowFull() {
  HttpError error(429, "the queue is full; try again a little later", "", "queue_full");
  error.headers = {{"Retry-After", kRetryAfterSeconds}};
  throw error;
}

}  // namespace

struct Service::Route {
  const char* path;
  const char* method;
  bool open;                                                      // without the key
  HttpResponse (Service::*answer)(const HttpRequest&) = nullptr;  // where no model is needed
  HttpResponse (Service::*tell)(const HttpRequest&, const Target&) = nullptr;
  // Where it takes longer.
  void (Service::*begin)(const HttpRequest&, const Target&, std::shared_ptr<Exchange>, const Cancelled&) = nullptr;
  // And where no model is needed for that.
  void (Service::*read)(const HttpRequest&, std::shared_ptr<Exchange>, const Cancelled&) = nullptr;
};

const std::vector<Service::Route>& Service::Routes() {
  static const std::vector<Route> routes = {
      {"/health", "GET", true, &Service::Health},
      {"/version", "GET", false, &Service::Version},
      {"/metrics", "GET", false, &Service::MetricsText},
      {"/openapi.json", "GET", true, &Service::OpenApi},
      {"/v1/models", "GET", false, &Service::Models},
      {"/v1/models/{model}", "GET", false, &Service::Models},
      {"/tokenizer_info", "GET", false, nullptr, &Service::TokenizerInfo},
      {"/tokenize", "POST", false, nullptr, &Service::Tokenize},
      {"/detokenize", "POST", false, nullptr, &Service::Detokenize},
      {"/apply-template", "POST", false, nullptr, &Service::ApplyTemplate},
      {"/v1/completions", "POST", false, nullptr, nullptr, &Service::Completions},
      {"/v1/chat/completions", "POST", false, nullptr, nullptr, &Service::Chat},
      {"/v1/responses", "POST", false, nullptr, nullptr, &Service::Responses},
      {"/v1/messages", "POST", false, nullptr, nullptr, &Service::Messages},
      {"/v1/messages/count_tokens", "POST", false, nullptr, &Service::CountTokens},
      {"/v1/embeddings", "POST", false, nullptr, nullptr, &Service::Embeddings},
      {"/inspect", "POST", false, nullptr, nullptr, &Service::Inspect},
      {"/documents", "POST", false, nullptr, nullptr, nullptr, &Service::ReadDocument},
      {"/", "GET", true, &Service::Page},
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

Service::Service(ModelPool& models, ServiceOptions options, Metrics& metrics)
    : models_(models),
      options_(std::move(options)),
      hosts_(options_.hosts),
      metrics_(metrics),
      started_(std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
                   .count()) {}

void Service::CheckHead(const HttpRequest& request) const {
  if (options_.api_key.empty() && !hosts_.Allows(request.host)) {
    throw HttpError(403,
                    fmt::format("this server is not known as {}; ask for localhost or 127.0.0.1, or have it "
                                "started with that name allowed, or with a key",
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
  if (route->begin != nullptr || route->read != nullptr) CheckDraining();
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
    } else if (route.read != nullptr) {
      const auto cancelled = std::make_shared<std::atomic<bool>>(false);
      (this->*route.read)(request, exchange, cancelled);
      return [cancelled] { *cancelled = true; };
    } else {
      const ModelPool::Place place = models_.Find(models_.has_choice() ? NameIn(request.body) : "");
      const auto cancelled = std::make_shared<std::atomic<bool>>(false);
      const auto target = [served = place.served](std::shared_ptr<LoadedModel> loaded) {
        const ServedModel* const model = &loaded->served()[served];
        return Target{loaded, std::shared_ptr<const ServedModel>(loaded, model)};
      };
      if (auto loaded = models_.TryGet(place.model)) {
        Answer(route, request, target(std::move(loaded)), exchange, cancelled);
      } else {
        models_.Wait(
            place.model, cancelled,
            [this, &route, request, target, exchange, cancelled](std::shared_ptr<LoadedModel> found) {
              exchange->Post([this, &route, request, found = target(std::move(found)), exchange, cancelled] {
                try {
                  if (route.begin != nullptr) CheckDraining();
                  Answer(route, request, found, exchange, cancelled);
                } catch (...) {
                  exchange->Answer(ErrorResponse(FromException(std::current_exception()), request.target));
                }
              });
            },
            [exchange, path = request.target](const std::exception_ptr& error) {
              exchange->Post([=] { exchange->Answer(ErrorResponse(FromException(error), path)); });
            });
      }
      return [cancelled] { *cancelled = true; };
    }
  } catch (...) {
    exchange->Answer(ErrorResponse(FromException(std::current_exception()), request.target));
  }
  return {};
}

void Service::Answer(const Route& route, const HttpRequest& request, const Target& target,
                     const std::shared_ptr<Exchange>& exchange, const Cancelled& cancelled) {
  if (route.tell != nullptr) {
    exchange->Answer((this->*route.tell)(request, target));
  } else {
    (this->*route.begin)(request, target, exchange, cancelled);
  }
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
  if (const auto loaded = models_.Loaded(); !loaded.empty()) {
    const Engine& engine = loaded.front()->served().front().engine;
    Json& schemas = api["components"]["schemas"];
    schemas["Token"]["maximum"] = engine.tokenizer().vocab_size() - 1;
    schemas["EmbeddingsRequest"]["properties"]["dimensions"]["maximum"] = engine.config().hidden;
  }
  return JsonResponse(api);
}

HttpResponse Service::Health(const HttpRequest&) {
  std::string failure;
  for (const auto& loaded : models_.Loaded()) {
    if (failure.empty()) failure = loaded->worker().device_failure();
  }
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
  std::vector<const Metrics*> others;
  for (const Metrics* one : models_.AllMetrics()) {
    if (one != &metrics_) others.push_back(one);
  }
  response.body = metrics_.Text(others);
  return response;
}

HttpResponse Service::Models(const HttpRequest& request) {
  Json all = models_.Descriptions();
  for (Json& one : all) one["created"] = started_;
  const std::string path = PathOf(request.target);
  if (!path.starts_with(kModels)) return JsonResponse({{"object", "list"}, {"data", std::move(all)}});
  const std::string name = WithoutPercents(std::string_view(path).substr(kModels.size()));
  std::vector<std::string> ids;
  for (Json& one : all) {
    if (one["id"] == name) return JsonResponse(one);
    ids.push_back(Quoted(one["id"].get<std::string>()));
  }
  throw HttpError(404, fmt::format("there is no model {}; there are: {}", Quoted(name), fmt::join(ids, ", ")), "model",
                  "model_not_found");
}

HttpResponse Service::TokenizerInfo(const HttpRequest&, const Target& target) {
  const Tokenizer& tokenizer = target.served->engine.tokenizer();
  const auto token = [&](int32_t id) { return id >= 0 ? Json(TokenText(tokenizer, id)) : Json(); };
  const std::string& chat = target.served->engine.source().chat_template();
  return JsonResponse({{"bos_token", token(tokenizer.bos())},
                       {"eos_token", token(tokenizer.eos())},
                       {"pad_token", nullptr},
                       {"chat_template", chat.empty() ? Json() : Json(chat)},
                       {"vocab_size", tokenizer.vocab_size()}});
}

HttpResponse Service::Tokenize(const HttpRequest& request, const Target& target) {
  const TokenizeRequest parsed = ParseTokenize(request.body, *target.served);
  Json body = {{"tokens", parsed.tokens},
               {"count", parsed.tokens.size()},
               {"max_model_len", target.served->engine.memory().context}};
  if (parsed.with_pieces) {
    Json& pieces = body["pieces"] = Json::array();
    for (const int32_t token : parsed.tokens) pieces.push_back(TokenText(target.served->engine.tokenizer(), token));
  }
  return JsonResponse(body);
}

HttpResponse Service::Detokenize(const HttpRequest& request, const Target& target) {
  const std::string text =
      target.served->engine.tokenizer().Decode(ParseDetokenize(request.body, *target.served), false);
  return JsonResponse({{"content", text}, {"prompt", text}});  // llama.cpp's name, and vLLM's
}

HttpResponse Service::ApplyTemplate(const HttpRequest& request, const Target& target) {
  return JsonResponse({{"prompt", ParseApplyTemplate(request.body, *target.served)}});
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

template <class Reply>
void Service::Submit(const std::shared_ptr<Reply>& reply, const Target& target, const Cancelled& cancelled) {
  const auto& request = reply->request();
  const std::shared_ptr<const TextAttention> attention = target.loaded->AttentionFor(request.attention, *target.served);
  for (const Prompt& prompt : request.prompts) NotePastTested(*target.served, prompt.tokens.size());
  // What the worker says comes to this thread too, so that it finds the stream begun.
  if (!target.loaded->worker().Submit(reply->Tasks(attention), reply, cancelled)) {
    metrics_.CountRefused();
    ThrowFull();
  }
  reply->Begin();
}

void Service::NotePastTested(const ServedModel& model, size_t tokens) {
  const ModelConfig config = model.engine.ConfigOf(model.adapter);
  const std::optional<int32_t> tested = TestedTokens(config);
  if (!tested || tokens <= static_cast<size_t>(*tested) || !options_.note) return;
  {
    const std::lock_guard lock(noted_mutex_);
    if (!noted_.insert(model.id).second) return;
  }
  options_.note(PastTestedTokens(config, *tested, static_cast<int64_t>(tokens)));
}

void Service::Completions(const HttpRequest& request, const Target& target, std::shared_ptr<Exchange> exchange,
                          const Cancelled& cancelled) {
  Submit(std::make_shared<Generation>(target.served, ParseCompletion(request.body, *target.served), std::move(exchange),
                                      cancelled),
         target, cancelled);
}

void Service::Chat(const HttpRequest& request, const Target& target, std::shared_ptr<Exchange> exchange,
                   const Cancelled& cancelled) {
  Submit(std::make_shared<Generation>(target.served, ParseChat(request.body, *target.served), std::move(exchange),
                                      cancelled),
         target, cancelled);
}

void Service::Responses(const HttpRequest& request, const Target& target, std::shared_ptr<Exchange> exchange,
                        const Cancelled& cancelled) {
  Submit(
      MakeResponsesReply(target.served, ParseResponses(request.body, *target.served), std::move(exchange), cancelled),
      target, cancelled);
}

void Service::Messages(const HttpRequest& request, const Target& target, std::shared_ptr<Exchange> exchange,
                       const Cancelled& cancelled) {
  Submit(MakeMessagesReply(target.served, ParseMessages(request.body, *target.served), std::move(exchange), cancelled),
         target, cancelled);
}

void Service::Embeddings(const HttpRequest& request, const Target& target, std::shared_ptr<Exchange> exchange,
                         const Cancelled& cancelled) {
  Submit(std::make_shared<EmbeddingsReply>(target.served, ParseEmbeddings(request.body, *target.served),
                                           std::move(exchange), cancelled),
         target, cancelled);
}

HttpResponse Service::CountTokens(const HttpRequest& request, const Target& target) {
  return JsonResponse({{"input_tokens", CountMessages(request.body, *target.served)}});
}

void Service::Inspect(const HttpRequest& request, const Target& target, std::shared_ptr<Exchange> exchange,
                      const Cancelled& cancelled) {
  InspectRequest parsed = ParseInspect(request.body, *target.served);
  InspectTask task;
  task.prompt = parsed.tokens;
  task.last = parsed.last;
  task.options = parsed.options;
  task.attention = target.loaded->AttentionFor(parsed.attention, *target.served);
  const auto call = std::make_shared<InspectCall>(target.served, std::move(parsed), std::move(exchange));
  if (!target.loaded->worker().SubmitInspection(std::move(task), call, cancelled)) {
    metrics_.CountRefused();
    ThrowFull();
  }
  call->Begin();
}

}  // namespace phsa::server
