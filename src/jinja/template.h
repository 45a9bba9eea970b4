// The part of Jinja that chat templates use, run as transformers runs them (trim_blocks, lstrip_blocks, loop controls,
// its own tojson, raise_exception, strftime_now), with limits: a template comes from a stranger's file.
#ifndef PHSA_JINJA_TEMPLATE_H_
#define PHSA_JINJA_TEMPLATE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "jinja/text.h"
#include "jinja/value.h"

namespace phsa::jinja {

struct Limits {
  int64_t steps = 2'000'000;  // and one more for eight bytes that go in
  // All that is ever copied; the texts that go in count this often more.
  int64_t bytes = int64_t{64} << 20;
  int64_t bytes_per_input_byte = 64;
  size_t output_bytes = size_t{1} << 30;
};

class Template {
 public:
  // Throws phsa::Error with the line of what is wrong.
  static Template Parse(std::string_view source);
  ~Template();
  Template(Template&&) noexcept;
  Template& operator=(Template&&) noexcept;
  Template(const Template&);  // the tree is shared: it does not change
  Template& operator=(const Template&);

  using Variables = std::map<std::string, Value, std::less<>>;
  // `input_bytes`: of the texts in the variables. Throws phsa::Error with the line, also what the template itself
  // raises.
  Text Render(const Variables& variables, size_t input_bytes, const Limits& limits = {}) const;

 private:
  struct Tree;
  explicit Template(std::shared_ptr<const Tree> tree);
  std::shared_ptr<const Tree> tree_;
};

}  // namespace phsa::jinja

#endif  // PHSA_JINJA_TEMPLATE_H_
