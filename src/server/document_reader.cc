#include "server/document_reader.h"

#include <utility>

#include "base/utf8.h"
#include "documents/document.h"
#include "server/answers.h"
#include "server/generation.h"

namespace phsa::server {
namespace {

// Each may have 64 MiB; who sends more at once can wait.
constexpr size_t kMostPending = 8;

// Where each place begins, in characters and in JavaScript's units.
Json PlacesJson(const Document& document) {
  Json places = Json::array();
  size_t byte = 0, characters = 0, units = 0;
  for (const Document::Mark& mark : document.marks) {
    while (byte < mark.begin) {
      const Utf8Step step = ScanUtf8(document.text, byte);
      byte += step.size;
      ++characters;
      units += step.kind == Utf8Step::Kind::kCharacter && step.code > 0xffff ? 2 : 1;
    }
    places.push_back({{"number", mark.number}, {"start", characters}, {"start_utf16", units}});
  }
  return places;
}

}  // namespace

DocumentReader::DocumentReader() : thread_([this] { Run(); }) {}

bool DocumentReader::Submit(std::string name, std::string bytes, std::shared_ptr<Exchange> exchange,
                            Cancelled cancelled) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_ || pending_.size() >= kMostPending) return false;
    pending_.push_back({std::move(name), std::move(bytes), std::move(exchange), std::move(cancelled)});
  }
  wake_.notify_one();
  return true;
}

void DocumentReader::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void DocumentReader::Run() {
  for (;;) {
    Pending pending;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || !pending_.empty(); });
      if (pending_.empty()) return;
      pending = std::move(pending_.front());
      pending_.pop_front();
    }
    if (*pending.cancelled) continue;
    HttpResponse response = Read(pending);
    const std::shared_ptr<Exchange> exchange = std::move(pending.exchange);
    exchange->Post([exchange, response = std::move(response)]() mutable { exchange->Answer(std::move(response)); });
  }
}

HttpResponse DocumentReader::Read(Pending& pending) const {
  try {
    const auto poll = [&] {
      if (stopping_ || *pending.cancelled) throw HttpError(503, StatusText(503));
    };
    poll();
    const Document document = ReadDocument(std::move(pending.name), pending.bytes, poll);
    HttpResponse response;
    response.body = JsonBody({{"name", document.name},
                              {"text", document.text},
                              {"unit", Name(document.unit)},
                              {"places", PlacesJson(document)}});
    return response;
  } catch (...) {
    return ErrorResponse(FromException(std::current_exception()));
  }
}

}  // namespace phsa::server
