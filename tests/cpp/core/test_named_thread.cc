// SPDX-License-Identifier: Apache-2.0
// The thread that runs all that is given to it in order.
#include <gtest/gtest.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/named_thread.h"

namespace callgate {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(NamedThread, RunsJobsInTheirOrderOnOneThread) {
  NamedThread thread("test");
  std::vector<int> order;  // written there alone, until run() has returned
  std::vector<std::thread::id> ids;
  for (int job = 0; job < 20; ++job)
    ASSERT_TRUE(thread.submit([&, job] {
      order.push_back(job);
      ids.push_back(std::this_thread::get_id());
    }));
  ASSERT_TRUE(thread.run([] {}));
  for (int job = 0; job < 20; ++job) EXPECT_EQ(order[static_cast<std::size_t>(job)], job);
  for (std::thread::id id : ids) EXPECT_EQ(id, ids[0]);
  EXPECT_NE(ids[0], std::this_thread::get_id());
}

TEST(NamedThread, AJobThatWaitsForALaterOneServesIt) {
  NamedThread thread("test");
  EXPECT_EQ(NamedThread::current(), 0U);
  bool inner_ran = false, found = false;
  thread.run([&] {
    EXPECT_EQ(NamedThread::current(), thread.number());
    ASSERT_TRUE(thread.submit([&] { inner_ran = true; }));
    found = NamedThread::serve(seconds(60));
    EXPECT_TRUE(inner_ran);
    EXPECT_FALSE(NamedThread::serve(milliseconds(1)));
    bool at_once = false;
    thread.run([&] { at_once = true; });
    EXPECT_TRUE(at_once);
  });
  EXPECT_TRUE(found);
}

TEST(NamedThread, ThrowsWhatTheBodyThrows) {
  NamedThread thread("test");
  EXPECT_THROW(thread.run([] { throw std::runtime_error("it"); }), std::runtime_error);
}

TEST(NamedThread, AfterCloseWhatItHasRunsAndNothingElseIsTaken) {
  NamedThread thread("test");
  EXPECT_TRUE(thread.has_ended(milliseconds(0)));  // it never began
  std::promise<void> go_on;
  std::atomic<bool> second{false};
  ASSERT_TRUE(thread.submit([ready = go_on.get_future().share()] { ready.wait(); }));
  ASSERT_TRUE(thread.submit([&] { second = true; }));
  thread.close();
  EXPECT_FALSE(thread.submit([] {}));
  EXPECT_FALSE(thread.run([] {}));
  EXPECT_FALSE(thread.has_ended(milliseconds(1)));
  go_on.set_value();
  EXPECT_TRUE(thread.has_ended(seconds(60)));
  EXPECT_TRUE(second);
}

// Where the two share a core the thread can't go on while it is watched for.
TEST(NamedThread, IsWatchedForOnAnotherCoreAlone) {
  NamedThread thread("test");
  int looks = 0;
  const auto look = [&] { return ++looks == 3; };
  thread.watch_for_end(look);  // nobody knows its core yet
  EXPECT_EQ(looks, 3);
#ifdef __linux__
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  CPU_ZERO(&one);
  CPU_SET(current_core(), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  ASSERT_TRUE(thread.run([&] { EXPECT_EQ(sched_setaffinity(0, sizeof(one), &one), 0); }));
  ASSERT_TRUE(thread.run([] {}));
  looks = 0;
  thread.watch_for_end(look);
  EXPECT_EQ(looks, 0);
  EXPECT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
#endif
}

}  // namespace
}  // namespace callgate
