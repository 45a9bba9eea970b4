// /v1/embeddings: texts as directions, the mean of the hidden states that a model gives their tokens.
#ifndef PHSA_SERVER_EMBEDDINGS_API_H_
#define PHSA_SERVER_EMBEDDINGS_API_H_

#include <atomic>
#include <exception>
#include <memory>
#include <string_view>
#include <vector>

#include "server/api.h"
#include "server/engine_reply.h"
#include "server/http_types.h"
#include "server/worker.h"

namespace phsa::server {

class EmbeddingsReply : public EngineReply<EmbeddingsRequest>, public std::enable_shared_from_this<EmbeddingsReply> {
 public:
  EmbeddingsReply(std::shared_ptr<const ServedModel> model, EmbeddingsRequest request,
                  std::shared_ptr<Exchange> exchange, std::shared_ptr<std::atomic<bool>> cancelled);

  std::vector<Task> Tasks(const std::shared_ptr<const TextAttention>& attention) const;
  void Begin() {}

  void OnPart(size_t, AnswerPart) override {}
  void OnEnd(size_t index, GenerateResult result, const AnswerTimes& times) override;
  void OnFailure(std::exception_ptr error) override;

 private:
  // In the request's own thread.
  void TakeEnd(size_t index, GenerateResult result);
  void TakeFailure(const std::exception_ptr& error);

  std::vector<GenerateResult> results_;
  size_t open_;
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_EMBEDDINGS_API_H_
