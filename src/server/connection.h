// One client's connection: requests one after the other, each with its deadlines.
#ifndef PHSA_SERVER_CONNECTION_H_
#define PHSA_SERVER_CONNECTION_H_

#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "server/access_log.h"
#include "server/client_stream.h"
#include "server/http_parser.h"
#include "server/server.h"

namespace phsa::server {

namespace asio = boost::asio;

class Connection : public Exchange, public std::enable_shared_from_this<Connection> {
 public:
  struct Context {
    const ServerOptions& options;
    Service& service;
    Metrics& metrics;
    AccessLog& log;
    std::function<bool()> draining;
    std::function<void(Connection*)> closed;
    std::shared_ptr<asio::ssl::context> tls = nullptr;  // none: plain HTTP
  };

  // The socket's executor is a strand: everything below runs in it.
  Connection(asio::ip::tcp::socket socket, const Context& context);
  ~Connection() override;

  void Start();
  void CloseIfIdle();  // from any thread
  void Close();        // from any thread

  void Post(std::function<void()> work) override;
  void Answer(HttpResponse response) override;
  void BeginStream() override;
  void Write(std::string text) override;
  void EndStream() override;

 private:
  enum class State : uint8_t { kHandshake, kIdle, kHeader, kBody, kWork, kWriting, kStreaming, kLingering, kClosed };

  void AwaitHandshake();
  void Handshake();
  void OnHandshake(const beast::error_code& error);
  void ReadNext();
  void ReadHeader();
  void OnHeader(const beast::error_code& error);
  void ReadBody();
  void OnBody(const beast::error_code& error);
  void OnReadFailed(const beast::error_code& error);
  void RefuseAndClose(const HttpError& error);
  void ReadAhead();
  void OnReadAhead(const beast::error_code& error);
  void ClientGone(const char* how);
  void FlushStream();
  void Finished(bool keep_alive);
  void End();
  void Linger();
  void Log(const std::string& note);
  void SetDeadline(std::chrono::milliseconds timeout, const char* what);
  void Shut();
  template <class Message>
  void SetHeaders(Message& message) const;

  ClientStream stream_;
  const Context context_;
  asio::steady_timer timer_, watch_timer_;
  beast::flat_buffer buffer_;
  std::string peer_;
  State state_ = State::kIdle;
  const char* timed_out_ = nullptr;  // what did not come in time

  std::optional<http::request_parser<http::string_body>> parser_;
  HttpRequest request_;
  bool served_ = false;       // it had a request
  bool unread_body_ = false;  // of a request that was refused
  bool keep_alive_ = false, reading_ahead_ = false;
  uint32_t generation_ = 0;  // of the request: a deadline or watch of an older one means nothing
  std::chrono::steady_clock::time_point begun_;
  std::function<void()> cancel_;
  int status_ = 0;
  uint64_t bytes_ = 0;

  std::optional<http::response<http::string_body>> response_;
  std::optional<http::response_serializer<http::string_body>> serializer_;
  std::optional<http::response<http::empty_body>> stream_head_;
  std::optional<http::response_serializer<http::empty_body>> stream_serializer_;
  std::string pending_, writing_;  // of the stream
  bool stream_writing_ = false, stream_ended_ = false, chunked_ = true;
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_CONNECTION_H_
