// Counters of each gate, and the trace of calls. Counts are always kept (three relaxed additions a
// call); clocks are read only while timing or a trace is on, and the trace's lock is taken only
// while that is on.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/lifetime.h"

namespace callgate::bindings {

struct Counters {
  // Relaxed throughout: each is a sum that nobody orders anything by.
  std::atomic<std::int64_t> calls{0}, errors{0}, bytes{0}, python_ns{0}, gil_wait_ns{0};
};

struct TraceEvent {
  std::string gate;
  std::int64_t thread;    // the system's thread id
  std::int64_t start_ns;  // since the clock's epoch
  std::int64_t gil_wait_ns;
  std::int64_t duration_ns;  // GIL wait included
};

class Recorder {
 public:
  static Recorder& instance() { return immortal<Recorder>(); }

  bool timing() const noexcept {
    return mode_.load(std::memory_order_relaxed) != 0;  // a late reader misses a call or two
  }
  void set_timing(bool on) noexcept { set(kTiming, on); }
  void start_trace() {
    std::lock_guard lock(mutex_);
    events_.clear();
    set(kTracing, /*on=*/true);
  }
  std::vector<TraceEvent> stop_trace() {
    std::lock_guard lock(mutex_);
    set(kTracing, /*on=*/false);
    return std::exchange(events_, {});
  }

  void record(const std::string& gate, Counters& counters, std::int64_t start_ns,
              std::int64_t locked_ns, std::int64_t end_ns) {
    counters.gil_wait_ns.fetch_add(locked_ns - start_ns, std::memory_order_relaxed);
    counters.python_ns.fetch_add(end_ns - locked_ns, std::memory_order_relaxed);
    if ((mode_.load(std::memory_order_relaxed) & kTracing) == 0) return;
    thread_local const std::int64_t thread = gettid();
    std::lock_guard lock(mutex_);
    events_.push_back({gate, thread, start_ns, locked_ns - start_ns, end_ns - start_ns});
  }

  static std::int64_t now_ns() noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

 private:
  static constexpr int kTiming = 1, kTracing = 2;
  void set(int bit, bool on) noexcept {
    // Relaxed: see timing().
    on ? mode_.fetch_or(bit, std::memory_order_relaxed)
       : mode_.fetch_and(~bit, std::memory_order_relaxed);
  }

  std::atomic<int> mode_{0};
  std::mutex mutex_;
  std::vector<TraceEvent> events_;
};

}  // namespace callgate::bindings
