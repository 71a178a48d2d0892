// What takes records out of a channel.
//
// A channel calls its consumers on its own thread, one after the other, with all records that are
// there at once. A consumer that throws does not hurt the others: the channel keeps what it threw.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>

#include "channel/record.h"

namespace callgate {

class Consumer {
 public:
  virtual ~Consumer() = default;

  // Before the first records, and again when a closed one is used anew. Throws Error where what it
  // writes to is another's. On the thread that adds it to a channel.
  virtual void open() {}

  // The records, in the order in which the channel got them; valid until this returns.
  virtual void consume(std::span<const Record> records) = 0;

  // Everything consumed so far is to be visible to others (files flushed). On the channel's thread.
  virtual void flush() {}

  // No record follows. On the channel's thread, or on the closing one when that has ended.
  virtual void close() {}

  // Whether it can deal with records whose arrays are on a device. Others don't get them.
  virtual bool takes_device_arrays() const noexcept { return false; }

  // For messages.
  virtual std::string description() const { return "a consumer"; }

  // How many of the records, lanes counted each, it could not take so far: no room on the disk,
  // say. Any thread.
  std::uint64_t lost() const noexcept { return lost_.load(std::memory_order_relaxed); }  // a gauge
  void lose(std::uint64_t count) noexcept {
    lost_.fetch_add(count, std::memory_order_relaxed);  // a gauge
  }

 private:
  std::atomic<std::uint64_t> lost_{0};
};

}  // namespace callgate
