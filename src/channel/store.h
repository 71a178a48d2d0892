// Where a channel's records wait: in a ring, and beside it, for payloads that are large, in blocks
// of memory; one capacity bounds both.
//
// Senders reserve places, write and publish them, on any thread. Records leave at `next`, in order:
// the channel's thread collects them into a batch; a sender that makes room drops the oldest. The
// places before `next` become free at `head` when their batch is settled, or at once where records
// are copied when they are collected (so that senders never find the oldest in delivery).
//
//          head              next                           tail
//   free    |  in delivery    |  waiting, or being written   |   free
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "channel/batch.h"
#include "channel/record.h"
#include "channel/ring.h"

namespace callgate {

class Store {
 public:
  // With `copies`, records are copied when they are collected.
  Store(std::size_t capacity, bool copies)
      : ring_(capacity), aside_(std::make_shared<SideMemory>(capacity)), copies_(copies) {}

  struct Place {
    Entry* entry = nullptr;
    bool no_memory = false;  // none for the payload: there never will be, for all we know
    bool decided() const noexcept { return entry != nullptr || no_memory; }
  };

  // A place for a record: its payload goes to `entry->record.payload`. Neither entry nor no_memory
  // where there is no room now. Any thread, as the next three.
  Place reserve(std::size_t payload) noexcept {
    if (payload > std::min(ring_.max_payload(), kLargestInline)) return reserve_aside(payload);
    std::size_t aside = aside_->claimed();
    if (aside != 0 && aside + ring_.used() + sizeof(Entry) + payload > ring_.capacity()) return {};
    Entry* entry = ring_.reserve(payload);
    if (entry == nullptr) return {};
    entry->record.payload = entry->inline_payload();
    return {entry};
  }
  void publish(Entry& entry) noexcept { ring_.publish(entry); }
  // A place that no record fills after all.
  void give_up(Entry& entry, std::size_t payload) noexcept {
    if (entry.kind == Entry::Kind::kAside) aside_->give_back(entry.record.data(), payload);
    entry.kind = Entry::Kind::kFiller;
    ring_.publish(entry);
  }

  // Frees the oldest place that is not in delivery; returns how many records that drops: 0 where it
  // holds none, or is still being written. Nothing where all are in delivery.
  std::optional<std::uint64_t> drop_oldest() noexcept {
    std::unique_lock lock(head_mutex_);
    Entry* oldest = ring_.at(next());
    if (oldest == nullptr) {
      if (all_collected()) return std::nullopt;
      lock.unlock();
      std::this_thread::yield();  // another sender is writing it
      return 0;
    }
    note_high_water(/*bytes_besides=*/0);
    const std::uint64_t after = Ring::after(*oldest);
    const bool dropped = drop(*oldest);
    next_.store(after, std::memory_order_relaxed);  // see next()
    ring_.release(after);
    return dropped ? 1 : 0;
  }

  // Drops all that waits; returns how many. Where nobody is left to deliver to.
  std::uint64_t drop_all() noexcept {
    std::lock_guard lock(head_mutex_);
    std::uint64_t next = this->next(), dropped = 0;
    while (Entry* entry = ring_.at(next)) {
      next = Ring::after(*entry);
      dropped += drop(*entry) ? 1 : 0;
    }
    next_.store(next, std::memory_order_relaxed);  // see next()
    ring_.release(next);
    return dropped;
  }

  // What collect() has taken up to `position`, and what it dropped for which there was no memory,
  // the first of it with so many bytes.
  struct Collected {
    std::uint64_t position = 0;
    bool some = false;
    std::uint64_t dropped = 0;
    std::size_t no_memory = 0;
  };

