// The certificate by which the server is known, and what is spoken with it.
#ifndef PHSA_SERVER_TLS_H_
#define PHSA_SERVER_TLS_H_

#include <memory>
#include <mutex>
#include <string>

namespace boost::asio::ssl {
class context;
}

namespace phsa::server {

class TlsFiles {
 public:
  // Reads both: PEM, the server's own certificate first, then those that vouch for it; they may be one file. Throws
  // phsa::Error naming the flag, the file and what to do.
  TlsFiles(std::string certificate, std::string key);

  // Any thread may call these.
  // Reads them again, for connections from now on. Throws like the constructor, and then all stays as it was.
  void Reload();
  std::shared_ptr<boost::asio::ssl::context> context() const;
  std::string warning() const;  // of a certificate that clients will not take; empty: none

 private:
  const std::string certificate_, key_;
  mutable std::mutex mutex_;
  std::shared_ptr<boost::asio::ssl::context> context_;
  std::string warning_;
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_TLS_H_
