// SPDX-License-Identifier: Apache-2.0
// Channels while many threads use them: counts that are exact at every moment, wake-ups that are
// never lost, sources that live as long as their records, and a fork in the middle of it all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "channel/channel.h"
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

constexpr std::uint64_t kThreads = 4, kEach = 4000;

std::uint64_t id_of(std::uint64_t thread, std::uint64_t i) { return thread << 32 | i; }

class EachPolicy : public ::testing::TestWithParam<OnFull> {};

TEST_P(EachPolicy, CountsAreExactAtEveryMoment) {
  auto channel = make_channel(GetParam(), 8192, 1e6);
  auto consumer = std::make_shared<Collector>();
  channel->add(consumer);
  std::vector<std::unique_ptr<Feed>> feeds;
  for (std::uint64_t thread = 0; thread < kThreads; ++thread)
    feeds.push_back(std::make_unique<Feed>(8 + 48 * thread));
  std::vector<std::uint64_t> accepted(kThreads, 0);
  std::vector<std::jthread> senders;
  for (std::uint64_t thread = 0; thread < kThreads; ++thread) {
    senders.emplace_back([&, thread] {
      auto device = static_cast<std::int64_t>(thread % 2);
      for (std::uint64_t i = 0; i < kEach; ++i)
        accepted[thread] += feeds[thread]->send(*channel, id_of(thread, i), device) ? 1U : 0U;
    });
  }
  ChannelStats stats, before;
  while (stats.sent < kThreads * kEach) {
    stats = channel->stats();
    ASSERT_TRUE(exact(stats));
    ASSERT_TRUE(stats.sent >= before.sent && stats.delivered >= before.delivered &&
                stats.dropped >= before.dropped && stats.high_water >= before.high_water);
    before = stats;
  }
  senders.clear();
  ASSERT_TRUE(channel->close(kLimit));
  stats = channel->stats();
  EXPECT_TRUE(exact(stats));
  EXPECT_EQ(stats.pending, 0U);
  EXPECT_EQ(stats.delivered, consumer->items().size());
  EXPECT_TRUE(consumer->all_intact());
  std::map<std::uint64_t, std::vector<std::uint64_t>> ids;
  std::map<std::int32_t, std::vector<std::uint64_t>> numbers;
  for (const fake::Item& item : consumer->items()) {
    ids[item.id >> 32].push_back(item.id);
    numbers[item.device].push_back(item.seq);
  }
  for (auto& [thread, one] : ids) {
    EXPECT_TRUE(std::ranges::is_sorted(one)) << "each thread's order is kept";
    EXPECT_EQ(std::ranges::adjacent_find(one), one.end()) << "none comes twice";
    EXPECT_TRUE(GetParam() == OnFull::kDropOld || one.size() == accepted[thread]);
  }
  for (auto& [device, one] : numbers) {
    std::ranges::sort(one);
    EXPECT_EQ(std::ranges::adjacent_find(one), one.end()) << "a number names one record";
  }
  EXPECT_TRUE(GetParam() != OnFull::kBlock || stats.delivered == kThreads * kEach);
}

INSTANTIATE_TEST_SUITE_P(Channel, EachPolicy,
                         ::testing::Values(OnFull::kBlock, OnFull::kDropNew, OnFull::kDropOld,
                                           OnFull::kSample));

TEST(ChannelThreads, ALoneRecordIsNeverLeftBehindWhateverTheThreadWasAboutToDo) {
  // Each round the next record comes when the channel is idle: after a moment that varies, so that
  // it meets the thread on its way to rest, at rest, and on its way back.
  auto channel = make_channel();
  auto consumer = std::make_shared<Collector>();
  channel->add(consumer);
  Feed feed;
  for (std::uint64_t id = 0; id < 1200; ++id) {
    for (std::uint64_t i = 0; i < id % 64 * 20; ++i)
      std::atomic_signal_fence(std::memory_order_seq_cst);
    ASSERT_TRUE(feed.send(*channel, id));
    if (id % 2 == 0) continue;
    ASSERT_TRUE(consumer->wait_for(id + 1)) << "record " << id << " was left behind";
  }
  EXPECT_TRUE(channel->close(kLimit));
}

