// Anthropic's API of messages, on the same engine.
#ifndef PHSA_SERVER_MESSAGES_API_H_
#define PHSA_SERVER_MESSAGES_API_H_

#include <atomic>
#include <memory>
#include <string_view>
#include <vector>

#include "server/single_reply.h"

namespace phsa::server {

// Throw HttpError. `body`: the text of a JSON object.
GenerationRequest ParseMessages(std::string_view body, const ServedModel& model);
size_t CountMessages(std::string_view body, const ServedModel& model);  // the prompt's tokens

std::shared_ptr<SingleReply> MakeMessagesReply(std::shared_ptr<const ServedModel> model, GenerationRequest request,
                                               std::shared_ptr<Exchange> exchange,
                                               std::shared_ptr<std::atomic<bool>> cancelled);

}  // namespace phsa::server

#endif  // PHSA_SERVER_MESSAGES_API_H_
