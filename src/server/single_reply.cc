#include "server/single_reply.h"

#include <chrono>
#include <utility>

#include "server/answers.h"
#include "server/generation.h"

namespace phsa::server {

SingleReply::SingleReply(std::shared_ptr<const ServedModel> model, GenerationRequest request,
                         std::shared_ptr<Exchange> exchange, std::shared_ptr<std::atomic<bool>> cancelled)
    : EngineReply(std::move(model), std::move(request), std::move(exchange), std::move(cancelled)),
      created_(std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
                   .count()),
      marks_(model_.engine.tokenizer()),
      parser_(request_.tools, request_.thinks, request_.thinking) {}

std::vector<Task> SingleReply::Tasks(const std::shared_ptr<const TextAttention>& attention) const {
  Task task;
  task.prompt = request_.prompts.front().tokens;
  task.options = request_.options;
  task.options.sampler = ResolveSampling(request_.sampling, model_.engine.config());
  task.attention = attention;
  task.stream = request_.stream;
  task.sources = request_.prompts.front().sources;
  std::vector<Task> tasks;
  tasks.push_back(std::move(task));
  return tasks;
}

void SingleReply::Begin() {
  if (!request_.stream) return;
  exchange_->BeginStream();
  BeginStream();
}

void SingleReply::SendEvent(const char* name, const Json& data) {
  exchange_->Write(std::string("event: ") + name + "\ndata: " + JsonBody(data) + "\n\n");
}

void SingleReply::OnPart(size_t, AnswerPart part) {
  exchange_->Post([self = shared_from_this(), part = std::move(part)] {
    if (!self->failed()) self->Pieces(self->parser_.Feed(self->marks_.Restore(part.tokens, part.text)));
  });
}

void SingleReply::OnSources(size_t, AnswerSources sources) {
  exchange_->Post(
      [self = shared_from_this(), sources = std::move(sources)]() mutable { self->sources_ = std::move(sources); });
}

void SingleReply::OnEnd(size_t, GenerateResult result, const AnswerTimes& times) {
  exchange_->Post([self = shared_from_this(), result = std::move(result), times] { self->TakeEnd(result, times); });
}

void SingleReply::OnFailure(std::exception_ptr error) {
  exchange_->Post([self = shared_from_this(), error = std::move(error)] { self->TakeFailure(error); });
}

void SingleReply::Pieces(const std::vector<ReplyPiece>& pieces) {
  for (const ReplyPiece& piece : pieces) StreamPiece(piece);
}

void SingleReply::TakeEnd(const GenerateResult& result, const AnswerTimes& times) {
  if (failed()) return;
  if (result.reason == StopReason::kInterrupted) {
    TakeFailure(std::make_exception_ptr(HttpError(503, StatusText(503))));
    return;
  }
  const Reply reply = WholeReply(request_, result, model_.engine.tokenizer());
  const EndedAnswer ended{result, times, std::move(sources_)};
  measurements_ = MeasurementsJson(request_, {&ended, 1}, model_.engine.tokenizer());
  if (request_.stream) {
    Pieces(parser_.Finish());
    EndStream(result);
    exchange_->EndStream();
    return;
  }
  HttpResponse response;
  response.body = JsonBody(Body(reply, result));
  exchange_->Answer(std::move(response));
}

void SingleReply::TakeFailure(const std::exception_ptr& error) {
  if (!Fail()) return;
  const HttpError http = FromException(error);
  if (!request_.stream) {
    exchange_->Answer(Refusal(http));
    return;
  }
  StreamError(http);
  exchange_->EndStream();
}

}  // namespace phsa::server
