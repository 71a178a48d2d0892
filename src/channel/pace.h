// SPDX-License-Identifier: Apache-2.0
// How many records a consumer gets at once where others wait for their turn.
//
// A call of a consumer takes some time, and so does each of its records. Two calls with different
// numbers of records tell one from the other. A turn is as long as a short time allows, or as its
// call takes where that is longer: a consumer that compresses or sends each batch needs few calls
// then, and the others wait for no more than twice what it needs for one record.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
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
    if (count_ != 0 && (count >= 2 * count_ || 2 * count <= count_)) {
      ns_each_ = std::max((ns - ns_) / (count - count_), 0.0);
      known_ = true;
    } else {
      ns_each_ = count_ == 0 ? ns / count : std::min(ns_each_, ns / count);
    }
    count_ = count;
    ns_ = ns;
    const double call = std::max(ns - ns_each_ * count, 0.0);
    double fits = std::max(kTurn, call) / std::max(ns_each_, 1e-3);
    if (!known_) fits = ns <= 2 * kTurn ? std::max(fits, 2 * count) : count / 2;
    // No further than what has been seen allows: twice as many, or as many more as time was left.
    const double seen = std::max(records >= turn_ ? 2.0 * count : 0.0, count * kTurn / ns);
    const double most = std::max(static_cast<double>(turn_), seen);
    turn_ = static_cast<std::size_t>(std::clamp(std::min(fits, most), 1.0, kMost));
  }

 private:
  static constexpr double kTurn = std::chrono::nanoseconds(std::chrono::milliseconds(10)).count();
  static constexpr double kMost = 1U << 30;

  mutable std::mutex mutex_;
  std::size_t turn_ = 16;
  double count_ = 0, ns_ = 0;  // of the last call
  double ns_each_ = 0;
  bool known_ = false;  // by two calls
};

}  // namespace callgate
