// What a user of phsa can cause is thrown as phsa::Error: what was wrong, where, and what to do.
#ifndef PHSA_ERROR_H_
#define PHSA_ERROR_H_

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "phsa/c.h"

namespace phsa {

// How a front end writes an option: ("kv_type", "bf16") is --kv-type bf16 of a program and kv_type="bf16" of Python.
// The value may be empty. The name of one of the attention's settings begins with a dot: ".top_k".
using OptionSpeller = std::function<std::string(std::string_view name, std::string_view value)>;

class PHSA_API Error : public std::runtime_error {
 public:
  // `message` may name options (src/base/option.h). what() has their plain names: "kv_type".
  Error(phsa_status status, const std::string& message);
  phsa_status status() const { return status_; }
  // The first option that the message names, mostly the one that is wrong: "kv_type", ".top_k"; empty: it names none.
  std::string field() const;
  // The message with its options as `spell` writes them.
  std::string Spelt(const OptionSpeller& spell) const;
  // The message as it was given, for who says more in an Error of their own.
  const std::string& message() const { return *message_; }

 private:
  phsa_status status_;
  std::shared_ptr<const std::string> message_;  // shared: copying an exception must not throw
};

}  // namespace phsa

#endif  // PHSA_ERROR_H_
