// Runs fn(0) ... fn(n - 1) on XLA's thread pool and the calling thread.
//
// The caller takes part, so the loop ends even if no pool thread is ever free: with several host
// devices, handlers that only schedule and wait use up the pool and deadlock. A task that starts
// after the work is done finds nothing left to take.
#ifndef JAX_MOE_DET_FFI_CORE_PARALLEL_FOR_H_
#define JAX_MOE_DET_FFI_CORE_PARALLEL_FOR_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "core/float_mode.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

namespace internal {

template <class Fn>
struct ParallelLoop {
  ParallelLoop(int64_t size, Fn body) : n(size), fn(std::move(body)) {}

  void Run() {
    IeeeFloatMode ieee;
    int64_t mine = 0;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n; ++mine) fn(i);
    if (mine > 0 && done.fetch_add(mine, std::memory_order_acq_rel) + mine == n) {
      std::lock_guard<std::mutex> lock(mutex);
      finished.notify_all();
    }
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return done.load(std::memory_order_acquire) == n; });
  }

  const int64_t n;
  const Fn fn;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;
};

}  // namespace internal

// Below this much work a task costs more than it saves.
constexpr int64_t kMinBytesPerTask = 1 << 16;

// `bytes` is what the whole loop reads and writes. fn must not throw.
template <class Fn>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t n, int64_t bytes, Fn fn) {
  int64_t tasks = pool.num_threads();
  tasks = tasks < n ? tasks : n;
  tasks = tasks < bytes / kMinBytesPerTask ? tasks : bytes / kMinBytesPerTask;
  if (tasks <= 1) {
    IeeeFloatMode ieee;
    for (int64_t i = 0; i < n; ++i) fn(i);
    return;
  }
  // Shared: a late task may outlive this call.
  auto loop = std::make_shared<internal::ParallelLoop<Fn>>(n, std::move(fn));
  for (int64_t task = 1; task < tasks; ++task) pool.Schedule([loop] { loop->Run(); });
  loop->Run();
  loop->Wait();
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_CORE_PARALLEL_FOR_H_
