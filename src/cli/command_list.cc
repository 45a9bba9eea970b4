#include "cli/command_list.h"

#include "io/model_store.h"

namespace phsa::cli {
namespace {

// "TEXT:{auto,f32}" has the choices auto and f32.
std::vector<std::string> Choices(const std::string& type) {
  const size_t open = type.find('{'), close = type.find('}');
  std::vector<std::string> out;
  if (open == std::string::npos || close == std::string::npos || type.find(" OR ") != std::string::npos) return out;
  for (size_t begin = open + 1; begin <= close;) {
    const size_t end = std::min(type.find(',', begin), close);
    out.push_back(type.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

FlagEntry EntryOf(const CLI::Option& option) {
  FlagEntry out;
  for (const std::string& name : option.get_snames()) out.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) out.names.push_back("--" + name);
  if (option.get_type_size() != 0) {
    const std::string type = option.get_type_name();
    out.argument = out.names.empty() ? option.get_name() : type.substr(0, type.find_first_of(":{ "));
    out.choices = Choices(type);
  }
  out.is_model = option.get_name() == "--model" || option.get_name() == "MODEL";
  if (out.is_model) {
    for (const PackagedModel& model : PackagedModels()) out.choices.push_back(model.name);
  }
  out.help = option.get_description();
  out.otherwise = option.get_default_str();
  out.environment = option.get_envname();
  out.group = option.get_group();
  return out;
}

void Add(const CLI::App& app, const std::vector<std::string>& words, std::vector<CommandEntry>& out) {
  CommandEntry entry;
  entry.words = words;
  entry.help = app.get_description();
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_group().empty()) entry.flags.push_back(EntryOf(*option));
  }
  std::vector<const CLI::App*> below;
  for (const CLI::App* one : app.get_subcommands([](const CLI::App* one) { return !one->get_group().empty(); })) {
    below.push_back(one);
    entry.subcommands.push_back(one->get_name());
  }
  out.push_back(std::move(entry));
  for (const CLI::App* one : below) {
    std::vector<std::string> longer = words;
    longer.push_back(one->get_name());
    Add(*one, longer, out);
  }
}

}  // namespace

std::vector<CommandEntry> ListCommands(const CLI::App& app) {
  std::vector<CommandEntry> out;
  Add(app, {}, out);
  return out;
}

}  // namespace phsa::cli
