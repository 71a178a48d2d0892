// SPDX-License-Identifier: Apache-2.0
// How many records a consumer gets at once where others wait for their turn.
//
// A call of a consumer takes some time, and so does each of its records. Calls with different
// numbers of records tell one from the other: a line is laid through the last ones, since a busy
// machine makes some take many times as long. A turn is as long as a short time allows, or as its
// call takes where that is longer: a consumer that compresses or sends each batch needs few calls
// then, and the others wait for no more than twice what it needs for one record.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>

namespace callgate {

// Any thread: a consumer may be that of several channels.
class Pace {
 public:
  // `first`: records of the first turn, of which nothing is known.
  explicit Pace(std::size_t first) : turn_(first) {}

  // Records for the next turn.
  std::size_t turn() const;

  // Some records, at least one, took so long.
  void took(std::int64_t nanoseconds, std::size_t records);

 private:
  static constexpr double kTurn = std::chrono::nanoseconds(std::chrono::milliseconds(10)).count();
  static constexpr double kTooLong = 4;  // times what a turn is to take
  static constexpr double kMost = 1U << 30;
  static constexpr double kKept = 0.9;   // of a call's weight at the next one
  static constexpr double kGrown = 1.1;  // what the quickest of the last calls took, likewise

  // Sums over the calls. A call weighs less the longer it took: noise grows with time.
  struct Sums {
    double weight = 0, count = 0, ns = 0, count_count = 0, count_ns = 0;
  };

  void remember(double ns, double count, double kept);

  // The line through the calls (least squares): a record's nanoseconds are its slope.
  void fit();

  mutable std::mutex mutex_;
  std::size_t turn_;
  Sums sums_;
  double least_ns_ = std::numeric_limits<double>::infinity();
  double call_ = 0, ns_each_ = 0;  // of a call without records, and of a record
  bool known_ = false;             // by calls with different numbers of records
  std::uint64_t calls_ = 0;
};

}  // namespace callgate
