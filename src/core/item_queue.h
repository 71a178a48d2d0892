// SPDX-License-Identifier: Apache-2.0
// The items of a feed, staged ahead: one thread puts them, programs take them without Python.
//
// Both copy outside of the lock. A queue that is empty, closed, over to somebody else or another
// process's serves nobody: who asks it goes the long way, where all of that is told apart.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "core/array_view.h"
#include "core/lifetime.h"

namespace callgate {

class ItemQueue {
 public:
  using Item = std::vector<std::byte>;  // the bytes of its arrays, one after the other

  // A queue of items of so many bytes an array, of which one has any. `most` items wait at once;
  // once they do, the thread that puts them rests until no more than `refill` are left.
  ItemQueue(std::vector<std::size_t> bytes, std::size_t most, std::size_t refill);

  const std::vector<std::size_t>& bytes() const noexcept { return bytes_; }

  // Each of `arrays` is the memory of one array. False when items are not to go here any more.
  bool put(std::span<const void* const> arrays);

  // For the thread that puts them: others only make room.
  bool has_room() const noexcept { return size_.load(std::memory_order_relaxed) < most_; }

  // Rests as said above. False when items are not to go here any more.
  bool wait_for_room();

  // Writes as many items as `results` have lanes, one after the other. Waits for them, but not for
  // long. False, with nothing taken, where there are not as many.
  bool take(std::span<const ArrayView> results);

  // The next item, if there is one.
  std::optional<Item> pop();

  // No items go here any more; those that wait are given back, in order.
  std::deque<Item> leave();

  // How often a program came before its item.
  std::uint64_t waited() const;
  std::size_t size() const;
  std::uint64_t taken() const;
  std::uint64_t put() const;

 private:
  static constexpr std::size_t kMostSpares = 4;
  // The making of a cheap item, which a sleep would outlast; and of one that is none.
  static constexpr std::chrono::microseconds kSpin{5}, kPatience{500};

  void wait_for(std::size_t count);
  using Clock = std::chrono::steady_clock;

  Item spare();
  void keep_spare(Item item);
  static constexpr std::size_t kSmall = 1 << 20;  // bytes of spares, if items are small

  void note_taken(std::size_t count);

  void write(const Item& item, std::span<const ArrayView> results, std::size_t lane) const;

  const std::vector<std::size_t> bytes_;
  const std::size_t most_, refill_;
  std::size_t total_ = 0;
  const OfProcess process_;

  // The size of items_, while items are to go here, for a look without the lock: relaxed.
  std::atomic<std::size_t> size_ = 0;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_, came_;
  std::deque<Item> items_;
  std::vector<Item> spares_;
  std::uint64_t put_ = 0, taken_ = 0, waited_ = 0;
  int takers_ = 0;  // that wait
  bool open_ = true, rests_ = false;
};

}  // namespace callgate
