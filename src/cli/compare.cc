// `phsa compare`: one model with several ways to attend, measured and told in one report.
#include "eval/compare.h"
#include "attention/policies.h"

#include <fmt/chrono.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <optional>

#include "base/errors.h"
#include "base/new_file.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/prompt.h"
#include "cli/terminal.h"
#include "eval/compare_report.h"

namespace phsa {
extern const std::string_view kBuiltInHaystack;  // made from the text by the build
}

namespace phsa::cli {
namespace {

namespace fs = std::filesystem;

// FLOPs are counted token by token: this many take a second.
constexpr int32_t kLongestCount = 1 << 24;

struct CompareFlags {
  ModelFlags model;
  AttentionFlags attention;
  std::vector<std::string> parts = {"answers", "speed", "niah", "perplexity", "recall", "flops"};
  std::vector<std::string> lengths, depths, niah_lengths, flops_lengths, questions, expected;
  std::vector<std::string> tasks = {"single_2"};
  std::string out = "report", file, text_tokens, haystack;
  std::optional<int32_t> repeats, samples;
  int32_t decode_tokens = 32, answer_tokens = 48;
  uint64_t seed = 1;
  bool quick = false, json = false;

  bool Has(const char* part) const { return std::find(parts.begin(), parts.end(), part) != parts.end(); }
};

// The folder and its files, made before any work, so that a place that cannot be written to is told at once. What was
// made is gone again where nothing was written.
class ReportFolder {
 public:
  explicit ReportFolder(const fs::path& folder) : folder_(folder) {
    try {
      Make();
    } catch (const fs::filesystem_error& error) {
      Abandon();
      ThrowInvalid("compare: --out {}: {}; name a folder that you may write to", Quoted(folder.string(), kQuotedPath),
                   error.code().message());
    } catch (const Error& error) {
      Abandon();
      ThrowInvalid("compare: --out {}", error.message());
    }
  }
  ~ReportFolder() {
    if (!kept_) Abandon();
  }
  ReportFolder(const ReportFolder&) = delete;
  ReportFolder& operator=(const ReportFolder&) = delete;

  void Write(const CompareResult& result, const CompareStory& story) {
    html_->Write(CompareHtml(story));
    markdown_->Write(CompareMarkdown(story));
    json_->Write(CompareJson(result));
    kept_ = true;
    html_->Keep();
    markdown_->Keep();
    json_->Keep();
  }
  fs::path page() const { return folder_ / "report.html"; }

 private:
  void Make() {
    for (fs::path missing = fs::absolute(folder_); !missing.empty() && !fs::exists(missing);
         missing = missing.parent_path()) {
      made_.push_back(missing);
    }
    fs::create_directories(folder_);
    html_.emplace(folder_ / "report.html");
    markdown_.emplace(folder_ / "report.md");
    json_.emplace(folder_ / "report.json");
  }
  void Abandon() {
    html_.reset();
    markdown_.reset();
    json_.reset();
    std::error_code ignored;  // it may hold something by now
    for (const fs::path& folder : made_) fs::remove(folder, ignored);
  }

