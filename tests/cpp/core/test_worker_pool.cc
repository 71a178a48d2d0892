// SPDX-License-Identifier: Apache-2.0
// The pool that must never queue a job behind a blocked one.
//
// A latch or promise may still be in use by its notifier when its waiter goes on: what a job
// notifies is declared before the pool, whose end joins the job, or is shared with it.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "core/threads.h"

namespace callgate {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(WorkerPool, RunsAJobOnAThreadOfItsOwn) {
  std::promise<std::thread::id> ran_on;
  WorkerPool pool;
  ASSERT_TRUE(pool.submit([&] { ran_on.set_value(std::this_thread::get_id()); }));
  EXPECT_NE(ran_on.get_future().get(), std::this_thread::get_id());
}

TEST(WorkerPool, NestedJobsThatBlockOnEachOtherAllFinish) {
  constexpr int kDepth = 24;
  WorkerPool pool;
  std::function<void(int)> nested = [&](int depth) {
    if (depth == 0) return;
    auto inner = std::make_shared<std::latch>(1);
    ASSERT_TRUE(pool.submit([&nested, depth, inner] {
      nested(depth - 1);
      inner->count_down();
    }));
    inner->wait();
  };
  nested(kDepth);
  EXPECT_LE(pool.size(), static_cast<std::size_t>(kDepth));
}

TEST(WorkerPool, JobsThatMeetAtABarrierAllFinish) {
  constexpr int kJobs = 16;
  WorkerPool pool;
  for (int round = 0; round < 20; ++round) {  // with fresh threads, then with idle ones
    auto meeting = std::make_shared<std::latch>(kJobs);
    auto finished = std::make_shared<std::latch>(kJobs);
    for (int job = 0; job < kJobs; ++job) {
      ASSERT_TRUE(pool.submit([meeting, finished] {
        meeting->arrive_and_wait();
        finished->count_down();
      }));
    }
    finished->wait();
  }
}

TEST(WorkerPool, AnIdleThreadIsUsedAgain) {
  WorkerPool pool;
  for (int round = 0; round < 50; ++round) {
    auto ran = std::make_shared<std::promise<void>>();
    ASSERT_TRUE(pool.submit([ran] { ran->set_value(); }));
    ran->get_future().wait();
  }
  EXPECT_LT(pool.size(), 50U);
}

TEST(WorkerPool, ManyThreadsSubmitAndEveryJobRunsOnce) {
  WorkerPool pool;
  std::atomic<int> ran{0};
  {
    std::vector<std::jthread> threads;
    for (int worker = 0; worker < 4; ++worker) {
      threads.emplace_back([&] {
        for (int job = 0; job < 100; ++job) pool.submit([&] { ran.fetch_add(1); });
      });
    }
  }
  pool.stop();
  EXPECT_EQ(ran.load(), 400);
}

TEST(WorkerPool, StopFinishesTheJobsAtHand) {
  WorkerPool pool;
  std::atomic<int> finished{0};
  for (int job = 0; job < 6; ++job) {
    ASSERT_TRUE(pool.submit([&] {
      std::this_thread::sleep_for(milliseconds(20));
      finished.fetch_add(1);
    }));
  }
  pool.stop();
  EXPECT_EQ(finished.load(), 6);
  EXPECT_EQ(pool.size(), 0U);
}

TEST(WorkerPool, AfterStopNoJobIsTaken) {
  WorkerPool pool;
  pool.stop();
  EXPECT_FALSE(pool.submit([] { ADD_FAILURE() << "the job ran"; }));
  pool.stop();
}

TEST(WorkerPool, WhatAJobHoldsDiesWithIt) {
  WorkerPool pool;
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> watched = held;
  ASSERT_TRUE(pool.submit([held = std::move(held)] {}));
  auto deadline = std::chrono::steady_clock::now() + seconds(60);
  while (!watched.expired() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(watched.expired());
}

TEST(WorkerPool, IdleThreadsBeyondAFewEnd) {
  std::latch meeting(8);
  std::promise<void> ran;
  WorkerPool pool;
  for (int job = 0; job < 8; ++job) {
    ASSERT_TRUE(pool.submit([&] { meeting.arrive_and_wait(); }));
  }
  meeting.wait();
  auto deadline = std::chrono::steady_clock::now() + seconds(60);
  while (pool.size() > 2 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(milliseconds(50));
  EXPECT_LE(pool.size(), 2U);
  // The next job joins those that ended, and runs.
  ASSERT_TRUE(pool.submit([&] { ran.set_value(); }));
  ran.get_future().wait();
}

}  // namespace
}  // namespace callgate
