// SPDX-License-Identifier: Apache-2.0
// The place of a channel's waiting records: a ring, and blocks of memory for large payloads; one
// capacity bounds both.
//
// Senders reserve places, write and publish them, on any thread. Records leave at `next`, in order:
// the channel's thread collects them into a batch, and a sender that needs room drops the oldest.
// The places before `next` become free at `head` when their batch is settled. If records are copied
// when they are collected, their places are freed at once, so senders never find the oldest record
// in delivery.
//
//          head              next                           tail
//   free    |  in delivery    |  waiting, or being written   |   free
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>

#include "channel/batch.h"
#include "channel/record.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate {

// A bounded, lock-free ring of entries of any size, for many producers and one consumer.
//
// Memory is an array of 64-byte granules. Positions count bytes and only grow. An entry starts at a
// granule and never wraps; a filler takes the rest of the ring instead. A producer moves `tail`
// past its entry (compare-and-swap), writes it, and publishes it by storing the entry's lap in its
// granule's mark. The consumer reads entries at `head` in order as long as their marks show the
// current lap, and frees them by moving `head`. Marks are separate from the payload, so no payload
// can look like a mark.
//
//   memory   | entry 64 | payload ... | entry 64 | ...        | filler        |
//   marks    | lap+1    | -  -        | lap+1    |            | lap+1         |
class Ring : Immovable {
 public:
  // Rounds `capacity`, in bytes, down to a power of two. Throws Error if the memory isn't
  // available.
  explicit Ring(std::size_t capacity)
      : capacity_(std::bit_floor(std::max<std::size_t>(capacity, 1024))),
        shift_(std::countr_zero(capacity_)),
        memory_(nullptr, Unmap{capacity_}) {
    try {
      // Pages are allocated at their first use, so a ring that is never full costs less than its
      // capacity.
      void* memory = mmap(nullptr, capacity_, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
      memory_.reset(static_cast<char*>(memory));
#ifdef MADV_HUGEPAGE
      madvise(memory, capacity_, MADV_HUGEPAGE);  // fewer page faults in the first lap; may fail
#endif
      marks_ = std::make_unique<std::atomic<std::uint32_t>[]>(capacity_ / kRecordAlignment);
    } catch (const std::bad_alloc&) {
      throw Error(ErrorCode::kInternal, "a channel's memory", std::to_string(capacity_) + " bytes",
                  "none from the system");
    }
  }

  // Room for an entry and at most max_payload() bytes, or null if the ring is full. Thread-safe.
  Entry* reserve(std::size_t payload) noexcept {
    const std::size_t bytes = sizeof(Entry) + align_record(payload);
    std::uint64_t position = tail_.load(std::memory_order_relaxed);  // confirmed by the exchange
    std::uint64_t filler = 0;
    for (;;) {
      const std::uint64_t left = capacity_ - (position & (capacity_ - 1));
      filler = bytes > left ? left : 0;
      if (position + filler + bytes - head() > capacity_) {
        const std::uint64_t now = tail_.load(std::memory_order_relaxed);  // the tail may be old
        if (now == position) return nullptr;
        position = now;
        continue;
      }
      // Relaxed on failure, which retries. Moving the tail publishes nothing; the marks do.
      // Sequentially consistent on success, because tail() is compared with the consumer's sleep.
      if (tail_.compare_exchange_weak(position, position + filler + bytes,
                                      std::memory_order_seq_cst, std::memory_order_relaxed))
        break;
    }
    if (filler != 0) {
      publish(*make(position, filler, Entry::Kind::kFiller));
      position += filler;
    }
    return make(position, bytes, Entry::Kind::kInline);
  }

  // Passes a written entry to the consumer.
  void publish(Entry& entry) noexcept {
    // Release: a thread that sees the mark sees the entry's content. Sequentially consistent,
    // because the producer then checks whether the consumer sleeps, and one must see the other.
    mark_of(entry.position).store(lap_of(entry.position), std::memory_order_seq_cst);
  }

  // The entry at `position` if it is published, otherwise null; fillers are entries, too. Consumer
  // only.
  Entry* at(std::uint64_t position) noexcept {
    // Sequentially consistent: pairs with publish(); also acquires the entry's content.
    const bool published = mark_of(position).load(std::memory_order_seq_cst) == lap_of(position);
    return published ? entry_at(position) : nullptr;
  }

  // Frees everything before `position`. Consumer only.
  void release(std::uint64_t position) noexcept {
    // Release: reads of the freed memory finish before a producer writes to it.
    head_.store(position, std::memory_order_release);
  }

  static std::uint64_t after(const Entry& entry) noexcept {
    return entry.position + std::uint64_t{entry.granules} * kRecordAlignment;
  }

  // Positions, for any thread: memory before head is free, and memory before tail is reserved.
  std::uint64_t head() const noexcept { return head_.load(std::memory_order_acquire); }
  std::uint64_t tail() const noexcept {
    return tail_.load(std::memory_order_seq_cst);  // ordered with publish and the consumer's sleep
  }
  // The bytes between both. Exact for some moment during the call, regardless of delays.
  std::size_t used() const noexcept {
    for (std::uint64_t head = this->head();;) {
      std::uint64_t tail = this->tail();  // after the head, so that the difference is not negative
      std::uint64_t now = this->head();
      if (now == head) return static_cast<std::size_t>(tail - head);
      head = now;
    }
  }

  std::size_t capacity() const noexcept { return capacity_; }

  // Larger ones might wait for room for ever, because an entry doesn't wrap.
  std::size_t max_payload() const noexcept { return capacity_ / 2 - sizeof(Entry); }

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(char* memory) const noexcept { munmap(memory, bytes); }
  };