  fs::path folder_;
  std::vector<fs::path> made_;  // innermost first
  std::optional<NewFile> html_, markdown_, json_;
  bool kept_ = false;
};

void CheckParts(const CompareFlags& flags) {
  static const std::vector<std::string> kParts = CompareFlags().parts;
  for (const std::string& part : flags.parts) {
    if (std::find(kParts.begin(), kParts.end(), part) == kParts.end()) {
      ThrowInvalid("compare: --sections has {}; the sections are {}", Quoted(part), fmt::join(kParts, ", "));
    }
  }
  if (flags.expected.size() > flags.questions.size()) {
    ThrowInvalid("compare: there are {} --expect and {} questions (-p); give at most one for each",
                 flags.expected.size(), flags.questions.size());
  }
  if (!flags.questions.empty() && flags.file.empty()) {
    ThrowInvalid("compare: -p asks about a text; give the text with -f");
  }
  if (flags.file == "-") ThrowInvalid("compare: -f takes a file; standard input can be read only once");
  const bool only_answers =
      std::all_of(flags.parts.begin(), flags.parts.end(), [](const std::string& part) { return part == "answers"; });
  if (only_answers && flags.questions.empty()) {
    ThrowInvalid("compare: the part answers needs a question (-p) and a text (-f)");
  }
}

std::vector<int32_t> TokenCounts(const std::vector<std::string>& texts, const char* flag, int32_t least, int32_t most,
                                 const char* most_is) {
  std::vector<int32_t> counts;
  for (const std::string& text : texts) {
    counts.push_back(TokenCount(text, flag, least));
    if (counts.back() > most) ThrowInvalid("{} has {}; {} is {} tokens", flag, counts.back(), most_is, most);
  }
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

// Those of `wanted` that fit; what does not is cut to `most`, once.
std::vector<int32_t> Fitting(std::vector<int32_t> wanted, int32_t most) {
  for (int32_t& one : wanted) one = std::min(one, most);
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  return wanted;
}

// As a report calls them.
std::string PolicyLabel(const std::string& flag, const Settings& settings) {
  std::string label = RowOf(settings.policy).label;
  if (Chooses(settings.policy)) label += fmt::format(" K={}", settings.top_k);
  return flag == "auto" ? fmt::format("auto ({})", label) : label;
}

// Each policy and K of the flags, for one context; those that are the same as one before are left out.
std::vector<NamedAttention> Policies(const AttentionFlags& flags, const ModelConfig& config, int64_t context) {
  std::vector<NamedAttention> policies;
  RefuseWithoutEffect(ChoiceOf(flags), SomeAttentionSettings(flags, config, context));
  for (const std::string& policy : flags.policies) {
    AttentionFlags one = flags;
    one.policies = {policy};
    for (const LayerSettings& attention : SomeAttentionSettings(one, config, context)) {
      AddDistinct(PolicyLabel(policy, attention.base), attention, &policies);
    }
  }
  return policies;
}

CompareSpeedRuns SpeedRuns(const CompareFlags& flags, int32_t context) {
  CompareSpeedRuns speed;
  speed.repeats = flags.repeats.value_or(flags.quick ? 1 : 2);
  speed.decode_tokens = flags.decode_tokens;
  if (flags.decode_tokens >= context) {
    ThrowInvalid("compare: -n is {}; the model's context is {} tokens", flags.decode_tokens, context);
  }
  const int32_t most = context - flags.decode_tokens;
  const std::vector<int32_t> usual = flags.quick ? std::vector{1024, 2048, 4096} : std::vector{1024, 2048, 4096, 8192};
  speed.lengths = flags.lengths.empty()
                      ? Fitting(usual, context)
                      : TokenCounts(flags.lengths, "compare: --lengths", 1, context, "the model's context");
  speed.depths = flags.depths.empty() ? Fitting(usual, most)
                                      : TokenCounts(flags.depths, "compare: --depths", 0, most,
                                                    "the model's context less what is decoded (-n)");
  if (flags.depths.empty()) speed.depths.insert(speed.depths.begin(), 0);
  return speed;
}

CompareTextRuns TextRuns(const CompareFlags& flags, const Tokenizer& tokenizer, int32_t context) {
  CompareTextRuns text;
  text.name = flags.file.empty() ? "the built-in text" : fs::path(flags.file).filename().string();
  text.perplexity = flags.Has("perplexity");
  text.recall = flags.Has("recall");
  const std::string content = flags.file.empty() ? std::string(kBuiltInHaystack) : ReadText(flags.file);
  text.tokens = tokenizer.Encode(content, SpecialTokens::kAsText);
  size_t length = std::min({text.tokens.size(), static_cast<size_t>(context), size_t{flags.quick ? 2048u : 4096u}});
  if (!flags.text_tokens.empty()) {
    const int32_t asked =
        TokenCounts({flags.text_tokens}, "compare: --text-tokens", 1, context, "the model's context").front();
    if (static_cast<size_t>(asked) > text.tokens.size()) {
      ThrowInvalid("compare: --text-tokens is {}; {} has {} tokens", asked, text.name, text.tokens.size());
    }
    length = static_cast<size_t>(asked);
  }
  if (length < 2) ThrowInvalid("compare: {} has no text to predict; give a longer one with -f", text.name);
  text.tokens.resize(length);
  return text;
}

CompareAnswersRuns AnswersRuns(const CompareFlags& flags, const ModelSource& source, const Tokenizer& tokenizer) {
  CompareAnswersRuns answers;
  answers.max_tokens = flags.answer_tokens;
  size_t longest = 0;
  for (size_t i = 0; i < flags.questions.size(); ++i) {
    PromptFlags prompt;
    prompt.document = flags.file;
    prompt.question = flags.questions[i];
    CompareQuestion& question = answers.questions.emplace_back();
    question.question = flags.questions[i];
    if (i < flags.expected.size()) question.expected = flags.expected[i];
    question.tokens = PromptTokens(prompt, source, tokenizer);
    longest = std::max(longest, question.tokens.size());
  }
  answers.context = ContextFor(longest, flags.answer_tokens, source.config());
  return answers;
}

CompareNiahRuns NeedleRuns(const CompareFlags& flags, int32_t context) {
  CompareNiahRuns niah;
  niah.samples = flags.samples.value_or(flags.quick ? 4 : 10);
  for (const std::string& task : flags.tasks) niah.tasks.push_back(NiahTaskFromName(task));
  std::sort(niah.tasks.begin(), niah.tasks.end());
  niah.tasks.erase(std::unique(niah.tasks.begin(), niah.tasks.end()), niah.tasks.end());
  niah.lengths = flags.niah_lengths.empty()
                     ? Fitting({2048}, context)
                     : TokenCounts(flags.niah_lengths, "compare: --niah-lengths", 1, context, "the model's context");
  return niah;
}

// A word as the shell takes it.
std::string ShellWord(const std::string& word) {
  const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string_view("-_./,=:+@%").find(static_cast<char>(c)) != std::string_view::npos;
  });
  if (plain) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

// What makes the same report again: the arguments, and before them the variables that stand for flags.
std::string CommandLine(const CLI::App& command) {
  std::string line;
  for (const CLI::Option* option : command.get_options()) {
    const char* const value = option->get_envname().empty() ? nullptr : std::getenv(option->get_envname().c_str());
    if (value != nullptr && *value != '\0') line += fmt::format("{}={} ", option->get_envname(), ShellWord(value));
  }
  line += "phsa";  // wherever it lies
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string argument;
  std::getline(file, argument, '\0');
  while (std::getline(file, argument, '\0')) line += " " + ShellWord(argument);
  return line;
}

// Tokens of the longest text whose contents matter: speed is the same for any.
size_t LongestAnswered(const CompareRuns& runs) {
  size_t longest = runs.text ? runs.text->tokens.size() : 0;
  if (runs.answers) {
    for (const CompareQuestion& question : runs.answers->questions) longest = std::max(longest, question.tokens.size());
  }
  if (runs.niah) longest = std::max(longest, static_cast<size_t>(runs.niah->lengths.back()));
  return longest;
}

void RunComparison(const CompareFlags& flags, const std::string& command_line) {
  CheckParts(flags);
  ReportFolder folder(flags.out);
  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model, flags.model.adapter);
  Tokenizer tokenizer = LoadTokenizer(*source);
  const ModelConfig config = source->config();

