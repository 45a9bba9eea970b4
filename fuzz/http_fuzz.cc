// Any bytes from a client: the parser refuses them or gives a request, and the handlers' bodies are refused with
// status 400 or give what is within the limits. The first byte says whose body it is.
#include "../tests/fake_engine.h"
#include "server/answers.h"
#include "server/api.h"
#include "server/http_parser.h"
#include "server/messages_api.h"
#include "server/responses_api.h"

namespace {

using phsa::server::HttpError;

const phsa::server::ServedModel& Model() {
  static const std::unique_ptr<phsa::Engine> engine = [] {
    phsa::EngineOptions options = phsa::FakeOptions(512);
    options.other_attention = true;
    return phsa::LoadedEngine(options);
  }();
  static const phsa::server::ServedModel model{*engine, "fake", phsa::ChatTemplate::ByName("chatml"), {}, 64};
  return model;
}

void CheckGeneration(const phsa::server::GenerationRequest& request) {
  const size_t answers = request.prompts.size() * static_cast<size_t>(request.n);
  if (answers < 1 || answers > phsa::server::kMaxAnswers) std::abort();
  for (const auto& prompt : request.prompts) {
    if (prompt.tokens.empty() || prompt.tokens.size() >= 512) std::abort();
    Model().engine.CheckTokens(prompt.tokens, "the prompt");
  }
}

void ReadBody(size_t which, std::string_view body) {
  using namespace phsa::server;
  switch (which % 10) {
    case 0: CheckGeneration(ParseCompletion(body, Model())); break;
    case 1: CheckGeneration(ParseChat(body, Model())); break;
    case 2: {
      const InspectRequest request = ParseInspect(body, Model());
      if (request.last < 1 || static_cast<size_t>(request.last) > request.tokens.size()) std::abort();
      break;
    }
    case 3: (void)ParseTokenize(body, Model()); break;
    case 4: (void)ParseDetokenize(body, Model()); break;
    case 5: (void)ParseApplyTemplate(body, Model()); break;
    case 6: CheckGeneration(ParseResponses(body, Model()).generation); break;
    case 7: CheckGeneration(ParseMessages(body, Model())); break;
    case 8: (void)CountMessages(body, Model()); break;
    case 9: {
      const EmbeddingsRequest request = ParseEmbeddings(body, Model());
      if (request.prompts.empty() || request.prompts.size() > kMaxEmbeddings || request.dimensions < 1) std::abort();
      break;
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace http = boost::beast::http;
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    // As it is: a body.
    ReadBody(data[0], input);
  } catch (const HttpError& error) {
    if (error.status() != 400 || phsa::server::ErrorResponse(error).body.empty()) std::abort();
  }
  // As bytes from a socket.
  http::request_parser<http::string_body> parser;
  parser.header_limit(4096);
  parser.body_limit(65536);
  parser.eager(true);
  boost::beast::error_code error;
  parser.put(boost::asio::buffer(input.data(), input.size()), error);
  if (error) {
    const int status = phsa::server::ParserStatus(error);
    if (error != http::error::need_more && status != 400 && status != 413 && status != 431) std::abort();
    return 0;
  }
  if (!parser.is_done()) return 0;
  (void)phsa::server::RequestHead(parser.get().base());
  try {
    ReadBody(data[0], parser.get().body());
  } catch (const HttpError& refused) {
    if (refused.status() != 400) std::abort();
  }
  return 0;
}
