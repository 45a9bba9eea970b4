#include "base/memory.h"

#include <gtest/gtest.h>

#include <string>

#include "model_files.h"

namespace phsa {
namespace {

constexpr uint64_t kGigabyte = 1'000'000'000;

// A machine's /proc and control groups in a folder, with 8 GB available.
class FakeSystem {
 public:
  FakeSystem() { Write("proc/meminfo", "MemTotal: 16000000 kB\nMemAvailable:    7812500 kB\n"); }
  void Write(const std::string& path, const std::string& text) const { folder_.Write(path, text); }
  void Limit(const std::string& file, uint64_t bytes) const { Write(file, std::to_string(bytes) + "\n"); }
  uint64_t Available() const { return AvailableMemory(folder_.path()); }

 private:
  TempFolder folder_;
};

// systemd's layout of version 2.
class SecondVersion : public FakeSystem {
 public:
  SecondVersion() {
    Write("proc/self/cgroup", "0::/system.slice/phsa.service\n");
    Write("proc/self/mountinfo",
          "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
          "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
    Write("sys/fs/cgroup/system.slice/memory.max", "max\n");
    Write("sys/fs/cgroup/system.slice/phsa.service/memory.max", "max\n");
  }
};

// Where version 1 has the memory and version 2 has nothing, as on older systems.
class FirstVersion : public FakeSystem {
 public:
  explicit FirstVersion(const std::string& group = "/", const std::string& seen = "/") {
    Write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:" + group + "\n3:cpuset:/other\n0::/\n");
    Write("proc/self/mountinfo",
          "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
          "34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
          "35 31 0:32 " +
              seen +
              " /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,cpu,memory\n"
              "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n");
    Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  }
};

TEST(AvailableMemory, IsTheSystemsWhereNoGroupHasALimit) {
  EXPECT_EQ(FakeSystem().Available(), 8 * kGigabyte);
  EXPECT_EQ(SecondVersion().Available(), 8 * kGigabyte);
  EXPECT_EQ(FirstVersion().Available(), 8 * kGigabyte);
  EXPECT_GT(AvailableMemory(), 0u);
  EXPECT_LT(AvailableMemory(), uint64_t{1} << 60) << "of the machine that runs this";
}

TEST(AvailableMemory, TheLimitOfAServiceIsSeen) {
  const SecondVersion system;
  system.Limit("sys/fs/cgroup/system.slice/phsa.service/memory.max", 3 * kGigabyte);
  EXPECT_EQ(system.Available(), 3 * kGigabyte);
}

TEST(AvailableMemory, TheSmallestLimitOnTheWayUpCounts) {
  const SecondVersion system;
  system.Limit("sys/fs/cgroup/system.slice/phsa.service/memory.max", 3 * kGigabyte);
  system.Limit("sys/fs/cgroup/system.slice/memory.max", 2 * kGigabyte);
  EXPECT_EQ(system.Available(), 2 * kGigabyte);
  system.Limit("sys/fs/cgroup/memory.max", 1 * kGigabyte);
  EXPECT_EQ(system.Available(), 1 * kGigabyte) << "a container's root has one";
  system.Limit("sys/fs/cgroup/other.slice/memory.max", 1000);
  EXPECT_EQ(system.Available(), 1 * kGigabyte) << "a group of others";
}

TEST(AvailableMemory, FirstVersionGroupsAreSeenNestedOnesToo) {
  const FirstVersion system("/docker/abc");
  EXPECT_EQ(system.Available(), 8 * kGigabyte);
  system.Limit("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", 5 * kGigabyte);
  EXPECT_EQ(system.Available(), 5 * kGigabyte);
  system.Limit("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", 4 * kGigabyte);
  EXPECT_EQ(system.Available(), 4 * kGigabyte);
}

TEST(AvailableMemory, AContainerThatSeesItsOwnGroupAsTheRootFindsItsLimit) {
  // Told of its group from outside, and shown the group itself.
  const FirstVersion told("/docker/abc", "/docker/abc");
  told.Limit("sys/fs/cgroup/memory/memory.limit_in_bytes", 4 * kGigabyte);
  EXPECT_EQ(told.Available(), 4 * kGigabyte);
  told.Limit("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", 1000);
  EXPECT_EQ(told.Available(), 4 * kGigabyte);
  // Started in one group and moved to another.
  const FirstVersion moved("/../other", "/");
  moved.Limit("sys/fs/cgroup/memory/memory.limit_in_bytes", 4 * kGigabyte);
  EXPECT_EQ(moved.Available(), 4 * kGigabyte);
}

TEST(AvailableMemory, WhatAGroupHoldsThatCannotBeHadBackIsTakenOff) {
  const SecondVersion second;
  second.Limit("sys/fs/cgroup/system.slice/memory.max", 6 * kGigabyte);
  second.Write("sys/fs/cgroup/system.slice/memory.stat", "anon 2000000000\nfile 3000000000\n");
  EXPECT_EQ(second.Available(), 4 * kGigabyte) << "the page cache can be had";
  const FirstVersion first("/a");
  first.Limit("sys/fs/cgroup/memory/a/memory.limit_in_bytes", 6 * kGigabyte);
  first.Write("sys/fs/cgroup/memory/a/memory.stat", "cache 3000000000\nrss 1\ntotal_rss 7000000000\n");
  EXPECT_EQ(first.Available(), 0u);
}

TEST(AvailableMemory, FilesWithoutSenseAreNoLimit) {
  const SecondVersion system;
  system.Write("sys/fs/cgroup/memory.max", "");
  system.Write("sys/fs/cgroup/system.slice/memory.max", "a lot\n");
  system.Write("proc/self/cgroup", "\n:\n0:\n0::/system.slice/phsa.service\n\n");
  system.Write("proc/self/mountinfo", "- - -\n - \n30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  system.Limit("sys/fs/cgroup/system.slice/phsa.service/memory.max", 3 * kGigabyte);
  EXPECT_EQ(system.Available(), 3 * kGigabyte);
  system.Write("proc/meminfo", "MemAvailable: 99999999999999999999 kB\n");
  EXPECT_EQ(system.Available(), 3 * kGigabyte);
}

}  // namespace
}  // namespace phsa
