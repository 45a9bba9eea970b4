// `phsa chat`: a conversation. Ctrl-C ends an answer, and the program where it is pressed twice at the prompt.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/errors.h"
#include "base/nearest.h"
#include "base/new_file.h"
#include "cli/commands.h"
#include "cli/line_editor.h"
#include "cli/model_command.h"
#include "cli/options.h"
#include "cli/prompt.h"
#include "cli/terminal.h"
#include "io/json.h"

namespace phsa::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxConversationBytes = size_t{256} << 20;
constexpr const char *kSystem = "system", *kUser = "user", *kAssistant = "assistant";

struct ChatFlags {
  ModelFlags model;
  AttentionFlags attention;
  SamplingFlags sampling;
  PromptCacheFlags prompt_cache;
  std::string document, system, chat_template, history;
};

// Where a file goes that is of no use to anybody else, and of no harm when it is lost.
fs::path StateFolder() {
  const auto value = [](const char* name) {
    const char* const text = std::getenv(name);
    return std::string(text == nullptr ? "" : text);
  };
  if (const std::string state = value("XDG_STATE_HOME"); !state.empty()) return fs::path(state) / "phsa";
  if (const std::string home = value("HOME"); !home.empty()) return fs::path(home) / ".local" / "state" / "phsa";
  return {};
}

fs::path HistoryFile(const std::string& flag) {
  if (flag == "none") return {};
  if (!flag.empty()) return flag;
  const fs::path folder = StateFolder();
  return folder.empty() ? folder : folder / "chat-history";
}

std::string WithoutQuotes(std::string text) {
  const bool quoted = text.size() >= 2 && text.front() == text.back() && (text.front() == '"' || text.front() == '\'');
  return quoted ? text.substr(1, text.size() - 2) : text;
}

// --- conversations in files ---

void SaveConversation(const std::vector<ChatMessage>& messages, const std::string& path) {
  Json list = Json::array();
  for (const ChatMessage& message : messages) list.push_back({{"role", message.role}, {"content", message.content}});
  NewFile file(path);
  file.Write(Json{{"messages", std::move(list)}}.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  file.Keep();
}

// What a template takes: a system message perhaps, then the user and the assistant in turn.
std::vector<ChatMessage> ReadConversation(const std::string& path) {
  const Json json = ReadJsonFile(path, kMaxConversationBytes);
  const auto list = json.find("messages");
  if (list == json.end() || !list->is_array()) ThrowInvalid("{}: has no list \"messages\"", path);
  std::vector<ChatMessage> messages;
  for (const Json& one : *list) {
    const std::string place = fmt::format("{}: messages[{}]", path, messages.size());
    if (!one.is_object()) ThrowInvalid("{} is {}; allowed: an object", place, JsonText(one));
    const JsonFields fields(one, place);
    const std::string role = fields.String("role").value_or(""), content = fields.String("content").value_or("");
    const bool has_system = !messages.empty() && messages.front().role == kSystem;
    const size_t turn = messages.size() - (has_system ? 1 : 0);
    const char* const expected = turn % 2 == 0 ? kUser : kAssistant;
    if (role != expected && !(role == kSystem && messages.empty())) {
      ThrowInvalid("{} has the role {}; here it is {}", place, Quoted(role), expected);
    }
    messages.push_back({role, content});
  }
  return messages;
}

class Chat {
 public:
  explicit Chat(const ChatFlags& flags);
  void Talk();

 private:
  // Answers "/name rest"; false: the conversation is over.
  bool Command(const std::string& line);
  void Help() const;
  void Set(const std::string& rest);
  void AddDocuments(const std::string& path);
  void System(const std::string& text);
  void Save(const std::string& path) const;
  void Load(const std::string& path);
  void Retry();
  void Reset();

  void Ask(const std::string& question);
  bool Generate(const std::vector<ChatMessage>& messages);
  std::vector<int32_t> Encode(const std::vector<ChatMessage>& messages) const {
    return chat_->Encode(messages, true, engine_->tokenizer());
  }
  bool AsksSomething() const { return !messages_.empty() && messages_.back().role != kSystem; }

  const ChatFlags& flags_;
  SamplingFlags sampling_;
  GenerateOptions options_;
  std::optional<ChatTemplate> chat_;
  LayerSettings attention_;
  std::unique_ptr<Engine> engine_;
  std::optional<Session> session_;
  std::vector<ChatMessage> messages_;
  std::string system_;
  std::vector<Document> pending_;  // they go with the next question
};

struct CommandHelp {
  const char *name, *argument, *help;
};
constexpr CommandHelp kCommands[] = {
    {"/file", "PATH", "adds a document or a folder of them to the next question"},
    {"/system", "TEXT", "what the model is told first; - for nothing, no text to see it"},
    {"/set", "NAME VALUE", "changes a flag of the sampling, as /set temp 0.2; alone it shows them"},
    {"/retry", "", "asks the last question again"},
    {"/save", "FILE", "writes the conversation"},
    {"/load", "FILE", "goes on with a conversation that was saved"},
    {"/reset", "", "forgets the conversation"},
    {"/help", "", "shows this"},
    {"/quit", "", "ends, as Ctrl-D does"},
};

std::vector<LineCommand> LineCommands() {
  std::vector<LineCommand> commands;
  for (const CommandHelp& one : kCommands) {
    const std::string argument = one.argument;
    commands.push_back({one.name, argument == "PATH" || argument == "FILE"});
  }
  return commands;
}

// A line where there is no terminal, or one that can do nothing but print.
Typed ReadPlainLine(std::string& line) {
  const bool person = isatty(STDIN_FILENO) == 1;
  if (person) PrintQuestionMark();
  line.clear();
  for (;;) {
    char c = 0;
    const ssize_t count = read(STDIN_FILENO, &c, 1);
    if (count < 0 && errno == EINTR) {
      if (!WasInterrupted()) continue;
      if (!person) return Typed::kEnd;
      ClearInterrupt();
      WriteOut("\n");
      return Typed::kInterrupt;
    }
    if (count <= 0) return line.empty() ? Typed::kEnd : Typed::kLine;
    if (c == '\n') return Typed::kLine;
    line += c;
  }
}

Chat::Chat(const ChatFlags& flags) : flags_(flags), sampling_(flags.sampling), system_(flags.system) {
  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model, flags.model.adapter);
  chat_ = ChooseChatTemplate(flags.chat_template, source->chat_template());
  options_ = SamplingOptions(sampling_, source->config());
  const int32_t context = flags.model.context > 0 ? flags.model.context : source->config().context;
  const std::vector<LayerSettings> attention = AttentionSettings(flags.attention, source->config(), context);
  if (attention.size() != 1) ThrowInvalid("chat: one --attention and one -K; `phsa bench` takes lists");
  attention_ = attention.front();
  Tokenizer tokenizer = LoadTokenizer(*source);
  engine_ = OpenEngine(std::move(source), std::move(tokenizer), flags.model, attention_);
  Reset();
  if (!flags.document.empty()) AddDocuments(flags.document);
  LoadEngine(*engine_);
  session_.emplace(*engine_);
}

