#include "server/access_log.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/errors.h"
#include "base/new_file.h"

namespace phsa::server {
namespace {

constexpr size_t kLongestTarget = 200;

std::string TimeNow() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())));
}

}  // namespace

AccessLog::AccessLog(const std::string& path) : path_(path) {
  if (path.empty()) return;
  if (path == "-") {
    descriptor_ = STDERR_FILENO;
    return;
  }
  descriptor_ = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
  if (descriptor_ < 0) Throw(PHSA_IO, "{}: the log cannot be opened: {}", path, std::strerror(errno));
}

AccessLog::~AccessLog() {
  if (descriptor_ >= 0 && descriptor_ != STDERR_FILENO) close(descriptor_);
}

void AccessLog::Write(const AccessEntry& entry) {
  if (descriptor_ < 0) return;
  WriteLine(fmt::format("{} {} {} {} {} {} B {:.3f} s{}{}\n", TimeNow(), entry.peer, entry.method,
                        Quoted(entry.target, kLongestTarget), entry.status, entry.bytes, entry.seconds,
                        entry.note.empty() ? "" : "; ", entry.note));
}

void AccessLog::Note(std::string_view text) {
  if (descriptor_ < 0) return;
  WriteLine(fmt::format("{} {}\n", TimeNow(), text));
}

void AccessLog::WriteLine(const std::string& line) {
  const std::lock_guard lock(mutex_);
  if (WriteAll(descriptor_, line.data(), line.size())) return;
  const int reason = errno;
  if (std::exchange(failed_, true) || descriptor_ == STDERR_FILENO) return;
  const std::string message = fmt::format("phsa: {}: the log cannot be written ({}); the server goes on without\n",
                                          path_, std::strerror(reason));
  (void)WriteAll(STDERR_FILENO, message.data(), message.size());
}

}  // namespace phsa::server
