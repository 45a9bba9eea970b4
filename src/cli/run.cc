// `phsa run`: one question, one answer.
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"

namespace phsa::cli {
namespace {

struct RunFlags {
  ModelFlags model;
  AttentionFlags attention;
  SamplingFlags sampling;
  std::string document, prompt, system, chat_template;
  bool raw = false, json = false;
};

std::vector<int32_t> PromptTokens(const RunFlags& flags, const ModelSource& source, const Tokenizer& tokenizer) {
  std::string text = flags.document.empty() ? "" : ReadText(flags.document);
  if (!text.empty() && !flags.prompt.empty()) text += "\n\n";
  text += flags.prompt;
  if (flags.raw) {
    std::vector<int32_t> ids;
    if (tokenizer.add_bos() && tokenizer.bos() >= 0) ids.push_back(tokenizer.bos());
    const std::vector<int32_t> rest = tokenizer.Encode(text, SpecialTokens::kRecognise);
    ids.insert(ids.end(), rest.begin(), rest.end());
    return ids;
  }
  const ChatTemplate chat = ChooseChatTemplate(flags.chat_template, source.chat_template());
  std::vector<ChatMessage> messages;
  if (!flags.system.empty()) messages.push_back({"system", flags.system});
  messages.push_back({"user", text});
  return chat.Encode(messages, true, tokenizer);
}

void Run(const RunFlags& flags) {
  if (flags.prompt.empty() && flags.document.empty()) {
    ThrowInvalid("run: there is nothing to answer; give a question (-p), a text (-f), or both");
  }
  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model);
  const GenerateOptions options = SamplingOptions(flags.sampling, source->config());
  const int32_t model_context = source->config().context;
  Tokenizer tokenizer = LoadTokenizer(*source);
  const std::vector<int32_t> prompt = PromptTokens(flags, *source, tokenizer);
  // Only what this question needs, unless -c asks for more.
  ModelFlags model = flags.model;
  if (model.context == 0) {
    const int64_t needed = static_cast<int64_t>(prompt.size()) + options.max_tokens;
    if (static_cast<int64_t>(prompt.size()) >= model_context) {
      ThrowInvalid("run: the prompt has {} tokens, the model's context {}; give a shorter text", prompt.size(),
                   model_context);
    }
    model.context = static_cast<int32_t>(std::min<int64_t>(needed, model_context));
  }
  const std::vector<LayerSettings> attention = AttentionSettings(flags.attention, source->config(), model.context);
  if (attention.size() != 1) ThrowInvalid("run: one --attention and one -K; `phsa bench` takes lists");
  const std::unique_ptr<Engine> engine = OpenEngine(std::move(source), std::move(tokenizer), model, attention.front());
  LoadEngine(*engine);

  Session session(*engine);
  ProgressBar bar("reading");
  GenerateCallbacks callbacks = PrefillCallbacks(bar);
  callbacks.text = [&](std::string_view text) {
    bar.Clear();
    if (!flags.json) WriteOut(text);
  };
  const GenerateResult result = session.Generate(prompt, options, callbacks);
  bar.Clear();
  const auto generated = static_cast<double>(result.tokens.size());
  const double prefill_speed = result.prefill_seconds > 0 ? result.prompt_tokens / result.prefill_seconds : 0;
  const double decode_speed = result.decode_seconds > 0 && generated > 1 ? (generated - 1) / result.decode_seconds : 0;
  if (flags.json) {
    const nlohmann::json line = {{"text", result.text},
                                 {"stop_reason", Name(result.reason)},
                                 {"prompt_tokens", result.prompt_tokens},
                                 {"tokens", result.tokens.size()},
                                 {"prefill_tokens_per_s", prefill_speed},
                                 {"decode_tokens_per_s", decode_speed},
                                 {"time_to_first_token_s", result.prefill_seconds},
                                 {"attention", Name(attention.front().base.policy)},
                                 {"peak_memory_bytes", PeakMemoryBytes()}};
    WriteOut(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  } else {
    WriteOut("\n");
    fmt::print(stderr,
               "{} prompt tokens at {:.0f}/s, first token after {}; {} tokens at {:.1f}/s; {}; peak memory {}\n",
               result.prompt_tokens, prefill_speed, DurationInWords(result.prefill_seconds), result.tokens.size(),
               decode_speed, Name(result.reason), BytesInWords(PeakMemoryBytes()));
  }
  if (result.reason == StopReason::kInterrupted) throw Interrupted{};
}

}  // namespace

void AddRunCommand(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("run", "answers one question, about a text if one is given");
  auto flags = std::make_shared<RunFlags>();
  AddModelFlags(*command, flags->model);
  command->add_option("-f,--file", flags->document, "a text that the question is about; - for standard input");
  command->add_option("-p,--prompt", flags->prompt, "the question");
  command->add_option("--system", flags->system, "the system message");
  command->add_option("--chat-template", flags->chat_template,
                      "the chat template by name, where the model's is unknown");
  command->add_flag("--raw", flags->raw, "no chat template: the model goes on from the text as it is");
  command->add_flag("--json", flags->json, "one JSON object with the answer and its measurements");
  AddSamplingFlags(*command, flags->sampling);
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags] { Run(*flags); });
}

}  // namespace phsa::cli
