// `phsa run`: one question, one answer.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "cli/budget_json.h"
#include "cli/commands.h"
#include "cli/model_command.h"
#include "cli/options.h"
#include "cli/prompt.h"
#include "cli/terminal.h"

namespace phsa::cli {
namespace {

struct RunFlags {
  ModelFlags model;
  AttentionFlags attention;
  SamplingFlags sampling;
  PromptCacheFlags prompt_cache;
  PromptFlags prompt;
  bool json = false;
};

void Run(const RunFlags& flags) {
  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model, flags.model.adapter);
  const GenerateOptions options = SamplingOptions(flags.sampling, source->config());
  Tokenizer tokenizer = LoadTokenizer(*source);
  const std::vector<int32_t> prompt = PromptTokens(flags.prompt, *source, tokenizer);
  // Only what this question needs, unless -c asks for more.
  ModelFlags model = flags.model;
  const int32_t needed = ContextFor(prompt.size(), options.max_tokens, source->config());
  const int32_t context = model.context > 0 ? model.context : needed;
  // Without an end to the answer it is the model's context, or what of it fits into memory.
  if (flags.sampling.max_tokens > 0) model.context = context;
  const std::vector<LayerSettings> attention = AttentionSettings(flags.attention, source->config(), context);
  if (attention.size() != 1) ThrowInvalid("run: one --attention and one -K; `phsa bench` takes lists");
  HintAtPhsa(flags.attention, attention.front(), prompt.size());
  WarnPastTested(source->config(), prompt.size());
  const std::unique_ptr<Engine> engine = OpenEngine(std::move(source), std::move(tokenizer), model, attention.front());
  LoadEngine(*engine);

  Session session(*engine);
  RestorePromptCache(flags.prompt_cache, session, prompt);
  ProgressBar bar("prefill");
  GenerateCallbacks callbacks = PrefillCallbacks(bar);
  callbacks.text = [&](std::string_view text) {
    bar.Clear();
    if (!flags.json) WriteOut(text);
  };
  const GenerateResult result = session.Generate(prompt, options, callbacks);
  bar.Clear();
  WarnPastTested(engine->config(), prompt.size() + result.tokens.size());
  const auto generated = static_cast<double>(result.tokens.size());
  // Of the prompt; not all of it where Ctrl-C came first.
  const int32_t prefilled = std::min(session.sequence().length(), result.prompt_tokens);
  const bool unread = prefilled < result.prompt_tokens;
  const double prefill_speed =
      result.prefill_seconds > 0 ? (prefilled - result.reused_tokens) / result.prefill_seconds : 0;
  const double decode_speed = result.decode_seconds > 0 && generated > 1 ? (generated - 1) / result.decode_seconds : 0;
  if (flags.json) {
    nlohmann::json line = {
        {"text", result.text},
        {"stop_reason", Name(result.reason)},
        {"prompt_tokens", result.prompt_tokens},
        {"prefilled_tokens", prefilled},
        {"reused_tokens", result.reused_tokens},
        {"tokens", result.tokens.size()},
        {"prefill_tokens_per_s", prefill_speed},
        {"decode_tokens_per_s", decode_speed},
        {"time_to_first_token_s", unread ? nlohmann::json(nullptr) : nlohmann::json(result.prefill_seconds)},
        {"attention", Name(attention.front().base.policy)},
        {"read_share", result.tokens_read.share()},
        {"peak_memory_bytes", PeakMemoryBytes()}};
    if (options.speculation != Speculation::kNone) {
      line["drafted_tokens"] = result.drafted_tokens;
      line["accepted_tokens"] = result.accepted_tokens;
    }
    AddBudget(attention.front().base, &line);
    WriteOut(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  } else if (unread) {
    Note("{} of {} prompt tokens{} at {:.0f}/s in {}; {}; {:.0f} % of the tokens read; peak memory {}", prefilled,
         result.prompt_tokens,
         result.reused_tokens > 0 ? fmt::format(", {} of them cached,", result.reused_tokens) : "", prefill_speed,
         DurationInWords(result.prefill_seconds), Name(result.reason), 100 * result.tokens_read.share(),
         BytesInWords(PeakMemoryBytes()));
  } else {
    WriteOut("\n");
    Note(
        "{} prompt tokens{} at {:.0f}/s, first token after {}; {} tokens at {:.1f}/s{}; {}; {:.0f} % of the tokens "
        "read; peak memory {}",
        result.prompt_tokens, result.reused_tokens > 0 ? fmt::format(", {} of them cached,", result.reused_tokens) : "",
        prefill_speed, DurationInWords(result.prefill_seconds), result.tokens.size(), decode_speed,
        options.speculation == Speculation::kNone
            ? ""
            : fmt::format(", {} of {} drafted ones right", result.accepted_tokens, result.drafted_tokens),
        Name(result.reason), 100 * result.tokens_read.share(), BytesInWords(PeakMemoryBytes()));
  }
  TellOfLoop(result);
  SavePromptCache(flags.prompt_cache, session);
  if (result.reason == StopReason::kInterrupted) throw Interrupted{};
}

}  // namespace

void AddRunCommand(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("run", "answers one question, about a text if one is given");
  const auto flags = FlagsWithModel<RunFlags>(*command);
  AddPromptFlags(*command, flags->prompt);
  command->add_flag("--json", flags->json, "one JSON object with the answer and its measurements");
  AddPromptCacheFlags(*command, flags->prompt_cache);
  AddSamplingFlags(*command, flags->sampling);
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags] { Run(*flags); });
}

}  // namespace phsa::cli
