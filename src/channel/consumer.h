// What takes records out of a channel.
//
// A channel calls its consumers on its own thread, one after the other, with all records that are
// there at once. A consumer that throws does not hurt the others: the channel keeps what it threw.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>

#include "channel/first_error.h"
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

// How native sinks go through a batch: a record that a sink refuses does not take the others along.
//
// Calls begin(), take(record) for each record, whatever some of them throw, then finish(), then
// throws the first exception of these. Where begin() throws, all records are lost; a record for
// which take() throws is lost; finish() counts for itself.
template <typename Begin, typename Take, typename Finish>
void consume_each(Consumer& consumer, std::span<const Record> records, Begin&& begin, Take&& take,
                  Finish&& finish) {
  FirstError errors;
  if (!errors.survives(begin)) {
    consumer.lose(records.size());
    return errors.rethrow();
  }
  for (const Record& record : records) {
    if (!errors.survives([&] { take(record); })) consumer.lose(1);
  }
  errors.survives(finish);
  errors.rethrow();
}

// Visits the lanes of a record in a take(). Of those that fail, all are lost but the one that
// consume_each() counts.
template <typename Visit>
void visit_lanes(Consumer& consumer, RecordViews& views, const Record& record, Visit&& visit) {
  try {
    views.each_lane(record, visit);
  } catch (...) {
    if (views.failed() > 1) consumer.lose(views.failed() - 1);
    throw;
  }
}

}  // namespace callgate
