#include "server/answers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "attention/policies.h"
#include "base/utf8.h"
#include "server/answer_sources.h"

namespace phsa::server {
namespace {

int64_t Characters(std::string_view text) {
  int64_t count = 0;
  for (size_t at = 0; at < text.size(); at += ScanUtf8(text, at).size) ++count;
  return count;
}

Json Bytes(std::string_view text) {
  Json list = Json::array();
  for (const char c : text) list.push_back(static_cast<uint8_t>(c));
  return list;
}

}  // namespace

double Rounded(double value) { return std::round(value * 1e6) / 1e6; }

std::string JsonBody(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

const char* StatusText(int status) {
  switch (status) {
    case 400: return "the request is not valid HTTP";
    case 401: return "the API key is missing or wrong; send it as Authorization: Bearer KEY";
    case 404: return "there is nothing at this path; docs/server.md lists what there is";
    case 405: return "this path does not take this method; the header Allow says which it takes";
    case 408: return "the request did not come in time";
    case 413: return "the request's body is larger than the server takes";
    case 415: return "the body must be JSON; send Content-Type: application/json";
    case 431: return "the request's header is larger than the server takes";
    case 503: return "the server is about to stop, or has no room";
    default: return "something went wrong in the server";
  }
}

Json ErrorJson(const HttpError& error) {
  const char* const type = error.status() == 401   ? "authentication_error"
                           : error.status() == 429 ? "rate_limit_error"
                           : error.status() < 500  ? "invalid_request_error"
                                                   : "server_error";
  const auto or_null = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
  return {{"error",
           {{"message", error.what()},
            {"type", type},
            {"param", or_null(error.param())},
            {"code", or_null(error.code())}}}};
}

HttpResponse ErrorResponse(const HttpError& error, std::string_view target) {
  return target.starts_with("/v1/messages") ? MessagesError(error) : ErrorResponse(error);
}

HttpResponse MessagesError(const HttpError& error) {
  const int status = error.status();
  const char* const type = status == 401   ? "authentication_error"
                           : status == 403 ? "permission_error"
                           : status == 404 ? "not_found_error"
                           : status == 413 ? "request_too_large"
                           : status == 429 ? "rate_limit_error"
                           : status == 503 ? "overloaded_error"
                           : status < 500  ? "invalid_request_error"
                                           : "api_error";
  HttpResponse response;
  response.status = status;
  response.headers = error.headers;
  response.body = JsonBody({{"type", "error"}, {"error", {{"type", type}, {"message", error.what()}}}});
  return response;
}

HttpResponse ErrorResponse(const HttpError& error) {
  HttpResponse response;
  response.status = error.status();
  response.body = JsonBody(ErrorJson(error));
  response.headers = error.headers;
  return response;
}

std::string TokenText(const Tokenizer& tokenizer, int32_t token) {
  const std::string_view bytes = tokenizer.TokenBytes(token);
  if (IsUtf8(bytes)) return std::string(bytes);
  std::string text = "bytes:";
  for (const char c : bytes) text += fmt::format("\\x{:02x}", static_cast<uint8_t>(c));
  return text;
}

int64_t TextPosition::Next(int32_t token, bool shows_control_tokens) {
  const int64_t begin = characters_;
  const bool named = shows_control_tokens && tokenizer_->IsSpecial(token);
  characters_ += Characters(named ? std::string(tokenizer_->TokenBytes(token)) : decoder_.Next(token));
  return begin;
}

Json CompletionLogProbabilities(const Tokenizer& tokenizer, std::span<const ScoredText> texts, TextPosition& position) {
  Json tokens = Json::array(), values = Json::array(), tops = Json::array(), offsets = Json::array();
  for (const ScoredText& text : texts) {
    const size_t unknown = text.tokens.size() - text.log_probabilities.size();
    for (size_t i = 0; i < text.tokens.size(); ++i) {
      const std::string name = TokenText(tokenizer, text.tokens[i]);
      tokens.push_back(name);
      offsets.push_back(position.Next(text.tokens[i], text.echoed));
      if (i < unknown) {
        values.push_back(nullptr);
        tops.push_back(nullptr);
        continue;
      }
      const TokenLogProbability& known = text.log_probabilities[i - unknown];
      values.push_back(known.value);
      Json top = Json::object();
      // The first of two tokens with the same text is the likelier one; it stays.
      for (const auto& [id, value] : known.top) top.emplace(TokenText(tokenizer, id), value);
      top.emplace(name, known.value);
      tops.push_back(std::move(top));
    }
  }
  return {{"tokens", std::move(tokens)},
          {"token_logprobs", std::move(values)},
          {"top_logprobs", std::move(tops)},
          {"text_offset", std::move(offsets)}};
}

Json ChatLogProbabilities(const Tokenizer& tokenizer, const ScoredText& text) {
  const auto one = [&](int32_t token, float value) -> Json {
    return {{"token", TokenText(tokenizer, token)}, {"logprob", value}, {"bytes", Bytes(tokenizer.TokenBytes(token))}};
  };
  Json content = Json::array();
  for (size_t i = 0; i < text.tokens.size(); ++i) {
    Json entry = one(text.tokens[i], text.log_probabilities[i].value);
    Json& top = entry["top_logprobs"] = Json::array();
    for (const auto& [id, value] : text.log_probabilities[i].top) top.push_back(one(id, value));
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

Json UsageJson(const GenerationRequest& request, std::span<const EndedAnswer> answers) {
  size_t prompt = 0, completion = 0;
  int64_t cached = 0;
  for (const Prompt& one : request.prompts) prompt += one.tokens.size();
  for (size_t i = 0; i < answers.size(); ++i) {
    completion += answers[i].result.tokens.size();
    if (i % static_cast<size_t>(request.n) == 0) cached += answers[i].result.reused_tokens;
  }
  return {{"prompt_tokens", prompt},
          {"completion_tokens", completion},
          {"total_tokens", prompt + completion},
          {"prompt_tokens_details", {{"cached_tokens", cached}}}};
}

Reply WholeReply(const GenerationRequest& request, const GenerateResult& result, const Tokenizer& tokenizer) {
  if (!request.chat || (!request.tools.active() && !request.thinks)) return {{}, result.text, {}};
  Reply reply;
  CallMarks marks(tokenizer);
  ReplyParser parser(request.tools, request.thinks, request.thinking);
  Append(parser.Feed(marks.Restore(result.tokens, result.text)), &reply);
  Append(parser.Finish(), &reply);
  return reply;
}

namespace {

// What was found of all answers, and what went wrong.
void AddSources(const GenerationRequest& request, std::span<const EndedAnswer> answers, const Tokenizer& tokenizer,
                Json* json) {
  if (!request.sources) return;
  Json list = Json::array();
  double seconds = 0;
  std::string error;
  for (size_t i = 0; i < answers.size(); ++i) {
    const EndedAnswer& answer = answers[i];
    if (!answer.sources) continue;
    seconds = std::max(seconds, answer.sources->seconds);
    if (!answer.sources->error.empty()) error = answer.sources->error;
    const Prompt& prompt = request.prompts[i / static_cast<size_t>(request.n)];
    const std::string content = WholeReply(request, answer.result, tokenizer).content;
    for (Json& source : SourcesJson(prompt, *answer.sources, i, answer.result, content, tokenizer)) {
      list.push_back(std::move(source));
    }
  }
  (*json)["sources"] = std::move(list);
  (*json)["sources_s"] = Rounded(seconds);
  if (!error.empty()) (*json)["sources_error"] = error;
}

}  // namespace

Json MeasurementsJson(const GenerationRequest& request, std::span<const EndedAnswer> answers,
                      const Tokenizer& tokenizer) {
  // Several answers are written side by side: their tokens together, in the time of the longest.
  int64_t prompt = 0, written = 0, cached = 0;
  double prefill = 0, decode = 0, end = 0, first = answers.front().times.first_token;
  double queued = answers.front().times.queued;
  TokensRead read;
  for (const auto& [result, times, sources] : answers) {
    prompt += result.prompt_tokens - result.reused_tokens;
    cached += result.reused_tokens;
    if (!result.tokens.empty()) written += static_cast<int64_t>(result.tokens.size()) - 1;
    prefill = std::max(prefill, result.prefill_seconds);
    decode = std::max(decode, result.decode_seconds);
    end = std::max(end, times.end);
    first = std::min(first, times.first_token);
    queued = std::min(queued, times.queued);
    read += result.tokens_read;
  }
  const Settings& settings = request.attention.base;
  const bool sparse = !IsDense(settings);
  const double speed = prefill > 0 ? Rounded(static_cast<double>(prompt) / prefill) : 0;
  Json json = {{"attention", Name(settings.policy)},
               {"top_k", Chooses(settings.policy) ? Json(settings.top_k) : Json()},
               {"lambda", Weighs(settings.policy) ? Json(Rounded(settings.lambda)) : Json()},
               {"init", sparse ? Json(settings.init_tokens) : Json()},
               {"local", sparse ? Json(settings.local_tokens) : Json()},
               {"parts", Chooses(settings.policy) ? Json(settings.parts) : Json()},
               {"queue_s", Rounded(queued)},
               {"time_to_first_token_s", Rounded(first)},
               {"total_s", Rounded(end)},
               {"prefill_tokens_per_s", speed},
               {"prompt_tokens_per_s", speed},  // its first name, for one version
               {"decode_tokens_per_s", decode > 0 ? Rounded(static_cast<double>(written) / decode) : 0},
               {"cached_prompt_tokens", cached},
               {"read_share", Rounded(read.share())}};
  AddSources(request, answers, tokenizer, &json);
  return json;
}

}  // namespace phsa::server
