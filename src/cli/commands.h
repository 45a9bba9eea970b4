// The subcommands of `phsa`, one file each. Each adds itself and sets a callback that does the work: it may throw
// phsa::Error, which main turns into one line and an exit code.
#ifndef PHSA_CLI_COMMANDS_H_
#define PHSA_CLI_COMMANDS_H_

#include <CLI/CLI.hpp>

namespace phsa::cli {

void AddRunCommand(CLI::App& app);
void AddChatCommand(CLI::App& app);
void AddAskCommand(CLI::App& app);
void AddTokenizeCommand(CLI::App& app);
void AddInfoCommand(CLI::App& app);
void AddExportCommand(CLI::App& app);
void AddModelsCommand(CLI::App& app);
void AddPerplexityCommand(CLI::App& app);
void AddPrepareCommand(CLI::App& app);
void AddInspectCommand(CLI::App& app);
void AddServeCommand(CLI::App& app);
void AddNiahCommand(CLI::App& app);
void AddPunctuationCommand(CLI::App& app);
void AddBenchCommand(CLI::App& app);
void AddCompareCommand(CLI::App& app);
void AddTuneCommand(CLI::App& app);
void AddPlanCommand(CLI::App& app);
void AddSettingsCommand(CLI::App& app);  // not listed
// About the program itself, made from the commands above: help, version, and, not listed, completion and man.
void AddHelpCommands(CLI::App& app);

}  // namespace phsa::cli

#endif  // PHSA_CLI_COMMANDS_H_
