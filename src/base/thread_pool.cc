#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <thread>
#include <vector>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/cpu_topology.h"
#include "base/status.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace freshet {
namespace {

using Clock = std::chrono::steady_clock;

// A wait spins for as long as the waiter's last region took, within these bounds. That is long
// enough to bridge the gaps between the regions of a step, and the time that a slower core takes to
// finish a long one (waking up takes a tenth of a millisecond on virtual machines). It is short
// enough to cost nothing when idle.
constexpr std::chrono::microseconds kLeastSpin{100};
constexpr std::chrono::microseconds kMostSpin{2000};

Clock::duration spin_after(Clock::time_point start) {
  return std::clamp<Clock::duration>(Clock::now() - start, kLeastSpin, kMostSpin);
}

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free);

void futex(Word& word, int op, uint32_t value) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op | FUTEX_PRIVATE_FLAG, value, nullptr,
            nullptr, 0);
}

// A word whose changes threads wait for. Waiters spin, then sleep; change() enters the kernel only
// if somebody sleeps.
class alignas(64) Signal {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }

  void change() {
    word_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(word_, FUTEX_WAKE, INT_MAX);
  }

  void wait_past(uint32_t old, bool spin, Clock::duration most = kLeastSpin) {
    if (spin) {
      const auto end = Clock::now() + most;
      do {
        for (int i = 0; i < 32; ++i) {
          if (value() != old) return;
          pause_cpu();
        }
      } while (Clock::now() < end);
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (word_.load(std::memory_order_seq_cst) == old) futex(word_, FUTEX_WAIT, old);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  Word word_{0};
  std::atomic<uint32_t> sleepers_{0};
};

void pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu), &set);
  ::sched_setaffinity(0, sizeof set, &set);  // failure costs speed only
}

}  // namespace

struct ThreadPool::Impl {
  int size = 1;
  bool spin = true;  // off if threads outnumber processors: the awaited thread may need ours
  std::vector<std::thread> threads;

  Signal start;  // a region begins, or the pool shuts down
  Signal done;   // the last worker of a region has returned
  Signal phase;  // all workers have arrived at the barrier
  alignas(64) std::atomic<int> running{0};
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int64_t> next{0};
  const FunctionRef<void(int)>* body = nullptr;  // published by `start`
  bool stop = false;                             // published by `start`

  void work(int worker, int cpu) {
    if (cpu >= 0) pin_to(cpu);
    Clock::duration most = kLeastSpin;
    for (uint32_t seen = 0;;) {
      start.wait_past(seen, spin, most);
      ++seen;
      if (stop) return;
      const Clock::time_point began = Clock::now();
      (*body)(worker);
      most = spin_after(began);
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) done.change();
    }
  }

  void run(FunctionRef<void(int)> f) {
    if (size == 1) {
      f(0);
      return;
    }
    FRESHET_CHECK(body == nullptr, "parallel regions do not nest");
    body = &f;
    const uint32_t before = done.value();
    running.store(size - 1, std::memory_order_relaxed);
    const Clock::time_point began = Clock::now();
    start.change();
    f(0);
    done.wait_past(before, spin, spin_after(began));
    body = nullptr;
  }
};

ThreadPool::ThreadPool(int threads, bool pin) : impl_(std::make_unique<Impl>()) {
  const CpuTopology cpus = usable_cpus();
  impl_->size = threads > 0 ? threads : cpus.recommended_threads;
  impl_->spin = impl_->size <= cpus.limit;
  // Processor 0 of the list is left to the caller, whose affinity we must not change.
  for (int worker = 1; worker < impl_->size; ++worker) {
    const bool fits = pin && static_cast<size_t>(impl_->size) <= cpus.cpus.size();
    const int cpu = fits ? cpus.cpus[static_cast<size_t>(worker)] : -1;
    impl_->threads.emplace_back([impl = impl_.get(), worker, cpu] { impl->work(worker, cpu); });
  }
}

ThreadPool::~ThreadPool() {
  impl_->stop = true;
  impl_->start.change();
  for (std::thread& t : impl_->threads) t.join();
}

int ThreadPool::size() const {
  return impl_->size;
}

void ThreadPool::run(FunctionRef<void(int worker)> body) {
  impl_->run(body);
}

void ThreadPool::parallel_for(int64_t n, FunctionRef<void(int64_t i, int worker)> body) {
  if (impl_->size == 1 || n <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i, 0);
    return;
  }
  impl_->next.store(0, std::memory_order_relaxed);
  impl_->run([&](int worker) {
    for (;;) {
      const int64_t i = impl_->next.fetch_add(1, std::memory_order_relaxed);
      if (i >= n) return;
      body(i, worker);
    }
  });
}

void ThreadPool::barrier() {
  if (impl_->size == 1) return;
  const uint32_t before = impl_->phase.value();
  if (impl_->arrived.fetch_add(1, std::memory_order_acq_rel) == impl_->size - 1) {
    impl_->arrived.store(0, std::memory_order_relaxed);
    impl_->phase.change();
    return;
  }
  impl_->phase.wait_past(before, impl_->spin);
}

}  // namespace freshet
