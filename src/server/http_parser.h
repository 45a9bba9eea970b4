// What the handlers need of a request that Beast has parsed.
#ifndef PHSA_SERVER_HTTP_PARSER_H_
#define PHSA_SERVER_HTTP_PARSER_H_

#include <boost/beast/http.hpp>

#include "server/http_types.h"

namespace phsa::server {

namespace beast = boost::beast;
namespace http = boost::beast::http;

// The request of a parser, without its body.
HttpRequest RequestHead(const http::request_header<>& header);
// The status for what the parser refuses.
int ParserStatus(const beast::error_code& error);

}  // namespace phsa::server

#endif  // PHSA_SERVER_HTTP_PARSER_H_
