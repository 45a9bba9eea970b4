// `phsa inspect`: which blocks of a text the attention read.
#include "eval/inspect.h"
#include "attention/policies.h"

#include <optional>

#include "base/errors.h"
#include "base/new_file.h"
#include "cli/commands.h"
#include "cli/model_command.h"
#include "cli/options.h"
#include "cli/prompt.h"
#include "cli/terminal.h"
#include "eval/inspect_html.h"
#include "eval/inspect_report.h"

namespace phsa::cli {
namespace {

// A page with more queries is one that no browser opens: each takes 15 KB for 30 layers with 3 KV heads and K = 16.
constexpr int32_t kMostQueries = 1000;

struct InspectFlags {
  ModelFlags model;
  PromptFlags prompt;
  AttentionFlags attention;
  std::optional<int32_t> answer;
  int32_t last = 1;
  std::string html;
  bool json = false;
};

LayerSettings Attention(const InspectFlags& flags, const ModelConfig& config, int32_t context) {
  AttentionFlags attention = flags.attention;
  const bool is_auto = attention.policies == std::vector<std::string>{"auto"};
  if (is_auto && config.phsa_settings.empty() && attention.config_file.empty()) {
    attention.policies = {Name(kOwnPolicy)};
    Note("attention: {}, as the model carries no settings and dense attention chooses nothing", Name(kOwnPolicy));
  }
  const std::vector<LayerSettings> all = AttentionSettings(attention, config, context);
  if (all.size() != 1) ThrowInvalid("inspect: one --attention and one -K; `phsa perplexity --recall` takes lists");
  if (IsDense(all.front(), config.num_layers)) {
    ThrowInvalid("inspect: dense attention reads everything, so there is no choice to show; give --attention {}",
                 PolicyNames(IsSparse, " or "));
  }
  return all.front();
}

void RunInspect(const InspectFlags& flags) {
  // Opened before any work: a wrong path is not told after minutes of reading.
  std::optional<NewFile> page;
  if (!flags.html.empty()) page.emplace(flags.html);
  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model, flags.model.adapter);
  Tokenizer tokenizer = LoadTokenizer(*source);
  const std::vector<int32_t> prompt = PromptTokens(flags.prompt, *source, tokenizer);
  if (static_cast<size_t>(flags.last) > prompt.size()) {
    ThrowInvalid("inspect: --last is {}; the prompt has {} tokens", flags.last, prompt.size());
  }
  ModelFlags model = flags.model;
  if (model.context == 0) {
    // Without -n as `run` without -n, so that the same preset applies.
    const int32_t answer = std::max(1, flags.answer.value_or(SamplingFlags{}.max_tokens));
    model.context = ContextFor(prompt.size(), answer, source->config());
  }
  const LayerSettings attention = Attention(flags, source->config(), model.context);
  WarnPastTested(source->config(), prompt.size());
  SamplingFlags greedy;
  greedy.temperature = 0;
  greedy.seed = 0;
  greedy.allow_loops = true;
  GenerateOptions options = SamplingOptions(greedy, source->config());
  options.max_tokens = flags.answer.value_or(0);
  const std::unique_ptr<Engine> engine = OpenEngine(std::move(source), std::move(tokenizer), model, attention);
  LoadEngine(*engine);

  ProgressBar bar("prefill");
  const Inspection inspection = Inspect(*engine, prompt, flags.last, options, PrefillCallbacks(bar));
  bar.Clear();
  ThrowIfInterrupted();
  if (page) {
    page->Write(InspectionHtml(inspection));
    page->Keep();
  }
  WriteOut(flags.json ? InspectionJson(inspection) + "\n" : InspectionText(inspection));
  const GenerateResult& result = inspection.result;
  Note("{} prompt tokens in {}; {} tokens of answer in {}; peak memory {}", result.prompt_tokens,
       DurationInWords(result.prefill_seconds), result.tokens.size(), DurationInWords(result.decode_seconds),
       BytesInWords(PeakMemoryBytes()));
  if (const TokensRead read = inspection.Read(); read.read == read.dense) {
    Note(
        "nothing was left out: the text has no more candidates than K, or lies below dense_below; a longer text or "
        "a smaller -K, --init and --local leave a choice");
  }
  if (page) Note("{}: open it in a browser", flags.html);
}

}  // namespace

void AddInspectCommand(CLI::App& app) {
  CLI::App* const command =
      app.add_subcommand("inspect", "shows which blocks of a text the attention read, and how much it missed");
  const auto flags = FlagsWithModel<InspectFlags>(*command);
  AddPromptFlags(*command, flags->prompt);
  command->add_option("--last", flags->last, "the prompt's last tokens whose choices are shown")
      ->check(CLI::Range(1, kMostQueries));
  command
      ->add_option("-n,--predict", flags->answer,
                   "tokens of answer, always the most likely ones, whose choices are shown as well")
      ->check(CLI::Range(0, kMostQueries));
  command->add_flag("--json", flags->json, "one JSON object with everything instead of tables");
  command->add_option("--html", flags->html, "a file for a page that shows the choice over the text");
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags] { RunInspect(*flags); });
}

}  // namespace phsa::cli
