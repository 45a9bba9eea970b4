#ifndef PHSA_MODEL_DISTINCT_SETTINGS_H_
#define PHSA_MODEL_DISTINCT_SETTINGS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "phsa/settings.h"

namespace phsa {

// The settings that a model's layers have, each once: layers that are read alike share a plan.
struct DistinctSettings {
  DistinctSettings(const LayerSettings& settings, int32_t num_layers) {
    for (int32_t layer = 0; layer < num_layers; ++layer) {
      const Settings& own = settings.ForLayer(layer);
      const auto known = std::find_if(all.begin(), all.end(), [&](const Settings* other) { return *other == own; });
      of_layer.push_back(static_cast<size_t>(known - all.begin()));
      if (known == all.end()) all.push_back(&own);
    }
  }
  std::vector<const Settings*> all;
  std::vector<size_t> of_layer;
};

}  // namespace phsa

#endif  // PHSA_MODEL_DISTINCT_SETTINGS_H_
