// `phsa tune`: the settings that keep a model's answers at a budget of tokens.
#include "eval/tune.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>

#include "base/errors.h"
#include "base/new_file.h"
#include "cli/commands.h"
#include "cli/model_command.h"
#include "cli/options.h"
#include "cli/prompt.h"
#include "cli/terminal.h"
#include "engine/export.h"
#include "eval/niah/run.h"
#include "eval/settings_text.h"
#include "eval/tune_meter.h"
#include "eval/tune_report.h"
#include "io/sha256.h"

namespace phsa::cli {
namespace {

namespace fs = std::filesystem;

struct TuneFlags {
  ModelFlags model;
  double budget = 0.03;
  std::string length = "4k", out, report, haystack, prose, language = "en", punctuation;
  std::vector<std::string> tasks = {"single_2", "single_3", "multikey_2", "multivalue"};
  std::vector<int32_t> parts = {1, 2, 4, 8};
  std::vector<float> lambdas = {0.5f, 0.75f, 0.9f, 1.0f};
  int32_t samples = 20, batch = 0;
  // Far from those of `phsa niah`, whose results are reported.
  uint64_t seed = 7001;
  bool repeat = false, layers = false, install = false, json = false;
};

std::vector<NiahTask> Tasks(const TuneFlags& flags) {
  std::vector<NiahTask> tasks;
  for (const std::string& name : flags.tasks) {
    const NiahTask task = NiahTaskFromName(name);
    if (std::find(tasks.begin(), tasks.end(), task) == tasks.end()) tasks.push_back(task);
  }
  return tasks;
}

// What is searched, judged before a model is opened.
TuneOptions Options(const TuneFlags& flags) {
  TuneOptions options;
  options.budget = flags.budget;
  options.length = TokenCount(flags.length, "tune: --length", 256);
  options.samples = flags.samples;
  options.parts = flags.parts;
  options.lambdas = flags.lambdas;
  options.layers = flags.layers;
  if (!flags.punctuation.empty()) options.base.punctuation = flags.punctuation;
  for (const int32_t parts : options.parts) {
    Settings one = options.base;
    one.parts = parts;
    Validate(one);
  }
  for (const float lambda : options.lambdas) {
    Settings one = options.base;
    one.lambda = lambda;
    Validate(one);
  }
  CheckTuneOptions(options);
  return options;
}

std::string Joined(const std::vector<std::string>& sentences) { return fmt::format("{}", fmt::join(sentences, " ")); }

std::string Hash(const std::string& text) {
  Sha256 hash;
  hash.Update(text.data(), text.size());
  return hash.Hex();
}

// settings.json's is settings.records.jsonl.
fs::path RecordsBeside(const fs::path& out) {
  fs::path path = out;
  path.replace_extension();
  path += ".records.jsonl";
  return path;
}

// The text that needles are hidden in; prompts say in `options` whether it may be repeated.
Haystack OpenHaystack(const TuneFlags& flags, const NiahPromptOptions& options) {
  if (!flags.haystack.empty()) return Haystack(ReadText(flags.haystack), flags.haystack);
  if (options.language == NiahLanguage::kChinese) {
    ThrowInvalid("tune: the built-in haystack is English; give a Chinese text with --haystack FILE");
  }
  return Haystack::BuiltIn();
}

NiahPromptOptions PromptOptions(const TuneFlags& flags) {
  NiahPromptOptions options;
  options.language = NiahLanguageFromName(flags.language);
  options.seed = flags.seed;
  options.repeat = flags.repeat || flags.haystack.empty();
  return options;
}

// The engine for texts of options.length, which learns from it how many layers there are and what its device takes.
std::unique_ptr<Engine> OpenModelToTune(const TuneFlags& flags, TuneOptions& options) {
  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model, flags.model.adapter);
  if (options.length > source->config().context) {
    ThrowInvalid("tune: --length is {}; the model's context is {} tokens: give at most that", options.length,
                 source->config().context);
  }
  if (flags.install) CheckInstall(*source);
  options.num_layers = source->config().num_layers;
  ModelFlags model = flags.model;
  model.context = options.length;
  model.cache_texts = std::max(1, flags.batch);
  Tokenizer tokenizer = LoadTokenizer(*source);
  std::unique_ptr<Engine> engine = OpenEngine(std::move(source), std::move(tokenizer), model, {options.base, {}});
  if (engine->device().device == PHSA_DEVICE_CUDA) options.max_top_k = 64;  // the kernels'
  return engine;
}

// Whether the engine can run some settings; the reason why it cannot is told once.
class FitCheck {
 public:
  explicit FitCheck(Engine& engine) : engine_(engine) {}
  bool operator()(const LayerSettings& attention) {
    try {
      engine_.SetAttention(attention);
      return true;
    } catch (const Error& error) {
      if (std::find(told_.begin(), told_.end(), error.message()) == told_.end()) {
        told_.emplace_back(error.message());
        Note("tune: not tried here: {}", error.message());
      }
      return false;
    }
  }

