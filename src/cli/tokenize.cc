// `phsa tokenize`: text to ids, ids to text, and conversations through a model's chat template.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/errors.h"
#include "cli/commands.h"
#include "cli/load_tokenizer.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "tokenizer/chat_template.h"

namespace phsa::cli {
namespace {

using Json = nlohmann::json;

struct TokenizeFlags {
  std::string path, file, text, chat, chat_template, date;
  bool ids = false, json = false, json_lines = false, decode = false;
  bool no_special = false, no_generation_prompt = false, no_thinking = false;
  int32_t benchmark = 0;
};

Json ParseJson(std::string_view text, const std::string& where) {
  Json value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) ThrowInvalid("{}: this is not JSON", where);
  return value;
}

// One line whatever reads it: some take U+2028 for a line end.
std::string AsciiJson(const Json& value) { return value.dump(-1, ' ', /*ensure_ascii=*/true); }

std::vector<int32_t> IdsFromJson(const Json& list) {
  std::vector<int32_t> ids;
  if (!list.is_array()) ThrowInvalid("tokenize: a line is not a JSON list of ids");
  for (const Json& id : list) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > INT32_MAX) {
      ThrowInvalid("tokenize: {} is not an id", id.is_structured() ? id.type_name() : Quoted(id.dump()));
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

// Numbers with spaces, commas or brackets around them.
std::vector<int32_t> IdsFromText(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == ',' || c == '[' || c == ']'; }, ' ');
  std::vector<int32_t> ids;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    int32_t id = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error != std::errc() || end != word.data() + word.size() || id < 0) {
      ThrowInvalid("tokenize: {} is not an id", Quoted(word));
    }
    ids.push_back(id);
  }
  return ids;
}

// [{"role": …, "content": …}, …], or an object with such a list as "messages".
std::vector<ChatMessage> MessagesFromJson(const Json& value) {
  const Json& list = value.is_object() && value.contains("messages") ? value["messages"] : value;
  std::vector<ChatMessage> messages;
  if (!list.is_array()) ThrowInvalid("tokenize: a conversation is a JSON list of messages");
  for (const Json& message : list) {
    if (!message.is_object() || !message.contains("role") || !message["role"].is_string() ||
        !message.contains("content") || !message["content"].is_string()) {
      ThrowInvalid("tokenize: message {} does not have a \"role\" and a \"content\" that are strings", messages.size());
    }
    messages.push_back({message["role"].get<std::string>(), message["content"].get<std::string>()});
  }
  return messages;
}

std::string TokenText(const Tokenizer& tokenizer, int32_t id) { return tokenizer.Decode(std::span(&id, 1), false); }

void PrintIds(const TokenizeFlags& flags, const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  if (flags.json) {
    Json tokens = Json::array();
    for (const int32_t id : ids) tokens.push_back(TokenText(tokenizer, id));
    WriteOut(AsciiJson({{"ids", ids}, {"tokens", tokens}}) + "\n");
  } else if (flags.ids) {
    WriteOut(fmt::format("{}\n", fmt::join(ids, " ")));
  } else {
    std::string table;
    for (const int32_t id : ids) table += fmt::format("{:>7}  {}\n", id, Json(TokenText(tokenizer, id)).dump());
    WriteOut(table);
    Note("{} tokens", ids.size());
  }
}

// The shortest of several runs, after one that warms the caches: what bench/tokenizer_bench.py compares.
void Benchmark(int32_t runs, const Tokenizer& tokenizer, std::string_view text, SpecialTokens special) {
  size_t tokens = tokenizer.Encode(text, special).size();
  double best = 0;
  for (int32_t run = 0; run < runs; ++run) {
    const auto start = std::chrono::steady_clock::now();
    tokens = tokenizer.Encode(text, special).size();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (run == 0 || seconds < best) best = seconds;
    ThrowIfInterrupted();
  }
  WriteOut(Json{{"bytes", text.size()}, {"tokens", tokens}, {"seconds", best}}.dump() + "\n");
}

class Command {
 public:
  explicit Command(const TokenizeFlags& flags) : flags_(flags), loaded_(LoadTokenizerAt(flags.path)) {
    if (flags.chat.empty()) return;
    chat_ = ChooseChatTemplate(flags.chat_template, loaded_.chat_template);
    if (flags.no_thinking) variables_.enable_thinking = false;
    variables_.date_string = flags.date;
  }

