// Errors that a user can cause are thrown as phsa::Error; bugs abort with file and line.
#ifndef PHSA_BASE_ERRORS_H_
#define PHSA_BASE_ERRORS_H_

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

#include "base/option.h"
#include "phsa/error.h"

namespace phsa {

// Throw(PHSA_INVALID_ARGUMENT, "settings: top_k is {}; allowed: 0 to {}", top_k, kMaxTopK)
template <class... Args>
[[noreturn]] void Throw(phsa_status status, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(status, fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
[[noreturn]] void ThrowInvalid(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(PHSA_INVALID_ARGUMENT, fmt::format(format, std::forward<Args>(args)...));
}

// Text from outside as it may appear in a message: in quotes, printable ASCII, cut to a readable length. A path needs
// more: its end says the most.
inline constexpr size_t kQuotedText = 60, kQuotedPath = 4096;
std::string Quoted(std::string_view text, size_t longest = kQuotedText);

[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);

}  // namespace phsa

// For what only a bug can violate. Stays on in Release: the checks are outside inner loops.
#define PHSA_CHECK(condition)                              \
  do {                                                     \
    if (!(condition)) [[unlikely]] {                       \
      ::phsa::CheckFailed(__FILE__, __LINE__, #condition); \
    }                                                      \
  } while (false)

#endif  // PHSA_BASE_ERRORS_H_
