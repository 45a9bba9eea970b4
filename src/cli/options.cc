#include "cli/options.h"

#include <charconv>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <thread>

#include "attention/policies.h"
#include "base/errors.h"
#include "base/mapped_file.h"
#include "base/plain_names.h"
#include "cli/spelling.h"
#include "cli/terminal.h"
#include "engine/attention_choice.h"
#include "engine/speculation.h"
#include "grammar/grammar.h"
#include "io/model_store.h"
#include "phsa/punctuation.h"
#include "tokenizer/utf8_scan.h"

namespace phsa::cli {
namespace {

// Texts are read whole; nobody's context holds this many bytes.
constexpr size_t kMaxTextBytes = size_t{1} << 30;
constexpr int32_t kMaxTokenCount = 1 << 28;
constexpr size_t kMaxGrammarBytes = size_t{1} << 20;

}  // namespace

void AddModelFlags(CLI::App& command, ModelFlags& flags) {
  command
      .add_option("-m,--model", flags.model, "a .gguf file, a Hugging Face folder, or a name that `phsa models` lists")
      ->required();
  AddRunFlags(command, flags);
}

void AddRunFlags(CLI::App& command, ModelFlags& flags) {
  AddAdapterFlag(command, flags.adapter);
  command.add_option("-c,--ctx-size", flags.context, "tokens of context; 0: the model's, or what fits into memory");
  command.add_option("-t,--threads", flags.threads, "threads; 0: one per physical core");
  command.add_option("--device", flags.device,
                     "where the model runs: auto (a GPU that can, else the CPU), cpu, cuda, cuda:N");
  command.add_option("--weights", flags.weights, "how weights are kept: auto, f32, bf16, int8")
      ->check(CLI::IsMember({"auto", "f32", "bf16", "int8"}));
  command.add_option("--kv-type", flags.kv_type, "type of the KV cache: auto, f32, f16, bf16, int8")
      ->check(CLI::IsMember({"auto", "f32", "f16", "bf16", "int8"}));
  command.add_option("--chunk", flags.chunk, "tokens of a prefill step; 0: 512, on a GPU 8192");
}

void AddAdapterFlag(CLI::App& command, std::string& folder) {
  command.add_option("--adapter", folder, "the folder of a LoRA adapter for the model, in PEFT's form");
}

namespace {

// What a setting takes, in few words, and what it is unless somebody says otherwise.
std::string HelpOf(const IntSetting& row, const Settings& ours, const Settings& in_short) {
  std::string takes;
  if (row.choices[0] > 0) takes = Allowed(row);
  if (row.of_blocks) takes = "multiples of the block";
  const int32_t otherwise = ours.*row.value, small = in_short.*row.value;
  return fmt::format("{}{}{} ({}{})", row.help, takes.empty() ? "" : "; ", takes, otherwise,
                     small != otherwise ? fmt::format("; {} up to 4k of context", small) : "");
}
std::string HelpOf(const LambdaSetting& row, const Settings& ours, const Settings&) {
  return fmt::format("weight of the plain mean in a representative, {} ({})", Allowed(row), ours.*row.value);
}
std::string HelpOf(const ReduceSetting& row, const Settings& ours, const Settings&) {
  return fmt::format("{}; {} ({})", row.help, Allowed(row), Name(ours.*row.value));
}
std::string HelpOf(const TextSetting& row, const Settings& ours, const Settings&) {
  return fmt::format("{}; {}, or a file ({})", row.help, fmt::join(PunctuationSetNames(), ", "), ours.*row.value);
}

template <class T>
using FlagValue = std::conditional_t<std::is_same_v<T, GroupReduce>, std::string, T>;

}  // namespace

void AddAttentionFlags(CLI::App& command, AttentionFlags& flags) {
  const std::string group = "Attention";
  command
      .add_option("--attention", flags.policies,
                  "auto (the settings of the model or its adapter, else dense), " + PolicyNames())
      ->delimiter(',')
      ->group(group);
  const Settings ours, in_short = Settings::Preset(1);
  ForEachSetting([&](const auto& row) {
    using Row = std::decay_t<decltype(row)>;
    if constexpr (!std::is_same_v<Row, PolicySetting>) {
      const std::string help = HelpOf(row, ours, in_short);
      if (row.name == std::string_view("top_k")) {  // lists make sweeps; --top-k is the sampler's
        command.add_option("-K,--attention-top-k", flags.top_k, help)->delimiter(',')->group(group);
        return;
      }
      using Value = FlagValue<std::decay_t<decltype(ours.*row.value)>>;
      const auto take = [&flags, name = row.name](const Value& value) { flags.given[name] = value; };
      command.add_option_function<Value>(FlagOf(std::string(1, kSettingSign) + row.name), take, help)->group(group);
    }
  });
  command
      .add_option("--preset", flags.preset,
                  "init and local by name: paper-4k (16 and 128), paper-32k (128 and 512), with one part a block")
      ->check(CLI::IsMember({"paper-4k", "paper-32k"}))
      ->group(group);
  command.add_option("--phsa-config", flags.config_file, "a JSON file with settings, per layer where wanted")
      ->group(group);
}

namespace {

constexpr size_t kMaxConfigBytes = size_t{16} << 20;

// No settings for K: whatever is said elsewhere.
std::vector<std::optional<int32_t>> TopKs(const AttentionFlags& flags) {
  if (flags.top_k.empty()) return {std::nullopt};
  return {flags.top_k.begin(), flags.top_k.end()};
}

}  // namespace

std::string ReadSettingsFile(const std::string& path) {
  std::string json = ReadTextFile(path, kMaxConfigBytes);
  // An empty file is refused: for a choice it would mean none.
  WithPlainNames([&] { return SettingsFromJson(json); });
  return json;
}

AttentionChoice ChoiceOf(const AttentionFlags& flags) {
  AttentionChoice choice;
  choice.policy = flags.policies.front();
  choice.preset = flags.preset;
  choice.given = flags.given;
  if (!flags.top_k.empty()) choice.given["top_k"] = flags.top_k.front();
  if (!flags.config_file.empty()) {
    choice.config_json = ReadSettingsFile(flags.config_file);
  }
  return choice;
}

std::vector<LayerSettings> SomeAttentionSettings(const AttentionFlags& flags, const ModelConfig& config,
                                                 int64_t context) {
  AttentionChoice choice = ChoiceOf(flags);
  std::vector<LayerSettings> all;
  for (const std::string& policy : flags.policies) {
    for (const std::optional<int32_t> top_k : TopKs(flags)) {
      choice.policy = policy;
      if (top_k) choice.given["top_k"] = *top_k;
      LayerSettings settings = ResolveAttention(choice, config, context);
      if (all.empty() || settings != all.back()) all.push_back(std::move(settings));
      if (!Chooses(all.back().base.policy)) break;
    }
  }
  return all;
}

std::vector<LayerSettings> AttentionSettings(const AttentionFlags& flags, const ModelConfig& config, int64_t context) {
  std::vector<LayerSettings> all = SomeAttentionSettings(flags, config, context);
  RefuseWithoutEffect(ChoiceOf(flags), all);
  return all;
}

void AddSamplingFlags(CLI::App& command, SamplingFlags& flags) {
  const std::string group = "Sampling";
  const SamplerSettings ours;
  const auto sampling = [&](const char* name, auto& value, const char* help, auto otherwise) {
    command.add_option(name, value, fmt::format("{} (the model's, else {})", help, otherwise))->group(group);
  };
  command
      .add_option("-n,--predict", flags.max_tokens,
                  "at most this many tokens of answer; -1: until the end token or a full context")
      ->check(CLI::Validator(
          [](const std::string& text) {
            const bool known = text == "-1" || CLI::Range(1, 1 << 30)(text).empty();
            return known ? std::string() : text + " is neither -1 nor 1 and up";
          },
          ""));
  sampling("--temp", flags.temperature, "temperature; 0: always the most likely token", ours.temperature);
  sampling("--top-k", flags.top_k, "sample from this many tokens; 0: all", ours.top_k);
  sampling("--top-p", flags.top_p, "sample from the likeliest tokens that make up this share", ours.top_p);
  sampling("--min-p", flags.min_p, "least probability, as a share of the likeliest token's", ours.min_p);
  sampling("--repeat-penalty", flags.repetition_penalty, "above 1: less of what was there", ours.repetition_penalty);
  command.add_option("--seed", flags.seed, "the same seed gives the same answer; none: a new one each time")
      ->group(group);
  command.add_option("--stop", flags.stops, "text that ends the answer; may be given several times")
      ->group(group)
      ->allow_extra_args(false);
  command.add_flag("--ignore-eos", flags.ignore_eos, "go on after the model's end token, and through loops")
      ->group(group);
  command
      .add_flag("--allow-loops", flags.allow_loops,
                fmt::format("go on where the answer repeats the same tokens {} times over; without, it ends there",
                            RepetitionWatch::kTimes))
      ->group(group);
  AddSpeculateFlag(command, flags.speculate)->group(group);
  CLI::Option* const grammar =
      command.add_option("--grammar", flags.grammar_file, "the answer follows this file's grammar (GBNF)")
          ->group(group);
  command.add_option("--json-schema", flags.schema_file, "the answer is JSON that fulfils this file's schema")
      ->group(group)
      ->excludes(grammar);
}

CLI::Option* AddSpeculateFlag(CLI::App& command, std::string& name) {
  return command
      .add_option("--speculate", name,
                  "ngram: try what followed the last words where the text has them before, several tokens a step; the "
                  "same answer, sooner where it copies from the text")
      ->capture_default_str();
}

GenerateOptions SamplingOptions(const SamplingFlags& flags, const ModelConfig& config) {
  GenerateOptions options;
  options.sampler = ResolveSampling(flags, config);
  options.max_tokens = flags.max_tokens < 0 ? std::numeric_limits<int32_t>::max() : flags.max_tokens;
  options.stops = flags.stops;
  options.ignore_eos = flags.ignore_eos;
  options.stop_loops = !flags.allow_loops && !flags.ignore_eos;
  options.speculation = SpeculationFromName(flags.speculate);
  if (!flags.grammar_file.empty()) {
    options.grammar = CompileGbnf(ReadTextFile(flags.grammar_file, kMaxGrammarBytes), flags.grammar_file);
  } else if (!flags.schema_file.empty()) {
    options.grammar = CompileJsonSchemaText(ReadTextFile(flags.schema_file, kMaxGrammarBytes), flags.schema_file);
  }
  return options;
}

void TellOfLoop(const GenerateResult& result) {
  if (result.reason != StopReason::kLoop) return;
  Warn(
      "the answer repeated itself and was ended; --repeat-penalty 1.1 or a higher --temp may help, --allow-loops goes "
      "on");
}

std::unique_ptr<ModelSource> OpenModel(const std::string& model, const std::string& adapter) {
  return ModelSource::Open(ResolveModel(model), adapter);
}

std::unique_ptr<Engine> OpenEngine(std::unique_ptr<ModelSource> source, Tokenizer tokenizer, const ModelFlags& flags,
                                   const LayerSettings& attention) {
  EngineOptions options;
  options.device = flags.device;
  options.weights = WeightsModeFromName(flags.weights);
  if (flags.kv_type != "auto") options.kv_dtype = KvTypeFromName(flags.kv_type);
  options.context = flags.context;
  options.threads = flags.threads;
  options.chunk = flags.chunk;
  options.cache_tokens = flags.cache_tokens;
  options.cache_texts = flags.cache_texts;
  options.other_attention = flags.other_attention;
  options.attention = attention;
  auto engine = std::make_unique<Engine>(std::move(source), std::move(tokenizer), options);
  // More threads than cores wait for each other at every step.
  if (const auto cores = std::thread::hardware_concurrency();
      cores > 0 && flags.threads > 2 * static_cast<int64_t>(cores)) {
    Warn("-t {} is more than the {} cores here, which makes it slower; -t 0 takes one thread per core", flags.threads,
         cores);
  }
  if (!engine->device().note.empty()) Note("{}", engine->device().note);
  Note("{}", engine->memory().Text());
  if (flags.context == 0 && engine->memory().context < engine->config().context) {
    Note("context: {} of the model's {} tokens, as many as fit into memory", engine->memory().context,
         engine->config().context);
  }
  return engine;
}

void LoadEngine(Engine& engine) {
  ProgressBar bar("loading");
  const bool loaded = engine.Load([&](double share) {
    bar.Update(share, BytesInWords(engine.source().file_bytes()));
    return !WasInterrupted();
  });
  if (!loaded) throw Interrupted{};
}

void HintAtPhsa(const AttentionFlags& flags, const LayerSettings& chosen, size_t prompt_tokens) {
  if (flags.policies.front() != "auto" || !IsDense(chosen.base) || prompt_tokens <= kCrossover) return;
  Note(
      "attention: dense, as the model carries no settings for PHSA; --attention phsa has a faster prefill of long "
      "texts, and an untrained model's answer may change");
}

void WarnPastTested(const ModelConfig& config, size_t tokens) {
  static bool warned = false;
  const std::optional<int32_t> tested = TestedTokens(config);
  if (warned || !tested || tokens <= static_cast<size_t>(*tested)) return;
  warned = true;
  Warn("warning: {}", PastTestedTokens(config, *tested, static_cast<int64_t>(tokens)));
}

void AddPromptCacheFlags(CLI::App& command, PromptCacheFlags& flags) {
  command.add_option("--prompt-cache", flags.file,
                     "a file that keeps the KV cache, so that the next run with the same text needs no prefill of it");
  command.add_flag("--prompt-cache-ro", flags.read_only, "the file is read, but not written");
}

void RestorePromptCache(const PromptCacheFlags& flags, Session& session, std::span<const int32_t> prompt) {
  if (!flags.file.empty() && std::filesystem::exists(flags.file)) session.Restore(flags.file, prompt);
}

void SavePromptCache(const PromptCacheFlags& flags, const Session& session) {
  if (!flags.file.empty() && !flags.read_only) session.Save(flags.file);
}

ChatTemplate ChooseChatTemplate(const std::string& name, const std::string& model_template) {
  return name.empty() ? ChatTemplate::Recognise(model_template) : ChatTemplate::ByName(name);
}

int32_t TokenCount(const std::string& text, const char* flag, int32_t least) {
  const bool kilo = text.ends_with('k') || text.ends_with('K');
  const char* const end = text.data() + text.size() - (kilo ? 1 : 0);
  int32_t value = 0;
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  const int64_t tokens = int64_t{value} * (kilo ? 1024 : 1);
  if (error != std::errc{} || rest != end || tokens < least || tokens > kMaxTokenCount) {
    ThrowInvalid("{} has {}; it takes numbers of tokens such as 512,4k", flag, Quoted(text));
  }
  return static_cast<int32_t>(tokens);
}

std::string ReadText(const std::string& path) {
  const bool standard_input = path == "-";
  std::string text;
  if (standard_input) {
    char part[1 << 16];
    for (size_t count; (count = std::fread(part, 1, sizeof(part), stdin)) > 0;) {
      text.append(part, count);
      if (text.size() > kMaxTextBytes) ThrowInvalid("standard input: more than {} bytes of text", kMaxTextBytes);
    }
  } else {
    text = ReadTextFile(path, kMaxTextBytes);
  }
  const size_t bad = FirstInvalidUtf8(text);
  if (bad < text.size()) {
    ThrowInvalid("{}: the byte at offset {} is not UTF-8; convert the text first (iconv does)",
                 standard_input ? "standard input" : path, bad);
  }
  return text;
}

GenerateCallbacks PrefillCallbacks(ProgressBar& bar) {
  GenerateCallbacks callbacks;
  callbacks.prefill = [&bar](int32_t done, int32_t total) {
    if (total > 1024) bar.Update(static_cast<double>(done) / total, fmt::format("{} of {} tokens", done, total));
  };
  callbacks.stop = WasInterrupted;
  return callbacks;
}

}  // namespace phsa::cli
