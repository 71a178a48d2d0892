// SPDX-License-Identifier: Apache-2.0
// The items of a feed, staged ahead: one thread puts them, and programs take them without Python.
//
// Both sides copy outside the lock. A queue that is empty, closed, handed over to another place, or
// from another process serves no call. The caller then falls back to Python, which distinguishes
// these cases.
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
  using Item = std::vector<std::byte>;  // the bytes of its arrays, one array after the other

  // `bytes`: the size of each array of an item; at least one array has bytes. At most `most` items
  // wait at once. When the queue is full, the putting thread rests until at most `refill` items are
  // left.
  ItemQueue(std::vector<std::size_t> bytes, std::size_t most, std::size_t refill);

  const std::vector<std::size_t>& bytes() const noexcept { return bytes_; }

  // Each element of `arrays` is the memory of one array. False if the queue accepts no more items.
  bool put(std::span<const void* const> arrays);

  // For the putting thread: other threads only make room.
  bool has_room() const noexcept { return size_.load(std::memory_order_relaxed) < most_; }

  // Rests as described above. False if the queue accepts no more items.
  bool wait_for_room();

  // Writes one item per lane of `results`, one after the other. Waits briefly for them. False, with
  // nothing taken, if there are too few.
  bool take(std::span<const ArrayView> results);

  // The next item, if there is one.
  std::optional<Item> pop();

  // Stops accepting items, and returns the waiting items in order.
  std::deque<Item> leave();

  // The number of times a program came before its item.
  std::uint64_t waited() const;
  std::size_t size() const;
  std::uint64_t taken() const;
  std::uint64_t put() const;

 private:
  static constexpr std::size_t kMostSpares = 4;
  // The time to make a cheap item, which is shorter than a sleep; and the longest wait.
  static constexpr std::chrono::microseconds kSpin{5}, kPatience{500};

  void wait_for(std::size_t count);
  using Clock = std::chrono::steady_clock;

  Item spare();
  void keep_spare(Item item);
  static constexpr std::size_t kSmall = 1 << 20;  // bytes of spare items, if items are small

  void note_taken(std::size_t count);

  void write(const Item& item, std::span<const ArrayView> results, std::size_t lane) const;

  const std::vector<std::size_t> bytes_;
  const std::size_t most_, refill_;
  std::size_t total_ = 0;
  const OfProcess process_;

  // The size of items_ while the queue accepts items, for reads without the lock: relaxed.
  std::atomic<std::size_t> size_ = 0;

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable changed_, came_;
  std::deque<Item> items_;
  std::vector<Item> spares_;
  std::uint64_t put_ = 0, taken_ = 0, waited_ = 0;
  int takers_ = 0;  // the number of waiting takers
  bool open_ = true, rests_ = false;
};

}  // namespace callgate
