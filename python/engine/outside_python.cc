#include "outside_python.h"

#include <pthread.h>

#include <atomic>
#include <thread>

namespace nb = nanobind;

namespace phsa::python {
namespace {

// To go inside may take as long as another thread's turn in Python (5 ms), which is a step of a small model.
constexpr auto kAskEvery = std::chrono::milliseconds(50);

std::atomic<int> g_outside{0};  // changed with Python's lock held
std::atomic<bool> g_ending{false};

// Ends the thread as sys.exit() does: silently.
[[noreturn]] void ThrowEnding() {
  PyErr_SetNone(PyExc_SystemExit);
  nb::raise_python_error();
}

}  // namespace

OutsidePython::OutsidePython() : asked_(std::chrono::steady_clock::now()) {
  if (g_ending.load()) ThrowEnding();
  ++g_outside;
  state_ = PyEval_SaveThread();
}

OutsidePython::~OutsidePython() { GoInside(); }

void OutsidePython::GoInside() {
  if (state_ == nullptr) return;
  PyEval_RestoreThread(state_);
  state_ = nullptr;
  --g_outside;
}

bool OutsidePython::Interrupted(const std::function<void()>& meanwhile) {
  if (interrupted_ || g_ending.load()) return true;
  const auto now = std::chrono::steady_clock::now();
  if (now - asked_ < kAskEvery) return false;
  asked_ = now;
  PyEval_RestoreThread(state_);
  interrupted_ = PyErr_CheckSignals() != 0;
  if (!interrupted_ && meanwhile) {
    try {
      meanwhile();
    } catch (nb::python_error& error) {
      error.restore();
      interrupted_ = true;
    }
  }
  state_ = PyEval_SaveThread();
  return interrupted_;
}

void OutsidePython::Return() {
  GoInside();
  if (interrupted_) nb::raise_python_error();
  if (g_ending.load()) ThrowEnding();
}

void WaitForAllInside() {
  g_ending.store(true);
  const nb::gil_scoped_release release;
  while (g_outside.load() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void ForgetThreadsInForkedChild() {
  pthread_atfork(nullptr, nullptr, [] { g_outside.store(0); });
}

}  // namespace phsa::python
