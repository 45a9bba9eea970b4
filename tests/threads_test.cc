#include "phsa/threads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/cores.h"
#include "phsa/error.h"

namespace phsa {
namespace {

template <class Fn>
void ForEach(ThreadPool* pool, int32_t tasks, Fn&& fn) {
  pool->Run(
      tasks, [](void* arg, int32_t task, int32_t worker) { (*static_cast<Fn*>(arg))(task, worker); }, &fn);
}

TEST(Threads, EveryTaskRunsExactlyOnceForAnyNumberOfThreadsAndTasks) {
  for (const int32_t threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads, threads);
    ASSERT_EQ(pool.num_threads(), threads);
    for (const int32_t tasks : {0, 1, 2, 7, 100, 1000}) {
      // Not atomic: TSan would see two threads on one task.
      std::vector<int> runs(static_cast<size_t>(tasks), 0);
      ForEach(&pool, tasks, [&](int32_t task, int32_t) { ++runs[static_cast<size_t>(task)]; });
      EXPECT_EQ(runs, std::vector<int>(static_cast<size_t>(tasks), 1)) << threads << " threads, " << tasks << " tasks";
    }
  }
}

TEST(Threads, APoolTakesPhysicalCoresThatItMayUseAndIsPaidFor) {
  const std::filesystem::path root = std::filesystem::path(testing::TempDir()) / "phsa_cores";
  const auto write = [&](const std::filesystem::path& file, const std::string& text) {
    std::filesystem::create_directories((root / file).parent_path());
    std::ofstream(root / file) << text;
  };
  const std::vector<int> all = {0, 1, 2, 3, 4, 5, 6, 7};
  std::filesystem::remove_all(root);
  EXPECT_EQ(PhysicalCores(root, all), 8);  // nothing is known
  for (const int cpu : all) {
    const std::string siblings = std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4) + "\n";
    write("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list", siblings);
  }
  EXPECT_EQ(PhysicalCores(root, all), 4);
  EXPECT_EQ(PhysicalCores(root, {1, 5}), 1);
  EXPECT_EQ(PhysicalCores(root, {1, 6}), 2);
  write("sys/fs/cgroup/cpu.max", "max 100000\n");
  EXPECT_EQ(PhysicalCores(root, all), 4);
  write("sys/fs/cgroup/cpu.max", "150000 100000\n");
  EXPECT_EQ(PhysicalCores(root, all), 2);
  write("sys/fs/cgroup/cpu.max", "1000 100000\n");
  EXPECT_EQ(PhysicalCores(root, all), 1);
  std::filesystem::remove_all(root);
  EXPECT_EQ(ThreadPool().num_threads(), PhysicalCores());
}

TEST(Threads, NoWorkerRunsTwoTasksAtATime) {
  ThreadPool pool(4, 4);
  std::vector<std::atomic<int>> busy(4);
  std::atomic<int> clashes{0}, outside{0};
  for (int round = 0; round < 200; ++round) {
    ForEach(&pool, 16, [&](int32_t, int32_t worker) {
      if (worker < 0 || worker >= 4) {
        ++outside;
        return;
      }
      if (busy[static_cast<size_t>(worker)].fetch_add(1) != 0) ++clashes;
      std::this_thread::yield();
      --busy[static_cast<size_t>(worker)];
    });
  }
  EXPECT_EQ(clashes, 0);
  EXPECT_EQ(outside, 0);
}

TEST(Threads, TheCallerIsWorkerZeroAndWorkersKeepTheirThreads) {
  ThreadPool pool(3, 3);
  std::vector<std::thread::id> ids(3);
  ids[0] = std::this_thread::get_id();
  std::atomic<int> moved{0};
  for (int round = 0; round < 100; ++round) {
    ForEach(&pool, 9, [&](int32_t, int32_t worker) {
      std::thread::id& id = ids[static_cast<size_t>(worker)];
      if (id == std::thread::id()) id = std::this_thread::get_id();
      if (id != std::this_thread::get_id()) ++moved;
    });
  }
  EXPECT_EQ(moved, 0);
}

