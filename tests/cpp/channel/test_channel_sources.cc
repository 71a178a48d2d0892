// SPDX-License-Identifier: Apache-2.0
// How long a channel keeps the sources of its records: until the last is consumed, and no longer.
#include <gtest/gtest.h>

#include <memory>

#include "channel/channel.h"
#include "channel_fixtures.h"

namespace callgate {
namespace {

using fake::Collector;
using fake::Door;
using fake::Feed;
using fake::kLimit;
using fake::make_channel;

TEST(ChannelSources, ARetiredSourceLivesUntilItsLastRecordIsConsumed) {
  auto channel = make_channel();
  Door door;
  std::weak_ptr<const Source> watch;
  std::atomic<bool> alive{false};
  channel->add(std::make_shared<Collector>([&](std::span<const Record>) {
    door.pass();
    alive.store(!watch.expired());
  }));
  Feed feed;
  watch = feed.watch();
  feed.send(*channel, 0);
  channel->retire(feed.source());
  feed.forget();
  ASSERT_TRUE(door.wait_for_arrivals());
  EXPECT_FALSE(watch.expired());
  door.open();
  EXPECT_TRUE(fake::eventually([&] { return watch.expired(); }));
  EXPECT_TRUE(alive.load()) << "while its record was consumed";
  EXPECT_TRUE(channel->close(kLimit));
}

TEST(ChannelSources, ARetiredSourceWithoutWaitingRecordsEndsAtOnce) {
  auto channel = make_channel();
  channel->add(std::make_shared<Collector>());
  Feed feed, unsent;
  auto watch = feed.watch();
  feed.send(*channel, 0);
  ASSERT_TRUE(channel->flush(kLimit));
  channel->retire(feed.source());
  channel->retire(unsent.source());  // the channel never heard of it
  feed.forget();
  EXPECT_TRUE(watch.expired());
  EXPECT_TRUE(channel->close(kLimit));
}

TEST(ChannelSources, ASourceWhoseRecordsWereDroppedIsNotKept) {
  auto channel = make_channel(OnFull::kDropNew, 1024);  // not started: nobody makes room
  Feed filler(448), feed(64);
  while (filler.send(*channel, 0)) {
  }
  auto watch = feed.watch();
  EXPECT_FALSE(feed.send(*channel, 1));
  channel->retire(feed.source());
  feed.forget();
  EXPECT_TRUE(watch.expired());
}

TEST(ChannelSources, SourcesThatAreNotRetiredEndWithTheChannel) {
  auto channel = make_channel();
  auto own = std::make_shared<Collector>();
  channel->add(std::make_shared<Collector>());
  Feed feed(8, own);
  auto watch = feed.watch();
  feed.send(*channel, 0);
  feed.forget();
  ASSERT_TRUE(channel->flush(kLimit));
  EXPECT_FALSE(watch.expired());
  ASSERT_TRUE(channel->close(kLimit));
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(own.use_count(), 1);
}

}  // namespace
}  // namespace callgate
