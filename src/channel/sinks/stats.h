// The sink Stats: running statistics of each leaf of each tap, in constant memory.
//
// Filled on its channel's thread, without the GIL; read from any thread at any time. All elements
// of a leaf count alike, those of arrays and lanes included; a complex element counts with its
// absolute value. Mean and variance come from Chan's update of a batch
// (https://doi.org/10.1080/00031305.1983.10483115), which is Welford's for batches of one.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "channel/consumer.h"

namespace callgate {

// Counts of values in bins: edges[i] <= value < edges[i + 1], the last bin with its upper edge, as
// numpy.histogram has it.
struct Histogram {
  std::vector<double> edges;  // one more than counts
  std::vector<std::uint64_t> counts;
  std::uint64_t below = 0, above = 0;  // values outside the edges

  // Bins at powers of two, 2^-32 to 2^64, for each sign, between them one around zero, beyond them
  // two that are open.
  static Histogram powers_of_two();
  // Throws Error unless there are two edges at least, and each is greater than the one before.
  static Histogram of(std::vector<double> edges);

  void add(double value);
};

// Of the values that are numbers: count, mean, deviations, extremes, bins.
struct Summary {
  std::uint64_t records = 0;  // lanes count each
  std::uint64_t count = 0, nan = 0, inf = 0;
  double mean = 0;
  double deviations = 0;  // sum of (value - mean)^2
  double min = std::numeric_limits<double>::infinity();
  double max = -std::numeric_limits<double>::infinity();
  std::vector<double> last;             // all elements of the last record, NaN included
  std::vector<std::int64_t> last_dims;  // its shape
  Histogram histogram;

  // The mean of (value - mean)^2, as numpy.var; NaN without values.
  double variance() const noexcept;
};

class StatsSink final : public Consumer {
 public:
  // `edges`: of each histogram's bins; empty for powers of two.
  explicit StatsSink(std::vector<double> edges);

  void consume(std::span<const Record> records) override;
  std::string description() const override { return "Stats()"; }

  // By the leaves' names (names.h). Any thread.
  std::map<std::string, Summary> read() const;
  // Forgets all values. Any thread.
  void clear();

 private:
  struct Layout {
    // Throws Error where another tap has one of the names.
    Layout(const Source& source, std::map<std::string, std::string>& owners);
    RecordViews views;
    std::vector<std::string> names;
  };

  void add_record(const Record& record);
  void add(const std::string& name, const ArrayView& view);

  const Histogram empty_;
  std::mutex consuming_;  // guards the next three lines: Python may write beside a channel
  std::map<std::string, std::string> owners_;          // taps by their leaves' names
  std::unordered_map<std::uint64_t, Layout> layouts_;  // by Source::id
  std::vector<double> values_, finite_;                // of the current leaf

  mutable std::mutex mutex_;                  // guards what follows, for one leaf of a record
  std::map<std::string, Summary> summaries_;  // by name
};

}  // namespace callgate
