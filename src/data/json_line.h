// One line of a JSON lines file.
#ifndef PHSA_DATA_JSON_LINE_H_
#define PHSA_DATA_JSON_LINE_H_

#include <string>
#include <string_view>

namespace phsa {

// The string that the object in `line` has as `field`. Where it is there twice, the last one counts, as in Python.
// Throws phsa::Error; `where` is the file and the line, for its message.
std::string TextOfJsonLine(std::string_view line, const std::string& field, const std::string& where);

}  // namespace phsa

#endif  // PHSA_DATA_JSON_LINE_H_
