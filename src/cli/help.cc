// `phsa help`, `phsa version`, and, for installers, `phsa completion SHELL` and `phsa man`.
#include "base/errors.h"
#include "base/nearest.h"
#include "cli/command_list.h"
#include "cli/commands.h"
#include "cli/terminal.h"

namespace phsa::cli {
namespace {

std::string HelpOf(const CLI::App& app, const std::vector<std::string>& words) {
  const CLI::App* command = &app;
  std::string before;
  for (const std::string& word : words) {
    std::vector<std::string> names;
    const CLI::App* next = nullptr;
    for (const CLI::App* one : command->get_subcommands([](const CLI::App*) { return true; })) {
      if (one->get_name() == word) next = one;
      if (!one->get_group().empty()) names.push_back(one->get_name());
    }
    if (next == nullptr) {
      ThrowInvalid("help: there is no command {}{}; `phsa help` lists them", Quoted(word), DidYouMean(word, names));
    }
    before += (before.empty() ? "" : " ") + command->get_name();
    command = next;
  }
  return command->help(before);
}

}  // namespace

void AddHelpCommands(CLI::App& app) {
  CLI::App* const help = app.add_subcommand("help", "what the commands do, or what one of them takes");
  auto words = std::make_shared<std::vector<std::string>>();
  help->add_option("COMMAND", *words, "a command; none: all of them");
  help->callback([&app, words] {
    app.clear();  // CLI11 gives the help of the command that was parsed, which is this one
    WriteOut(HelpOf(app, *words));
  });

  CLI::App* const version = app.add_subcommand("version", "the program's version");
  version->callback([] { WriteOut("phsa " PHSA_VERSION "\n"); });

  CLI::App* const completion = app.add_subcommand("completion", "a completion script for a shell")->group("");
  auto shell = std::make_shared<std::string>();
  completion->add_option("SHELL", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  completion->callback([&app, shell] {
    const std::vector<CommandEntry> commands = ListCommands(app);
    WriteOut(*shell == "bash"  ? BashCompletion(commands)
             : *shell == "zsh" ? ZshCompletion(commands)
                               : FishCompletion(commands));
  });

  CLI::App* const man = app.add_subcommand("man", "the manual page, for man -l -")->group("");
  man->callback([&app] { WriteOut(ManPage(ListCommands(app), PHSA_VERSION)); });
}

}  // namespace phsa::cli
