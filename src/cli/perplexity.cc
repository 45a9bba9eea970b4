// `phsa perplexity`: how well the model predicts a text.
#include "eval/perplexity.h"

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"

namespace phsa::cli {
namespace {

struct PerplexityFlags {
  ModelFlags model;
  AttentionFlags attention;
  std::string file;
  bool json = false, top_tokens = false;
};

void RunPerplexity(const PerplexityFlags& flags) {
  const std::string text = ReadText(flags.file);
  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model);
  Tokenizer tokenizer = LoadTokenizer(*source);
  std::vector<int32_t> tokens = tokenizer.Encode(text, SpecialTokens::kAsText);
  const int32_t context = flags.model.context > 0 ? flags.model.context : source->config().context;
  if (context < 2) ThrowInvalid("perplexity: -c is {}; it needs at least 2 tokens", context);
  if (tokens.size() < static_cast<size_t>(context)) {
    ThrowInvalid("perplexity: the text has {} tokens, -c asks for {}; give a longer text or a smaller -c",
                 tokens.size(), context);
  }
  tokens.resize(static_cast<size_t>(context));
  const std::vector<LayerSettings> policies = AttentionSettings(flags.attention, source->config(), context);
  ModelFlags model = flags.model;
  model.context = context;
  const std::unique_ptr<Engine> engine = OpenEngine(std::move(source), std::move(tokenizer), model, policies.front());
  LoadEngine(*engine);
  for (const LayerSettings& attention : policies) {
    engine->SetAttention(attention);
    ProgressBar bar("reading");
    const PerplexityResult result = Perplexity(*engine, tokens, PrefillCallbacks(bar));
    bar.Clear();
    ThrowIfInterrupted();
    const Settings& settings = attention.base;
    if (flags.json) {
      nlohmann::json line = {{"ppl", result.perplexity()},
                             {"loss", result.loss},
                             {"tokens", result.tokens},
                             {"attention", Name(settings.policy)},
                             {"top_k", settings.top_k},
                             {"lambda", settings.lambda},
                             {"weights", engine->plan().weight_types},
                             {"kv_type", engine->plan().kv_type},
                             {"seconds", result.seconds}};
      if (flags.top_tokens) line["top_tokens"] = result.top_tokens;
      WriteOut(line.dump() + "\n");
    } else {
      WriteOut(fmt::format("{}: perplexity {:.4f} (loss {:.6f}) over {} tokens, {:.0f} tokens/s\n",
                           Name(settings.policy), result.perplexity(), result.loss, result.tokens,
                           result.tokens / result.seconds));
    }
  }
}

}  // namespace

void AddPerplexityCommand(CLI::App& app) {
  CLI::App* const command =
      app.add_subcommand("perplexity", "how well the model predicts the first -c tokens of a text, read as one window");
  auto flags = std::make_shared<PerplexityFlags>();
  AddModelFlags(*command, flags->model);
  command->add_option("-f,--file", flags->file, "the text; - for standard input")->required();
  command->add_flag("--json", flags->json, "one JSON object a line");
  command->add_flag("--top-tokens", flags->top_tokens, "with --json: the most likely token at each position");
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags] { RunPerplexity(*flags); });
}

}  // namespace phsa::cli
