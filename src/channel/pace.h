// SPDX-License-Identifier: Apache-2.0
// How many records a consumer gets at once where others wait for their turn.
//
// A call of a consumer takes some time, and so does each of its records. Calls with different
// numbers of records tell one from the other: a line is laid through the last ones, since a busy
// machine makes some take many times as long. A turn is as long as a short time allows, or as its
// call takes where that is longer: a consumer that compresses or sends each batch needs few calls
// then, and the others wait for no more than twice what it needs for one record.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>

namespace callgate {

// Any thread: a consumer may be that of several channels.
class Pace {
 public:
  // Records for the next turn.
  std::size_t turn() const {
    std::lock_guard lock(mutex_);
    return turn_;
  }

  // Some records, at least one, took so long.
  void took(std::int64_t nanoseconds, std::size_t records) {
    std::lock_guard lock(mutex_);
    const auto ns = static_cast<double>(std::max<std::int64_t>(nanoseconds, 1));
    const auto count = static_cast<double>(records);
    // A call that contradicts the earlier ones takes their weight: the consumer has changed.
    const double odds = 2 * std::max(kTurn, call_ + ns_each_ * count) / ns;
    remember(ns, count, known_ ? std::min(kKept, odds * odds) : kKept);
    fit();
    double fits = std::max(kTurn, call_) / std::max(ns_each_, 1e-3);
    if (!known_) fits = ns <= 2 * kTurn || count == 1 ? std::max(fits, 2 * count) : count / 2;
    // No further than what has been seen allows: twice as many, or as many more as time was left.
    const double seen = std::max(records >= turn_ ? 2 * count : 0.0, count * kTurn / ns);
    double most = std::max(static_cast<double>(turn_), seen);
    const double long_turn = kTooLong * std::max(kTurn, call_);
    if (known_ && ns > long_turn) most = count * long_turn / ns;
    turn_ = static_cast<std::size_t>(std::clamp(std::min(fits, most), 1.0, kMost));
  }

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

  void remember(double ns, double count, double kept) {
    least_ns_ = kept < kKept ? ns : std::min(ns, kGrown * least_ns_);
    const double weight = 1 / ns;
    auto add = [&](double& sum, double more) { sum = kept * sum + more; };
    add(sums_.weight, weight);
    add(sums_.count, weight * count);
    add(sums_.ns, 1);
    add(sums_.count_count, weight * count * count);
    add(sums_.count_ns, count);
  }

  // The line through the calls (least squares): a record's nanoseconds are its slope.
  void fit() {
    const double mean = sums_.ns / sums_.count;  // as if calls cost nothing
    const double spread = sums_.weight * sums_.count_count - sums_.count * sums_.count;
    if (spread > 0.01 * sums_.count * sums_.count) {
      const double slope = (sums_.weight * sums_.count_ns - sums_.count * sums_.ns) / spread;
      ns_each_ = std::clamp(slope, 0.0, mean);
      known_ = true;
    } else {
      ns_each_ = mean;
      known_ = false;
    }
    call_ = std::clamp((sums_.ns - ns_each_ * sums_.count) / sums_.weight, 0.0, least_ns_);
  }

  mutable std::mutex mutex_;
  std::size_t turn_ = 16;
  Sums sums_;
  double least_ns_ = std::numeric_limits<double>::infinity();
  double call_ = 0, ns_each_ = 0;  // of a call without records, and of a record
  bool known_ = false;             // by calls with different numbers of records
};

}  // namespace callgate
