#ifndef PHSA_MODEL_DISTINCT_SETTINGS_H_
#define PHSA_MODEL_DISTINCT_SETTINGS_H_

#include <cstdint>
#include <vector>

#include "attention/policies.h"
#include "io/model_config.h"
#include "phsa/settings.h"

namespace phsa {

// How one layer of a model attends under these settings: a layer with a window keeps it and chooses nothing.
inline const Settings& SettingsOfLayer(const ModelConfig& config, const LayerSettings& settings, int32_t layer) {
  static const Settings dense = DenseSettings();
  return config.Layer(layer).window > 0 ? dense : settings.ForLayer(layer);
}

// The ways in which a model's layers attend, each once: layers that are read alike share a plan.
struct DistinctSettings {
  DistinctSettings(const LayerSettings& settings, const ModelConfig& config) {
    for (int32_t layer = 0; layer < config.num_layers; ++layer) {
      const Settings& own = SettingsOfLayer(config, settings, layer);
      const int32_t window = config.Layer(layer).window;
      size_t i = 0;
      while (i < all.size() && !(*all[i] == own && windows[i] == window)) ++i;
      of_layer.push_back(i);
      if (i < all.size()) continue;
      all.push_back(&own);
      windows.push_back(window);
    }
  }
  std::vector<const Settings*> all;
  std::vector<int32_t> windows;  // as `all`; 0: no limit
  std::vector<size_t> of_layer;
};

}  // namespace phsa

#endif  // PHSA_MODEL_DISTINCT_SETTINGS_H_