void Chat::Talk() {
  std::optional<LineEditor> editor;
  if (LineEditor::Possible()) {
    editor.emplace(HistoryFile(flags_.history), LineCommands());
    Note("/help lists the commands; Alt+Enter begins a new line; Ctrl-C ends an answer, twice at the prompt the chat");
  } else {
    Note("/help lists the commands; Ctrl-C ends an answer");
  }
  bool interrupted = false;
  for (std::string line;;) {
    const Typed typed = editor ? editor->Read(line) : ReadPlainLine(line);
    if (typed == Typed::kEnd) break;
    if (typed == Typed::kInterrupt) {
      if (interrupted) throw Interrupted{};
      Note("Ctrl-C once more ends the chat");
      interrupted = true;
      continue;
    }
    interrupted = false;
    if (line.empty()) continue;
    // What goes wrong with one line must not end the conversation.
    try {
      if (line.starts_with('/')) {
        if (!Command(line)) break;
      } else {
        Ask(line);
      }
    } catch (const Error& error) {
      if (error.status() == PHSA_IO && !line.starts_with('/')) throw;
      PrintError(error.message());
    }
  }
  if (session_->sequence().length() > 0) SavePromptCache(flags_.prompt_cache, *session_);
  if (WasInterrupted()) throw Interrupted{};
}

