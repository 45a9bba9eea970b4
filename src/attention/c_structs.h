// Structs of the C ABI from callers whose header may be older.
#ifndef PHSA_ATTENTION_C_STRUCTS_H_
#define PHSA_ATTENTION_C_STRUCTS_H_

#include <cstddef>
#include <cstring>

#include "base/errors.h"

namespace phsa {

// The struct as this header has it, from a caller whose header may end at `first_size`: what is missing is zero.
template <class T>
T Widened(const T& given, size_t first_size, const char* where) {
  if (given.struct_size == sizeof(T)) return given;
  if (given.struct_size != first_size) {
    ThrowInvalid("{}: struct_size is {}; allowed: {} or {} (use PHSA_INIT)", where, given.struct_size, first_size,
                 sizeof(T));
  }
  T wide{};
  std::memcpy(&wide, &given, first_size);
  wide.struct_size = sizeof(T);
  return wide;
}

}  // namespace phsa

#endif  // PHSA_ATTENTION_C_STRUCTS_H_
