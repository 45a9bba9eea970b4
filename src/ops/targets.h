// Which SIMD target the operations run on: the best the machine has, or the one asked for by name.
#ifndef PHSA_OPS_TARGETS_H_
#define PHSA_OPS_TARGETS_H_

#include <string>
#include <string_view>
#include <vector>

namespace phsa {

// PHSA_TARGET chooses at first use; names that only the attention has leave the best.
std::vector<std::string> OpsTargetNames();  // best first
std::string OpsTargetName();
void SetOpsTarget(std::string_view name);  // throws phsa::Error listing the names

}  // namespace phsa

#endif  // PHSA_OPS_TARGETS_H_
