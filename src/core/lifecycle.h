// SPDX-License-Identifier: Apache-2.0
// The end of the process, and of programs at Ctrl-C. Lock-free for calls.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/lifetime.h"
#include "core/runs.h"

namespace callgate {

// Every call enters before it runs user code, and leaves afterwards. close() refuses further calls
// and waits for the active ones, for a bounded time. Later handlers fail without calling Python.
class Lifecycle {
 public:
  // Constant-initialized, so calls need no guard.
  static Lifecycle& instance() {
    static constinit Lifecycle lifecycle;
    return lifecycle;
  }

  // False after close(); the caller must then call neither user code nor leave().
  bool enter() noexcept {
    // Acquire: a refused call sees the writes before close() set the bit.
    if ((state_.fetch_add(1, std::memory_order_acquire) & kClosed) == 0) return true;
    leave();
    return false;
  }
  void leave() noexcept {
    // Release: close() sees the call's effects when it reads the count.
    state_.fetch_sub(1, std::memory_order_release);
  }

  // Refuses new calls, then waits until the active calls have left. False if the time ran out.
  bool close(std::chrono::nanoseconds wait);
  bool closed() const noexcept {
    return (state_.load(std::memory_order_acquire) & kClosed) != 0;  // pairs with close()
  }
  std::int64_t active() const noexcept {                       // the number of active calls
    return state_.load(std::memory_order_acquire) & ~kClosed;  // pairs with leave()
  }

 private:
  // Bit 62 marks the close, the other bits count calls. One atomic, so no call slips in between.
  static constexpr std::int64_t kClosed = std::int64_t{1} << 62;
  std::atomic<std::int64_t> state_{0};
};

// Enters on construction and leaves on destruction.
class ActiveCall : Immovable {
 public:
  ActiveCall() noexcept : entered_(Lifecycle::instance().enter()) {}
  ~ActiveCall() {
    if (entered_) Lifecycle::instance().leave();
  }

  bool entered() const noexcept { return entered_; }

 private:
  bool entered_;
};

// Calls after the close whose callees can't report an error through a result, such as taps.
class LateCalls {
 public:
  static LateCalls& instance() { return immortal<LateCalls>(); }

  void add(const std::string& callee) noexcept;
  std::map<std::string, std::uint64_t> all() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::uint64_t> counts_;
};

// Called once, at the very end of a thread of callgate's, to remove the Python thread state that
// the bindings leave on it. This may wait for other threads, which a thread's own destructors must
// not do: a thread that joins this one may hold a lock for which they wait.
inline thread_local void (*at_thread_end)() noexcept = nullptr;

// Called by callgate's threads that end before the process, without locks.
inline void end_thread() noexcept {
  if (at_thread_end == nullptr) return;
  ActiveCall active;  // keeps the state while the process ends
  if (active.entered()) std::exchange(at_thread_end, nullptr)();
}

// The number of interrupts before a run's first call.
struct InterruptedRun {
  std::atomic<std::int64_t> run{-1};
  std::atomic<std::uint32_t> epoch{0};
};

// Ctrl-C for compiled programs.
//
// While a program runs, the main thread is inside XLA. Python's SIGINT handler then only sets a
// flag, so no Python exception can end the program. callgate therefore installs a handler in front
// of Python's, which counts. Runs that have called callgate before the last interrupt are refused
// at their next call, if the interrupt is to end programs. Runs that begin later, such as for a
// last checkpoint, are not refused. All state is constant-initialized, because the handler may run
// at any time.
class Interrupts {
 public:
  // Called once per interrupt, on any thread that makes a call: true if the interrupt ends
  // programs. It returns false if the user's own handler treats the interrupt as a request to stop
  // soon.
  using Judge = bool (*)();
  static void set_judge(Judge judge) noexcept {
    judge_.store(judge, std::memory_order_release);  // readers may call the function
  }

  // Installs the handler in front of the current one, unless the signal is ignored or ends the
  // process. callgate's handler only ever calls the first handler that it found: a handler that is
  // installed later may call callgate's, and calling it back would never end. So callgate's handler
  // is installed again only when the first one is the current one. Thread-safe.
  static void watch() noexcept;

  // True if the call of this run (XLA's number of it, -1 for none) must end its program. `place` is
  // where the call writes a result, for Runs.
  static bool ends(std::int64_t run, const void* place = nullptr) noexcept {
    InterruptedRun& slot = slots_[static_cast<std::uint64_t>(run) % slots_.size()];
    // Acquire: the epoch belongs to this run. Relaxed: a late read costs one more call.
    if (slot.run.load(std::memory_order_acquire) == run &&
        slot.epoch.load(std::memory_order_relaxed) == epoch_.load(std::memory_order_relaxed))
        [[likely]]
      return false;
    return run != -1 && decide(slot, run, place);
  }

  // The number of interrupts so far; and, for code outside programs, whether an interrupt since
  // then must end it.
  static std::uint32_t count() noexcept {
    return epoch_.load(std::memory_order_relaxed);  // a late read costs one more call
  }
  static bool end_since(std::uint32_t before) noexcept;

  // True if there was an interrupt within the last second.
  static bool recent() noexcept;

  // At the end of the process, after an interrupt: with `on`, every call ends its program; without,
  // only the calls of runs that have begun.
  static void end_all(bool on) noexcept;

 private:
  static bool same(const struct sigaction& a, const struct sigaction& b) noexcept;

  static void on_signal(int number, siginfo_t* info, void* context);

  static bool decide(InterruptedRun& slot, std::int64_t run, const void* place) noexcept;

  // The interrupts before the run's first call; the current number for a run without a call, or
  // with `anew`.
  static std::uint32_t begun_at(std::int64_t run, const void* place, std::uint32_t now,
                                bool anew = false) noexcept;

  struct BegunRuns : Runs<std::uint32_t> {
    BegunRuns() : Runs(1, 1 << 14) {}
  };

  static bool judged(std::uint32_t epoch) noexcept;

  // Some runs, for look-ups without a lock.
  static inline constinit std::array<InterruptedRun, 256> slots_{};
  static inline constinit std::atomic<std::uint32_t> epoch_{0};  // interrupts so far
  static inline constinit std::atomic<Judge> judge_{nullptr};
  static inline constinit std::atomic<std::int64_t> came_ns_{0};  // steady clock; 0: never
  static inline constinit std::atomic<bool> all_{false};
  // Twice the last judged epoch, plus 1 if it ends programs.
  static inline constinit std::atomic<std::uint64_t> verdict_{0};
  static inline struct sigaction before_;  // written once, before the handler is installed
};

// The failure of a call that Ctrl-C ends.
Error interrupted(const std::string& callee);

}  // namespace callgate
