// What is wrong in a text is said by its own keys, whoever reads it.
#ifndef PHSA_BASE_PLAIN_NAMES_H_
#define PHSA_BASE_PLAIN_NAMES_H_

#include "base/errors.h"

namespace phsa {

// fn(), whose errors then have the plain names of options: those are the keys of the text that it reads, however its
// reader's own options are spelt.
template <class Fn>
auto WithPlainNames(Fn&& fn) {
  try {
    return fn();
  } catch (const Error& error) {
    throw Error(error.status(), error.what());
  }
}

}  // namespace phsa

#endif  // PHSA_BASE_PLAIN_NAMES_H_
