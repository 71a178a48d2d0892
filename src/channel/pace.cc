// SPDX-License-Identifier: Apache-2.0
// The duration of a consumer's turn, fitted to earlier turns.
#include "channel/pace.h"

#include <algorithm>

namespace callgate {

std::size_t Pace::turn() const {
  std::lock_guard lock(mutex_);
  return turn_;
}

void Pace::took(std::int64_t nanoseconds, std::size_t records) {
  std::lock_guard lock(mutex_);
  const auto ns = static_cast<double>(std::max<std::int64_t>(nanoseconds, 1));
  const auto count = static_cast<double>(records);
  // A call that contradicts the earlier ones takes over their weight, because the consumer has
  // changed. So does the second call, because the first one opens files and loads code.
  const double odds = 2 * std::max(kTurn, call_ + ns_each_ * count) / ns;
  remember(ns, count, ++calls_ == 2 ? 0 : known_ ? std::min(kKept, odds * odds) : kKept);
  fit();
  double fits = std::max(kTurn, call_) / std::max(ns_each_, 1e-3);
  if (!known_) fits = ns <= 2 * kTurn || count == 1 ? std::max(fits, 2 * count) : count / 2;
  // Grows only as far as the measurements allow: to twice the count, or in proportion to the
  // remaining time.
  const double seen = std::max(records >= turn_ ? 2 * count : 0.0, count * kTurn / ns);
  double most = std::max(static_cast<double>(turn_), seen);
  const double long_turn = kTooLong * std::max(kTurn, call_);
  if (known_ && ns > long_turn) most = count * long_turn / ns;
  turn_ = static_cast<std::size_t>(std::clamp(std::min(fits, most), 1.0, kMost));
}

void Pace::remember(double ns, double count, double kept) {
  least_ns_ = kept < kKept ? ns : std::min(ns, kGrown * least_ns_);
  const double weight = 1 / ns;
  auto add = [&](double& sum, double more) { sum = kept * sum + more; };
  add(sums_.weight, weight);
  add(sums_.count, weight * count);
  add(sums_.ns, 1);
  add(sums_.count_count, weight * count * count);
  add(sums_.count_ns, count);
}

void Pace::fit() {
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

}  // namespace callgate
