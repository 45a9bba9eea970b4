#include "io/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/errors.h"

namespace phsa {
namespace {

constexpr std::chrono::milliseconds kPollInterval(100);
constexpr std::chrono::seconds kPatience(2);  // between asking a child to end and ending it

// Our environment with some of its variables replaced.
std::vector<std::string> Environment(const std::vector<std::string>& changes) {
  const auto name_of = [](const std::string& entry) { return entry.substr(0, entry.find('=') + 1); };
  std::vector<std::string> out = changes;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    bool replaced = false;
    for (const std::string& change : changes)
      replaced = replaced || std::string_view(*entry).starts_with(name_of(change));
    if (!replaced) out.emplace_back(*entry);
  }
  return out;
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> out;
  out.reserve(strings.size() + 1);
  for (std::string& text : strings) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

// True once the child has ended.
bool Reap(pid_t child, int flags, int* status) {
  for (;;) {
    const pid_t done = waitpid(child, status, flags);
    if (done == child) return true;
    if (done == 0) return false;
    PHSA_CHECK(errno == EINTR);
  }
}

// Ends the child's process group: first it may clean up, then it must go.
void End(pid_t child) {
  int status = 0;
  kill(-child, SIGTERM);
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!Reap(child, WNOHANG, &status)) {
    if (std::chrono::steady_clock::now() > deadline) {
      kill(-child, SIGKILL);
      Reap(child, 0, &status);
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace

int RunChild(const ChildProcess& child, const std::function<void()>& poll) {
  std::vector<std::string> command = child.command;
  std::vector<std::string> environment = Environment(child.environment);

  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, child.log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&files, STDOUT_FILENO, STDERR_FILENO);
  // A group of its own: Ctrl-C reaches us alone, and we decide how the child ends.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t no_signals;
  sigemptyset(&no_signals);
  posix_spawnattr_setsigmask(&attributes, &no_signals);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);

  pid_t pid = 0;
  const int error = posix_spawnp(&pid, command[0].c_str(), &files, &attributes, Pointers(command).data(),
                                 Pointers(environment).data());
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) Throw(PHSA_IO, "{}: cannot be started: {}", command[0], std::strerror(error));

  int status = 0;
  try {
    while (!Reap(pid, WNOHANG, &status)) {
      poll();
      std::this_thread::sleep_for(kPollInterval);
    }
  } catch (...) {
    End(pid);
    throw;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace phsa
