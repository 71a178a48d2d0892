// SPDX-License-Identifier: Apache-2.0
// The timeline: a record of calls and of callgate's own work, while `cg.trace` requests one.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/lifetime.h"
#include "core/system.h"

namespace callgate {

struct TimelineEvent {
  std::string kind, name;
  std::int64_t thread = 0;                                  // the system's thread number
  std::int64_t start_ns = 0, wait_ns = 0, duration_ns = 0;  // by the steady clock; including wait
};

class Timeline {
 public:
  // Relaxed: a late reader misses a call.
  static bool on() noexcept { return on_.load(std::memory_order_relaxed); }

  // Begins a record and returns its position in the timeline. Records may overlap.
  static std::size_t start();
  // Ends a record that began at `first`, and returns its events.
  static std::vector<TimelineEvent> stop(std::size_t first);
  static void add(std::string_view kind, std::string_view name, std::int64_t start_ns,
                  std::int64_t wait_ns, std::int64_t duration_ns);

  static std::int64_t now_ns() noexcept {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

 private:
  static inline std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<TimelineEvent> events_;  // since the oldest open record began
  int open_ = 0;
};

// A block in the timeline. Borrows the texts.
class TimelineSpan : Immovable {
 public:
  TimelineSpan(std::string_view kind, std::string_view name) noexcept
      : kind_(kind), name_(name), start_ns_(Timeline::on() ? Timeline::now_ns() : kNone) {}
  ~TimelineSpan() {
    if (start_ns_ != kNone) [[unlikely]]
      Timeline::add(kind_, name_, start_ns_, 0, Timeline::now_ns() - start_ns_);
  }

 private:
  static constexpr std::int64_t kNone = -1;
  std::string_view kind_, name_;
  std::int64_t start_ns_;
};

}  // namespace callgate
