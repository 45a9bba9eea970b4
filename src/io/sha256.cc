#include "io/sha256.h"

#include <openssl/evp.h>

#include "base/errors.h"

namespace phsa {

struct Sha256::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~State() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  PHSA_CHECK(state_->context != nullptr && EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) == 1);
}

Sha256::~Sha256() = default;

Sha256::Sha256(const Sha256& other) : state_(std::make_unique<State>()) { *this = other; }

Sha256& Sha256::operator=(const Sha256& other) {
  if (this != &other) PHSA_CHECK(EVP_MD_CTX_copy_ex(state_->context, other.state_->context) == 1);
  return *this;
}

void Sha256::Update(const void* data, size_t size) { PHSA_CHECK(EVP_DigestUpdate(state_->context, data, size) == 1); }

std::string Sha256::Hex() const {
  const Sha256 copy(*this);  // finishing ends a context
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  PHSA_CHECK(EVP_DigestFinal_ex(copy.state_->context, digest, &size) == 1);
  std::string out;
  for (unsigned int i = 0; i < size; ++i) out += fmt::format("{:02x}", digest[i]);
  return out;
}

}  // namespace phsa
