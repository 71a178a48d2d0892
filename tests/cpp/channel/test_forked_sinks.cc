// SPDX-License-Identifier: Apache-2.0
// A process that is forked while a sink has its file open, and ends the sink: the file and its lock
// are the parent's.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "fake_records.h"
#include "sink_files.h"

namespace callgate {
namespace {

class ForkedSinks : public ::testing::TestWithParam<fake::SinkFile> {};

TEST_P(ForkedSinks, TheChildLeavesTheFileAndItsLockToTheParent) {
  const TemporaryFolder folder;
  const std::string path = folder.file("file");
  FakeTap tap("x", DType::kS8, {40});
  std::unique_ptr<Consumer> sink = GetParam().make(path);
  sink->consume(std::vector{tap.record({Bytes(40, 0)})});
  const std::string before = read_text(path);
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    sink.reset();  // as an interpreter that ends does
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(read_text(path), before);
  if (GetParam().name == "Outfeed2020") {  // which has one writer
    EXPECT_THROW(GetParam().make(path), Error);
  }
  sink->consume(std::vector{tap.record({Bytes(40, 1)})});
  sink->close();
  EXPECT_EQ(GetParam().read(path), (std::vector<int>{0, 1}));
}

INSTANTIATE_TEST_SUITE_P(Sinks, ForkedSinks, ::testing::ValuesIn(fake::sink_files()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace callgate
