// SPDX-License-Identifier: Apache-2.0
// The end of the process, and of programs at Ctrl-C. Lock-free on a call's side.
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

// Every call enters before it touches user code and leaves after. close() refuses further calls and
// waits, for a bounded time, for those inside; handlers then fail without touching Python.
class Lifecycle {
 public:
  // Constant-initialised, so that calls pay for no guard.
  static Lifecycle& instance() {
    static constinit Lifecycle lifecycle;
    return lifecycle;
  }

  // False once closed; the caller must then not call user code, nor leave().
  bool enter() noexcept {
    // Acquire: what close() did before it set the bit is seen by whoever is refused.
    if ((state_.fetch_add(1, std::memory_order_acquire) & kClosed) == 0) return true;
    leave();
    return false;
  }
  void leave() noexcept {
    // Release: the call's effects are seen by close() when it reads the count.
    state_.fetch_sub(1, std::memory_order_release);
  }

  // Refuses new calls, then waits until those inside have left. False when the time ran out.
  bool close(std::chrono::nanoseconds wait);
  bool closed() const noexcept {
    return (state_.load(std::memory_order_acquire) & kClosed) != 0;  // pairs with close()
  }
  std::int64_t active() const noexcept {                       // calls inside now
    return state_.load(std::memory_order_acquire) & ~kClosed;  // pairs with leave()
  }

 private:
  // Bit 62 marks closed, the others count calls: one atomic, so that none slips in between.
  static constexpr std::int64_t kClosed = std::int64_t{1} << 62;
  std::atomic<std::int64_t> state_{0};
};

// Enters on construction, leaves on destruction.
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

// Calls that came after the close and whose callees have no result to fail with, such as taps'.
class LateCalls {
 public:
  static LateCalls& instance() { return immortal<LateCalls>(); }

  void add(const std::string& callee) noexcept;
  std::map<std::string, std::uint64_t> all() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::uint64_t> counts_;
};

// Called once, last on a thread of callgate's: the bindings leave a Python thread state on it. To
// take that away they may have to wait for others, which a thread's own destructors must not: who
// joins the thread may hold what they wait for.
inline thread_local void (*at_thread_end)() noexcept = nullptr;

// Called by threads of ours that end before the process does, with nothing locked.
inline void end_thread() noexcept {
  if (at_thread_end == nullptr) return;
  ActiveCall active;  // while the process ends it stays as it is
  if (active.entered()) std::exchange(at_thread_end, nullptr)();
}

// The interrupts before a run's first call.
struct InterruptedRun {
  std::atomic<std::int64_t> run{-1};
  std::atomic<std::uint32_t> epoch{0};
};

// Ctrl-C, as compiled programs see it.
//
// While a program runs, the main thread is inside XLA, where Python's handler of SIGINT only leaves
// a note: nothing that Python would raise can end the program. So a handler of ours stands before
// Python's and counts. Runs that have called callgate before the last interrupt are refused at
// their next call, where it is to end programs; those that begin later, such as a last
// checkpoint's, are not. All state is constant-initialised: the handler may run at any time.
class Interrupts {
 public:
  // Asked once an interrupt, on any thread that makes a call: does it end programs? Not where the
  // user's own handler takes it for a request to stop soon.
  using Judge = bool (*)();
  static void set_judge(Judge judge) noexcept {
    judge_.store(judge, std::memory_order_release);  // whoever reads it may call it
  }

  // Puts the handler before the one that is there, unless the signal is ignored or ends the
  // process. The first one found is the only one that ours ever calls: whoever comes between later
  // may call ours, and the two would call each other for ever. So ours is put back only when that
  // first one stands alone again. Any thread.
  static void watch() noexcept;

  // True if the call of this run (XLA's number of it, -1 for none) is to end its program. `place`:
  // where the call writes a result, for Runs.
  static bool ends(std::int64_t run, const void* place = nullptr) noexcept {
    InterruptedRun& slot = slots_[static_cast<std::uint64_t>(run) % slots_.size()];
    // Acquire: the epoch is that of this run. Relaxed: a late look costs one more call.
    if (slot.run.load(std::memory_order_acquire) == run &&
        slot.epoch.load(std::memory_order_relaxed) == epoch_.load(std::memory_order_relaxed))
        [[likely]]
      return false;
    return run != -1 && decide(slot, run, place);
  }

  // How many came so far; and, for what runs outside of programs, whether one since then is to end
  // it.
  static std::uint32_t count() noexcept {
    return epoch_.load(std::memory_order_relaxed);  // a late look costs one more call
  }
  static bool end_since(std::uint32_t before) noexcept;

  // True if one came within the last second.
  static bool recent() noexcept;

  // At the process's end, after an interrupt: every call is to end its program; off again, those
  // of runs that have begun.
  static void end_all(bool on) noexcept;

 private:
  static bool same(const struct sigaction& a, const struct sigaction& b) noexcept;

  static void on_signal(int number, siginfo_t* info, void* context);

  static bool decide(InterruptedRun& slot, std::int64_t run, const void* place) noexcept;

  // The interrupts before the run's first call; those by now for one that has made none, or `anew`.
  static std::uint32_t begun_at(std::int64_t run, const void* place, std::uint32_t now,
                                bool anew = false) noexcept;

  struct BegunRuns : Runs<std::uint32_t> {
    BegunRuns() : Runs(1, 1 << 14) {}
  };

  static bool judged(std::uint32_t epoch) noexcept;

  // For some runs, to be found without a lock.
  static inline constinit std::array<InterruptedRun, 256> slots_{};
  static inline constinit std::atomic<std::uint32_t> epoch_{0};  // interrupts so far
  static inline constinit std::atomic<Judge> judge_{nullptr};
  static inline constinit std::atomic<std::int64_t> came_ns_{0};  // by the steady clock; 0: never
  static inline constinit std::atomic<bool> all_{false};
  // The last epoch that was judged, times two, and whether it ends programs.
  static inline constinit std::atomic<std::uint64_t> verdict_{0};
  static inline struct sigaction before_;  // written once, before the handler is there
};

// The failure of a call that Ctrl-C ends.
Error interrupted(const std::string& callee);

}  // namespace callgate