 private:
  Engine& engine_;
  std::vector<std::string> told_;
};

// Where results go. Places that cannot be written to are told before the work.
struct Outputs {
  explicit Outputs(const TuneFlags& flags) : settings(flags.out), records(RecordsBeside(flags.out)) {
    if (!flags.report.empty()) report.emplace(flags.report);
  }
  NewFile settings;
  std::optional<NewFile> report;
  fs::path records;
};

void Tell(const TuneFlags& flags, const TuneAbout& about, const TuneResult& result, const NiahRecords& records,
          const ModelSource& source, Outputs& outputs) {
  const std::vector<TuneRow> rows = TuneRows(about, result, records);
  nlohmann::ordered_json settings = nlohmann::ordered_json::parse(SettingsToJson(result.best));
  settings["tested_tokens"] = about.length;
  outputs.settings.Write(settings.dump(2) + "\n");
  outputs.settings.Keep();
  if (outputs.report) {
    outputs.report->Write(TuneHtml(about, rows));
    outputs.report->Keep();
  }
  if (flags.install) InstallSettings(source, settings.dump());
  WriteOut(flags.json ? TuneJson(about, rows).dump() + "\n" : TuneTable(about, rows));
  Note("{}", TuneInWords(about, rows));
  Note("the settings are in {}: every command takes them with --phsa-config{}", flags.out,
       flags.install ? "; the model carries them, and --attention auto uses them" : "");
}

void Run(const TuneFlags& flags, const std::string& command) {
  const auto start = std::chrono::steady_clock::now();
  TuneOptions options = Options(flags);
  const std::vector<NiahTask> tasks = Tasks(flags);
  const NiahPromptOptions prompt_options = PromptOptions(flags);
  const Haystack haystack = OpenHaystack(flags, prompt_options);
  const std::string prose = flags.prose.empty() ? Joined(haystack.sentences()) : ReadText(flags.prose);
  const std::unique_ptr<Engine> engine = OpenModelToTune(flags, options);
  const NiahPrompts prompts(engine->tokenizer(), &haystack, prompt_options);
  for (const NiahTask task : tasks) prompts.Check(task, options.length);

  std::vector<std::vector<int32_t>> windows = ProseWindows(engine->tokenizer().Encode(prose, SpecialTokens::kAsText),
                                                           flags.seed, options.length, WindowsFor(options.samples));
  const std::string prose_name = flags.prose.empty() ? haystack.name() : flags.prose;
  if (windows.empty()) Note("tune: {} is too short to measure perplexity with", prose_name);
  TuneAbout about = {.model = engine->config().name,
                     .command = command,
                     .prose = windows.empty() ? "" : prose_name,
                     .budget = options.budget,
                     .length = options.length,
                     .samples = options.samples,
                     .num_layers = options.num_layers,
                     .seed = flags.seed,
                     .tasks = tasks};

  Outputs outputs(flags);
  NiahRecords records;
  std::optional<NiahWriter> writer;
  ProgressBar bar("tuning");
  std::string round;
  TuneMeterCallbacks meter_callbacks;
  meter_callbacks.progress = [&](double share) { bar.Update(share, round); };
  meter_callbacks.record = [&](const NiahRecord& record) { writer->Append(record); };
  meter_callbacks.prose = [&](const NiahProse& one) { writer->Append(one); };
  meter_callbacks.stop = WasInterrupted;
  TuneMeter meter(*engine, prompts, tasks, options.length, std::move(windows), records, meter_callbacks);
  const LayerSettings first{options.base, {}};
  NiahHeader header = MakeNiahHeader(*engine, meter.RunsFor({&first, 1}, options.samples), &haystack, prompt_options);
  header["prose"] = Hash(prose);  // a window is told by its number; with more samples the first ones stay
  writer.emplace(outputs.records, header, records);
  LoadEngine(*engine);

  TuneCallbacks callbacks;
  callbacks.measure = [&](std::span<const LayerSettings> all, int32_t samples) { return meter.Measure(all, samples); };
  callbacks.fits = FitCheck(*engine);
  callbacks.round = [&](const std::string& stage, size_t candidates, int32_t samples) {
    round = fmt::format("{}: {} settings, {} samples of {} tasks", stage, candidates, samples, tasks.size());
  };
  const std::optional<TuneResult> result = Tune(options, callbacks);
  bar.Clear();
  if (!result) {
    Note("what is done is in {}; the same command goes on from there", outputs.records.string());
    throw Interrupted{};
  }
  about.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  Tell(flags, about, *result, records, engine->source(), outputs);
}

}  // namespace

