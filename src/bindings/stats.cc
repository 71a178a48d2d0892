// The trace's lock is taken only while a trace is on.
#include "bindings/stats.h"

#include <unistd.h>

#include <utility>

namespace callgate::bindings {

void Recorder::set(int bit, bool on) noexcept {
  // Relaxed: see timing().
  if (on) {
    mode_.fetch_or(bit, std::memory_order_relaxed);
  } else {
    mode_.fetch_and(~bit, std::memory_order_relaxed);
  }
}

void Recorder::start_trace() {
  std::lock_guard lock(mutex_);
  events_.clear();
  set(kTracing, /*on=*/true);
}

std::vector<TraceEvent> Recorder::stop_trace() {
  std::lock_guard lock(mutex_);
  set(kTracing, /*on=*/false);
  return std::exchange(events_, {});
}

void Recorder::record(const std::string& gate, Counters& counters, std::int64_t start_ns,
                      std::int64_t locked_ns, std::int64_t end_ns) {
  counters.gil_wait_ns.fetch_add(locked_ns - start_ns, std::memory_order_relaxed);
  counters.python_ns.fetch_add(end_ns - locked_ns, std::memory_order_relaxed);
  if ((mode_.load(std::memory_order_relaxed) & kTracing) == 0) return;
  thread_local const std::int64_t thread = gettid();
  std::lock_guard lock(mutex_);
  events_.push_back({gate, thread, start_ns, locked_ns - start_ns, end_ns - start_ns});
}

}  // namespace callgate::bindings
