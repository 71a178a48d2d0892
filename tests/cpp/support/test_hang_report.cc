// SPDX-License-Identifier: Apache-2.0
// A test that hangs says which it is and where all its threads are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <latch>
#include <thread>

#include "hang_report.h"

namespace callgate {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

TEST(HangReportDeathTest, NamesTheTestAndEveryThread) {
  EXPECT_DEATH(
      {
        std::latch never(1);
        std::jthread other([&] {
          pthread_setname_np(pthread_self(), "the-other");
          never.wait();
        });
        fake::report_hang_in(std::chrono::milliseconds(300));
        never.wait();
      },
      AllOf(HasSubstr("NamesTheTestAndEveryThread hangs"),
            ContainsRegex("== thread [0-9]+ \\(callgate_tests\\)"),
            ContainsRegex("== thread [0-9]+ \\(the-other\\)")));
}

}  // namespace
}  // namespace callgate
