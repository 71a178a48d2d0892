// SPDX-License-Identifier: Apache-2.0
// A value for each run of programs, kept until the run has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <unordered_map>
#include <utility>

namespace callgate {

// A state for each run that asks for one. The caller holds the lock.
//
// XLA doesn't report the end of a run. But the memory to which a run writes a result belongs to it
// while it runs, so a write of another run to this memory shows that the first one has ended. A
// state is dropped when other runs have written to the memory of all of the run's `parts`, one per
// device. Runs whose memory is never reused, or is unknown, are kept: the `most` runs that asked
// last.
template <typename State>
class Runs {
 public:
  explicit Runs(std::size_t parts = 1, std::size_t most = 1 << 16) : parts_(parts), most_(most) {}

  // The state of a run whose `part` writes to `place` (null if unknown). `begin()` makes the state
  // of a new run.
  template <typename Begin>
  State& of(std::int64_t run, std::int64_t part, const void* place, Begin&& begin) {
    const Owner owner{run, part};
    if (!entries_.empty() && entries_.back().run == run && last_ == std::pair{place, owner})
      return entries_.back().state;  // repeated requests of the same run
    last_ = {place, owner};
    if (place != nullptr) move_in(place, owner);
    if (auto it = known_.find(run); it != known_.end()) {
      entries_.splice(entries_.end(), entries_, it->second);
      return it->second->state;
    }
    if (entries_.size() == most_) drop(entries_.begin());
    entries_.push_back({run, 0, begin()});
    known_.emplace(run, std::prev(entries_.end()));
    return entries_.back().state;
  }

  std::size_t size() const noexcept { return entries_.size(); }

 private:
  using Owner = std::pair<std::int64_t, std::int64_t>;  // run and part
  struct Entry {
    std::int64_t run;
    std::size_t ended;  // parts whose memory another run has used since
    State state;
  };
  using Place = std::list<Entry>::iterator;

  void move_in(const void* place, Owner owner) {
    if (owners_.size() >= 2 * most_)
      std::erase_if(owners_, [&](const auto& one) { return !known_.contains(one.second.first); });
    auto [it, is_new] = owners_.try_emplace(place, owner);
    if (is_new || it->second == owner) return;
    auto before = known_.find(std::exchange(it->second, owner).first);
    if (before != known_.end() && ++before->second->ended >= parts_) drop(before->second);
  }

  void drop(Place entry) {
    known_.erase(entry->run);
    entries_.erase(entry);
  }

  const std::size_t parts_, most_;
  std::pair<const void*, Owner> last_;  // the last request
  std::list<Entry> entries_;            // in the order of the last requests
  std::unordered_map<std::int64_t, Place> known_;
  std::unordered_map<const void*, Owner> owners_;
};

}  // namespace callgate
