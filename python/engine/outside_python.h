// Work that runs without Python's lock: other Python threads go on meanwhile, Ctrl-C is heard, and the interpreter does
// not end under it.
#ifndef PHSA_PYTHON_ENGINE_OUTSIDE_PYTHON_H_
#define PHSA_PYTHON_ENGINE_OUTSIDE_PYTHON_H_

#include <nanobind/nanobind.h>

#include <chrono>
#include <functional>

namespace phsa::python {

// From its construction, with Python's lock held, to Return() or its end, the thread is outside.
class OutsidePython {
 public:
  OutsidePython();  // throws SystemExit where the interpreter is ending
  ~OutsidePython();
  OutsidePython(const OutsidePython&) = delete;
  OutsidePython& operator=(const OutsidePython&) = delete;

  // Whether the work should end: a signal's handler has raised something, or the interpreter is ending. Goes inside for
  // a moment, but not often; `meanwhile` is called there. To be asked between steps, by the thread that is outside.
  bool Interrupted(const std::function<void()>& meanwhile = {});
  // Back inside. Throws what was raised meanwhile.
  void Return();

 private:
  void GoInside();
  PyThreadState* state_ = nullptr;  // null: inside
  bool interrupted_ = false;
  std::chrono::steady_clock::time_point asked_;
};

// For Python's atexit: threads that are outside come back first, and none goes outside any more. A daemon thread that
// came back later would be ended inside of C++ code, which aborts the process.
void WaitForAllInside();
// To be called once: a forked child has none of its parent's threads, and must not wait for them.
void ForgetThreadsInForkedChild();

}  // namespace phsa::python

#endif  // PHSA_PYTHON_ENGINE_OUTSIDE_PYTHON_H_
