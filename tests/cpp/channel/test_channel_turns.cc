// SPDX-License-Identifier: Apache-2.0
// Several consumers of a channel: a slow one holds the others up for no longer than a turn, and
// each gets all records in order, once. The order of events decides, never their time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "channel/channel.h"
#include "channel_fixtures.h"

namespace callgate {
namespace {

using fake::Collector;
using fake::count_to;
using fake::Door;
using fake::Feed;
using fake::kLimit;
using fake::make_channel;
using std::chrono::milliseconds;

// Sends records while a first delivery is held up, so that all the others wait together.
class Backlog {
 public:
  Backlog(Channel& channel, std::uint64_t count) {
    auto gate = std::make_shared<Collector>([this](std::span<const Record>) { door_.pass(); });
    channel.add(gate);
    feed_.send(channel, 0);
    EXPECT_TRUE(door_.wait_for_arrivals());
    for (std::uint64_t id = 1; id < count; ++id) feed_.send(channel, id);
    channel.request_removal(gate);
  }
  void release() { door_.open(); }
  Feed& feed() { return feed_; }

 private:
  Door door_;
  Feed feed_;
};

TEST(ChannelTurns, AFastConsumerSeesARecordBeforeTheSlowOneIsGivenMany) {
  auto channel = make_channel(OnFull::kBlock, 1 << 20);
  auto fast = std::make_shared<Collector>();
  std::uint64_t given = 0, seen_by_then = 0;
  auto slow = std::make_shared<Collector>([&](std::span<const Record> records) {
    given += records.size();
    if (given >= 100 && seen_by_then == 0) seen_by_then = fast->ids().size();
    std::this_thread::sleep_for(records.size() * milliseconds(1));
  });
  Backlog backlog(*channel, 400);
  channel->add_all({slow, fast});
  backlog.release();
  ASSERT_TRUE(channel->close(kLimit));
  EXPECT_GE(seen_by_then, 16U);
  // The first is gone with the delivery before.
  std::vector<std::uint64_t> rest = count_to(400);
  rest.erase(rest.begin());
  EXPECT_EQ(slow->ids(), rest);
  EXPECT_EQ(fast->ids(), rest);
  EXPECT_EQ(channel->stats().delivered, 400U);
}

// The cost of a call is 12 ms, that of a record nothing: 400 calls with one record each in a row
// would be the whole time of the test's limit.
TEST(ChannelTurns, AConsumerWhoseCallsAreDearGetsFewOfThem) {
  auto channel = make_channel(OnFull::kBlock, 1 << 20);
  auto fast = std::make_shared<Collector>();
  int calls = 0;
  auto dear = std::make_shared<Collector>([&](std::span<const Record>) {
    ++calls;
    std::this_thread::sleep_for(milliseconds(12));
  });
  Backlog backlog(*channel, 2000);
  channel->add_all({dear, fast});
  backlog.release();
  ASSERT_TRUE(channel->close(kLimit));
  std::vector<std::uint64_t> rest = count_to(2000);
  rest.erase(rest.begin());
  EXPECT_EQ(dear->ids(), rest);
  EXPECT_EQ(fast->ids(), rest);
  EXPECT_LE(calls, 60);
}

std::size_t turn_after(Pace& pace, double call_ms, double record_ms, int turns) {
  std::size_t most = 0;
  for (int i = 0; i < turns; ++i) {
    const std::size_t count = pace.turn();
    most = std::max(most, count);
    pace.took(static_cast<std::int64_t>((call_ms + record_ms * static_cast<double>(count)) * 1e6),
              count);
  }
  return most;
}

TEST(ChannelTurns, ATurnIsAsLongAsATimeOrAsItsCall) {
  Pace by_record(16), by_call(16), both(16), quick(16);
  turn_after(by_record, 0, 5, 5);
  EXPECT_EQ(by_record.turn(), 2U);                  // of 10 ms
  EXPECT_LE(turn_after(by_record, 0, 5, 100), 4U);  // tries another number now and then
  turn_after(by_call, 25, 0.001, 20);
  EXPECT_GE(by_call.turn(), 1000U);
  turn_after(both, 25, 0.5, 20);
  EXPECT_NEAR(static_cast<double>(both.turn()), 50, 1);  // another 25 ms
  turn_after(quick, 0, 0.001, 3);
  EXPECT_GE(quick.turn(), 5000U);
  turn_after(by_call, 0, 5, 5);  // it has changed
  EXPECT_LE(by_call.turn(), 2U);
  turn_after(by_record, 200, 0.1, 20);
  EXPECT_GE(by_record.turn(), 1000U);
}

// Noise that multiplies each call's time by up to 8 must not lead to many calls.
TEST(ChannelTurns, ABusyMachineDoesNotMakeCallsMany) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> exponent(0, 3);
    Pace pace(16);
    int calls = 0;
    for (std::size_t left = 20'000; left != 0; ++calls) {
      const std::size_t count = std::min(left, pace.turn());
      const double ms = (100 + 0.05 * static_cast<double>(count)) * std::exp2(exponent(random));
      pace.took(static_cast<std::int64_t>(ms * 1e6), count);
      left -= count;
    }
    EXPECT_LE(calls, 250) << "seed " << seed;
  }
}

