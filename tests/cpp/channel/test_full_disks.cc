// SPDX-License-Identifier: Apache-2.0
// Disks that are full after any number of bytes: what is whole stays, what is lost is counted, and
// writing goes on when there is room. A limit on the size of files stands for the disk: it fails
// writes part of the way.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <numeric>
#include <string>
#include <vector>

#include "core/error.h"
#include "fake_records.h"
#include "sink_files.h"

namespace callgate {
namespace {

constexpr std::int8_t kRecords = 20;

void limit_files(rlim_t bytes) {
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = bytes;
  setrlimit(RLIMIT_FSIZE, &limit);
}

// Writes to a file that has room for `room` bytes for a while; "" where all is as it should be.
std::string check(const fake::SinkFile& kind, const std::string& path, rlim_t room) {
  FakeTap tap("x", DType::kS8, {40});
  auto sink = kind.make(path);
  std::vector<Record> batch;
  for (std::int8_t i = 0; i < kRecords; ++i) batch.push_back(tap.record({Bytes(40, i)}));
  limit_files(room);
  bool threw = false;
  try {
    sink->consume(batch);
  } catch (const Error& error) {
    threw = std::string(error.what()).find(path) != std::string::npos;
  }
  const std::uint64_t lost = sink->lost();
  limit_files(RLIM_INFINITY);
  sink->consume(std::vector{tap.record({Bytes(40, kRecords)})});
  sink->close();
  if (sink->lost() != lost) return "lost more with room again";
  if (threw != (lost != 0)) return "said nothing of what was lost, or not where";
  std::vector<int> expected(kRecords - lost);
  std::iota(expected.begin(), expected.end(), 0);
  expected.push_back(kRecords);
  if (kind.read(path) != expected) return std::to_string(lost) + " lost, by another file";
  return "";
}

// In a child, whose limits and signals these are.
void check_all(const fake::SinkFile& kind, rlim_t step) {
  TemporaryFolder folder;
  const std::string path = folder.file("file");
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    std::string wrong;
    for (rlim_t room = 0; wrong.empty() && room < 4000; room += step) {
      ::unlink(path.c_str());
      try {
        wrong = check(kind, path, room);
      } catch (const std::exception& error) {
        wrong = error.what();
      }
      if (!wrong.empty()) wrong.insert(0, "room for " + std::to_string(room) + ": ");
    }
    write_text(folder.file("wrong"), wrong);
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(read_text(folder.file("wrong")), "");
}

class FullDisks : public ::testing::TestWithParam<fake::SinkFile> {};

TEST_P(FullDisks, WhatIsWholeStaysAndTheRestIsCounted) { check_all(GetParam(), 31); }

INSTANTIATE_TEST_SUITE_P(Sinks, FullDisks, ::testing::ValuesIn(fake::sink_files()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace callgate
