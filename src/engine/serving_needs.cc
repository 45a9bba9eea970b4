#include "engine/serving_needs.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/errors.h"
#include "base/option.h"
#include "model/distinct_settings.h"
#include "model/kv_cache.h"
#include "model/weights.h"

namespace phsa {
namespace {

// The layer of model.layers.7.…; -1: none.
int32_t LayerOf(std::string_view name) {
  constexpr std::string_view kLayers = "layers.";
  const size_t at = name.find(kLayers);
  int32_t layer = -1;
  if (at != std::string_view::npos) {
    const char* const begin = name.data() + at + kLayers.size();
    std::from_chars(begin, name.data() + name.size(), layer);
  }
  return layer;
}

void CheckShares(const ModelConfig& config, const ServingOptions& options) {
  const int32_t tensor = options.tensor;
  const auto shares = [&](int32_t gpus) {
    return config.num_q_heads % gpus == 0 && (config.num_kv_heads % gpus == 0 || gpus % config.num_kv_heads == 0);
  };
  std::vector<int32_t> allowed;
  for (int32_t gpus = 1; gpus <= config.num_q_heads; ++gpus) {
    if (shares(gpus)) allowed.push_back(gpus);
  }
  if (tensor < 1 || tensor > config.num_q_heads || !shares(tensor)) {
    ThrowInvalid("{} GPUs cannot share {} query heads and {} KV heads; allowed: {} (times the stages of {})", tensor,
                 config.num_q_heads, config.num_kv_heads, fmt::join(allowed, ", "), Option{"pipeline"});
  }
  if (options.pipeline < 1 || options.pipeline > config.num_layers) {
    ThrowInvalid("{} stages cannot share {} layers; allowed: 1 to {}", options.pipeline, config.num_layers,
                 config.num_layers);
  }
}

// The layers [first, end) of a stage as a model of its own, with one GPU's share of the heads.
struct Stage {
  int32_t first, end;
  ModelConfig config;
  LayerSettings attention;
};

Stage StageOf(const ModelConfig& whole, const LayerSettings& attention, const ServingOptions& options, int32_t index) {
  Stage out{whole.num_layers * index / options.pipeline, whole.num_layers * (index + 1) / options.pipeline, whole, {}};
  out.config.num_layers = out.end - out.first;
  out.config.num_q_heads /= options.tensor;
  out.config.num_kv_heads = std::max(1, whole.num_kv_heads / options.tensor);
  if (!whole.layers.empty()) {
    out.config.layers.assign(whole.layers.begin() + out.first, whole.layers.begin() + out.end);
  }
  const auto shared_out = [&](Settings settings) {
    // A list of lambdas has one for each KV head; the sizes do not depend on them.
    settings.head_lambda.clear();
    return settings;
  };
  out.attention.base = shared_out(attention.base);
  for (const auto& [layer, settings] : attention.layers) {
    if (layer >= out.first && layer < out.end) out.attention.layers[layer - out.first] = shared_out(settings);
  }
  return out;
}

uint64_t WeightsOf(const std::vector<ModelTensor>& tensors, const ModelConfig& config, const Stage& stage,
                   const ServingOptions& options) {
  const auto size = static_cast<uint64_t>(DtypeSize(options.weight_dtype));
  uint64_t bytes = 0;
  for (const ModelTensor& tensor : tensors) {
    const int32_t layer = LayerOf(tensor.name);
    const bool embeds = tensor.name.find("embed") != std::string::npos;
    const bool first = stage.first == 0, last = stage.end == config.num_layers;
    // Tied embeddings are the head as well, in the last stage.
    const bool here = layer >= 0 ? layer >= stage.first && layer < stage.end
                      : embeds   ? first || (last && config.tied_embeddings)
                                 : last;
    if (!here) continue;
    const uint64_t elements =
        static_cast<uint64_t>(std::max<int64_t>(1, tensor.rows)) * static_cast<uint64_t>(tensor.cols);
    // Matrices are shared out; keys' and values' have a copy each where there are more GPUs than KV heads.
    const bool keys =
        tensor.name.find("k_proj") != std::string::npos || tensor.name.find("v_proj") != std::string::npos;
    const int32_t shares = tensor.rows == 0 ? 1 : keys ? std::min(options.tensor, config.num_kv_heads) : options.tensor;
    bytes += elements * size / static_cast<uint64_t>(shares);
  }
  return bytes;
}

// Rounded up to whole pages.
uint64_t PagesOf(int64_t tokens) { return PagesFor(static_cast<size_t>(tokens)); }

}  // namespace

ServingNeeds NeedsOfServing(const ModelSource& source, const LayerSettings& attention, const ServingOptions& options) {
  const ModelConfig& config = source.config();
  CheckShares(config, options);
  const int32_t context = options.context > 0 ? options.context : config.context;
  const std::vector<ModelTensor> tensors = ModelTensors(source);
  ServingNeeds out;
  out.context = context;
  uint64_t most = 0;
  out.texts = INT64_MAX;
  for (int32_t index = 0; index < options.pipeline; ++index) {
    const Stage stage = StageOf(config, attention, options, index);
    const PageLayout layout(stage.config, stage.attention, options.kv_dtype);
    const auto layers = static_cast<uint64_t>(stage.config.num_layers);
    const uint64_t page_and_layer = layout.key_value_bytes / layers;
    ServingNeeds one;
    one.weights = WeightsOf(tensors, config, stage, options);
    for (int32_t layer = 0; layer < stage.config.num_layers; ++layer) {
      const int32_t window = stage.config.Layer(layer).window;
      const int64_t held = window > 0 ? std::min(context, window) : context;
      one.key_values += PagesOf(held) * page_and_layer;
      const PageLayout::Layer& place = layout.layers[static_cast<size_t>(layer)];
      const uint64_t row = static_cast<uint64_t>(place.rep_width) * static_cast<uint64_t>(stage.config.num_kv_heads) *
                           DtypeSize(layout.dtype);
      one.representatives += PagesOf(held) * static_cast<uint64_t>(place.rep_rows) * row;

      PlanDesc desc = PagedPlan(stage.config, SettingsOfLayer(stage.config, stage.attention, layer), options.kv_dtype);
      const int32_t query = 1;
      desc.num_seqs = 1;
      desc.q_lens = &query;
      desc.kv_lens = &context;
      desc.window = window;
      const Plan plan(desc);
      int64_t read = 0, all = 0;
      plan.TokensRead(nullptr, &read, &all);
      const int64_t tokens = read / stage.config.num_q_heads;
      one.read_key_values += static_cast<uint64_t>(tokens) * (page_and_layer / kPageTokens);
      if (plan.SelectionSlots() > 0) one.read_representatives += static_cast<uint64_t>(plan.NumReps()) * row;
    }
    const uint64_t text = one.key_values + one.representatives, fixed = one.weights + options.reserved;
    const uint64_t room = options.memory > fixed ? options.memory - fixed : 0;
    // A text has a part in every stage.
    out.texts = std::min(out.texts, static_cast<int64_t>(room / std::max<uint64_t>(1, text)));
    if (one.weights + text < most) continue;
    most = one.weights + text;
    one.context = context;
    one.texts = out.texts;
    out = one;
  }
  return out;
}

}  // namespace phsa
