#include "engine/device_choice.h"

#include <charconv>
#include <vector>

#include "base/errors.h"
#include "model/cuda/cuda_backend.h"
#include "model/distinct_settings.h"

namespace phsa {
namespace {

// The N of cuda:N; none for cuda alone and for what names no GPU.
struct DeviceName {
  bool cpu = false, cuda = false, automatic = false;
  std::optional<int32_t> index;
};

DeviceName Parse(std::string_view name) {
  DeviceName out;
  out.automatic = name == "auto";
  out.cpu = name == "cpu";
  out.cuda = name == "cuda";
  constexpr std::string_view kPrefix = "cuda:";
  if (name.starts_with(kPrefix)) {
    const std::string_view digits = name.substr(kPrefix.size());
    int32_t index = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    if (error == std::errc{} && end == digits.data() + digits.size() && index >= 0) {
      out.cuda = true;
      out.index = index;
    }
  }
  if (!out.automatic && !out.cpu && !out.cuda)
    ThrowInvalid("{} is {}; allowed: {}", Option{"device"}, Quoted(name), kDeviceNames);
  return out;
}

// Why a GPU cannot run the model so; empty: it can.
std::string Unsupported(const ModelSource& source, const DeviceNeeds& needs) {
  BackendOptions options;
  options.weights = needs.weights;
  options.kv_dtype = needs.kv_dtype.value_or(DefaultKvType(needs.weights, PHSA_DEVICE_CUDA));
  std::string why = cuda::Unsupported(source, options);
  if (!why.empty()) return why;
  return UnsupportedAttention(needs.attention, source.config(), options.kv_dtype, PHSA_DEVICE_CUDA);
}

}  // namespace

int32_t DefaultKvType(WeightsMode weights, int32_t device) {
  if (device == PHSA_DEVICE_CUDA) return PHSA_BF16;
  if (weights == WeightsMode::kF32) return PHSA_F32;
  return FastProducts().bf16 ? PHSA_BF16 : PHSA_F16;
}

std::string UnsupportedAttention(const LayerSettings& attention, const ModelConfig& config, int32_t kv_dtype,
                                 int32_t device) {
  const DistinctSettings distinct(attention, config);
  for (size_t i = 0; i < distinct.all.size(); ++i) {
    PlanDesc desc = PagedPlan(config, *distinct.all[i], kv_dtype);
    desc.window = distinct.windows[i];
    const int32_t tokens = kPageTokens;
    desc.num_seqs = 1;
    desc.q_lens = desc.kv_lens = &tokens;
    const Plan plain(desc);  // what is wrong with the settings is so on every device
    if (device == PHSA_DEVICE_CPU) continue;
    desc.device = device;
    try {
      const Plan plan(desc);
    } catch (const Error& error) {
      return error.message();
    }
  }
  return "";
}

DeviceChoice ChooseDevice(std::string_view name, const ModelSource& source, const DeviceNeeds& needs) {
  const DeviceName asked = Parse(name);
  DeviceChoice choice;
  if (asked.cpu) return choice;
  if (const std::string why = cuda::Unavailable(); !why.empty()) {
    if (asked.cuda)
      Throw(PHSA_UNSUPPORTED, "{}: {}; {} runs the model on the CPU", Option{"device", name}, why,
            Option{"device", "auto"});
    return choice;
  }
  const size_t devices = cuda::Devices().size();
  if (asked.index && static_cast<size_t>(*asked.index) >= devices) {
    ThrowInvalid("{} is {}; the GPUs here are cuda:0 to cuda:{}", Option{"device"}, Quoted(name), devices - 1);
  }
  if (const std::string why = Unsupported(source, needs); !why.empty()) {
    if (asked.cuda) Throw(PHSA_UNSUPPORTED, "{}: {}; {} runs it", Option{"device", name}, why, Option{"device", "cpu"});
    choice.note = fmt::format("device: the CPU, as the GPU cannot run this: {}", why);
    return choice;
  }
  choice.device = PHSA_DEVICE_CUDA;
  choice.index = asked.index.value_or(0);
  return choice;
}

}  // namespace phsa
