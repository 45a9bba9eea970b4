// Which backend and SIMD target run: the best the machine has, or the one asked for by name.
#ifndef PHSA_ATTENTION_TARGETS_H_
#define PHSA_ATTENTION_TARGETS_H_

#include <string>
#include <string_view>

#include "attention/plan.h"

namespace phsa {

std::string TargetNames();  // best first, separated by spaces
std::string TargetName();
void SetTarget(std::string_view name);  // throws phsa::Error listing the names
const Backend& ActiveBackend();

}  // namespace phsa

#endif  // PHSA_ATTENTION_TARGETS_H_
