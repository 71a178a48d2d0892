// SPDX-License-Identifier: Apache-2.0
// Events of streams and the thread that runs tasks behind them: order, errors, drain, stop, fork.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/completions.h"
#include "cuda/driver.h"
#include "fake_gpu.h"

namespace callgate::cuda {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;

class CompletionsTest : public fake::InContextTest {
 protected:
  StreamEvent event(Device::Waiting how = Device::Waiting::kAsking) {
    return {device_, stream(), how};
  }

  Completions& completions_ = Completions::of(device_);
};

using EventTest = CompletionsTest;

TEST_F(EventTest, IsReachedWhenItsStreamIs) {
  for (auto how : {Device::Waiting::kAsleep, Device::Waiting::kAsking}) {
    fakecuda_hold(stream_);
    StreamEvent end = event(how);
    EXPECT_FALSE(end.reached());
    std::jthread release([&] {
      std::this_thread::sleep_for(5ms);
      fakecuda_release(stream_);
    });
    EXPECT_EQ(how == Device::Waiting::kAsleep ? end.wait_near() : end.wait(), Result::kSuccess);
    EXPECT_TRUE(end.reached());
  }
}

TEST_F(EventTest, HoldsBackAnotherStreamAlone) {
  void* other = fakecuda_new_stream(0);
  void* third = fakecuda_new_stream(0);
  fakecuda_hold(stream_);
  StreamEvent end = event();
  end.hold_back(static_cast<Stream>(other));
  StreamEvent behind(device_, static_cast<Stream>(other));
  StreamEvent beside(device_, static_cast<Stream>(third));
  EXPECT_EQ(beside.wait(), Result::kSuccess);
  EXPECT_FALSE(behind.reached());
  fakecuda_release(stream_);
  EXPECT_EQ(behind.wait(), Result::kSuccess);
  fakecuda_delete_stream(other);
  fakecuda_delete_stream(third);
}

TEST_F(EventTest, GoesBackToAPool) {
  {
    StreamEvent first = event();
  }
  std::size_t made = fakecuda_calls("cuEventCreate");
  for (int i = 0; i < 10; ++i) StreamEvent again = event();
  EXPECT_EQ(fakecuda_calls("cuEventCreate"), made);
  {
    StreamEvent other = event(Device::Waiting::kAsleep);  // of a pool of its own
  }
  made = fakecuda_calls("cuEventCreate");
  for (int i = 0; i < 10; ++i) StreamEvent again = event(Device::Waiting::kAsleep);
  EXPECT_EQ(fakecuda_calls("cuEventCreate"), made);
  StreamEvent a = event();
  StreamEvent moved = std::move(a);
  EXPECT_EQ(moved.wait(), Result::kSuccess);
}

TEST_F(EventTest, AnEventThatCantBeRecordedIsAnErrorAndNoLeak) {
  {
    StreamEvent first = event();
  }
  fakecuda_live before{}, after{};
  fakecuda_count_live(&before);
  fakecuda_fail("cuEventRecord", 719, 0, 1);
  EXPECT_THROW(event(), Error);
  fakecuda_count_live(&after);
  EXPECT_EQ(after.events, before.events);
  EXPECT_EQ(event().wait(), Result::kSuccess);
}

TEST_F(CompletionsTest, TasksRunInTheOrderInWhichTheyCame) {
  std::vector<int> order;
  fakecuda_hold(stream_);
  for (int i = 0; i < 5; ++i)
    EXPECT_TRUE(completions_.after(event(), [&order, i](Result) { order.push_back(i); }));
  EXPECT_EQ(completions_.pending(), 5);
  EXPECT_TRUE(order.empty());
  fakecuda_release(stream_);
  EXPECT_TRUE(completions_.drain(60s));
  EXPECT_THAT(order, ElementsAre(0, 1, 2, 3, 4));
  EXPECT_EQ(completions_.pending(), 0);
}

TEST_F(CompletionsTest, GivingATaskWaitsForNobody) {
  fakecuda_hold(stream_);
  std::promise<void> ran;
  completions_.after(event(), [&ran](Result) { ran.set_value(); });
  auto future = ran.get_future();
  EXPECT_EQ(future.wait_for(0s), std::future_status::timeout);
  fakecuda_release(stream_);
  EXPECT_EQ(future.wait_for(60s), std::future_status::ready);
}

TEST_F(CompletionsTest, TasksRunWithTheDevicesContextOnAThreadOfTheirOwn) {
  Device& second = Device::at(1);
  void* other = fakecuda_new_stream(1);
  ContextScope scope(second);
  Context seen = nullptr;
  std::thread::id thread;
  Completions::of(second).after(StreamEvent(second, static_cast<Stream>(other)), [&](Result) {
    driver().context_current(&seen);
    thread = std::this_thread::get_id();
  });
  EXPECT_TRUE(Completions::of(second).drain(60s));
  EXPECT_EQ(seen, second.context());
  EXPECT_NE(thread, std::this_thread::get_id());
  EXPECT_NE(&Completions::of(second), &completions_);
  fakecuda_delete_stream(other);
}

TEST_F(CompletionsTest, ATaskIsToldThatItsStreamFailed) {
  std::vector<Result> results;
  auto keep = [&results](Result result) { results.push_back(result); };
  completions_.after(event(), keep);
  EXPECT_TRUE(completions_.drain(60s));
  fakecuda_fail_stream(stream_, 700);
  fakecuda_enqueue(stream_, nullptr, nullptr, nullptr, 0, nullptr, 0);
  completions_.after(event(), keep);
  EXPECT_TRUE(completions_.drain(60s));
  EXPECT_THAT(results, ElementsAre(Result::kSuccess, Result::kIllegalAddress));
  fakecuda_lose(0);  // makes the stream whole again
}

TEST_F(CompletionsTest, ALostDeviceFailsTasksThatWait) {
  fakecuda_hold(stream_);
  std::promise<Result> result;
  completions_.after(event(), [&result](Result failed) { result.set_value(failed); });
  fakecuda_lose(1);
  EXPECT_EQ(result.get_future().get(), Result::kLaunchFailed);
  EXPECT_TRUE(completions_.drain(60s));
  fakecuda_lose(0);
  fakecuda_release(stream_);
}

TEST_F(CompletionsTest, DrainGivesUpInTime) {
  fakecuda_hold(stream_);
  completions_.after(event(), [](Result) {});
  EXPECT_FALSE(completions_.drain(1ms));
  EXPECT_FALSE(Completions::drain_all(1ms));
  fakecuda_release(stream_);
  EXPECT_TRUE(Completions::drain_all(60s));
}

TEST_F(CompletionsTest, DrainInATaskDoesNotWaitForItself) {
  bool drained = false;
  completions_.after(event(), [&](Result) { drained = completions_.drain(60s); });
  EXPECT_TRUE(completions_.drain(60s));
  EXPECT_TRUE(drained);
}

TEST_F(CompletionsTest, WhatATaskHoldsDiesBeforeItCountsAsDone) {
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> watched = held;
  completions_.after(event(), [held = std::move(held)](Result) {});
  EXPECT_TRUE(completions_.drain(60s));
  EXPECT_TRUE(watched.expired());
}

TEST_F(CompletionsTest, ManyThreadsGiveTasks) {
  constexpr int kThreads = 4, kTasks = 100;
  std::mutex mutex;
  int ran = 0;
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&] {
        ContextScope scope(device_);
        for (int i = 0; i < kTasks; ++i) {
          completions_.after(event(), [&](Result) {
            std::lock_guard lock(mutex);
            ++ran;
          });
        }
      });
    }
  }
  EXPECT_TRUE(completions_.drain(60s));
  EXPECT_EQ(ran, kThreads * kTasks);
}

