// Structs of the C ABI from callers whose header may be older.
#ifndef PHSA_ATTENTION_C_STRUCTS_H_
#define PHSA_ATTENTION_C_STRUCTS_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <initializer_list>

#include "base/errors.h"

namespace phsa {

// The struct as this header has it, from a caller whose header may end at one of `older`: what is missing is zero.
template <class T>
T Widened(const T& given, std::initializer_list<size_t> older, const char* where) {
  if (given.struct_size == sizeof(T)) return given;
  if (std::find(older.begin(), older.end(), size_t{given.struct_size}) == older.end()) {
    ThrowInvalid("{}: struct_size is {}; allowed: {} or {} (use PHSA_INIT)", where, given.struct_size,
                 fmt::join(older, ", "), sizeof(T));
  }
  T wide{};
  std::memcpy(&wide, &given, given.struct_size);
  wide.struct_size = sizeof(T);
  return wide;
}

}  // namespace phsa

#endif  // PHSA_ATTENTION_C_STRUCTS_H_
