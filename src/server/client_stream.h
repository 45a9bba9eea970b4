// What is read from a client and written to it: a socket, plain or with TLS over it.
#ifndef PHSA_SERVER_CLIENT_STREAM_H_
#define PHSA_SERVER_CLIENT_STREAM_H_

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <optional>
#include <utility>

namespace phsa::server {

// As Asio's streams are, with handlers only. Not to be moved: TLS refers to the socket.
class ClientStream {
 public:
  using Socket = boost::asio::ip::tcp::socket;
  using executor_type = Socket::executor_type;

  explicit ClientStream(Socket socket) : socket_(std::move(socket)) {}

  executor_type get_executor() { return socket_.get_executor(); }
  Socket& socket() { return socket_; }

  // Before anything is read or written. Without: plain.
  void UseTls(boost::asio::ssl::context& context) { tls_.emplace(socket_, context); }
  bool has_tls() const { return tls_.has_value(); }
  template <class Handler>
  void async_handshake(Handler&& handler) {
    tls_->async_handshake(boost::asio::ssl::stream_base::server, std::forward<Handler>(handler));
  }
  // Says that nothing more comes, and waits until the client has said so, too.
  template <class Handler>
  void async_shutdown(Handler&& handler) {
    tls_->async_shutdown(std::forward<Handler>(handler));
  }

  template <class Buffers, class Handler>
  void async_read_some(const Buffers& buffers, Handler&& handler) {
    if (tls_) {
      tls_->async_read_some(buffers, std::forward<Handler>(handler));
    } else {
      socket_.async_read_some(buffers, std::forward<Handler>(handler));
    }
  }
  template <class Buffers, class Handler>
  void async_write_some(const Buffers& buffers, Handler&& handler) {
    if (tls_) {
      tls_->async_write_some(buffers, std::forward<Handler>(handler));
    } else {
      socket_.async_write_some(buffers, std::forward<Handler>(handler));
    }
  }

 private:
  Socket socket_;
  std::optional<boost::asio::ssl::stream<Socket&>> tls_;
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_CLIENT_STREAM_H_
