// SPDX-License-Identifier: Apache-2.0
// Counts, moments and bins of numbers.
#include "channel/sinks/stats.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

namespace callgate {

Histogram Histogram::powers_of_two() {
  std::vector<double> edges{-std::numeric_limits<double>::infinity()};
  for (int exponent = 64; exponent >= -32; --exponent) edges.push_back(-std::ldexp(1.0, exponent));
  for (std::size_t i = edges.size(); i-- > 0;) edges.push_back(-edges[i]);
  return of(std::move(edges));
}

Histogram Histogram::of(std::vector<double> edges) {
  auto falls = [](double edge, double next) { return !(edge < next); };  // also true for NaN
  if (edges.size() < 2 || std::ranges::adjacent_find(edges, falls) != edges.end())
    throw Error("the sink Stats", "bins with at least two increasing edges",
                std::to_string(edges.size()) + " edges that don't increase");
  std::vector<std::uint64_t> counts(edges.size() - 1);
  return {std::move(edges), std::move(counts)};
}

void Histogram::add(double value) {
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

void SumOfSquares::add_differences(std::span<const double> values, double from) {
  double most = 0;
  for (double value : values) most = std::max(most, std::abs(value - from));
  if (!take(most)) return;
  for (double value : values) sum_ += scaled_square(value - from);
}

double SumOfSquares::scaled_square(double number) const noexcept {
  const double scaled = number * half_down_ * other_half_down_;
  return scaled * scaled;
}

bool SumOfSquares::take(double number) {
  if (!std::isfinite(number)) sum_ = std::numeric_limits<double>::infinity();
  if (number == 0 || std::isinf(sum_)) return false;
  int its = 0;
  std::frexp(number, &its);
  if (sum_ == 0 || its > exponent_) {
    sum_ = std::ldexp(std::ldexp(sum_, exponent_ - its), exponent_ - its);
    exponent_ = its;
    half_down_ = std::ldexp(1.0, -(its / 2));  // 2^-its may be out of range
    other_half_down_ = std::ldexp(1.0, -(its - its / 2));
  }
  return true;
}

void Summary::merge(std::span<const double> values) {
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
  } else {  // in two steps, because neither overflows
    const double half = (its_mean / 2 - mean / 2) * (size / total);
    mean = (mean + half) + half;
  }
  count += values.size();
  const auto [least, greatest] = std::ranges::minmax(values);
  min = std::min(min, least);
  max = std::max(max, greatest);
  for (double value : values) histogram.add(value);
}

std::map<std::string, Summary> StatsSink::read() const {
  std::lock_guard lock(reading_);
  return summaries_;
}

void StatsSink::clear() {
  std::lock_guard lock(reading_);
  summaries_.clear();
}

void StatsSink::take(const Record& record) {
  NamedSources::Named& source = sources_.of("the sink Stats", *record.source);
  visit_lanes(source.views, record, [&](std::int64_t, std::span<const ArrayView> leaves) {
    for (std::size_t i = 0; i < leaves.size(); ++i) add(source.names[i], leaves[i]);
  });
}

void StatsSink::add(const std::string& name, const ArrayView& view) {
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
  if (summary.histogram.edges.empty()) summary.histogram = Histogram(empty_);  // all or nothing
  // Allocates the memory before anything is counted.
  summary.last_dims.assign(view.shape().begin(), view.shape().end());
  summary.last = values_;
  ++summary.records;
  summary.nan += static_cast<std::uint64_t>(nan);
  summary.inf += values_.size() - finite_.size() - static_cast<std::uint64_t>(nan);
  summary.merge(finite_);
}

}  // namespace callgate
