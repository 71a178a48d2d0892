// SPDX-License-Identifier: Apache-2.0
// The record of calls, under one lock.
#include "core/timeline.h"

#include <cstddef>

namespace callgate {

std::size_t Timeline::start() {
  Timeline& all = immortal<Timeline>();
  std::lock_guard lock(all.mutex_);
  ++all.open_;
  on_.store(true, std::memory_order_relaxed);  // as above
  return all.events_.size();
}

std::vector<TimelineEvent> Timeline::stop(std::size_t first) {
  Timeline& all = immortal<Timeline>();
  std::lock_guard lock(all.mutex_);
  std::vector<TimelineEvent> found(all.events_.begin() + static_cast<std::ptrdiff_t>(first),
                                   all.events_.end());
  if (--all.open_ == 0) {
    on_.store(false, std::memory_order_relaxed);  // as above
    all.events_ = {};
  }
  return found;
}

void Timeline::add(std::string_view kind, std::string_view name, std::int64_t start_ns,
                   std::int64_t wait_ns, std::int64_t duration_ns) {
  thread_local const std::int64_t thread = thread_number();
  Timeline& all = immortal<Timeline>();
  std::lock_guard lock(all.mutex_);
  if (!on()) return;
  all.events_.push_back(
      {std::string(kind), std::string(name), thread, start_ns, wait_ns, duration_ns});
}

}  // namespace callgate
