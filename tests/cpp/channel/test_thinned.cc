// SPDX-License-Identifier: Apache-2.0
// A rate of records, whatever the wall clock does: it is set while records come.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "channel/thinned.h"
#include "fake_records.h"

namespace callgate {
namespace {

class Counted final : public Consumer {
 public:
  void consume(std::span<const Record> records) override { count += records.size(); }
  std::size_t count = 0;
};

constexpr std::int64_t kSecond = 1'000'000'000;

// Counts the records that pass, of records made a second apart by a wall clock that is so far off.
std::size_t passed(std::vector<std::int64_t> offsets) {
  auto counted = std::make_shared<Counted>();
  Thinned thinned(counted, 1, /*rate=*/0.9);
  FakeTap tap("x", DType::kS32, {});
  const std::int64_t begin = wall_time_ns() - 1000 * kSecond;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    Record record = tap.record({bytes_of(std::vector{1})});
    record.time_ns = begin + static_cast<std::int64_t>(i) * kSecond + offsets[i];
    thinned.consume(std::vector{record});
  }
  return counted->count;
}

TEST(Thinned, ARateIsThatOfTheRecordsOwnTime) {
  EXPECT_EQ(passed(std::vector<std::int64_t>(9)), 5U);  // a second is a little too short
}

TEST(Thinned, AClockThatWentBackHoldsNothingUp) {
  std::vector<std::int64_t> offsets(20, 0);
  std::fill(offsets.begin() + 10, offsets.end(), -600 * kSecond);
  EXPECT_GE(passed(offsets), 9U);
}

TEST(Thinned, AClockThatWasAheadHoldsNothingUp) {
  std::vector<std::int64_t> offsets(20, 100'000 * kSecond);
  std::fill(offsets.begin() + 10, offsets.end(), 0);
  EXPECT_GE(passed(offsets), 5U);
}

TEST(Thinned, AHighRateLetsAllRecordsThroughThoughTwoReadingsOfTheClocksDiffer) {
  auto counted = std::make_shared<Counted>();
  std::int64_t wall = wall_time_ns(), jitter = 0;
  Thinned thinned(counted, 1, /*rate=*/1e15, [&] {
    jitter = 5'000 - jitter;  // ns, in every second batch
    return ClockTimes{wall, wall - 1000 * kSecond + jitter};
  });
  FakeTap tap("x", DType::kS32, {});
  for (int batch = 0; batch < 10; ++batch) {
    Record first = tap.record({bytes_of(std::vector{1})}), second = first;
    first.time_ns = wall + 1'000;
    second.time_ns = wall += 2'000;
    thinned.consume(std::vector{first, second});
  }
  EXPECT_EQ(counted->count, 20U);
}

}  // namespace
}  // namespace callgate
