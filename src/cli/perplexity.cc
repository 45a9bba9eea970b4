// `phsa perplexity`: how well the model predicts a text.
#include "eval/perplexity.h"
#include "attention/policies.h"

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "cli/budget_json.h"
#include "cli/commands.h"
#include "cli/model_command.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "eval/query_blocks.h"
#include "eval/recall.h"

namespace phsa::cli {
namespace {

struct PerplexityFlags {
  ModelFlags model;
  AttentionFlags attention;
  std::string file;
  bool json = false, top_tokens = false, recall = false;
};

using Json = nlohmann::json;

Json OrNull(const std::optional<double>& value) { return value ? Json(*value) : Json(); }

std::string OrDash(const std::optional<double>& value) { return value ? fmt::format("{:.4f}", *value) : "-"; }

// recall, recall_by_layer, recall_by_kv_head ([layer][kv head]); and the same with "sparse".
void AddRecall(const RecallMeter& meter, const std::string& name, RecallMeter::Mean RecallMeter::Part::*which,
               Json* line) {
  Json layers = Json::array(), heads = Json::array();
  for (int32_t layer = 0; layer < meter.num_layers(); ++layer) {
    layers.push_back(OrNull((meter.layer(layer).*which).value()));
    Json row = Json::array();
    for (int32_t head = 0; head < meter.num_kv_heads(); ++head) {
      row.push_back(OrNull((meter.head(layer, head).*which).value()));
    }
    heads.push_back(std::move(row));
  }
  (*line)[name] = OrNull((meter.total().*which).value());
  (*line)[name + "_by_layer"] = std::move(layers);
  (*line)[name + "_by_kv_head"] = std::move(heads);
}

void PrintJson(const PerplexityFlags& flags, const Engine& engine, const PerplexityResult& result,
               const RecallMeter* recall) {
  const LayerSettings& attention = engine.options().attention;
  Json line = {{"ppl", result.perplexity()},
               {"loss", result.loss},
               {"tokens", result.tokens},
               {"attention", Name(attention.base.policy)},
               {"read_share", result.tokens_read.share()},
               {"sparsity", BudgetSparsity(attention, engine.config().num_layers, result.tokens)},
               {"weights", engine.memory().weight_types},
               {"kv_type", engine.memory().kv_type},
               {"device", engine.device_name()},
               {"seconds", result.seconds}};
  AddBudget(attention.base, &line);
  if (recall != nullptr) {
    AddRecall(*recall, "recall", &RecallMeter::Part::all, &line);
    AddRecall(*recall, "recall_sparse", &RecallMeter::Part::sparse, &line);
  }
  if (flags.top_tokens) line["top_tokens"] = result.top_tokens;
  WriteOut(line.dump() + "\n");
}

void PrintHeader(const PerplexityFlags& flags, const Engine& engine, size_t tokens) {
  WriteOut(fmt::format("{}, {} weights, {} cache, {} tokens\n\n", engine.config().name, engine.memory().weight_types,
                       engine.memory().kv_type, tokens));
  WriteOut(fmt::format("| attention | K | perplexity | loss |{} read share | sparsity | tokens/s |\n",
                       flags.recall ? " recall | recall, sparse queries |" : ""));
  WriteOut(fmt::format("|---|---|---|---|{}---|---|---|\n", flags.recall ? "---|---|" : ""));
}

void PrintRow(const Engine& engine, const PerplexityResult& result, const RecallMeter* recall) {
  const LayerSettings& attention = engine.options().attention;
  const Policy policy = attention.base.policy;
  std::string cells =
      fmt::format("| {} | {} | {:.4f} | {:.6f} |", Name(policy),
                  Chooses(policy) ? fmt::format("{}", attention.base.top_k) : "-", result.perplexity(), result.loss);
  if (recall != nullptr) {
    const RecallMeter::Part total = recall->total();
    cells += fmt::format(" {} | {} |", OrDash(total.all.value()), OrDash(total.sparse.value()));
  }
  WriteOut(cells + fmt::format(" {:.1f} % | {:.1f} % | {:.0f} |\n", 100 * result.tokens_read.share(),
                               100 * BudgetSparsity(attention, engine.config().num_layers, result.tokens),
                               result.tokens / result.seconds));
}

void RunPerplexity(const PerplexityFlags& flags) {
  const std::string text = ReadText(flags.file);
  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model, flags.model.adapter);
  Tokenizer tokenizer = LoadTokenizer(*source);
  std::vector<int32_t> tokens = tokenizer.Encode(text, SpecialTokens::kAsText);
  // Gemma without its begin token is another model.
  if (tokenizer.add_bos() && tokenizer.bos() >= 0) tokens.insert(tokens.begin(), tokenizer.bos());
  const int32_t context = flags.model.context > 0 ? flags.model.context : source->config().context;
  if (context < 2) ThrowInvalid("perplexity: -c is {}; it needs at least 2 tokens", context);
  if (tokens.size() < static_cast<size_t>(context)) {
    ThrowInvalid("perplexity: the text has {} tokens, -c asks for {}; give a longer text or a smaller -c",
                 tokens.size(), context);
  }
  tokens.resize(static_cast<size_t>(context));
  const std::vector<LayerSettings> policies = AttentionSettings(flags.attention, source->config(), context);
  WarnPastTested(source->config(), tokens.size());
  ModelFlags model = flags.model;
  model.context = context;
  const std::unique_ptr<Engine> engine = OpenEngine(std::move(source), std::move(tokenizer), model, policies.front());
  LoadEngine(*engine);
  if (!flags.json) PrintHeader(flags, *engine, tokens.size());
  for (const LayerSettings& attention : policies) {
    engine->SetAttention(attention);
    std::optional<RecallMeter> recall;
    if (flags.recall) recall.emplace(engine->config(), engine->cache().layout().kv_type);
    RecallMeter* const meter = recall ? &*recall : nullptr;
    ProgressBar bar("prefill");
    const PerplexityResult result = Perplexity(*engine, tokens, PrefillCallbacks(bar), meter);
    bar.Clear();
    ThrowIfInterrupted();
    if (flags.json) {
      PrintJson(flags, *engine, result, meter);
    } else {
      PrintRow(*engine, result, meter);
    }
  }
}

}  // namespace

void AddPerplexityCommand(CLI::App& app) {
  CLI::App* const command =
      app.add_subcommand("perplexity", "how well the model predicts the first -c tokens of a text, read as one window");
  const auto flags = FlagsWithModel<PerplexityFlags>(*command);
  command->add_option("-f,--file", flags->file, "the text; - for standard input")->required();
  command->add_flag("--json", flags->json, "one JSON object a line");
  command->add_flag("--recall", flags->recall,
                    "the share of dense attention's mass that queries read; takes the time of dense attention");
  command->add_flag("--top-tokens", flags->top_tokens, "with --json: the most likely token at each position");
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags] { RunPerplexity(*flags); });
}

}  // namespace phsa::cli
