// SPDX-License-Identifier: Apache-2.0
// A feed's items on their way to programs: in order, all of them, and never half of one.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <thread>
#include <vector>

#include "core/item_queue.h"

namespace callgate {
namespace {

using std::chrono::milliseconds;

// Items of one number, and of as many bytes as make a copy that could be torn.
constexpr std::size_t kWords = 512;
using Words = std::array<std::uint64_t, kWords>;

class Items : public ::testing::Test {
 protected:
  bool put(std::uint64_t number) {
    Words words;
    words.fill(number);
    const void* const arrays[] = {&number, words.data()};
    return queue.put(arrays);
  }
  // The numbers of as many items, or none; an item whose arrays don't belong together fails.
  std::vector<std::uint64_t> take(std::size_t lanes = 1) {
    std::vector<std::uint64_t> numbers(lanes);
    std::vector<Words> words(lanes);
    std::int64_t of_numbers[] = {static_cast<std::int64_t>(lanes)};
    std::int64_t of_words[] = {static_cast<std::int64_t>(lanes), kWords};
    const ArrayView results[] = {{numbers.data(), of_numbers, 1, DType::kU64},
                                 {words.data(), of_words, 2, DType::kU64}};
    if (!queue.take(results)) return {};
    for (std::size_t lane = 0; lane < lanes; ++lane)
      EXPECT_TRUE(std::ranges::all_of(words[lane], [&](auto w) { return w == numbers[lane]; }));
    return numbers;
  }

  ItemQueue queue{{sizeof(std::uint64_t), sizeof(Words)}, 4, 2};
};

using Taken = std::vector<std::uint64_t>;

TEST_F(Items, ComeInOrder) {
  for (std::uint64_t i = 0; i < 4; ++i) EXPECT_TRUE(put(i));
  EXPECT_FALSE(queue.has_room());
  for (std::uint64_t i = 0; i < 4; ++i) EXPECT_EQ(take(), Taken{i});
  EXPECT_TRUE(queue.has_room());
  EXPECT_EQ(queue.taken(), 4u);
}

TEST_F(Items, LanesTakeOneEachOrNone) {
  for (std::uint64_t i = 0; i < 3; ++i) put(i);
  EXPECT_EQ(take(4), Taken{});
  EXPECT_EQ(queue.size(), 3u);
  EXPECT_EQ(take(2), (Taken{0, 1}));
  EXPECT_EQ(take(1), Taken{2});
}

TEST_F(Items, MoreLanesThanWaitAtOnceAreNotWaitedFor) {
  EXPECT_EQ(take(5), Taken{});
  EXPECT_EQ(queue.waited(), 0u);
}

TEST_F(Items, OneThatComesSoonIsWaitedFor) {
  std::uint64_t attempts = 0;
  while (queue.waited() == 0) {  // the machine may be too busy for it to come in time
    ASSERT_LT(++attempts, 1000u);
    auto later = std::async(std::launch::async, [&] {
      std::this_thread::sleep_for(milliseconds(0));
      put(7);
    });
    if (Taken got = take(); !got.empty()) {
      EXPECT_EQ(got, Taken{7});
    } else {
      later.get();
      EXPECT_EQ(take(), Taken{7});
    }
  }
}

TEST_F(Items, WhoPutsThemRestsWhileThereIsNoRoom) {
  for (std::uint64_t i = 0; i < 4; ++i) put(i);
  auto room = std::async(std::launch::async, [&] { return queue.wait_for_room(); });
  EXPECT_EQ(room.wait_for(milliseconds(50)), std::future_status::timeout);
  take();
  take();
  EXPECT_TRUE(room.get());
}

TEST_F(Items, LeavingGivesThemBackAndWakesWhoWaits) {
  for (std::uint64_t i = 0; i < 4; ++i) put(i);
  auto room = std::async(std::launch::async, [&] { return queue.wait_for_room(); });
  EXPECT_EQ(queue.leave().size(), 4u);
  EXPECT_FALSE(room.get());
  EXPECT_FALSE(put(4));
  EXPECT_EQ(take(), Taken{});
  EXPECT_FALSE(queue.pop().has_value());
  EXPECT_FALSE(queue.wait_for_room());
}

TEST_F(Items, ManyThreadsTakeEachOnce) {
  constexpr std::uint64_t kItems = 5000;
  std::atomic<std::uint64_t> sum{0}, count{0};
  std::vector<std::thread> takers;
  for (int i = 0; i < 3; ++i)
    takers.emplace_back([&, lanes = static_cast<std::size_t>(i % 2 + 1)] {
      std::uint64_t last = 0;
      while (count < kItems)
        for (std::uint64_t number : take(count + 3 > kItems ? 1 : lanes)) {
          EXPECT_TRUE(number == 0 || number > last || last == 0);
          last = number;
          sum += number;
          ++count;
        }
    });
  for (std::uint64_t i = 0; i < kItems; ++i) {
    ASSERT_TRUE(queue.wait_for_room());
    ASSERT_TRUE(put(i));
  }
  for (std::thread& taker : takers) taker.join();
  EXPECT_EQ(sum, kItems * (kItems - 1) / 2);
  EXPECT_EQ(queue.taken(), kItems);
}

}  // namespace
}  // namespace callgate