  CompareRuns runs;
  if (flags.Has("answers") && !flags.questions.empty()) runs.answers = AnswersRuns(flags, *source, tokenizer);
  if (flags.Has("speed")) runs.speed = SpeedRuns(flags, config.context);
  if (flags.Has("perplexity") || flags.Has("recall")) runs.text = TextRuns(flags, tokenizer, config.context);
  if (flags.Has("niah")) runs.niah = NeedleRuns(flags, config.context);
  if (flags.Has("flops")) {
    runs.flops_lengths = TokenCounts(flags.flops_lengths, "compare: --flops-lengths", 1, kLongestCount, "the most");
  }
  WarnPastTested(config, LongestAnswered(runs));
  ModelFlags model = flags.model;
  model.context = std::max({model.context, runs.Context(), 1});
  // One context for all parts, so that a row of the report is about one preset: the longest that is run. FLOPs are only
  // counted, and follow, unless there is nothing else.
  const int64_t preset_for =
      runs.Context() == 0 && !runs.flops_lengths.empty() ? runs.flops_lengths.back() : model.context;
  runs.policies = Policies(flags.attention, config, preset_for);
  for (const std::string& sentence : SameInWords(runs.policies)) {
    Note("compare: {} here and is measured once", sentence);
  }

  const std::unique_ptr<Engine> engine =
      OpenEngine(std::move(source), std::move(tokenizer), model, runs.policies.front().attention);
  std::optional<Haystack> haystack;
  std::optional<NiahPrompts> prompts;
  if (runs.niah) {
    NiahPromptOptions options;
    options.seed = flags.seed;
    options.repeat = flags.haystack.empty();
    haystack = flags.haystack.empty() ? Haystack::BuiltIn() : Haystack(ReadText(flags.haystack), flags.haystack);
    prompts.emplace(engine->tokenizer(), &*haystack, options);
    for (const NiahTask task : runs.niah->tasks) {
      for (const int32_t length : runs.niah->lengths) prompts->Check(task, length);
    }
    runs.niah->prompts = &*prompts;
  }
  for (const NamedAttention& policy : runs.policies) engine->SetAttention(policy.attention);  // do all fit?
  LoadEngine(*engine);

