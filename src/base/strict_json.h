// nlohmann's parser keeps the last of two equal keys and has no limit on depth. A callback can see both.
#ifndef PHSA_BASE_STRICT_JSON_H_
#define PHSA_BASE_STRICT_JSON_H_

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace phsa {

// Parses `text`. Calls too_deep() where lists and objects are nested deeper than `most` and twice(key) where an object
// has a key again; both throw, and what nlohmann throws goes through.
template <class Json, class TooDeep, class Twice>
Json ParseStrictly(std::string_view text, int most, const TooDeep& too_deep, const Twice& twice) {
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int depth, typename Json::parse_event_t event, Json& parsed) {
    using Event = typename Json::parse_event_t;
    if ((event == Event::object_start || event == Event::array_start) && depth >= most) too_deep();
    if (event == Event::object_start) {
      keys.emplace_back();
    } else if (event == Event::object_end) {
      keys.pop_back();
    } else if (event == Event::key) {
      const std::string& key = parsed.template get_ref<const std::string&>();
      if (!keys.back().insert(key).second) twice(key);
    }
    return true;
  };
  return Json::parse(text.begin(), text.end(), watch);
}

}  // namespace phsa

#endif  // PHSA_BASE_STRICT_JSON_H_
