// `phsa`: one subcommand per file. Answers go to standard output, everything else to standard error.
#include <fmt/format.h>

#include <cctype>
#include <cstdio>
#include <new>
#include <string>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "phsa/error.h"

namespace phsa::cli {
namespace {

enum ExitCode { kDone = 0, kFailed = 1, kBadInput = 2, kInterrupted = 130 };

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
  for (CLI::App* subcommand : app.get_subcommands([](CLI::App*) { return true; }))
    NameEnvironmentVariables(*subcommand);
}

int Main(int argc, char** argv) {
  CLI::App app{"phsa: language models with sparse attention", "phsa"};
  app.set_version_flag("--version", "phsa " PHSA_VERSION);
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::simple);
  app.footer("Every flag can also be set by an environment variable: --kv-type is PHSA_KV_TYPE.");
  AddRunCommand(app);
  AddChatCommand(app);
  AddServeCommand(app);
  AddBenchCommand(app);
  AddPerplexityCommand(app);
  AddInspectCommand(app);
  AddNiahCommand(app);
  AddCompareCommand(app);
  AddPunctuationCommand(app);
  AddTokenizeCommand(app);
  AddPrepareCommand(app);
  AddExportCommand(app);
  AddInfoCommand(app);
  AddModelsCommand(app);
  NameEnvironmentVariables(app);

  try {
    CatchInterrupts();
    app.parse(argc, argv);  // runs the subcommand's callback
    return kDone;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kDone : kBadInput;
  } catch (const Error& error) {
    fmt::print(stderr, "phsa: {}\n", error.what());
    const bool input = error.status() == PHSA_INVALID_ARGUMENT || error.status() == PHSA_UNSUPPORTED;
    return WasInterrupted() ? kInterrupted : input ? kBadInput : kFailed;
  } catch (const Interrupted&) {
    fmt::print(stderr, "phsa: interrupted\n");
    return kInterrupted;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "phsa: out of memory; a smaller context (-c) or a smaller model needs less\n");
    return kFailed;
  } catch (const std::exception& error) {
    fmt::print(stderr, "phsa: {}\n", error.what());
    return kFailed;
  }
}

}  // namespace
}  // namespace phsa::cli

int main(int argc, char** argv) { return phsa::cli::Main(argc, argv); }