bool Chat::Command(const std::string& line) {
  const size_t blank = std::min(line.find_first_of(" \t\n"), line.size());
  const std::string name = line.substr(0, blank);
  const size_t begin = std::min(line.find_first_not_of(" \t\n", blank), line.size());
  const std::string rest = line.substr(begin);
  const auto alone = [&] {
    if (!rest.empty()) ThrowInvalid("{} takes nothing, and has {}", name, Quoted(rest));
  };
  const auto path = [&] {
    if (rest.empty()) ThrowInvalid("{} needs a path behind it", name);
    return WithoutQuotes(rest);
  };
  if (name == "/quit") {
    alone();
    return false;
  }
  if (name == "/help") {
    alone();
    Help();
  } else if (name == "/reset") {
    alone();
    Reset();
    pending_.clear();
  } else if (name == "/retry") {
    alone();
    Retry();
  } else if (name == "/file") {
    AddDocuments(path());
  } else if (name == "/system") {
    System(rest);
  } else if (name == "/set") {
    Set(rest);
  } else if (name == "/save") {
    Save(path());
  } else if (name == "/load") {
    Load(path());
  } else {
    std::vector<std::string> names;
    for (const CommandHelp& one : kCommands) names.emplace_back(one.name);
    ThrowInvalid("there is no command {}{}; /help lists them, and a blank before it makes it a question", Quoted(name),
                 DidYouMean(name, names));
  }
  return true;
}

void Chat::Help() const {
  for (const CommandHelp& one : kCommands) {
    Note("  {:<16}  {}", fmt::format("{} {}", one.name, one.argument), one.help);
  }
}

void Chat::Reset() {
  messages_.clear();
  if (!system_.empty()) messages_.push_back({kSystem, system_});
}

void Chat::System(const std::string& text) {
  if (text.empty()) {
    Note("{}", system_.empty() ? "there is no system message" : system_);
    return;
  }
  system_ = text == "-" ? "" : text;
  if (!messages_.empty() && messages_.front().role == kSystem) messages_.erase(messages_.begin());
  if (!system_.empty()) messages_.insert(messages_.begin(), {kSystem, system_});
}

// The flags of the sampling are parsed as on the command line.
void Chat::Set(const std::string& rest) {
  SamplingFlags changed = sampling_;
  CLI::App app;
  app.set_help_flag();
  AddSamplingFlags(app, changed);
  if (rest.empty()) {
    const SamplerSettings& now = options_.sampler;
    Note("temp {}, top-k {}, top-p {}, min-p {}, repeat-penalty {}, predict {}, seed {}", now.temperature, now.top_k,
         now.top_p, now.min_p, now.repetition_penalty, sampling_.max_tokens,
         sampling_.seed ? fmt::to_string(*sampling_.seed) : "another one each time");
    return;
  }
  const size_t blank = std::min(rest.find_first_of(" \t="), rest.size());
  const std::string name = rest.substr(0, blank);
  const size_t begin = std::min(rest.find_first_not_of(" \t=", blank), rest.size());
  const std::string value = rest.substr(begin), flag = (name.size() == 1 ? "-" : "--") + name;
  const CLI::Option* const option = app.get_option_no_throw(flag);
  if (option == nullptr) {
    std::vector<std::string> names;
    for (const CLI::Option* one : app.get_options()) {
      for (const std::string& known : one->get_lnames()) names.push_back(known);
    }
    ThrowInvalid("there is nothing to set that is called {}{}; there are {}", Quoted(name), DidYouMean(name, names),
                 fmt::join(names, ", "));
  }
  if (value.empty() && option->get_type_size() != 0) ThrowInvalid("/set {} needs a value behind it", name);
  try {
    std::vector<std::string> words = {value.empty() ? flag : name.size() == 1 ? flag + value : flag + "=" + value};
    app.parse(words);
  } catch (const CLI::ParseError& error) {
    ThrowInvalid("{}", error.what());
  }
  options_ = SamplingOptions(changed, engine_->config());  // which may refuse it
  sampling_ = std::move(changed);
}

void Chat::AddDocuments(const std::string& path) {
  std::vector<Document> documents;
  try {
    documents = ReadDocuments(
        {path}, [](const std::string& text) { Note("{}", text); }, ThrowIfInterrupted);
  } catch (const Interrupted&) {
    if (!session_) throw;
    ClearInterrupt();
    return;
  }
  const size_t before = pending_.size(), count = documents.size();
  pending_.insert(pending_.end(), std::make_move_iterator(documents.begin()), std::make_move_iterator(documents.end()));
  std::vector<ChatMessage> messages = messages_;
  messages.push_back({kUser, TurnAbout(pending_, "")});
  size_t tokens = 0;
  try {
    const std::vector<int32_t> prompt = Encode(messages);
    CheckPrompt(*engine_, prompt);
    tokens = prompt.size();
  } catch (const Error& error) {
    pending_.resize(before);
    ThrowInvalid("{}: does not go into the conversation: {}", path, error.message());
  }
  Note("{} with your next question; with {} it has {} of {} tokens",
       count == 1 ? "the document goes" : fmt::format("{} documents go", count), count == 1 ? "it" : "them", tokens,
       engine_->memory().context);
}