  void Run() const {
    const SpecialTokens special = flags_.no_special ? SpecialTokens::kAsText : SpecialTokens::kRecognise;
    const std::string input = !flags_.chat.empty()   ? ReadText(flags_.chat)
                              : !flags_.file.empty() ? ReadText(flags_.file)
                                                     : flags_.text;
    if (flags_.json_lines) {
      Lines(input, special);
    } else if (chat_) {
      const std::vector<ChatMessage> messages = MessagesFromJson(ParseJson(input, flags_.chat));
      if (flags_.ids || flags_.json) {
        PrintIds(flags_, loaded_.tokenizer, chat_->Encode(messages, Prompt(), loaded_.tokenizer, variables_));
      } else {
        WriteOut(chat_->Render(messages, Prompt(), loaded_.tokenizer, variables_));
      }
    } else if (flags_.decode) {
      WriteOut(loaded_.tokenizer.Decode(IdsFromText(input), flags_.no_special));
    } else if (flags_.benchmark > 0) {
      Benchmark(flags_.benchmark, loaded_.tokenizer, input, special);
    } else {
      PrintIds(flags_, loaded_.tokenizer, loaded_.tokenizer.Encode(input, special));
    }
  }

 private:
  bool Prompt() const { return !flags_.no_generation_prompt; }

  // Each line for itself: a string, a list of ids, or a conversation in; a list of ids or a string out.
  void Lines(std::string_view input, SpecialTokens special) const {
    std::string out;
    size_t number = 0;
    while (!input.empty()) {
      const size_t end = std::min(input.find('\n'), input.size());
      const Json line = ParseJson(input.substr(0, end), fmt::format("line {}", ++number));
      input.remove_prefix(std::min(end + 1, input.size()));
      Json result;
      if (chat_) {
        const std::vector<ChatMessage> messages = MessagesFromJson(line);
        if (flags_.ids) {
          result = chat_->Encode(messages, Prompt(), loaded_.tokenizer, variables_);
        } else {
          result = chat_->Render(messages, Prompt(), loaded_.tokenizer, variables_);
        }
      } else if (flags_.decode) {
        result = loaded_.tokenizer.Decode(IdsFromJson(line), flags_.no_special);
      } else {
        if (!line.is_string()) ThrowInvalid("tokenize: line {} is not a JSON string", number);
        result = loaded_.tokenizer.Encode(line.get_ref<const std::string&>(), special);
      }
      out += AsciiJson(result) + "\n";
      ThrowIfInterrupted();
    }
    WriteOut(out);
  }

  const TokenizeFlags& flags_;
  LoadedTokenizer loaded_;
  std::optional<ChatTemplate> chat_;
  ChatVariables variables_;
};

}  // namespace

void AddTokenizeCommand(CLI::App& app) {
  const auto flags = std::make_shared<TokenizeFlags>();
  CLI::App* command = app.add_subcommand("tokenize", "text to token ids and back");
  command->add_option("path", flags->path, "a model (.gguf file, Hugging Face folder, name) or a tokenizer.json")
      ->required();
  CLI::Option* file = command->add_option("-f,--file", flags->file, "read the text from this file; -: standard input");
  CLI::Option* text = command->add_option("-p,--prompt", flags->text, "the text itself")->excludes(file);
  CLI::Option* chat =
      command->add_option("--chat", flags->chat, "render the messages in this JSON file with the model's chat template")
          ->excludes(file)
          ->excludes(text);
  command->add_option("--chat-template", flags->chat_template, "the template's name, instead of the model's own")
      ->needs(chat);
  command->add_option("--date", flags->date, "the date that Llama 3's newer templates name: \"26 Jul 2024\"")
      ->needs(chat);
  command->add_flag("--no-generation-prompt", flags->no_generation_prompt, "do not open the assistant's turn")
      ->needs(chat);
  command->add_flag("--no-thinking", flags->no_thinking, "Qwen3: an empty thought before the answer")->needs(chat);
  command->add_flag("--ids", flags->ids, "print the ids alone, separated by spaces");
  command->add_flag("--json", flags->json, "print one JSON object with ids and tokens");
  command->add_flag("--jsonl", flags->json_lines,
                    "every line of the input is JSON of its own: a string, with --decode a list of ids");
  command->add_flag("--decode", flags->decode, "the input is ids: print their text")->excludes(chat);
  command->add_flag("--no-special", flags->no_special,
                    "control tokens in the text are text; with --decode they are left out");
  command->add_option("--benchmark", flags->benchmark, "encode this many times, print the best time")->group("");
  command->callback([=] {
    if (*file || *text || *chat) return Command(*flags).Run();
    ThrowInvalid("tokenize: there is no text; give it with -p, -f FILE, or -f - for standard input");
  });
}

}  // namespace phsa::cli
