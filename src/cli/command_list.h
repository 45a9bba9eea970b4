// The commands and flags as plain data, for what is generated from them: completion and the manual page.
#ifndef PHSA_CLI_COMMAND_LIST_H_
#define PHSA_CLI_COMMAND_LIST_H_

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace phsa::cli {

struct FlagEntry {
  std::vector<std::string> names;    // "-m", "--model"; none for what is given without a name
  std::string argument;              // "TEXT"; empty: takes nothing
  std::vector<std::string> choices;  // all that it may be, where that is a list
  bool is_model = false;             // a name that `phsa models` lists, or a path
  std::string help, otherwise, environment, group;
};

struct CommandEntry {
  std::vector<std::string> words;  // {"models", "fetch"}
  std::string help;
  std::vector<FlagEntry> flags;
  std::vector<std::string> subcommands;
};

// The commands that are listed, the program itself (no words) first.
std::vector<CommandEntry> ListCommands(const CLI::App& app);

// Texts that the shells source, and a page for `man`.
std::string BashCompletion(const std::vector<CommandEntry>& commands);
std::string ZshCompletion(const std::vector<CommandEntry>& commands);
std::string FishCompletion(const std::vector<CommandEntry>& commands);
std::string ManPage(const std::vector<CommandEntry>& commands, const std::string& version);

}  // namespace phsa::cli

#endif  // PHSA_CLI_COMMAND_LIST_H_
