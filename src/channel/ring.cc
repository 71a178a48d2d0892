// See the header.
#include "channel/ring.h"

#include <sys/mman.h>

#include <bit>
#include <new>
#include <string>

#include "core/error.h"

namespace callgate {
namespace {

constexpr std::size_t kSmallest = 1024;

using Mark = std::atomic<std::uint32_t>;

[[noreturn]] void no_memory(std::size_t capacity) {
  throw Error(ErrorCode::kInternal, "a channel's memory", std::to_string(capacity) + " bytes",
              "none from the system");
}

char* map_memory(std::size_t capacity) {
  // Pages come with their first use, so a ring that is never full never costs its capacity.
  void* memory = mmap(nullptr, capacity, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) no_memory(capacity);
#ifdef MADV_HUGEPAGE
  madvise(memory, capacity, MADV_HUGEPAGE);  // fewer page faults in the first lap; may be refused
#endif
  return static_cast<char*>(memory);
}

std::unique_ptr<Mark[]> make_marks(std::size_t capacity) try {
  return std::make_unique<Mark[]>(capacity / kRecordAlignment);
} catch (const std::bad_alloc&) {
  no_memory(capacity);
}

}  // namespace

void Ring::Unmap::operator()(char* memory) const noexcept { munmap(memory, bytes); }

Ring::Ring(std::size_t capacity)
    : capacity_(std::bit_floor(capacity < kSmallest ? kSmallest : capacity)),
      shift_(std::countr_zero(capacity_)),
      memory_(map_memory(capacity_), Unmap{capacity_}),
      marks_(make_marks(capacity_)) {}

Entry* Ring::reserve(std::size_t payload) noexcept {
  std::size_t bytes = sizeof(Entry) + align_record(payload);
  std::uint64_t position = tail_.load(std::memory_order_relaxed);  // confirmed by the exchange
  std::uint64_t filler = 0;
  for (;;) {
    std::uint64_t left = capacity_ - (position & (capacity_ - 1));
    filler = bytes > left ? left : 0;
    if (position + filler + bytes - head() > capacity_) {
      std::uint64_t now = tail_.load(std::memory_order_relaxed);  // was it an old tail's answer?
      if (now == position) return nullptr;
      position = now;
      continue;
    }
    // Relaxed on failure (we retry); nothing is published by moving the tail, marks do that.
    // Sequentially consistent on success, since tail() is compared with the consumer's sleep.
    if (tail_.compare_exchange_weak(position, position + filler + bytes, std::memory_order_seq_cst,
                                    std::memory_order_relaxed)) {
      break;
    }
  }
  if (filler != 0) {
    make(position, filler, Entry::Kind::kFiller);
    publish(*entry_at(position));
    position += filler;
  }
  make(position, bytes, Entry::Kind::kInline);
  return entry_at(position);
}

void Ring::make(std::uint64_t position, std::size_t bytes, Entry::Kind kind) noexcept {
  Entry* entry = new (entry_at(position)) Entry;
  entry->position = position;
  entry->granules = static_cast<std::uint32_t>(bytes / kRecordAlignment);
  entry->kind = kind;
}

void Ring::publish(Entry& entry) noexcept {
  // Release: the entry's content is there for whoever sees the mark. Sequentially consistent, since
  // the producer then asks whether the consumer sleeps, and one of the two must see the other.
  mark_of(entry.position).store(lap_of(entry.position), std::memory_order_seq_cst);
}

Entry* Ring::at(std::uint64_t position) noexcept {
  // Sequentially consistent: pairs with publish(); also acquires the entry's content.
  if (mark_of(position).load(std::memory_order_seq_cst) != lap_of(position)) return nullptr;
  return entry_at(position);
}

}  // namespace callgate
