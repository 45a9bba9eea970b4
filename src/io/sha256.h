// SHA-256 of what comes in pieces.
#ifndef PHSA_IO_SHA256_H_
#define PHSA_IO_SHA256_H_

#include <cstddef>
#include <memory>
#include <string>

namespace phsa {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256& other);  // goes on from what `other` has seen
  Sha256& operator=(const Sha256& other);

  void Update(const void* data, size_t size);
  std::string Hex() const;  // of what it has seen so far, in small letters

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace phsa

#endif  // PHSA_IO_SHA256_H_
