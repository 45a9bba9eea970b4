// `phsa chat`: a conversation. Ctrl-C ends the answer, at the prompt it ends the program.
#include <unistd.h>

#include <iostream>

#include "base/errors.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"

namespace phsa::cli {
namespace {

struct ChatFlags {
  ModelFlags model;
  AttentionFlags attention;
  SamplingFlags sampling;
  PromptCacheFlags prompt_cache;
  std::string document, system, chat_template;
};

constexpr const char* kHelp =
    "/reset forgets the conversation, /file PATH adds a text to the next question, /quit ends; Ctrl-C ends an answer";

// A line from the terminal; false at its end, or when Ctrl-C was pressed while waiting.
bool ReadLine(std::string& line) {
  if (isatty(STDIN_FILENO) == 1) PrintQuestionMark();
  line.clear();
  for (;;) {
    char c = 0;
    const ssize_t count = read(STDIN_FILENO, &c, 1);
    if (count < 0 && errno == EINTR && !WasInterrupted()) continue;
    if (count <= 0) return !line.empty() && !WasInterrupted();
    if (c == '\n') return true;
    line += c;
  }
}

void Chat(const ChatFlags& flags) {
  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model, flags.model.adapter);
  const ChatTemplate chat = ChooseChatTemplate(flags.chat_template, source->chat_template());
  const GenerateOptions options = SamplingOptions(flags.sampling, source->config());
  const int32_t context = flags.model.context > 0 ? flags.model.context : source->config().context;
  const std::vector<LayerSettings> attention = AttentionSettings(flags.attention, source->config(), context);
  if (attention.size() != 1) ThrowInvalid("chat: one --attention and one -K; `phsa bench` takes lists");
  Tokenizer tokenizer = LoadTokenizer(*source);
  const std::unique_ptr<Engine> engine =
      OpenEngine(std::move(source), std::move(tokenizer), flags.model, attention.front());
  LoadEngine(*engine);
  Note("{}", kHelp);

  Session session(*engine);
  std::vector<ChatMessage> messages;
  const auto reset = [&] {
    messages.clear();
    if (!flags.system.empty()) messages.push_back({"system", flags.system});
  };
  reset();
  std::string text = flags.document.empty() ? "" : ReadText(flags.document) + "\n\n";
  for (std::string line; ReadLine(line);) {
    if (line.empty()) continue;
    if (line == "/quit") break;
    if (line == "/reset") {
      reset();
      continue;
    }
    if (line == "/help") {
      Note("{}", kHelp);
      continue;
    }
    // What goes wrong with one question must not end the conversation.
    const size_t turns = messages.size();
    try {
      if (line.starts_with("/file ")) {
        text += ReadText(line.substr(6)) + "\n\n";
        Note("the text goes with your next question");
        continue;
      }
      messages.push_back({"user", text + line});
      ProgressBar bar("reading");
      GenerateCallbacks callbacks = PrefillCallbacks(bar);
      callbacks.text = [&](std::string_view part) {
        bar.Clear();
        WriteOut(part);
      };
      const std::vector<int32_t> prompt = chat.Encode(messages, true, engine->tokenizer());
      WarnPastTested(engine->config(), prompt.size());
      if (session.sequence().length() == 0) {
        HintAtPhsa(flags.attention, attention.front(), prompt.size());
        RestorePromptCache(flags.prompt_cache, session, prompt);
      }
      const GenerateResult result = session.Generate(prompt, options, callbacks);
      bar.Clear();
      WriteOut("\n");
      const auto generated = static_cast<double>(result.tokens.size());
      Note(
          "[{} prompt tokens, {} read before, first token after {}; {} tokens at {:.1f}/s; {:.0f} % of the "
          "tokens read; {}]",
          result.prompt_tokens, result.reused_tokens, DurationInWords(result.prefill_seconds), result.tokens.size(),
          result.decode_seconds > 0 && generated > 1 ? (generated - 1) / result.decode_seconds : 0.0,
          100 * result.tokens_read.share(), Name(result.reason));
      TellOfLoop(result);
      ClearInterrupt();
      if (result.tokens.empty() && result.reason == StopReason::kInterrupted) {
        messages.resize(turns);  // stopped before it answered: as if it had not been asked
        continue;
      }
      messages.push_back({"assistant", result.text});
      text.clear();
    } catch (const Error& error) {
      if (error.status() == PHSA_IO) throw;
      PrintError(error.what());
      messages.resize(turns);
    }
  }
  if (session.sequence().length() > 0) SavePromptCache(flags.prompt_cache, session);
  if (WasInterrupted()) throw Interrupted{};
}

}  // namespace

void AddChatCommand(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("chat", "a conversation with a model");
  auto flags = std::make_shared<ChatFlags>();
  AddModelFlags(*command, flags->model);
  command->add_option("-f,--file", flags->document, "a text that goes before the first question");
  command->add_option("--system", flags->system, "the system message");
  command->add_option("--chat-template", flags->chat_template,
                      "the chat template by name, where the model's is unknown");
  AddPromptCacheFlags(*command, flags->prompt_cache);
  AddSamplingFlags(*command, flags->sampling);
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags] { Chat(*flags); });
}

}  // namespace phsa::cli
