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
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "channel/record.h"
#include "channel/ring.h"

namespace callgate {

// Copies a leaf into a record's payload, which is aligned to 16 bytes.
void copy_leaf(char* to, const void* from, std::size_t bytes) noexcept;

// Memory beside a ring, within a budget that the two share: payloads that are too large for the
// ring, and copies of what a consumer reads. Blocks that came back are kept, within the budget, for
// the next of their size: fresh memory costs more than the copy into it.
class SideMemory {
 public:
  explicit SideMemory(std::size_t budget) : budget_(budget) {}
  ~SideMemory();
  SideMemory(const SideMemory&) = delete;
  SideMemory& operator=(const SideMemory&) = delete;

  struct Block {
    char* data = nullptr;
    bool no_memory = false;  // the system has none: to wait for room would not help
  };

  // Null while less than `bytes` of the budget is left, the ring's share taken off. When nothing
  // else is in use, a block is granted whatever its size: nothing is too large to be sent.
  Block take(std::size_t bytes, const Ring& ring) noexcept;
  void give_back(char* block, std::size_t bytes) noexcept;

  // Takes back a block that has been let go before: its reader kept it for longer.
  void recycle(char* block, std::size_t bytes) noexcept;

  // Counts memory that is not ours, and no more.
  void hold(std::size_t bytes) noexcept;
  void let_go(std::size_t bytes) noexcept;

  // Sequentially consistent: a sender to the ring looks here, take() looks there.
  std::size_t claimed() const noexcept { return claimed_.load(std::memory_order_seq_cst); }
  // Without what take() is about to refuse. Relaxed: a gauge.
  std::size_t in_use() const noexcept { return in_use_.load(std::memory_order_relaxed); }

 private:
  bool claim(std::size_t bytes, const Ring& ring) noexcept;
  void keep(char* block, std::size_t bytes, std::size_t claimed) noexcept;

  std::size_t budget_;
  std::atomic<std::size_t> claimed_{0}, in_use_{0};
  std::mutex mutex_;
  // Blocks that nobody uses, all of one size, and no more of them than the budget has room for.
  std::vector<char*> kept_;
  std::size_t kept_bytes_ = 0;  // of each
};

// A block in the hands of who reads it, and of whom it is lent to.
struct SideBlock {
  SideBlock(std::shared_ptr<SideMemory> from, char* memory, std::size_t size)
      : owner(std::move(from)), data(memory), bytes(size) {}
  SideBlock(const SideBlock&) = delete;
  SideBlock& operator=(const SideBlock&) = delete;
  ~SideBlock() {
    if (data != nullptr) owner->recycle(data, bytes);
  }

  std::shared_ptr<SideMemory> owner;
  char* data;
  std::size_t bytes;
};

// The records in delivery, with what holds those of their payloads that are not in the ring. Of the
// channel's thread.
class Batch {
 public:
  // Makes room for the least records without which the thread could not go on where there is no
  // memory for more.
  void reserve();

  // Whether the batch takes one more record. Where there is no memory for more, its records go
  // first.
  bool has_place() noexcept;

  // There is a place, for each of these. Takes over an entry's block, or copies its payload if
  // `copies`, counted in `aside`; false, and nothing has happened, where there is no memory.
  bool take(const Entry& entry, const std::shared_ptr<SideMemory>& aside, bool copies) noexcept;
  // Takes over a payload that is in no store.
  void take(Record record, std::unique_ptr<char[]> payload);

  std::span<const Record> records() const noexcept { return records_; }
  // Of the payloads that are in no store.
  std::size_t bytes_besides() const noexcept { return bytes_besides_; }

  // See Channel::lend().
  std::shared_ptr<void> lend(const Record& record) const noexcept;

  // Gives the memory of blocks and copies back, but for blocks that are lent.
  void give_back(SideMemory& aside) noexcept;
  void clear() noexcept;

 private:
  std::vector<Record> records_;
  std::vector<std::unique_ptr<char[]>> copies_;
  std::vector<std::shared_ptr<SideBlock>> blocks_;
  std::size_t copied_bytes_ = 0;  // of copies, those that count against the capacity
  std::size_t bytes_besides_ = 0;
};

// Records that the channel's own thread sent into a full store: it would wait for itself. Each
// follows what was in the store then, and everything that the thread sends goes here until nothing
// is left here. Not bounded. Of that thread, but for some() and added(), which are relaxed: other
// threads count on what the thread did before they were told.
class Overflow {
 public:
  bool some() const noexcept { return some_.load(std::memory_order_relaxed); }
  // How many there have been.
  std::uint64_t added() const noexcept { return added_.load(std::memory_order_relaxed); }
  std::uint64_t taken() const noexcept { return taken_; }
  // Of those that wait.
  std::size_t bytes() const noexcept { return bytes_; }

  // A record behind `position` of the store.
  void add(std::uint64_t position, Record record, std::unique_ptr<char[]> payload);
  // Takes those that follow what was before `position`.
  void collect(Batch& batch, std::uint64_t position);

 private:
  struct Waiting {
    std::uint64_t position;
    Record record;
    std::unique_ptr<char[]> payload;
  };
  std::deque<Waiting> waiting_;
  std::size_t bytes_ = 0;
  std::uint64_t taken_ = 0;
  std::atomic<std::uint64_t> added_{0};
  std::atomic<bool> some_{false};
};

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
  void give_up(Entry& entry, std::size_t payload) noexcept;

  // Frees the oldest place that is not in delivery; returns how many records that drops: 0 where it
  // holds none, or is still being written. Nothing where all are in delivery.
  std::optional<std::uint64_t> drop_oldest() noexcept;

  // Drops all that waits; returns how many. Where nobody is left to deliver to.
  std::uint64_t drop_all() noexcept;

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
  Collected collect(Batch& batch) noexcept;
  void settle(Batch& batch, std::uint64_t position, std::size_t bytes_besides) noexcept;

  // The channel's thread: does a record wait? Has everything been collected that was reserved?
  bool has_waiting() noexcept { return ring_.at(next()) != nullptr; }
  bool all_collected() const noexcept { return next() == ring_.tail(); }

  // The position behind all that has been reserved.
  std::uint64_t tail() const noexcept { return ring_.tail(); }
  bool half_full() const noexcept { return ring_.used() >= ring_.capacity() / 2; }
  // The most bytes that were ever used; without a lock, as far as it has been noted.
  std::uint64_t high_water() const noexcept;
  std::uint64_t noted_high_water() const noexcept {
    return high_water_.load(std::memory_order_relaxed);  // a gauge
  }

 private:
  // Above it a payload gets a block of its own, which can be lent to its consumer: copies of such a
  // size often go to fresh memory, which costs more than the copy.
  static constexpr std::size_t kLargestInline = std::size_t{1} << 20;

  Place reserve_aside(std::size_t payload) noexcept;
  bool drop(Entry& entry) noexcept;
  void note_high_water(std::size_t bytes_besides) noexcept;
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
