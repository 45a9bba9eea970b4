// `phsa plan`: what serving a model to long texts takes of each GPU, densely and sparsely. Reads headers, no weights.
#include <memory>
#include <nlohmann/json.hpp>

#include "attention/policies.h"
#include "base/dtype.h"
#include "base/errors.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "engine/serving_needs.h"
#include "model/kv_cache.h"

namespace phsa::cli {
namespace {

using Json = nlohmann::ordered_json;

struct PlanFlags {
  std::string model, kv_type = "bf16", weights = "bf16";
  int32_t context = 0, gpus = 1, pipeline = 1;
  double memory = 80, utilization = 0.9, reserved = 3;
  bool json = false;
  AttentionFlags attention;
};

Json ToJson(const ServingNeeds& needs) {
  return {{"weights", needs.weights},
          {"key_values", needs.key_values},
          {"representatives", needs.representatives},
          {"read_key_values", needs.read_key_values},
          {"read_representatives", needs.read_representatives},
          {"texts", needs.texts}};
}

void RunPlan(const PlanFlags& flags) {
  if (flags.gpus < 1 || flags.pipeline < 1 || flags.gpus % flags.pipeline != 0) {
    ThrowInvalid("--gpus is {} and --pipeline {}; allowed: --gpus a multiple of --pipeline", flags.gpus,
                 flags.pipeline);
  }
  if (!(flags.memory > 0) || !(flags.utilization > 0) || flags.utilization > 1 || !(flags.reserved >= 0) ||
      flags.memory > 1e6) {
    ThrowInvalid("--memory is {}, --utilization {} and --reserved {}; allowed: GB of a GPU, 0 to 1, and GB",
                 flags.memory, flags.utilization, flags.reserved);
  }
  const auto source = OpenModel(flags.model);
  const ModelConfig& config = source->config();
  ServingOptions options;
  options.context = flags.context > 0 ? flags.context : config.context;
  options.pipeline = flags.pipeline;
  options.tensor = flags.gpus / flags.pipeline;
  options.memory = static_cast<uint64_t>(flags.memory * flags.utilization * 1e9);
  options.reserved = static_cast<uint64_t>(flags.reserved * 1e9);
  options.kv_dtype = KvTypeFromName(flags.kv_type);
  options.weight_dtype = KvTypeFromName(flags.weights);
  const LayerSettings attention = AttentionSettings(flags.attention, config, options.context).front();
  const LayerSettings dense{DenseSettings(), {}};
  const ServingNeeds full = NeedsOfServing(*source, dense, options),
                     sparse = NeedsOfServing(*source, attention, options);
  const uint64_t full_read = full.read_key_values, sparse_read = sparse.read_key_values + sparse.read_representatives;
  if (flags.json) {
    Json out{{"model", config.name},     {"context", options.context},   {"gpus", flags.gpus},
             {"tensor", options.tensor}, {"pipeline", options.pipeline}, {"dense", ToJson(full)},
             {"sparse", ToJson(sparse)}};
    WriteOut(out.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
    return;
  }
  std::string out = fmt::format(
      "{}: {} layers, {} query and {} KV heads of {}; texts of {} tokens on {} GPU{} of {} GB (tensor {}, pipeline "
      "{})\n",
      config.name, config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim, options.context,
      flags.gpus, flags.gpus == 1 ? "" : "s", flags.memory, options.tensor, options.pipeline);
  const auto line = [&](const char* what, const std::string& a, const std::string& b) {
    out += fmt::format("{:<46} {:>12} {:>12}\n", what, a, b);
  };
  const auto bytes = [](uint64_t count) { return count == 0 ? std::string("0") : BytesInWords(count); };
  line("of each GPU (of the one that holds most)", "dense", Name(attention.base.policy));
  line("weights", bytes(full.weights), bytes(sparse.weights));
  line("keys and values of a text", bytes(full.key_values), bytes(sparse.key_values));
  line("representatives of a text", bytes(full.representatives), bytes(sparse.representatives));
  line("read of a text for its next token", bytes(full_read), bytes(sparse_read));
  line("texts that fit at once", fmt::format("{}", full.texts), fmt::format("{}", sparse.texts));
  if (full.texts > 0 && sparse.texts > 0) {
    const auto step = [&](const ServingNeeds& needs, uint64_t read) {
      return needs.weights + read * static_cast<uint64_t>(sparse.texts);
    };
    line(fmt::format("read for a token of each of {} texts, and weights", sparse.texts).c_str(),
         bytes(step(full, full_read)), bytes(step(sparse, sparse_read)));
  }
  WriteOut(out);
  Note("of {} GB a GPU {} are used, {} of them for activations and graphs (--memory, --utilization, --reserved)",
       flags.memory, BytesInWords(options.memory), BytesInWords(options.reserved));
}

}  // namespace

void AddPlanCommand(CLI::App& app) {
  CLI::App* const command =
      app.add_subcommand("plan", "what serving a model to long texts takes of each GPU, densely and sparsely");
  auto flags = std::make_shared<PlanFlags>();
  flags->attention.policies = {"phsa"};
  command
      ->add_option("-m,--model", flags->model,
                   "a .gguf file, a Hugging Face folder, or a name that `phsa models` lists")
      ->required();
  command->add_option("-c,--context", flags->context, "tokens of a text; 0: the model's");
  command->add_option("--gpus", flags->gpus, "GPUs of one copy of the model, which share heads and layers");
  command->add_option("--pipeline", flags->pipeline, "of them, groups that share the layers");
  command->add_option("--memory", flags->memory, "GB of a GPU");
  command->add_option("--utilization", flags->utilization, "share of it that may be used");
  command->add_option("--reserved", flags->reserved, "GB of that for activations and graphs");
  command->add_option("--weights", flags->weights, "type of the weights: bf16, f16, f32")
      ->check(CLI::IsMember({"bf16", "f16", "f32"}));
  command
      ->add_option("--kv-type", flags->kv_type, "type of keys and values: bf16, f16, f32, int8 (our engine on the CPU)")
      ->check(CLI::IsMember({"bf16", "f16", "f32", "int8"}));
  command->add_flag("--json", flags->json, "one JSON object, in bytes");
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags] { RunPlan(*flags); });
}

}  // namespace phsa::cli
