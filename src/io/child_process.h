// Another program, run without a shell, watched while it runs.
#ifndef PHSA_IO_CHILD_PROCESS_H_
#define PHSA_IO_CHILD_PROCESS_H_

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace phsa {

struct ChildProcess {
  std::vector<std::string> command;      // looked up in PATH where it has no slash
  std::vector<std::string> environment;  // "NAME=value", over our own
  std::filesystem::path log;             // what it writes to its standard output and error
};

// Runs it to its end and returns its exit code (128 + the signal, where one ended it). `poll` is called about ten times
// a second; if it throws, the child and what it has started are ended first. Throws phsa::Error if it cannot be
// started.
int RunChild(const ChildProcess& child, const std::function<void()>& poll);

}  // namespace phsa

#endif  // PHSA_IO_CHILD_PROCESS_H_
