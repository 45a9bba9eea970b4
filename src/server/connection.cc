#include "server/connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <utility>

#include "base/errors.h"
#include "server/answers.h"

namespace phsa::server {

using boost::asio::ip::tcp;

namespace {

// A connection that says nothing must not hold the end of the server up.
constexpr std::chrono::milliseconds kDrainingIdle{1000};
// A client that still sends sees its answer only if it is not cut off; so long it may go on.
constexpr std::chrono::milliseconds kLinger{2000};
// A client need not answer the end of TLS; so long it may take to.
constexpr std::chrono::milliseconds kTlsEnd{500};
// What a client sends between requests and during its answer is taken in by so many bytes, and once that is enough it
// is looked at this often.
constexpr size_t kReadAhead = 4096;
constexpr std::chrono::milliseconds kWatchPause{100};

}  // namespace

Connection::Connection(tcp::socket socket, const Context& context)
    : stream_(std::move(socket)),
      context_(context),
      timer_(stream_.get_executor()),
      watch_timer_(stream_.get_executor()),
      buffer_(context.options.max_header_bytes + (64 << 10)) {
  beast::error_code error;
  const tcp::endpoint peer = stream_.socket().remote_endpoint(error);
  peer_ = error ? "unknown" : peer.address().to_string();
  stream_.socket().set_option(tcp::no_delay(true), error);
  context_.metrics.CountConnection(1);
}

Connection::~Connection() {
  context_.metrics.CountConnection(-1);
  context_.closed(this);
}

void Connection::Start() {
  asio::post(stream_.get_executor(), [self = shared_from_this()] {
    if (self->context_.tls != nullptr) {
      self->AwaitHandshake();
    } else {
      self->ReadNext();
    }
  });
}

void Connection::Post(std::function<void()> work) {
  asio::post(stream_.get_executor(), [self = shared_from_this(), work = std::move(work)] { work(); });
}

void Connection::CloseIfIdle() {
  Post([this] {
    if (state_ == State::kIdle || state_ == State::kHandshake) Shut();
  });
}

void Connection::Close() {
  Post([this] { Shut(); });
}

void Connection::Shut() {
  if (std::exchange(state_, State::kClosed) == State::kClosed) return;
  beast::error_code ignored;
  timer_.cancel();
  watch_timer_.cancel();
  stream_.socket().shutdown(tcp::socket::shutdown_both, ignored);
  stream_.socket().close(ignored);
  if (const auto cancel = std::exchange(cancel_, {})) cancel();
}

// What is awaited is aborted when its time is over, and its handler sees `timed_out_`.
void Connection::SetDeadline(std::chrono::milliseconds timeout, const char* what) {
  timer_.expires_after(timeout);
  timer_.async_wait([self = shared_from_this(), what, generation = ++generation_](const beast::error_code& error) {
    if (error || self->generation_ != generation) return;
    self->timed_out_ = what;
    beast::error_code ignored;
    self->stream_.socket().cancel(ignored);
  });
}

void Connection::AwaitHandshake() {
  state_ = State::kHandshake;
  begun_ = std::chrono::steady_clock::now();
  SetDeadline(context_.draining() ? kDrainingIdle : context_.options.header_timeout, "the TLS handshake");
  stream_.socket().async_wait(tcp::socket::wait_read, [self = shared_from_this()](const beast::error_code& error) {
    if (self->state_ != State::kHandshake) return;
    if (error) {
      self->Shut();
    } else {
      self->Handshake();
    }
  });
}

void Connection::Handshake() {
  char first = 0;
  if (recv(stream_.socket().native_handle(), &first, 1, MSG_PEEK | MSG_DONTWAIT) <= 0) {
    Shut();  // it only looked whether somebody listens
    return;
  }
  // No message of TLS begins with a letter, and each of HTTP does.
  if ((first >= 'A' && first <= 'Z') || (first >= 'a' && first <= 'z')) {
    served_ = true;
    RefuseAndClose(HttpError(400, "this server speaks HTTPS; ask for https:// instead of http://", "", "https_wanted"));
    return;
  }
  stream_.UseTls(*context_.tls);
  stream_.async_handshake([self = shared_from_this()](const beast::error_code& error) {
    if (self->state_ == State::kHandshake) self->OnHandshake(error);
  });
}

void Connection::OnHandshake(const beast::error_code& error) {
  if (!error) {
    ReadNext();
    return;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
  const std::string why = timed_out_ != nullptr ? "it took too long" : error.message();
  context_.log.Write({peer_, "-", "", 0, 0, seconds, fmt::format("the TLS handshake failed: {}", why)});
  Shut();
}

void Connection::ReadNext() {
  // One that came after the server began to stop hears why it is refused.
  const bool draining = context_.draining();
  if (draining && served_) {
    Shut();
    return;
  }
  state_ = State::kIdle;
  timed_out_ = nullptr;
  if (buffer_.size() == 0) {
    SetDeadline(draining ? kDrainingIdle : context_.options.idle_timeout, "a request");
    ReadAhead();
  } else if (reading_ahead_) {
    // Two cannot read at once: the other one ends, and its handler goes on.
    SetDeadline(context_.options.header_timeout, "the header");
    beast::error_code ignored;
    stream_.socket().cancel(ignored);
  } else {
    ReadHeader();
  }
}

void Connection::ReadHeader() {
  state_ = State::kHeader;
  served_ = true;
  begun_ = std::chrono::steady_clock::now();
  bytes_ = 0;
  status_ = 0;
  request_ = {};
  keep_alive_ = false;
  parser_.emplace();
  parser_->header_limit(context_.options.max_header_bytes);
  // Which body it is says the header; until then the most that any may have.
  parser_->body_limit(std::max(context_.options.max_body_bytes, kLargestDocumentBody));
  SetDeadline(context_.options.header_timeout, "the header");
  http::async_read_header(stream_, buffer_, *parser_,
                          [self = shared_from_this()](const beast::error_code& error, size_t) {
                            if (self->state_ == State::kHeader) self->OnHeader(error);
                          });
}

void Connection::OnReadFailed(const beast::error_code& error) {
  if (timed_out_ != nullptr) {
    RefuseAndClose(HttpError(408, fmt::format("{}: {} is missing", StatusText(408), timed_out_)));
  } else if (error.category() == http::make_error_code(http::error::bad_method).category() &&
             error != http::error::end_of_stream && error != http::error::partial_message) {
    const int status = ParserStatus(error);
    RefuseAndClose(HttpError(status, StatusText(status)));
  } else {
    if (state_ == State::kBody) Log("the client has gone before its request was complete");
    Shut();
  }
}

void Connection::OnHeader(const beast::error_code& error) {
  if (error && (!parser_->is_header_done() || error != http::error::body_limit)) {
    OnReadFailed(error);
    return;
  }
  request_ = RequestHead(parser_->get().base());
  const uint64_t limit = Service::BodyLimit(request_, context_.options.max_body_bytes);
  if (error || parser_->content_length().value_or(0) > limit) {
    OnReadFailed(http::error::body_limit);
    return;
  }
  parser_->body_limit(limit);
  try {
    context_.service.CheckHead(request_);
  } catch (const HttpError& refused) {
    // The body need not come, and what follows it cannot be told from it.
    if (parser_->is_done()) {
      keep_alive_ = parser_->get().keep_alive();
      state_ = State::kWork;
      Answer(ErrorResponse(refused, request_.target));
    } else {
      RefuseAndClose(refused);
    }
    return;
  }
  ReadBody();
}

void Connection::ReadBody() {
  state_ = State::kBody;
  SetDeadline(context_.options.body_timeout, "the body");
  const auto read = [self = shared_from_this()] {
    http::async_read(self->stream_, self->buffer_, *self->parser_, [self](const beast::error_code& error, size_t) {
      if (self->state_ == State::kBody) self->OnBody(error);
    });
  };
  if (!beast::iequals(parser_->get()[http::field::expect], "100-continue")) {
    read();
    return;
  }
  static const std::string kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
  asio::async_write(stream_, asio::buffer(kContinue),
                    [self = shared_from_this(), read](const beast::error_code& error, size_t) {
                      if (self->state_ != State::kBody) return;
                      if (error) {
                        self->OnReadFailed(error);
                      } else {
                        read();
                      }
                    });
}

void Connection::OnBody(const beast::error_code& error) {
  if (error) {
    OnReadFailed(error);
    return;
  }
  ++generation_;  // the deadline is met
  timer_.cancel();
  keep_alive_ = parser_->get().keep_alive();
  chunked_ = parser_->get().version() >= 11;
  request_.body = std::move(parser_->get().body());
  parser_.reset();
  state_ = State::kWork;
  std::function<void()> cancel = context_.service.Handle(request_, shared_from_this());
  request_.body = {};
  if (state_ == State::kClosed) {
    if (cancel) cancel();
    return;
  }
  cancel_ = std::move(cancel);
  if (cancel_) ReadAhead();
}

// Between requests the beginning of the next one is read here. While an answer is made nothing is asked of the client,
// so somebody has to see that it goes: what it sends already is its next request, and is taken in, as only behind it
// the end of the connection shows.
void Connection::ReadAhead() {
  if (reading_ahead_) return;
  reading_ahead_ = true;
  if (const size_t room = std::min(kReadAhead, buffer_.max_size() - buffer_.size()); room > 0) {
    stream_.async_read_some(buffer_.prepare(room),
                            [self = shared_from_this()](const beast::error_code& error, size_t count) {
                              self->reading_ahead_ = false;
                              self->buffer_.commit(count);
                              self->OnReadAhead(error);
                            });
    return;
  }
  // It could be read without end: from here on it is looked at from time to time.
  watch_timer_.expires_after(kWatchPause);
  watch_timer_.async_wait([self = shared_from_this()](const beast::error_code& error) {
    self->reading_ahead_ = false;
    if (error || self->state_ == State::kClosed) return;
    pollfd socket = {self->stream_.socket().native_handle(), POLLRDHUP, 0};
    const bool gone = poll(&socket, 1, 0) > 0;
    self->OnReadAhead(gone ? beast::error_code(asio::error::eof) : beast::error_code());
  });
}

void Connection::OnReadAhead(const beast::error_code& error) {
  // A deadline, or ReadNext, cancels more than it means.
  const bool ended = error && error != asio::error::operation_aborted;
  if (state_ == State::kIdle) {
    if (timed_out_ != nullptr || (ended && buffer_.size() == 0)) {
      Shut();
    } else if (buffer_.size() > 0) {
      ReadHeader();
    } else {
      ReadAhead();
    }
  } else if (state_ == State::kWork || state_ == State::kStreaming) {
    if (ended) {
      ClientGone("the client has gone");
    } else {
      ReadAhead();
    }
  }
}

void Connection::ClientGone(const char* how) {
  if (status_ == 0) status_ = 499;  // nginx's word for it
  Log(how);
  Shut();
}

void Connection::RefuseAndClose(const HttpError& error) {
  state_ = State::kWork;
  keep_alive_ = false;
  unread_body_ = timed_out_ == nullptr;
  timed_out_ = nullptr;
  Answer(ErrorResponse(error, request_.target));
}

template <class Message>
void Connection::SetHeaders(Message& message) const {
  for (const auto& [name, value] : context_.service.CommonHeaders(request_)) message.set(name, value);
}

void Connection::Answer(HttpResponse response) {
  if (state_ != State::kWork) return;
  state_ = State::kWriting;
  cancel_ = {};
  if (context_.draining()) keep_alive_ = false;
  status_ = response.status;
  response_.emplace(static_cast<http::status>(response.status), 11);
  SetHeaders(*response_);
  for (const auto& [name, value] : response.headers) response_->set(name, value);
  const size_t size = response.body.size();
  if (response.status != 204) response_->set(http::field::content_type, response.content_type);
  const bool head = request_.method == "HEAD";
  if (!head) response_->body() = std::move(response.body);
  response_->keep_alive(keep_alive_);
  if (response.status != 204) response_->content_length(size);
  serializer_.emplace(*response_);
  bytes_ = head ? 0 : size;
  SetDeadline(context_.options.write_timeout, "the reader");
  const auto done = [self = shared_from_this()](const beast::error_code& error, size_t) {
    if (self->state_ != State::kWriting) return;
    if (error) {
      self->ClientGone(self->timed_out_ != nullptr ? "the client did not read in time" : "the client has gone");
    } else {
      self->Finished(self->keep_alive_);
    }
  };
  if (head) {
    http::async_write_header(stream_, *serializer_, done);
  } else {
    http::async_write(stream_, *serializer_, done);
  }
}

void Connection::BeginStream() {
  if (state_ != State::kWork) return;
  state_ = State::kStreaming;
  status_ = 200;
  stream_ended_ = false;
  pending_.clear();
  if (!chunked_) keep_alive_ = false;
  stream_head_.emplace(http::status::ok, 11);
  SetHeaders(*stream_head_);
  stream_head_->set(http::field::content_type, "text/event-stream; charset=utf-8");
  stream_head_->set(http::field::cache_control, "no-cache");
  stream_head_->set("X-Accel-Buffering", "no");  // a proxy in front must not hold tokens back
  stream_head_->keep_alive(keep_alive_);
  if (chunked_) stream_head_->chunked(true);
  stream_serializer_.emplace(*stream_head_);
  stream_writing_ = true;
  SetDeadline(context_.options.write_timeout, "the reader");
  http::async_write_header(stream_, *stream_serializer_,
                           [self = shared_from_this()](const beast::error_code& error, size_t) {
                             if (self->state_ != State::kStreaming) return;
                             self->stream_writing_ = false;
                             if (error) {
                               self->ClientGone("the client has gone");
                             } else {
                               self->FlushStream();
                             }
                           });
}

void Connection::Write(std::string text) {
  if (state_ != State::kStreaming) return;
  bytes_ += text.size();
  pending_ += text;
  FlushStream();
}

void Connection::EndStream() {
  if (state_ != State::kStreaming) return;
  stream_ended_ = true;
  cancel_ = {};
  FlushStream();
}

// Everything that came during a write goes into the next one.
void Connection::FlushStream() {
  if (stream_writing_) return;
  ++generation_;  // nothing is being written
  if (pending_.empty() && !stream_ended_) return;
  if (!chunked_) {
    writing_ = pending_;
  } else {
    writing_ = pending_.empty() ? "" : fmt::format("{:x}\r\n{}\r\n", pending_.size(), pending_);
    if (stream_ended_) writing_ += "0\r\n\r\n";
  }
  pending_.clear();
  stream_writing_ = true;
  const bool last = stream_ended_;
  SetDeadline(context_.options.write_timeout, "the reader");
  asio::async_write(stream_, asio::buffer(writing_),
                    [self = shared_from_this(), last](const beast::error_code& error, size_t) {
                      if (self->state_ != State::kStreaming) return;
                      self->stream_writing_ = false;
                      if (error) {
                        self->ClientGone(self->timed_out_ != nullptr ? "the client did not read in time"
                                                                     : "the client has gone mid-stream");
                      } else if (last) {
                        self->Finished(self->keep_alive_);
                      } else {
                        self->FlushStream();
                      }
                    });
}

void Connection::Finished(bool keep_alive) {
  ++generation_;
  timer_.cancel();
  Log("");
  serializer_.reset();
  response_.reset();
  stream_serializer_.reset();
  stream_head_.reset();
  if (keep_alive) {
    ReadNext();
    return;
  }
  if (!stream_.has_tls()) {
    End();
    return;
  }
  // Without it a client could not tell the end of an answer from one that somebody cut.
  state_ = State::kLingering;
  SetDeadline(kTlsEnd, "the end");
  stream_.async_shutdown([self = shared_from_this()](const beast::error_code&) {
    if (self->state_ == State::kLingering) self->End();
  });
}

void Connection::End() {
  if (!unread_body_) {
    Shut();
    return;
  }
  beast::error_code ignored;
  stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
  state_ = State::kLingering;
  SetDeadline(kLinger, "the end");
  Linger();
}

void Connection::Linger() {
  writing_.resize(64 << 10);  // what comes is not looked at
  // Below TLS, where there is any: nobody looks at it.
  stream_.socket().async_read_some(asio::buffer(writing_),
                                   [self = shared_from_this()](const beast::error_code& error, size_t) {
                                     if (self->state_ != State::kLingering) return;
                                     if (error) {
                                       self->Shut();
                                     } else {
                                       self->Linger();
                                     }
                                   });
}

void Connection::Log(const std::string& note) {
  context_.metrics.CountHttp(Service::CountedPath(request_.target), status_);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
  context_.log.Write(
      {peer_, request_.method.empty() ? "-" : request_.method, request_.target, status_, bytes_, seconds, note});
}

}  // namespace phsa::server
