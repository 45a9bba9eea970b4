#include "server/tls.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <boost/asio/ssl/context.hpp>
#include <utility>

#include "base/errors.h"
#include "base/mapped_file.h"

namespace phsa::server {
namespace {

namespace ssl = boost::asio::ssl;

constexpr size_t kMaxPemBytes = 1 << 20;

// What OpenSSL says of its last error.
std::string OpenSslReason() {
  const unsigned long error = ERR_peek_last_error();
  const char* const reason = ERR_reason_error_string(error);
  return reason != nullptr ? reason : fmt::format("error {:x}", error);
}

// HTTP/1.1 is what there is; clients that offer HTTP/2 as well are told so.
int ChooseProtocol(SSL*, const unsigned char** chosen, unsigned char* size, const unsigned char* offered,
                   unsigned int offered_size, void*) {
  static const unsigned char kOwn[] = {8, 'h', 't', 't', 'p', '/', '1', '.', '1'};
  unsigned char* found = nullptr;
  if (SSL_select_next_proto(&found, size, kOwn, sizeof(kOwn), offered, offered_size) != OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_NOACK;
  }
  *chosen = found;
  return SSL_TLSEXT_ERR_OK;
}

int RefusePassPhrase(char*, int, int, void* asked) {
  *static_cast<bool*>(asked) = true;
  return -1;
}

void ReadCertificates(const std::string& path, ssl::context& context) {
  const std::string text = ReadTextFile(path, kMaxPemBytes);
  boost::system::error_code error;
  ERR_clear_error();
  context.use_certificate_chain(boost::asio::buffer(text), error);
  if (error) {
    ThrowInvalid("{}: no certificate could be read from it ({}); it takes PEM, with -----BEGIN CERTIFICATE-----",
                 Option{"tls_cert", path}, OpenSslReason());
  }
}

void ReadKey(const std::string& path, const std::string& certificate, ssl::context& context) {
  const std::string text = ReadTextFile(path, kMaxPemBytes);
  ERR_clear_error();
  const std::unique_ptr<BIO, decltype(&BIO_free_all)> bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())),
                                                          &BIO_free_all);
  bool has_pass_phrase = false;
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(
      PEM_read_bio_PrivateKey(bio.get(), nullptr, RefusePassPhrase, &has_pass_phrase), &EVP_PKEY_free);
  if (has_pass_phrase) {
    ThrowInvalid(
        "{}: the key has a pass phrase, and nobody is asked for it; write it without one, into a file that "
        "only the server's user can read: openssl pkey -in KEY -out FILE",
        Option{"tls_key", path});
  }
  if (key == nullptr) {
    ThrowInvalid("{}: no private key could be read from it ({}); it takes PEM, with -----BEGIN PRIVATE KEY-----",
                 Option{"tls_key", path}, OpenSslReason());
  }
  SSL_CTX* const native = context.native_handle();
  if (X509_check_private_key(SSL_CTX_get0_certificate(native), key.get()) != 1) {
    ThrowInvalid("{}: the key is not that of the first certificate in {}", Option{"tls_key", path},
                 Option{"tls_cert", certificate});
  }
  if (SSL_CTX_use_PrivateKey(native, key.get()) != 1) {
    ThrowInvalid("{}: the key cannot be used ({})", Option{"tls_key", path}, OpenSslReason());
  }
}

std::string DateWarning(const std::string& path, const ssl::context& context) {
  auto& own = const_cast<ssl::context&>(context);  // native_handle() wants it, and nothing is changed
  const X509* const certificate = SSL_CTX_get0_certificate(own.native_handle());
  if (X509_cmp_current_time(X509_get0_notAfter(certificate)) < 0) {
    return fmt::format("{}: the certificate has run out, clients will not take it", Option{"tls_cert", path});
  }
  if (X509_cmp_current_time(X509_get0_notBefore(certificate)) > 0) {
    return fmt::format("{}: the certificate is not valid yet, clients will not take it", Option{"tls_cert", path});
  }
  return "";
}

std::shared_ptr<ssl::context> MakeContext(const std::string& certificate, const std::string& key) {
  auto context = std::make_shared<ssl::context>(ssl::context::tls_server);
  SSL_CTX* const native = context->native_handle();
  SSL_CTX_set_min_proto_version(native, TLS1_2_VERSION);
  SSL_CTX_set_options(native, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_mode(native, SSL_MODE_RELEASE_BUFFERS);  // thousands of connections may wait
  SSL_CTX_set_alpn_select_cb(native, ChooseProtocol, nullptr);
  ReadCertificates(certificate, *context);
  ReadKey(key, certificate, *context);
  return context;
}

}  // namespace

TlsFiles::TlsFiles(std::string certificate, std::string key)
    : certificate_(std::move(certificate)), key_(std::move(key)) {
  Reload();
}

void TlsFiles::Reload() {
  std::shared_ptr<ssl::context> context = MakeContext(certificate_, key_);
  std::string warning = DateWarning(certificate_, *context);
  const std::lock_guard lock(mutex_);
  context_ = std::move(context);
  warning_ = std::move(warning);
}

std::shared_ptr<ssl::context> TlsFiles::context() const {
  const std::lock_guard lock(mutex_);
  return context_;
}

std::string TlsFiles::warning() const {
  const std::lock_guard lock(mutex_);
  return warning_;
}

}  // namespace phsa::server
