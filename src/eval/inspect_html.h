// An inspection as one HTML file that needs nothing else: the text with its blocks coloured by how often they were
// chosen.
#ifndef PHSA_EVAL_INSPECT_HTML_H_
#define PHSA_EVAL_INSPECT_HTML_H_

#include <string>

#include "eval/inspect.h"

namespace phsa {

std::string InspectionHtml(const Inspection& inspection);

}  // namespace phsa

#endif  // PHSA_EVAL_INSPECT_HTML_H_
