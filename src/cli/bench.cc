// `phsa bench`: speed of prefill (pp) and decode (tg), at several lengths and depths.
#include <algorithm>

#include "attention/policies.h"
#include "base/errors.h"
#include "cli/budget_json.h"
#include "cli/commands.h"
#include "cli/model_command.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "eval/speed.h"

namespace phsa::cli {
namespace {

constexpr int32_t kMaxCacheTokens = 1 << 30;
constexpr int32_t kMaxBatch = 512;  // a step has as many rows, unless --chunk says otherwise

struct BenchFlags {
  ModelFlags model;
  AttentionFlags attention;
  std::vector<std::string> prompts = {"512"}, generates = {"32"}, depths = {"0"};
  std::vector<int32_t> batches = {1};
  std::string text;
  int32_t repeats = 3;
  bool json = false, profile = false;
};

std::vector<int32_t> Lengths(const std::vector<std::string>& texts, const char* flag) {
  std::vector<int32_t> lengths;
  lengths.reserve(texts.size());
  for (const std::string& text : texts) lengths.push_back(TokenCount(text, flag, 0));
  return lengths;
}

void Print(const BenchFlags& flags, Engine& engine, const SpeedRow& row) {
  const Settings& settings = engine.options().attention.base;
  const double known = row.times.products + row.times.attention + row.times.other + row.times.selection;
  if (flags.json) {
    nlohmann::ordered_json line = {{"model", engine.config().name}, {"attention", Name(settings.policy)}};
    AddBudget(settings, &line);
    line.update(SpeedToJson(row));
    line.update({{"weights", engine.memory().weight_types},
                 {"kv_type", engine.memory().kv_type},
                 {"threads", engine.threads().num_threads()},
                 {"device", engine.device_name()}});
    if (!flags.text.empty()) line["text"] = flags.text;
    if (flags.profile) {
      line["share"] = {{"products", row.times.products / known},
                       {"selection", row.times.selection / known},
                       {"attention", row.times.attention / known},
                       {"other", row.times.other / known}};
    }
    WriteOut(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    return;
  }
  std::string cells = fmt::format("| {} | {} | {}{} | {} | {} | {:.1f} | {:.1f} |", Name(settings.policy),
                                  Chooses(settings.policy) ? fmt::format("{}", settings.top_k) : "-", Name(row.test),
                                  row.tokens, row.depth, row.batch, row.best(), row.mean());
  if (flags.profile) {
    for (const double seconds : {row.times.products, row.times.selection, row.times.attention, row.times.other}) {
      cells += fmt::format(" {:.0f} % |", 100 * seconds / known);
    }
  }
  WriteOut(cells + "\n");
}

void RunBench(const BenchFlags& flags) {
  const std::vector<int32_t> prompts = Lengths(flags.prompts, "bench: -p"),
                             generates = Lengths(flags.generates, "bench: -n"),
                             depths = Lengths(flags.depths, "bench: -d");
  const int32_t largest_batch = *std::max_element(flags.batches.begin(), flags.batches.end());
  int32_t context = 0;
  int64_t cache_tokens = 0;
  for (const int32_t depth : depths) {
    for (const int32_t tokens : prompts) context = std::max(context, depth + tokens);
    for (const int32_t tokens : generates) {
      context = std::max(context, depth + tokens);
      const auto pages = static_cast<int64_t>(PagesFor(static_cast<size_t>(depth) + static_cast<size_t>(tokens)));
      cache_tokens = std::max(cache_tokens, pages * kPageTokens * largest_batch);
    }
  }
  if (flags.model.chunk > 0 && largest_batch > flags.model.chunk) {
    ThrowInvalid("bench: --batch has {}, and a step --chunk {} tokens; give fewer, or a larger --chunk", largest_batch,
                 flags.model.chunk);
  }
  if (context == 0) ThrowInvalid("bench: nothing to measure; give -p, -n or both");
  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model, flags.model.adapter);
  if (context > source->config().context) {
    ThrowInvalid("bench: the largest depth and length make {} tokens; the model's context is {}", context,
                 source->config().context);
  }
  ModelFlags model = flags.model;
  model.context = std::max(model.context, context);
  if (cache_tokens > kMaxCacheTokens) {
    ThrowInvalid("bench: --batch {} needs {} tokens of KV cache; allowed: {}", largest_batch, cache_tokens,
                 kMaxCacheTokens);
  }
  model.cache_tokens = std::max(model.context, static_cast<int32_t>(cache_tokens));
  const std::vector<LayerSettings> policies = AttentionSettings(flags.attention, source->config(), context);
  Tokenizer tokenizer = LoadTokenizer(*source);
  std::vector<int32_t> text;
  if (!flags.text.empty()) {
    text = tokenizer.Encode(ReadText(flags.text), SpecialTokens::kAsText);
    if (text.empty()) ThrowInvalid("bench: {} has no text", flags.text);
  }
  const std::unique_ptr<Engine> engine = OpenEngine(std::move(source), std::move(tokenizer), model, policies.front());
  LoadEngine(*engine);
  if (!flags.json) {
    WriteOut(fmt::format("{}, {}, {} weights, {} cache, {} threads; tokens/s\n\n", engine->config().name,
                         engine->device_name(), engine->memory().weight_types, engine->memory().kv_type,
                         engine->threads().num_threads()));
    WriteOut(
        fmt::format("| attention | K | test | depth | batch | best of {} | mean |{}\n|---|---|---|---|---|---|---|{}\n",
                    flags.repeats, flags.profile ? " products | selection | attention | other |" : "",
                    flags.profile ? "---|---|---|---|" : ""));
  }
  for (const LayerSettings& attention : policies) {
    engine->SetAttention(attention);
    engine->decoder().TimeStages(flags.profile);
    GenerateCallbacks callbacks;
    callbacks.stop = WasInterrupted;
    SpeedMeter meter(*engine, callbacks, text);
    for (const int32_t depth : depths) {
      for (const int32_t tokens : prompts) {
        if (tokens == 0) continue;
        const std::vector<SpeedRow> rows = meter.Prefill(depth, {&tokens, 1}, flags.repeats);
        ThrowIfInterrupted();
        Print(flags, *engine, rows.front());
      }
      for (const int32_t tokens : generates) {
        for (const int32_t batch : flags.batches) {
          if (tokens == 0) continue;
          const SpeedRow row = meter.Decode(depth, tokens, flags.repeats, batch);
          ThrowIfInterrupted();
          Print(flags, *engine, row);
        }
      }
    }
  }
}

}  // namespace

void AddBenchCommand(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("bench", "speed of prefill (pp) and decode (tg) at lengths and depths");
  const auto flags = FlagsWithModel<BenchFlags>(*command);
  command->add_option("-p,--n-prompt", flags->prompts, "tokens of a prefill: 512,8k; 0: none")->delimiter(',');
  command->add_option("-n,--n-gen", flags->generates, "tokens to decode: 32; 0: none")->delimiter(',');
  command->add_option("-d,--n-depth", flags->depths, "tokens that are in the cache before: 0,8000")->delimiter(',');
  command->add_option("-b,--batch", flags->batches, "texts that are decoded at once: 1,16; prefill is one text's")
      ->delimiter(',')
      ->check(CLI::Range(1, kMaxBatch));
  command->add_option("-f,--file", flags->text,
                      "a text to prefill, again and again where it is too short; without: random tokens");
  command->add_option("-r,--repetitions", flags->repeats, "how often each is measured")->check(CLI::Range(1, 1000));
  command->add_flag("--json", flags->json, "JSON lines instead of a markdown table");
  command->add_flag("--profile", flags->profile,
                    "the shares of products, selection, attention (decode on a GPU: both in one) and the rest; takes a "
                    "little longer");
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags] { RunBench(*flags); });
}

}  // namespace phsa::cli
