// The manual page, from the list of commands.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/command_list.h"

namespace phsa::cli {
namespace {

// Text as roff prints it: no escapes of its own, no line that it takes for a request.
std::string Roff(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else if ((c == '.' || c == '\'') && (out.empty() || out.back() == '\n')) {
      out += std::string("\\&") + c;
    } else {
      out += c;
    }
  }
  return out;
}

std::string Flags(const CommandEntry& command) {
  std::string out;
  for (const FlagEntry& flag : command.flags) {
    std::vector<std::string> names;
    for (const std::string& name : flag.names) names.push_back("\\fB" + Roff(name) + "\\fR");
    out += fmt::format(".TP\n{}{}", fmt::join(names, ", "), names.empty() ? "" : " ");
    if (!flag.argument.empty()) out += fmt::format("\\fI{}\\fR", Roff(flag.argument));
    out += "\n" + Roff(flag.help);
    if (!flag.otherwise.empty()) out += Roff(" [" + flag.otherwise + "]");
    out += "\n";
  }
  return out;
}

}  // namespace

std::string ManPage(const std::vector<CommandEntry>& commands, const std::string& version) {
  const CommandEntry& program = commands.front();
  std::string out = fmt::format(
      ".TH PHSA 1 \"\" \"phsa {}\" \"User Commands\"\n"
      ".SH NAME\n{}\n"
      ".SH SYNOPSIS\n.B phsa\n.I command\n.RI [ flags ]\n"
      ".SH DESCRIPTION\n"
      "Answers go to standard output, everything else to standard error. The default of a flag stands in brackets.\n"
      "{}"
      ".SH COMMANDS\n",
      Roff(version), "phsa \\- language models with sparse attention", Flags(program));
  for (size_t i = 1; i < commands.size(); ++i) {
    out += fmt::format(".SS phsa {}\n{}\n{}", Roff(fmt::format("{}", fmt::join(commands[i].words, " "))),
                       Roff(commands[i].help), Flags(commands[i]));
  }
  out +=
      ".SH ENVIRONMENT\n"
      "Every flag can also be set by an environment variable: \\fB\\-\\-kv\\-type\\fR is \\fBPHSA_KV_TYPE\\fR.\n"
      ".TP\n\\fBPHSA_CACHE\\fR\nThe folder of fetched models; \\fB~/.cache/phsa\\fR unless set.\n"
      ".TP\n\\fBNO_COLOR\\fR\nSet to anything: no colours, unless \\fB\\-\\-color always\\fR asks for them.\n"
      ".SH EXIT STATUS\n"
      "0: done. 1: it failed. 2: what was given is wrong or not supported; the message says what is allowed.\n"
      "130: interrupted.\n";
  return out;
}

}  // namespace phsa::cli
