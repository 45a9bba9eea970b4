#include "server/generation.h"

#include <fmt/format.h>

#include <chrono>
#include <new>
#include <utility>

#include "base/errors.h"

namespace phsa::server {
namespace {

int64_t UnixTime() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string ReasonOf(StopReason reason, bool calls) {
  const std::string own = FinishReason(reason);
  return calls && own == "stop" ? "tool_calls" : own;
}

Json MessageJson(const Reply& reply) {
  Json message = {{"role", "assistant"}, {"content", reply.content}, {"refusal", nullptr}};
  if (!reply.reasoning.empty()) message["reasoning_content"] = reply.reasoning;
  if (reply.calls.empty()) return message;
  if (reply.content.empty()) message["content"] = nullptr;
  for (const ToolCall& call : reply.calls) {
    message["tool_calls"].push_back(
        {{"id", call.id}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  }
  return message;
}

}  // namespace

HttpError FromException(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const HttpError& http) {
    return http;
  } catch (const Error& own) {
    const bool input = own.status() == PHSA_INVALID_ARGUMENT || own.status() == PHSA_UNSUPPORTED;
    return HttpError(input ? 400 : own.status() == PHSA_OUT_OF_MEMORY ? 503 : 500, own.what());
  } catch (const std::bad_alloc&) {
    return HttpError(503, "the server is out of memory; try again, with a shorter text");
  } catch (const std::exception& other) {
    return HttpError(500, other.what());
  }
}

Generation::Generation(std::shared_ptr<const ServedModel> model, GenerationRequest request,
                       std::shared_ptr<Exchange> exchange, std::shared_ptr<std::atomic<bool>> cancelled)
    : EngineReply(std::move(model), std::move(request), std::move(exchange), std::move(cancelled)),
      id_(NewId(request_.chat ? "chatcmpl-" : "cmpl-")),
      created_(UnixTime()) {
  open_ = request_.prompts.size() * static_cast<size_t>(request_.n);
  const Tokenizer& tokenizer = model_.engine.tokenizer();
  const bool parsed = request_.chat && (request_.tools.active() || request_.thinks);
  for (size_t i = 0; i < open_; ++i) {
    Progress& progress = progress_.emplace_back(Progress{false, TextPosition(tokenizer), CallMarks(tokenizer)});
    if (!parsed) continue;
    progress.parser = std::make_unique<ReplyParser>(request_.tools, request_.thinks, request_.thinking);
  }
  answers_.resize(open_);
}

std::vector<Task> Generation::Tasks(const std::shared_ptr<const TextAttention>& attention) const {
  std::vector<Task> tasks;
  for (size_t i = 0; i < answers_.size(); ++i) {
    Task& task = tasks.emplace_back();
    task.index = i;
    task.prompt = request_.prompts[i / static_cast<size_t>(request_.n)].tokens;
    task.options = request_.options;
    // Resolved for each answer: without a seed each has another one, with one they differ in a way that can be
    // repeated.
    SamplingChoice sampling = request_.sampling;
    if (sampling.seed) *sampling.seed += i % static_cast<size_t>(request_.n);
    task.options.sampler = ResolveSampling(sampling, model_.engine.config());
    task.attention = attention;
    task.stream = request_.stream;
    task.tells_prefill = request_.stream && request_.progress;
    task.sources = request_.prompts[i / static_cast<size_t>(request_.n)].sources;
  }
  return tasks;
}

Json Generation::Frame(const char* kind) const {
  return {{"id", id_}, {"object", kind}, {"created", created_}, {"model", model_.id}};
}

Json Generation::Choice(size_t index) const {
  return {{"index", index}, {"logprobs", nullptr}, {"finish_reason", nullptr}};
}

void Generation::Begin() {
  if (!request_.stream) return;
  exchange_->BeginStream();
  if (!request_.chat) return;
  for (size_t i = 0; i < answers_.size(); ++i) {
    Json choice = Choice(i);
    choice["delta"] = {{"role", "assistant"}, {"content", ""}};
    Send(std::move(choice), false);
  }
}

void Generation::SendEvent(const Json& json) { exchange_->Write("data: " + JsonBody(json) + "\n\n"); }

void Generation::Send(Json choice, bool last) {
  Json chunk = Frame(request_.chat ? "chat.completion.chunk" : "text_completion");
  chunk["choices"] = Json::array({std::move(choice)});
  if (request_.include_usage) chunk["usage"] = nullptr;
  if (last && !request_.include_usage) chunk["phsa"] = MeasurementsJson(request_, answers_, model_.engine.tokenizer());
  SendEvent(chunk);
  if (!last || !request_.include_usage) return;
  chunk["choices"] = Json::array();
  chunk["usage"] = UsageJson(request_, answers_);
  chunk["phsa"] = MeasurementsJson(request_, answers_, model_.engine.tokenizer());
  SendEvent(chunk);
}

// The first of them goes with what else is known of the part.
void Generation::SendPieces(size_t index, const std::vector<ReplyPiece>& pieces, Json choice) {
  int32_t call = progress_[index].parser->calls() - 1;
  for (const ReplyPiece& piece : pieces) call -= piece.kind == ReplyPiece::Kind::kCall ? 1 : 0;
  const bool more = !choice["logprobs"].is_null() || choice.contains("token_ids");
  if (pieces.empty() && more) {
    choice["delta"] = {{"content", ""}};
    Send(std::move(choice), false);
    return;
  }
  for (const ReplyPiece& piece : pieces) {
    switch (piece.kind) {
      case ReplyPiece::Kind::kReasoning: choice["delta"] = {{"reasoning_content", piece.text}}; break;
      case ReplyPiece::Kind::kContent: choice["delta"] = {{"content", piece.text}}; break;
      case ReplyPiece::Kind::kCall:
        choice["delta"] = {{"tool_calls", Json::array({{{"index", ++call},
                                                        {"id", piece.call_id},
                                                        {"type", "function"},
                                                        {"function", {{"name", piece.text}, {"arguments", ""}}}}})}};
        break;
      case ReplyPiece::Kind::kArguments:
        choice["delta"] = {{"tool_calls", Json::array({{{"index", call}, {"function", {{"arguments", piece.text}}}}})}};
        break;
    }
    Json sent = std::move(choice);
    choice = Choice(index);
    choice["phsa"] = sent["phsa"];
    Send(std::move(sent), false);
  }
}

void Generation::OnPart(size_t index, AnswerPart part) {
  exchange_->Post([self = shared_from_this(), index, part = std::move(part)] { self->TakePart(index, part); });
}

void Generation::OnPrefill(size_t index, int32_t done, int32_t total) {
  exchange_->Post([self = shared_from_this(), index, done, total] {
    if (self->failed()) return;
    Json chunk = self->Frame(self->request_.chat ? "chat.completion.chunk" : "text_completion");
    chunk["choices"] = Json::array();
    if (self->request_.include_usage) chunk["usage"] = nullptr;
    chunk["phsa"] = {{"prefill", {{"choice", index}, {"done", done}, {"total", total}}}};
    self->SendEvent(chunk);
  });
}

void Generation::OnSources(size_t index, AnswerSources sources) {
  exchange_->Post([self = shared_from_this(), index, sources = std::move(sources)]() mutable {
    self->answers_[index].sources = std::move(sources);
  });
}

void Generation::OnEnd(size_t index, GenerateResult result, const AnswerTimes& times) {
  exchange_->Post([self = shared_from_this(), index, result = std::move(result), times]() mutable {
    self->TakeEnd(index, std::move(result), times);
  });
}

void Generation::OnFailure(std::exception_ptr error) {
  exchange_->Post([self = shared_from_this(), error = std::move(error)] { self->TakeFailure(error); });
}

void Generation::TakePart(size_t index, const AnswerPart& part) {
  if (failed()) return;
  const Tokenizer& tokenizer = model_.engine.tokenizer();
  Progress& progress = progress_[index];
  Json choice = Choice(index);
  std::string text = part.text;
  const Prompt& prompt = request_.prompts[index / static_cast<size_t>(request_.n)];
  const bool echo = request_.echo && !progress.begun;
  if (echo) text = prompt.text + text;
  if (request_.options.log_probabilities) {
    const ScoredText answer{part.tokens, part.log_probabilities};
    if (request_.chat) {
      choice["logprobs"] = ChatLogProbabilities(tokenizer, answer);
    } else {
      std::vector<ScoredText> texts;
      if (echo) texts.push_back({prompt.tokens, part.prompt_log_probabilities, true});
      texts.push_back(answer);
      choice["logprobs"] = CompletionLogProbabilities(tokenizer, texts, progress.position);
    }
  }
  if (request_.return_token_ids) {
    choice["token_ids"] = part.tokens;
    if (!progress.begun) choice["prompt_token_ids"] = prompt.tokens;
  }
  progress.begun = true;
  choice["phsa"] = {{"read_share", Rounded(part.tokens_read.share())}};
  if (progress.parser) {
    SendPieces(index, progress.parser->Feed(progress.marks.Restore(part.tokens, text)), std::move(choice));
    return;
  }
  if (request_.chat) {
    choice["delta"] = {{"content", text}};
  } else {
    choice["text"] = text;
  }
  Send(std::move(choice), false);
}

void Generation::TakeEnd(size_t index, GenerateResult result, const AnswerTimes& times) {
  if (failed()) return;
  if (result.reason == StopReason::kInterrupted) {
    // Either the client has gone and nobody reads this, or the server stops.
    TakeFailure(std::make_exception_ptr(HttpError(503, StatusText(503))));
    return;
  }
  // An answer without tokens has no parts, and its prompt may still be to echo.
  if (request_.stream && !progress_[index].begun && (request_.echo || request_.return_token_ids)) {
    TakePart(index, {"", {}, {}, result.prompt_log_probabilities, result.tokens_read});
  }
  const StopReason reason = result.reason;
  answers_[index].result = std::move(result);
  answers_[index].times = times;
  --open_;
  if (request_.stream) {
    ReplyParser* const parser = progress_[index].parser.get();
    if (parser != nullptr) {
      Json rest = Choice(index);
      rest["phsa"] = {{"read_share", Rounded(answers_[index].result.tokens_read.share())}};
      SendPieces(index, parser->Finish(), std::move(rest));
    }
    Json choice = Choice(index);
    choice["finish_reason"] = ReasonOf(reason, parser != nullptr && parser->calls() > 0);
    if (request_.chat) {
      choice["delta"] = Json::object();
    } else {
      choice["text"] = "";
    }
    Send(std::move(choice), open_ == 0);
    if (open_ > 0) return;
    exchange_->Write("data: [DONE]\n\n");
    exchange_->EndStream();
    return;
  }
  if (open_ > 0) return;

  const Tokenizer& tokenizer = model_.engine.tokenizer();
  Json choices = Json::array();
  for (size_t i = 0; i < answers_.size(); ++i) {
    const GenerateResult& answer = answers_[i].result;
    const Prompt& prompt = request_.prompts[i / static_cast<size_t>(request_.n)];
    Json choice = Choice(i);
    const Reply reply = WholeReply(request_, answer, tokenizer);
    choice["finish_reason"] = ReasonOf(answer.reason, !reply.calls.empty());
    const ScoredText scored{answer.tokens, answer.log_probabilities};
    if (request_.chat) {
      choice["message"] = MessageJson(reply);
      if (request_.options.log_probabilities) choice["logprobs"] = ChatLogProbabilities(tokenizer, scored);
    } else {
      choice["text"] = (request_.echo ? prompt.text : "") + answer.text;
      if (request_.options.log_probabilities) {
        std::vector<ScoredText> texts;
        if (request_.echo) texts.push_back({prompt.tokens, answer.prompt_log_probabilities, true});
        texts.push_back(scored);
        choice["logprobs"] = CompletionLogProbabilities(tokenizer, texts, progress_[i].position);
      }
    }
    if (request_.return_token_ids) {
      choice["token_ids"] = answer.tokens;
      choice["prompt_token_ids"] = prompt.tokens;
    }
    choices.push_back(std::move(choice));
  }
  Json body = Frame(request_.chat ? "chat.completion" : "text_completion");
  body["choices"] = std::move(choices);
  body["usage"] = UsageJson(request_, answers_);
  body["phsa"] = MeasurementsJson(request_, answers_, model_.engine.tokenizer());
  HttpResponse response;
  response.body = JsonBody(body);
  exchange_->Answer(std::move(response));
}

void Generation::TakeFailure(const std::exception_ptr& error) {
  if (!Fail()) return;
  const HttpError http = FromException(error);
  if (!request_.stream) {
    exchange_->Answer(ErrorResponse(http));
    return;
  }
  SendEvent(ErrorJson(http));
  exchange_->EndStream();
}

}  // namespace phsa::server
