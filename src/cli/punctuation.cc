// `phsa punctuation`: which tokens of a vocabulary count as punctuation.
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/load_tokenizer.h"
#include "cli/terminal.h"
#include "engine/engine.h"

namespace phsa::cli {
namespace {

struct PunctuationFlags {
  std::string path, set = Settings{}.punctuation;
  bool ids = false, json = false;
};

void RunPunctuation(const PunctuationFlags& flags) {
  const Tokenizer tokenizer = LoadTokenizerAt(flags.path).tokenizer;
  const std::vector<int32_t> ids = PunctuationOf(tokenizer, flags.set).Ids();
  if (flags.ids) {
    WriteOut(fmt::format("{}\n", fmt::join(ids, " ")));
    return;
  }
  const auto text = [&](int32_t id) {  // as JSON, so that white space is seen
    return nlohmann::json(tokenizer.TokenBytes(id)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  };
  std::string lines;
  for (const int32_t id : ids) {
    lines +=
        flags.json ? fmt::format("{{\"id\":{},\"text\":{}}}\n", id, text(id)) : fmt::format("{}\t{}\n", id, text(id));
  }
  WriteOut(lines);
  Note("{}: {} of {} tokens", flags.set, ids.size(), tokenizer.vocab_size());
}

}  // namespace

void AddPunctuationCommand(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("punctuation", "the tokens that count as punctuation");
  auto flags = std::make_shared<PunctuationFlags>();
  command->add_option("path", flags->path, "a model, a folder, or a tokenizer.json")->required();
  command->add_option("--set", flags->set, "en, zh, en+zh, sentence, pure, none, or a file (docs/settings.md)");
  CLI::Option* const ids = command->add_flag("--ids", flags->ids, "the ids alone, ascending, on one line");
  command->add_flag("--json", flags->json, "one JSON object a line")->excludes(ids);
  command->callback([flags] { RunPunctuation(*flags); });
}

}  // namespace phsa::cli
