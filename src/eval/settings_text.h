// Settings in words, and ways to attend by the names that somebody asked for.
#ifndef PHSA_EVAL_SETTINGS_TEXT_H_
#define PHSA_EVAL_SETTINGS_TEXT_H_

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "phsa/settings.h"

namespace phsa {

// "init 128, local 512, K 16, λ 0.9, en": what the policy goes by, of the base. What is as usual (blocks of 16, the sum
// of a group, no dense_below) is left out. Dense attention "reads everything".
std::string SettingsInWords(const LayerSettings& settings);
// ", 4 parts"; empty where blocks have one representative.
std::string PartsInWords(const Settings& settings);

// As JSON has them (docs/settings.md); of dense attention nothing but its name, since it has no others.
nlohmann::ordered_json SettingsObject(const LayerSettings& settings);

// A way to attend, and the other names of it that were asked for.
struct NamedAttention {
  std::string name;
  LayerSettings attention;  // as Canonical() gives it
  std::vector<std::string> same;
};
// Equal settings are one entry, by the first of their names: they would be measured twice for the same numbers.
void AddDistinct(const std::string& name, const LayerSettings& attention, std::vector<NamedAttention>* all);
// "auto is the same as dense" for each name that was left out.
std::vector<std::string> SameInWords(const std::vector<NamedAttention>& all);

}  // namespace phsa

#endif  // PHSA_EVAL_SETTINGS_TEXT_H_