  ProgressBar bar("comparing");
  CompareCallbacks callbacks;
  callbacks.progress = [&](double share, const std::string& what) { bar.Update(share, what); };
  callbacks.stop = WasInterrupted;
  CompareResult result = RunCompare(*engine, runs, callbacks);
  bar.Clear();
  result.about.command = command_line;
  result.about.version = PHSA_VERSION;
  result.about.date = fmt::format("{:%Y-%m-%d %H:%M} UTC", fmt::gmtime(std::time(nullptr)));
  const CompareStory story = TellComparison(result);
  folder.Write(result, story);
  WriteOut(flags.json ? CompareJson(result) : CompareSummary(result, story));
  Note("{}: open it in a browser; report.md and report.json lie beside it", folder.page().string());
  if (result.about.interrupted) throw Interrupted{};
}

}  // namespace

void AddCompareCommand(CLI::App& app) {
  CLI::App* const command =
      app.add_subcommand("compare", "speed, needles, perplexity and recall of several attentions in one report");
  auto flags = std::make_shared<CompareFlags>();
  std::vector<Policy> compared =
      PoliciesThat([](Policy policy) { return RowOf(policy).baseline || policy == kOwnPolicy; });
  std::sort(compared.begin(), compared.end(), [](Policy a, Policy b) { return RowOf(a).rank < RowOf(b).rank; });
  flags->attention.policies.clear();
  for (const Policy policy : compared) flags->attention.policies.emplace_back(Name(policy));
  flags->flops_lengths = {"4k", "8k", "16k", "32k", "64k", "128k"};
  AddModelFlags(*command, flags->model);
  command->add_option("--sections", flags->parts, "what is measured: answers, speed, niah, perplexity, recall, flops")
      ->delimiter(',');
  command->add_option("--out", flags->out, "a folder for report.html, report.md and report.json");
  command->add_flag("--quick", flags->quick, "half the sizes and fewer runs, where no flag says otherwise");
  command->add_flag("--json", flags->json, "print report.json instead of a table");
  const std::string sizes = "Sizes";
  command->add_option("--lengths", flags->lengths, "speed: tokens of a prefill (1k,2k,4k,8k, as far as the model goes)")
      ->delimiter(',')
      ->group(sizes);
  command->add_option("-d,--depths", flags->depths, "speed: tokens in the cache when decoding (0,1k,2k,4k,8k)")
      ->delimiter(',')
      ->group(sizes);
  command->add_option("-n,--n-gen", flags->decode_tokens, "speed: tokens to decode")
      ->check(CLI::Range(1, 100000))
      ->group(sizes);
  command->add_option("-r,--repetitions", flags->repeats, "speed: how often each is measured (2)")
      ->check(CLI::Range(1, 1000))
      ->group(sizes);
  command->add_option("--niah-lengths", flags->niah_lengths, "needles: tokens of a sample (2k)")
      ->delimiter(',')
      ->group(sizes);
  command->add_option("--samples", flags->samples, "needles: samples of each task and length (10)")
      ->check(CLI::Range(1, 1000000))
      ->group(sizes);
  command->add_option("--text-tokens", flags->text_tokens, "perplexity and recall: tokens of the text (4k)")
      ->group(sizes);
  command->add_option("--flops-lengths", flags->flops_lengths, "FLOPs: tokens, 1024k for a million")
      ->delimiter(',')
      ->group(sizes);
  const std::string texts = "Texts";
  command->add_option("-f,--file", flags->file, "the text of perplexity, recall and questions; none: one of our own")
      ->group(texts);
  command->add_option("-p,--prompt", flags->questions, "a question about the text; may be given several times")
      ->group(texts)
      ->allow_extra_args(false);
  command->add_option("--expect", flags->expected, "what a right answer to each question says, in the same order")
      ->group(texts)
      ->allow_extra_args(false);
  command->add_option("--answer-tokens", flags->answer_tokens, "at most this many tokens of answer")
      ->check(CLI::Range(1, 100000))
      ->group(texts);
  command->add_option("--task", flags->tasks, "needles: tasks of `phsa niah`")->delimiter(',')->group(texts);
  command->add_option("--haystack", flags->haystack, "needles: a text file to hide them in; none: one of our own")
      ->group(texts);
  command->add_option("--seed", flags->seed, "needles: other seeds, other samples")->group(texts);
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags, command] { RunComparison(*flags, CommandLine(*command)); });
}

}  // namespace phsa::cli
