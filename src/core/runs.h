// SPDX-License-Identifier: Apache-2.0
// A value for each run of programs, kept until the run has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <unordered_map>
#include <utility>

namespace callgate {

// A state for each run that asks. The caller's lock.
//
// XLA tells nobody when a run ends. But the memory that a run writes a result to is its own while
// it lasts: another run that writes there says that the first one has ended. So a state is dropped
// when the memory of all of the run's `parts`, one a device, has been another run's. Runs whose
// memory nobody gets again, or of which nobody knows it, are kept: `most` of them, those that asked
// last.
template <typename State>
class Runs {
 public:
  explicit Runs(std::size_t parts = 1, std::size_t most = 1 << 16) : parts_(parts), most_(most) {}

  // The state of a run whose `part` writes to `place` (null where that says nothing); `begin()` is
  // the state of one that has not asked before.
  template <typename Begin>
  State& of(std::int64_t run, std::int64_t part, const void* place, Begin&& begin) {
    const Owner owner{run, part};
    if (!entries_.empty() && entries_.back().run == run && last_ == std::pair{place, owner})
      return entries_.back().state;  // asks again and again
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
    std::size_t ended;  // parts whose memory has been another's since
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
  std::pair<const void*, Owner> last_;  // who asked last
  std::list<Entry> entries_;            // those that asked last at the end
  std::unordered_map<std::int64_t, Place> known_;
  std::unordered_map<const void*, Owner> owners_;
};

}  // namespace callgate
