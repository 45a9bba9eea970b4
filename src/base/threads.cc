// The thread pool. One call of Run per attention layer means thousands a second, so handing work over must cost
// microseconds: waiting threads spin briefly before they sleep, and no lock is taken while all of them are awake.
#include "phsa/threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/cores.h"
#include "base/errors.h"

namespace phsa {
namespace {

constexpr int32_t kMaxThreads = 1024;
// About 20 to 50 microseconds: longer than the gap between two stages of a layer, too short to be felt as load.
constexpr int kSpins = 1000;

inline void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// `ticket` holds the number of the job (upper half) and how many of its tasks nobody has taken yet (lower half). A
// thread takes a task by a compare-and-swap on both, so a thread that wakes late, when its job is long over, can
// neither take a task of a later job by mistake nor hold the caller up: the caller waits for tasks, not for threads.
// fn, arg and tasks change only while the lower half is 0 and every task has ended, so what a thread read of them
// belongs to the job of its ticket whenever its swap succeeds.
struct ThreadPool::Impl {
  std::mutex run_mutex;  // one caller at a time
  // On lines of their own: who waits for a ticket looks at it all the time, and who ends a task counts down.
  alignas(64) std::atomic<uint64_t> ticket{0};
  std::atomic<void (*)(void*, int32_t, int32_t)> fn{nullptr};
  std::atomic<void*> arg{nullptr};
  std::atomic<int32_t> tasks{0};
  std::atomic<bool> stop{false};
  alignas(64) std::atomic<int32_t> unfinished{0};

  // For those who sleep. Each raises its flag before it looks for work a last time; whoever brings work looks at the
  // flag after bringing it. Both sequentially consistent: at least one sees the other, so no wake-up is lost.
  std::mutex sleep_mutex;
  std::condition_variable wake, done;
  std::atomic<int32_t> sleeping_workers{0};
  std::atomic<bool> sleeping_caller{false};

  int32_t num_threads = 1;           // as asked for
  std::vector<std::thread> threads;  // those that were started beside the caller

  static uint32_t Job(uint64_t t) { return static_cast<uint32_t>(t >> 32); }
  static uint32_t Left(uint64_t t) { return static_cast<uint32_t>(t); }

  // Takes and runs tasks until none is left to take.
  void Work(int32_t worker) {
    uint64_t t = ticket.load();
    while (Left(t) != 0) {
      auto* const job_fn = fn.load(std::memory_order_relaxed);
      void* const job_arg = arg.load(std::memory_order_relaxed);
      const int32_t job_tasks = tasks.load(std::memory_order_relaxed);
      if (!ticket.compare_exchange_weak(t, t - 1)) continue;
      job_fn(job_arg, job_tasks - static_cast<int32_t>(Left(t)), worker);
      if (unfinished.fetch_sub(1) == 1 && sleeping_caller.load()) {
        { std::lock_guard lock(sleep_mutex); }
        done.notify_one();
      }
      t = ticket.load();
    }
  }

  void WorkerLoop(int32_t worker) {
    uint32_t seen = 0;
    for (;;) {
      const auto has_work = [&] { return stop.load() || Job(ticket.load()) != seen; };
      int spins = 0;
      while (!has_work() && spins < kSpins) {
        Pause();
        ++spins;
      }
      if (spins == kSpins) {
        std::unique_lock lock(sleep_mutex);
        sleeping_workers.fetch_add(1);
        wake.wait(lock, has_work);
        sleeping_workers.fetch_sub(1);
      }
      if (stop.load()) return;
      seen = Job(ticket.load());
      Work(worker);
    }
  }

  void Stop() {
    stop.store(true);
    { std::lock_guard lock(sleep_mutex); }
    wake.notify_all();
    for (std::thread& thread : threads) thread.join();
  }
};

ThreadPool::ThreadPool(int32_t num_threads) : ThreadPool(num_threads, UsableCpus()) {}

ThreadPool::ThreadPool(int32_t num_threads, int32_t cpus) : impl_(std::make_unique<Impl>()) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    ThrowInvalid("threads: num_threads is {}; allowed: 0 (one per core) to {}", num_threads, kMaxThreads);
  }
  if (num_threads == 0) {
    num_threads = std::min(PhysicalCores(), kMaxThreads);
  }
  // More threads than CPUs take turns, and who waits for a task holds the CPU that its worker needs: decode with 4
  // threads on 2 CPUs had 0.53 of the speed of 2. Results do not depend on who runs a task, so the others' are shared
  // out.
  const int32_t started = std::min(num_threads, std::max(cpus, 1));
  Impl* const impl = impl_.get();
  impl->num_threads = num_threads;
  impl->threads.reserve(static_cast<size_t>(started - 1));
  try {
    for (int32_t worker = 1; worker < started; ++worker) {
      impl->threads.emplace_back([impl, worker] { impl->WorkerLoop(worker); });
    }
  } catch (const std::system_error& error) {
    impl->Stop();
    Throw(PHSA_OUT_OF_MEMORY, "threads: could not start {} threads ({}); ask for fewer", started, error.what());
  }
}

ThreadPool::~ThreadPool() { impl_->Stop(); }

int32_t ThreadPool::num_threads() const { return impl_->num_threads; }

void ThreadPool::Run(int32_t tasks, void (*fn)(void* arg, int32_t task, int32_t worker), void* arg) {
  if (tasks <= 0) return;
  Impl& impl = *impl_;
  std::lock_guard run_lock(impl.run_mutex);
  if (tasks == 1 || impl.threads.empty()) {
    for (int32_t task = 0; task < tasks; ++task) fn(arg, task, 0);
    return;
  }
  impl.fn.store(fn, std::memory_order_relaxed);
  impl.arg.store(arg, std::memory_order_relaxed);
  impl.tasks.store(tasks, std::memory_order_relaxed);
  impl.unfinished.store(tasks, std::memory_order_relaxed);
  const uint64_t job = Impl::Job(impl.ticket.load()) + 1u;
  impl.ticket.store((job << 32) | static_cast<uint32_t>(tasks));
  if (impl.sleeping_workers.load() > 0) {
    { std::lock_guard lock(impl.sleep_mutex); }
    impl.wake.notify_all();
  }

  impl.Work(0);

  for (int spins = 0; spins < kSpins && impl.unfinished.load() != 0; ++spins) Pause();
  if (impl.unfinished.load() != 0) {
    std::unique_lock lock(impl.sleep_mutex);
    impl.sleeping_caller.store(true);
    impl.done.wait(lock, [&] { return impl.unfinished.load() == 0; });
    impl.sleeping_caller.store(false);
  }
}

phsa_executor ThreadPool::executor() {
  phsa_executor executor{};
  executor.struct_size = sizeof(executor);
  executor.num_threads = num_threads();
  executor.context = this;
  executor.run = [](void* context, int32_t tasks, void (*fn)(void*, int32_t, int32_t), void* arg) {
    static_cast<ThreadPool*>(context)->Run(tasks, fn, arg);
  };
  return executor;
}

}  // namespace phsa
