// SPDX-License-Identifier: Apache-2.0
// A full channel, policy by policy, with exact counts: a consumer is held at a door, so
// that the test says what is in delivery, what waits and what finds no room. Then memory: large
// records, the bound, and who may overtake whom.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "channel/channel.h"
#include "channel_fixtures.h"

namespace callgate {
namespace {

using fake::Collector;
using fake::Door;
using fake::eventually;
using fake::exact;
using fake::Feed;
using fake::kLimit;
using fake::make_channel;
using ::testing::ElementsAre;

// A channel whose consumer holds record 0 until the door opens. Entries of `Feed(64)` take 128
// bytes, so 1024 bytes hold 8.
struct Held {
  explicit Held(OnFull on_full, std::size_t capacity = 1024, double rate = 100)
      : channel(make_channel(on_full, capacity, rate)),
        consumer(std::make_shared<Collector>([this](std::span<const Record>) { door.pass(); })) {
    channel->add(consumer);
    EXPECT_TRUE(feed.send(*channel, 0));
    EXPECT_TRUE(door.wait_for_arrivals());
  }
  ~Held() {
    door.open();
    EXPECT_TRUE(channel->close(kLimit));
    EXPECT_TRUE(exact(channel->stats()));
    EXPECT_EQ(channel->stats().pending, 0U);
    EXPECT_TRUE(consumer->all_intact());
  }

