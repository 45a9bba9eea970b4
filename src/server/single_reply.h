// The one answer to a conversation, for APIs that have their own words for it.
#ifndef PHSA_SERVER_SINGLE_REPLY_H_
#define PHSA_SERVER_SINGLE_REPLY_H_

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/json.h"
#include "server/api.h"
#include "server/engine_reply.h"
#include "server/http_types.h"
#include "server/tools.h"
#include "server/worker.h"

namespace phsa::server {

class SingleReply : public EngineReply<GenerationRequest>, public std::enable_shared_from_this<SingleReply> {
 public:
  SingleReply(std::shared_ptr<const ServedModel> model, GenerationRequest request, std::shared_ptr<Exchange> exchange,
              std::shared_ptr<std::atomic<bool>> cancelled);

  std::vector<Task> Tasks(const std::shared_ptr<const TextAttention>& attention) const;
  void Begin();

  void OnPart(size_t index, AnswerPart part) override;
  void OnSources(size_t index, AnswerSources sources) override;
  void OnEnd(size_t index, GenerateResult result, const AnswerTimes& times) override;
  void OnFailure(std::exception_ptr error) override;

 protected:
  // All in the request's own thread.
  virtual void BeginStream() = 0;
  virtual void StreamPiece(const ReplyPiece& piece) = 0;
  virtual void EndStream(const GenerateResult& result) = 0;
  virtual void StreamError(const HttpError& error) = 0;
  virtual Json Body(const Reply& reply, const GenerateResult& result) = 0;
  virtual HttpResponse Refusal(const HttpError& error) const = 0;

  const ServedModel& model() const { return model_; }
  int32_t calls() const { return parser_.calls(); }
  int64_t created() const { return created_; }
  const Json& Measurements() const { return measurements_; }  // the answer's object `phsa`, at its end
  void SendEvent(const char* name, const Json& data);

 private:
  void Pieces(const std::vector<ReplyPiece>& pieces);
  void TakeEnd(const GenerateResult& result, const AnswerTimes& times);
  void TakeFailure(const std::exception_ptr& error);

  const int64_t created_;
  CallMarks marks_;
  ReplyParser parser_;
  std::optional<AnswerSources> sources_;
  Json measurements_;
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_SINGLE_REPLY_H_
