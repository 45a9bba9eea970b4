// `phsa niah`: how well a model finds needles in long texts, with several ways to attend.
#include <algorithm>
#include <charconv>
#include <map>
#include <optional>

#include "attention/policies.h"
#include "base/errors.h"
#include "cli/commands.h"
#include "cli/model_command.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "eval/niah/export.h"
#include "eval/niah/heatmap.h"
#include "eval/niah/report.h"
#include "eval/niah/run.h"
#include "eval/plot.h"
#include "eval/settings_text.h"

namespace phsa::cli {
namespace {

struct NiahFlags {
  ModelFlags model;
  AttentionFlags attention;
  std::vector<float> lambdas;
  std::vector<std::string> tasks = {"single_2"}, lengths = {"4k"}, merge;
  std::vector<double> depths;
  std::string haystack, language = "en", haystack_start = "random", shard = "1/1", out, heatmap, chat_template,
                        export_file;
  int32_t samples = 100, batch = 0;
  std::optional<int32_t> show_sample;
  uint64_t seed = 1;
  bool strict = false, forced = false, chat = false, repeat = false, json = false;
};

NiahScoring Scoring(const NiahFlags& flags) {
  if (flags.strict) return NiahScoring::kStrict;
  return flags.forced ? NiahScoring::kForced : NiahScoring::kReferences;
}

std::vector<NiahTask> Tasks(const NiahFlags& flags) {
  std::vector<NiahTask> tasks;
  for (const std::string& name : flags.tasks) {
    if (name == "all") {
      for (int i = 0; i < kNumNiahTasks; ++i) tasks.push_back(static_cast<NiahTask>(i));
    } else {
      tasks.push_back(NiahTaskFromName(name));
    }
  }
  std::sort(tasks.begin(), tasks.end());
  tasks.erase(std::unique(tasks.begin(), tasks.end()), tasks.end());
  for (const NiahTask task : tasks) {
    if (Scoring(flags) != NiahScoring::kReferences && Shape(task).references() > 1) {
      ThrowInvalid("niah: --{0} needs a task with one answer, and {1} has {2}; leave --{0} out for it",
                   Name(Scoring(flags)), Name(task), Shape(task).references());
    }
  }
  return tasks;
}

// "2/4": the second of four.
void ReadShard(const std::string& text, NiahRuns& runs) {
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, runs.shard);
  bool good = first.ec == std::errc{} && first.ptr != end && *first.ptr == '/';
  if (good) {
    const auto second = std::from_chars(first.ptr + 1, end, runs.shards);
    good = second.ec == std::errc{} && second.ptr == end && runs.shard >= 1 && runs.shard <= runs.shards;
  }
  if (!good) ThrowInvalid("niah: --shard is {}; it takes i/n with i from 1 to n, such as 2/4", Quoted(text));
  if (runs.shards > runs.samples) {
    ThrowInvalid("niah: --shard is {}, and --samples only {}: some parts would have none", Quoted(text), runs.samples);
  }
  --runs.shard;
}

// Policies, lambdas and K for one length: each length has its own preset, whatever else the run measures.
std::vector<NamedAttention> Attentions(const NiahFlags& flags, const ModelConfig& config, int32_t length) {
  std::vector<NamedAttention> all;
  const auto add = [&](const AttentionFlags& one) {
    for (const LayerSettings& settings : SomeAttentionSettings(one, config, length)) {
      AddDistinct(one.policies.front(), settings, &all);
    }
  };
  bool uses_lambda = false;
  for (const std::string& policy : flags.attention.policies) {
    AttentionFlags one = flags.attention;
    one.policies = {policy};
    const Policy resolved = SomeAttentionSettings(one, config, length).front().base.policy;
    // A list sweeps PHSA alone: λ = 1 is what the other methods are.
    if (!Weighs(resolved) || flags.lambdas.empty()) {
      add(one);
      continue;
    }
    uses_lambda = true;
    for (const float lambda : flags.lambdas) {
      one.given["lambda"] = lambda;
      add(one);
    }
  }
  if (!flags.lambdas.empty() && !uses_lambda) {
    ThrowInvalid("niah: --lambda is for phsa, and --attention has none; add phsa or leave --lambda out");
  }
  std::vector<LayerSettings> settings;
  settings.reserve(all.size());
  for (const NamedAttention& one : all) settings.push_back(one.attention);
  RefuseWithoutEffect(ChoiceOf(flags.attention), settings);
  return all;
}

// Those of a grid that was asked for.
std::vector<double> GridOf(const NiahHeader& header) {
  std::vector<double> depths;
  if (!header.contains("depths") || !header["depths"].is_array()) return depths;
  for (const auto& depth : header["depths"]) {
    if (depth.is_number() && depth.get<double>() >= 0 && depth.get<double>() <= 100)
      depths.push_back(depth.get<double>());
  }
  return depths;
}

void Print(const NiahFlags& flags, std::span<const NiahRecord* const> records, const NiahHeader& header) {
  const std::vector<NiahRow> rows = NiahRows(records, header["layers"].get<int32_t>());
  const std::vector<double> depths = GridOf(header);
  if (!flags.heatmap.empty()) WriteNiahHeatMap(rows, header["model"].get<std::string>(), depths, flags.heatmap);
  if (const std::string empty = NiahEmptyDepths(rows, depths); !empty.empty()) {
    Note("niah: no sample lies at depth {}; all --depths have one with --samples {} or more", empty, depths.size());
  }
  WriteOut(flags.json ? NiahJsonLines(rows)
                      : NiahTables(rows, NiahScoringFromName(header["scoring"].get_ref<const std::string&>())));
}

void Merge(const NiahFlags& flags) {
  NiahRecords records;
  std::optional<NiahHeader> header;
  for (const std::string& path : flags.merge) {
    NiahFile file = ReadNiahFile(path);
    if (!file.header) ThrowInvalid("{}: there are no samples in it", path);
    if (header) CheckSameHeader(*header, flags.merge.front(), *file.header, path);
    header = std::move(file.header);
    for (NiahRecord& record : file.records) records.Add(std::move(record), path);
  }
  if (records.all().empty()) ThrowInvalid("niah: there are no samples in {}", flags.merge.front());
  std::vector<const NiahRecord*> all;
  for (const NiahRecord& record : records.all()) all.push_back(&record);
  Print(flags, all, *header);
}

// The file may hold more than this command asked for.
std::vector<const NiahRecord*> Asked(const NiahRuns& runs, const NiahRecords& records) {
  std::vector<const NiahRecord*> asked;
  for (const NiahRecord& record : records.all()) {
    const bool configured = std::any_of(
        runs.configurations.begin(), runs.configurations.end(),
        [&](const NiahConfiguration& one) { return one.length == record.length && one.attention == record.attention; });
    if (configured && record.sample < runs.samples && record.sample % runs.shards == runs.shard &&
        std::find(runs.tasks.begin(), runs.tasks.end(), record.task) != runs.tasks.end()) {
      asked.push_back(&record);
    }
  }
  return asked;
}

bool NeedsEssay(const std::vector<NiahTask>& tasks) {
  return std::any_of(tasks.begin(), tasks.end(),
                     [](NiahTask task) { return Shape(task).hay == NiahTaskShape::Hay::kEssay; });
}

// Read where no task needs it too, so that all tasks of a command can go into one file.
std::optional<Haystack> OpenHaystack(const NiahFlags& flags, bool essay, NiahPromptOptions& options) {
  if (!flags.haystack.empty()) return Haystack(ReadText(flags.haystack), flags.haystack);
  if (options.language == NiahLanguage::kEnglish) {
    options.repeat = true;
    return Haystack::BuiltIn();
  }
  if (essay) ThrowInvalid("niah: the built-in haystack is English; give a Chinese text with --haystack FILE");
  return std::nullopt;
}

NiahRuns AskedRuns(const NiahFlags& flags) {
  NiahRuns runs;
  runs.tasks = Tasks(flags);
  runs.samples = flags.samples;
  runs.batch = flags.batch;
  runs.scoring = Scoring(flags);
  ReadShard(flags.shard, runs);
  return runs;
}

NiahPromptOptions PromptOptions(const NiahFlags& flags) {
  NiahPromptOptions options;
  options.language = NiahLanguageFromName(flags.language);
  options.seed = flags.seed;
  options.depths = flags.depths;
  options.random_start = flags.haystack_start == "random";
  options.repeat = flags.repeat;
  return options;
}

// Ascending, each once.
std::vector<int32_t> Lengths(const NiahFlags& flags) {
  std::vector<int32_t> lengths;
  for (const std::string& text : flags.lengths) lengths.push_back(TokenCount(text, "niah: --lengths", 1));
  std::sort(lengths.begin(), lengths.end());
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  return lengths;
}

// What is asked for at each length, where settings that mean the same are one.
std::vector<NiahConfiguration> Configurations(const NiahFlags& flags, const ModelConfig& config,
                                              const std::vector<int32_t>& lengths) {
  std::vector<NiahConfiguration> all;
  std::map<std::string, std::vector<std::string>> same;  // which lengths a sentence is about
  for (const int32_t length : lengths) {
    const std::vector<NamedAttention> attentions = Attentions(flags, config, length);
    for (const NamedAttention& one : attentions) all.push_back({length, one.attention});
    for (const std::string& sentence : SameInWords(attentions)) same[sentence].push_back(TokensLabel(length));
  }
  for (const auto& [sentence, at] : same) {
    Note("niah: {} {} and is run once", sentence,
         at.size() == lengths.size() ? "here" : fmt::format("at {}", fmt::join(at, ", ")));
  }
  return all;
}

// The answers that `records` lacks, with a progress bar.
void Measure(const NiahFlags& flags, Engine& engine, const NiahPrompts& prompts, const NiahRuns& runs,
             const NiahHeader& header, NiahRecords& records) {
  std::optional<NiahWriter> writer;
  if (!flags.out.empty()) writer.emplace(flags.out, header, records);
  for (const NiahConfiguration& one : runs.configurations) engine.SetAttention(one.attention);  // do all fit?
  LoadEngine(engine);

  ProgressBar bar("needles");
  NiahCallbacks callbacks;
  callbacks.progress = [&](const NiahProgress& progress) {
    bar.Update(progress.share, fmt::format("{} of {} answers", progress.done, progress.missing));
  };
  callbacks.record = [&](const NiahRecord& record) {
    if (writer) writer->Append(record);
  };
  callbacks.stop = WasInterrupted;
  const bool done = RunNiah(engine, prompts, runs, records, callbacks);
  bar.Clear();
  if (!done) {
    if (writer) Note("what is done is in {}; the same command goes on from there", flags.out);
    throw Interrupted{};
  }
}

void Run(const NiahFlags& flags) {
  if (!flags.export_file.empty() && Scoring(flags) == NiahScoring::kReferences) {
    ThrowInvalid("niah: --export is for answers that are prefilled, not decoded; add --forced or --strict");
  }
  NiahRuns runs = AskedRuns(flags);
  NiahPromptOptions options = PromptOptions(flags);
  const std::vector<int32_t> lengths = Lengths(flags);
  const bool essay = NeedsEssay(runs.tasks);
  const std::optional<Haystack> haystack = OpenHaystack(flags, essay, options);

  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model, flags.model.adapter);
  const int32_t context = lengths.back();
  if (context > source->config().context) {
    ThrowInvalid("niah: --lengths has {}; the model's context is {} tokens: give at most that", context,
                 source->config().context);
  }
  WarnPastTested(source->config(), static_cast<size_t>(context));
  runs.configurations = Configurations(flags, source->config(), lengths);
  if (flags.chat) options.chat = ChooseChatTemplate(flags.chat_template, source->chat_template());
  ModelFlags model = flags.model;
  model.context = std::max(model.context, context);
  model.cache_texts = runs.batch;
  Tokenizer tokenizer = LoadTokenizer(*source);
  const std::unique_ptr<Engine> engine =
      OpenEngine(std::move(source), std::move(tokenizer), model, runs.configurations.front().attention);
  const NiahPrompts prompts(engine->tokenizer(), essay ? &*haystack : nullptr, options);
  for (const NiahTask task : runs.tasks) {
    for (const int32_t length : lengths) prompts.Check(task, length);
  }
  if (flags.show_sample) {
    WriteOut(prompts.Build(runs.tasks.front(), lengths.front(), *flags.show_sample).text + "\n");
    return;
  }
  const NiahHeader header = MakeNiahHeader(*engine, runs, haystack ? &*haystack : nullptr, options);
  if (!flags.export_file.empty()) {
    ExportNiah(*engine, prompts, runs, header, flags.export_file);
    return;
  }
  NiahRecords records;
  Measure(flags, *engine, prompts, runs, header, records);
  Print(flags, Asked(runs, records), header);
}

}  // namespace

