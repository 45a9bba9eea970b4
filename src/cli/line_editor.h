// What a person at a terminal types: editing, history, completion, questions of several lines, pasted text. libedit
// does the work.
#ifndef PHSA_CLI_LINE_EDITOR_H_
#define PHSA_CLI_LINE_EDITOR_H_

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace phsa::cli {

enum class Typed : uint8_t {
  kLine,
  kInterrupt,  // Ctrl-C
  kEnd,        // Ctrl-D, the terminal is gone, or a signal asks the program to end
};

// A word that may begin a line.
struct LineCommand {
  std::string name;
  bool takes_path = false;
};

class LineEditor {
 public:
  // `history`: a file that keeps what was typed; empty: none does. What of it cannot be read or written is left alone,
  // with a warning.
  LineEditor(std::filesystem::path history, std::vector<LineCommand> commands);
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  // Whether somebody sits at a terminal on which lines can be edited.
  static bool Possible();

  // Waits for a line, which may have newlines within; no white space at its end. Text that was pasted stands in it
  // whole, however it was shown. Drawn on stderr.
  Typed Read(std::string& line);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phsa::cli

#endif  // PHSA_CLI_LINE_EDITOR_H_
