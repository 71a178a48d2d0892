// SPDX-License-Identifier: Apache-2.0
// Turns: calls of kernels that are not thread-safe run one after the other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <latch>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_attributes.h"
#include "fake_executor.h"
#include "fake_kernel.h"
#include "kernels/kernel.h"
#include "kernels/kernel_debug.h"

namespace callgate {
namespace {

using fake::Arrays;
using fake::in_out;
using fake::operand;
using fake::result;
using ::testing::HasSubstr;

std::atomic<int> calls_inside{0}, most_inside{0};

// In x, Out z. Gives other calls time to come in; says how many were inside at once, at most.
std::int32_t linger(const callgate_call* call) {
  int now = calls_inside.fetch_add(1) + 1;
  for (int before = most_inside; before < now && !most_inside.compare_exchange_weak(before, now);) {
  }
  for (int i = 0; i < 20; ++i) std::this_thread::yield();
  result(call, 1)[0] = 2 * operand(call, 0)[0];
  calls_inside.fetch_sub(1);
  return 0;
}

// How many calls of these sites were inside at once, at most: 40 calls on each of four threads.
int most_at_once(std::vector<KernelSite*> sites, int lanes_each) {
  most_inside = 0;
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < 4; ++i) {
    callers.emplace_back([&, i] {
      for (int round = 0; round < 40; ++round) {
        std::vector<float> x(static_cast<std::size_t>(lanes_each), 3), z(x.size());
        Arrays in, out;
        in.add(x);
        out.add(z);
        EXPECT_TRUE(fake::call(*sites[i % sites.size()], in, out).ok());
        EXPECT_EQ(z.back(), 6);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  return most_inside;
}

KernelSpec with_lanes(const char* text) {
  KernelSpec spec;
  spec.lanes = fake::lanes(text);
  return spec;
}

KernelInfo lingering(const char* name) {
  KernelInfo info;
  info.name = name;
  info.function = &linger;
  info.parameters = in_out();
  return info;
}

TEST(KernelTurns, CallsOfAKernelThatIsNotThreadSafeRunOneAfterTheOther) {
  auto callee = std::make_shared<KernelCallee>(lingering("k"), nullptr);
  auto one = callee->bind({}), other = callee->bind({}), lane = callee->bind(with_lanes("1:1"));
  EXPECT_EQ(most_at_once({one.get(), other.get(), lane.get()}, 1), 1);
}

TEST(KernelTurns, KernelsMayShareATurn) {
  auto turn = std::make_shared<KernelTurn>();
  std::vector<std::unique_ptr<KernelSite>> sites;
  for (const char* name : {"k", "l"}) {
    KernelInfo info = lingering(name);
    info.turn = turn;
    sites.push_back(std::make_shared<KernelCallee>(std::move(info), nullptr)->bind({}));
  }
  EXPECT_EQ(most_at_once({sites[0].get(), sites[1].get()}, 1), 1);
}

TEST(KernelTurns, CodeOfOneLibraryHasOneTurn) {
  auto* here = reinterpret_cast<const void*>(&linger);
  auto turn = turn_of_library(here);
  EXPECT_EQ(turn_of_library(reinterpret_cast<const void*>(&fake::twice)), turn);
  EXPECT_NE(turn, nullptr);
  auto memory = std::make_unique<int>();  // code that no library has
  EXPECT_EQ(turn_of_library(memory.get()), nullptr);
}

TEST(KernelTurns, AllLanesOfACallAreOneTurn) {
  auto site = std::make_shared<KernelCallee>(lingering("k"), nullptr)->bind(with_lanes("3:1"));
  EXPECT_EQ(most_at_once({site.get()}, 3), 1);
}

TEST(KernelTurns, CallsOfAThreadSafeKernelRunAtOnce) {
  // Each call waits for the other one.
  static std::latch* both;
  auto meet = [](const callgate_call* call) {
    both->arrive_and_wait();
    return fake::twice(call);
  };
  std::latch latch(2);
  both = &latch;
  KernelInfo info = lingering("k");
  info.function = meet;
  info.thread_safe = true;
  auto site = std::make_shared<KernelCallee>(std::move(info), nullptr)->bind({});
  std::vector<std::jthread> callers;
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back([&] {
      std::vector<float> x = {1}, z(1);
      Arrays in, out;
      in.add(x);
      out.add(z);
      EXPECT_TRUE(fake::call(*site, in, out).ok());
    });
  }
}

TEST(KernelTurns, AKernelsOwnThreadsDoNotWaitForItsTurn) {
  // Its loop runs on helpers while it has its turn; two callers, whose helpers share a pool.
  auto parts = [](const callgate_call* call) {
    call->services->parallel_for(call, 0, 64, 1, [](void*, std::int64_t, std::int64_t) {}, nullptr);
    return fake::twice(call);
  };
  KernelInfo info = lingering("k");
  info.function = parts;
  auto site = std::make_shared<KernelCallee>(std::move(info), nullptr)->bind({});
  fake::Threads threads(4);
  std::vector<std::jthread> callers;
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        std::vector<float> x = {1}, z(1);
        Arrays in, out;
        in.add(x);
        out.add(z);
        EXPECT_TRUE(fake::call(*site, in, out, &threads).ok());
      }
    });
  }
}

