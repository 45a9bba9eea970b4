// What a user of phsa can cause is thrown as phsa::Error: what was wrong, where, and what to do.
#ifndef PHSA_ERROR_H_
#define PHSA_ERROR_H_

#include <stdexcept>
#include <string>

#include "phsa/c.h"

namespace phsa {

class PHSA_API Error : public std::runtime_error {
 public:
  Error(phsa_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  phsa_status status() const { return status_; }

 private:
  phsa_status status_;
};

}  // namespace phsa

#endif  // PHSA_ERROR_H_
