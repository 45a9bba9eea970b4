// What the commands share towards the person at the terminal: interruption, progress, sizes in words.
#ifndef PHSA_CLI_TERMINAL_H_
#define PHSA_CLI_TERMINAL_H_

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace phsa::cli {

// Thrown where work ends because of Ctrl-C; main exits with 130.
struct Interrupted {};

// From now on Ctrl-C (SIGINT) and SIGTERM only raise a flag; a second Ctrl-C within the same wait ends the process.
void CatchInterrupts();
bool WasInterrupted();
void ClearInterrupt();
void ThrowIfInterrupted();

// --quiet: nothing but answers and errors. --color: "auto" (stderr is a terminal, and NO_COLOR is not set), "always",
// "never".
void SetQuiet(bool quiet);
bool IsQuiet();
void SetColor(const std::string& when);

// Lines on stderr; options that they name are spelt as flags. Notes and warnings are gone with --quiet; errors begin
// with "phsa: ".
void PrintNote(std::string_view line);
void PrintWarning(std::string_view line);
void PrintError(std::string_view line);
template <class... Args>
void Note(fmt::format_string<Args...> format, Args&&... args) {
  if (!IsQuiet()) PrintNote(fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void Warn(fmt::format_string<Args...> format, Args&&... args) {
  if (!IsQuiet()) PrintWarning(fmt::format(format, std::forward<Args>(args)...));
}
void PrintQuestionMark();  // where `chat` waits for a line

// One line on stderr that is drawn again and again, only where stderr is a terminal; gone when the bar ends.
class ProgressBar {
 public:
  explicit ProgressBar(std::string label) : label_(std::move(label)) {}
  ~ProgressBar() { Clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  // At most ten times a second. `note` follows the bar: "31 of 93 MB", "part 3 of 22".
  void Update(double share, const std::string& note);
  void Clear();

 private:
  std::string label_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now(), drawn_{};
  bool visible_ = false;
};

std::string BytesInWords(uint64_t bytes);     // "98.4 MB"
std::string DurationInWords(double seconds);  // "1 min 12 s", "0.84 s"
uint64_t PeakMemoryBytes();                   // of this process so far

// Writes all of it to stdout and flushes; a closed or full stdout throws phsa::Error(PHSA_IO).
void WriteOut(std::string_view text);

}  // namespace phsa::cli

#endif  // PHSA_CLI_TERMINAL_H_
