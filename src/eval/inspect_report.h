// An inspection in words for a terminal, and as JSON (docs/inspect.md).
#ifndef PHSA_EVAL_INSPECT_REPORT_H_
#define PHSA_EVAL_INSPECT_REPORT_H_

#include <string>

#include "eval/inspect.h"

namespace phsa {

std::string InspectionText(const Inspection& inspection);
std::string InspectionJson(const Inspection& inspection);

}  // namespace phsa

#endif  // PHSA_EVAL_INSPECT_REPORT_H_
