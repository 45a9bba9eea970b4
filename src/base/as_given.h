// Numbers as people wrote them.
#ifndef PHSA_BASE_AS_GIVEN_H_
#define PHSA_BASE_AS_GIVEN_H_

#include <charconv>

namespace phsa {

// The shortest decimal number that reads back as the same f32: 0.9, not 0.8999999761581421.
inline double AsGiven(float value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  double out = 0;
  std::from_chars(text, end, out);
  return out;
}

}  // namespace phsa

#endif  // PHSA_BASE_AS_GIVEN_H_
