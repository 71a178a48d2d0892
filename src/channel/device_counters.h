// A count for each device that sends to a channel, taken without locks.
//
// Ids of devices are global: with many processes they are large and far apart (2048 is the first of
// the second process, say), so a device gets its slot when it first counts. Any thread may count;
// nothing is ever taken out.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace callgate {

class DeviceCounters {
 public:
  // The device's next number, from 0.
  std::uint64_t next(std::int64_t device) noexcept {
    // Relaxed: a number, no order.
    return slot_of(device).count.fetch_add(1, std::memory_order_relaxed);
  }

  // Goes on from where `other` stands, while nobody counts in either.
  void add(const DeviceCounters& other) noexcept {
    for (const Slot& theirs : other.slots_) {
      // Relaxed, all: the callers have ordered their threads.
      std::int64_t device = theirs.device.load(std::memory_order_relaxed);
      if (device == kNone) continue;
      std::uint64_t count = theirs.count.load(std::memory_order_relaxed);
      slot_of(device).count.fetch_add(count, std::memory_order_relaxed);
    }
  }

  // What all devices have counted together.
  std::uint64_t sum() const noexcept {
    std::uint64_t sum = 0;
    // Acquire: in a caller that asks for several counts these are read in the order of its asking.
    for (const Slot& slot : slots_) sum += slot.count.load(std::memory_order_acquire);
    return sum;
  }

 private:
  static constexpr std::size_t kSlots = 256;  // the last one also counts what finds no other
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::min();

  struct Slot {
    std::atomic<std::int64_t> device{kNone};
    std::atomic<std::uint64_t> count{0};
  };

  Slot& slot_of(std::int64_t device) noexcept {
    auto first = static_cast<std::size_t>(device) % kSlots;
    for (std::size_t i = 0; i < kSlots; ++i) {
      Slot& slot = slots_[(first + i) % kSlots];
      // Relaxed, both: the key says nothing of other memory.
      std::int64_t found = slot.device.load(std::memory_order_relaxed);
      if (found == kNone &&
          slot.device.compare_exchange_strong(found, device, std::memory_order_relaxed))
        return slot;
      if (found == device) return slot;
    }
    return slots_.back();
  }

  std::array<Slot, kSlots> slots_;
};

}  // namespace callgate
