// `phsa ask`: a question about documents, and the passages that the answer was read from.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/errors.h"
#include "base/utf8.h"
#include "cli/budget_json.h"
#include "cli/commands.h"
#include "cli/model_command.h"
#include "cli/options.h"
#include "cli/prompt.h"
#include "cli/terminal.h"
#include "documents/document.h"
#include "engine/text_cache.h"
#include "eval/inspect_report.h"
#include "eval/sources.h"
#include "io/model_store.h"

namespace phsa::cli {
namespace {

using Json = nlohmann::json;

constexpr size_t kShownCharacters = 300;  // of a passage, in a terminal
constexpr uint64_t kGigabyte = uint64_t{1} << 30;

struct AskFlags {
  ModelFlags model;
  AttentionFlags attention;
  SamplingFlags sampling;
  std::vector<std::string> words;  // files, then the question
  std::string system, chat_template, cache_folder;
  double cache_gigabytes = 8;
  int32_t sources = 5;
  bool no_cache = false, json = false;
};

std::vector<Document> Documents(const AskFlags& flags) {
  if (flags.words.size() < 2) {
    ThrowInvalid("ask: {}; give files and, behind them, the question: phsa ask -m MODEL FILE… \"question\"",
                 std::filesystem::exists(flags.words.front()) ? "there is no question" : "there is no file");
  }
  std::error_code error;
  if (std::filesystem::exists(flags.words.back(), error)) {
    ThrowInvalid("ask: the last argument, {}, is a file; the question comes last",
                 Quoted(flags.words.back(), kQuotedPath));
  }
  if (flags.words.back().find_first_not_of(" \t\r\n") == std::string::npos) ThrowInvalid("ask: the question is empty");
  return ReadDocuments(
      {flags.words.begin(), flags.words.end() - 1}, [](const std::string& text) { Note("{}", text); },
      ThrowIfInterrupted);
}

// The documents in the prompt; their last token's end is where the question begins.
struct Located {
  std::vector<SourceText> texts;
  int32_t end = 0;
};

Located Locate(const Tokenizer& tokenizer, std::span<const int32_t> prompt, const std::vector<Document>& documents,
               const std::string& turn) {
  Located out;
  SourceFinder finder(tokenizer, prompt);
  finder.Enter(turn);
  for (const Document& document : documents) {
    if (documents.size() > 1) finder.Pass(DocumentTitle(document));
    std::optional<SourceText> text =
        finder.Find(document.text, document.code ? SentenceKind::kLines : SentenceKind::kProse);
    if (!text) ThrowInvalid("{}: the chat template changes its text, so that no source can be named", document.name);
    out.end = std::max(out.end, text->end);
    out.texts.push_back(std::move(*text));
  }
  return out;
}

// How many characters there are before a byte.
size_t Characters(std::string_view text, size_t end) {
  size_t count = 0;
  for (size_t at = 0; at < end; ++count) at += ScanUtf8(text, at).size;
  return count;
}

Json SourceJson(const Passage& passage, const Document& document) {
  const size_t begin = Characters(document.text, passage.begin);
  return {
      {"file", document.name},
      {"start", begin},
      {"end", begin + Characters(std::string_view(document.text).substr(passage.begin), passage.end - passage.begin)},
      {Name(document.unit), document.PlaceOf(passage.begin)},
      {"text", document.text.substr(passage.begin, passage.end - passage.begin)},
      {"weight", std::round(passage.weight * 1e4) / 1e4}};
}

void PrintSources(const std::vector<Passage>& passages, const std::vector<Document>& documents) {
  if (passages.empty()) {
    WriteOut("\nNo passage of the documents stands out.\n");
    return;
  }
  std::string out = "\nSources\n";
  for (size_t i = 0; i < passages.size(); ++i) {
    const Document& document = documents[passages[i].text];
    const std::string text = document.text.substr(passages[i].begin, passages[i].end - passages[i].begin);
    out +=
        fmt::format("[{}] {}, {} {} ({:.0f} %): {}\n", i + 1, OneLine(document.name, kQuotedPath), Name(document.unit),
                    document.PlaceOf(passages[i].begin), 100 * passages[i].weight, OneLine(text, kShownCharacters));
  }
  WriteOut(out);
}

// A question about documents, as the model reads it.
struct Asked {
  std::vector<Document> documents;
  std::vector<int32_t> prompt;
  Located located;
  // What any question about these documents begins with.
  std::span<const int32_t> before_question() const { return std::span(prompt).first(static_cast<size_t>(located.end)); }
};

struct Answered {
  GenerateResult result;
  int32_t cached = 0;  // tokens of the prompt that were kept from before
  double first_token = 0, sources_seconds = 0;
  std::vector<Passage> passages;
  double decode_speed() const {
    if (result.decode_seconds <= 0 || result.tokens.size() <= 1) return 0;
    return static_cast<double>(result.tokens.size() - 1) / result.decode_seconds;
  }
};

Asked Encode(const AskFlags& flags, const ModelSource& source, const Tokenizer& tokenizer,
             std::vector<Document> documents) {
  const std::string turn = TurnAbout(documents, flags.words.back());
  const ChatTemplate chat = ChooseChatTemplate(flags.chat_template, source.chat_template());
  std::vector<ChatMessage> messages;
  if (!flags.system.empty()) messages.push_back({"system", flags.system});
  messages.push_back({"user", turn});
  Asked asked{std::move(documents), chat.Encode(messages, true, tokenizer), {}};
  asked.located = Locate(tokenizer, asked.prompt, asked.documents, turn);
  return asked;
}

// Takes what was kept of these documents, or prefills them and keeps that. Returns how many tokens were taken.
int32_t ReadDocumentsOnce(const AskFlags& flags, const Asked& asked, Engine& engine, Session& session,
                          ProgressBar& bar) {
  if (flags.no_cache) return 0;
  const auto folder =
      flags.cache_folder.empty() ? CacheFolder() / "documents" : std::filesystem::path(flags.cache_folder);
  const TextCache cache(folder, static_cast<uint64_t>(flags.cache_gigabytes * static_cast<double>(kGigabyte)),
                        [](const std::string& text) { Note("{}", text); });
  const std::span<const int32_t> read_once = asked.before_question();
  const int32_t cached = cache.Restore(engine, session, read_once);
  if (cached >= asked.located.end) return cached;
  // Kept as soon as it is read, and what was read of it where Ctrl-C comes first.
  const bool whole =
      session
          .Prefill(
              read_once, PrefillCallbacks(bar), [](int32_t, int32_t, const LogitsRow&) {}, BatchItem::Logits::kNone)
          .has_value();
  bar.Clear();
  if (session.sequence().length() > cached) cache.Save(engine, session, read_once);
  if (!whole) throw Interrupted{};
  return cached;
}

Answered AnswerAndFindSources(const AskFlags& flags, const GenerateOptions& options, const Asked& asked,
                              Engine& engine) {
  Session session(engine);
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  Answered out;
  ProgressBar bar("prefill");
  out.cached = ReadDocumentsOnce(flags, asked, engine, session, bar);
  GenerateCallbacks callbacks = PrefillCallbacks(bar);
  callbacks.text = [&](std::string_view text) {
    bar.Clear();
    if (out.first_token == 0) out.first_token = seconds();
    if (!flags.json) WriteOut(text);
  };
  out.result = session.Generate(asked.prompt, options, callbacks);
  bar.Clear();
  if (!flags.json) WriteOut("\n");
  TellOfLoop(out.result);
  if (out.result.reason == StopReason::kInterrupted) throw Interrupted{};

  SourceOptions wanted;
  wanted.most = static_cast<size_t>(flags.sources);
  const double answered = seconds();
  out.passages =
      FindSources(engine, session.sequence(), out.result.prompt_tokens, static_cast<int32_t>(out.result.tokens.size()),
                  asked.located.texts, WasInterrupted, wanted);
  ThrowIfInterrupted();
  out.sources_seconds = seconds() - answered;
  return out;
}

void WriteJson(const Answered& answered, const std::vector<Document>& documents, const Settings& attention) {
  const GenerateResult& result = answered.result;
  Json sources = Json::array();
  for (const Passage& passage : answered.passages) sources.push_back(SourceJson(passage, documents[passage.text]));
  Json line = {{"answer", result.text},
               {"sources", std::move(sources)},
               {"stop_reason", Name(result.reason)},
               {"prompt_tokens", result.prompt_tokens},
               {"cached_tokens", answered.cached},
               {"tokens", result.tokens.size()},
               {"time_to_first_token_s", answered.first_token},
               {"sources_s", answered.sources_seconds},
               {"decode_tokens_per_s", answered.decode_speed()},
               {"attention", Name(attention.policy)},
               {"read_share", result.tokens_read.share()},
               {"peak_memory_bytes", PeakMemoryBytes()}};
  AddBudget(attention, &line);
  WriteOut(line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
}

void NoteMeasurements(const Answered& answered) {
  const GenerateResult& result = answered.result;
  Note("{} prompt tokens{}, first token after {}; {} tokens at {:.1f}/s; {}; sources after {}; peak memory {}",
       result.prompt_tokens, answered.cached > 0 ? fmt::format(", {} of them kept from before", answered.cached) : "",
       DurationInWords(answered.first_token), result.tokens.size(), answered.decode_speed(), Name(result.reason),
       DurationInWords(answered.sources_seconds), BytesInWords(PeakMemoryBytes()));
}

void Ask(const AskFlags& flags) {
  std::vector<Document> documents = Documents(flags);
  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model, flags.model.adapter);
  const GenerateOptions options = SamplingOptions(flags.sampling, source->config());
  Tokenizer tokenizer = LoadTokenizer(*source);
  const Asked asked = Encode(flags, *source, tokenizer, std::move(documents));
  ModelFlags model = flags.model;
  const int32_t needed = ContextFor(asked.prompt.size(), options.max_tokens, source->config());
  const int32_t context = model.context > 0 ? model.context : needed;
  if (flags.sampling.max_tokens > 0) model.context = context;
  const std::vector<LayerSettings> attention = AttentionSettings(flags.attention, source->config(), context);
  if (attention.size() != 1) ThrowInvalid("ask: one --attention and one -K; `phsa bench` takes lists");
  HintAtPhsa(flags.attention, attention.front(), asked.prompt.size());
  WarnPastTested(source->config(), asked.prompt.size());
  const std::unique_ptr<Engine> engine = OpenEngine(std::move(source), std::move(tokenizer), model, attention.front());
  LoadEngine(*engine);
  CheckPrompt(*engine, asked.prompt);

  const Answered answered = AnswerAndFindSources(flags, options, asked, *engine);
  if (flags.json) {
    WriteJson(answered, asked.documents, attention.front().base);
  } else {
    if (flags.sources > 0) PrintSources(answered.passages, asked.documents);
    NoteMeasurements(answered);
  }
}

}  // namespace

void AddAskCommand(CLI::App& app) {
  CLI::App* const command =
      app.add_subcommand("ask", "answers a question about documents, and shows the passages it was read from");
  const auto flags = FlagsWithModel<AskFlags>(*command);
  command
      ->add_option("FILE", flags->words,
                   "text, Markdown, HTML, PDF, EPUB, DOCX, source code, folders of these, - for standard input; and, "
                   "last, the question")
      ->required();
  command->add_flag("--json", flags->json, "one JSON object with the answer, its sources and its measurements");
  command->add_option("--sources", flags->sources, "at most this many passages; 0: none")->check(CLI::Range(0, 50));
  command->add_option("--system", flags->system, "the system message");
  command->add_option("--chat-template", flags->chat_template,
                      "the chat template by name, where the model's is unknown");
  command->add_option("--cache-dir", flags->cache_folder,
                      "the folder that keeps the KV cache of documents (documents in the program's cache)");
  command->add_option("--cache-size", flags->cache_gigabytes, "GiB that the folder may take; what is oldest goes first")
      ->check(CLI::Range(0.0, 1e6));
  command->add_flag("--no-cache", flags->no_cache, "nothing is taken from the folder, and nothing kept");
  AddSamplingFlags(*command, flags->sampling);
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags] { Ask(*flags); });
}

}  // namespace phsa::cli
