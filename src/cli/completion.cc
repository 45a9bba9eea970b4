// Completion for bash, zsh and fish, from the list of commands.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/command_list.h"

namespace phsa::cli {
namespace {

std::string Path(const CommandEntry& command) { return fmt::format("{}", fmt::join(command.words, " ")); }

// Inside '…' of a shell.
std::string InQuotes(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out;
}

// Help as it stands in one of zsh's specifications, inside '…'.
std::string ZshHelp(const std::string& text) {
  std::string out;
  for (const char c : InQuotes(text)) {
    if (c == '[' || c == ']' || c == ':') out += '\\';
    out += c;
  }
  return out;
}

// What may stand where there is no flag.
std::vector<std::string> PlainWords(const CommandEntry& command) {
  std::vector<std::string> words = command.subcommands;
  for (const FlagEntry& flag : command.flags) {
    if (flag.names.empty()) words.insert(words.end(), flag.choices.begin(), flag.choices.end());
  }
  return words;
}

}  // namespace

std::string BashCompletion(const std::vector<CommandEntry>& commands) {
  // The command is what its words so far make up; each has its flags, those of them that take a value, and the values
  // where they are a list. Elsewhere bash's own completion of file names (-o default) is right.
  std::string out =
      "# bash completion for phsa, made by `phsa completion bash`\n"
      "_phsa() {\n"
      "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command='' word i\n"
      "  local flags='' plain='' values=''\n"
      "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
      "    word=\"$command ${COMP_WORDS[i]}\"\n"
      "    case \"${word# }\" in\n      ";
  std::vector<std::string> paths;
  for (const CommandEntry& command : commands) {
    if (!command.words.empty()) paths.push_back("'" + Path(command) + "'");
  }
  out += fmt::format("{}) command=${{word# }} ;;\n    esac\n  done\n  case \"$command\" in\n", fmt::join(paths, "|"));
  for (const CommandEntry& command : commands) {
    std::vector<std::string> names;
    std::string values;
    for (const FlagEntry& flag : command.flags) {
      names.insert(names.end(), flag.names.begin(), flag.names.end());
      if (flag.names.empty() || flag.argument.empty()) continue;
      values += fmt::format("        {}) values='{}' ;;\n", fmt::join(flag.names, "|"),
                            flag.choices.empty() ? "*" : fmt::format("{}", fmt::join(flag.choices, " ")));
    }
    out += fmt::format("    '{}')\n      flags='{}' plain='{}'\n", Path(command), fmt::join(names, " "),
                       fmt::join(PlainWords(command), " "));
    if (!values.empty()) out += "      case \"$previous\" in\n" + values + "      esac\n";
    out += "      ;;\n";
  }
  out +=
      "  esac\n"
      "  if [[ -n $values ]]; then\n"
      "    [[ $values == '*' ]] && values=''\n"
      "    COMPREPLY=($(compgen -W \"$values\" -- \"$current\"))\n"
      "  elif [[ $current == -* ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$flags\" -- \"$current\"))\n"
      "  else\n"
      "    COMPREPLY=($(compgen -W \"$plain\" -- \"$current\"))\n"
      "  fi\n"
      "}\n"
      "complete -o default -F _phsa phsa\n";
  return out;
}

std::string ZshCompletion(const std::vector<CommandEntry>& commands) {
  std::string out = "#compdef phsa\n# zsh completion for phsa, made by `phsa completion zsh`\n";
  for (const CommandEntry& command : commands) {
    out += fmt::format(
        "_phsa{}() {{\n  local curcontext=\"$curcontext\" context state state_descr line\n  typeset -A opt_args\n  "
        "_arguments -C -S",
        command.words.empty() ? "" : "_" + fmt::format("{}", fmt::join(command.words, "_")));
    int position = 0;
    for (const FlagEntry& flag : command.flags) {
      const std::string values = flag.is_model ? fmt::format("_alternative \"names:name:({})\" \"files:file:_files\"",
                                                             fmt::join(flag.choices, " "))
                                 : flag.choices.empty() ? "_files"
                                                        : fmt::format("({})", fmt::join(flag.choices, " "));
      if (flag.names.empty()) {
        out += fmt::format(" \\\n    '{}:{}:{}'", ++position, ZshHelp(flag.help), values);
        continue;
      }
      for (const std::string& name : flag.names) {
        out += fmt::format(" \\\n    '{}{}[{}]", flag.argument.empty() ? "" : "*", name, ZshHelp(flag.help));
        if (!flag.argument.empty()) out += fmt::format(":{}:{}", flag.argument, values);
        out += "'";
      }
    }
    if (command.subcommands.empty()) {
      out += "\n}\n";
      continue;
    }
    out +=
        " \\\n    '1:command:->command' \\\n    '*::argument:->argument'\n  case $state in\n    command)\n      local "
        "-a commands=(\n";
    for (const CommandEntry& below : commands) {
      if (below.words.size() == command.words.size() + 1 &&
          std::equal(command.words.begin(), command.words.end(), below.words.begin())) {
        out += fmt::format("        '{}:{}'\n", below.words.back(), ZshHelp(below.help));
      }
    }
    out += "      )\n      _describe command commands\n      ;;\n    argument)\n      case $line[1] in\n";
    for (const std::string& name : command.subcommands) {
      out += fmt::format("        {}) _phsa{}_{} ;;\n", name,
                         command.words.empty() ? "" : "_" + fmt::format("{}", fmt::join(command.words, "_")), name);
    }
    out += "      esac\n      ;;\n  esac\n}\n";
  }
  // Sourced, or loaded by its name from fpath.
  return out + "if [[ $funcstack[1] == _phsa ]]; then _phsa \"$@\"; else compdef _phsa phsa; fi\n";
}

std::string FishCompletion(const std::vector<CommandEntry>& commands) {
  std::string out = "# fish completion for phsa, made by `phsa completion fish`\n";
  for (const CommandEntry& command : commands) {
    std::string seen;
    for (const std::string& word : command.words) seen += fmt::format("; and __fish_seen_subcommand_from {}", word);
    std::string none_below;
    if (!command.subcommands.empty()) {
      none_below = fmt::format("; and not __fish_seen_subcommand_from {}", fmt::join(command.subcommands, " "));
    }
    const auto line = [&](const std::string& when, const std::string& rest) {
      out += "complete -c phsa";
      if (!when.empty()) out += fmt::format(" -n '{}'", when.substr(6));  // without the first "; and "
      out += rest + "\n";
    };
    for (const CommandEntry& below : commands) {
      if (below.words.size() != command.words.size() + 1 ||
          !std::equal(command.words.begin(), command.words.end(), below.words.begin())) {
        continue;
      }
      line(seen + none_below, fmt::format(" -f -a {} -d '{}'", below.words.back(), InQuotes(below.help)));
    }
    for (const FlagEntry& flag : command.flags) {
      const std::string choices = flag.choices.empty() ? "" : fmt::format(" -a '{}'", fmt::join(flag.choices, " "));
      const std::string when = command.words.empty() ? seen + none_below : seen;
      if (flag.names.empty()) {
        if (!choices.empty()) line(when, choices);
        continue;
      }
      std::string rest;
      for (const std::string& name : flag.names) {
        rest += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      }
      if (!flag.argument.empty()) rest += (flag.choices.empty() || flag.is_model ? " -r" : " -x") + choices;
      line(when, rest + fmt::format(" -d '{}'", InQuotes(flag.help)));
    }
  }
  return out;
}

}  // namespace phsa::cli
