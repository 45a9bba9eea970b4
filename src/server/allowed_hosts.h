// Under which names a server without a key answers. A page of another site can have its own name resolve to this
// machine (DNS rebinding), and is then of one origin with the server, key or no key: only the name tells.
#ifndef PHSA_SERVER_ALLOWED_HOSTS_H_
#define PHSA_SERVER_ALLOWED_HOSTS_H_

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace phsa::server {

class AllowedHosts {
 public:
  // `names`: names or addresses beside this machine's own (localhost, 127.0.0.0/8, ::1), of which --host is one where
  // there is no key. Each without a port, as all are allowed. Throws phsa::Error where one is none.
  explicit AllowedHosts(const std::vector<std::string>& names);

  // A request's header `Host`. Browsers always send one, so that nobody is kept out for sending none.
  bool Allows(std::string_view host) const;

 private:
  std::set<std::string> names_;
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_ALLOWED_HOSTS_H_