TEST(Threads, TasksThatWaitForEachOtherAreAllTakenAtOnce) {
  // Only if every worker takes part can all four be inside at the same time.
  ThreadPool pool(4, 4);
  for (int round = 0; round < 20; ++round) {
    // Long enough, now and then, that the workers have gone to sleep.
    if (round % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::atomic<int> inside{0};
    ForEach(&pool, 4, [&](int32_t, int32_t) {
      ++inside;
      while (inside < 4) std::this_thread::yield();
    });
    EXPECT_EQ(inside, 4);
  }
}

TEST(Threads, OfMoreThreadsThanCpusNoMoreRunAtATime) {
  for (const int32_t cpus : {1, 2, 3}) {
    ThreadPool pool(8, cpus);
    EXPECT_EQ(pool.num_threads(), 8);
    EXPECT_EQ(pool.executor().num_threads, 8);
    std::atomic<int> inside{0}, most{0};
    std::vector<std::atomic<int>> runs(64);
    for (int round = 0; round < 50; ++round) {
      ForEach(&pool, 64, [&](int32_t task, int32_t) {
        const int now = ++inside;
        for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
        }
        ++runs[static_cast<size_t>(task)];
        std::this_thread::yield();
        --inside;
      });
    }
    EXPECT_LE(most, cpus);
    for (const auto& count : runs) EXPECT_EQ(count, 50);
  }
  EXPECT_GE(UsableCpus(), 1);
  EXPECT_LE(PhysicalCores(), UsableCpus());
}

TEST(Threads, WhatTasksWroteIsSeenAfterRunReturns) {
  ThreadPool pool(4, 4);
  std::vector<int64_t> values(64);
  for (int64_t round = 0; round < 2000; ++round) {
    ForEach(&pool, 64, [&](int32_t task, int32_t) { values[static_cast<size_t>(task)] = round + task; });
    const int64_t sum = std::accumulate(values.begin(), values.end(), int64_t{0});
    ASSERT_EQ(sum, 64 * round + 63 * 32);
  }
}

TEST(Threads, CallersOfOnePoolTakeTurns) {
  ThreadPool pool(2, 2);
  std::atomic<int> running{0}, clashes{0}, tasks{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        ForEach(&pool, 5, [&](int32_t, int32_t worker) {
          ++tasks;
          if (worker != 0) return;
          if (running.fetch_add(1) != 0) ++clashes;  // two callers as worker 0
          --running;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(clashes, 0);
  EXPECT_EQ(tasks, 3 * 100 * 5);
}

TEST(Threads, ThePoolWorksAsAnExecutor) {
  ThreadPool pool(2);
  const phsa_executor executor = pool.executor();
  EXPECT_EQ(executor.struct_size, sizeof(phsa_executor));
  EXPECT_EQ(executor.num_threads, 2);
  std::vector<int> runs(10);
  executor.run(
      executor.context, 10, [](void* arg, int32_t task, int32_t) { ++static_cast<int*>(arg)[task]; }, runs.data());
  EXPECT_EQ(runs, std::vector<int>(10, 1));
}

TEST(Threads, ZeroMeansOneThreadPerCore) {
  ThreadPool pool;
  EXPECT_EQ(pool.num_threads(), static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency())));
}

TEST(Threads, ImpossibleNumbersAreRefusedWithTheAllowedOnes) {
  for (const int32_t threads : {-1, 1025, INT32_MIN, INT32_MAX}) {
    try {
      ThreadPool pool(threads);
      FAIL() << threads;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), PHSA_INVALID_ARGUMENT);
      EXPECT_NE(std::string(error.what()).find("allowed: 0 (one per core) to 1024"), std::string::npos);
    }
  }
}

TEST(Threads, APoolThatNeverRanEndsCleanly) {
  for (int n = 0; n < 20; ++n) ThreadPool pool(4, 4);
}

}  // namespace
}  // namespace phsa
