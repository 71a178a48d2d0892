// SPDX-License-Identifier: Apache-2.0
// Loops over several threads within a call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>

namespace callgate {

// Provides threads for a call, and loops split over them.
class Executor {
 public:
  virtual ~Executor() = default;
  // The number of threads for tasks, including the calling one.
  virtual int threads() const noexcept = 0;
  // Runs the task soon, on any thread; false if it can't. The task must not throw.
  virtual bool schedule(std::function<void()> task) noexcept = 0;
  // The global number of the call's device; -1 if it has none.
  virtual std::int64_t device() const noexcept { return -1; }
};

// Runs body(first, last) on parts of [begin, end), each but the last with at least `grain`
// elements, on the calling thread and on free threads of `executor` (null for none). Returns when
// all parts are done. Never waits for a thread that hasn't started, so nested loops, also on a busy
// pool, come to an end. `body` must not throw.
template <typename Body>
void parallel_for(Executor* executor, std::int64_t begin, std::int64_t end, std::int64_t grain,
                  Body&& body) {
  // Shared, because a helper that starts late finds nothing left to do.
  struct Loop {
    std::int64_t end, part;
    std::remove_reference_t<Body>& body;   // only used while a part is held
    std::atomic<std::int64_t> next, left;  // `left`: the number of unfinished elements

    void work() {
      for (;;) {
        // The order of parts doesn't matter; `left` publishes their writes.
        std::int64_t first = next.fetch_add(part, std::memory_order_relaxed);
        if (first >= end) return;
        std::int64_t last = std::min(end, first + part);
        body(first, last);
        if (left.fetch_sub(last - first, std::memory_order_acq_rel) == last - first)
          left.notify_all();
      }
    }
  };
  // Enough parts to balance threads of different speed, and few enough to keep the overhead low.
  constexpr std::int64_t kPartsAThread = 4;
  std::int64_t count = end - begin;
  if (count <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  std::int64_t threads = executor == nullptr ? 1 : std::max(executor->threads(), 1);
  std::int64_t helpers = std::min(threads, (count - 1) / grain + 1) - 1;
  if (helpers <= 0) return body(begin, end);
  std::int64_t parts = (helpers + 1) * kPartsAThread;
  // schedule() publishes both counters.
  auto loop =
      std::make_shared<Loop>(end, std::max(grain, (count + parts - 1) / parts), body, begin, count);
  for (std::int64_t i = 0; i < helpers; ++i)
    if (!executor->schedule([loop] { loop->work(); })) break;
  loop->work();
  for (std::int64_t left; (left = loop->left.load(std::memory_order_acquire)) != 0;)
    loop->left.wait(left, std::memory_order_acquire);
}

}  // namespace callgate
