// See the header.
#include "channel/sinks/stats.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstddef>
#include <ranges>
#include <utility>

#include "channel/consumer.h"
#include "channel/sinks/elements.h"
#include "channel/sinks/names.h"
#include "core/error.h"

namespace callgate {
namespace {

constexpr int kSmallestValue = -32, kGreatest = 64;  // exponents of the inner edges

double to_double(std::complex<float> value) { return std::hypot(value.real(), value.imag()); }
double to_double(std::complex<double> value) { return std::hypot(value.real(), value.imag()); }
template <typename T>
double to_double(T value) {
  return static_cast<double>(value);
}

// Merges the values of a batch into what came before: the counts, the mean and the deviations.
void merge(Summary& summary, std::span<const double> values) {
  if (values.empty()) return;
  const auto count = static_cast<double>(values.size());
  double mean = 0, deviations = 0;
  for (double value : values) mean += value / count;  // a sum might overflow
  for (double value : values) deviations += (value - mean) * (value - mean);
  const auto before = static_cast<double>(summary.count), total = before + count;
  const double delta = mean - summary.mean;
  summary.mean += delta * (count / total);
  summary.deviations += deviations + delta * delta * (before * count / total);
  summary.count += values.size();
  const auto [least, greatest] = std::minmax_element(values.begin(), values.end());
  summary.min = std::min(summary.min, *least);
  summary.max = std::max(summary.max, *greatest);
  for (double value : values) summary.histogram.add(value);
}

std::string quoted(const std::string& name) {
  std::string text = "'";
  return text.append(name).append("'");
}

}  // namespace

Histogram Histogram::powers_of_two() {
  std::vector<double> positive;
  for (int exponent = kSmallestValue; exponent <= kGreatest; ++exponent)
    positive.push_back(std::ldexp(1.0, exponent));
  positive.push_back(std::numeric_limits<double>::infinity());
  std::vector<double> edges;
  for (double edge : std::views::reverse(positive)) edges.push_back(-edge);
  edges.insert(edges.end(), positive.begin(), positive.end());
  return of(std::move(edges));
}

Histogram Histogram::of(std::vector<double> edges) {
  bool ordered = edges.size() >= 2;
  for (std::size_t i = 1; i < edges.size(); ++i) ordered = ordered && edges[i - 1] < edges[i];
  if (!ordered)
    throw Error(ErrorCode::kInvalidArgument, "the sink Stats",
                "bins with two edges or more, each greater than the one before",
                std::to_string(edges.size()) + " edges that are not");
  Histogram histogram;
  histogram.counts.assign(edges.size() - 1, 0);
  histogram.edges = std::move(edges);
  return histogram;
}

void Histogram::add(double value) {
  if (value < edges.front()) {
    ++below;
  } else if (value > edges.back()) {
    ++above;
  } else {
    const auto upper = std::upper_bound(edges.begin(), edges.end(), value);
    const auto bin = static_cast<std::size_t>(upper - edges.begin()) - 1;
    ++counts[std::min(bin, counts.size() - 1)];
  }
}

double Summary::variance() const noexcept {
  return deviations / static_cast<double>(count);  // 0 / 0 is NaN
}

StatsSink::StatsSink(std::vector<double> edges)
    : empty_(edges.empty() ? Histogram::powers_of_two() : Histogram::of(std::move(edges))) {}

StatsSink::Layout::Layout(const Source& source, std::map<std::string, std::string>& owners)
    : views(source) {
  check_names("Stats", source);
  for (std::size_t i = 0; i < source.values(); ++i) {
    const std::string& name = names.emplace_back(column_name(source, source.leaves[i]));
    const std::string& owner = owners.try_emplace(name, source.name).first->second;
    if (owner == source.name) continue;  // {"b": x} of the tap 'a', and the tap 'a/b'
    throw Error(ErrorCode::kInvalidArgument, "the sink Stats",
                quoted(name).append(" of the tap ").append(quoted(owner)),
                "that of the tap " + quoted(source.name));
  }
}

void StatsSink::consume(std::span<const Record> records) {
  std::lock_guard lock(consuming_);
  auto take = [&](const Record& record) { add_record(record); };
  consume_each(*this, records, [] {}, take, [] {});
}

void StatsSink::add_record(const Record& record) {
  const Source& source = *record.source;
  Layout& layout = layouts_.try_emplace(source.id, source, owners_).first->second;
  visit_lanes(*this, layout.views, record, [&](std::int64_t, std::span<const ArrayView> leaves) {
    for (std::size_t i = 0; i < leaves.size(); ++i) add(layout.names[i], leaves[i]);
  });
}

void StatsSink::add(const std::string& name, const ArrayView& view) {
  values_.clear();
  finite_.clear();
  std::uint64_t nan = 0;
  each_element(view, [&](auto element) {
    const double value = to_double(element);
    values_.push_back(value);
    if (std::isfinite(value)) finite_.push_back(value);
    nan += std::isnan(value) ? 1 : 0;
  });
  std::lock_guard lock(mutex_);
  Summary& summary = summaries_.try_emplace(name).first->second;
  if (summary.histogram.edges.empty()) summary.histogram = Histogram(empty_);  // whole, or not
  // What takes memory, before anything is counted.
  summary.last_dims.assign(view.shape().begin(), view.shape().end());
  summary.last = values_;
  ++summary.records;
  summary.nan += nan;
  summary.inf += values_.size() - finite_.size() - nan;
  merge(summary, finite_);
}

std::map<std::string, Summary> StatsSink::read() const {
  std::lock_guard lock(mutex_);
  return summaries_;
}

void StatsSink::clear() {
  std::lock_guard lock(mutex_);
  summaries_.clear();
}

}  // namespace callgate
