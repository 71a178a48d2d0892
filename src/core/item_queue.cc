// SPDX-License-Identifier: Apache-2.0
// Passes items from a producer to programs.
#include "core/item_queue.h"

#include <algorithm>
#include <utility>

namespace callgate {

ItemQueue::ItemQueue(std::vector<std::size_t> bytes, std::size_t most, std::size_t refill)
    : bytes_(std::move(bytes)), most_(most), refill_(refill) {
  for (std::size_t one : bytes_) total_ += one;
}

bool ItemQueue::put(std::span<const void* const> arrays) {
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

bool ItemQueue::wait_for_room() {
  std::unique_lock lock(mutex_);
  if (open_ && items_.size() < most_) return true;
  rests_ = true;
  changed_.wait(lock, [&] { return !open_ || items_.size() <= refill_; });
  rests_ = false;
  return open_;
}

bool ItemQueue::take(std::span<const ArrayView> results) {
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

std::optional<ItemQueue::Item> ItemQueue::pop() {
  if (!process_.here()) return std::nullopt;
  std::lock_guard lock(mutex_);
  if (items_.empty()) return std::nullopt;
  Item item = std::move(items_.front());
  items_.pop_front();
  note_taken(1);
  return item;
}

std::deque<ItemQueue::Item> ItemQueue::leave() {
  std::lock_guard lock(mutex_);
  open_ = false;
  size_.store(most_, std::memory_order_relaxed);  // no room is left
  changed_.notify_all();
  came_.notify_all();
  return std::exchange(items_, {});
}

std::uint64_t ItemQueue::waited() const {
  std::lock_guard lock(mutex_);
  return waited_;
}

std::size_t ItemQueue::size() const {
  std::lock_guard lock(mutex_);
  return items_.size();
}

std::uint64_t ItemQueue::taken() const {
  std::lock_guard lock(mutex_);
  return taken_;
}

std::uint64_t ItemQueue::put() const {
  std::lock_guard lock(mutex_);
  return put_;
}

void ItemQueue::wait_for(std::size_t count) {
  auto is_there = [&] { return size_.load(std::memory_order_relaxed) >= count; };
  if (is_there()) return;
  for (auto end = Clock::now() + kSpin; Clock::now() < end;)
    if (is_there()) return;
  std::unique_lock lock(mutex_);
  if (!open_ || items_.size() >= count) return;
  ++takers_;
  bool came = came_.wait_for(lock, kPatience, [&] { return !open_ || items_.size() >= count; });
  --takers_;
  if (came && open_) ++waited_;  // a call that falls back to Python is counted there
}

ItemQueue::Item ItemQueue::spare() {
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

void ItemQueue::keep_spare(Item item) {
  std::lock_guard lock(mutex_);
  if (spares_.size() < std::max(kMostSpares, std::min(most_, kSmall / total_)))
    spares_.push_back(std::move(item));
}

void ItemQueue::note_taken(std::size_t count) {  // requires the lock
  taken_ += count;
  size_.store(items_.size(), std::memory_order_relaxed);
  if (rests_ && items_.size() <= refill_) changed_.notify_all();
}

void ItemQueue::write(const Item& item, std::span<const ArrayView> results,
                      std::size_t lane) const {
  const std::byte* at = item.data();
  for (std::size_t i = 0; i < bytes_.size(); at += bytes_[i++])
    if (bytes_[i] != 0)
      std::memcpy(static_cast<std::byte*>(results[i].data) + lane * bytes_[i], at, bytes_[i]);
}

}  // namespace callgate
