// Text that knows which of its bytes the template itself wrote, and which came from outside: a message, a tool, a
// result. Only the template's own bytes may become control tokens.
#ifndef PHSA_JINJA_TEXT_H_
#define PHSA_JINJA_TEXT_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace phsa::jinja {

class Text {
 public:
  // A stretch of bytes of one origin: from the end of the run before to `end`.
  struct Run {
    size_t end;
    bool own;  // the template's
  };

  Text() = default;
  Text(std::string_view bytes, bool own) { Append(bytes, own); }

  const std::string& bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  const std::vector<Run>& runs() const { return runs_; }
  bool IsOwn() const { return runs_.empty() || (runs_.size() == 1 && runs_.front().own); }
  // Whether all bytes in [begin, end) are the template's.
  bool IsOwn(size_t begin, size_t end) const;

  void Append(std::string_view bytes, bool own);
  void Append(const Text& other) { Append(other, 0, other.size()); }
  void Append(const Text& other, size_t begin, size_t end);
  Text Part(size_t begin, size_t end) const;

 private:
  size_t RunAt(size_t at) const;  // the run that holds the byte

  std::string bytes_;
  std::vector<Run> runs_;  // neighbours differ in origin
};

}  // namespace phsa::jinja

#endif  // PHSA_JINJA_TEXT_H_