TEST(ChannelThreads, ALoneRecordWakesAThreadThatIsFastAsleep) {
  // Twenty idle channels at once, so that the wait for their sleep is not twenty waits.
  std::vector<std::shared_ptr<Channel>> channels;
  std::vector<std::shared_ptr<Collector>> consumers;
  for (int i = 0; i < 20; ++i) {
    channels.push_back(make_channel(OnFull::kBlock, 1024));
    consumers.push_back(std::make_shared<Collector>());
    channels.back()->add(consumers.back());
  }
  Feed feed;
  for (std::uint64_t round = 0; round < 3; ++round) {
    std::this_thread::sleep_for(milliseconds(150));  // longer than the naps, if they are on time
    for (auto& channel : channels) ASSERT_TRUE(feed.send(*channel, round));
    for (auto& consumer : consumers) ASSERT_TRUE(consumer->wait_for(round + 1));
  }
  for (auto& channel : channels) EXPECT_TRUE(channel->flush(kLimit)) << "asleep or not";
  for (auto& channel : channels) EXPECT_TRUE(channel->close(kLimit));
}

TEST(ChannelThreads, FlushesFromManyThreadsEndWhileSendersNeverStop) {
  auto channel = make_channel(OnFull::kBlock, 16384);
  std::array<std::atomic<bool>, 90> seen{};
  channel->add(std::make_shared<Collector>([&](std::span<const Record> records) {
    for (const Record& record : records) {
      std::uint64_t id = 0;
      std::memcpy(&id, record.payload, sizeof(id));
      if (id < seen.size()) seen[id].store(true);
    }
  }));
  std::atomic<bool> stop{false};
  Feed endless, feed;
  std::vector<std::jthread> senders, flushers;
  for (int i = 0; i < 2; ++i) {
    senders.emplace_back([&] {
      while (!stop.load()) endless.send(*channel, 1'000'000);
    });
  }
  for (std::uint64_t first = 0; first < 3; ++first) {
    flushers.emplace_back([&, first] {
      for (std::uint64_t id = first; id < seen.size(); id += 3) {
        EXPECT_TRUE(feed.send(*channel, id));
        EXPECT_TRUE(channel->flush(kLimit));
        EXPECT_TRUE(seen[id].load()) << "it was sent before the flush";
      }
    });
  }
  flushers.clear();
  stop.store(true);
  senders.clear();
  EXPECT_TRUE(channel->close(kLimit));
}

TEST(ChannelThreads, SourcesLiveAsLongAsTheirRecordsAndNoLonger) {
  for (OnFull on_full : {OnFull::kBlock, OnFull::kDropOld}) {
    auto channel = make_channel(on_full, 2048);
    auto consumer = std::make_shared<Collector>();  // reads each record's source
    channel->add(consumer);
    std::vector<std::vector<std::weak_ptr<const Source>>> watched(3);
    std::vector<std::jthread> programs;
    for (auto& watches : watched) {
      programs.emplace_back([&channel, &watches] {
        for (std::uint64_t program = 0; program < 200; ++program) {
          Feed feed(8 + program % 5 * 304);
          for (std::uint64_t id = 0; id < 5; ++id) feed.send(*channel, id);
          watches.push_back(feed.watch());
          channel->retire(feed.source());
        }
      });
    }
    programs.clear();
    ASSERT_TRUE(channel->flush(kLimit));
    auto gone = [&] {
      return std::ranges::all_of(watched, [](const auto& watches) {
        return std::ranges::all_of(watches, [](const auto& one) { return one.expired(); });
      });
    };
    EXPECT_TRUE(fake::eventually(gone)) << "with the channel still open";
    EXPECT_TRUE(consumer->all_intact());
    EXPECT_TRUE(channel->close(kLimit));
  }
}

TEST(ChannelThreads, ManyOpenAndCloseAndSendAtOnce) {
  for (int round = 0; round < 40; ++round) {
    auto channel = make_channel(round % 2 == 0 ? OnFull::kBlock : OnFull::kDropNew, 1024);
    auto consumer = std::make_shared<Collector>();
    Feed feed(64);
    std::vector<std::jthread> threads;
    channel->add(consumer);
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        while (feed.send(*channel, 1) || !channel->closed()) {
        }
      });
    }
    threads.emplace_back([&] { channel->flush(kLimit); });
    ASSERT_TRUE(consumer->wait_for(20));
    threads.emplace_back([&] { EXPECT_TRUE(channel->close(kLimit)); });
    EXPECT_TRUE(channel->close(kLimit));
    threads.clear();
    ChannelStats stats = channel->stats();
    EXPECT_TRUE(exact(stats));
    EXPECT_EQ(stats.pending, 0U);
    EXPECT_EQ(stats.delivered, consumer->items().size());
    EXPECT_EQ(consumer->closes.load(), 1);
  }
}