// The watchdog's report of a call that goes on until the report is there.
std::string report_of_a_call(std::int64_t stall_ns, bool turn_is_taken) {
  struct Report {
    std::latch said{1};
    std::string text;
  };
  static Report* current;
  auto report =
      std::make_shared<Report>();  // the watchdog's thread may be the last to let go of it
  current = report.get();
  KernelInfo info = lingering("k");
  info.turn = std::make_shared<KernelTurn>();
  info.function = [](const callgate_call* call) {
    current->said.wait();
    return fake::twice(call);
  };
  KernelTurn::Hold turn;
  if (turn_is_taken) turn = info.turn->take();
  auto callee = std::make_shared<KernelCallee>(std::move(info), nullptr);
  callee->set_report([report](const std::string& call) {
    report->text = call;
    report->said.count_down();
    return "report on k" + call;
  });
  auto site = callee->bind({});
  kernel_stall_ns.store(stall_ns, std::memory_order_relaxed);
  std::jthread caller([&] {
    std::vector<float> x = {1}, z(1);
    Arrays in, out;
    in.add(x);
    out.add(z);
    EXPECT_TRUE(fake::call(*site, in, out).ok());
  });
  report->said.wait();
  if (turn_is_taken) turn.unlock();
  caller.join();
  kernel_stall_ns.store(0, std::memory_order_relaxed);
  return report->text;
}

TEST(KernelTurns, ACallThatWaitsForAnotherIsReportedAsWaiting) {
  EXPECT_THAT(report_of_a_call(1000, /*turn_is_taken=*/true),
              HasSubstr("(float32[1]), which waits for another call to end"));
}

TEST(KernelTurns, ALongCallIsReportedAsRunning) {
  // The watchdog may look before the call has its turn: on a busy machine it is given more time.
  std::string text;
  for (std::int64_t stall_ns = 1000; text != "(float32[1])" && stall_ns < 2'000'000'000;
       stall_ns *= 4)
    text = report_of_a_call(stall_ns, /*turn_is_taken=*/false);
  EXPECT_EQ(text, "(float32[1])");
}

TEST(KernelTurns, AForksChildDoesNotWaitForAThreadOfTheParent) {
  static std::latch *entered, *released;
  std::latch first(1), second(1);
  entered = &first, released = &second;
  auto stay = [](const callgate_call* call) {
    if (operand(call, 0)[0] == 0) {
      entered->count_down();
      released->wait();
    }
    return fake::twice(call);
  };
  KernelInfo info = lingering("k");
  info.function = stay;
  auto site = std::make_shared<KernelCallee>(std::move(info), nullptr)->bind({});
  auto call = [&](float value) {
    std::vector<float> x = {value}, z = {-1};
    Arrays in, out;
    in.add(x);
    out.add(z);
    return fake::call(*site, in, out).ok() && z[0] == 2 * value;
  };
  std::jthread holder([&] { EXPECT_TRUE(call(0)); });
  first.wait();
  pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);  // a hang ends by a signal, which the parent sees
    _exit(call(1) ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  second.count_down();
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(KernelTurns, AKernelMayCallItselfOnItsThread) {
  static KernelSite* site;
  auto nested = [](const callgate_call* call) {
    fake::twice(call);
    if (operand(call, 0)[0] > 1) return std::int32_t{0};
    std::vector<float> x = {2}, z(1);
    Arrays in, out;
    in.add(x);
    out.add(z);
    if (!fake::call(*site, in, out).ok()) return std::int32_t{1};
    result(call, 1)[0] += z[0];
    return std::int32_t{0};
  };
  KernelInfo info = lingering("k");
  info.function = nested;
  auto made = std::make_shared<KernelCallee>(std::move(info), nullptr)->bind({});
  site = made.get();
  std::vector<float> x = {1}, z(1);
  Arrays in, out;
  in.add(x);
  out.add(z);
  EXPECT_TRUE(fake::call(*made, in, out).ok());
  EXPECT_EQ(z[0], 6);
}

}  // namespace
}  // namespace callgate
