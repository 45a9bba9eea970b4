#include "cli/terminal.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "base/errors.h"
#include "cli/spelling.h"

namespace phsa::cli {
namespace {

volatile std::sig_atomic_t g_interrupted = 0;

void OnInterrupt(int signal) {
  // The second time the work does not look at the flag: leave as the signal would have made us.
  if (g_interrupted != 0) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  g_interrupted = 1;
}

bool g_quiet = false;
std::string g_color = "auto";

bool StderrIsTerminal() {
  static const bool is_terminal = isatty(STDERR_FILENO) == 1;
  return is_terminal;
}

bool UsesColor() {
  if (g_color != "auto") return g_color == "always";
  const auto value = [](const char* name) {
    const char* const text = std::getenv(name);
    return std::string_view(text == nullptr ? "" : text);
  };
  return StderrIsTerminal() && value("NO_COLOR").empty() && value("TERM") != "dumb";
}

constexpr const char *kDim = "2", *kBold = "1", *kYellow = "33", *kRed = "1;31";

std::string Colored(const char* code, std::string_view text) {
  return UsesColor() ? fmt::format("\x1b[{}m{}\x1b[0m", code, text) : std::string(text);
}

}  // namespace

void CatchInterrupts() {
  struct sigaction action {};
  action.sa_handler = OnInterrupt;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  // A reader that went away is an error of the write, not the end of the process without a word.
  std::signal(SIGPIPE, SIG_IGN);
}

bool WasInterrupted() { return g_interrupted != 0; }
void ClearInterrupt() { g_interrupted = 0; }
void ThrowIfInterrupted() {
  if (WasInterrupted()) throw Interrupted{};
}

void SetQuiet(bool quiet) { g_quiet = quiet; }
bool IsQuiet() { return g_quiet; }
void SetColor(const std::string& when) { g_color = when; }

void PrintNote(std::string_view line) { fmt::print(stderr, "{}\n", Colored(kDim, WithFlags(line))); }
void PrintWarning(std::string_view line) { fmt::print(stderr, "{}\n", Colored(kYellow, WithFlags(line))); }
void PrintError(std::string_view line) { fmt::print(stderr, "{} {}\n", Colored(kRed, "phsa:"), WithFlags(line)); }
void PrintQuestionMark() {
  fmt::print(stderr, "{} ", Colored(kBold, ">"));
  std::fflush(stderr);
}

void ProgressBar::Update(double share, const std::string& note) {
  if (!StderrIsTerminal() || IsQuiet()) return;
  const auto now = std::chrono::steady_clock::now();
  if (visible_ && now - drawn_ < std::chrono::milliseconds(100)) return;
  drawn_ = now;
  visible_ = true;
  share = std::clamp(share, 0.0, 1.0);
  constexpr int kWidth = 24;
  const int full = static_cast<int>(std::lround(share * kWidth));
  std::string line = fmt::format("\r\x1b[K{} [", label_);
  for (int i = 0; i < kWidth; ++i) line += i < full ? "█" : "·";
  line += fmt::format("] {:3.0f} % {}", share * 100, note);
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  if (share > 0.02 && elapsed > 2) line += fmt::format(", {} left", DurationInWords(elapsed / share * (1 - share)));
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

void ProgressBar::Clear() {
  if (visible_) std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  visible_ = false;
}

std::string BytesInWords(uint64_t bytes) {
  const double value = static_cast<double>(bytes);
  if (value >= 1e9) return fmt::format("{:.2f} GB", value / 1e9);
  if (value >= 1e6) return fmt::format("{:.1f} MB", value / 1e6);
  if (value >= 1e3) return fmt::format("{:.1f} kB", value / 1e3);
  return fmt::format("{} bytes", bytes);
}

std::string DurationInWords(double seconds) {
  if (seconds < 1) return fmt::format("{:.2f} s", seconds);
  if (seconds < 10) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole % 3600 / 60);
}

uint64_t PeakMemoryBytes() {
  // Not getrusage: what it says includes the process that started us, up to its exec.
  std::ifstream status("/proc/self/status");
  for (std::string key; status >> key;) {
    uint64_t kibibytes = 0;
    if (key == "VmHWM:" && status >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}

void WriteOut(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    Throw(PHSA_IO, "cannot write to standard output: {}", std::strerror(errno));
  }
}

}  // namespace phsa::cli
