#include "cli/line_editor.h"

#include <fcntl.h>
#include <histedit.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/new_file.h"
#include "base/utf8.h"
#include "cli/terminal.h"
#include "tokenizer/utf8_scan.h"

namespace phsa::cli {
namespace {

namespace fs = std::filesystem;

constexpr int kHistoryLines = 1000;
// A longer question is not worth finding again with the arrow keys.
constexpr size_t kHistoryCharacters = 4000;
// Pasted text of more than this stands in the line as one word, or it would fill the screen.
constexpr size_t kShownCharacters = 400, kShownLines = 5;
// Nobody's context holds more.
constexpr size_t kMostPasted = size_t{64} << 20;
constexpr std::string_view kPasteEnd = "\x1b[201~";
// Bound to what the keys below come to in the end; nobody types it.
constexpr const wchar_t *kAcceptKey = L"\x1d", *kOlderKey = L"\x10", *kNewerKey = L"\x0e";

std::wstring Wide(std::string_view text) {
  std::wstring out;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = ScanUtf8(text, at);
    out += step.kind == Utf8Step::Kind::kCharacter ? static_cast<wchar_t>(step.code) : L'\xfffd';
    at += step.size;
  }
  return out;
}

std::string Narrow(std::wstring_view text) {
  std::string out;
  for (const wchar_t c : text) AppendUtf8(static_cast<char32_t>(c), &out);
  return out;
}

void Say(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

// As a text file would have it: lines end with \n, and nothing in it moves a cursor.
std::string Cleaned(std::string_view pasted) {
  std::string out;
  for (size_t i = 0; i < pasted.size(); ++i) {
    const char c = pasted[i];
    if (c == '\r') {
      out += '\n';
      if (i + 1 < pasted.size() && pasted[i + 1] == '\n') ++i;
    } else if (c == '\n' || c == '\t' || (static_cast<unsigned char>(c) >= 0x20 && c != 0x7f)) {
      out += c;
    }
  }
  return out;
}

std::string CommonBeginning(const std::vector<std::string>& words) {
  std::string common = words.front();
  for (const std::string& word : words) {
    const auto [end, other] = std::mismatch(common.begin(), common.end(), word.begin(), word.end());
    common.erase(end, common.end());
  }
  return common;
}

std::vector<std::string> PathsThatBegin(const std::string& begin) {
  const size_t slash = begin.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : begin.substr(0, slash + 1);
  const std::string name = begin.substr(folder.size());
  std::vector<std::string> found;
  std::error_code error;
  for (auto entry = fs::directory_iterator(folder.empty() ? "." : folder, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string one = entry->path().filename().string();
    if (!one.starts_with(name) || (name.empty() && one.starts_with('.'))) continue;
    std::error_code unknown;
    found.push_back(folder + one + (entry->is_directory(unknown) ? "/" : ""));
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

class LineEditor::Impl {
 public:
  Impl(fs::path history_file, std::vector<LineCommand> commands)
      : history_file_(std::move(history_file)), commands_(std::move(commands)) {
    // What libedit draws is UTF-8, as all that phsa writes, also where the environment names no language.
    if (std::setlocale(LC_CTYPE, "C.UTF-8") == nullptr) std::setlocale(LC_CTYPE, "");
    editor_ = el_init("phsa", stdin, stderr, stderr);
    history_ = history_winit();
    PHSA_CHECK(editor_ != nullptr && history_ != nullptr);
    HistEventW event;
    history_w(history_, &event, H_SETSIZE, kHistoryLines);
    history_w(history_, &event, H_SETUNIQUE, 1);
    LoadHistory();
    el_wset(editor_, EL_CLIENTDATA, this);
    el_wset(editor_, EL_GETCFN, &Impl::NextCharacter);
    el_wset(editor_, EL_HIST, history_w, history_);
    el_wset(editor_, EL_PROMPT, &Impl::Prompt);
    el_wset(editor_, EL_EDITOR, L"emacs");
    // Ctrl-C and Ctrl-Z come as characters: no signal finds the terminal in the editor's state.
    el_wset(editor_, EL_SETTY, L"-d", L"-isig", nullptr);
    el_source(editor_, nullptr);  // ~/.editrc
    BindKeys();
  }

  ~Impl() {
    el_end(editor_);
    history_wend(history_);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Typed Read(std::string& line) {
    line.clear();
    pastes_.clear();
    interrupted_ = false;
    struct sigaction resized {
    }, before{};
    resized.sa_handler = [](int) {};  // so that it ends the wait for a character
    sigaction(SIGWINCH, &resized, &before);
    el_resize(editor_);
    el_wset(editor_, EL_PREP_TERM, 1);
    Say("\x1b[?2004h");  // from now on the terminal says where a paste begins and ends
    int count = 0;
    const wchar_t* const text = el_wgets(editor_, &count);
    Say("\x1b[?2004l");
    sigaction(SIGWINCH, &before, nullptr);
    if (text == nullptr || count <= 0) {
      Say("\n");
      return Typed::kEnd;
    }
    if (interrupted_) return Typed::kInterrupt;
    line = Whole(Narrow({text, static_cast<size_t>(count)}));
    line.erase(line.find_last_not_of(" \t\n") + 1);
    Remember(line);
    return Typed::kLine;
  }

 private:
  using Action = unsigned char;

  static Impl& Of(EditLine* editor) {
    void* self = nullptr;
    el_wget(editor, EL_CLIENTDATA, &self);
    return *static_cast<Impl*>(self);
  }

  void BindKeys() {
    const auto function = [&](const wchar_t* name, Action (*action)(EditLine*, wint_t)) {
      el_wset(editor_, EL_ADDFN, name, L"of phsa", action);
    };
    const auto bind = [&](std::initializer_list<const wchar_t*> keys, const wchar_t* action) {
      for (const wchar_t* key : keys) el_wset(editor_, EL_BIND, key, action, nullptr);
    };
    function(L"phsa-enter", OnEnter);
    function(L"phsa-newline", OnNewline);
    function(L"phsa-paste", OnPaste);
    function(L"phsa-interrupt", OnInterrupt);
    function(L"phsa-suspend", OnSuspend);
    function(L"phsa-up", OnUp);
    function(L"phsa-down", OnDown);
    function(L"phsa-complete", OnComplete);
    bind({kAcceptKey}, L"ed-newline");
    bind({kOlderKey}, L"ed-prev-history");
    bind({kNewerKey}, L"ed-next-history");
    bind({L"^J", L"^M"}, L"phsa-enter");
    bind({L"\\e^J", L"\\e^M"}, L"phsa-newline");
    bind({L"\\e[200~"}, L"phsa-paste");
    bind({L"^C"}, L"phsa-interrupt");
    bind({L"^Z"}, L"phsa-suspend");
    bind({L"^I"}, L"phsa-complete");
    bind({L"^R"}, L"em-inc-search-prev");
    bind({L"\\e[A", L"\\eOA"}, L"phsa-up");
    bind({L"\\e[B", L"\\eOB"}, L"phsa-down");
    bind({L"\\e[H", L"\\eOH", L"\\e[1~"}, L"ed-move-to-beg");
    bind({L"\\e[F", L"\\eOF", L"\\e[4~"}, L"ed-move-to-end");
    bind({L"\\e[3~"}, L"ed-delete-next-char");
    bind({L"\\e[1;5C"}, L"em-next-word");
    bind({L"\\e[1;5D"}, L"ed-prev-word");
  }

  static wchar_t* Prompt(EditLine*) {
    static wchar_t prompt[] = L"> ";
    return prompt;
  }

  // --- what the terminal sends ---

  static int NextCharacter(EditLine* editor, wchar_t* character) { return Of(editor).Take(character); }

  int Take(wchar_t* character) {
    for (;;) {
      if (!pending_.empty()) {
        const Utf8Step step = ScanUtf8(pending_, 0);
        if (step.kind != Utf8Step::Kind::kCut) {
          *character = step.kind == Utf8Step::Kind::kCharacter ? static_cast<wchar_t>(step.code) : L'\xfffd';
          pending_.erase(0, step.size);
          return 1;
        }
      }
      char byte = 0;
      const ssize_t count = WasInterrupted() ? 0 : read(STDIN_FILENO, &byte, 1);
      if (count == 1) {
        pending_ += byte;
      } else if (count < 0 && errno == EINTR) {
        if (WasInterrupted()) return 0;
        el_resize(editor_);
        el_wset(editor_, EL_REFRESH);
      } else {
        return 0;
      }
    }
  }

  // --- keys ---

  static Action OnEnter(EditLine* editor, wint_t) {
    const LineInfoW& line = *el_wline(editor);
    if (line.cursor == line.lastchar && line.cursor > line.buffer && line.cursor[-1] == L'\\') {
      el_wdeletestr(editor, 1);
      return OnNewline(editor, 0);
    }
    el_wpush(editor, kAcceptKey);
    return CC_NORM;
  }

  static Action OnNewline(EditLine* editor, wint_t) {
    return el_winsertstr(editor, L"\n") == 0 ? CC_REFRESH : CC_ERROR;
  }

  static Action OnInterrupt(EditLine* editor, wint_t) {
    Of(editor).interrupted_ = true;
    el_wpush(editor, kAcceptKey);
    return CC_NORM;
  }

  static Action OnSuspend(EditLine* editor, wint_t) {
    Say("\x1b[?2004l");
    el_wset(editor, EL_PREP_TERM, 0);
    std::raise(SIGTSTP);
    el_wset(editor, EL_PREP_TERM, 1);
    Say("\x1b[?2004h");
    return CC_REDISPLAY;
  }

  // Within a text of several lines up and down move in it; at its first and last line they go through the history.
  static Action OnUp(EditLine* editor, wint_t) {
    const LineInfoW& line = *el_wline(editor);
    const std::wstring_view before(line.buffer, static_cast<size_t>(line.cursor - line.buffer));
    const size_t end = before.rfind(L'\n');
    if (end == std::wstring_view::npos) {
      el_wpush(editor, kOlderKey);
      return CC_NORM;
    }
    const size_t column = before.size() - end - 1;
    const size_t begin = end == 0 ? 0 : before.rfind(L'\n', end - 1) + 1;  // npos + 1 is 0
    const size_t wanted = std::min(begin + column, end);
    el_cursor(editor, -static_cast<int>(before.size() - wanted));
    return CC_REFRESH;
  }

  static Action OnDown(EditLine* editor, wint_t) {
    const LineInfoW& line = *el_wline(editor);
    const std::wstring_view all(line.buffer, static_cast<size_t>(line.lastchar - line.buffer));
    const auto cursor = static_cast<size_t>(line.cursor - line.buffer);
    const size_t end = all.find(L'\n', cursor);
    if (end == std::wstring_view::npos) {
      el_wpush(editor, kNewerKey);
      return CC_NORM;
    }
    const size_t begin = cursor == 0 ? 0 : all.rfind(L'\n', cursor - 1) + 1;
    const size_t next_end = std::min(all.find(L'\n', end + 1), all.size());
    el_cursor(editor, static_cast<int>(std::min(end + 1 + cursor - begin, next_end) - cursor));
    return CC_REFRESH;
  }

  static Action OnPaste(EditLine* editor, wint_t) {
    std::string pasted;
    bool too_long = false;
    while (!pasted.ends_with(kPasteEnd)) {
      wchar_t character = 0;
      if (el_wgetc(editor, &character) != 1) return CC_EOF;
      AppendUtf8(static_cast<char32_t>(character), &pasted);
      if (pasted.size() <= kMostPasted) continue;
      too_long = true;
      pasted.erase(0, kMostPasted / 2);
    }
    if (too_long) {
      Say("\n");
      PrintError(fmt::format("that was more than {} MiB of text, and none of it is taken", kMostPasted >> 20));
      return CC_REDISPLAY;
    }
    pasted.resize(pasted.size() - kPasteEnd.size());
    return Of(editor).Insert(Cleaned(pasted));
  }

  Action Insert(const std::string& text) {
    const auto lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n')) + 1;
    std::string shown = text;
    if (text.size() > kShownCharacters || lines > kShownLines) {
      shown = fmt::format("[paste {}: {} lines, {} bytes]", pastes_.size() + 1, lines, text.size());
      pastes_.push_back({shown, text});
    }
    return el_winsertstr(editor_, Wide(shown).c_str()) == 0 ? CC_REFRESH : CC_ERROR;
  }

  // With the pasted texts in the places of their words.
  std::string Whole(std::string line) const {
    for (const Paste& paste : pastes_) {
      const size_t at = line.find(paste.shown);
      if (at != std::string::npos) line.replace(at, paste.shown.size(), paste.text);
    }
    return line;
  }

  static Action OnComplete(EditLine* editor, wint_t) { return Of(editor).Complete(); }

  Action Complete() {
    const LineInfoW& line = *el_wline(editor_);
    const std::string before = Narrow({line.buffer, static_cast<size_t>(line.cursor - line.buffer)});
    if (!before.starts_with('/')) return OnPlainTab();
    std::vector<std::string> found;
    std::string begun = before;
    for (const LineCommand& command : commands_) {
      if (command.name.starts_with(before)) found.push_back(command.name + " ");
      if (command.takes_path && before.starts_with(command.name + " ")) {
        begun = before.substr(command.name.size() + 1);
        found = PathsThatBegin(begun);
        break;
      }
    }
    if (found.empty()) return CC_ERROR;
    const std::string rest = CommonBeginning(found).substr(begun.size());
    if (!rest.empty()) return el_winsertstr(editor_, Wide(rest).c_str()) == 0 ? CC_REFRESH : CC_ERROR;
    if (found.size() == 1) return CC_NORM;
    std::string list = "\n";
    for (const std::string& one : found) list += Cleaned(one) + "  ";
    Say(list + "\n");
    return CC_REDISPLAY;
  }

  Action OnPlainTab() { return el_winsertstr(editor_, L"\t") == 0 ? CC_REFRESH : CC_ERROR; }

  // --- history: a file with a JSON string in each line ---

  void LoadHistory() {
    std::ifstream file(history_file_);
    std::vector<std::wstring> lines;
    size_t count = 0;
    for (std::string line; std::getline(file, line); ++count) {
      const nlohmann::json text = nlohmann::json::parse(line, nullptr, false);
      if (text.is_string()) lines.push_back(Wide(text.get_ref<const std::string&>()));
    }
    const size_t first = lines.size() - std::min<size_t>(lines.size(), kHistoryLines);
    HistEventW event;
    for (size_t i = first; i < lines.size(); ++i) history_w(history_, &event, H_ENTER, lines[i].c_str());
    if (count > 2 * kHistoryLines) Rewrite({lines.begin() + static_cast<std::ptrdiff_t>(first), lines.end()});
  }

  static std::string HistoryLine(std::string_view text) {
    return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  }

  void Rewrite(const std::vector<std::wstring>& lines) const {
    try {
      NewFile file(history_file_);
      for (const std::wstring& line : lines) file.Write(HistoryLine(Narrow(line)));
      file.Keep();
    } catch (const Error&) {
      // It stays as long as it is.
    }
  }

  void Remember(const std::string& line) {
    if (line.empty() || line.size() > kHistoryCharacters) return;
    HistEventW event;
    history_w(history_, &event, H_ENTER, Wide(line).c_str());
    if (history_file_.empty()) return;
    std::error_code error;
    fs::create_directories(history_file_.parent_path(), error);
    const int file = open(history_file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    const std::string text = HistoryLine(line);
    const bool written = file >= 0 && WriteAll(file, text.data(), text.size());
    const int reason = errno;
    if (file >= 0) close(file);
    if (written) return;
    Warn("the history is not kept: {}: {}", history_file_.string(), std::strerror(reason));
    history_file_.clear();
  }

  struct Paste {
    std::string shown, text;
  };

  fs::path history_file_;
  const std::vector<LineCommand> commands_;
  EditLine* editor_ = nullptr;
  HistoryW* history_ = nullptr;
  std::string pending_;  // bytes that are no whole character yet
  std::vector<Paste> pastes_;
  bool interrupted_ = false;
};

LineEditor::LineEditor(fs::path history, std::vector<LineCommand> commands)
    : impl_(std::make_unique<Impl>(std::move(history), std::move(commands))) {}
LineEditor::~LineEditor() = default;

bool LineEditor::Possible() {
  const char* const terminal = std::getenv("TERM");
  return isatty(STDIN_FILENO) == 1 && isatty(STDERR_FILENO) == 1 && terminal != nullptr &&
         std::string_view(terminal) != "dumb" && *terminal != '\0';
}

Typed LineEditor::Read(std::string& line) { return impl_->Read(line); }

}  // namespace phsa::cli
