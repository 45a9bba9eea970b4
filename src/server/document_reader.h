// Documents that clients send, as text: read one after the other by a thread of their own, since a PDF takes seconds
// and the threads for HTTP have others to answer.
#ifndef PHSA_SERVER_DOCUMENT_READER_H_
#define PHSA_SERVER_DOCUMENT_READER_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "server/http_types.h"

namespace phsa::server {

// A document's file may be larger than any request in JSON.
inline constexpr uint64_t kLargestDocumentBody = uint64_t{64} << 20;

class DocumentReader {
 public:
  // Raised when nobody waits for the answer any more.
  using Cancelled = std::shared_ptr<const std::atomic<bool>>;

  DocumentReader();
  ~DocumentReader() { Stop(); }
  DocumentReader(const DocumentReader&) = delete;
  DocumentReader& operator=(const DocumentReader&) = delete;

  // False: too many wait.
  bool Submit(std::string name, std::string bytes, std::shared_ptr<Exchange> exchange, Cancelled cancelled);
  // What waits and what is being read is answered with status 503. Afterwards no exchange is held any more.
  void Stop();

 private:
  struct Pending {
    std::string name, bytes;
    std::shared_ptr<Exchange> exchange;
    Cancelled cancelled;
  };
  void Run();
  HttpResponse Read(Pending& pending) const;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Pending> pending_;
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_DOCUMENT_READER_H_
