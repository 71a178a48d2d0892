// SPDX-License-Identifier: Apache-2.0
// One channel: what is sent arrives whole and in order; consumers, flushes and closing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <semaphore>
#include <stdexcept>
#include <thread>
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
using ::testing::ElementsAre;

TEST(Channel, DeliversWhatWasSentWholeAndInOrder) {
  auto channel = make_channel();
  auto consumer = std::make_shared<Collector>();
  channel->add(consumer);
  std::vector<std::unique_ptr<Feed>> feeds;
  for (std::size_t bytes : {8, 64, 72, 1000, 1984}) feeds.push_back(std::make_unique<Feed>(bytes));
  for (std::uint64_t id = 0; id < 1000; ++id)
    ASSERT_TRUE(feeds[id % feeds.size()]->send(*channel, id));
  ASSERT_TRUE(channel->flush(kLimit));
  EXPECT_EQ(consumer->ids(), count_to(1000));
  EXPECT_TRUE(consumer->all_intact());
  ChannelStats stats = channel->stats();
  EXPECT_EQ(stats.sent, 1000U);
  EXPECT_EQ(stats.delivered, 1000U);
  EXPECT_EQ(stats.bytes, 200U * (64 + 64 + 128 + 1024 + 1984));
  EXPECT_TRUE(channel->close(kLimit));
}

TEST(Channel, ARecordSaysWhereAndWhenItWasSent) {
  auto channel = make_channel();
  std::vector<Record> seen;
  channel->add(std::make_shared<Collector>(
      [&](std::span<const Record> records) { seen.assign(records.begin(), records.end()); }));
  auto now = [] {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  };
  Feed feed;
  feed.sender().flags = kRepeated;
  std::int64_t before = now();
  feed.send(*channel, 5, 3);
  std::int64_t after = now();
  ASSERT_TRUE(channel->close(kLimit));
  ASSERT_EQ(seen.size(), 1U);
  EXPECT_EQ(seen[0].device, 3);
  EXPECT_EQ(seen[0].run, 7);
  EXPECT_EQ(seen[0].flags, std::uint32_t{kRepeated});
  EXPECT_GE(seen[0].time_ns, before);
  EXPECT_LE(seen[0].time_ns, after);
}

