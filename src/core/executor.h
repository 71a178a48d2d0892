// What whoever runs a call lends to it: threads, and loops that are split over them.
#pragma once

#include <cstdint>
#include <functional>

namespace callgate {

class Executor {
 public:
  virtual ~Executor() = default;

  // Threads that tasks may run on, the calling one included.
  virtual int threads() const noexcept = 0;

  // Runs the task soon, on any thread; false when it can't. The task must not throw.
  virtual bool schedule(std::function<void()> task) noexcept = 0;

  // The global number of the device that the call runs on; -1 where it has none.
  virtual std::int64_t device() const noexcept { return -1; }
};

// Runs body(data, first, last) on parts of [begin, end), each of at least `grain` but the last, on
// the calling thread and as many others of `executor` (null for none) as are free. Returns when all
// parts are done. Never waits for a thread that has not started, so that loops inside loops, and
// on a pool whose threads are all busy, come to an end. `body` must not throw.
void parallel_for(Executor* executor, std::int64_t begin, std::int64_t end, std::int64_t grain,
                  void (*body)(void* data, std::int64_t first, std::int64_t last), void* data);

}  // namespace callgate
