// SPDX-License-Identifier: Apache-2.0
// The sink Stats: running statistics of each leaf of each tap, in constant memory.
//
// Updated on its channel's thread, without the GIL; read from any thread at any time. All elements
// of a leaf count alike, across arrays and lanes; a complex element counts with its absolute value.
// Mean and variance use Chan's update by batches (https://doi.org/10.1080/00031305.1983.10483115),
// which is Welford's for batches of one.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "channel/consumer.h"
#include "channel/sinks/leaves.h"
#include "core/error.h"

namespace callgate {

// Counts of values in bins, as in numpy.histogram: edges[i] <= value < edges[i + 1], the last <=.
struct Histogram {
  std::vector<double> edges;  // one more than counts
  std::vector<std::uint64_t> counts;
  std::uint64_t below = 0, above = 0;  // values outside the edges

  // Bins at powers of two, 2^-32 to 2^64, for each sign; one around zero, and two open ones beyond.
  static Histogram powers_of_two();

  // Throws Error unless there are at least two edges, in ascending order.
  static Histogram of(std::vector<double> edges);

  void add(double value);
};

// A sum of squares that overflows only if its mean does. It stores the squares of the numbers
// divided by a power of two near the greatest, which changes none of their digits.
class SumOfSquares {
 public:
  // Adds (value - from)^2 of each.
  void add_differences(std::span<const double> values, double from);

  // Adds weight * number^2.
  void add(double number, double weight) {
    if (weight > 0 && take(std::abs(number))) sum_ += weight * scaled_square(number);
  }

  // The sum divided by a count; NaN for 0 / 0.
  double over(double count) const noexcept {
    return std::ldexp(std::ldexp(sum_ / count, exponent_), exponent_);
  }

 private:
  double scaled_square(double number) const noexcept;

  // Makes room for a number's square. False if the square is zero or infinite for good.
  bool take(double number);

  double sum_ = 0;  // * 4^exponent_
  int exponent_ = 0;
  double half_down_ = 1, other_half_down_ = 1;  // the product is 2^-exponent_
};

// Statistics of the finite values: count, mean, deviations, extremes, bins.
struct Summary {
  std::uint64_t records = 0;  // each lane counts
  std::uint64_t count = 0, nan = 0, inf = 0;
  double mean = 0;
  SumOfSquares deviations;  // of value - mean
  double min = std::numeric_limits<double>::infinity();
  double max = -std::numeric_limits<double>::infinity();
  std::vector<double> last;             // all elements of the last record, including NaN
  std::vector<std::int64_t> last_dims;  // its shape
  Histogram histogram;

  // The mean of (value - mean)^2, as numpy.var; NaN without values.
  double variance() const noexcept { return deviations.over(static_cast<double>(count)); }

  // Merges the finite values of a batch into the earlier ones.
  void merge(std::span<const double> values);
};

class StatsSink final : public Sink {
 public:
  // `edges`: of each histogram's bins; empty for powers of two.
  explicit StatsSink(std::vector<double> edges)
      : empty_(edges.empty() ? Histogram::powers_of_two() : Histogram::of(std::move(edges))) {}

  std::string description() const override { return "Stats()"; }

  // By the leaves' names (leaves.h). Thread-safe.
  std::map<std::string, Summary> read() const;

  // Forgets all values. Thread-safe.
  void clear();

 private:
  void take(const Record& record) override;

  void add(const std::string& name, const ArrayView& view);

  const Histogram empty_;
  NamedSources sources_;
  std::vector<double> values_, finite_;  // of the current leaf

  mutable std::mutex reading_;  // guards the members below, for one leaf of a record at a time
  std::map<std::string, Summary> summaries_;  // by name
};

}  // namespace callgate