void Chat::Save(const std::string& path) const {
  if (!AsksSomething()) ThrowInvalid("there is no conversation to save yet");
  std::error_code error;
  if (fs::exists(path, error)) {
    try {
      ReadConversation(path);
    } catch (const Error&) {
      ThrowInvalid("{}: is there already and no conversation; give another name", path);
    }
  }
  SaveConversation(messages_, path);
  Note("{} messages saved", messages_.size());
}

void Chat::Load(const std::string& path) {
  std::vector<ChatMessage> messages = ReadConversation(path);
  const size_t tokens = Encode(messages).size();
  if (tokens >= static_cast<size_t>(engine_->memory().context)) {
    ThrowInvalid("{}: the conversation has {} tokens, the context {}", path, tokens, engine_->memory().context);
  }
  system_ = !messages.empty() && messages.front().role == kSystem ? messages.front().content : "";
  messages_ = std::move(messages);
  const bool open = AsksSomething() && messages_.back().role == kUser;
  Note("{} messages, {} tokens{}", messages_.size(), tokens, open ? "; /retry answers the last one" : "");
}

void Chat::Retry() {
  if (!AsksSomething()) ThrowInvalid("there is no question to ask again");
  std::vector<ChatMessage> asked = messages_;
  if (asked.back().role == kAssistant) asked.pop_back();
  Generate(asked);
}

void Chat::Ask(const std::string& question) {
  if (AsksSomething() && messages_.back().role == kUser) messages_.pop_back();  // a file's last one, never answered
  std::vector<ChatMessage> asked = messages_;
  asked.push_back({kUser, TurnAbout(pending_, question)});
  try {
    if (Generate(asked)) pending_.clear();
  } catch (const Error& error) {
    if (error.status() == PHSA_IO) throw;
    if (pending_.empty()) throw;
    pending_.clear();
    ThrowInvalid("{}; the documents were taken back, ask again without them", error.message());
  }
}

// Answers the last of the messages; they are the conversation from then on. False: it was stopped before it answered,
// and all is as if nothing had been asked.
bool Chat::Generate(const std::vector<ChatMessage>& messages) {
  const std::vector<int32_t> prompt = Encode(messages);
  CheckPrompt(*engine_, prompt);
  WarnPastTested(engine_->config(), prompt.size());
  if (session_->sequence().length() == 0) {
    HintAtPhsa(flags_.attention, attention_, prompt.size());
    RestorePromptCache(flags_.prompt_cache, *session_, prompt);
  }
  options_.sampler = ResolveSampling(sampling_, engine_->config());  // without a seed it is another one each time
  ProgressBar bar("prefill");
  GenerateCallbacks callbacks = PrefillCallbacks(bar);
  callbacks.text = [&](std::string_view part) {
    bar.Clear();
    WriteOut(part);
  };
  const GenerateResult result = session_->Generate(prompt, options_, callbacks);
  bar.Clear();
  WriteOut("\n");
  const auto generated = static_cast<double>(result.tokens.size());
  Note(
      "[{} prompt tokens, {} of them cached, first token after {}; {} tokens at {:.1f}/s; {:.0f} % of the "
      "tokens read; {}]",
      result.prompt_tokens, result.reused_tokens, DurationInWords(result.prefill_seconds), result.tokens.size(),
      result.decode_seconds > 0 && generated > 1 ? (generated - 1) / result.decode_seconds : 0.0,
      100 * result.tokens_read.share(), Name(result.reason));
  TellOfLoop(result);
  ClearInterrupt();
  if (result.tokens.empty() && result.reason == StopReason::kInterrupted) return false;
  messages_ = messages;
  messages_.push_back({kAssistant, result.text});
  return true;
}

}  // namespace

void AddChatCommand(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("chat", "a conversation with a model");
  const auto flags = FlagsWithModel<ChatFlags>(*command);
  command->add_option(
      "-f,--file", flags->document,
      "a document (text, HTML, PDF, EPUB, DOCX) or a folder of them that goes before the first question");
  command->add_option("--system", flags->system, "the system message");
  command->add_option("--chat-template", flags->chat_template,
                      "the chat template by name, where the model's is unknown");
  command->add_option(
      "--history", flags->history,
      "the file that keeps what was typed (chat-history in phsa's folder of ~/.local/state); none: none "
      "does");
  AddPromptCacheFlags(*command, flags->prompt_cache);
  AddSamplingFlags(*command, flags->sampling);
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags] { Chat(*flags).Talk(); });
}

}  // namespace phsa::cli
