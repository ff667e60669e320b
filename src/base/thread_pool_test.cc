#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sched.h>

#include "base/cpu_topology.h"

namespace freshet {
namespace {

class ThreadPoolTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ThreadPoolTest, testing::Values(1, 2, 3, 7));

TEST_P(ThreadPoolTest, RunCallsEachWorkerOnceOnItsOwnThread) {
  ThreadPool pool(GetParam());
  ASSERT_EQ(pool.size(), GetParam());
  for (int round = 0; round < 200; ++round) {
    std::vector<int> calls(static_cast<size_t>(pool.size()));  // plain ints: a race is for TSan
    std::vector<std::thread::id> ids(calls.size());
    pool.run([&](int worker) {
      ++calls[static_cast<size_t>(worker)];
      ids[static_cast<size_t>(worker)] = std::this_thread::get_id();
    });
    for (const int c : calls) ASSERT_EQ(c, 1);
    ASSERT_EQ(std::set<std::thread::id>(ids.begin(), ids.end()).size(), ids.size());
    ASSERT_EQ(ids[0], std::this_thread::get_id());
  }
}

TEST_P(ThreadPoolTest, ParallelForVisitsEachIndexOnce) {
  ThreadPool pool(GetParam());
  for (const int64_t n : {0, 1, 2, 5, 1000}) {
    std::vector<int> visits(static_cast<size_t>(n));
    pool.parallel_for(n, [&](int64_t i, int worker) {
      ASSERT_LT(worker, pool.size());
      ++visits[static_cast<size_t>(i)];
    });
    EXPECT_EQ(std::accumulate(visits.begin(), visits.end(), int64_t{0}), n);
    for (const int v : visits) EXPECT_EQ(v, 1);
  }
}

TEST_P(ThreadPoolTest, BarrierSeparatesPhases) {
  ThreadPool pool(GetParam());
  const auto n = static_cast<size_t>(pool.size());
  std::vector<int> a(n), b(n);
  std::atomic<int> wrong{0};
  pool.run([&](int worker) {
    const auto w = static_cast<size_t>(worker);
    for (int round = 1; round <= 300; ++round) {
      a[w] = round;
      pool.barrier();
      for (const int v : a) wrong += v != round;
      b[w] = round;
      pool.barrier();
      for (const int v : b) wrong += v != round;
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadPool, WakesAfterSleeping) {
  ThreadPool pool(3);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    std::atomic<int> calls{0};
    pool.run([&](int) { ++calls; });
    EXPECT_EQ(calls, 3);
  }
}

TEST(ThreadPool, IdlePoolUsesNoProcessorTime) {
  ThreadPool pool(2);
  pool.run([](int) {});
  // The workers spin first, on a busy machine for longer than elsewhere.
  double least = 1.0;
  for (int i = 0; i < 100 && least >= 0.05; ++i) {
    const std::clock_t before = std::clock();  // CPU time of all threads
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    least = std::min(least, static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC);
  }
  EXPECT_LT(least, 0.05);
}

TEST(ThreadPool, CallersAffinityStaysAndWorkersArePinned) {
  cpu_set_t before, after;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  const CpuTopology cpus = usable_cpus();
  ThreadPool pool(0);
  EXPECT_EQ(pool.size(), cpus.recommended_threads);
  std::vector<int> allowed(static_cast<size_t>(pool.size()));
  pool.run([&](int worker) {
    cpu_set_t mine;
    if (sched_getaffinity(0, sizeof mine, &mine) == 0) {
      allowed[static_cast<size_t>(worker)] = CPU_COUNT(&mine);
    }
  });
  for (size_t w = 1; w < allowed.size(); ++w) EXPECT_EQ(allowed[w], 1);
  ASSERT_EQ(sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

TEST(CpuTopology, RespectsTheAffinityMask) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  const int first = usable_cpus().cpus.front();
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(first), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  const CpuTopology t = usable_cpus();
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(t.cpus, std::vector<int>{first});
  EXPECT_EQ(t.recommended_threads, 1);
}

TEST(CpuTopology, ReadsQuotas) {
  EXPECT_EQ(cpus_of_cgroup2("max 100000"), 0);
  EXPECT_EQ(cpus_of_cgroup2("150000 100000"), 2);
  EXPECT_EQ(cpus_of_cgroup2("400000 100000"), 4);
  EXPECT_EQ(cpus_of_cgroup2(""), 0);
  EXPECT_EQ(cpus_of_cgroup2("5 0"), 0);
  EXPECT_EQ(cpus_of_cgroup1("-1", "100000"), 0);
  EXPECT_EQ(cpus_of_cgroup1("50000", "100000"), 1);
}

}  // namespace
}  // namespace freshet
