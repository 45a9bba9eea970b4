#include "server/embeddings_api.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "server/answers.h"
#include "server/generation.h"

namespace phsa::server {
namespace {

// The first numbers as a direction again.
std::vector<float> Shortened(std::vector<float> values, size_t dimensions) {
  if (dimensions == values.size()) return values;
  values.resize(dimensions);
  const float length = std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0f));
  for (float& value : values) value /= length > 0 ? length : 1;
  return values;
}

std::string Base64(const std::vector<float>& values) {
  static_assert(std::endian::native == std::endian::little);  // as clients read them
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes(values.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t count = std::min<size_t>(3, bytes.size() - i);
    uint32_t group = 0;
    for (size_t j = 0; j < 3; ++j) group = group << 8 | (j < count ? static_cast<uint8_t>(bytes[i + j]) : 0u);
    for (size_t j = 0; j < 4; ++j) out += j <= count ? kDigits[group >> (18 - 6 * j) & 63] : '=';
  }
  return out;
}

}  // namespace

EmbeddingsReply::EmbeddingsReply(std::shared_ptr<const ServedModel> model, EmbeddingsRequest request,
                                 std::shared_ptr<Exchange> exchange, std::shared_ptr<std::atomic<bool>> cancelled)
    : EngineReply(std::move(model), std::move(request), std::move(exchange), std::move(cancelled)),
      results_(request_.prompts.size()),
      open_(results_.size()) {}

std::vector<Task> EmbeddingsReply::Tasks(const std::shared_ptr<const TextAttention>& attention) const {
  std::vector<Task> tasks;
  for (size_t i = 0; i < request_.prompts.size(); ++i) {
    Task& task = tasks.emplace_back();
    task.index = i;
    task.prompt = request_.prompts[i].tokens;
    task.attention = attention;
    task.embed = true;
  }
  return tasks;
}

void EmbeddingsReply::OnEnd(size_t index, GenerateResult result, const AnswerTimes&) {
  exchange_->Post([self = shared_from_this(), index, result = std::move(result)]() mutable {
    self->TakeEnd(index, std::move(result));
  });
}

void EmbeddingsReply::OnFailure(std::exception_ptr error) {
  exchange_->Post([self = shared_from_this(), error = std::move(error)] { self->TakeFailure(error); });
}

void EmbeddingsReply::TakeEnd(size_t index, GenerateResult result) {
  if (failed()) return;
  if (result.reason == StopReason::kInterrupted) {
    TakeFailure(std::make_exception_ptr(HttpError(503, StatusText(503))));
    return;
  }
  results_[index] = std::move(result);
  if (--open_ > 0) return;
  Json data = Json::array();
  int64_t tokens = 0;
  for (size_t i = 0; i < results_.size(); ++i) {
    const std::vector<float> values =
        Shortened(std::move(results_[i].embedding), static_cast<size_t>(request_.dimensions));
    data.push_back(
        {{"object", "embedding"}, {"index", i}, {"embedding", request_.base64 ? Json(Base64(values)) : Json(values)}});
    tokens += results_[i].prompt_tokens;
  }
  HttpResponse response;
  response.body = JsonBody({{"object", "list"},
                            {"data", std::move(data)},
                            {"model", model_.id},
                            {"usage", {{"prompt_tokens", tokens}, {"total_tokens", tokens}}}});
  exchange_->Answer(std::move(response));
}

void EmbeddingsReply::TakeFailure(const std::exception_ptr& error) {
  if (!Fail()) return;
  exchange_->Answer(ErrorResponse(FromException(error)));
}

}  // namespace phsa::server
