// A bounded ring of entries of any size: many producers, one consumer, no lock.
//
// Memory is an array of 64-byte granules. Positions count bytes and only grow; an entry starts at a
// granule and never wraps (a filler takes the rest of the ring instead). A producer moves `tail`
// past its entry (compare-and-swap), writes it, and publishes it by storing the entry's lap into
// its granule's mark. The consumer reads entries at `head` in order as long as their marks show the
// current lap, and frees them by moving `head`. Marks are apart from the payload, so that no
// payload can look like one.
//
//   memory   | entry 64 | payload ... | entry 64 | ...        | filler        |
//   marks    | lap+1    | -  -        | lap+1    |            | lap+1         |
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include "channel/record.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate {

// The start of each entry; its payload follows, unless `record.payload` points elsewhere.
struct alignas(kRecordAlignment) Entry {
  enum class Kind : std::uint32_t { kInline, kAside, kFiller };

  std::uint64_t position = 0;
  std::uint32_t granules = 0;  // of the whole entry in the ring
  Kind kind = Kind::kInline;
  Record record;

  char* inline_payload() noexcept { return reinterpret_cast<char*>(this + 1); }
};
static_assert(sizeof(Entry) == kRecordAlignment);

class Ring : Immovable {
 public:
  // `capacity` in bytes is rounded down to a power of two. Throws Error when it can't be had.
  explicit Ring(std::size_t capacity)
      : capacity_(std::bit_floor(std::max<std::size_t>(capacity, 1024))),
        shift_(std::countr_zero(capacity_)),
        memory_(nullptr, Unmap{capacity_}) {
    try {
      // Pages come with their first use, so a ring that is never full never costs its capacity.
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

  // Room for an entry with `payload` bytes after it, or null when the ring is too full now. At most
  // max_payload(). Any thread.
  Entry* reserve(std::size_t payload) noexcept {
    const std::size_t bytes = sizeof(Entry) + align_record(payload);
    std::uint64_t position = tail_.load(std::memory_order_relaxed);  // confirmed by the exchange
    std::uint64_t filler = 0;
    for (;;) {
      const std::uint64_t left = capacity_ - (position & (capacity_ - 1));
      filler = bytes > left ? left : 0;
      if (position + filler + bytes - head() > capacity_) {
        const std::uint64_t now = tail_.load(std::memory_order_relaxed);  // an old tail's answer?
        if (now == position) return nullptr;
        position = now;
        continue;
      }
      // Relaxed on failure (we retry); nothing is published by moving the tail, marks do that.
      // Sequentially consistent on success, since tail() is compared with the consumer's sleep.
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

  // Hands a written entry to the consumer.
  void publish(Entry& entry) noexcept {
    // Release: the entry's content is there for whoever sees the mark. Sequentially consistent,
    // since the producer then asks whether the consumer sleeps, and one must see the other.
    mark_of(entry.position).store(lap_of(entry.position), std::memory_order_seq_cst);
  }

  // The entry at `position` if it is published, else null; fillers are entries, too. Consumer only.
  Entry* at(std::uint64_t position) noexcept {
    // Sequentially consistent: pairs with publish(); also acquires the entry's content.
    const bool published = mark_of(position).load(std::memory_order_seq_cst) == lap_of(position);
    return published ? entry_at(position) : nullptr;
  }

  // Frees everything before `position`. Consumer only.
  void release(std::uint64_t position) noexcept {
    // Release: our reads of the freed memory are over before a producer writes to it.
    head_.store(position, std::memory_order_release);
  }

  static std::uint64_t after(const Entry& entry) noexcept {
    return entry.position + std::uint64_t{entry.granules} * kRecordAlignment;
  }

  // Positions, as any thread sees them: everything before head is freed, before tail reserved.
  std::uint64_t head() const noexcept { return head_.load(std::memory_order_acquire); }
  std::uint64_t tail() const noexcept {
    return tail_.load(std::memory_order_seq_cst);  // ordered with publish and the consumer's sleep
  }
  // Bytes between the two. Exact for a moment in the call, however long the call is held up.
  std::size_t used() const noexcept {
    for (std::uint64_t head = this->head();;) {
      std::uint64_t tail = this->tail();  // after the head, so that the difference is not negative
      std::uint64_t now = this->head();
      if (now == head) return static_cast<std::size_t>(tail - head);
      head = now;
    }
  }

  std::size_t capacity() const noexcept { return capacity_; }

  // Larger ones might wait for room for ever, since an entry does not wrap.
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

  // What producers use is on one cache line, the consumer's head on another.
  alignas(64) std::atomic<std::uint64_t> tail_{0};
  std::size_t capacity_;
  int shift_;
  std::unique_ptr<char, Unmap> memory_;
  std::unique_ptr<std::atomic<std::uint32_t>[]> marks_;
  alignas(64) std::atomic<std::uint64_t> head_{0};
};

}  // namespace callgate
