// Options as the program spells them: what libraries say of kv_type is said of --kv-type here.
#ifndef PHSA_CLI_SPELLING_H_
#define PHSA_CLI_SPELLING_H_

#include <string>
#include <string_view>

namespace phsa::cli {

// The flag of an option, with its value where that is not empty: ("kv_type", "bf16") is --kv-type bf16. The names of
// the attention's settings begin with a dot (phsa/error.h).
std::string FlagOf(std::string_view name, std::string_view value = {});
// A text that names options (base/option.h), with flags in their places.
std::string WithFlags(std::string_view text);

}  // namespace phsa::cli

#endif  // PHSA_CLI_SPELLING_H_
