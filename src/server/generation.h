// The answer to a completion or a chat, from the engine's parts to the client.
#ifndef PHSA_SERVER_GENERATION_H_
#define PHSA_SERVER_GENERATION_H_

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "server/answers.h"
#include "server/api.h"
#include "server/engine_reply.h"
#include "server/http_types.h"
#include "server/tools.h"
#include "server/worker.h"

namespace phsa::server {

// What went wrong behind the request, as an answer.
HttpError FromException(const std::exception_ptr& error);

class Generation : public EngineReply<GenerationRequest>, public std::enable_shared_from_this<Generation> {
 public:
  Generation(std::shared_ptr<const ServedModel> model, GenerationRequest request, std::shared_ptr<Exchange> exchange,
             std::shared_ptr<std::atomic<bool>> cancelled);

  std::vector<Task> Tasks(const std::shared_ptr<const TextAttention>& attention) const;
  void Begin();  // where it streams: the head, and for a chat whose turn it is

  void OnPart(size_t index, AnswerPart part) override;
  void OnPrefill(size_t index, int32_t done, int32_t total) override;
  void OnSources(size_t index, AnswerSources sources) override;
  void OnEnd(size_t index, GenerateResult result, const AnswerTimes& times) override;
  void OnFailure(std::exception_ptr error) override;

 private:
  // In the request's own thread.
  void TakePart(size_t index, const AnswerPart& part);
  void TakeEnd(size_t index, GenerateResult result, const AnswerTimes& times);
  void TakeFailure(const std::exception_ptr& error);
  Json Frame(const char* kind) const;  // what all bodies begin with
  Json Choice(size_t index) const;
  void Send(Json choice, bool last);
  void SendEvent(const Json& json);

  const std::string id_;
  const int64_t created_;
  struct Progress {
    bool begun = false;
    TextPosition position;  // behind what was sent
    CallMarks marks;
    std::unique_ptr<ReplyParser> parser = {};  // of a chat that may call or think
  };
  void SendPieces(size_t index, const std::vector<ReplyPiece>& pieces, Json choice);
  std::vector<Progress> progress_;
  std::vector<EndedAnswer> answers_;
  size_t open_ = 0;  // answers that have not ended
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_GENERATION_H_