void AddTuneCommand(CLI::App& app) {
  CLI::App* const command =
      app.add_subcommand("tune", "finds the attention's settings that keep the answers at a budget of tokens");
  const auto flags = FlagsWithModel<TuneFlags>(*command);
  command->remove_option(command->get_option("--ctx-size"));
  command->add_option("--budget", flags->budget, "tokens that a query at the text's end reads, as a share of them");
  command->add_option("--length", flags->length, "tokens of a text: 4k, 32k");
  command->add_option("--out", flags->out, "the file of settings; what was measured lies beside it")->required();
  command->add_option("--report", flags->report, "an HTML file with the plot and the table of what was tried");
  command->add_flag("--install", flags->install,
                    "writes the settings into the model (or its adapter) too, for --attention auto");
  command->add_option("--task", flags->tasks, "needle tasks: single_1 to 3, multikey_1 to 3, multivalue, multiquery")
      ->delimiter(',');
  command->add_option("--samples", flags->samples, "samples of each task for the best settings; the others have fewer")
      ->check(CLI::Range(2, 100000));
  command->add_option("--batch", flags->batch, "samples that are prefilled together; 0: as many as --chunk holds")
      ->check(CLI::Range(0, 1024));
  command->add_option("--seed", flags->seed, "of the samples: not one whose results are reported");
  command->add_option("--haystack", flags->haystack, "a text file to hide needles in; none: one inside the program");
  command->add_flag("--repeat-haystack", flags->repeat, "repeat a text that is too short");
  command->add_option("--language", flags->language, "of needles and questions: en or zh");
  command->add_option("--prose", flags->prose, "a text file to measure perplexity with; none: the haystack");
  command->add_option("--parts", flags->parts, "representatives of a block to try: 1, 2, 4, 8")->delimiter(',');
  command->add_option("--lambda", flags->lambdas, "weights of the plain mean to try, 0 to 1")->delimiter(',');
  command->add_option("--punctuation", flags->punctuation, "en, zh, en+zh, sentence, pure, none, or a file");
  command->add_flag("--layers", flags->layers, "other settings for a third of the layers are tried, too");
  command->add_flag("--json", flags->json, "one JSON object instead of a table");
  command->callback([flags, command] {
    std::string line = "phsa tune";
    for (const CLI::Option* option : command->parse_order()) {
      line += " " + option->get_name();
      if (option->get_type_size() != 0) line += " " + fmt::format("{}", fmt::join(option->results(), ","));
    }
    Run(*flags, line);
  });
}

}  // namespace phsa::cli
