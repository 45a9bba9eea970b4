// The thread pool of the process, for the operators.
#ifndef PHSA_PYTHON_CSRC_THREADS_H_
#define PHSA_PYTHON_CSRC_THREADS_H_

#include <cstdint>
#include <memory>

#include "phsa/c.h"

namespace phsa_torch {

// Keeps a pool alive while it is used. Empty for one thread: its executor runs on the caller.
class Threads {
 public:
  // The process's pool, made or replaced so that it has num_threads threads. Safe to call from several threads, and
  // in a child made by fork.
  static Threads Get(int32_t num_threads);

  phsa_executor executor() const;

 private:
  std::shared_ptr<phsa_threads> pool_;
};

}  // namespace phsa_torch

#endif  // PHSA_PYTHON_CSRC_THREADS_H_
