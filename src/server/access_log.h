// One line for each response, to standard error or a file.
#ifndef PHSA_SERVER_ACCESS_LOG_H_
#define PHSA_SERVER_ACCESS_LOG_H_

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

namespace phsa::server {

struct AccessEntry {
  std::string peer, method, target;
  int status = 0;
  uint64_t bytes = 0;
  double seconds = 0;
  std::string note;  // what happened besides: "the client has gone"
};

// All functions may be called by any thread. A log that cannot be written is said once on standard error, and stops
// nothing.
class AccessLog {
 public:
  // "": none; "-": standard error; else a file, which is appended to. Throws phsa::Error where it cannot be opened.
  explicit AccessLog(const std::string& path);
  ~AccessLog();
  AccessLog(const AccessLog&) = delete;
  AccessLog& operator=(const AccessLog&) = delete;

  void Write(const AccessEntry& entry);
  void Note(std::string_view text);  // a line of its own

 private:
  void WriteLine(const std::string& line);

  const std::string path_;
  std::mutex mutex_;
  int descriptor_ = -1;
  bool failed_ = false;
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_ACCESS_LOG_H_
