// `phsa settings`: the list of the attention's settings as tables, for docs/settings.md and the Python package.
#include <fmt/format.h>

#include <type_traits>

#include "attention/setting_list.h"
#include "base/option.h"
#include "cli/commands.h"
#include "cli/spelling.h"
#include "cli/terminal.h"
#include "phsa/punctuation.h"

namespace phsa::cli {
namespace {

std::string Code(std::string_view text) { return fmt::format("`{}`", text); }
std::string DefaultOf(const PolicySetting& row) { return Name(Settings().*row.value); }
std::string DefaultOf(const ReduceSetting& row) { return Name(Settings().*row.value); }
std::string DefaultOf(const IntSetting& row) { return fmt::format("{}", Settings().*row.value); }
std::string DefaultOf(const LambdaSetting& row) { return fmt::format("{}", Settings().*row.value); }
std::string DefaultOf(const TextSetting& row) { return Settings().*row.value; }

// In the document: what JSON takes.
std::string TakenBy(const PolicySetting& row) { return Allowed(row); }
std::string TakenBy(const ReduceSetting& row) { return Allowed(row); }
std::string TakenBy(const IntSetting& row) {
  if (row.high != kMaxSettingTokens) return Allowed(row);
  return row.of_blocks ? "multiples of `block`, 0 to 2^30" : "0 to 2^30";
}
std::string TakenBy(const LambdaSetting& row) { return Allowed(row) + ", or a list of such numbers"; }
std::string TakenBy(const TextSetting&) { return "a named set, a list of token ids, or a file (below)"; }

std::string Markdown() {
  std::string out = "| key | flag | allowed | default | meaning | for |\n|---|---|---|---|---|---|\n";
  ForEachSetting([&](const auto& row) {
    const std::string policies = PolicyNames(row.matters);
    out += fmt::format("| {} | {} | {} | {} | {} | {} |\n", Code(row.name),
                       Code(FlagOf(std::string(1, kSettingSign) + row.name)), TakenBy(row), Code(DefaultOf(row)),
                       row.help, policies == PolicyNames() ? "all" : policies);
  });
  return out;
}

std::string PythonRow(const SettingInfo& row, const char* kind, const std::string& more) {
  std::string out = fmt::format("    Setting(\"{}\", \"{}\"", row.name, kind);
  if (*row.python != 0) out += fmt::format(", python=\"{}\"", row.python);
  if (*row.old_name != 0) out += fmt::format(", old_name=\"{}\"", row.old_name);
  return out + more + "),\n";
}
std::string PythonOf(const PolicySetting& row) { return PythonRow(row, "policy", ""); }
std::string PythonOf(const ReduceSetting& row) {
  std::string names;
  for (const GroupReduce reduce : kGroupReduces)
    names += fmt::format("{}\"{}\"", names.empty() ? "" : ", ", Name(reduce));
  return PythonRow(row, "name", fmt::format(", choices=({})", names));
}
std::string PythonOf(const IntSetting& row) {
  if (row.choices[0] > 0) return PythonRow(row, "int", fmt::format(", choices=({})", Allowed(row)));
  return PythonRow(row, "int", fmt::format(", high={}{}", row.high, row.of_blocks ? ", of_blocks=True" : ""));
}
std::string PythonOf(const LambdaSetting& row) { return PythonRow(row, "number", ""); }
std::string PythonOf(const TextSetting& row) { return PythonRow(row, "text", ""); }

std::string Python() {
  std::string rows;
  ForEachSetting([&](const auto& row) { rows += PythonOf(row); });
  return "\"\"\"The attention's settings. Written by `phsa settings --as-python` from "
         "src/attention/setting_list.h.\"\"\"\n\n"
         "from __future__ import annotations\n\n"
         "from typing import NamedTuple\n\n\n"
         "class Setting(NamedTuple):\n"
         "    name: str\n"
         "    kind: str\n"
         "    python: str = \"\"  # where it is not the name\n"
         "    old_name: str = \"\"  # in JSON of the first version\n"
         "    choices: tuple[int, ...] | tuple[str, ...] = ()\n"
         "    high: int = 0\n"
         "    of_blocks: bool = False  # multiples of the block\n\n\n"
         "SETTINGS = (\n" +
         rows + ")\n";
}

}  // namespace

void AddSettingsCommand(CLI::App& app) {
  CLI::App* const command =
      app.add_subcommand("settings", "the attention's settings, as the table in docs/settings.md")->group("");
  auto python = std::make_shared<bool>(false);
  command->add_flag("--as-python", *python, "as python/phsa/_setting_table.py");
  command->callback([python] { WriteOut(*python ? Python() : Markdown()); });
}

}  // namespace phsa::cli
