// What somebody who misspelt a name probably meant.
#ifndef PHSA_BASE_NEAREST_H_
#define PHSA_BASE_NEAREST_H_

#include <span>
#include <string>
#include <string_view>

namespace phsa {

// The one of `names` that takes the fewest letters put in, taken out, changed or swapped with their neighbour; "" where
// none is near.
std::string Nearest(std::string_view name, std::span<const std::string> names);

// " (did you mean X?)" or "": for messages.
std::string DidYouMean(std::string_view name, std::span<const std::string> names);

}  // namespace phsa

#endif  // PHSA_BASE_NEAREST_H_