void AddNiahCommand(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("niah", "finding needles in long texts: RULER's tasks");
  const auto flags = FlagsWithModel<NiahFlags>(*command);
  command->get_option("--model")->required(false);  // --merge needs none
  command->add_option("--task", flags->tasks, "single_1 to 3, multikey_1 to 3, multivalue, multiquery, or all")
      ->delimiter(',');
  command->add_option("--lengths", flags->lengths, "tokens of a sample, prompt and answer: 4k,8k")->delimiter(',');
  command->add_option("--samples", flags->samples, "samples of each task and length")->check(CLI::Range(1, 1000000));
  command->add_option("--batch", flags->batch, "samples that are prefilled together; 0: as many as --chunk holds")
      ->check(CLI::Range(0, 1024));
  command->add_option("--seed", flags->seed, "other seeds, other samples");
  command->add_option("--depths", flags->depths, "where the needle lies, in percent: 0,25,50,75,100; none: drawn")
      ->delimiter(',');
  command->add_option("--haystack", flags->haystack, "a text file to hide needles in; none: one inside the program");
  command->add_option("--haystack-start", flags->haystack_start, "random: each sample elsewhere; first: as RULER does")
      ->check(CLI::IsMember({"random", "first"}));
  command->add_flag("--repeat-haystack", flags->repeat, "repeat a text that is too short");
  command->add_option("--language", flags->language, "of needles and questions: en or zh");
  auto* const strict =
      command->add_flag("--strict", flags->strict, "right: each token of the answer is the likeliest one");
  command->add_flag("--forced", flags->forced, "as --strict, whatever the answer begins with before the reference")
      ->excludes(strict);
  command->add_flag("--chat", flags->chat, "ask through the model's chat template");
  command->add_option("--chat-template", flags->chat_template, "with --chat: a template by its name");
  command->add_option("--out", flags->out,
                      "a file for every sample, JSON lines; a run that was stopped goes on from it");
  command->add_option("--export", flags->export_file,
                      "write the samples into this file for `python -m phsa.hf.niah`, and end");
  command->add_option("--heatmap", flags->heatmap,
                      "a picture by length and depth, into this .svg file, or a page: .html");
  command->add_option("--shard", flags->shard, "i/n: the i-th of n parts of the samples");
  command->add_option("--merge", flags->merge, "files of --out: print their results together; no model is needed")
      ->delimiter(',');
  command->add_option("--show-sample", flags->show_sample, "print the prompt of this sample, counted from 0, and end")
      ->check(CLI::Range(0, 1000000));
  command->add_flag("--json", flags->json, "JSON lines instead of tables");
  AddAttentionFlags(*command, flags->attention);
  command->remove_option(command->get_option("--lambda"));
  command->add_option("--lambda", flags->lambdas, "weights of the plain mean in phsa's representatives, 0 to 1")
      ->delimiter(',')
      ->group("Attention");
  command->callback([flags] {
    if (!flags->heatmap.empty()) CheckNiahHeatMapPath(flags->heatmap);
    if (!flags->merge.empty()) {
      Merge(*flags);
      return;
    }
    if (flags->model.model.empty()) ThrowInvalid("niah: --model is required (only --merge works without)");
    Run(*flags);
  });
}

}  // namespace phsa::cli
