// From a status of the C ABI to an exception.
#ifndef PHSA_PYTHON_CSRC_STATUS_H_
#define PHSA_PYTHON_CSRC_STATUS_H_

#include <stdexcept>
#include <string>

#include "phsa/c.h"

namespace phsa_torch {

// torch turns every exception of a kernel into Python's RuntimeError. What a caller caused begins with this, by which
// phsa/ops.py knows it and raises ValueError instead.
inline constexpr const char* kRefused = "phsa refuses: ";

[[noreturn]] inline void Refuse(const std::string& message) { throw std::runtime_error(kRefused + message); }

inline void Check(phsa_status status) {
  if (status == PHSA_OK) return;
  if (status == PHSA_INVALID_ARGUMENT || status == PHSA_UNSUPPORTED) Refuse(phsa_last_error());
  throw std::runtime_error(phsa_last_error());
}

}  // namespace phsa_torch

#endif  // PHSA_PYTHON_CSRC_STATUS_H_
