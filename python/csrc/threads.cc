#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <mutex>

#include "status.h"

namespace phsa_torch {
namespace {

struct State {
  std::mutex mutex;
  int32_t num_threads = 0;
  std::shared_ptr<phsa_threads> pool;
};

// Never freed: at exit, workers may still be asleep in it.
std::atomic<State*> g_state{nullptr};

State* NewState() {
  g_state.store(new State);
  return g_state.load();
}

State* GetState() {
  static const bool registered = [] {
    NewState();
    // A forked child has none of its parent's threads, and the parent's lock may be held by one of them: the child
    // starts afresh and leaves what it inherited alone. DataLoader workers are such children.
    pthread_atfork(nullptr, nullptr, [] { NewState(); });
    return true;
  }();
  (void)registered;
  return g_state.load();
}

}  // namespace

Threads Threads::Get(int32_t num_threads) {
  Threads out;
  if (num_threads <= 1) return out;
  State* const state = GetState();
  std::lock_guard lock(state->mutex);
  if (state->num_threads != num_threads) {
    phsa_threads* pool = nullptr;
    Check(phsa_threads_create(num_threads, &pool));
    // A call that still uses the old pool keeps it alive.
    state->pool = std::shared_ptr<phsa_threads>(pool, phsa_threads_destroy);
    state->num_threads = num_threads;
  }
  out.pool_ = state->pool;
  return out;
}

phsa_executor Threads::executor() const { return phsa_threads_executor(pool_.get()); }

}  // namespace phsa_torch
