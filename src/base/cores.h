// How many cores this process may use.
#ifndef PHSA_BASE_CORES_H_
#define PHSA_BASE_CORES_H_

#include <cstdint>
#include <filesystem>
#include <vector>

namespace phsa {

// Physical cores among the CPUs that the system lets this process run on, and no more than its control group pays for;
// at least 1. Two threads of one core share its arithmetic units: the second brings next to nothing to products that
// keep those busy, and makes whoever waits for both wait longer.
int32_t PhysicalCores();

// The same of these CPUs, by the files below `root` ("/" but in tests).
int32_t PhysicalCores(const std::filesystem::path& root, const std::vector<int>& cpus);

// CPUs that the system lets this process run on, each thread of a core counted; at least 1.
int32_t UsableCpus();

}  // namespace phsa

#endif  // PHSA_BASE_CORES_H_
