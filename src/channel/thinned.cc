// SPDX-License-Identifier: Apache-2.0
// The selection of records. The header describes the clocks.
#include "channel/thinned.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>

namespace callgate {

ClockTimes ClockTimes::now() noexcept {
  constexpr std::int64_t kClose = 100'000;  // ns; the thread may lose its core in between
  for (int tries = 1;; ++tries) {
    const std::int64_t before = steady_time_ns(), wall = wall_time_ns();
    if (tries == 3 || steady_time_ns() - before < kClose) return {wall, before};
  }
}

void Thinned::consume(std::span<const Record> records) {
  chosen_.clear();
  if (rate_ > 0) read_clocks();
  for (const Record& record : records)
    if (passes(record)) chosen_.push_back(record);
  if (chosen_.empty()) return;
  const std::uint64_t before = to_->lost();
  FirstError error;
  error.survives([&] { to_->consume(chosen_); });
  lose(to_->lost() - before);
  error.rethrow();
}

void Thinned::read_clocks() {
  constexpr std::int64_t kSet = 1'000'000;  // ns: a lead that differs by more is a new one
  const ClockTimes now = clocks_();
  const std::int64_t lead = now.wall_ns - now.steady_ns;
  if (std::abs(lead - lead_) > kSet) lead_ = lead;
  wall_now_ = now.wall_ns;
}

bool Thinned::passes(const Record& record) {
  Count& count = count_of(record);
  if (count.came++ % every_ != 0) return false;
  if (rate_ == 0) return true;
  const std::int64_t time = std::min(record.time_ns, wall_now_) - lead_;
  if (count.some && static_cast<double>(time - count.last_ns) * rate_ < 1e9) {
    count.last_ns = std::min(count.last_ns, time);  // for records before the wall clock was set
    return false;
  }
  count.some = true;
  count.last_ns = time;
  return true;
}

Thinned::Count& Thinned::count_of(const Record& record) {
  constexpr std::size_t kMostKnown = 4096;
  const std::pair key(record.source->id, record.device);
  if (auto found = known_.find(key); found != known_.end()) return *found->second;
  if (known_.size() >= kMostKnown) known_.clear();
  const Source& source = *record.source;
  Count& count = counts_[{source.name, source.role, record.device}];
  known_.emplace(key, &count);  // a map's elements have stable addresses
  return count;
}

}  // namespace callgate
