// `phsa`: one subcommand per file. Answers go to standard output, everything else to standard error.
#include <fmt/format.h>

#include <cctype>
#include <new>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/mapped_file.h"
#include "base/nearest.h"
#include "cli/commands.h"
#include "cli/terminal.h"

namespace phsa::cli {
namespace {

enum ExitCode { kDone = 0, kFailed = 1, kBadInput = 2, kInterrupted = 130 };

std::vector<CLI::App*> Subcommands(CLI::App& app) {
  return app.get_subcommands([](CLI::App*) { return true; });
}

// Every flag can be set by the environment: --kv-type is PHSA_KV_TYPE.
void NameEnvironmentVariables(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    if (option->get_lnames().empty() || option->get_lnames().front() == "help" ||
        option->get_lnames().front() == "version")
      continue;
    std::string name = "PHSA_";
    for (const char c : option->get_lnames().front()) {
      name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    }
    option->envname(name);
  }
  for (CLI::App* subcommand : Subcommands(app)) NameEnvironmentVariables(*subcommand);
}

// Lists are shown as they are given: 512,8k, not [512,8k].
void ShowDefaultsAsGiven(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    std::string text = option->get_default_str();
    if (text.size() >= 2 && text.front() == '[' && text.back() == ']')
      option->default_str(text.substr(1, text.size() - 2));
  }
  for (CLI::App* subcommand : Subcommands(app)) ShowDefaultsAsGiven(*subcommand);
}

void AddOutputFlags(CLI::App& app) {
  for (CLI::App* command : Subcommands(app)) {
    command->add_flag_function(
        "-q,--quiet", [](int64_t) { SetQuiet(true); }, "nothing but answers and errors");
    command
        ->add_option_function<std::string>("--color", SetColor,
                                           "colours: auto (on a terminal, unless NO_COLOR is set), always, never")
        ->check(CLI::IsMember({"auto", "always", "never"}))
        ->default_str("auto");
  }
}

// The command line is wrong: one line that says what was probably meant.
std::string Explain(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* command = &app;
  std::string name;
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    name += (name.empty() ? "" : " ") + command->get_name();
  }
  const std::string where = name.empty() ? "" : name + ": ";
  const std::string more = fmt::format("`phsa help{}{}` lists what there is", name.empty() ? "" : " ", name);
  const std::vector<std::string> extra = app.remaining(true);
  std::vector<std::string> flags, commands;
  for (const CLI::Option* option : command->get_options()) {
    for (const std::string& flag : option->get_lnames()) flags.push_back("--" + flag);
    for (const std::string& flag : option->get_snames()) flags.push_back("-" + flag);
  }
  for (const CLI::App* one : command->get_subcommands([](const CLI::App* one) { return !one->get_group().empty(); })) {
    commands.push_back(one->get_name());
  }
  const bool no_such_command = !extra.empty() && !extra.front().starts_with('-') && !commands.empty();
  // A flag that does not exist explains a missing one: it comes first.
  for (const std::string& word : extra) {
    if (no_such_command || !word.starts_with('-') || word == "--") continue;
    const std::string flag = word.substr(0, word.find('='));
    return fmt::format("{}there is no flag {}{}; {}", where, Quoted(flag), DidYouMean(flag, flags), more);
  }
  if (no_such_command) {
    return fmt::format("{}there is no command {}{}; {}", where, Quoted(extra.front()),
                       DidYouMean(extra.front(), commands), more);
  }
  if (!extra.empty()) return fmt::format("{}{} is one argument too many; {}", where, Quoted(extra.front()), more);
  if (command == &app) return fmt::format("there is no command; give one of {}; {}", fmt::join(commands, ", "), more);
  return fmt::format("{}{}; {}", where, error.what(), more);
}

int Main(int argc, char** argv) {
  CLI::App app{"phsa: language models with sparse attention", "phsa"};
  app.set_version_flag("-v,--version", "phsa " PHSA_VERSION);
  app.require_subcommand(1);
  app.option_defaults()->always_capture_default();
  app.footer("Every flag can also be set by an environment variable: --kv-type is PHSA_KV_TYPE.");
  AddRunCommand(app);
  AddChatCommand(app);
  AddAskCommand(app);
  AddServeCommand(app);
  AddBenchCommand(app);
  AddPerplexityCommand(app);
  AddInspectCommand(app);
  AddNiahCommand(app);
  AddCompareCommand(app);
  AddTuneCommand(app);
  AddPlanCommand(app);
  AddPunctuationCommand(app);
  AddTokenizeCommand(app);
  AddPrepareCommand(app);
  AddExportCommand(app);
  AddInfoCommand(app);
  AddModelsCommand(app);
  AddSettingsCommand(app);
  AddOutputFlags(app);
  AddHelpCommands(app);
  NameEnvironmentVariables(app);
  ShowDefaultsAsGiven(app);

  try {
    CatchInterrupts();
    ReportCutFiles(AfterCutFile::kExit);
    app.parse(argc, argv);  // runs the subcommand's callback
    return kDone;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    PrintError(Explain(app, error));
    return kBadInput;
  } catch (const Error& error) {
    PrintError(error.message());
    const bool input = error.status() == PHSA_INVALID_ARGUMENT || error.status() == PHSA_UNSUPPORTED;
    return WasInterrupted() ? kInterrupted : input ? kBadInput : kFailed;
  } catch (const Interrupted&) {
    PrintError("interrupted");
    return kInterrupted;
  } catch (const std::bad_alloc&) {
    PrintError("out of memory; a smaller context (-c) or a smaller model needs less");
    return kFailed;
  } catch (const std::exception& error) {
    PrintError(error.what());
    return kFailed;
  }
}

}  // namespace
}  // namespace phsa::cli

// NOLINTNEXTLINE(bugprone-exception-escape): what is left is that the message could not be printed
int main(int argc, char** argv) { return phsa::cli::Main(argc, argv); }
