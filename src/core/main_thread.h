// SPDX-License-Identifier: Apache-2.0
// Python's main thread, the one that runs signals' handlers: between two steps of Python code.
//
// While it is inside a program, no handler runs. Where JAX runs the program on the thread that
// calls it, the main thread comes by at calls of the program; those that read what a handler may
// have changed (cg.stop, a knob's set) have the handlers run first.
#pragma once

#include <atomic>
#include <chrono>

#include "core/system.h"

namespace callgate {

class MainThread {
 public:
  // Runs the handlers of signals that came; throws Error where one raised. Takes the GIL.
  using RunHandlers = void (*)();
  static void set_run_handlers(RunHandlers run) noexcept {
    run_.store(run, std::memory_order_release);  // whoever reads it may call it
  }

  // At import, and in a fork's child. Relaxed: the thread's number says all by itself.
  static void set(unsigned long thread) noexcept {
    thread_.store(thread, std::memory_order_relaxed);
  }
  static bool is_this() noexcept {
    return python_thread() == thread_.load(std::memory_order_relaxed);  // see set()
  }

  // To be called at each look: runs the handlers on the main thread, some hundred times a second.
  static void look() {
    if (is_this() && --looks_left_ <= 0) [[unlikely]]
      look_closer();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kPeriod{10};
  static constexpr std::chrono::microseconds kQuick{200};
  static constexpr int kMostLooks = 64;

  // Reads the clock at each of `looks_` looks, which are many while they follow each other quickly.
  static void look_closer();

  static inline constinit std::atomic<unsigned long> thread_{0};
  static inline constinit std::atomic<RunHandlers> run_{nullptr};
  // The main thread's alone.
  static inline constinit int looks_ = 1, looks_left_ = 1;
  static inline constinit Clock::duration last_{}, next_{};  // since the clock's beginning
};

}  // namespace callgate
