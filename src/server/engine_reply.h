// What the replies to requests have in common. The engine's thread tells them what there is; they take it, and answer
// the client, in the request's own.
#ifndef PHSA_SERVER_ENGINE_REPLY_H_
#define PHSA_SERVER_ENGINE_REPLY_H_

#include <atomic>
#include <memory>
#include <utility>

#include "server/api.h"
#include "server/http_types.h"
#include "server/worker.h"

namespace phsa::server {

template <class Request>
class EngineReply : public TaskListener {
 public:
  // `cancelled`: raised where a part of the reply failed, so that the others end.
  EngineReply(std::shared_ptr<const ServedModel> model, Request request, std::shared_ptr<Exchange> exchange,
              std::shared_ptr<std::atomic<bool>> cancelled)
      : held_(std::move(model)),
        model_(*held_),
        request_(std::move(request)),
        exchange_(std::move(exchange)),
        cancelled_(std::move(cancelled)) {}

  const Request& request() const { return request_; }
  void OnInspection(Inspection) override {}

 protected:
  bool failed() const { return failed_; }
  // False where it has failed before: the client knows.
  bool Fail() {
    if (failed_) return false;
    failed_ = true;
    *cancelled_ = true;
    return true;
  }

 private:
  const std::shared_ptr<const ServedModel> held_;  // so that the model stays in memory

 protected:
  const ServedModel& model_;
  const Request request_;
  const std::shared_ptr<Exchange> exchange_;

 private:
  const std::shared_ptr<std::atomic<bool>> cancelled_;
  bool failed_ = false;
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_ENGINE_REPLY_H_
