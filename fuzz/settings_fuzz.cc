// Any text is either refused with phsa::Error or read into settings that are valid and survive being written and read.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "phsa/error.h"
#include "phsa/settings.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  phsa::LayerSettings settings;
  try {
    settings = phsa::SettingsFromJson(std::string_view(reinterpret_cast<const char*>(data), size));
  } catch (const phsa::Error&) {
    return 0;
  }
  // From here on nothing may throw.
  phsa::Validate(settings.base);
  for (const auto& [layer, layer_settings] : settings.layers) phsa::Validate(layer_settings);
  if (phsa::SettingsFromJson(phsa::SettingsToJson(settings)) != settings) std::abort();
  return 0;
}
