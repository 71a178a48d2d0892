// SPDX-License-Identifier: Apache-2.0
// Streams over sockets: several readers, slow ones, dead ones. Nothing waits for time to pass but a
// bounded close.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "callgate/stream.h"
#include "channel/stream_address.h"
#include "channel/stream_sink.h"
#include "core/error.h"
#include "stream_records.h"

namespace callgate {
namespace {

using ::testing::HasSubstr;
using testing::OwnedRecord;
using testing::record_of;
using testing::TemporaryFolder;

int connected(const StreamSink& sink) {
  return connect_stream(parse_stream_address(sink.address())).release();
}

// A reader that the sink has taken in: it sends the session's frame at once.
class Joined {
 public:
  explicit Joined(const StreamSink& sink) : reader_(connected(sink)) {
    char byte = 0;
    EXPECT_EQ(recv(reader_.fd(), &byte, 1, MSG_PEEK), 1);  // waits for it
  }
  stream::Reader& operator*() noexcept { return reader_; }
  stream::Reader* operator->() noexcept { return &reader_; }

 private:
  stream::Reader reader_;
};

void send_one(StreamSink& sink, const Source& source, std::uint64_t step) {
  OwnedRecord owned = record_of(source, step);
  sink.consume({&owned.record, 1});
}

class StreamSocket : public ::testing::TestWithParam<const char*> {
 protected:
  // A Unix socket in the test's folder, or any free port.
  std::string destination() const {
    return GetParam() == std::string("unix") ? "unix:" + (folder_ / "socket") : "tcp://127.0.0.1:0";
  }

