// Commands that run a model.
#ifndef PHSA_CLI_MODEL_COMMAND_H_
#define PHSA_CLI_MODEL_COMMAND_H_

#include <memory>

#include "cli/options.h"

namespace phsa::cli {

// A command's flags, with those of its model added already.
template <class Flags>
std::shared_ptr<Flags> FlagsWithModel(CLI::App& command) {
  auto flags = std::make_shared<Flags>();
  AddModelFlags(command, flags->model);
  return flags;
}

}  // namespace phsa::cli

#endif  // PHSA_CLI_MODEL_COMMAND_H_
