#include "server/server.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/strand.hpp>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "base/errors.h"
#include "server/connection.h"

namespace phsa::server {
namespace {

using boost::asio::ip::tcp;
using std::chrono::milliseconds;

constexpr milliseconds kDrainPoll{20}, kAcceptPause{100}, kLastWrites{1000};

tcp::endpoint Endpoint(const ServerOptions& options) {
  beast::error_code error;
  const auto address = asio::ip::make_address(options.host == "localhost" ? "127.0.0.1" : options.host, error);
  if (error) {
    ThrowInvalid("{} is {}; it takes an address, such as 127.0.0.1, 0.0.0.0 or ::1", Option{"host"},
                 Quoted(options.host));
  }
  return {address, options.port};
}

// Each connection is a file descriptor, and the usual limit of 1,024 is soon reached.
void RaiseFileLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);  // only a wish
}

}  // namespace

bool IsLoopback(const std::string& host) {
  beast::error_code error;
  const auto address = asio::ip::make_address(host == "localhost" ? "127.0.0.1" : host, error);
  return !error && address.is_loopback();
}

class Server::Impl {
 public:
  Impl(const ServerOptions& options, Service& service, ModelPool& models, Metrics& metrics, AccessLog& log)
      : options_(options), service_(service), models_(models), metrics_(metrics), log_(log) {
    RaiseFileLimit();
    const tcp::endpoint endpoint = Endpoint(options);
    beast::error_code error;
    const auto checked = [&] {
      if (!error) return;
      Throw(PHSA_IO, "cannot listen on {} port {}: {}; {} and {} say where", options.host, options.port,
            error.message(), Option{"host"}, Option{"port"});
    };
    acceptor_.open(endpoint.protocol(), error);
    checked();
    acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    checked();
    acceptor_.bind(endpoint, error);
    checked();
    acceptor_.listen(asio::socket_base::max_listen_connections, error);
    checked();
  }

  uint16_t port() const { return acceptor_.local_endpoint().port(); }

  void Run() {
    asio::signal_set signals(context_, SIGINT, SIGTERM);
    WaitForSignal(signals);
    asio::signal_set hangups(context_);
    if (options_.tls != nullptr) {
      hangups.add(SIGHUP);
      WaitForHangup(hangups);
    }
    Accept();
    std::vector<std::thread> threads;
    for (int32_t i = 1; i < options_.threads; ++i) threads.emplace_back([this] { context_.run(); });
    context_.run();
    for (std::thread& thread : threads) thread.join();
    service_.Stop();
    // Nothing of ours may be left with a model when the connections' context goes.
    models_.CancelAll();
    while (!models_.Idle()) std::this_thread::sleep_for(kDrainPoll);
  }

 private:
  void WaitForSignal(asio::signal_set& signals) {
    signals.async_wait([this, &signals](const beast::error_code& error, int) {
      if (error) return;
      if (draining_) {
        context_.stop();  // the second time
        return;
      }
      Drain();
      WaitForSignal(signals);
    });
  }

  void WaitForHangup(asio::signal_set& hangups) {
    hangups.async_wait([this, &hangups](const beast::error_code& error, int) {
      if (error) return;
      try {
        options_.tls->Reload();
        log_.Note("the certificate was read again");
        if (const std::string warning = options_.tls->warning(); !warning.empty()) log_.Note("warning: " + warning);
      } catch (const Error& wrong) {
        log_.Note(fmt::format("warning: {}; the server goes on with the certificate that it has", wrong.what()));
      }
      WaitForHangup(hangups);
    });
  }

  void Accept() {
    // Each connection's handlers run one after the other, whichever thread runs them.
    acceptor_.async_accept(asio::make_strand(context_), [this](const beast::error_code& error, tcp::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (error) {
        // Out of descriptors or memory: others will close theirs.
        SayOnce(fmt::format("a connection could not be taken ({})", error.message()));
        pause_.expires_after(kAcceptPause);
        pause_.async_wait([this](const beast::error_code&) { Accept(); });
        return;
      }
      Take(std::move(socket));
      Accept();
    });
  }

  void Take(tcp::socket socket) {
    {
      const std::lock_guard lock(mutex_);
      if (connections_.size() >= static_cast<size_t>(options_.max_connections)) {
        SayOnce(fmt::format("more than {} connections: the newest are closed", options_.max_connections));
        return;
      }
    }
    const Connection::Context context{options_,
                                      service_,
                                      metrics_,
                                      log_,
                                      [this] { return draining_.load(); },
                                      [this](Connection* gone) {
                                        const std::lock_guard lock(mutex_);
                                        connections_.erase(gone);
                                      },
                                      options_.tls != nullptr ? options_.tls->context() : nullptr};
    const auto connection = std::make_shared<Connection>(std::move(socket), context);
    {
      const std::lock_guard lock(mutex_);
      connections_.insert(connection.get());
    }
    connection->Start();
  }

  void SayOnce(const std::string& what) {
    if (!std::exchange(said_, true)) log_.Note(what);
  }

  std::vector<std::shared_ptr<Connection>> Connections() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Connection>> all;
    for (Connection* connection : connections_) {
      if (auto alive = connection->weak_from_this().lock()) all.push_back(std::move(alive));
    }
    return all;
  }

  void Drain() {
    log_.Note(
        fmt::format("stopping: answers in work have {} s", std::chrono::duration<double>(options_.grace).count()));
    service_.Drain();
    draining_ = true;
    for (const auto& connection : Connections()) connection->CloseIfIdle();
    deadline_ = std::chrono::steady_clock::now() + options_.grace;
    PollDrain();
  }

  // Done when nobody waits for anything. At the deadline the answers are ended, and their clients told.
  void PollDrain() {
    const auto now = std::chrono::steady_clock::now();
    const bool all_gone = [&] {
      const std::lock_guard lock(mutex_);
      return connections_.empty();
    }();
    if ((models_.Idle() && all_gone) || now >= deadline_ + kLastWrites) {
      if (!all_gone) log_.Note("stopped: some clients did not take their answers");
      context_.stop();
      return;
    }
    if (now >= deadline_) models_.CancelAll();
    pause_.expires_after(kDrainPoll);
    pause_.async_wait([this](const beast::error_code&) { PollDrain(); });
  }

  const ServerOptions options_;
  Service& service_;
  ModelPool& models_;
  Metrics& metrics_;
  AccessLog& log_;
  std::atomic<bool> draining_ = false;
  bool said_ = false;
  std::chrono::steady_clock::time_point deadline_;
  std::mutex mutex_;
  std::set<Connection*> connections_;
  asio::io_context context_;  // after what its handlers use
  tcp::acceptor acceptor_{context_};
  asio::steady_timer pause_{context_};
};

Server::Server(const ServerOptions& options, Service& service, ModelPool& models, Metrics& metrics, AccessLog& log)
    : impl_(std::make_unique<Impl>(options, service, models, metrics, log)) {}
Server::~Server() = default;
uint16_t Server::port() const { return impl_->port(); }
void Server::Run() { impl_->Run(); }

}  // namespace phsa::server