TEST(ChannelTurns, ASlowFirstCallDoesNotMakeCallsMany) {
  for (double first : {1.8, 3.0, 8.0}) {
    Pace pace(16);
    int calls = 0;
    for (std::size_t left = 1'000; left != 0; ++calls) {
      const std::size_t count = std::min(left, pace.turn());
      const double ms = (15 + 0.01 * static_cast<double>(count)) * (calls == 0 ? first : 1);
      pace.took(static_cast<std::int64_t>(ms * 1e6), count);
      left -= count;
    }
    EXPECT_LE(calls, 12) << first;
  }
}

TEST(ChannelTurns, AFewRecordsAtATimeMakeTurnsNoSmaller) {
  Pace pace(16);
  turn_after(pace, 25, 0.1, 20);
  const std::size_t before = pace.turn();
  for (int i = 0; i < 10; ++i) pace.took(25'100'000, 1);
  EXPECT_GE(pace.turn(), before / 2);
}

TEST(ChannelTurns, WhatComesWhileOneIsBehindGoesToTheOthersAtOnce) {
  auto channel = make_channel(OnFull::kBlock, 1 << 20);
  Feed feed;
  auto fast = std::make_shared<Collector>();
  std::uint64_t given = 0;
  bool was_there = false;
  std::promise<void> decided;
  auto slow = std::make_shared<Collector>([&](std::span<const Record> records) {
    given += records.size();
    if (given >= 50 && given - records.size() < 50)
      for (std::uint64_t id = 400; id < 410; ++id) feed.send(*channel, id);
    // All that time one turn is a few records.
    if (given >= 300 && given - records.size() < 300) {
      was_there = fast->ids().back() >= 400;
      decided.set_value();
    }
    std::this_thread::sleep_for(records.size() * milliseconds(2));
  });
  Backlog backlog(*channel, 400);
  channel->add_all({slow, fast});
  backlog.release();
  // Only then: a delivery that a flush waits for gets no more records.
  ASSERT_EQ(decided.get_future().wait_for(kLimit), std::future_status::ready);
  ASSERT_TRUE(channel->flush(kLimit));
  EXPECT_TRUE(was_there);
  EXPECT_EQ(slow->ids(), fast->ids());
  EXPECT_EQ(fast->ids().size(), 409U);
  EXPECT_TRUE(channel->close(kLimit));
}

TEST(ChannelTurns, ALoneConsumerGetsAllAtOnce) {
  auto channel = make_channel(OnFull::kBlock, 1 << 20);
  std::vector<std::size_t> sizes;
  auto lone = std::make_shared<Collector>(
      [&](std::span<const Record> records) { sizes.push_back(records.size()); });
  Backlog backlog(*channel, 400);
  channel->add(lone);
  backlog.release();
  ASSERT_TRUE(channel->close(kLimit));
  EXPECT_THAT(sizes, ::testing::ElementsAre(399U));
}

class OneByOne final : public Consumer {
 public:
  explicit OneByOne(std::function<void()> each)
      : Consumer(/*one_by_one=*/true), each_(std::move(each)) {}
  void consume(std::span<const Record> records) override {
    for (std::size_t i = 0; i < records.size(); ++i) each_();
  }

