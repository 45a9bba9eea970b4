// Where a model runs: on the CPU, or on a GPU.
#ifndef PHSA_ENGINE_DEVICE_CHOICE_H_
#define PHSA_ENGINE_DEVICE_CHOICE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "io/model_source.h"
#include "model/backend.h"
#include "phsa/settings.h"

namespace phsa {

inline constexpr const char* kDeviceNames = "auto, cpu, cuda, cuda:0, cuda:1, …";

struct DeviceChoice {
  int32_t device = PHSA_DEVICE_CPU;  // phsa_device
  int32_t index = 0;                 // which GPU
  std::string note;                  // one line for the user where it is not the device that was asked for; or empty
};

// What of the engine's options decides whether a GPU can run the model.
struct DeviceNeeds {
  WeightsMode weights = WeightsMode::kAuto;
  std::optional<int32_t> kv_dtype;
  const LayerSettings& attention;
};

// `name`: auto takes a GPU where there is one that can run the model so; cuda and cuda:N ask for one, and get the CPU,
// with a note, where there is none. Throws phsa::Error for other names, for a GPU that is not among those there are,
// and where cuda was asked for and cannot run the model so.
DeviceChoice ChooseDevice(std::string_view name, const ModelSource& source, const DeviceNeeds& needs);

// Why the device's attention cannot read the model so; empty: it can. Throws phsa::Error where none can.
std::string UnsupportedAttention(const LayerSettings& attention, const ModelConfig& config, int32_t kv_dtype,
                                 int32_t device);

// The type of the KV cache where nobody says: f32 with f32 weights, else the 16-bit type that the device multiplies.
int32_t DefaultKvType(WeightsMode weights, int32_t device);

}  // namespace phsa

#endif  // PHSA_ENGINE_DEVICE_CHOICE_H_
