// SPDX-License-Identifier: Apache-2.0
// The sink Stats: running statistics of each leaf of each tap, in constant memory.
//
// Filled on its channel's thread, without the GIL; read from any thread at any time. All elements
// of a leaf count alike, those of arrays and lanes included; a complex element counts with its
// absolute value. Mean and variance come from Chan's update of a batch
// (https://doi.org/10.1080/00031305.1983.10483115), which is Welford's for batches of one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
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

// Counts of values in bins, as numpy.histogram's: edges[i] <= value < edges[i + 1], the last <=.
struct Histogram {
  std::vector<double> edges;  // one more than counts
  std::vector<std::uint64_t> counts;
  std::uint64_t below = 0, above = 0;  // values outside the edges

  // Bins at powers of two, 2^-32 to 2^64, for each sign; one around zero, two open ones beyond.
  static Histogram powers_of_two() {
    std::vector<double> edges{-std::numeric_limits<double>::infinity()};
    for (int exponent = 64; exponent >= -32; --exponent)
      edges.push_back(-std::ldexp(1.0, exponent));
    for (std::size_t i = edges.size(); i-- > 0;) edges.push_back(-edges[i]);
    return of(std::move(edges));
  }

  // Throws Error unless there are two edges at least, and each is greater than the one before.
  static Histogram of(std::vector<double> edges) {
    auto falls = [](double edge, double next) { return !(edge < next); };  // NaN as well
    if (edges.size() < 2 || std::ranges::adjacent_find(edges, falls) != edges.end())
      throw Error("the sink Stats", "bins with two edges or more, each greater than the one before",
                  std::to_string(edges.size()) + " edges that are not");
    std::vector<std::uint64_t> counts(edges.size() - 1);
    return {std::move(edges), std::move(counts)};
  }

  void add(double value) {
    if (value < edges.front()) {
      ++below;
    } else if (value > edges.back()) {
      ++above;
    } else {
      const auto upper = std::ranges::upper_bound(edges, value);
      const auto bin = static_cast<std::size_t>(upper - edges.begin()) - 1;
      ++counts[std::min(bin, counts.size() - 1)];
    }
  }
};

// A sum of squares that overflows where its mean does, and not before: it holds that of the numbers
// divided by a power of two near the greatest, which changes no digit of them.
class SumOfSquares {
 public:
  // Adds (value - from)^2 of each.
  void add_differences(std::span<const double> values, double from) {
    double most = 0;
    for (double value : values) most = std::max(most, std::abs(value - from));
    if (!take(most)) return;
    for (double value : values) sum_ += scaled_square(value - from);
  }

  // Adds weight * number^2.
  void add(double number, double weight) {
    if (weight > 0 && take(std::abs(number))) sum_ += weight * scaled_square(number);
  }

  // The sum divided by a count; NaN for 0 / 0.
  double over(double count) const noexcept {
    return std::ldexp(std::ldexp(sum_ / count, exponent_), exponent_);
  }

 private:
  double scaled_square(double number) const noexcept {
    const double scaled = number * half_down_ * other_half_down_;
    return scaled * scaled;
  }

  // Makes room for a number's square. False if that is nothing to add, or too much for ever.
  bool take(double number) {
    if (!std::isfinite(number)) sum_ = std::numeric_limits<double>::infinity();
    if (number == 0 || std::isinf(sum_)) return false;
    int its = 0;
    std::frexp(number, &its);
    if (sum_ == 0 || its > exponent_) {
      sum_ = std::ldexp(std::ldexp(sum_, exponent_ - its), exponent_ - its);
      exponent_ = its;
      half_down_ = std::ldexp(1.0, -(its / 2));  // 2^-its may be no number
      other_half_down_ = std::ldexp(1.0, -(its - its / 2));
    }
    return true;
  }

  double sum_ = 0;  // * 4^exponent_
  int exponent_ = 0;
  double half_down_ = 1, other_half_down_ = 1;  // the product is 2^-exponent_
};

