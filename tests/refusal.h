// For tests of what is refused.
#ifndef PHSA_TESTS_REFUSAL_H_
#define PHSA_TESTS_REFUSAL_H_

#include <gtest/gtest.h>

#include <string>

#include "phsa/error.h"

namespace phsa {

// The message of the error that fn throws.
template <class Fn>
std::string Refusal(Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), PHSA_INVALID_ARGUMENT);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

}  // namespace phsa

#endif  // PHSA_TESTS_REFUSAL_H_
