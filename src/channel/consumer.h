// SPDX-License-Identifier: Apache-2.0
// Consumers take records out of a channel, a lane or a batch at a time.
//
// A channel calls its consumers on its own thread, in turns. A lone consumer gets all available
// records at once, unless it processes them one by one. Several consumers each get as many records
// as they process in a short time. An exception of a consumer doesn't affect the others; the
// channel stores it.
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
  // `one_by_one`: batches have no advantage for this consumer, so it gets records in turns even if
  // it is alone, and each turn's records are counted afterwards.
  explicit Consumer(bool one_by_one = false)
      : goes_one_by_one_(one_by_one), pace_(one_by_one ? 1 : 16) {}
  virtual ~Consumer() = default;

  // Called before the first records, and again before a closed consumer is reused, on the thread
  // that adds it to a channel. Throws Error if its destination belongs to another writer.
  virtual void open() {}

  // The records, in the channel's order; valid until this returns.
  virtual void consume(std::span<const Record> records) = 0;

  // Makes all consumed records visible to others (flushes files). On the channel's thread.
  virtual void flush() {}

  // No record follows. On the channel's thread, or on the closing thread after its end.
  virtual void close() {}

  // True if it accepts records with arrays on a device. Other consumers don't get them.
  virtual bool takes_device_arrays() const noexcept { return false; }

  bool goes_one_by_one() const noexcept { return goes_one_by_one_; }

  // For messages.
  virtual std::string description() const { return "a consumer"; }

  // The number of records, counting each lane, that it could not take, such as for lack of disk
  // space. Thread-safe.
  std::uint64_t lost() const noexcept { return lost_.load(std::memory_order_relaxed); }  // a gauge
  void lose(std::uint64_t count) noexcept {
    lost_.fetch_add(count, std::memory_order_relaxed);  // a gauge
  }

  // The consumer's pace for turns.
  Pace& pace() noexcept { return pace_; }

 private:
  std::atomic<std::uint64_t> lost_{0};
  const bool goes_one_by_one_;
  Pace pace_;
};

// Stores the first exception of several steps. Each step runs regardless of the others.
class FirstError {
 public:
  // True if the step didn't throw.
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

  // Throws the stored exception, if any, and forgets it.
  void rethrow() {
    if (first_ != nullptr) std::rethrow_exception(std::exchange(first_, nullptr));
  }

 private:
  std::exception_ptr first_;
};

// Runs a step that appends to `text`. If it throws, `text` is restored.
template <typename Step>
void append_whole(std::string& text, Step&& step) {
  const std::size_t before = text.size();
  FirstError error;
  if (!error.survives(step)) text.resize(before);
  error.rethrow();
}

// The leaves of a record as views into its payload, including control leaves.
class RecordViews {
 public:
  explicit RecordViews(const Source& source)
      : views_(source.leaves.size()), lane_(views_), cuts_(source.padded.size()) {}

  // Views of the whole record.
  std::span<const ArrayView> whole(const Record& record);

  // Calls visit(position of the lane, leaves of the tapped value) for each lane that is sent, in
  // row-major order; once with position 0 for a record without lanes. It leaves out lanes whose
  // `where` is False, cuts off padding, and leaves out lanes whose sizes exceed the array. A lane
  // for which visit() throws is left out, too: all others are visited, and then the first exception
  // is rethrown.
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

  // The number of lanes that failed in the last each_lane().
  std::uint64_t failed() const noexcept { return failed_; }

  // Like each_lane(), but with padding, and with the sizes behind the value's leaves.
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
  // The number of the call that sent the record, from the views of whole().
  std::int64_t number_of(const Source& source) const noexcept;

  // A padded leaf without its padding.
  struct Cut {
    std::vector<std::int64_t> dims;
    std::vector<char> data;
  };

  // Puts the used part of the padded leaf `i` into lane_.
  void cut(const Record& record, std::size_t i);

  std::vector<ArrayView> views_, lane_;
  std::vector<Cut> cuts_;
  std::uint64_t failed_ = 0;
};

// A consumer in C++ that processes a batch record by record, so a refused record doesn't affect the
// others. Runs without the GIL, mostly on its channel's thread. Python may write and close
// concurrently, so `mutex_` guards the members that the sink's functions use.
class Sink : public Consumer {
 public:
  // Calls begin(), take(record) for each record regardless of exceptions, then write(), and then
  // throws the first exception. If begin() throws, all records are lost. A record for which take()
  // throws is lost. write() counts its own losses.
  void consume(std::span<const Record> records) override;

 protected:
  static constexpr std::size_t kManyBytes = std::size_t{1} << 20;  // larger writes gain nothing

  virtual void begin() {}
  virtual void take(const Record& record) = 0;
  // Writes the data that take() has gathered; take() may call it by write_now() for large data.
  virtual void write() {}
  void write_now() noexcept {
    errors_.survives([&] { write(); });
  }

  // Visits the lanes of a record in take(). All failing lanes count as lost, except the one that
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