  Door door;
  std::shared_ptr<Channel> channel;
  std::shared_ptr<Collector> consumer;
  Feed feed{64};
};

TEST(ChannelPolicy, DropNewDropsWhatFindsNoRoom) {
  Held held(OnFull::kDropNew);
  for (std::uint64_t id = 1; id < 8; ++id) EXPECT_TRUE(held.feed.send(*held.channel, id));
  for (std::uint64_t id = 8; id < 20; ++id) EXPECT_FALSE(held.feed.send(*held.channel, id));
  ChannelStats stats = held.channel->stats();
  EXPECT_EQ(stats.sent, 20U);
  EXPECT_EQ(stats.delivered, 0U);
  EXPECT_EQ(stats.dropped, 12U);
  EXPECT_EQ(stats.pending, 8U);
  EXPECT_EQ(stats.high_water, 1024U);
  held.door.open();
  ASSERT_TRUE(held.channel->flush(kLimit));
  EXPECT_THAT(held.consumer->ids(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_TRUE(held.feed.send(*held.channel, 20)) << "there is room again";
  ASSERT_TRUE(held.channel->flush(kLimit));
  EXPECT_EQ(held.consumer->items().back().seq, 20U) << "dropped records have numbers, too";
}

TEST(ChannelPolicy, DropOldKeepsTheNewest) {
  Held held(OnFull::kDropOld);
  for (std::uint64_t id = 1; id < 100; ++id) EXPECT_TRUE(held.feed.send(*held.channel, id));
  ChannelStats stats = held.channel->stats();
  EXPECT_EQ(stats.sent, 100U);
  EXPECT_EQ(stats.pending, 8U) << "one in delivery, and seven beside its copy";
  EXPECT_EQ(stats.dropped, 92U);
  EXPECT_LE(stats.high_water, 1024U);
  held.door.open();
  ASSERT_TRUE(held.channel->flush(kLimit));
  EXPECT_THAT(held.consumer->ids(), ElementsAre(0, 93, 94, 95, 96, 97, 98, 99));
}

TEST(ChannelPolicy, DropOldMakesRoomForTheLargestAndForWhatGoesBesideTheRing) {
  Held held(OnFull::kDropOld, 4096);
  Feed large(2048 - 64), aside(3000);
  for (std::uint64_t id = 1; id < 20; ++id) EXPECT_TRUE(held.feed.send(*held.channel, id));
  EXPECT_TRUE(large.send(*held.channel, 100));
  EXPECT_TRUE(aside.send(*held.channel, 200));
  EXPECT_TRUE(aside.send(*held.channel, 201)) << "drops the one before, memory and all";
  EXPECT_TRUE(large.send(*held.channel, 101));
  EXPECT_LE(held.channel->stats().high_water, 4096U * 11 / 10);
  held.door.open();
  ASSERT_TRUE(held.channel->flush(kLimit));
  EXPECT_EQ(held.consumer->ids().back(), 101U);
  EXPECT_EQ(held.channel->stats().sent, 24U);
}

TEST(ChannelPolicy, DropOldDropsTheNewWhenNothingIsLeftToDrop) {
  Held held(OnFull::kDropOld, 4096);
  Feed huge(8000);  // more than the capacity: only ever alone
  EXPECT_FALSE(huge.send(*held.channel, 1)) << "record 0 is in delivery, and can't be dropped";
  held.door.open();
  ASSERT_TRUE(held.channel->flush(kLimit));
  EXPECT_TRUE(huge.send(*held.channel, 2));
}

TEST(ChannelPolicy, SamplePassesTheFirstOfEachSourceAndThenByTime) {
  Held held(OnFull::kSample, 1024, 1e-9);  // one a second in 30 years
  Feed other(64);
  EXPECT_FALSE(held.feed.send(*held.channel, 1));
  EXPECT_TRUE(other.send(*held.channel, 2));
  EXPECT_FALSE(other.send(*held.channel, 3));
  EXPECT_EQ(held.channel->stats().dropped, 2U);
  held.door.open();
  ASSERT_TRUE(held.channel->flush(kLimit));
  EXPECT_THAT(held.consumer->ids(), ElementsAre(0, 2));
}

TEST(ChannelPolicy, SampleThatLetsAllPassDropsTheNewWhenFull) {
  Held held(OnFull::kSample, 1024, 1e18);
  for (std::uint64_t id = 1; id < 20; ++id) EXPECT_EQ(held.feed.send(*held.channel, id), id < 8);
  EXPECT_EQ(held.channel->stats().dropped, 12U);
}

TEST(ChannelPolicy, BlockWaitsForRoomAndLosesNothing) {
  Held held(OnFull::kBlock);
  std::atomic<std::uint64_t> sent{1};
  std::jthread sender([&] {
    for (std::uint64_t id = 1; id < 500; ++id) {
      EXPECT_TRUE(held.feed.send(*held.channel, id));
      sent.fetch_add(1);
    }
  });
  ASSERT_TRUE(eventually([&] { return held.channel->stats().sent == 9; }));
  EXPECT_EQ(sent.load(), 8U) << "the ninth waits";
  EXPECT_EQ(held.channel->stats().high_water, 1024U);
  held.door.open();
  sender.join();
  ASSERT_TRUE(held.channel->flush(kLimit));
  EXPECT_EQ(held.consumer->items().size(), 500U);
  EXPECT_EQ(held.channel->stats().dropped, 0U);
}

TEST(ChannelPolicy, CloseWakesThoseWhoWaitForRoom) {
  Held held(OnFull::kBlock);
  std::vector<std::jthread> senders;
  std::atomic<int> refused{0};
  for (int i = 0; i < 4; ++i) {
    senders.emplace_back([&] {
      while (held.feed.send(*held.channel, 1)) {
      }
      refused.fetch_add(1);
    });
  }
  ASSERT_TRUE(eventually([&] { return held.channel->stats().pending == 12; }));
  EXPECT_FALSE(held.channel->close(std::chrono::milliseconds(1))) << "the consumer hangs";
  for (std::jthread& sender : senders) sender.join();
  EXPECT_EQ(refused.load(), 4);
  EXPECT_EQ(held.channel->stats().dropped, 4U);
  EXPECT_EQ(held.channel->stats().pending, 8U);
}

std::atomic<bool> g_interrupt{false};

// The process's check is the test's for as long as it lasts.
struct InterruptCheck {
  InterruptCheck() {
    g_interrupt.store(false);
    Channel::set_interrupted([] { return g_interrupt.exchange(false); });
  }
  ~InterruptCheck() { Channel::set_interrupted(nullptr); }
};

TEST(ChannelPolicy, AnInterruptWakesAllWhoWaitAndLaterOnesWaitAgain) {
  InterruptCheck check;
  Held held(OnFull::kBlock);
  for (std::uint64_t id = 1; id < 8; ++id) ASSERT_TRUE(held.feed.send(*held.channel, id));
  std::vector<std::jthread> senders;
  for (int i = 0; i < 3; ++i)
    senders.emplace_back([&] { EXPECT_FALSE(held.feed.send(*held.channel, 8)); });
  ASSERT_TRUE(eventually([&] { return held.channel->stats().sent == 11; }));
  g_interrupt.store(true);
  for (std::jthread& sender : senders) sender.join();
  EXPECT_EQ(held.channel->stats().dropped, 3U);
  EXPECT_FALSE(held.feed.send(*held.channel, 8)) << "the program ends without the hung consumer";
  held.door.open();
  // Once the channel has been idle, senders wait as before.
  EXPECT_TRUE(eventually([&] {
    std::uint64_t dropped = held.channel->stats().dropped;
    for (std::uint64_t id = 0; id < 64; ++id) held.feed.send(*held.channel, id);
    return held.channel->stats().dropped == dropped;
  }));
}

TEST(ChannelPolicy, TheChannelsOwnThreadNeverWaitsForItself) {
  // Each record of the first kind makes three of the second; the ring holds eight.
  auto channel = make_channel(OnFull::kBlock, 1024);
  Feed first(64), second(64);
  std::vector<std::uint64_t> seen;
  std::uint64_t next = 0;
  channel->add(std::make_shared<Collector>([&](std::span<const Record> records) {
    for (const Record& record : records) {
      if (record.source == &second.source()) {
        std::uint64_t id = 0;
        std::memcpy(&id, record.payload, 8);
        seen.push_back(id);
      } else {
        for (int i = 0; i < 3; ++i) EXPECT_TRUE(second.send(*channel, next++));
      }
    }
  }));
  std::jthread other([&] {
    for (std::uint64_t id = 0; id < 500; ++id) EXPECT_TRUE(first.send(*channel, id));
  });
  for (std::uint64_t id = 0; id < 500; ++id) ASSERT_TRUE(first.send(*channel, id));
  other.join();
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(channel->flush(kLimit));  // the first may send more
  ASSERT_EQ(seen.size(), 3000U);
  EXPECT_TRUE(std::ranges::is_sorted(seen)) << "in the order in which the thread sent them";
  EXPECT_TRUE(channel->close(kLimit));
  EXPECT_EQ(channel->stats().delivered, 4000U);
}

TEST(ChannelPolicy, WhatTheOwnThreadSentIsDeliveredWhileOthersKeepTheRingFull) {
  auto channel = make_channel(OnFull::kBlock, 1024);
  Feed flood(64), own(64);
  std::weak_ptr<const Source> watch = own.watch();
  std::atomic<bool> stop{false};
  int sent = 0, seen = 0;
  channel->add(std::make_shared<Collector>([&](std::span<const Record> records) {
    for (const Record& record : records) {
      if (record.source->id == flood.source().id) continue;
      EXPECT_FALSE(watch.expired());
      if (++seen == 100) stop.store(true);
    }
    while (sent < 100 && own.send(*channel, 1'000'000)) ++sent;  // more than the ring holds
    if (sent == 100 && own.sender().source != nullptr) {
      channel->retire(own.source());
      own.forget();
    }
  }));
  std::vector<std::jthread> senders;
  for (int i = 0; i < 2; ++i) {
    senders.emplace_back([&] {
      for (std::uint64_t id = 0; !stop.load(); ++id) flood.send(*channel, id);
    });
  }
  for (std::jthread& sender : senders) sender.join();
  EXPECT_EQ(seen, 100);
  EXPECT_TRUE(eventually([&] { return watch.expired(); }));
  EXPECT_TRUE(channel->close(kLimit));
  EXPECT_GT(channel->stats().high_water, 1024U) << "what does not fit is counted, too";
}

// -- memory --------------------------------------------------------------------------------------

TEST(ChannelMemory, RecordsTooLargeForTheRingShareItsBudget) {
  Held held(OnFull::kDropNew, 8192);
  Feed aside(5000), small(5000 - 1904);
  EXPECT_TRUE(aside.send(*held.channel, 1));
  EXPECT_FALSE(aside.send(*held.channel, 2)) << "two are more than the capacity";
  EXPECT_FALSE(small.send(*held.channel, 3)) << "and so it is with one in the ring";
  EXPECT_TRUE(held.feed.send(*held.channel, 4));
  EXPECT_LE(held.channel->stats().high_water, 8192U);
  held.door.open();
  ASSERT_TRUE(held.channel->flush(kLimit));
  EXPECT_THAT(held.consumer->ids(), ElementsAre(0, 1, 4));
  EXPECT_TRUE(aside.send(*held.channel, 5)) << "its memory came back";
  ASSERT_TRUE(held.channel->flush(kLimit));
}

TEST(ChannelMemory, ALargeRecordDoesNotGoBesideAFullRing) {
  Held held(OnFull::kDropNew, 8192);
  std::uint64_t id = 1;
  while (held.feed.send(*held.channel, id)) ++id;
  Feed aside(5000);
  EXPECT_FALSE(aside.send(*held.channel, 1000));
  EXPECT_LE(held.channel->stats().high_water, 8192U);
}

TEST(ChannelMemory, TheLastReaderOfALargeRecordMayKeepItsMemory) {
  auto channel = make_channel(OnFull::kBlock, 8192);
  struct Lent {
    std::shared_ptr<void> first, last;
    const char* payload;
  };
  std::vector<Lent> lent;
  auto first = std::make_shared<Collector>([&](std::span<const Record> records) {
    for (const Record& record : records)
      lent.push_back({Channel::lend(record), nullptr, record.payload});
  });
  auto last = std::make_shared<Collector>([&](std::span<const Record> records) {
    for (std::size_t i = 0; i < records.size(); ++i)
      lent[lent.size() - records.size() + i].last = Channel::lend(records[i]);
  });
  channel->add_all({first, last});
  Feed large(5000), small(64);
  ASSERT_TRUE(small.send(*channel, 1));
  ASSERT_TRUE(large.send(*channel, 2));
  ASSERT_TRUE(large.send(*channel, 3)) << "what is lent is not the channel's any more";
  ASSERT_TRUE(channel->flush(kLimit));
  ASSERT_EQ(lent.size(), 3U);
  for (const Lent& one : lent) EXPECT_EQ(one.first, nullptr) << "another one still reads it";
  EXPECT_EQ(lent[0].last, nullptr) << "it lies in the ring";
  ASSERT_NE(lent[1].last, nullptr);
  EXPECT_NE(lent[1].payload, lent[2].payload);
  EXPECT_LE(channel->stats().high_water, 8192U);
  ASSERT_TRUE(channel->close(kLimit));
  channel.reset();
  EXPECT_TRUE(fake::intact(lent[1].payload, 5000)) << "it outlives the channel";
  EXPECT_TRUE(fake::intact(lent[2].payload, 5000));
  EXPECT_EQ(Channel::lend(Record{}), nullptr) << "outside of a delivery";
}

TEST(ChannelMemory, AnothersMemoryIsKeptWithALargeRecordAndNotWithASmallOne) {
  auto channel = make_channel(OnFull::kBlock, 8192);
  std::vector<std::pair<const char*, std::shared_ptr<void>>> seen;
  channel->add(std::make_shared<Collector>([&](std::span<const Record> records) {
    for (const Record& record : records) seen.emplace_back(record.payload, Channel::lend(record));
  }));
  Feed large(5000), small(64);
  std::vector<std::weak_ptr<std::vector<char>>> watches;
  std::vector<const char*> places;
  for (std::uint64_t id = 0; id < 4; ++id) {
    auto memory = std::make_shared<std::vector<char>>();
    ASSERT_TRUE((id == 3 ? small : large).send_kept(*channel, id, memory));
    watches.emplace_back(memory);
    places.push_back(memory->data());
    memory.reset();
    ASSERT_TRUE(channel->flush(kLimit));
    if (id == 1) seen[1].second.reset();  // as a consumer that did not keep it
  }
  ASSERT_EQ(seen.size(), 4U);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(seen[i].first, places[i]) << "it is not copied";
  EXPECT_NE(seen[3].first, places[3]);
  EXPECT_FALSE(watches[0].expired());
  EXPECT_TRUE(watches[1].expired());
  EXPECT_TRUE(watches[3].expired());
  ASSERT_TRUE(channel->close(kLimit));
  channel.reset();
  EXPECT_TRUE(fake::intact(seen[2].first, 5000)) << "it outlives the channel";
  seen.clear();
  for (const auto& watch : watches) EXPECT_TRUE(watch.expired());
}

TEST(ChannelMemory, AnothersMemoryCountsAndIsLetGoWhereRecordsAreDropped) {
  for (OnFull policy : {OnFull::kDropNew, OnFull::kDropOld}) {
    Held held(policy, 8192);
    Feed large(5000);
    std::vector<std::weak_ptr<std::vector<char>>> watches;
    for (std::uint64_t id = 1; id < 4; ++id) {
      auto memory = std::make_shared<std::vector<char>>();
      watches.emplace_back(memory);
      bool sent = large.send_kept(*held.channel, id, memory);
      EXPECT_EQ(sent, policy == OnFull::kDropOld || id == 1) << "two are more than the capacity";
    }
    EXPECT_LE(held.channel->stats().high_water, 8192U);
    const std::size_t left = policy == OnFull::kDropOld ? 2 : 0;
    for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(watches[i].expired(), i != left) << i;
    held.door.open();
    ASSERT_TRUE(held.channel->flush(kLimit));
    EXPECT_THAT(held.consumer->ids(), ElementsAre(0, left + 1));
    EXPECT_TRUE(held.consumer->all_intact());
    for (const auto& watch : watches) EXPECT_TRUE(watch.expired());
  }
  auto channel = make_channel(OnFull::kBlock, 8192);  // nobody ever takes it
  Feed large(5000);
  auto memory = std::make_shared<std::vector<char>>();
  std::weak_ptr<std::vector<char>> watch = memory;
  ASSERT_TRUE(large.send_kept(*channel, 1, memory));
  memory.reset();
  EXPECT_FALSE(watch.expired());
  ASSERT_TRUE(channel->close(kLimit));
  EXPECT_TRUE(watch.expired());
}

TEST(ChannelMemory, ALargeRecordOfASourceWithItsOwnConsumerIsLentToThatOne) {
  auto channel = make_channel(OnFull::kBlock, 8192);
  int lent_to_channels = 0, lent_to_own = 0;
  channel->add(std::make_shared<Collector>([&](std::span<const Record> records) {
    lent_to_channels += Channel::lend(records[0]) != nullptr;
  }));
  Feed large(5000, std::make_shared<Collector>([&](std::span<const Record> records) {
               lent_to_own += Channel::lend(records[0]) != nullptr;
             }));
  for (std::uint64_t id = 0; id < 4; ++id) ASSERT_TRUE(large.send(*channel, id));
  ASSERT_TRUE(channel->close(kLimit));
  EXPECT_EQ(lent_to_channels, 0);
  EXPECT_EQ(lent_to_own, 4);
}

TEST(ChannelMemory, ARecordLargerThanTheCapacityIsSentAlone) {
  auto channel = make_channel(OnFull::kBlock, 4096);
  auto consumer = std::make_shared<Collector>();
  channel->add(consumer);
  Feed huge(100'000), small(64);
  for (std::uint64_t id = 0; id < 60; ++id)
    ASSERT_TRUE((id % 3 == 0 ? huge : small).send(*channel, id));
  ASSERT_TRUE(channel->close(kLimit));
  EXPECT_EQ(consumer->items().size(), 60U);
  EXPECT_TRUE(consumer->all_intact());
  EXPECT_LE(channel->stats().high_water, 100'032U + 256U) << "one of them at a time";
}

TEST(ChannelMemory, ALargeRecordGetsItsTurnAmongSmallOnesThatNeverStop) {
  auto channel = make_channel(OnFull::kBlock, 4096);
  auto consumer = std::make_shared<Collector>();
  channel->add(consumer);
  std::atomic<bool> stop{false};
  std::vector<std::jthread> senders;
  Feed small(64), largest(2048 - 64), huge(100'000);
  for (int i = 0; i < 3; ++i) {
    senders.emplace_back([&] {
      while (!stop.load()) small.send(*channel, 1);
    });
  }
  EXPECT_TRUE(huge.send(*channel, 2));
  EXPECT_TRUE(largest.send(*channel, 3));
  EXPECT_TRUE(huge.send(*channel, 4));
  stop.store(true);
  senders.clear();
  ASSERT_TRUE(channel->close(kLimit));
  EXPECT_EQ(std::ranges::count_if(consumer->ids(), [](auto id) { return id != 1; }), 3);
  EXPECT_EQ(channel->stats().dropped, 0U);
}

TEST(ChannelMemory, NeverExceedsTheCapacityByMoreThanATenth) {
  constexpr std::size_t kCapacity = 64 << 10;
  for (OnFull on_full : {OnFull::kBlock, OnFull::kDropNew, OnFull::kDropOld}) {
    auto channel = make_channel(on_full, kCapacity);
    auto consumer = std::make_shared<Collector>();
    channel->add(consumer);
    Feed small(64), middle(1000), large(kCapacity * 5 / 8);
    std::vector<std::jthread> senders;
    for (std::uint64_t thread = 0; thread < 3; ++thread) {
      senders.emplace_back([&, thread] {
        for (std::uint64_t id = 0; id < 1500; ++id) {
          Feed& feed = id % 16 == 15 ? large : (id + thread) % 2 == 0 ? middle : small;
          feed.send(*channel, id);
        }
      });
    }
    std::uint64_t most = 0;
    while (channel->stats().sent < 4500) most = std::max(most, channel->stats().high_water);
    senders.clear();
    ASSERT_TRUE(channel->close(kLimit));
    EXPECT_TRUE(consumer->all_intact());
    EXPECT_LE(most, kCapacity * 11 / 10);
    EXPECT_LE(channel->stats().high_water, kCapacity * 11 / 10);
    EXPECT_EQ(consumer->items().size(), channel->stats().delivered);
    EXPECT_TRUE(on_full != OnFull::kBlock || channel->stats().dropped == 0);
  }
}

}  // namespace
}  // namespace callgate
