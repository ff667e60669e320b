// A fixed team of threads that runs one parallel region at a time.
//
// The calling thread is worker 0. Workers 1..size-1 are threads of the pool, pinned to the given
// processors (or to those the process may use). Between regions the workers spin for at most two
// milliseconds and then sleep in the kernel, so an idle pool uses no CPU. run() and parallel_for()
// must be called from one thread at a time and do not nest. The pool decides *where* work runs,
// never the order of a sum: a result must not depend on the number of workers.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace freshet {

// A non-owning reference to a callable; valid as long as the callable is.
template <class Signature>
class FunctionRef;
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
  FunctionRef(F&& f)
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* o, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(o))(std::forward<Args>(args)...);
        }) {}
  R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

class ThreadPool {
 public:
  // threads <= 0: one per physical core that this process may use.
  explicit ThreadPool(int threads = 0, bool pin = true);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  // Calls body(worker) once on each worker and returns when all have returned.
  void run(FunctionRef<void(int worker)> body);
  // Calls body(i, worker) for each i in [0, n); workers take indices dynamically.
  void parallel_for(int64_t n, FunctionRef<void(int64_t i, int worker)> body);
  // Inside run(): waits until every worker has arrived.
  void barrier();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace freshet
