// OpenAI's API of responses, without a store: each request brings its conversation.
#ifndef PHSA_SERVER_RESPONSES_API_H_
#define PHSA_SERVER_RESPONSES_API_H_

#include <atomic>
#include <memory>
#include <string_view>

#include "server/single_reply.h"

namespace phsa::server {

// Throws HttpError. `body`: the text of a JSON object.
struct ResponsesRequest {
  GenerationRequest generation;
  Json echo;  // the fields of the request that a response repeats
};
ResponsesRequest ParseResponses(std::string_view body, const ServedModel& model);

std::shared_ptr<SingleReply> MakeResponsesReply(std::shared_ptr<const ServedModel> model, ResponsesRequest request,
                                                std::shared_ptr<Exchange> exchange,
                                                std::shared_ptr<std::atomic<bool>> cancelled);

}  // namespace phsa::server

#endif  // PHSA_SERVER_RESPONSES_API_H_
