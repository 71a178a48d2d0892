// SPDX-License-Identifier: Apache-2.0
// The costs of a stream's server for its process: descriptors, threads' time, delays of its
// readers. Tests that limit descriptors do so in a process of their own.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "callgate/stream.h"
#include "channel/stream_address.h"
#include "channel/stream_sink.h"
#include "stream_records.h"

namespace callgate {
namespace {

using ::testing::HasSubstr;
using testing::TemporaryFolder;

int connected(const std::string& address) {
  return connect_stream(parse_stream_address(address)).release();
}

// The first bytes of a connection, as far as they come within a long time: a stream's begin with
// "cgs" and the kind of their frame. Nothing when the connection ended.
std::string first_bytes(int fd, int flags = MSG_PEEK) {
  pollfd polled{fd, POLLIN, 0};
  if (poll(&polled, 1, 20'000) != 1) return "nothing in time";
  std::array<char, 4> bytes{};
  ssize_t got = recv(fd, bytes.data(), bytes.size(), flags | MSG_WAITALL);
  return {bytes.data(), got < 0 ? 0 : static_cast<std::size_t>(got)};
}

void limit_descriptors(rlim_t count) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = count;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// The number of the next descriptor.
int next_descriptor() {
  UniqueFd next(open("/dev/null", O_RDONLY));
  return next.get();
}

// Runs in a process of its own; what it returns is that one's exit status.
class OwnProcess {
 public:
  explicit OwnProcess(const std::function<int()>& body) : child_(fork()) {
    if (child_ == 0) _exit(body());
  }
  int status() const {
    int status = 0;
    waitpid(child_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
  }

 private:
  pid_t child_;
};

void say(int fd) { EXPECT_EQ(::write(fd, "x", 1), 1); }
void hear(int fd) {
  char byte = 0;
  EXPECT_EQ(::read(fd, &byte, 1), 1);
}

TEST(StreamServer, ReadersLeaveDescriptorsForTheRestOfTheProcess) {
  TemporaryFolder folder;
  std::string address = "unix:" + (folder / "socket");
  std::array<int, 2> ready{}, go{};
  ASSERT_EQ(pipe(ready.data()), 0);
  ASSERT_EQ(pipe(go.data()), 0);
  OwnProcess server([&] {
    limit_descriptors(static_cast<rlim_t>(next_descriptor()) + 64);
    StreamSink sink(address);
    say(ready[1]);
    hear(go[0]);
    std::vector<UniqueFd> checkpoints;
    for (int i = 0; i < 20; ++i) checkpoints.emplace_back(open("/dev/null", O_RDONLY));
    return checkpoints.back() ? 0 : 1;
  });
  hear(ready[0]);
  std::vector<std::unique_ptr<stream::Reader>> readers;
  std::size_t joined = 0, refused = 0;
  for (int i = 0; i < 100; ++i) {
    readers.push_back(std::make_unique<stream::Reader>(connected(address)));
    std::string kind = first_bytes(readers.back()->fd());
    if (kind == "nothing in time") break;
    joined += kind == "cgsS" ? 1 : 0;
    refused += kind == "cgsX" ? 1 : 0;
  }
  say(go[1]);
  EXPECT_EQ(server.status(), 0);
  EXPECT_GE(joined, 4U);
  EXPECT_LE(joined, 30U);
  EXPECT_EQ(joined + refused, 100U);
  for (int fd : {ready[0], ready[1], go[0], go[1]}) close(fd);
}

TEST(StreamServer, AReaderTooManyIsToldSoAndTheNextOneIsServedWhenOneHasLeft) {
  TemporaryFolder folder;
  StreamServer::Limits limits;
  limits.readers = 2;
  for (const std::string& wanted : {std::string("tcp://127.0.0.1:0"), "unix:" + (folder / "s")}) {
    StreamSink sink(wanted, limits);
    UniqueFd first(connected(sink.address()));
    EXPECT_EQ(first_bytes(first.get()), "cgsS");
    {
      UniqueFd second(connected(sink.address()));
      EXPECT_EQ(first_bytes(second.get()), "cgsS");
      stream::Reader third(connected(sink.address()));
      try {
        third.next();
        ADD_FAILURE() << "a third reader is served";
      } catch (const stream::RefusedError& error) {
        EXPECT_THAT(error.what(), HasSubstr("there are already 2 readers, of at most 2"));
      }
      EXPECT_FALSE(third.closed());
    }
    for (;;) {  // until the server has seen that the second one left
      UniqueFd next(connected(sink.address()));
      std::string kind = first_bytes(next.get());
      if (kind == "cgsS") break;
      ASSERT_EQ(kind, "cgsX");
    }
    auto source = testing::scalar_source();
    testing::OwnedRecord owned = testing::record_of(*source, 5);
    sink.consume({&owned.record, 1});  // the first one has what it came for
    stream::Reader reader(first.release());
    auto record = reader.next();
    ASSERT_TRUE(record);
    EXPECT_EQ(record->seq, 5U);
  }
}

TEST(StreamServer, AReaderIsRefusedWhereNoDescriptorIsLeftAndALaterOneIsServed) {
  TemporaryFolder folder;
  std::string address = "unix:" + (folder / "socket");
  OwnProcess process([&] {
    StreamSink sink(address);
    UniqueFd first(connected(address));  // stays: its end at the server would make room later
    if (first_bytes(first.get()) != "cgsS") return 4;
    std::vector<UniqueFd> taken;
    limit_descriptors(static_cast<rlim_t>(next_descriptor()) + 8);
    std::vector<int> clients;
    for (int i = 0; i < 4; ++i) clients.push_back(socket(AF_UNIX, SOCK_STREAM, 0));
    while (next_descriptor() >= 0) taken.emplace_back(open("/dev/null", O_RDONLY));
    sockaddr_un where{};
    where.sun_family = AF_UNIX;
    parse_stream_address(address).path.copy(where.sun_path, sizeof(where.sun_path) - 1);
    for (int client : clients) {
      if (connect(client, reinterpret_cast<const sockaddr*>(&where), sizeof(where)) != 0) return 3;
      if (first_bytes(client) != "cgsX") return 1;
    }
    taken.clear();
    UniqueFd client(connected(address));
    return first_bytes(client.get()) == "cgsS" ? 0 : 2;
  });
  EXPECT_EQ(process.status(), 0);
}

TEST(StreamServer, AServerThatCanAcceptNobodyRestsInBetweenAndGoesOnLater) {
  TemporaryFolder folder;
  std::string address = "unix:" + (folder / "socket");
  OwnProcess process([&] {
    StreamSink sink(address);
    UniqueFd first(connected(address));
    if (first_bytes(first.get()) != "cgsS") return 4;
    UniqueFd client(socket(AF_UNIX, SOCK_STREAM, 0));
    rlimit before{};
    getrlimit(RLIMIT_NOFILE, &before);
    limit_descriptors(3);  // even a descriptor that is given up makes no room
    sockaddr_un where{};
    where.sun_family = AF_UNIX;
    parse_stream_address(address).path.copy(where.sun_path, sizeof(where.sun_path) - 1);
    if (connect(client.get(), reinterpret_cast<const sockaddr*>(&where), sizeof(where)) != 0)
      return 1;
    std::clock_t begin = std::clock();  // of all threads' time, which others' work can't add to
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (std::clock() - begin > CLOCKS_PER_SEC / 10) return 2;
    setrlimit(RLIMIT_NOFILE, &before);
    return first_bytes(client.get()) == "cgsS" ? 0 : 3;
  });
  EXPECT_EQ(process.status(), 0);
}

TEST(StreamServer, RecordsAreSentToAPortWithoutWaitingForMore) {
  StreamSink sink("tcp://127.0.0.1:0");
  UniqueFd client(connected(sink.address()));
  ASSERT_EQ(first_bytes(client.get()), "cgsS");
  sockaddr_in own{};
  socklen_t size = sizeof(own);
  ASSERT_EQ(getsockname(client.get(), reinterpret_cast<sockaddr*>(&own), &size), 0);
  int found = 0;
  for (int fd = 0; fd < 1024; ++fd) {  // the server's end is one of this process, too
    sockaddr_in peer{};
    size = sizeof(peer);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
    if (peer.sin_family != AF_INET || peer.sin_port != own.sin_port) continue;
    int no_delay = 0;
    size = sizeof(no_delay);
    ASSERT_EQ(getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &no_delay, &size), 0);
    EXPECT_NE(no_delay, 0);
    ++found;
  }
  EXPECT_EQ(found, 1);
}

}  // namespace
}  // namespace callgate
