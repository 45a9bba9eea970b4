// What messages say of options: each front end spells them as its user does.
#include "base/errors.h"

#include <gtest/gtest.h>

namespace phsa {
namespace {

Error Thrown() {
  try {
    ThrowInvalid("{} is {}; allowed: 0 to {}; {} needs less", Setting{"top_k"}, -1, 7, Option{"weights", "int8"});
  } catch (const Error& error) {
    return error;
  }
}

std::string Flag(std::string_view name, std::string_view value) { return fmt::format("<{}|{}>", name, value); }

TEST(Error, SaysOptionsByTheirPlainNames) {
  EXPECT_STREQ(Thrown().what(), "top_k is -1; allowed: 0 to 7; weights int8 needs less");
  EXPECT_EQ(Thrown().status(), PHSA_INVALID_ARGUMENT);
}

TEST(Error, IsSpeltAsAFrontEndWants) {
  EXPECT_EQ(Thrown().Spelt(Flag), "<.top_k|> is -1; allowed: 0 to 7; <weights|int8> needs less");
}

TEST(Error, KnowsItsField) {
  EXPECT_EQ(Thrown().field(), ".top_k");
  EXPECT_EQ(Error(PHSA_IO, fmt::format("{}: gone", Option{"tls_key", "a.pem"})).field(), "tls_key");
  EXPECT_EQ(Error(PHSA_IO, "the disk is full").field(), "");
}

TEST(Error, IsSpeltInsideAnotherOne) {
  const Error outer(PHSA_INVALID_ARGUMENT, fmt::format("file.json: {}", Thrown().message()));
  EXPECT_EQ(outer.field(), ".top_k");
  EXPECT_EQ(outer.Spelt([](auto, auto) { return "X"; }), "file.json: X is -1; allowed: 0 to 7; X needs less");
}

TEST(Error, TakesAnyText) {
  for (const char* text :
       {"", "no option", "\x1e", "\x1d", "a \x1e b", "\x1d\x1e", "\x1f", "a\x1e\x1d z", "\x1e\x1f\x1d"}) {
    const Error error(PHSA_INVALID_ARGUMENT, text);
    EXPECT_EQ(error.message(), text);
    (void)error.Spelt(Flag);
    (void)error.field();
  }
}

}  // namespace
}  // namespace phsa
