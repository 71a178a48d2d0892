// The end of the process: calls that are under way, and the gate that closes behind them.
//
// Every call enters before it touches user code and leaves after. `close` refuses further calls and
// waits, for a bounded time, for those inside. After it, handlers return an error without touching
// Python. Lock-free on the call's side.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "core/lifetime.h"

namespace callgate {

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
  bool close(std::chrono::nanoseconds wait) {
    // Both ways: later calls see the bit, and this thread sees what earlier calls did.
    state_.fetch_or(kClosed, std::memory_order_acq_rel);
    auto deadline = std::chrono::steady_clock::now() + wait;
    while (active() != 0) {
      if (std::chrono::steady_clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  bool closed() const noexcept {
    return (state_.load(std::memory_order_acquire) & kClosed) != 0;  // pairs with close()
  }

  // Calls inside now.
  std::int64_t active() const noexcept {
    return state_.load(std::memory_order_acquire) & ~kClosed;  // pairs with leave()
  }

 private:
  // Bit 62 marks closed, the bits below count the calls inside: one atomic, so that no call can
  // slip in between the check and the count.
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

  void add(const std::string& callee) noexcept {
    try {
      std::lock_guard lock(mutex_);
      ++counts_[callee];
    } catch (...) {  // NOLINT(bugprone-empty-catch): no memory to count with
    }
  }
  std::map<std::string, std::uint64_t> all() const {  // by the callee's name
    std::lock_guard lock(mutex_);
    return counts_;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::uint64_t> counts_;
};

// What a thread of callgate's does last; end_thread() calls it once.
//
// Layers above may leave something on a thread that they run on: the bindings, a Python thread
// state. To take it away they may have to wait for others, which a thread's own destructors must
// not: who joins the thread may hold what they wait for.
inline thread_local void (*at_thread_end)() noexcept = nullptr;

// Called by threads of ours that end before the process does, with nothing locked.
inline void end_thread() noexcept {
  if (at_thread_end == nullptr) return;
  ActiveCall active;  // while the process ends it stays as it is
  if (active.entered()) std::exchange(at_thread_end, nullptr)();
}

}  // namespace callgate
