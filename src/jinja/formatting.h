// Python's two old ways to put values into a text.
#ifndef PHSA_JINJA_FORMATTING_H_
#define PHSA_JINJA_FORMATTING_H_

#include <vector>

#include "jinja/builtins.h"
#include "jinja/value.h"

namespace phsa::jinja {

// format % values: %s %r %d %i %x %X %o %c is not there, %f %e %g, with flags, width and precision.
Text PercentFormat(const Text& format, const std::vector<Value>& values, Meter& meter);
// "{} {0} {name}".format(…), without format specifications.
Text BraceFormat(const Text& format, const Arguments& arguments, Meter& meter);

}  // namespace phsa::jinja

#endif  // PHSA_JINJA_FORMATTING_H_
