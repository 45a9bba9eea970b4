// Requests and answers as the handlers see them: HTTP without sockets.
#ifndef PHSA_SERVER_HTTP_TYPES_H_
#define PHSA_SERVER_HTTP_TYPES_H_

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace phsa::server {

struct HttpRequest {
  std::string method, target;  // "POST", "/v1/completions?x=y"
  std::string content_type, authorization, origin;
  std::string body;
  std::string host = {};  // the name under which the server was asked, with its port
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
};

// What is answered with an error instead of a result.
class HttpError : public std::runtime_error {
 public:
  // `param`: the field of the request that is wrong; empty: none. `code`: a word for programs; empty: none.
  HttpError(int status, const std::string& message, std::string param = "", std::string code = "")
      : std::runtime_error(message), status_(status), param_(std::move(param)), code_(std::move(code)) {}
  int status() const { return status_; }
  const std::string& param() const { return param_; }
  const std::string& code() const { return code_; }
  std::vector<std::pair<std::string, std::string>> headers;

 private:
  int status_;
  std::string param_, code_;
};

// Where the answer to one request goes. All but Post are called by the request's own HTTP thread, which Post reaches
// from any other. After the client has gone they do nothing.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual void Post(std::function<void()> work) = 0;
  virtual void Answer(HttpResponse response) = 0;
  // Instead of Answer: a stream of server-sent events.
  virtual void BeginStream() = 0;
  virtual void Write(std::string text) = 0;
  virtual void EndStream() = 0;
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_HTTP_TYPES_H_
