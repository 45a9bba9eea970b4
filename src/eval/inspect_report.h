// An inspection in words for a terminal, and as JSON (docs/inspect.md).
#ifndef PHSA_EVAL_INSPECT_REPORT_H_
#define PHSA_EVAL_INSPECT_REPORT_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "eval/inspect.h"

namespace phsa {

// A text in one line of at most `longest` characters, without any that would control a terminal.
std::string OneLine(std::string_view text, size_t longest);

std::string InspectionText(const Inspection& inspection);
std::string InspectionJson(const Inspection& inspection);

}  // namespace phsa

#endif  // PHSA_EVAL_INSPECT_REPORT_H_
