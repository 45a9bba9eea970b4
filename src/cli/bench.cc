// `phsa bench`: speed of reading (pp) and writing (tg), at several lengths and depths.
#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "base/errors.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"

namespace phsa::cli {
namespace {

struct BenchFlags {
  ModelFlags model;
  AttentionFlags attention;
  std::vector<std::string> prompts = {"512"}, generates = {"32"}, depths = {"0"};
  int32_t repeats = 3;
  bool json = false, profile = false;
};

std::vector<int32_t> Lengths(const std::vector<std::string>& texts, const char* flag) {
  std::vector<int32_t> lengths;
  for (const std::string& text : texts) lengths.push_back(TokenCount(text, flag, 0));
  return lengths;
}

double Seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Row {
  std::string test;
  int32_t tokens, depth;
  std::vector<double> seconds;  // of each repeat
  StepTimes times;              // of all repeats
};

class Bench {
 public:
  Bench(const BenchFlags& flags, Engine& engine) : flags_(flags), engine_(engine), sequence_(engine.cache()) {
    std::mt19937 random(1);
    tokens_.resize(static_cast<size_t>(engine.plan().context));
    for (int32_t& token : tokens_)
      token = static_cast<int32_t>(random() % static_cast<uint32_t>(engine.config().vocab_size));
  }

  Row Measure(const std::string& test, int32_t tokens, int32_t depth) {
    Row row{test, tokens, depth, {}, {}};
    sequence_.Truncate(std::min(sequence_.length(), depth));
    Read(depth);
    const int32_t step = test == "pp" ? engine_.decoder().max_rows() : 1;
    // Once unmeasured and short, so that buffers and caches are as in use.
    Read(depth + std::min(tokens, step), step);
    const StepTimes before = engine_.decoder().times();
    for (int32_t i = 0; i < flags_.repeats; ++i) {
      sequence_.Truncate(depth);
      row.seconds.push_back(Seconds([&] { Read(depth + tokens, step); }));
    }
    const StepTimes& after = engine_.decoder().times();
    row.times = {after.products - before.products, after.attention - before.attention, after.other - before.other,
                 after.selection - before.selection};
    sequence_.Truncate(depth);
    return row;
  }

 private:
  void Read(int32_t length) { Read(length, engine_.decoder().max_rows()); }
  void Read(int32_t length, int32_t step) {
    while (sequence_.length() < length) {
      ThrowIfInterrupted();
      const int32_t first = sequence_.length(), count = std::min(step, length - first);
      const BatchItem item{&sequence_,
                           {tokens_.data() + first, static_cast<size_t>(count)},
                           first + count == length || step == 1 ? BatchItem::Logits::kLast : BatchItem::Logits::kNone};
      engine_.decoder().Step({&item, 1}, [](int32_t, int32_t, const float*) {});
    }
  }

  const BenchFlags& flags_;
  Engine& engine_;
  Sequence sequence_;
  std::vector<int32_t> tokens_;
};

void Print(const BenchFlags& flags, const Engine& engine, const Settings& settings, const Row& row, int32_t threads) {
  const double best = *std::min_element(row.seconds.begin(), row.seconds.end());
  const double mean =
      std::accumulate(row.seconds.begin(), row.seconds.end(), 0.0) / static_cast<double>(row.seconds.size());
  const double known = row.times.products + row.times.attention + row.times.other + row.times.selection;
  if (flags.json) {
    nlohmann::json line = {{"model", engine.config().name},
                           {"attention", Name(settings.policy)},
                           {"top_k", settings.top_k},
                           {"test", row.test},
                           {"tokens", row.tokens},
                           {"depth", row.depth},
                           {"tokens_per_s", row.tokens / best},
                           {"tokens_per_s_mean", row.tokens / mean},
                           {"repeats", row.seconds.size()},
                           {"weights", engine.plan().weight_types},
                           {"kv_type", engine.plan().kv_type},
                           {"threads", threads},
                           {"device", "cpu"}};
    if (flags.profile) {
      line["share"] = {{"products", row.times.products / known},
                       {"selection", row.times.selection / known},
                       {"attention", row.times.attention / known},
                       {"other", row.times.other / known}};
    }
    WriteOut(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    return;
  }
  std::string cells = fmt::format("| {} | {} | {}{} | {} | {:.1f} | {:.1f} |", Name(settings.policy), settings.top_k,
                                  row.test, row.tokens, row.depth, row.tokens / best, row.tokens / mean);
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
  int32_t context = 0;
  for (const int32_t depth : depths) {
    for (const int32_t tokens : prompts) context = std::max(context, depth + tokens);
    for (const int32_t tokens : generates) context = std::max(context, depth + tokens);
  }
  if (context == 0) ThrowInvalid("bench: nothing to measure; give -p, -n or both");
  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model);
  if (context > source->config().context) {
    ThrowInvalid("bench: the largest depth and length make {} tokens; the model's context is {}", context,
                 source->config().context);
  }
  ModelFlags model = flags.model;
  model.context = std::max(model.context, context);
  const std::vector<LayerSettings> policies = AttentionSettings(flags.attention, source->config(), context);
  Tokenizer tokenizer = LoadTokenizer(*source);
  const std::unique_ptr<Engine> engine = OpenEngine(std::move(source), std::move(tokenizer), model, policies.front());
  LoadEngine(*engine);
  if (!flags.json) {
    WriteOut(fmt::format("{}, {} weights, {} cache, {} threads; tokens/s\n\n", engine->config().name,
                         engine->plan().weight_types, engine->plan().kv_type, engine->threads().num_threads()));
    WriteOut(fmt::format("| attention | K | test | depth | best of {} | mean |{}\n|---|---|---|---|---|---|{}\n",
                         flags.repeats, flags.profile ? " products | selection | attention | other |" : "",
                         flags.profile ? "---|---|---|---|" : ""));
  }
  for (const LayerSettings& attention : policies) {
    engine->SetAttention(attention);
    engine->decoder().TimeStages(flags.profile);
    Bench bench(flags, *engine);
    const int32_t threads = engine->threads().num_threads();
    for (const int32_t depth : depths) {
      for (const int32_t tokens : prompts) {
        if (tokens > 0) Print(flags, *engine, attention.base, bench.Measure("pp", tokens, depth), threads);
      }
      for (const int32_t tokens : generates) {
        if (tokens > 0) Print(flags, *engine, attention.base, bench.Measure("tg", tokens, depth), threads);
      }
    }
  }
}

}  // namespace

void AddBenchCommand(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("bench", "speed of reading (pp) and writing (tg) at lengths and depths");
  auto flags = std::make_shared<BenchFlags>();
  AddModelFlags(*command, flags->model);
  command->add_option("-p,--n-prompt", flags->prompts, "tokens to read: 512,8k; 0: none")->delimiter(',');
  command->add_option("-n,--n-gen", flags->generates, "tokens to write: 32; 0: none")->delimiter(',');
  command->add_option("-d,--n-depth", flags->depths, "tokens that are in the cache before: 0,8000")->delimiter(',');
  command->add_option("-r,--repetitions", flags->repeats, "how often each is measured")->check(CLI::Range(1, 1000));
  command->add_flag("--json", flags->json, "JSON lines instead of a markdown table");
  command->add_flag("--profile", flags->profile,
                    "the shares of products, selection, attention and the rest; takes a little longer");
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags] { RunBench(*flags); });
}

}  // namespace phsa::cli
