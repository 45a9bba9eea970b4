#include "server/allowed_hosts.h"

#include <arpa/inet.h>

#include <algorithm>
#include <optional>

#include "base/errors.h"

namespace phsa::server {
namespace {

// An address or a name, each in the one way of writing it that is compared.
struct Host {
  std::string name;
  bool is_own = false;  // only this machine has it
};

std::optional<Host> ParseV6(const std::string& text) {
  in6_addr address{};
  if (inet_pton(AF_INET6, text.c_str(), &address) != 1) return std::nullopt;
  char canonical[INET6_ADDRSTRLEN];
  inet_ntop(AF_INET6, &address, canonical, sizeof(canonical));
  const bool mapped = IN6_IS_ADDR_V4MAPPED(&address) && address.s6_addr[12] == 127;
  return Host{canonical, IN6_IS_ADDR_LOOPBACK(&address) || mapped};
}

// None: it is neither.
std::optional<Host> ParseName(std::string_view text) {
  std::string name(text);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](char c) { return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c); });
  if (name.ends_with('.')) name.pop_back();  // the root of all names may be written
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '.' || c == '_';
  };
  if (name.empty() || !std::all_of(name.begin(), name.end(), fits)) return std::nullopt;
  in_addr address{};
  const bool is_address = inet_pton(AF_INET, name.c_str(), &address) == 1;
  return Host{name, name == "localhost" || (is_address && ntohl(address.s_addr) >> 24 == 127)};
}

std::optional<Host> ParseHeader(std::string_view text) {
  const bool v6 = text.starts_with('[');
  const size_t end = v6 ? text.find(']') : text.find(':');
  if (v6 && end == std::string_view::npos) return std::nullopt;
  const std::string_view port = end == std::string_view::npos ? "" : text.substr(v6 ? end + 1 : end);
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  if (!port.empty() && (port.front() != ':' || !std::all_of(port.begin() + 1, port.end(), digit))) return std::nullopt;
  return v6 ? ParseV6(std::string(text.substr(1, end - 1))) : ParseName(text.substr(0, end));
}

}  // namespace

AllowedHosts::AllowedHosts(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const bool bracketed = name.size() > 2 && name.front() == '[' && name.back() == ']';
    std::optional<Host> host = ParseV6(bracketed ? name.substr(1, name.size() - 2) : name);
    if (!host) host = ParseName(name);
    if (!host) {
      ThrowInvalid("{} is {}; it takes a name or an address without a port, such as pc.example.org or ::1",
                   Option{"allow_host"}, Quoted(name));
    }
    names_.insert(host->name);
  }
}

bool AllowedHosts::Allows(std::string_view host) const {
  if (host.empty()) return true;
  const std::optional<Host> parsed = ParseHeader(host);
  return parsed && (parsed->is_own || names_.contains(parsed->name));
}

}  // namespace phsa::server
