// SPDX-License-Identifier: Apache-2.0
// Channels by name: what is sent while none is open waits for the next, and nothing is lost, comes
// twice or gets a number twice when channels change places under threads that never stop sending.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "channel/tap.h"
#include "channel_fixtures.h"

namespace callgate {
namespace {

using fake::Collector;
using fake::Door;
using fake::exact;
using fake::Feed;
using fake::kLimit;
using fake::make_channel;
using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// An open channel with one consumer, closed when it goes.
struct Open {
  explicit Open(ChannelSlot& slot, OnFull on_full = OnFull::kBlock, std::size_t capacity = 1 << 20)
      : slot(slot), channel(make_channel(on_full, capacity)) {
    slot.open(channel);
    channel->add(consumer);
  }
  ~Open() { close(); }
  void close() {
    slot.vacate(*channel);
    EXPECT_TRUE(channel->close(kLimit));
  }

  ChannelSlot& slot;
  std::shared_ptr<Channel> channel;
  std::shared_ptr<Collector> consumer = std::make_shared<Collector>();
};

TEST(ChannelSlot, WhatIsSentWhileNoneIsOpenWaitsForTheNext) {
  ChannelSlot slot("held");
  Feed feed, large(600'000);
  EXPECT_EQ(slot.open_channel(), nullptr);
  for (std::uint64_t id = 0; id < 3; ++id) EXPECT_TRUE(feed.send(slot, id));
  EXPECT_TRUE(large.send(slot, 3));
  EXPECT_EQ(slot.current()->stats().pending, 4U);
  Open open(slot);
  EXPECT_EQ(slot.open_channel(), open.channel);
  EXPECT_TRUE(feed.send(slot, 4));
  ASSERT_TRUE(open.channel->flush(kLimit));
  EXPECT_THAT(open.consumer->ids(), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_TRUE(open.consumer->all_intact());
  for (const fake::Item& item : open.consumer->items()) EXPECT_EQ(item.seq, item.id);
  ChannelStats stats = open.channel->stats();
  EXPECT_EQ(stats.sent, 5U);
  EXPECT_EQ(stats.delivered, 5U);
  EXPECT_EQ(stats.bytes, 4U * 64 + 600'000);
}

TEST(ChannelSlot, WhatIsHeldIsBoundedAndItsLossIsCounted) {
  ChannelSlot slot("bounded");
  Feed feed(1024);
  std::uint64_t id = 0;
  while (feed.send(slot, id)) ++id;
  EXPECT_LE(id * 1024, 1U << 20);
  EXPECT_FALSE(feed.send(slot, id + 1));
  Open open(slot);
  ASSERT_TRUE(open.channel->flush(kLimit));
  EXPECT_EQ(open.consumer->items().size(), id);
  ChannelStats stats = open.channel->stats();
  EXPECT_EQ(stats.sent, id + 2);
  EXPECT_EQ(stats.dropped, 2U);
  EXPECT_EQ(stats.pending, 0U);
}

TEST(ChannelSlot, OneChannelIsOpenUnderAName) {
  ChannelSlot slot("one");
  Open open(slot);
  auto second = make_channel();
  try {
    slot.open(second);
    FAIL() << "one is open";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kAlreadyExists);
    EXPECT_THAT(error.what(), HasSubstr("'one'"));
  }
  slot.vacate(*second);  // not the one that is open: nothing happens
  EXPECT_EQ(slot.open_channel(), open.channel);
}

TEST(ChannelSlot, VacateSendsThoseAwayWhoWaitForRoom) {
  ChannelSlot slot("waiting");
  auto channel = make_channel(OnFull::kBlock, 1024);
  Door door;
  auto consumer = std::make_shared<Collector>([&](std::span<const Record>) { door.pass(); });
  slot.open(channel);
  channel->add(consumer);
  Feed feed(64);
  for (std::uint64_t id = 0; id < 8; ++id) ASSERT_TRUE(feed.send(slot, id));
  std::jthread sender([&] { EXPECT_FALSE(feed.send(slot, 8)); });
  ASSERT_TRUE(fake::eventually([&] { return channel->stats().sent == 9; }));
  slot.vacate(*channel);
  sender.join();
  EXPECT_TRUE(feed.send(slot, 9)) << "held for the next";
  EXPECT_FALSE(feed.send(*channel, 10)) << "the old one takes no more";
  EXPECT_FALSE(channel->close(milliseconds(1)));
  door.open();
  EXPECT_TRUE(channel->close(kLimit));
  EXPECT_EQ(consumer->items().size(), 8U);
}

TEST(ChannelSlot, ASourceThatWasHeldLivesUntilItsRecordIsConsumed) {
  ChannelSlot slot("lives");
  auto consumer = std::make_shared<Collector>();  // reads each record's source
  Feed feed(64);
  auto watch = feed.watch();
  feed.send(slot, 0);
  slot.retire(feed.source());
  feed.forget();
  EXPECT_FALSE(watch.expired());
  {
    Open open(slot);
    ASSERT_TRUE(open.channel->flush(kLimit));
    EXPECT_EQ(open.consumer->items().size(), 1U);
    EXPECT_TRUE(fake::eventually([&] { return watch.expired(); }));
  }
}

TEST(ChannelSlot, AChannelThatIsClosedUnstartedTakesWhatWasHeldWithIt) {
  ChannelSlot slot("unstarted");
  Feed feed, large(600'000);
  EXPECT_TRUE(feed.send(slot, 0));
  EXPECT_TRUE(large.send(slot, 1));
  auto channel = make_channel();
  slot.open(channel);
  EXPECT_TRUE(feed.send(slot, 2));
  slot.vacate(*channel);
  EXPECT_TRUE(channel->close(kLimit));
  EXPECT_EQ(channel->stats().dropped, 3U);
  EXPECT_EQ(channel->stats().pending, 0U);
}

TEST(ChannelSlot, NothingIsLostOrComesTwiceWhileChannelsChangePlaces) {
  constexpr std::uint64_t kThreads = 4, kRounds = 60;
  ChannelSlot slot("changing");
  std::atomic<bool> stop{false};
  std::vector<std::vector<std::uint64_t>> accepted(kThreads);
  std::vector<std::jthread> senders;
  Feed shared(24);
  for (std::uint64_t thread = 0; thread < kThreads; ++thread) {
    senders.emplace_back([&, thread] {
      Feed own(64);
      Feed& feed = thread % 2 == 0 ? shared : own;
      for (std::uint64_t i = 0; !stop.load(); ++i) {
        std::uint64_t id = thread << 32 | i;
        if (feed.send(slot, id)) accepted[thread].push_back(id);
        if (i % 64 == 0) std::this_thread::yield();
      }
      slot.retire(own.source());
    });
  }
  std::vector<std::uint64_t> delivered;
  std::uint64_t sent = 0, dropped = 0;
  auto run = [&](OnFull on_full, std::size_t least) {
    Open open(slot, on_full, 16384);
    EXPECT_TRUE(open.consumer->wait_for(least));
    open.close();
    ChannelStats stats = open.channel->stats();
    EXPECT_TRUE(exact(stats));
    EXPECT_EQ(stats.pending, 0U);
    EXPECT_EQ(stats.delivered, open.consumer->items().size());
    sent += stats.sent;
    dropped += stats.dropped;
    std::vector<std::uint64_t> numbers;
    for (const fake::Item& item : open.consumer->items()) {
      delivered.push_back(item.id);
      numbers.push_back(item.seq);
    }
    std::ranges::sort(numbers);
    EXPECT_EQ(std::ranges::adjacent_find(numbers), numbers.end()) << "a number names one record";
    EXPECT_TRUE(open.consumer->all_intact());
  };
  for (std::uint64_t round = 0; round < kRounds; ++round)
    run(round % 2 == 0 ? OnFull::kBlock : OnFull::kDropNew, round % 3 == 0 ? 1 : 200);
  stop.store(true);
  senders.clear();
  run(OnFull::kBlock, 0);  // what is held
  std::vector<std::uint64_t> wanted;
  for (const auto& one : accepted) wanted.insert(wanted.end(), one.begin(), one.end());
  std::ranges::sort(delivered);
  EXPECT_EQ(std::ranges::adjacent_find(delivered), delivered.end()) << "none comes twice";
  EXPECT_EQ(delivered.size(), wanted.size());
  EXPECT_TRUE(delivered == wanted) << "what was taken arrives";
  EXPECT_EQ(sent, delivered.size() + dropped);
}

TEST(Channels, NamesHaveOneSlotEachAndAllOfThemAreListed) {
  auto& channels = Channels::instance();
  ChannelSlot& slot = channels.slot("test.slots.a");
  EXPECT_EQ(&channels.slot("test.slots.a"), &slot);
  EXPECT_NE(&channels.slot("test.slots.b"), &slot);
  auto all = channels.all();
  EXPECT_TRUE(std::ranges::find(all, slot.current()) != all.end());
  Open open(slot);
  all = channels.all();
  EXPECT_TRUE(std::ranges::find(all, open.channel) != all.end());
}

}  // namespace
}  // namespace callgate