 private:
  TemporaryFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Transports, StreamSocket, ::testing::Values("unix", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(StreamSocket, EachReaderGetsAllDescriptionsAndTheRecordsFromThenOn) {
  StreamSink sink(destination());
  auto first = testing::scalar_source(1), second = testing::scalar_source(2);
  send_one(sink, *first, 0);  // nobody listens
  Joined early(sink);
  send_one(sink, *second, 1);
  Joined late(sink);
  send_one(sink, *first, 2);
  send_one(sink, *second, 3);
  sink.close();
  for (auto [reader, begin] : {std::pair{&early, 1U}, std::pair{&late, 2U}}) {
    for (std::uint64_t seq = begin; seq < 4; ++seq) {
      auto record = (*reader)->next();
      ASSERT_TRUE(record);
      EXPECT_EQ(record->seq, seq);
      EXPECT_EQ(record->source->id, seq % 2 + 1);
    }
    EXPECT_FALSE((*reader)->next());
    EXPECT_TRUE((*reader)->closed());
    EXPECT_EQ((*reader)->sources().size(), 2U);
  }
}

TEST_P(StreamSocket, ReadersThatComeWhileRecordsAreSentMissNoDescription) {
  StreamSink sink(destination());
  // A new source with each batch, so that a reader often joins between the two.
  std::vector<std::shared_ptr<const Source>> sources;
  std::jthread producer([&](const std::stop_token& stop) {
    for (std::uint64_t i = 0; !stop.stop_requested(); ++i) {
      if (i < 2'000) sources.push_back(testing::scalar_source(i));
      send_one(sink, *sources.back(), sources.back()->id);
    }
  });
  for (int round = 0; round < 40; ++round) {
    stream::Reader reader(connected(sink));
    if (auto record = reader.next()) {
      EXPECT_EQ(record->source->id, record->seq);
    }
  }
}

TEST_P(StreamSocket, AReaderThatDoesNotReadIsDisconnectedAndHoldsNobodyUp) {
  StreamServer::Limits limits;
  limits.lag_bytes = 1 << 20;
  StreamSink sink(destination(), limits);
  Source large;
  large.id = 1;
  large.leaves = {testing::leaf("", DType::kS8, {1 << 18})};
  auto source = testing::finished(std::move(large));
  Joined lazy(sink);
  OwnedRecord owned = record_of(*source, 0);
  std::vector<Record> batch(8, owned.record);
  // Far more than the limit and all of the system's buffers; it would block for ever.
  for (int i = 0; i < 64; ++i) sink.consume(batch);
  Joined diligent(sink);
  send_one(sink, *source, 77);
  auto record = diligent->next();
  ASSERT_TRUE(record);
  EXPECT_EQ(record->seq, 77U);
  std::size_t got = 0;
  while (lazy->next()) ++got;
  EXPECT_LT(got, 64U * 8U);
  EXPECT_TRUE(lazy->ended());
  EXPECT_FALSE(lazy->closed());
}

TEST_P(StreamSocket, AReaderThatVanishesHurtsNobody) {
  StreamSink sink(destination());
  auto source = testing::scalar_source();
  Joined stays(sink);
  for (std::uint64_t i = 0; i < 100; ++i) {
    Joined vanishes(sink);
    send_one(sink, *source, i);
  }
  sink.close();
  for (std::uint64_t i = 0; i < 100; ++i) {
    auto record = stays->next();
    ASSERT_TRUE(record);
    EXPECT_EQ(record->seq, i);
  }
}

TEST_P(StreamSocket, ClosingWaitsABoundedTimeForAReaderThatDoesNotRead) {
  StreamServer::Limits limits;
  limits.close_wait = std::chrono::milliseconds(20);
  StreamSink sink(destination(), limits);
  Source large;
  large.leaves = {testing::leaf("", DType::kS8, {32 << 20})};
  auto source = testing::finished(std::move(large));
  Joined lazy(sink);
  send_one(sink, *source, 0);
  sink.close();  // returns
  EXPECT_FALSE(lazy->next());
  EXPECT_TRUE(lazy->ended());
}

TEST(StreamAddress, TextIsTakenApartAndPutTogether) {
  StreamAddress address = parse_stream_address("tcp://[::1]:70");
  EXPECT_EQ(address.host, "::1");
  EXPECT_EQ(address.port, 70);
  EXPECT_EQ(address.text(), "tcp://[::1]:70");
  EXPECT_EQ(parse_stream_address("tcp://:8").host, "127.0.0.1");
  EXPECT_EQ(parse_stream_address("unix:a/b").path, "a/b");
  EXPECT_EQ(parse_stream_address("a:b").transport, StreamTransport::kFile);
  for (const char* bad : {"", "unix:", "tcp://", "tcp://host", "tcp://host:", "tcp://host:65536",
                          "tcp://host:1x", "tcp://::1:70", "tcp://host:-1", "tcp://[[a]]:1"})
    EXPECT_THROW(parse_stream_address(bad), Error) << bad;
}

TEST(StreamSockets, APortOrPathInUseIsAnErrorThatNamesIt) {
  TemporaryFolder folder;
  for (const std::string& wanted : {std::string("tcp://127.0.0.1:0"), "unix:" + (folder / "s")}) {
    StreamSink sink(wanted);
    try {
      StreamSink other(sink.address());
      FAIL() << "two servers at " << sink.address();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(sink.address()));
    }
  }
}

TEST(StreamSockets, WhatADeadServerLeftAtAPathIsReplacedAndOtherFilesAreNot) {
  TemporaryFolder folder;
  std::string address = "unix:" + (folder / "s");
  {
    StreamAddress parsed = parse_stream_address(address);
    UniqueFd left = listen_stream(parsed);  // closed without unlink, as by a killed process
  }
  {
    StreamSink sink(address);
    struct stat status{};
    ASSERT_EQ(stat((folder / "s").c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777U, 0600U);
  }
  EXPECT_NE(access((folder / "s").c_str(), F_OK), 0) << "closing removes it";
  testing::write_contents(folder / "s", "precious");
  EXPECT_THROW(StreamSink{address}, Error);
  EXPECT_EQ(testing::contents(folder / "s"), "precious");
}

}  // namespace
}  // namespace callgate
