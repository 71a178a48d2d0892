// SPDX-License-Identifier: Apache-2.0
// Consumers take records out of a channel, a lane or a batch at a time.
//
// A channel calls its consumers on its own thread, in turns: a lone one with all records that are
// there at once, unless it goes through them one by one, the others each with as many as it takes
// in a short time. A consumer that throws does not hurt the others: the channel keeps what it
// threw.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "channel/pace.h"
#include "channel/record.h"
#include "core/array_view.h"
#include "core/error.h"

namespace callgate {

class Consumer : public std::enable_shared_from_this<Consumer> {
 public:
  // `one_by_one`: it gains nothing from many records at once, so that it gets them in turns even
  // where it is alone: what it has had is counted after each.
  explicit Consumer(bool one_by_one = false)
      : goes_one_by_one_(one_by_one), pace_(one_by_one ? 1 : 16) {}
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

  // True if it can deal with records whose arrays are on a device. Others don't get them.
  virtual bool takes_device_arrays() const noexcept { return false; }

  bool goes_one_by_one() const noexcept { return goes_one_by_one_; }

  // For messages.
  virtual std::string description() const { return "a consumer"; }

  // Records, lanes counted each, that it could not take: no room on the disk, say. Any thread.
  std::uint64_t lost() const noexcept { return lost_.load(std::memory_order_relaxed); }  // a gauge
  void lose(std::uint64_t count) noexcept {
    lost_.fetch_add(count, std::memory_order_relaxed);  // a gauge
  }

  // Its pace where it takes turns.
  Pace& pace() noexcept { return pace_; }

 private:
  std::atomic<std::uint64_t> lost_{0};
  const bool goes_one_by_one_;
  Pace pace_;
};

// Keeps the first exception of several steps, of which each is taken whatever the others throw.
class FirstError {
 public:
  // True if the step threw nothing.
  template <typename Step>
  bool survives(Step&& step) noexcept {
    try {
      step();
      return true;
    } catch (...) {
      if (first_ == nullptr) first_ = std::current_exception();
      return false;
    }
  }

  // Throws what it keeps, if anything, and forgets it.
  void rethrow() {
    if (first_ != nullptr) std::rethrow_exception(std::exchange(first_, nullptr));
  }

 private:
  std::exception_ptr first_;
};

// Takes a step that appends to `text`. Where it throws, `text` is as it was before.
template <typename Step>
void append_whole(std::string& text, Step&& step) {
  const std::size_t before = text.size();
  FirstError error;
  if (!error.survives(step)) text.resize(before);
  error.rethrow();
}

// The leaves of a record as views into its payload, control leaves included.
class RecordViews {
 public:
  explicit RecordViews(const Source& source)
      : views_(source.leaves.size()), lane_(views_), cuts_(source.padded.size()) {}

  // Views of the whole record.
  std::span<const ArrayView> whole(const Record& record);

  // Calls visit(position of the lane, leaves of the tapped value) for each lane that is sent, in
  // row-major order; once with position 0 for a record without lanes. A lane whose `where` is False
  // is left out. Padding is cut off. A lane whose sizes the array has not is left out, and so is
  // one that visit() throws for: the others are visited all the same, then the first exception is
  // thrown on.
  template <typename Visit>
  void each_lane(const Record& record, Visit&& visit) {
    const Source& source = *record.source;
    failed_ = 0;
    FirstError errors;
    each_lane_as_sent(record, [&](std::int64_t lane, std::span<const ArrayView>) {
      const bool visited = errors.survives([&] {
        for (std::size_t i = 0; i < source.padded.size(); ++i) cut(record, i);
        visit(lane, std::span<const ArrayView>(lane_.data(), source.values()));
      });
      if (!visited) ++failed_;
    });
    errors.rethrow();
  }

  // How many lanes the last each_lane() left out so.
  std::uint64_t failed() const noexcept { return failed_; }

  // As each_lane(), with padding, and with the sizes behind the value's leaves.
  template <typename Visit>
  void each_lane_as_sent(const Record& record, Visit&& visit) {
    const Source& source = *record.source;
    whole(record);
    const std::int64_t number = number_of(source);
    for (std::int64_t lane = 0; lane < source.lanes.count(); ++lane) {
      source.lanes.select_operands(lane, views_, lane_);
      if (source.has_where && *static_cast<const char*>(lane_[source.value_leaves].data) == 0)
        continue;
      visit(source.lanes.position(lane, number),
            std::span<const ArrayView>(lane_.data(), source.value_leaves));
    }
  }

 private:
  // The number of the call that has sent the record, of the views of whole().
  std::int64_t number_of(const Source& source) const noexcept;

  // A padded leaf without its padding.
  struct Cut {
    std::vector<std::int64_t> dims;
    std::vector<char> data;
  };

  // Puts what counts of the padded leaf `i` into lane_.
  void cut(const Record& record, std::size_t i);

  std::vector<ArrayView> views_, lane_;
  std::vector<Cut> cuts_;
  std::uint64_t failed_ = 0;
};

// A consumer in C++ that goes through a batch record by record, so that one which it refuses does
// not take the others along. Runs without the GIL, mostly on its channel's thread; Python may write
// and close beside it, so what the sink's functions touch is under `mutex_`.
class Sink : public Consumer {
 public:
  // Calls begin(), take(record) for each record, whatever some of them throw, then write(), then
  // throws the first exception of these. Where begin() throws, all records are lost; a record for
  // which take() throws is lost; write() counts for itself.
  void consume(std::span<const Record> records) override;

 protected:
  static constexpr std::size_t kManyBytes = std::size_t{1} << 20;  // larger writes gain nothing

  virtual void begin() {}
  virtual void take(const Record& record) = 0;
  // Writes what take() has gathered; take() may ask for it by write_now(), where it is much.
  virtual void write() {}
  void write_now() noexcept {
    errors_.survives([&] { write(); });
  }

  // Visits the lanes of a record in a take(). All that fail are lost but the one that
  // consume() counts.
  template <typename Visit>
  void visit_lanes(RecordViews& views, const Record& record, Visit&& visit) {
    FirstError error;
    if (!error.survives([&] { views.each_lane(record, visit); }) && views.failed() > 1)
      lose(views.failed() - 1);
    error.rethrow();
  }

  std::mutex mutex_;

 private:
  FirstError errors_;
};

}  // namespace callgate