  Entry* entry_at(std::uint64_t position) noexcept {
    return reinterpret_cast<Entry*>(memory_.get() + (position & (capacity_ - 1)));
  }
  std::atomic<std::uint32_t>& mark_of(std::uint64_t position) noexcept {
    return marks_[(position & (capacity_ - 1)) / kRecordAlignment];
  }
  std::uint32_t lap_of(std::uint64_t position) const noexcept {
    return static_cast<std::uint32_t>(position >> shift_) + 1;
  }
  Entry* make(std::uint64_t position, std::size_t bytes, Entry::Kind kind) noexcept {
    const auto granules = static_cast<std::uint32_t>(bytes / kRecordAlignment);
    return new (entry_at(position)) Entry{position, granules, kind, {}};
  }

  // The producers' fields are on one cache line, the consumer's head on another.
  alignas(64) std::atomic<std::uint64_t> tail_{0};
  std::size_t capacity_;
  int shift_;
  std::unique_ptr<char, Unmap> memory_;
  std::unique_ptr<std::atomic<std::uint32_t>[]> marks_;
  alignas(64) std::atomic<std::uint64_t> head_{0};
};

class Store {
 public:
  // With `copies`, records are copied when they are collected.
  Store(std::size_t capacity, bool copies)
      : ring_(capacity), aside_(std::make_shared<SideMemory>(capacity)), copies_(copies) {}

  struct Place {
    Entry* entry = nullptr;
    bool no_memory = false;  // no memory for the payload, probably for good
    bool decided() const noexcept { return entry != nullptr || no_memory; }
  };

  // A place for a record: its payload goes to `entry->record.payload`. Without room now, neither
  // entry nor no_memory is set. Thread-safe, like the next three. A large payload that is already
  // in `memory` (unless null) stays there.
  Place reserve(std::size_t payload, const std::shared_ptr<void>* memory) noexcept {
    if (payload > std::min(ring_.max_payload(), kLargestInline))
      return memory != nullptr ? reserve_kept(payload, *memory) : reserve_aside(payload);
    std::size_t aside = aside_->claimed();
    if (aside != 0 && aside + ring_.used() + sizeof(Entry) + payload > ring_.capacity()) return {};
    Entry* entry = ring_.reserve(payload);
    if (entry == nullptr) return {};
    entry->record.payload = entry->inline_payload();
    return {entry};
  }
  void publish(Entry& entry) noexcept { ring_.publish(entry); }
  // Releases a place that gets no record after all.
  void give_up(Entry& entry, std::size_t payload) noexcept {
    give_back(entry, payload);
    entry.kind = Entry::Kind::kFiller;
    ring_.publish(entry);
  }

  // Frees the oldest place that isn't in delivery. Returns the number of dropped records: 0 if the
  // place holds none or is still being written, empty if all places are in delivery.
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

  struct Collected {
    std::uint64_t begin = 0, position = 0;  // of the first taken, and behind the last
    bool some = false;
    std::uint64_t dropped = 0;  // records without memory
    std::size_t no_memory = 0;  // bytes of the first of them
  };

