// SPDX-License-Identifier: Apache-2.0
// Python's main thread, which runs signal handlers between two steps of Python code.
//
// While the main thread is inside a program, no handler runs. If JAX runs the program on the
// calling thread, the main thread passes through the program's calls. The calls that read values
// which a handler may change (cg.stop, a knob's set) run the handlers first.
#pragma once

#include <atomic>
#include <chrono>

#include "core/system.h"

namespace callgate {

class MainThread {
 public:
  // Runs the handlers of pending signals; throws Error if one raised. Takes the GIL.
  using RunHandlers = void (*)();
  static void set_run_handlers(RunHandlers run) noexcept {
    run_.store(run, std::memory_order_release);  // readers may call the function
  }

  // Called at import, and in a fork's child. Relaxed: the thread's number needs no other memory.
  static void set(unsigned long thread) noexcept {
    thread_.store(thread, std::memory_order_relaxed);
  }
  static bool is_this() noexcept {
    return python_thread() == thread_.load(std::memory_order_relaxed);  // see set()
  }

  // Called at each read: runs the handlers on the main thread, a few hundred times a second.
  static void look() {
    if (is_this() && --looks_left_ <= 0) [[unlikely]]
      look_closer();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kPeriod{10};
  static constexpr std::chrono::microseconds kQuick{200};
  static constexpr int kMostLooks = 64;

  // Reads the clock every `looks_` reads; `looks_` is large while the reads follow each other
  // quickly.
  static void look_closer();

  static inline constinit std::atomic<unsigned long> thread_{0};
  static inline constinit std::atomic<RunHandlers> run_{nullptr};
  // Only the main thread uses these.
  static inline constinit int looks_ = 1, looks_left_ = 1;
  static inline constinit Clock::duration last_{}, next_{};  // since the clock's epoch
};

}  // namespace callgate