  // The channel's thread: takes what waits into the batch, up to a part of the capacity, and frees
  // its places when the batch is done with. `bytes_besides`: of records in no store, for
  // high_water().
  Collected collect(Batch& batch) noexcept {
    // A batch that is copied takes memory besides the ring's, so it is smaller.
    const std::size_t limit = ring_.capacity() / (copies_ ? 16 : 4);
    std::lock_guard lock(head_mutex_);
    if (copies_) note_high_water(/*bytes_besides=*/0);
    const std::uint64_t first = next();
    Collected collected{.position = first};
    while (batch.has_place()) {
      Entry* entry = ring_.at(collected.position);
      if (entry == nullptr) break;
      const std::uint64_t after = Ring::after(*entry);
      if (after - first > limit && !batch.records().empty()) break;
      if (entry->kind != Entry::Kind::kFiller && !batch.take(*entry, aside_, copies_)) {
        if (collected.dropped++ == 0) collected.no_memory = entry->record.source->payload_bytes;
        drop(*entry);
      }
      collected.position = after;
    }
    collected.some = collected.position != first;
    if (copies_) ring_.release(collected.position);
    next_.store(collected.position, std::memory_order_relaxed);  // see next()
    return collected;
  }
  void settle(Batch& batch, std::uint64_t position, std::size_t bytes_besides) noexcept {
    std::lock_guard lock(head_mutex_);
    note_high_water(bytes_besides);
    if (!copies_) ring_.release(position);
    batch.give_back(*aside_);
  }

  // The channel's thread: does a record wait? Has everything been collected that was reserved?
  bool has_waiting() noexcept { return ring_.at(next()) != nullptr; }
  bool all_collected() const noexcept { return next() == ring_.tail(); }

  // The position behind all that has been reserved.
  std::uint64_t tail() const noexcept { return ring_.tail(); }
  bool half_full() const noexcept { return ring_.used() >= ring_.capacity() / 2; }
  // The most bytes that were ever used; without a lock, as far as it has been noted.
  std::uint64_t high_water() const noexcept {
    std::lock_guard lock(head_mutex_);
    std::uint64_t waits = ring_.used();  // before the rest: while we hold the mutex, both only grow
    return std::max<std::uint64_t>(noted_high_water(), waits + aside_->in_use());
  }
  std::uint64_t noted_high_water() const noexcept {
    return high_water_.load(std::memory_order_relaxed);  // a gauge
  }

 private:
  // Above it a payload gets a block of its own, which can be lent to its consumer: copies of such a
  // size often go to fresh memory, which costs more than the copy.
  static constexpr std::size_t kLargestInline = std::size_t{1} << 20;

  Place reserve_aside(std::size_t payload) noexcept {
    SideMemory::Block block = aside_->take(payload, ring_);
    if (block.data == nullptr) return {nullptr, block.no_memory};
    Entry* entry = ring_.reserve(0);
    if (entry == nullptr) {
      aside_->give_back(block.data, payload);
      return {};
    }
    entry->kind = Entry::Kind::kAside;
    entry->record.payload = block.data;
    return {entry};
  }

  // Whether the entry held a record. The mutex is held.
  bool drop(Entry& entry) noexcept {
    if (entry.kind == Entry::Kind::kFiller) return false;
    const Record& record = entry.record;
    record.let_go();
    if (entry.kind == Entry::Kind::kAside)
      aside_->give_back(record.data(), record.source->payload_bytes);
    return true;
  }

  // While all that leaves does so by this thread's hand, or under the mutex, which is held.
  void note_high_water(std::size_t bytes_besides) noexcept {
    std::uint64_t now = ring_.used();  // before the rest, which only grows meanwhile
    now += aside_->in_use() + bytes_besides;
    if (now > noted_high_water()) high_water_.store(now, std::memory_order_relaxed);
  }

  std::uint64_t next() const noexcept {
    // Relaxed: others move it only where records are copied; a late value costs one more round.
    return next_.load(std::memory_order_relaxed);
  }

  Ring ring_;
  const std::shared_ptr<SideMemory> aside_;
  const bool copies_;

  // Held while entries are taken from `next` and while places are freed: by the channel's thread,
  // and by senders that drop the oldest. Never while user code runs.
  alignas(64) mutable std::mutex head_mutex_;  // not on a cache line that senders read
  std::atomic<std::uint64_t> next_{0};         // written under the mutex, which orders it
  std::atomic<std::uint64_t> high_water_{0};   // written under the mutex
};

}  // namespace callgate
