// SPDX-License-Identifier: Apache-2.0
// The record of calls, under one lock.
#include "core/timeline.h"

#include <utility>

namespace callgate {

void Timeline::start() {
  Timeline& all = immortal<Timeline>();
  std::lock_guard lock(all.mutex_);
  all.events_.clear();
  on_.store(true, std::memory_order_relaxed);  // as above
}

std::vector<TimelineEvent> Timeline::stop() {
  Timeline& all = immortal<Timeline>();
  std::lock_guard lock(all.mutex_);
  on_.store(false, std::memory_order_relaxed);  // as above
  return std::exchange(all.events_, {});
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
