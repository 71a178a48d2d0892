// SPDX-License-Identifier: Apache-2.0
// The items of a feed, staged ahead: one thread puts them, programs take them without Python.
//
// Both copy outside of the lock. A queue that is empty, closed, over to somebody else or another
// process's serves nobody: who asks it goes the long way, where all of that is told apart.
#pragma once

#include <algorithm>
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
#include <utility>
#include <vector>

#include "core/array_view.h"
#include "core/lifetime.h"

namespace callgate {

class ItemQueue {
 public:
  using Item = std::vector<std::byte>;  // the bytes of its arrays, one after the other

  // Of items of so many bytes an array, of which at least one has any. `most` items wait at once;
  // once they do, the thread that puts them rests until no more than `refill` are left.
  ItemQueue(std::vector<std::size_t> bytes, std::size_t most, std::size_t refill)
      : bytes_(std::move(bytes)), most_(most), refill_(refill) {
    for (std::size_t one : bytes_) total_ += one;
  }

  const std::vector<std::size_t>& bytes() const noexcept { return bytes_; }

  // Each of `arrays` is the memory of one array. False when items are not to go here any more.
  bool put(std::span<const void* const> arrays) {
    Item item = spare();
    std::byte* at = item.data();
    for (std::size_t i = 0; i < bytes_.size(); at += bytes_[i++])
      if (bytes_[i] != 0) std::memcpy(at, arrays[i], bytes_[i]);
    std::lock_guard lock(mutex_);
    if (!open_) return false;
    items_.push_back(std::move(item));
    ++put_;
    size_.store(items_.size(), std::memory_order_relaxed);
    if (takers_ != 0) came_.notify_all();
    return true;
  }

  // For the thread that puts them: others only make room.
  bool has_room() const noexcept { return size_.load(std::memory_order_relaxed) < most_; }

  // Rests as said above. False when items are not to go here any more.
  bool wait_for_room() {
    std::unique_lock lock(mutex_);
    if (open_ && items_.size() < most_) return true;
    rests_ = true;
    changed_.wait(lock, [&] { return !open_ || items_.size() <= refill_; });
    rests_ = false;
    return open_;
  }

  // Writes as many items as `results` have lanes, one after the other. Waits for them, but not for
  // long. False, with nothing taken, where there are not as many.
  bool take(std::span<const ArrayView> results) {
    if (!process_.here()) return false;
    std::size_t lanes = 0;
    for (std::size_t i = 0; i < bytes_.size(); ++i)
      if (bytes_[i] != 0) lanes = results[i].nbytes() / bytes_[i];
    if (lanes <= most_) wait_for(lanes);
    if (lanes == 1) {
      std::optional<Item> item = pop();
      if (!item) return false;
      write(*item, results, 0);
      keep_spare(std::move(*item));
      return true;
    }
    std::vector<Item> items(lanes);
    {
      std::lock_guard lock(mutex_);
      if (!open_ || items_.size() < lanes) return false;
      std::move(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(lanes), items.begin());
      items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(lanes));
      note_taken(lanes);
    }
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      write(items[lane], results, lane);
      keep_spare(std::move(items[lane]));
    }
    return true;
  }

  // The next item, if there is one.
  std::optional<Item> pop() {
    if (!process_.here()) return std::nullopt;
    std::lock_guard lock(mutex_);
    if (items_.empty()) return std::nullopt;
    Item item = std::move(items_.front());
    items_.pop_front();
    note_taken(1);
    return item;
  }

  // No items go here any more; those that wait are given back, in order.
  std::deque<Item> leave() {
    std::lock_guard lock(mutex_);
    open_ = false;
    size_.store(most_, std::memory_order_relaxed);  // there is no room any more
    changed_.notify_all();
    came_.notify_all();
    return std::exchange(items_, {});
  }

  // How often a program came before its item.
  std::uint64_t waited() const {
    std::lock_guard lock(mutex_);
    return waited_;
  }
  std::size_t size() const {
    std::lock_guard lock(mutex_);
    return items_.size();
  }
  std::uint64_t taken() const {
    std::lock_guard lock(mutex_);
    return taken_;
  }
  std::uint64_t put() const {
    std::lock_guard lock(mutex_);
    return put_;
  }

 private:
  static constexpr std::size_t kMostSpares = 4;
  // The making of a cheap item, which a sleep would outlast; and of one that is none.
  static constexpr std::chrono::microseconds kSpin{5}, kPatience{500};

  void wait_for(std::size_t count) {
    auto is_there = [&] { return size_.load(std::memory_order_relaxed) >= count; };
    if (is_there()) return;
    for (auto end = Clock::now() + kSpin; Clock::now() < end;)
      if (is_there()) return;
    std::unique_lock lock(mutex_);
    if (!open_ || items_.size() >= count) return;
    ++takers_;
    bool came = came_.wait_for(lock, kPatience, [&] { return !open_ || items_.size() >= count; });
    --takers_;
    if (came && open_) ++waited_;  // else who goes the long way counts
  }
  using Clock = std::chrono::steady_clock;

  Item spare() {
    {
      std::lock_guard lock(mutex_);
      if (!spares_.empty()) {
        Item item = std::move(spares_.back());
        spares_.pop_back();
        return item;
      }
    }
    return Item(total_);
  }
  void keep_spare(Item item) {
    std::lock_guard lock(mutex_);
    if (spares_.size() < std::max(kMostSpares, std::min(most_, kSmall / total_)))
      spares_.push_back(std::move(item));
  }
  static constexpr std::size_t kSmall = 1 << 20;  // bytes of spares, if items are small

  void note_taken(std::size_t count) {  // the lock is held
    taken_ += count;
    size_.store(items_.size(), std::memory_order_relaxed);
    if (rests_ && items_.size() <= refill_) changed_.notify_all();
  }

  void write(const Item& item, std::span<const ArrayView> results, std::size_t lane) const {
    const std::byte* at = item.data();
    for (std::size_t i = 0; i < bytes_.size(); at += bytes_[i++])
      if (bytes_[i] != 0)
        std::memcpy(static_cast<std::byte*>(results[i].data) + lane * bytes_[i], at, bytes_[i]);
  }

  const std::vector<std::size_t> bytes_;
  const std::size_t most_, refill_;
  std::size_t total_ = 0;
  const OfProcess process_;

  // Of items_, while they are to go here, for a look without the lock: relaxed.
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