 private:
  std::function<void()> each_;
};

// Takes 6 ms for a record, so that a turn is a few, and notes how far the count is behind.
struct Behind {
  // `before`: records that are delivered without it.
  Behind(Channel& channel, std::uint64_t before) : channel_(channel), before_(before) {}
  void operator()() {
    const std::uint64_t delivered = channel_.stats().delivered - before_;
    EXPECT_LE(delivered, had_);
    most_ = std::max(most_, had_ - delivered);
    ++had_;
    std::this_thread::sleep_for(milliseconds(6));
  }

  // Closes the channel, which got 100 records.
  void expect_at_the_end(std::uint64_t had) {
    ASSERT_TRUE(channel_.close(kLimit));
    EXPECT_EQ(had_, had);
    EXPECT_LE(most_, 8U);
    EXPECT_EQ(channel_.stats().delivered, 100U);
  }

  Channel& channel_;
  std::uint64_t before_, had_ = 0, most_ = 0;
};

TEST(ChannelTurns, ALoneConsumerThatGoesOneByOneIsCountedAfterEachTurn) {
  auto channel = make_channel(OnFull::kBlock, 1 << 20);
  Behind behind(*channel, 1);
  Backlog backlog(*channel, 100);
  channel->add(std::make_shared<OneByOne>([&] { behind(); }));
  backlog.release();
  behind.expect_at_the_end(99);
}

TEST(ChannelTurns, ASourcesOwnConsumerIsCountedAfterEachTurn) {
  auto channel = make_channel(OnFull::kBlock, 1 << 20);
  Behind behind(*channel, 0);
  Feed feed(8, std::make_shared<OneByOne>([&] { behind(); }));
  for (std::uint64_t id = 0; id < 100; ++id) feed.send(*channel, id);
  channel->start();
  behind.expect_at_the_end(100);
}

TEST(ChannelTurns, WhatAllHaveHadIsDelivered) {
  auto channel = make_channel(OnFull::kBlock, 1 << 20);
  Behind behind(*channel, 1);
  auto fast = std::make_shared<Collector>();
  Backlog backlog(*channel, 100);
  channel->add_all({fast, std::make_shared<OneByOne>([&] { behind(); })});
  backlog.release();
  behind.expect_at_the_end(99);
}

TEST(ChannelTurns, ARemovalWaitsForOneDeliveryAlthoughRecordsNeverStop) {
  auto channel = make_channel(OnFull::kBlock, 1 << 20);
  auto slow = std::make_shared<Collector>([](std::span<const Record> records) {
    std::this_thread::sleep_for(records.size() * milliseconds(1));
  });
  auto fast = std::make_shared<Collector>();
  channel->add_all({slow, fast});
  std::atomic<bool> stop{false};
  std::jthread sender([&] {
    Feed feed;
    for (std::uint64_t id = 0; !stop.load(); ++id) {
      feed.send(*channel, id);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  });
  ASSERT_TRUE(fast->wait_for(20));
  channel->remove(slow);
  const std::size_t had = slow->ids().size();
  ASSERT_TRUE(fast->wait_for(fast->ids().size() + 20));
  stop.store(true);
  sender.join();
  ASSERT_TRUE(channel->close(kLimit));
  EXPECT_EQ(slow->ids(), count_to(had));
  EXPECT_EQ(fast->ids(), count_to(channel->stats().sent));
}

TEST(ChannelTurns, OneThatLeavesInItsTurnGetsNoOther) {
  auto channel = make_channel(OnFull::kBlock, 1 << 20);
  std::shared_ptr<Collector> leaver;
  leaver = std::make_shared<Collector>([&](std::span<const Record>) { channel->remove(leaver); });
  auto other = std::make_shared<Collector>();
  Backlog backlog(*channel, 100);
  channel->add_all({leaver, other});
  backlog.release();
  ASSERT_TRUE(channel->close(kLimit));
  EXPECT_EQ(leaver->ids().size(), 16U);
  EXPECT_EQ(other->ids().size(), 99U);
  leaver.reset();
}

}  // namespace
}  // namespace callgate