// -- fork ----------------------------------------------------------------------------------------

// The work of a fork's child; its exit status says which step failed. No thread but this one is
// in it, and locks may be held for ever.
int in_the_child(Channel& channel, ChannelSlot& slot, Feed& feed,
                 const std::shared_ptr<Consumer>& consumer) {
  Channel::abandon_all();
  std::uint64_t dropped = channel.stats().dropped;
  for (std::uint64_t id = 0; id < 1000; ++id)  // more than fits: nobody would make room
    if (feed.send(channel, id)) return 1;
  if (channel.stats().dropped != dropped + 1000) return 2;
  if (feed.send(slot, 0)) return 3;
  if (channel.flush(std::nullopt)) return 4;
  channel.remove(consumer);
  channel.retire(feed.source());
  slot.retire(feed.source());
  if (channel.close(std::nullopt)) return 5;
  return Channel::abandoned() ? 0 : 6;
}

// Held up in one of its calls until the door is open.
class HeldIn final : public Consumer {
 public:
  enum Call : std::uint8_t { kNone, kConsume, kFlush, kClose };
  HeldIn(Call call, Door& door) : call_(call), door_(door) {}

  void consume(std::span<const Record> batch) override {
    if (call_ == kConsume) door_.pass();
    records += batch.size();
  }
  void flush() override {
    if (call_ == kFlush) door_.pass();
  }
  void close() override {
    if (call_ == kClose) door_.pass();
    ++closes;
  }
  std::atomic<std::size_t> records{0};
  std::atomic<int> closes{0};

 private:
  Call call_;
  Door& door_;
};

struct ForkState {
  const char* name;
  HeldIn::Call held;
  std::uint64_t records;  // sent before; the ring holds eight while they are not taken
  bool sender_waits = false, flushes = false, closes = false;
};

class ChannelFork : public ::testing::TestWithParam<ForkState> {};

TEST_P(ChannelFork, TheChildDropsWhatItSendsAndNothingHangs) {
  const ForkState& state = GetParam();
  auto channel = make_channel(OnFull::kBlock, 1024);
  Door door;
  auto consumer = std::make_shared<HeldIn>(state.held, door);
  channel->add(consumer);
  Feed feed(64);
  ChannelSlot slot("fork");
  std::vector<std::jthread> waiting;  // each waits, in the parent only
  for (std::uint64_t id = 0; id < state.records; ++id) ASSERT_TRUE(feed.send(*channel, id));
  if (state.flushes) waiting.emplace_back([&] { EXPECT_TRUE(channel->flush(kLimit)); });
  if (state.closes) waiting.emplace_back([&] { EXPECT_TRUE(channel->close(kLimit)); });
  if (state.held != HeldIn::kNone) {
    ASSERT_TRUE(door.wait_for_arrivals());
  }
  if (state.sender_waits) {
    waiting.emplace_back([&] { EXPECT_TRUE(feed.send(*channel, state.records)); });
    ASSERT_TRUE(fake::eventually([&] { return channel->stats().sent == state.records + 1; }));
  }
  pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);  // a hang ends by a signal, which the parent sees
    _exit(in_the_child(*channel, slot, feed, consumer));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_FALSE(Channel::abandoned()) << "the parent goes on";
  door.open();
  waiting.clear();
  ASSERT_TRUE(channel->close(kLimit));
  EXPECT_EQ(consumer->records, state.records + (state.sender_waits ? 1 : 0));
  EXPECT_EQ(consumer->closes, 1);
}

INSTANTIATE_TEST_SUITE_P(
    Channel, ChannelFork,
    ::testing::Values(
        ForkState{"Idle", HeldIn::kNone, 3}, ForkState{"InDelivery", HeldIn::kConsume, 3},
        ForkState{"BlockedSender", HeldIn::kConsume, 8, /*sender_waits=*/true},
        ForkState{"InFlush", HeldIn::kFlush, 3, /*sender_waits=*/false, /*flushes=*/true},
        ForkState{"Closing", HeldIn::kClose, 3, /*sender_waits=*/false, /*flushes=*/false,
                  /*closes=*/true}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace callgate
