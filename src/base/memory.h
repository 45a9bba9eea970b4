// How much memory there is.
#ifndef PHSA_BASE_MEMORY_H_
#define PHSA_BASE_MEMORY_H_

#include <cstdint>

namespace phsa {

// Bytes that can still be had: the system's, or the control group's limit where there is one.
uint64_t AvailableMemory();

}  // namespace phsa

#endif  // PHSA_BASE_MEMORY_H_
