// SPDX-License-Identifier: Apache-2.0
// Calls race with the end of the process; each test has a lifecycle of its own.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "core/lifecycle.h"

namespace callgate {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(Lifecycle, CountsTheCallsInside) {
  Lifecycle lifecycle;
  EXPECT_EQ(lifecycle.active(), 0);
  EXPECT_TRUE(lifecycle.enter());
  EXPECT_TRUE(lifecycle.enter());
  EXPECT_EQ(lifecycle.active(), 2);
  lifecycle.leave();
  EXPECT_EQ(lifecycle.active(), 1);
  lifecycle.leave();
  EXPECT_EQ(lifecycle.active(), 0);
  EXPECT_FALSE(lifecycle.closed());
}

TEST(Lifecycle, AfterCloseNobodyEnters) {
  Lifecycle lifecycle;
  EXPECT_TRUE(lifecycle.close(seconds(0)));
  EXPECT_TRUE(lifecycle.closed());
  EXPECT_FALSE(lifecycle.enter());
  EXPECT_EQ(lifecycle.active(), 0) << "a refused call leaves no trace";
  EXPECT_TRUE(lifecycle.close(seconds(0))) << "closing again changes nothing";
}

TEST(Lifecycle, CloseGivesUpOnACallThatStays) {
  Lifecycle lifecycle;
  ASSERT_TRUE(lifecycle.enter());
  EXPECT_FALSE(lifecycle.close(milliseconds(5)));
  EXPECT_TRUE(lifecycle.closed());
  EXPECT_EQ(lifecycle.active(), 1);
  lifecycle.leave();
  EXPECT_TRUE(lifecycle.close(seconds(0)));
}

TEST(Lifecycle, CloseWaitsForTheCallsInsideAndSeesWhatTheyDid) {
  Lifecycle lifecycle;
  ASSERT_TRUE(lifecycle.enter());
  int effect = 0;  // not atomic: the thread sanitizer checks that close() orders it
  std::jthread call([&] {
    std::this_thread::sleep_for(milliseconds(20));
    effect = 1;
    lifecycle.leave();
  });
  EXPECT_TRUE(lifecycle.close(seconds(60)));
  EXPECT_EQ(effect, 1);
}

TEST(Lifecycle, ManyCallsRaceWithCloseAndEveryCountIsExact) {
  for (int round = 0; round < 20; ++round) {
    Lifecycle lifecycle;
    std::atomic<std::int64_t> inside{0}, started{0}, entered{0};
    std::atomic<bool> closed{false};
    {
      std::vector<std::jthread> threads;
      for (int worker = 0; worker < 8; ++worker) {
        threads.emplace_back([&] {
          started.fetch_add(1);
          while (lifecycle.enter()) {
            inside.fetch_add(1);
            EXPECT_FALSE(closed.load()) << "a call came in after close had returned";
            entered.fetch_add(1);
            inside.fetch_sub(1);
            lifecycle.leave();
          }
        });
      }
      while (started.load() < 8) std::this_thread::yield();
      EXPECT_TRUE(lifecycle.close(seconds(60)));
      closed.store(true);
      EXPECT_EQ(inside.load(), 0);
    }
    EXPECT_EQ(lifecycle.active(), 0);
    EXPECT_TRUE(lifecycle.closed());
  }
}

TEST(ActiveCall, EntersAndLeavesWithItsScope) {
  std::int64_t before = Lifecycle::instance().active();
  {
    ActiveCall call;
    EXPECT_TRUE(call.entered());
    EXPECT_EQ(Lifecycle::instance().active(), before + 1);
  }
  EXPECT_EQ(Lifecycle::instance().active(), before);
}

}  // namespace
}  // namespace callgate