// Of the values that are numbers: count, mean, deviations, extremes, bins.
struct Summary {
  std::uint64_t records = 0;  // lanes count each
  std::uint64_t count = 0, nan = 0, inf = 0;
  double mean = 0;
  SumOfSquares deviations;  // of value - mean
  double min = std::numeric_limits<double>::infinity();
  double max = -std::numeric_limits<double>::infinity();
  std::vector<double> last;             // all elements of the last record, NaN included
  std::vector<std::int64_t> last_dims;  // its shape
  Histogram histogram;

  // The mean of (value - mean)^2, as numpy.var; NaN without values.
  double variance() const noexcept { return deviations.over(static_cast<double>(count)); }

  // Merges the finite values of a batch into what came before.
  void merge(std::span<const double> values) {
    if (values.empty()) return;
    const auto size = static_cast<double>(values.size());
    double its_mean = 0;
    for (double value : values) its_mean += value / size;  // a sum might overflow
    deviations.add_differences(values, its_mean);
    const auto before = static_cast<double>(count), total = before + size;
    const double delta = its_mean - mean;
    deviations.add(delta, before * size / total);
    if (std::isfinite(delta)) {
      mean += delta * (size / total);
    } else {  // in two steps, as neither overflows
      const double half = (its_mean / 2 - mean / 2) * (size / total);
      mean = (mean + half) + half;
    }
    count += values.size();
    const auto [least, greatest] = std::ranges::minmax(values);
    min = std::min(min, least);
    max = std::max(max, greatest);
    for (double value : values) histogram.add(value);
  }
};

class StatsSink final : public Sink {
 public:
  // `edges`: of each histogram's bins; empty for powers of two.
  explicit StatsSink(std::vector<double> edges)
      : empty_(edges.empty() ? Histogram::powers_of_two() : Histogram::of(std::move(edges))) {}

  std::string description() const override { return "Stats()"; }

  // By the leaves' names (leaves.h). Any thread.
  std::map<std::string, Summary> read() const {
    std::lock_guard lock(reading_);
    return summaries_;
  }

  // Forgets all values. Any thread.
  void clear() {
    std::lock_guard lock(reading_);
    summaries_.clear();
  }

 private:
  void take(const Record& record) override {
    NamedSources::Named& source = sources_.of("the sink Stats", *record.source);
    visit_lanes(source.views, record, [&](std::int64_t, std::span<const ArrayView> leaves) {
      for (std::size_t i = 0; i < leaves.size(); ++i) add(source.names[i], leaves[i]);
    });
  }

  void add(const std::string& name, const ArrayView& view) {
    values_.clear();
    each_element(view, [&](auto element) {
      if constexpr (requires { element.imag(); }) {
        values_.push_back(std::hypot(element.real(), element.imag()));
      } else {
        values_.push_back(static_cast<double>(element));
      }
    });
    finite_.clear();
    std::ranges::copy_if(values_, std::back_inserter(finite_),
                         [](double value) { return std::isfinite(value); });
    const auto nan = std::ranges::count_if(values_, [](double value) { return std::isnan(value); });
    std::lock_guard lock(reading_);
    Summary& summary = summaries_.try_emplace(name).first->second;
    if (summary.histogram.edges.empty()) summary.histogram = Histogram(empty_);  // whole, or not
    // What takes memory, before anything is counted.
    summary.last_dims.assign(view.shape().begin(), view.shape().end());
    summary.last = values_;
    ++summary.records;
    summary.nan += static_cast<std::uint64_t>(nan);
    summary.inf += values_.size() - finite_.size() - static_cast<std::uint64_t>(nan);
    summary.merge(finite_);
  }

  const Histogram empty_;
  NamedSources sources_;
  std::vector<double> values_, finite_;  // of the current leaf

  mutable std::mutex reading_;                // guards what follows, for one leaf of a record
  std::map<std::string, Summary> summaries_;  // by name
};

}  // namespace callgate
