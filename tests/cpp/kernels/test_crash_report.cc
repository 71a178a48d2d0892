// SPDX-License-Identifier: Apache-2.0
// The report of a crash in a kernel, in processes of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_executor.h"
#include "fake_kernel.h"
#include "kernels/kernel.h"
#include "kernels/kernel_debug.h"

namespace callgate {
namespace {

using fake::Arrays;

void run(callgate_function function, Executor* executor = nullptr) {
  KernelSpec spec;
  spec.site = "model.py:7 (step)";
  auto site = fake::kernel("crasher", function, fake::in_out(), {"x", "z"})->bind(std::move(spec));
  std::vector<float> x(6), z(6);
  Arrays in, out;
  in.add(DType::kF32, x, {2, 3});
  out.add(z);
  (void)fake::call(*site, in, out, executor).ok();
}

std::int32_t send_abort(const callgate_call*) { std::abort(); }

std::int32_t send_fpe(const callgate_call*) {
  std::raise(SIGFPE);
  return 0;
}

std::int32_t abort_in_a_loop(const callgate_call* call) {
  // Two parts that both run before either crashes, so one of them is on a helper's thread; that
  // one crashes.
  struct Both {
    std::thread::id caller = std::this_thread::get_id();
    std::atomic<int> started{0};
  } both;
  call->services->parallel_for(
      call, 0, 2, 1,
      [](void* data, std::int64_t, std::int64_t) {
        auto& state = *static_cast<Both*>(data);
        state.started.fetch_add(1);
        while (state.started.load() < 2) std::this_thread::yield();
        if (std::this_thread::get_id() != state.caller) std::abort();
      },
      &both);
  return 0;
}

std::int32_t abort_on_its_own_thread(const callgate_call*) {
  std::thread([] { std::abort(); }).join();
  return 0;
}

TEST(CrashReport, ThereIsNoRecordWhileItIsOff) {
  EXPECT_EQ(running_kernel(), nullptr);
  run([](const callgate_call*) {
    EXPECT_EQ(running_kernel(), nullptr);
    return std::int32_t{0};
  });
}

TEST(CrashReport, ARecordLastsAsLongAsTheCall) {
  set_crash_report(true);
  run([](const callgate_call*) {
    const KernelRecord* record = running_kernel();
    EXPECT_NE(record, nullptr);
    if (record == nullptr) return std::int32_t{0};
    EXPECT_STREQ(record->kernel, "crasher");
    return std::int32_t{0};
  });
  EXPECT_EQ(running_kernel(), nullptr);
  set_crash_report(false);
}

TEST(CrashReport, TheHandlersOfBeforeAreRestored) {
  struct sigaction before{}, during{}, after{};
  ::sigaction(SIGFPE, nullptr, &before);
  set_crash_report(true);
  set_crash_report(true);
  ::sigaction(SIGFPE, nullptr, &during);
  set_crash_report(false);
  set_crash_report(false);
  ::sigaction(SIGFPE, nullptr, &after);
  EXPECT_NE(during.sa_sigaction, before.sa_sigaction);
  EXPECT_EQ(after.sa_sigaction, before.sa_sigaction);
}

TEST(CrashReportDeathTest, NamesTheKernelAndItsArrays) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto crash = [] {
    set_crash_report(true);
    run(&send_abort);
  };
  EXPECT_EXIT(crash(), ::testing::KilledBySignal(SIGABRT),
              "callgate: SIGABRT in kernel 'crasher', called at model.py:7 \\(step\\)\n"
              "  operand 0 'x': float32\\[2,3\\] at 0x[0-9a-f]+-0x[0-9a-f]+\n"
              "  result 0 'z': float32\\[6\\] at 0x");
}

TEST(CrashReportDeathTest, AHelpersCrashIsTheKernels) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto crash = [] {
    set_crash_report(true);
    fake::Threads threads(2);
    run(&abort_in_a_loop, &threads);
  };
  EXPECT_EXIT(crash(), ::testing::KilledBySignal(SIGABRT), "SIGABRT in kernel 'crasher'");
}

TEST(CrashReportDeathTest, OnAThreadOfTheKernelsOwnTheRunningKernelsAreNamed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto crash = [] {
    set_crash_report(true);
    run(&abort_on_its_own_thread);
  };
  EXPECT_EXIT(crash(), ::testing::KilledBySignal(SIGABRT),
              "SIGABRT on a thread that callgate did not start, while there ran\n"
              "kernel 'crasher'");
}

TEST(CrashReportDeathTest, TheHandlerOfBeforeHasTheLastWord) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto crash = [] {
    std::signal(SIGFPE, [](int) { std::_Exit(42); });
    set_crash_report(true);
    run(&send_fpe);
  };
  EXPECT_EXIT(crash(), ::testing::ExitedWithCode(42), "SIGFPE in kernel 'crasher'");
}

TEST(CrashReportDeathTest, AnIgnoredSignalStaysIgnored) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto crash = [] {
    std::signal(SIGFPE, SIG_IGN);
    set_crash_report(true);
    run(&send_fpe);
    std::_Exit(43);
  };
  EXPECT_EXIT(crash(), ::testing::ExitedWithCode(43), "SIGFPE in kernel 'crasher'");
}

TEST(CrashReportDeathTest, OutsideOfKernelsNothingIsPrinted) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto crash = [] {
    set_crash_report(true);
    std::raise(SIGABRT);  // which sanitizers leave alone
  };
  EXPECT_EXIT(crash(), ::testing::KilledBySignal(SIGABRT), "^$");
}

}  // namespace
}  // namespace callgate