TEST_F(CompletionsTest, OneCallOfTheDriverAnswersForManyTasks) {
  constexpr int kTasks = 160;
  std::vector<int> order;
  std::promise<void> all_reached;
  completions_.after(event(), [&](Result) { all_reached.get_future().wait(); });
  for (int i = 0; i < kTasks; ++i)
    completions_.after(event(), [&, i](Result result) {
      if (result == Result::kSuccess) order.push_back(i);
    });
  fakecuda_finish(stream_);
  std::size_t before = fakecuda_calls("cuEventSynchronize") + fakecuda_calls("cuEventQuery");
  all_reached.set_value();
  EXPECT_TRUE(completions_.drain(60s));
  EXPECT_TRUE(std::ranges::is_sorted(order));
  EXPECT_EQ(order.size(), kTasks);
  EXPECT_LE(fakecuda_calls("cuEventSynchronize") + fakecuda_calls("cuEventQuery") - before, 11U);
}

TEST_F(CompletionsTest, WhatHasComeOnOneStreamSaysNothingOfAnother) {
  void* other = fakecuda_new_stream(0);
  fakecuda_hold(other);
  std::promise<void> all_given;
  std::vector<char> order;
  auto note = [&](char which) { return [&order, which](Result) { order.push_back(which); }; };
  completions_.after(event(), [&](Result) { all_given.get_future().wait(); });
  completions_.after(event(), note('a'));
  completions_.after({device_, static_cast<Stream>(other)}, note('b'));
  completions_.after(event(), note('c'));
  fakecuda_finish(stream_);
  all_given.set_value();
  EXPECT_FALSE(completions_.drain(20ms));
  EXPECT_EQ(completions_.pending(), 2);
  fakecuda_release(other);
  EXPECT_TRUE(completions_.drain(60s));
  EXPECT_THAT(order, ElementsAre('a', 'b', 'c'));
  fakecuda_finish(other);
  fakecuda_delete_stream(other);
}

// In processes of their own: threads that have been stopped don't start again.
using CompletionsDeathTest = CompletionsTest;

TEST_F(CompletionsDeathTest, StopRunsWhatIsThereAndTakesNoMore) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        int ran = 0;
        for (int i = 0; i < 10; ++i) completions_.after(event(), [&ran](Result) { ++ran; });
        bool stopped = Completions::stop_all(60s);
        bool taken = completions_.after(event(), [&ran](Result) { ++ran; });
        bool again = Completions::stop_all(60s);
        std::_Exit(stopped && !taken && again && ran == 10 ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST_F(CompletionsDeathTest, StopGivesUpInTime) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        fakecuda_hold(stream_);
        completions_.after(event(), [](Result) {});
        std::_Exit(Completions::stop_all(1ms) ? 1 : 0);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST_F(CompletionsDeathTest, AForksChildHasNothingToWaitFor) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        fakecuda_hold(stream_);
        completions_.after(event(), [](Result) {});
        pid_t child = fork();
        if (child == 0) {
          Completions::abandon_all();
          bool quiet =
              Completions::drain_all(60s) && Completions::stop_all(60s) && completions_.drain(60s);
          std::_Exit(quiet ? 7 : 8);
        }
        int status = 0;
        waitpid(child, &status, 0);
        std::_Exit(WIFEXITED(status) && WEXITSTATUS(status) == 7 ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace callgate::cuda
