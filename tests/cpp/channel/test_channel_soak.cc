// SPDX-License-Identifier: Apache-2.0
// Everything at once: producers of records of all sizes, slow, failing and passing consumers,
// flushes, call sites that come and go, and channels that are closed and opened again under them.
// In the end the counts are exact, and every record that was taken has arrived once and whole.
//
// Set CALLGATE_SOAK for 10 million records; by default there are 200 thousand.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "channel/tap.h"
#include "channel_fixtures.h"

namespace callgate {
namespace {

using fake::Collector;
using fake::exact;
using fake::Feed;
using fake::kLimit;

constexpr std::uint64_t kProducers = 4;

std::uint64_t records_each() {
  return (std::getenv("CALLGATE_SOAK") != nullptr ? 10'000'000U : 200'000U) / kProducers;
}

// Ticks a record off: how often it came, and whether it was whole. Shared by all channels.
class Ledger final : public Consumer {
 public:
  Ledger() : came_(kProducers * records_each()) {}

  void consume(std::span<const Record> records) override {
    for (const Record& record : records) {
      std::uint64_t id = 0;
      std::memcpy(&id, record.payload, sizeof(id));
      if (id >= came_.size() || !fake::intact(record.payload, record.source->leaves[0].nbytes)) {
        broken.fetch_add(1);
        continue;
      }
      came_[id].fetch_add(1);
      count.fetch_add(1);
    }
  }
  int came(std::uint64_t id) const { return came_[id].load(); }

  std::atomic<std::uint64_t> count{0}, broken{0};

 private:
  std::vector<std::atomic<std::uint8_t>> came_;
};

// Sends its share of the ids, each once, by call sites that last some thousand records.
class Producer {
 public:
  Producer(ChannelSlot& slot, std::uint64_t number) : slot_(slot), number_(number) {}

  void run() {
    std::mt19937_64 random(number_);
    for (std::uint64_t i = 0; i < records_each();) {
      Feed small(8), middle(64 + random() % 30 * 8), large(20'000);
      std::uint64_t end = std::min(i + 1 + random() % 4000, records_each());
      for (; i < end; ++i) {
        std::uint64_t id = number_ * records_each() + i;
        Feed& feed = random() % 500 == 0 ? large : random() % 4 == 0 ? middle : small;
        if (feed.send(slot_, id, static_cast<std::int64_t>(number_))) {
          taken.push_back(id);
        } else {
          std::this_thread::yield();  // or most would be dropped while no channel is open
        }
      }
      for (Feed* feed : {&small, &middle, &large}) slot_.retire(feed->source());
    }
  }

  std::vector<std::uint64_t> taken;

 private:
  ChannelSlot& slot_;
  std::uint64_t number_;
};

// One life of the channel: some consumers, some records, some flushes, and its end.
class Life {
 public:
  Life(ChannelSlot& slot, std::shared_ptr<Ledger> ledger, unsigned number)
      : slot_(slot), random_(number) {
    constexpr OnFull kPolicies[] = {OnFull::kBlock, OnFull::kDropNew, OnFull::kBlock,
                                    OnFull::kDropOld};
    channel_ =
        fake::make_channel(kPolicies[number % 4], 16384 << number % 3, 100, errors_.handler());
    slot.open(channel_);
    channel_->add(std::move(ledger));  // the first: it gets what was held
    channel_->add(std::make_shared<Collector>([this](std::span<const Record>) {
      if (++batches_ % 3 == 0) throw std::runtime_error("every third");
      for (int i = 0; i < 50; ++i) std::this_thread::yield();  // slow
    }));
  }

  // Until `enough` is true.
  template <typename Enough>
  void run(Enough enough) {
    while (!enough()) {
      auto visitor = std::make_shared<Collector>(
          [](std::span<const Record>) { throw 1; });  // neither here nor there
      channel_->add(visitor);
      EXPECT_TRUE(random_() % 2 != 0 || channel_->flush(kLimit)) << "senders never stop";
      EXPECT_TRUE(exact(channel_->stats()));
      channel_->remove(visitor);
    }
    slot_.vacate(*channel_);
    EXPECT_TRUE(channel_->close(kLimit));
  }

  ChannelStats stats() const { return channel_->stats(); }

 private:
  ChannelSlot& slot_;
  std::mt19937 random_;
  fake::Errors errors_;
  std::shared_ptr<Channel> channel_;
  int batches_ = 0;
};

TEST(ChannelSoak, EveryRecordIsAccountedForWhateverHappens) {
  ChannelSlot slot("soak");
  auto ledger = std::make_shared<Ledger>();
  std::vector<Producer> producers;
  for (std::uint64_t number = 0; number < kProducers; ++number)
    producers.emplace_back(slot, number);
  std::atomic<int> running{kProducers};
  std::vector<std::jthread> threads;
  for (Producer& producer : producers) {
    threads.emplace_back([&] {
      producer.run();
      running.fetch_sub(1);
    });
  }
  std::uint64_t sent = 0, delivered = 0, dropped = 0, lives = 0;
  auto live = [&](auto enough) {
    Life life(slot, ledger, static_cast<unsigned>(lives++));
    life.run(enough);
    ChannelStats stats = life.stats();
    EXPECT_TRUE(exact(stats));
    EXPECT_EQ(stats.pending, 0U);
    sent += stats.sent;
    delivered += stats.delivered;
    dropped += stats.dropped;
  };
  while (running.load() != 0) {
    std::uint64_t enough = ledger->count.load() + kProducers * records_each() / 40;
    live([&] { return ledger->count.load() > enough || running.load() == 0; });
  }
  threads.clear();
  live([] { return true; });  // what is held
  EXPECT_EQ(ledger->broken.load(), 0U);
  EXPECT_EQ(sent, kProducers * records_each()) << "each send is counted once";
  EXPECT_EQ(sent, delivered + dropped);
  EXPECT_EQ(delivered, ledger->count.load());
  EXPECT_GE(lives, 2U);
  // A record that was taken arrives once; only kDropOld may drop it after that.
  std::uint64_t taken = 0, twice = 0, unasked = 0;
  for (const Producer& producer : producers) taken += producer.taken.size();
  std::vector<bool> was_taken(kProducers * records_each());
  for (const Producer& producer : producers)
    for (std::uint64_t id : producer.taken) was_taken[id] = true;
  for (std::uint64_t id = 0; id < was_taken.size(); ++id) {
    twice += ledger->came(id) > 1 ? 1U : 0U;
    unasked += ledger->came(id) > 0 && !was_taken[id] ? 1U : 0U;
  }
  EXPECT_EQ(twice, 0U);
  EXPECT_EQ(unasked, 0U) << "what the sender was told was dropped";
  EXPECT_LE(delivered, taken);
}

}  // namespace
}  // namespace callgate
