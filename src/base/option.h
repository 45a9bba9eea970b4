// Options and settings in messages. A library does not know what its user calls them: it names the option, and the
// front end that shows the message spells it, as a flag (--kv-type bf16), an argument (kv_type="bf16") or a key.
//
//   ThrowInvalid("{} is {}; allowed: f32, f16", Option{"kv_type"}, Quoted(name));
//   ThrowInvalid("it does not fit; {} needs less", Option{"weights", "int8"});
#ifndef PHSA_BASE_OPTION_H_
#define PHSA_BASE_OPTION_H_

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "phsa/error.h"

namespace phsa {

struct Option {
  std::string_view name;        // "kv_type"
  std::string_view value = {};  // empty: the option as such
};

// One of the attention's settings (docs/settings.md): the sampler has a top_k, too.
struct Setting {
  std::string_view name;
  std::string_view value = {};
};
inline constexpr char kSettingSign = '.';  // what its name begins with where options are spelt

// An option in a text that is yet to be spelt: what fmt writes for the two above.
std::string Marked(const Option& option);
std::string Marked(const Setting& setting);
// Such a text with its options as `spell` writes them.
std::string SpellOptions(std::string_view text, const OptionSpeller& spell);

}  // namespace phsa

template <>
struct fmt::formatter<phsa::Option> : fmt::formatter<std::string_view> {
  template <class Context>
  auto format(const phsa::Option& option, Context& context) const {
    return fmt::formatter<std::string_view>::format(phsa::Marked(option), context);
  }
};

template <>
struct fmt::formatter<phsa::Setting> : fmt::formatter<std::string_view> {
  template <class Context>
  auto format(const phsa::Setting& setting, Context& context) const {
    return fmt::formatter<std::string_view>::format(phsa::Marked(setting), context);
  }
};

#endif  // PHSA_BASE_OPTION_H_
