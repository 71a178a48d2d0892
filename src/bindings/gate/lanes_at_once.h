// SPDX-License-Identifier: Apache-2.0
// The lanes of a call on several threads at once, for gates with parallel=True in free-threaded
// Python.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include "bindings/python/gil.h"
#include "core/parallel.h"
#include "core/threads.h"

namespace callgate::bindings {

// The calling thread and callgate's own ones.
class OwnThreads final : public Executor {
 public:
  int threads() const noexcept override {
    return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  }
  bool schedule(std::function<void()> task) noexcept override try {
    return WorkerPool::instance().submit(std::move(task));
  } catch (const std::exception&) {
    return false;  // the system has no thread left; the others do its part
  }
};

// The exception of the first of the lanes that raised.
class FirstRaised : Immovable {
 public:
  // True if a lane before this one has raised.
  bool is_before(std::int64_t lane) const noexcept {
    return lane_.load(std::memory_order_relaxed) < lane;  // a late reader runs a lane in vain
  }
  void take(std::int64_t lane, nb::python_error&& raised) {
    nb::ft_lock_guard lock(mutex_);
    if (is_before(lane)) return;
    lane_.store(lane, std::memory_order_relaxed);  // see is_before()
    raised_.emplace(std::move(raised));
  }
  // After all lanes.
  std::int64_t lane() const noexcept { return lane_.load(std::memory_order_relaxed); }
  std::optional<nb::python_error>& raised() noexcept { return raised_; }

 private:
  nb::ft_mutex mutex_;
  std::atomic<std::int64_t> lane_{std::numeric_limits<std::int64_t>::max()};
  std::optional<nb::python_error> raised_;
};

// Calls run(first, last) for parts of `count` lanes, each on a thread that may run Python code.
template <typename Run>
void run_at_once(std::int64_t count, Run&& run) {
  OwnThreads threads;
  without_gil([&] {
    parallel_for(&threads, 0, count, 1, [&](std::int64_t first, std::int64_t last) {
      GilScope gil;
      run(first, last);
    });
  });
}

}  // namespace callgate::bindings
