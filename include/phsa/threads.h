// A small thread pool for those who bring no threads of their own.
#ifndef PHSA_THREADS_H_
#define PHSA_THREADS_H_

#include <cstdint>
#include <memory>

#include "phsa/c.h"

namespace phsa {

class PHSA_API ThreadPool {
 public:
  // 0: one for each physical core that this process may use. Where they run is left to the system.
  explicit ThreadPool(int32_t num_threads = 0);
  // `cpus`: how many threads may run at a time; without it as many as there are CPUs that this process may use. Of more
  // than that no more are started: tasks must not wait for each other.
  ThreadPool(int32_t num_threads, int32_t cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t num_threads() const;  // as asked for
  // fn(arg, task, worker) for every task in [0, tasks). Tasks are handed out in order, one caller at a time.
  void Run(int32_t tasks, void (*fn)(void* arg, int32_t task, int32_t worker), void* arg);
  // Valid as long as the pool.
  phsa_executor executor();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phsa

#endif  // PHSA_THREADS_H_
