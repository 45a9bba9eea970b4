// Sockets: connections, timeouts, signals. One port, a few threads.
#ifndef PHSA_SERVER_SERVER_H_
#define PHSA_SERVER_SERVER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "server/access_log.h"
#include "server/metrics.h"
#include "server/model_pool.h"
#include "server/service.h"
#include "server/tls.h"

namespace phsa::server {

struct ServerOptions {
  std::string host = "127.0.0.1";  // an address
  uint16_t port = 8080;            // 0: any that is free
  int32_t threads = 2;
  int32_t max_connections = 4096;
  uint32_t max_header_bytes = 16 << 10;
  uint64_t max_body_bytes = 4 << 20;
  // Until a handshake is done and until a header is there, until its body is; between requests; until a client takes
  // what it is sent.
  std::chrono::milliseconds header_timeout{10'000}, body_timeout{30'000}, idle_timeout{75'000}, write_timeout{30'000};
  std::chrono::milliseconds grace{10'000};  // for answers that are in work when the server is to stop
  std::shared_ptr<TlsFiles> tls;            // none: plain HTTP
};

class Server {
 public:
  // Binds: throws phsa::Error naming the address where that fails.
  Server(const ServerOptions& options, Service& service, ModelPool& models, Metrics& metrics, AccessLog& log);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  uint16_t port() const;
  // Serves until SIGTERM or SIGINT. Answers in work are finished within the grace period, new ones refused. A second
  // signal ends at once. With TLS, SIGHUP reads the certificate again.
  void Run();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Whether only this machine can reach the address.
bool IsLoopback(const std::string& host);

}  // namespace phsa::server

#endif  // PHSA_SERVER_SERVER_H_
