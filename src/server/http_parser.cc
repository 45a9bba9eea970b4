#include "server/http_parser.h"

namespace phsa::server {

HttpRequest RequestHead(const http::request_header<>& header) {
  const auto field = [&](http::field name) { return std::string(header[name]); };
  HttpRequest request;
  request.method = std::string(header.method_string());
  request.target = std::string(header.target());
  request.content_type = field(http::field::content_type);
  request.authorization = field(http::field::authorization);
  // As Anthropic's clients send it.
  if (request.authorization.empty() && header.count("x-api-key") > 0) {
    request.authorization = "Bearer " + std::string(header.at("x-api-key"));
  }
  request.origin = field(http::field::origin);
  request.host = field(http::field::host);
  return request;
}

int ParserStatus(const beast::error_code& error) {
  if (error == http::error::header_limit || error == http::error::buffer_overflow) return 431;
  if (error == http::error::body_limit) return 413;
  return 400;
}

}  // namespace phsa::server