TEST(Channel, SequenceNumbersCountEachDeviceFromZero) {
  auto channel = make_channel();
  auto consumer = std::make_shared<Collector>();
  channel->add(consumer);
  Feed feed;
  // Numbers of other processes' devices are large, and lie alike: 2048, 4096, and so on.
  std::vector<std::int64_t> devices = {0, 1, 255, 256, 2048, 2049, 4096, 100'000, -1};
  for (std::uint64_t id = 0; id < 300; ++id) feed.send(*channel, id, devices[id % devices.size()]);
  ASSERT_TRUE(channel->close(kLimit));
  std::map<std::int64_t, std::uint64_t> next;
  for (const fake::Item& item : consumer->items()) {
    EXPECT_EQ(item.seq, next[item.device]++);
    EXPECT_EQ(item.device, devices[item.id % devices.size()]);
  }
  EXPECT_EQ(channel->stats().sent, 300U);
}

TEST(Channel, AConsumerThatThrowsDoesNotHurtTheOthers) {
  fake::Errors errors;
  auto channel = make_channel(OnFull::kBlock, 4096, 100, errors.handler());
  auto before = std::make_shared<Collector>(), after = std::make_shared<Collector>();
  channel->add(before);
  channel->add(std::make_shared<Collector>(
      [](std::span<const Record>) { throw std::runtime_error("no more"); }));
  channel->add(std::make_shared<Collector>([](std::span<const Record>) { throw 17; }));
  channel->add(after);
  Feed feed;
  for (std::uint64_t id = 0; id < 300; ++id) feed.send(*channel, id);
  ASSERT_TRUE(channel->flush(kLimit));
  EXPECT_EQ(before->ids(), count_to(300));
  EXPECT_EQ(after->ids(), count_to(300));
  EXPECT_EQ(channel->stats().delivered, 300U);
  EXPECT_THAT(errors.all(), ::testing::Contains("a collector: no more"));
  EXPECT_THAT(errors.all(), ::testing::Contains("a collector: an unknown C++ exception"));
  EXPECT_TRUE(channel->close(kLimit));
}

// Throws whatever it is asked to do.
class Broken final : public Consumer {
 public:
  void consume(std::span<const Record>) override { throw 1; }
  void flush() override { throw 2; }
  void close() override { throw 3; }
};

TEST(Channel, ConsumersMayThrowAnythingAnywhereAndSoMayWhoIsTold) {
  auto handler = [](const Channel&, const Consumer&, const std::string&) { throw 4; };
  auto channel = make_channel(OnFull::kBlock, 4096, 100, handler);
  auto healthy = std::make_shared<Collector>();
  channel->add(std::make_shared<Broken>());
  channel->add(healthy);
  Feed feed;
  feed.send(*channel, 0);
  EXPECT_TRUE(channel->flush(kLimit));
  EXPECT_TRUE(channel->close(kLimit));
  EXPECT_THAT(healthy->ids(), ElementsAre(0));
  EXPECT_EQ(healthy->flushes.load(), 1);
  EXPECT_EQ(healthy->closes.load(), 1);
}

TEST(Channel, ASourcesOwnConsumerGetsItsRecordsAloneAndIsFlushed) {
  auto channel = make_channel(OnFull::kBlock, 1 << 16);
  auto all = std::make_shared<Collector>(), own = std::make_shared<Collector>();
  channel->add(all);
  Feed plain, watched(8, own), watched_too(8, own);
  for (std::uint64_t id = 0; id < 30; ++id) {
    Feed& feed = id % 3 == 0 ? plain : id % 3 == 1 ? watched : watched_too;
    feed.send(*channel, id);
  }
  ASSERT_TRUE(channel->flush(kLimit));
  EXPECT_EQ(all->ids(), count_to(30));
  std::vector<std::uint64_t> wanted;
  for (std::uint64_t id = 0; id < 30; ++id)
    if (id % 3 != 0) wanted.push_back(id);
  EXPECT_EQ(own->ids(), wanted);
  EXPECT_EQ(own->flushes.load(), 1) << "once, though two sources have it";
  ASSERT_TRUE(channel->close(kLimit));
  EXPECT_EQ(own->closes.load(), 0) << "it is not the channel's";
}

TEST(Channel, ConsumersComeAndGoWhileRecordsAreSent) {
  auto channel = make_channel();
  auto always = std::make_shared<Collector>();
  channel->add(always);
  Feed feed;
  std::atomic<bool> stop{false};
  std::uint64_t id = 0;
  std::jthread sender([&] {
    while (!stop.load()) feed.send(*channel, id++);
  });
  for (int round = 0; round < 100; ++round) {
    std::atomic<bool> gone{false};
    auto visitor = std::make_shared<Collector>(
        [&](std::span<const Record>) { EXPECT_FALSE(gone.load()) << "it was removed"; });
    channel->add(visitor);
    ASSERT_TRUE(round % 2 != 0 || visitor->wait_for(1));
    channel->remove(visitor);
    gone.store(true);
    std::vector<std::uint64_t> ids = visitor->ids();
    for (std::size_t i = 1; i < ids.size(); ++i) ASSERT_EQ(ids[i], ids[i - 1] + 1);
  }
  stop.store(true);
  sender.join();
  ASSERT_TRUE(channel->close(kLimit));
  EXPECT_EQ(always->ids(), count_to(id));
}

TEST(Channel, RemoveWaitsForAFlushThatTheConsumerIsIn) {
  struct Slow final : Consumer {
    void consume(std::span<const Record>) override {}
    void flush() override {
      door.pass();
      ended.store(true);
    }
    Door door;
    std::atomic<bool> ended{false};
  };
  auto channel = make_channel();
  auto slow = std::make_shared<Slow>();
  channel->add(slow);
  std::jthread flusher([&] { EXPECT_TRUE(channel->flush(kLimit)); });
  ASSERT_TRUE(slow->door.wait_for_arrivals());
  std::jthread opener([&] { slow->door.open(); });
  channel->remove(slow);
  EXPECT_TRUE(slow->ended.load());
  flusher.join();
  EXPECT_TRUE(channel->close(kLimit));
}

TEST(Channel, AConsumerMayRemoveItselfAndFlushFromTheChannelsThread) {
  auto channel = make_channel();
  std::shared_ptr<Collector> consumer;
  consumer = std::make_shared<Collector>([&](std::span<const Record>) {
    EXPECT_TRUE(channel->flush(std::nullopt)) << "it would wait for itself";
    channel->remove(consumer);
  });
  channel->add(consumer);
  Feed feed;
  feed.send(*channel, 0);
  ASSERT_TRUE(channel->flush(kLimit));
  feed.send(*channel, 1);
  ASSERT_TRUE(channel->close(kLimit));
  EXPECT_THAT(consumer->ids(), ElementsAre(0));
  EXPECT_EQ(consumer->closes.load(), 0);
}

TEST(Channel, FlushGivesUpInTimeAndEndsWhenTheConsumerDoes) {
  auto channel = make_channel();
  Door door;
  auto consumer = std::make_shared<Collector>([&](std::span<const Record>) { door.pass(); });
  channel->add(consumer);
  Feed feed;
  feed.send(*channel, 0);
  ASSERT_TRUE(door.wait_for_arrivals());
  EXPECT_FALSE(channel->flush(milliseconds(1)));
  EXPECT_FALSE(channel->flush(milliseconds(0)));
  std::uint64_t request = channel->request_flush();
  EXPECT_FALSE(channel->flushed(request, milliseconds(1)));
  door.open();
  EXPECT_TRUE(channel->flushed(request, kLimit));
  EXPECT_TRUE(channel->flushed(request, milliseconds(0))) << "it stays served";
  EXPECT_THAT(consumer->ids(), ElementsAre(0));
  EXPECT_TRUE(channel->close(kLimit));
  EXPECT_TRUE(channel->flush(std::nullopt)) << "nothing is left to wait for";
}

TEST(Channel, AFlushIsServedAlthoughOthersAskForMoreAllTheTime) {
  auto channel = make_channel();
  std::counting_semaphore<> arrived(0), go(0);
  auto consumer = std::make_shared<Collector>([&](std::span<const Record>) {
    arrived.release();
    go.acquire();
  });
  channel->add(consumer);
  Feed feed;
  feed.send(*channel, 0);
  arrived.acquire();
  std::uint64_t request = channel->request_flush();
  for (std::uint64_t id = 1; id < 50; ++id) {
    feed.send(*channel, id);
    std::uint64_t later = channel->request_flush();
    go.release();
    arrived.acquire();
    EXPECT_TRUE(channel->flushed(request, milliseconds(0))) << "what it waits for is delivered";
    EXPECT_FALSE(channel->flushed(later, milliseconds(0))) << "this one's record is not";
    request = later;
  }
  go.release();
  EXPECT_TRUE(channel->flushed(request, kLimit));
  EXPECT_TRUE(channel->close(kLimit));
}

TEST(Channel, CloseDeliversAllAndClosesTheConsumersOnce) {
  auto channel = make_channel();
  auto consumer = std::make_shared<Collector>(), other = std::make_shared<Collector>();
  channel->add(consumer);
  channel->add(other);
  Feed feed;
  for (std::uint64_t id = 0; id < 2000; ++id) feed.send(*channel, id);
  EXPECT_TRUE(channel->close(kLimit));
  EXPECT_TRUE(channel->close(kLimit)) << "closing again changes nothing";
  EXPECT_EQ(consumer->ids(), count_to(2000));
  EXPECT_EQ(consumer->closes.load(), 1);
  EXPECT_EQ(other->closes.load(), 1);
  EXPECT_TRUE(channel->closed());
  EXPECT_FALSE(feed.send(*channel, 2000));
  ChannelStats stats = channel->stats();
  EXPECT_EQ(stats.delivered, 2000U);
  EXPECT_EQ(stats.dropped, 1U);
  EXPECT_EQ(stats.pending, 0U);
}

// Its flush ends when the channel is being closed, and not before.
class FlushesUntilClosed final : public Consumer {
 public:
  explicit FlushesUntilClosed(std::weak_ptr<Channel> channel) : channel_(std::move(channel)) {}
  void consume(std::span<const Record> /*records*/) override {}
  void flush() override {
    while (!channel_.lock()->closed()) std::this_thread::yield();
    std::this_thread::sleep_for(milliseconds(5));  // for close() to wait for the thread's end
  }
  void close() override { ++closes; }
  std::atomic<int> closes{0};

 private:
  std::weak_ptr<Channel> channel_;
};

TEST(Channel, CloseDuringAFlushClosesTheConsumersOnceAndEnds) {
  auto channel = make_channel();
  auto consumer = std::make_shared<FlushesUntilClosed>(channel);
  channel->add(consumer);
  channel->request_flush();
  EXPECT_TRUE(channel->close(kLimit));
  EXPECT_EQ(consumer->closes, 1);
}

TEST(Channel, CloseGivesUpOnAConsumerThatHangsAndCanBeCalledAgain) {
  auto channel = make_channel();
  Door door;
  auto consumer = std::make_shared<Collector>([&](std::span<const Record>) { door.pass(); });
  channel->add(consumer);
  Feed feed;
  feed.send(*channel, 0);
  ASSERT_TRUE(door.wait_for_arrivals());
  feed.send(*channel, 1);
  EXPECT_FALSE(channel->close(milliseconds(1)));
  EXPECT_FALSE(feed.send(*channel, 2)) << "it is closed for senders";
  EXPECT_EQ(channel->stats().pending, 2U);
  std::weak_ptr<Channel> watch = channel;
  std::jthread other([&] { EXPECT_TRUE(channel->close(kLimit)); });  // two may wait at once
  door.open();
  EXPECT_TRUE(channel->close(kLimit));
  other.join();
  EXPECT_THAT(consumer->ids(), ElementsAre(0, 1));
  channel.reset();
  EXPECT_TRUE(fake::eventually([&] { return watch.expired(); })) << "its thread has let it go";
}

TEST(Channel, CloseWithoutAThreadDropsWhatIsThere) {
  auto channel = make_channel(OnFull::kDropNew, 4096);
  Feed feed, large(4000);
  EXPECT_TRUE(large.send(*channel, 0));  // its memory is the sanitizer's to check
  EXPECT_FALSE(large.send(*channel, 1));
  feed.send(*channel, 2);
  EXPECT_TRUE(channel->close(kLimit));
  ChannelStats stats = channel->stats();
  EXPECT_EQ(stats.dropped, 3U);
  EXPECT_EQ(stats.pending, 0U);
}

TEST(Channel, AConsumerMayCloseItsChannel) {
  auto channel = make_channel();
  auto consumer = std::make_shared<Collector>(
      [&](std::span<const Record>) { EXPECT_TRUE(channel->close(std::nullopt)); });
  channel->add(consumer);
  Feed feed;
  feed.send(*channel, 0);
  EXPECT_TRUE(fake::eventually([&] { return consumer->closes.load() == 1; }));
  EXPECT_TRUE(channel->close(kLimit)) << "now from outside: the thread has ended";
  EXPECT_EQ(consumer->ids().size(), 1U);
}

}  // namespace
}  // namespace callgate
