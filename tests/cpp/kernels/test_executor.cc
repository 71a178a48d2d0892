// SPDX-License-Identifier: Apache-2.0
// Loops that are split over somebody else's threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "fake_executor.h"
#include "kernels/kernel_frame.h"

namespace callgate {
namespace {

// How often each index of [begin, end) was in a part; fails for indices outside.
std::vector<int> visits(Executor* executor, std::int64_t begin, std::int64_t end,
                        std::int64_t grain) {
  std::vector<std::atomic<int>> seen(
      static_cast<std::size_t>(std::max<std::int64_t>(end - begin, 0)));
  parallel_for(executor, begin, end, grain, [&](std::int64_t first, std::int64_t last) {
    EXPECT_LT(first, last);
    ASSERT_GE(first, begin);
    ASSERT_LE(last, end);
    for (std::int64_t i = first; i < last; ++i) seen[static_cast<std::size_t>(i - begin)]++;
  });
  return {seen.begin(), seen.end()};
}

bool all_once(const std::vector<int>& counts) {
  return std::ranges::all_of(counts, [](int count) { return count == 1; });
}

TEST(ParallelFor, CoversEachIndexOnce) {
  fake::Threads threads(4);
  for (std::int64_t count : {1, 2, 3, 7, 16, 17, 100, 1000, 12345}) {
    for (std::int64_t grain : {-1, 0, 1, 2, 5, 64, 1000, 1 << 20}) {
      EXPECT_TRUE(all_once(visits(&threads, 0, count, grain))) << count << " by " << grain;
      EXPECT_TRUE(all_once(visits(&threads, -5, count, grain))) << count << " by " << grain;
    }
    threads.join();
  }
}

TEST(ParallelFor, RunsNothingForAnEmptyRange) {
  fake::Threads threads(4);
  for (auto [begin, end] : {std::pair{0, 0}, {5, 5}, {5, 3}, {-1, -7}}) {
    parallel_for(&threads, begin, end, 1, [](std::int64_t, std::int64_t) { ADD_FAILURE(); });
  }
  EXPECT_EQ(threads.scheduled, 0);
}

TEST(ParallelFor, RunsOnTheCallersThreadInOnePartWithoutAnExecutor) {
  std::vector<std::pair<std::int64_t, std::int64_t>> parts;
  parallel_for(nullptr, 3, 1000, 1,
               [&](std::int64_t first, std::int64_t last) { parts.emplace_back(first, last); });
  EXPECT_EQ(parts, (std::vector<std::pair<std::int64_t, std::int64_t>>{{3, 1000}}));
}

TEST(ParallelFor, KeepsPartsAtTheGrainOrAboveButForTheLast) {
  fake::Threads threads(4);
  std::mutex mutex;
  std::vector<std::pair<std::int64_t, std::int64_t>> parts;
  parallel_for(&threads, 0, 1000, 90, [&](std::int64_t first, std::int64_t last) {
    std::scoped_lock lock(mutex);
    parts.emplace_back(first, last);
  });
  std::ranges::sort(parts);
  for (std::size_t i = 0; i + 1 < parts.size(); ++i)
    EXPECT_GE(parts[i].second - parts[i].first, 90);
  EXPECT_GT(parts.size(), 1U);
}

TEST(ParallelFor, AsksForNoMoreThreadsThanThereAreParts) {
  fake::Threads threads(8);
  EXPECT_TRUE(all_once(visits(&threads, 0, 100, 100)));
  EXPECT_EQ(threads.scheduled, 0);
  EXPECT_TRUE(all_once(visits(&threads, 0, 101, 100)));
  EXPECT_EQ(threads.scheduled, 1);
  EXPECT_TRUE(all_once(visits(&threads, 0, 10, std::numeric_limits<std::int64_t>::max())));
  EXPECT_EQ(threads.scheduled, 1);
}

TEST(ParallelFor, ReturnsWhenNoHelperEverStarts) {
  fake::Busy busy(4);
  EXPECT_TRUE(all_once(visits(&busy, 0, 1000, 1)));
  EXPECT_EQ(busy.tasks.size(), 3U);
}

TEST(ParallelFor, AHelperThatStartsAfterTheLoopFindsNothingToDo) {
  fake::Busy busy(4);
  {
    // The memory of the loop's body is gone when the tasks run.
    std::vector<int> counts = visits(&busy, 0, 1000, 1);
    EXPECT_TRUE(all_once(counts));
  }
  for (auto& task : busy.tasks) task();
}

TEST(ParallelFor, StopsAskingAnExecutorThatRefuses) {
  fake::Refusing refusing;
  EXPECT_TRUE(all_once(visits(&refusing, 0, 1000, 1)));
  EXPECT_EQ(refusing.asked, 1);
}

TEST(ParallelFor, LoopsInsideLoopsComeToAnEnd) {
  for (int round = 0; round < 20; ++round) {
    fake::Threads threads(3);
    std::vector<std::atomic<int>> seen(std::size_t{6} * 50);
    parallel_for(&threads, 0, 6, 1, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) {
        parallel_for(&threads, 0, 50, 1, [&, i](std::int64_t a, std::int64_t b) {
          for (std::int64_t j = a; j < b; ++j) seen[static_cast<std::size_t>(i * 50 + j)]++;
        });
      }
    });
    for (const auto& count : seen) EXPECT_EQ(count, 1);
  }
}

TEST(ParallelFor, WhatPartsWroteIsThereWhenItReturns) {
  // Plain memory: the thread sanitizer sees a race if the loop's end did not order it.
  fake::Threads threads(4);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::int64_t> squares(512);
    parallel_for(&threads, 0, 512, 8, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) squares[static_cast<std::size_t>(i)] = i * i;
    });
    for (std::int64_t i = 0; i < 512; ++i) EXPECT_EQ(squares[static_cast<std::size_t>(i)], i * i);
  }
}

TEST(ParallelFor, UsesSeveralThreads) {
  // Each of two parts waits for the other to start: one thread alone would never get through.
  fake::Threads threads(2);
  std::atomic<int> started{0};
  std::mutex mutex;
  std::set<std::thread::id> ids;
  parallel_for(&threads, 0, 2, 1, [&](std::int64_t, std::int64_t) {
    started.fetch_add(1);
    while (started.load() < 2) std::this_thread::yield();
    std::scoped_lock lock(mutex);
    ids.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(ids.size(), 2U);
}

}  // namespace
}  // namespace callgate
