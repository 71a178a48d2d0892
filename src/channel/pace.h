// SPDX-License-Identifier: Apache-2.0
// The number of records that a consumer gets at once if others wait for their turn.
//
// A call of a consumer takes some time, and so does each of its records. Calls with different
// numbers of records separate the two: a line is fitted to the last calls, because a busy machine
// makes some calls take many times as long. A turn lasts a short fixed time, or its call's duration
// if that is longer. A consumer that compresses or sends each batch thus needs few calls, and the
// others wait at most twice the time of a call with one record.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>

namespace callgate {

// Thread-safe, because a consumer may belong to several channels.
class Pace {
 public:
  // `first`: the records of the first turn, before any measurement.
  explicit Pace(std::size_t first) : turn_(first) {}

  // The records of the next turn.
  std::size_t turn() const;

  // Reports the time for some records, at least one.
  void took(std::int64_t nanoseconds, std::size_t records);

 private:
  static constexpr double kTurn = std::chrono::nanoseconds(std::chrono::milliseconds(10)).count();
  static constexpr double kTooLong = 4;  // times the target time of a turn
  static constexpr double kMost = 1U << 30;
  static constexpr double kKept = 0.9;   // a call's remaining weight at the next call
  static constexpr double kGrown = 1.1;  // the growth of the quickest recent call, per call

  // Sums over the calls. Slower calls have less weight, since noise grows with time.
  struct Sums {
    double weight = 0, count = 0, ns = 0, count_count = 0, count_ns = 0;
  };

  void remember(double ns, double count, double kept);

  // Fits the line through the calls (least squares): the slope is a record's nanoseconds.
  void fit();

  mutable std::mutex mutex_;
  std::size_t turn_;
  Sums sums_;
  double least_ns_ = std::numeric_limits<double>::infinity();
  double call_ = 0, ns_each_ = 0;  // per call without records, and per record
  bool known_ = false;             // true after calls with different numbers of records
  std::uint64_t calls_ = 0;
};

}  // namespace callgate
