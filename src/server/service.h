// What the server answers: paths, methods, who may ask, and the way from a request to the engine and back.
#ifndef PHSA_SERVER_SERVICE_H_
#define PHSA_SERVER_SERVICE_H_

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/allowed_hosts.h"
#include "server/api.h"
#include "server/document_reader.h"
#include "server/http_types.h"
#include "server/metrics.h"
#include "server/worker.h"

namespace phsa::server {

struct ServiceOptions {
  std::string api_key;      // empty: anybody may ask
  std::string cors_origin;  // whose pages may ask too: an origin, or "*"; empty: nobody's
  std::string version;
  std::function<void(const std::string& text)> note;  // takes a line for the log; may be empty
  std::vector<std::string> hosts = {};                // names of this server beside localhost, where there is no key
};

class Service {
 public:
  Service(ServedModel model, ServiceOptions options, Worker& worker, Metrics& metrics);

  // What can be judged by the header alone, before a body is read: throws HttpError.
  void CheckHead(const HttpRequest& request) const;
  // Answers now or later. Returns what to call when the client goes before that; may be empty. Throws nothing.
  std::function<void()> Handle(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange);
  // From now on nothing new is begun.
  void Drain() { draining_ = true; }
  // Headers for every response to this request.
  std::vector<std::pair<std::string, std::string>> CommonHeaders(const HttpRequest& request) const;
  // Bytes that this request's body may have, where others may have `most`.
  static uint64_t BodyLimit(const HttpRequest& request, uint64_t most);
  // What is not the worker's ends; no exchange is held by it any more.
  void Stop() { documents_.Stop(); }
  // The path by which a request is counted: those that are not there are one.
  static std::string CountedPath(const std::string& target);

 private:
  struct Route;
  static const std::vector<Route>& Routes();
  static const Route* FindRoute(const std::string& target);

  using Cancelled = std::shared_ptr<std::atomic<bool>>;
  HttpResponse Page(const HttpRequest& request);
  HttpResponse OpenApi(const HttpRequest& request);
  HttpResponse Health(const HttpRequest& request);
  HttpResponse Version(const HttpRequest& request);
  HttpResponse MetricsText(const HttpRequest& request);
  HttpResponse Models(const HttpRequest& request);
  HttpResponse TokenizerInfo(const HttpRequest& request);
  HttpResponse Tokenize(const HttpRequest& request);
  HttpResponse Detokenize(const HttpRequest& request);
  HttpResponse ApplyTemplate(const HttpRequest& request);
  void Completions(const HttpRequest& request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled);
  void Chat(const HttpRequest& request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled);
  void Responses(const HttpRequest& request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled);
  void Messages(const HttpRequest& request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled);
  HttpResponse CountTokens(const HttpRequest& request);
  template <class Answer>
  void Submit(const std::shared_ptr<Answer>& answer, const Cancelled& cancelled);
  void Inspect(const HttpRequest& request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled);
  void ReadDocument(const HttpRequest& request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled);
  void Generate(GenerationRequest request, std::shared_ptr<Exchange> exchange, const Cancelled& cancelled);
  std::shared_ptr<const TextAttention> AttentionFor(const LayerSettings& settings);
  void NotePastTested(size_t tokens);  // once, in the log
  void CheckDraining() const;

  const ServedModel model_;
  const ServiceOptions options_;
  const AllowedHosts hosts_;
  Worker& worker_;
  Metrics& metrics_;
  const int64_t started_;
  const std::optional<int32_t> tested_tokens_;
  std::atomic<bool> noted_past_tested_ = false;
  std::atomic<bool> draining_ = false;
  DocumentReader documents_;
  // Ways to read that requests asked for lately, the latest first: their texts share pages only where the way is one
  // and the same object.
  std::mutex attentions_mutex_;
  std::list<std::shared_ptr<const TextAttention>> attentions_;
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_SERVICE_H_
