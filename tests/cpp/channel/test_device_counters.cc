// SPDX-License-Identifier: Apache-2.0
// The counts that number the records of each device.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <thread>
#include <vector>

#include "channel/record.h"

namespace callgate {
namespace {

TEST(DeviceCounters, EachDeviceCountsFromZeroWhateverItsId) {
  DeviceCounters counters;
  for (std::uint64_t round = 0; round < 3; ++round)
    for (std::int64_t device : {0, 256, 2048, 4096, 1, -1, 1 << 30})
      EXPECT_EQ(counters.next(device), round) << device;
  EXPECT_EQ(counters.sum(), 21U);
}

TEST(DeviceCounters, MoreDevicesThanAProcessHasShareOneCount) {
  DeviceCounters counters;
  for (std::int64_t device = 0; device < 256; ++device) EXPECT_EQ(counters.next(device), 0U);
  std::set<std::uint64_t> numbers;
  for (std::int64_t device = 256; device < 300; ++device) numbers.insert(counters.next(device));
  EXPECT_EQ(numbers.size(), 44U);  // no number twice
  EXPECT_EQ(counters.next(7), 1U);
  EXPECT_EQ(counters.sum(), 301U);
}

TEST(DeviceCounters, AddGoesOnFromWhereTheOtherStands) {
  DeviceCounters before, after;
  for (int i = 0; i < 5; ++i) before.next(2048);
  before.next(4096);
  after.next(4096);  // in the slot that 2048 would have been first to take
  after.add(before);
  EXPECT_EQ(after.next(2048), 5U);
  EXPECT_EQ(after.next(4096), 2U);
  EXPECT_EQ(after.sum(), 9U);
}

TEST(DeviceCounters, ThreadsThatCountFirstAtOnceGetEachNumberOnce) {
  constexpr int kThreads = 4, kEach = 2000;
  DeviceCounters counters;
  std::vector<std::vector<std::uint64_t>> numbers(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&counters, &mine = numbers[static_cast<std::size_t>(t)]] {
      for (int i = 0; i < kEach; ++i) mine.push_back(counters.next(std::int64_t{2048} * (i % 8)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::multiset<std::uint64_t> all;
  for (const auto& mine : numbers) all.insert(mine.begin(), mine.end());
  for (std::uint64_t number = 0; number < kThreads * kEach / 8; ++number)
    EXPECT_EQ(all.count(number), 8U) << number;
}

}  // namespace
}  // namespace callgate