  // The channel's thread: takes waiting records into the batch, up to a part of the capacity, and
  // frees their places when the batch is done. A nonempty batch gets more: `first` is its first
  // position, or empty.
  Collected collect(Batch& batch, std::optional<std::uint64_t> first) noexcept {
    // A copied batch takes memory besides the ring's, so it is smaller.
    const std::size_t limit = ring_.capacity() / (copies_ ? 16 : 4);
    std::lock_guard lock(head_mutex_);
    if (copies_) note_high_water(/*bytes_besides=*/0);
    const std::uint64_t begin = next();
    Collected collected{.begin = begin, .position = begin};
    while (batch.has_place()) {
      Entry* entry = ring_.at(collected.position);
      if (entry == nullptr) break;
      const std::uint64_t after = Ring::after(*entry);
      if (after - first.value_or(begin) > limit && !batch.records().empty()) break;
      if (entry->kind != Entry::Kind::kFiller && !batch.take(*entry, aside_, copies_)) {
        if (collected.dropped++ == 0) collected.no_memory = entry->record.source->payload_bytes;
        drop(*entry);
      }
      collected.position = after;
    }
    collected.some = collected.position != begin;
    if (copies_) ring_.release(collected.position);
    next_.store(collected.position, std::memory_order_relaxed);  // see next()
    return collected;
  }
  // Frees the places of a delivered batch up to a position. `bytes_besides`: of the records, in the
  // batch and the channel, that are in no store.
  void settle(Batch& batch, std::uint64_t position, std::size_t bytes_besides) noexcept {
    std::lock_guard lock(head_mutex_);
    note_high_water(bytes_besides);
    if (!copies_) ring_.release(position);
    batch.give_back(*aside_);
  }

  // For the channel's thread: true if a record waits, and true if all reserved entries have been
  // collected.
  bool has_waiting() noexcept { return ring_.at(next()) != nullptr; }
  bool all_collected() const noexcept { return next() == ring_.tail(); }

  // The position behind all reserved entries.
  std::uint64_t tail() const noexcept { return ring_.tail(); }
  bool half_full() const noexcept { return ring_.used() >= ring_.capacity() / 2; }
  // The maximum number of bytes in use; unless `exactly`, without a lock, as last recorded.
  std::uint64_t high_water(bool exactly) const noexcept {
    if (exactly) {
      std::lock_guard lock(head_mutex_);
      note_high_water(/*bytes_besides=*/0);
    }
    return high_water_.load(std::memory_order_relaxed);  // a gauge
  }

 private:
  // Larger payloads get a block of their own, to be lent to the consumer. A copy of such a size
  // often goes to fresh memory, which costs more than the copy.
  static constexpr std::size_t kLargestInline = std::size_t{1} << 20;

  Place reserve_aside(std::size_t payload) noexcept {
    const std::optional<char*> block = aside_->take(payload, [&] { return ring_.used(); });
    if (!block || *block == nullptr) return {nullptr, /*no_memory=*/block.has_value()};
    Entry* entry = ring_.reserve(0);
    if (entry == nullptr) {
      aside_->give_back(*block, payload);
      return {};
    }
    entry->kind = Entry::Kind::kAside;
    entry->record.payload = *block;
    return {entry};
  }

  Place reserve_kept(std::size_t payload, const std::shared_ptr<void>& memory) noexcept {
    if (!aside_->claim(payload, [&] { return ring_.used(); })) return {};
    Entry* entry = ring_.reserve(sizeof(memory));
    if (entry == nullptr) {
      aside_->let_go(payload);
      return {};
    }
    entry->kind = Entry::Kind::kKept;
    entry->keep(memory);
    return {entry};
  }

  // Frees the memory of a payload besides the ring's.
  void give_back(Entry& entry, std::size_t payload) noexcept {
    if (entry.kind == Entry::Kind::kAside) aside_->give_back(entry.record.data(), payload);
    if (entry.kind != Entry::Kind::kKept) return;
    entry.take_memory();
    aside_->let_go(payload);
  }

  // True if the entry held a record. The mutex is held.
  bool drop(Entry& entry) noexcept {
    if (entry.kind == Entry::Kind::kFiller) return false;
    const Record& record = entry.record;
    record.let_go();
    give_back(entry, record.source->payload_bytes);
    return true;
  }

  // Called while memory is only released by this thread, or under the held mutex.
  void note_high_water(std::size_t bytes_besides) const noexcept {
    std::uint64_t now = ring_.used();  // before the other values, which only grow meanwhile
    now += aside_->claimed() + bytes_besides;
    // Relaxed: a gauge.
    if (now > high_water_.load(std::memory_order_relaxed))
      high_water_.store(now, std::memory_order_relaxed);
  }

  std::uint64_t next() const noexcept {
    // Relaxed: others move it only if records are copied; a late value costs one more round.
    return next_.load(std::memory_order_relaxed);
  }

  Ring ring_;
  const std::shared_ptr<SideMemory> aside_;
  const bool copies_;

  // Held while entries are taken from `next` and while places are freed, by the channel's thread
  // and by senders that drop the oldest. Never held while user code runs.
  alignas(64) mutable std::mutex head_mutex_;         // not on a cache line that senders read
  std::atomic<std::uint64_t> next_{0};                // written under the mutex, which orders it
  mutable std::atomic<std::uint64_t> high_water_{0};  // written under the mutex
};

}  // namespace callgate
