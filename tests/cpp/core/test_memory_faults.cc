// SPDX-License-Identifier: Apache-2.0
// Memory runs out at the n-th allocation, for every n, in every entry of core and channel: no entry
// ends the process or leaks; it throws, or counts a record as dropped or lost; and the object can
// be used as before. Once one allocation fails alone, once all that follow fail, too.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "allocations.h"
#include "callgate/stream.h"
#include "cells/progress.h"
#include "channel/channel.h"
#include "channel/outfeed_2020.h"
#include "channel/sinks/npy.h"
#include "channel/sinks/stats.h"
#include "channel/stream_address.h"
#include "channel/stream_sink.h"
#include "channel/tap.h"
#include "channel_fixtures.h"
#include "core/attributes.h"
#include "core/call.h"
#include "core/threads.h"
#include "cuda/launch.h"
#include "fake_attributes.h"
#include "fake_callee.h"
#include "fake_launch.h"
#include "sink_files.h"

namespace callgate {
namespace {

using fake::NoMemory;

constexpr std::size_t kMostAllocations = 3000;

// One go: what runs short of memory, and what is looked at after that, with whether it threw.
struct Trial {
  std::function<void()> run;
  std::function<void(bool threw)> check = [](bool) {};
};

struct FaultyEntry {
  std::string name;
  std::function<Trial()> prepare;
};

std::ostream& operator<<(std::ostream& out, const FaultyEntry& entry) { return out << entry.name; }

// An entry without state: it works again.
FaultyEntry pure(std::string name, const std::function<void()>& run) {
  return {std::move(name), [run] { return Trial{run, [run](bool) { run(); }}; }};
}

// -- core ----------------------------------------------------------------------------------------

FaultyEntry registered() {
  return {"RegistryAdd", [] {
            auto callee = std::make_shared<fake::FunctionCallee>("faulty");
            return Trial{[callee] { Registry::instance().add(callee); },
                         [callee](bool threw) {
                           if (threw) Registry::instance().add(callee);
                           EXPECT_EQ(Registry::instance().find("faulty"), callee);
                           Registry::instance().remove(*callee);
                         }};
          }};
}

FaultyEntry submitted() {
  return {"WorkerPoolSubmit", [] {
            auto ran = std::make_shared<std::atomic<int>>(0);
            auto pool = std::make_shared<WorkerPool>();
            WorkerPool::Job job = [ran] { ++*ran; };
            return Trial{[pool, job] { pool->submit(job); },
                         [pool, job, ran](bool threw) {
                           if (threw) pool->submit(job);
                           EXPECT_TRUE(fake::eventually([&] { return *ran == 1; }));
                           pool->stop();
                           EXPECT_EQ(*ran, 1);
                         }};
          }};
}

// A watchdog that could not be armed never fires.
FaultyEntry armed() {
  return {"WatchdogArm", [] {
            auto fired = std::make_shared<std::atomic<int>>(0);
            auto watchdog = std::make_shared<Watchdog>();
            Watchdog::Action action = [fired] { ++*fired; };
            auto soon = std::chrono::milliseconds(0);
            return Trial{[=] { watchdog->arm(soon, action); },
                         [=](bool threw) {
                           if (threw) watchdog->arm(soon, action);
                           EXPECT_TRUE(fake::eventually([&] { return *fired == 1; }));
                           watchdog->stop();
                           EXPECT_EQ(*fired, 1);
                         }};
          }};
}

// -- channels ------------------------------------------------------------------------------------

// A source with its data, made before memory runs out.
struct Sending {
  explicit Sending(std::size_t bytes) : payload(bytes), dims{static_cast<std::int64_t>(bytes)} {
    sender.source = fake::make_source(bytes);
    fake::fill(1, payload.data(), bytes);
  }
  bool send(Channel& channel) {
    const ArrayView view{payload.data(), dims.data(), 1, DType::kU8};
    return channel.send(Parcel{sender, {&view, 1}, {.device = 0, .run = 7}});
  }
  std::vector<char> payload;
  std::array<std::int64_t, 1> dims;
  Sender sender;
};

constexpr std::size_t kCapacity = std::size_t{1} << 20, kAside = 200'000;

std::shared_ptr<Channel> quiet_channel(OnFull on_full = OnFull::kBlock) {
  return std::make_shared<Channel>(ChannelOptions{"test", kCapacity, on_full, 1e9},
                                   [](const Channel&, const Consumer&, const std::string&) {});
}

FaultyEntry sent(const std::string& name, OnFull on_full, std::size_t bytes) {
  return {"ChannelSend" + name, [=] {
            auto channel = quiet_channel(on_full);
            auto sending = std::make_shared<Sending>(bytes);
            return Trial{[=] { sending->send(*channel); },
                         [=](bool threw) {
                           EXPECT_FALSE(threw);
                           EXPECT_TRUE(sending->send(*channel));
                           const ChannelStats stats = channel->stats();
                           EXPECT_TRUE(fake::exact(stats));
                           EXPECT_EQ(stats.sent, 2U);
                           channel->close(fake::kLimit);
                         }};
          }};
}

FaultyEntry added() {
  return {"ChannelAdd", [] {
            auto channel = quiet_channel();
            auto collector = std::make_shared<fake::Collector>();
            return Trial{[=] { channel->add(collector); },
                         [=](bool threw) {
                           if (threw) channel->add(collector);
                           Sending(8).send(*channel);
                           EXPECT_TRUE(channel->close(fake::kLimit));
                           EXPECT_EQ(collector->items().size(), 1U);  // once, not twice
                         }};
          }};
}

FaultyEntry flushed() {
  return {"ChannelFlush", [] {
            auto channel = quiet_channel();
            auto collector = std::make_shared<fake::Collector>();
            channel->add(collector);
            return Trial{[=] { channel->flush(fake::kLimit); },
                         [=](bool) {
                           EXPECT_TRUE(channel->flush(fake::kLimit));
                           EXPECT_TRUE(channel->close(fake::kLimit));
                         }};
          }};
}

FaultyEntry closed() {
  return {"ChannelClose", [] {
            auto channel = quiet_channel();
            auto collector = std::make_shared<fake::Collector>();
            channel->add(collector);
            Sending(8).send(*channel);
            return Trial{[=] { channel->close(fake::kLimit); },
                         [=](bool threw) {
                           EXPECT_FALSE(threw);
                           EXPECT_EQ(collector->items().size(), 1U);
                         }};
          }};
}

// As a call site's destructor does, which must not throw.
FaultyEntry retired() {
  return {"ChannelRetire", [] {
            auto channel = quiet_channel();
            auto sending = std::make_shared<Sending>(8);
            sending->send(*channel);
            return Trial{[=] { channel->retire(*sending->sender.source); },
                         [=](bool threw) {
                           EXPECT_FALSE(threw);
                           const std::weak_ptr<const Source> source = sending->sender.source;
                           sending->sender.source.reset();
                           channel->start();
                           EXPECT_TRUE(channel->close(fake::kLimit));
                           EXPECT_TRUE(source.expired());
                         }};
          }};
}

FaultyEntry opened() {
  return {"ChannelSlotOpen", [] {
            auto slot = std::make_shared<ChannelSlot>("faulty");
            auto channel = quiet_channel();
            return Trial{[=] {
                           slot->open(channel);
                           slot->vacate(*channel);
                         },
                         [=](bool) {
                           if (slot->open_channel() != nullptr) slot->vacate(*channel);
                           channel->close(fake::kLimit);
                           auto next = quiet_channel();
                           slot->open(next);
                           EXPECT_EQ(slot->open_channel(), next);
                         }};
          }};
}

struct TapCall {
  std::array<std::int64_t, 1> dims{4};
  std::array<float, 4> values{1, 2, 3, 4};
  std::array<ArrayView, 1> operands{ArrayView{values.data(), dims.data(), 1, DType::kF32}};
  Call call() { return {operands, {}, {}}; }
};

fake::AttributeMap long_tap() { return fake::tap("x", {"['a long name of a leaf']"}); }

FaultyEntry tapped() {
  return {"TapRun", [] {
            auto callee = std::make_shared<TapCallee>("faulty tap", "faulty taps", nullptr);
            std::shared_ptr<Site> site = callee->specialise(fake::site_spec(long_tap()));
            auto call = std::make_shared<TapCall>();
            return Trial{[=] { site->run(call->call()); },
                         [=](bool) {
                           EXPECT_NO_THROW(site->run(call->call()));
                           const auto channel = Channels::instance().slot("faulty taps").current();
                           EXPECT_TRUE(fake::exact(channel->stats()));
                         }};
          }};
}

// -- consumers -----------------------------------------------------------------------------------

constexpr std::int8_t kRecords = 6;

struct Written {
  explicit Written(const fake::SinkFile& kind) : path(folder.file("file")), sink(kind.make(path)) {
    for (std::int8_t i = 0; i < kRecords; ++i) batch.push_back(tap.record({Bytes(40, i)}));
    last.push_back(tap.record({Bytes(40, kRecords)}));
  }
  callgate::TemporaryFolder folder;
  std::string path;
  FakeTap tap{"x", DType::kS8, {40}};
  std::vector<Record> batch, last;
  std::unique_ptr<Consumer> sink;
};

// Each record is in the file, whole and in order, or lost.
FaultyEntry consumed(const fake::SinkFile& kind) {
  return {kind.name + "Consume", [kind] {
            auto written = std::make_shared<Written>(kind);
            return Trial{[=] { written->sink->consume(written->batch); },
                         [=](bool threw) {
                           const std::uint64_t lost = written->sink->lost();
                           EXPECT_TRUE(threw || lost == 0);
                           written->sink->consume(written->last);
                           written->sink->close();
                           EXPECT_EQ(written->sink->lost(), lost);
                           const std::vector<int> numbers = kind.read(written->path);
                           EXPECT_EQ(numbers.size(), kRecords + 1 - lost);
                           EXPECT_TRUE(std::ranges::is_sorted(numbers));
                           EXPECT_EQ(numbers.back(), kRecords);
                           EXPECT_GE(numbers.front(), 0) << "a damaged file";
                         }};
          }};
}

FaultyEntry made(const fake::SinkFile& kind) {
  return {kind.name + "Make", [kind] {
            auto folder = std::make_shared<callgate::TemporaryFolder>();
            auto make = [=] {
              auto sink = kind.make(folder->file("file"));
              sink->open();
              sink->flush();
              sink->close();
            };
            return Trial{make, [make](bool) { make(); }};
          }};
}

struct Summed {
  Summed() {
    for (std::int8_t i = 0; i < kRecords; ++i) batch.push_back(tap.record({Bytes(40, i)}));
  }
  FakeTap tap{"x", DType::kS8, {40}};
  std::vector<Record> batch;
  StatsSink sink{std::vector<double>{}};
};

FaultyEntry summed() {
  return {"StatsConsume", [] {
            auto all = std::make_shared<Summed>();
            return Trial{[all] { all->sink.consume(all->batch); },
                         [all](bool) {
                           const std::uint64_t lost = all->sink.lost();
                           all->sink.consume(all->batch);
                           const auto read = all->sink.read();
                           ASSERT_EQ(read.size(), 1U);
                           EXPECT_EQ(read.begin()->second.records + lost, 2U * kRecords);
                         }};
          }};
}

// True if a reader that connects now gets what is sent from now on.
bool receives(StreamSink& sink, const std::vector<Record>& batch) {
  UniqueFd fd = connect_stream(parse_stream_address(sink.address()));
  fcntl(fd.get(), F_SETFL, O_NONBLOCK);
  stream::Reader reader(fd.release());
  return fake::eventually([&] {  // the server's own thread accepts it
    sink.consume(batch);
    return reader.next().has_value();
  });
}

struct ServedStream {
  ServedStream() {
    for (std::int8_t i = 0; i < kRecords; ++i) batch.push_back(tap.record({Bytes(40, i)}));
  }
  callgate::TemporaryFolder folder;
  FakeTap tap{"x", DType::kS8, {40}};
  std::vector<Record> batch;
  StreamSink sink{"unix:" + folder.file("s")};
};

FaultyEntry served() {
  return {"StreamServerConsume", [] {
            auto all = std::make_shared<ServedStream>();
            return Trial{[all] { all->sink.consume(all->batch); },
                         [all](bool) { EXPECT_TRUE(receives(all->sink, all->batch)); }};
          }};
}

std::vector<FaultyEntry> entries() {
  std::vector<FaultyEntry> all{
      pure("LanesOf", [] { EXPECT_EQ(fake::lanes("2:10;3:11").text(), "2:10;3:11"); }),
      pure("LaunchPlanOf",
           [] {
             cuda::LaunchPlan::of(
                 fake::decoded(fake::plan({fake::launch("f", {fake::scratch(0)})},
                                          {{"scratch", fake::Attribute::Integers{16}}})));
           }),
      pure("TapSpecOf", [] { TapSpec::of(fake::decoded(long_tap()), "{}"); }),
      pure("AddressParse", [] { parse_stream_address("tcp://a-host-with-a-long-name:1").text(); }),
      pure("MetadataRoundTrip",
           [] {
             const std::vector<outfeed_2020::ArrayType> arrays{{DType::kF32, {3, 300}}};
             const std::string text = outfeed_2020::encode_metadata(arrays);
             outfeed_2020::decode_metadata(text);
             outfeed_2020::encode_header(1, text);
           }),
      pure("NpyHeader", [] { NpyHeader::parse(NpyHeader{"<f4", {3}, 2, 0}.text(), "file"); }),
      pure("Attributes",
           [] {
             Attributes inner, outer;
             inner.add_string("a text that is longer than a few bytes", "another such text");
             outer.add_dictionary("inner", std::move(inner));
           }),
      pure("ChannelMake", [] { quiet_channel(); }),
      registered(),
      submitted(),
      armed(),
      sent("Inline", OnFull::kBlock, 8),
      sent("Aside", OnFull::kBlock, kAside),
      sent("DropNew", OnFull::kDropNew, 8),
      sent("DropOld", OnFull::kDropOld, kAside),
      sent("Sample", OnFull::kSample, 8),
      added(),
      flushed(),
      closed(),
      retired(),
      opened(),
      tapped(),
      summed(),
      served(),
  };
  for (const fake::SinkFile& kind : fake::sink_files()) {
    all.push_back(made(kind));
    all.push_back(consumed(kind));
  }
  return all;
}

class MemoryFaults : public ::testing::TestWithParam<FaultyEntry> {};

void fail_each(const FaultyEntry& entry, NoMemory::Fails fails) {
  for (std::size_t nth = 0; nth < kMostAllocations; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    const Trial trial = entry.prepare();
    bool threw = false, struck = false;
    {
      NoMemory none(nth, fails);
      try {
        trial.run();
      } catch (const std::bad_alloc&) {
        threw = true;
      } catch (const Error&) {
        threw = true;
      }
      struck = none.struck();
    }
    trial.check(threw);
    if (::testing::Test::HasFailure()) return;
    if (struck) continue;
    EXPECT_FALSE(threw);
    return;
  }
  FAIL() << "it never ended";
}

TEST_P(MemoryFaults, AnAllocationThatFailsIsAnErrorOrACountedRecord) {
  fail_each(GetParam(), NoMemory::Fails::kOne);
}

TEST_P(MemoryFaults, NoMemoryFromSomePointOnIsAnErrorOrACountedRecord) {
  fail_each(GetParam(), NoMemory::Fails::kAllLater);
}

INSTANTIATE_TEST_SUITE_P(Entries, MemoryFaults, ::testing::ValuesIn(entries()),
                         [](const auto& info) { return info.param.name; });

// -- threads of the runtime's own
// ------------------------------------------------------------------

// The channel's thread goes on when there is memory again, and every record is accounted for.
TEST(MemoryFaultsOfThreads, AChannelsThreadOutlivesThem) {
  for (OnFull on_full : {OnFull::kBlock, OnFull::kDropOld}) {
    for (std::size_t nth = 0; nth < 25; ++nth) {
      SCOPED_TRACE(nth);
      auto collector = std::make_shared<fake::Collector>();
      auto channel = quiet_channel(on_full);
      Sending small(8), large(kAside), gone(8);
      channel->add(collector);
      {
        NoMemory none(nth, NoMemory::Fails::kAllLater, NoMemory::Of::kAllThreads);
        for (int i = 0; i < 100; ++i) small.send(*channel);
        large.send(*channel);
        gone.send(*channel);
        channel->retire(*gone.sender.source);
        try {
          channel->request_flush();
        } catch (const std::bad_alloc&) {
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      small.send(*channel);
      ASSERT_TRUE(channel->flush(fake::kLimit));
      ASSERT_TRUE(channel->close(fake::kLimit));
      const ChannelStats stats = channel->stats();
      EXPECT_TRUE(fake::exact(stats));
      EXPECT_EQ(stats.sent, 103U);
      EXPECT_EQ(stats.pending, 0U);
      EXPECT_LE(collector->items().size(), stats.delivered);
      EXPECT_TRUE(collector->all_intact());
      // The consumer took the last one, which came when there was memory again.
      EXPECT_FALSE(collector->items().empty());
    }
  }
}

TEST(MemoryFaultsOfThreads, AServersThreadOutlivesThem) {
  callgate::TemporaryFolder folder;
  FakeTap tap("x", DType::kS8, {40});
  const std::vector batch{tap.record({Bytes(40, 7)})};
  StreamSink sink("unix:" + folder.file("s"));
  for (std::size_t nth = 0; nth < 25; ++nth) {
    SCOPED_TRACE(nth);
    const UniqueFd fd = connect_stream(parse_stream_address(sink.address()));
    {
      NoMemory none(nth, NoMemory::Fails::kAllLater, NoMemory::Of::kAllThreads);
      try {
        sink.consume(batch);
      } catch (const std::bad_alloc&) {
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    ASSERT_TRUE(receives(sink, batch));
  }
  sink.close();
}

}  // namespace
}  // namespace callgate
