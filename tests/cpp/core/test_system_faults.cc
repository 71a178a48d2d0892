// SPDX-License-Identifier: Apache-2.0
// Each write and each open fails once, with EIO or EMFILE: what is lost is counted, the error names
// the place, and the object can be used as before. Full disks are test_full_disks.cc's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "channel/stream_sink.h"
#include "core/error.h"
#include "fake_records.h"
#include "sink_files.h"
#include "system_faults.h"

namespace callgate {
namespace {

using fake::SystemFault;
using ::testing::HasSubstr;

constexpr std::int8_t kBatch = 20;
constexpr std::size_t kCallsTried = 50;

// Runs the step with its call number 0, 1, ... failing, until it makes fewer. prepare(nth) comes
// before each, check(message) after each failure.
template <typename Step, typename Check>
void fail_each(SystemFault::Calls calls, int error, Step&& step, Check&& check) {
  for (std::size_t nth = 0; nth < kCallsTried; ++nth) {
    SCOPED_TRACE("call " + std::to_string(nth));
    std::string message;
    bool struck = false;
    {
      SystemFault fault(calls, nth, error);
      try {
        step();
      } catch (const Error& thrown) {
        message = thrown.what();
      }
      struck = fault.struck();
    }
    check(struck, message);
    if (!struck) return;
  }
  FAIL() << "it never ended";
}

class SystemFaults : public ::testing::TestWithParam<fake::SinkFile> {};

TEST_P(SystemFaults, ASinkWhoseWriteFailsCountsWhatIsLostAndGoesOn) {
  callgate::TemporaryFolder folder;
  int file = 0;
  std::string path;
  std::unique_ptr<Consumer> sink;
  FakeTap tap("x", DType::kS8, {40});
  std::vector<Record> batch;
  for (std::int8_t i = 0; i < kBatch; ++i) batch.push_back(tap.record({Bytes(40, i)}));
  const std::vector last{tap.record({Bytes(40, kBatch)})};
  auto consume = [&] { sink->consume(batch); };
  auto next = [&] {
    path = folder.file(std::to_string(file++));
    sink = GetParam().make(path);
  };
  next();
  fail_each(SystemFault::Calls::kWrite, EIO, consume, [&](bool struck, const std::string& message) {
    const std::uint64_t lost = sink->lost();
    if (struck) {
      EXPECT_THAT(message, HasSubstr(path));
      EXPECT_THAT(message, HasSubstr(std::strerror(EIO)));
    } else {
      EXPECT_EQ(lost, 0U) << message;
    }
    sink->consume(last);
    sink->close();
    EXPECT_EQ(sink->lost(), lost);
    const std::vector<int> numbers = GetParam().read(path);
    EXPECT_EQ(numbers.size(), kBatch + 1 - lost);
    EXPECT_TRUE(std::ranges::is_sorted(numbers));
    EXPECT_GE(numbers.front(), 0) << "a damaged file";
    EXPECT_EQ(numbers.back(), kBatch);
    next();
  });
}

TEST_P(SystemFaults, ASinkThatCanNotBeOpenedSaysWhereAndCanBeOpenedLater) {
  callgate::TemporaryFolder folder;
  const std::string path = folder.file("file");
  FakeTap tap("x", DType::kS8, {40});
  const std::vector batch{tap.record({Bytes(40, 7)})};
  // Some open their file with the first record.
  auto open = [&] {
    auto sink = GetParam().make(path);
    sink->open();
    sink->consume(batch);
    sink->close();
  };
  auto check = [&](bool struck, const std::string& message) {
    if (struck) {
      EXPECT_THAT(message, HasSubstr(path));
      EXPECT_THAT(message, HasSubstr(std::strerror(EMFILE)));
    } else {
      EXPECT_EQ(message, "");
      EXPECT_EQ(GetParam().read(path).back(), 7);
    }
  };
  fail_each(SystemFault::Calls::kOpen, EMFILE, open, check);
}

INSTANTIATE_TEST_SUITE_P(Sinks, SystemFaults, ::testing::ValuesIn(fake::sink_files()),
                         [](const auto& info) { return info.param.name; });

TEST(StreamServerFaults, ASocketThatCanNotBeMadeIsAnErrorWithItsAddressAndLeavesNothing) {
  callgate::TemporaryFolder folder;
  for (const std::string& address :
       {std::string("tcp://127.0.0.1:0"), "unix:" + folder.file("s")}) {
    SCOPED_TRACE(address);
    auto serve = [&] { StreamSink sink(address); };
    auto check = [&](bool struck, const std::string& message) {
      if (struck) {
        EXPECT_THAT(message, HasSubstr(address.substr(0, 14)));
        EXPECT_THAT(message, HasSubstr(std::strerror(EMFILE)));
      } else {
        EXPECT_EQ(message, "");
      }
    };
    fail_each(SystemFault::Calls::kOpen, EMFILE, serve, check);
  }
}

}  // namespace
}  // namespace callgate
