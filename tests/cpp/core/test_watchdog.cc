// SPDX-License-Identifier: Apache-2.0
// Deadlines. Waits for what must happen are long, so that a busy machine fails no test.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/threads.h"

namespace callgate {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(Watchdog, FiresOnceAfterTheDelay) {
  Watchdog watchdog;
  std::atomic<int> fired{0};
  std::latch done(1);
  auto start = Watchdog::Clock::now();
  watchdog.arm(milliseconds(30), [&] {
    fired.fetch_add(1);
    done.count_down();
  });
  done.wait();
  EXPECT_GE(Watchdog::Clock::now() - start, milliseconds(30));
  std::this_thread::sleep_for(milliseconds(60));
  watchdog.stop();
  EXPECT_EQ(fired.load(), 1);
}

TEST(Watchdog, ADisarmedWatchNeverFires) {
  std::latch later(1);
  Watchdog watchdog;  // last, so that its end joins what uses the latch
  auto ticket = watchdog.arm(milliseconds(30), [] { ADD_FAILURE() << "fired"; });
  watchdog.disarm(ticket);
  watchdog.disarm(ticket);  // once more does nothing
  watchdog.arm(milliseconds(60), [&] { later.count_down(); });
  later.wait();
}

TEST(Watchdog, FiresInTheOrderOfTheDeadlines) {
  Watchdog watchdog;
  std::mutex mutex;
  std::vector<int> order;
  std::latch done(4);
  auto note = [&](int value) {
    return [&, value] {
      std::lock_guard lock(mutex);
      order.push_back(value);
      done.count_down();
    };
  };
  watchdog.arm(milliseconds(400), note(3));
  watchdog.arm(milliseconds(300), note(2));
  std::this_thread::sleep_for(milliseconds(10));  // the thread sleeps until 2 by now
  watchdog.arm(milliseconds(50), note(0));
  watchdog.arm(milliseconds(100), note(1));
  done.wait();
  watchdog.stop();
  EXPECT_EQ(order, (std::vector{0, 1, 2, 3}));
}

TEST(Watchdog, AnActionMayArmAndDisarm) {
  std::latch done(1);
  Watchdog watchdog;
  auto other = watchdog.arm(seconds(600), [] { ADD_FAILURE() << "fired"; });
  watchdog.arm(milliseconds(1), [&] {
    watchdog.disarm(other);
    watchdog.arm(milliseconds(1), [&] { done.count_down(); });
  });
  done.wait();
}

TEST(Watchdog, StopWaitsForARunningActionAndDropsTheRest) {
  Watchdog watchdog;
  std::latch running(1);
  bool finished = false;  // not atomic: stop() orders it
  watchdog.arm(milliseconds(0), [&] {
    running.count_down();
    std::this_thread::sleep_for(milliseconds(30));
    finished = true;
  });
  watchdog.arm(seconds(600), [] { ADD_FAILURE() << "fired"; });
  running.wait();
  watchdog.stop();
  EXPECT_TRUE(finished);
}

TEST(Watchdog, AfterStopNothingFires) {
  Watchdog watchdog;
  watchdog.stop();
  auto ticket = watchdog.arm(milliseconds(0), [] { ADD_FAILURE() << "fired"; });
  std::this_thread::sleep_for(milliseconds(20));
  watchdog.disarm(ticket);
  watchdog.stop();
}

TEST(Watchdog, ManyThreadsArmAndDisarm) {
  Watchdog watchdog;
  std::atomic<int> fired{0};
  {
    std::vector<std::jthread> threads;
    for (int worker = 0; worker < 4; ++worker) {
      threads.emplace_back([&] {
        for (int round = 0; round < 100; ++round) {
          auto kept = watchdog.arm(milliseconds(1), [&] { fired.fetch_add(1); });
          auto taken_back = watchdog.arm(seconds(600), [] { ADD_FAILURE() << "fired"; });
          watchdog.disarm(taken_back);
          EXPECT_NE(kept, taken_back);
        }
      });
    }
  }
  auto deadline = Watchdog::Clock::now() + seconds(60);
  while (fired.load() < 400 && Watchdog::Clock::now() < deadline)
    std::this_thread::sleep_for(milliseconds(1));
  watchdog.stop();
  EXPECT_EQ(fired.load(), 400);
}

TEST(Watch, DisarmsWhenItsCallEndsInTime) {
  auto alive = std::make_shared<int>(0);
  {
    Watch watch(seconds(600), [alive] { ADD_FAILURE() << "fired"; });
    EXPECT_EQ(alive.use_count(), 2);
  }
  EXPECT_EQ(alive.use_count(), 1) << "the action is gone with the watch";
}

TEST(Watch, ADelayOfZeroWatchesNothing) {
  Watch watch(seconds(0), [] { ADD_FAILURE() << "fired"; });
  std::this_thread::sleep_for(milliseconds(10));
}

}  // namespace
}  // namespace callgate
