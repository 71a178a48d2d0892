// SPDX-License-Identifier: Apache-2.0
// Promises to XLA: settled exactly once, whoever comes first, also when they are dropped.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "fake_xla.h"
#include "xla/call_site.h"

namespace callgate::xla_ffi {
namespace {

TEST(Promise, SucceedsAfterPublishing) {
  Promise promise(fake::api());
  fake::Execution execution{{}, promise.future()};
  bool published = false;
  EXPECT_TRUE(promise.succeed([&] {
    published = true;
    EXPECT_EQ(execution.times_settled(), 0) << "XLA may read the results from then on";
  }));
  EXPECT_TRUE(published);
  EXPECT_TRUE(execution.wait().ok());
}

TEST(Promise, FailsWithCodeAndMessage) {
  Promise promise(fake::api());
  EXPECT_TRUE(promise.fail(Error::verbatim(ErrorCode::kDeadlineExceeded, "late")));
  fake::Status status = fake::Execution{{}, promise.future()}.wait();
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_DEADLINE_EXCEEDED);
  EXPECT_EQ(status.message, "late");
}

TEST(Promise, ADroppedPromiseFailsTheProgram) {
  fake::Execution execution;
  {
    Promise promise(fake::api());
    execution.future = promise.future();
  }
  EXPECT_EQ(execution.wait().code, XLA_FFI_Error_Code_ABORTED);
  EXPECT_EQ(execution.times_settled(), 1);
}

TEST(Promise, OnlyTheFirstToSettleTakesEffect) {
  for (int round = 0; round < 200; ++round) {
    fake::Execution execution;
    std::atomic<int> winners{0}, published{0};
    {
      Promise promise(fake::api());
      execution.future = promise.future();
      std::vector<std::jthread> threads;
      for (int worker = 0; worker < 2; ++worker) {
        threads.emplace_back([&] {
          if (promise.succeed([&] { published.fetch_add(1); })) winners.fetch_add(1);
        });
        threads.emplace_back([&] {
          if (promise.fail(Error::verbatim(ErrorCode::kDeadlineExceeded, "late")))
            winners.fetch_add(1);
        });
      }
    }
    EXPECT_EQ(winners.load(), 1);
    EXPECT_EQ(execution.times_settled(), 1);
    EXPECT_EQ(published.load(), execution.wait().ok() ? 1 : 0);
  }
}

TEST(Promise, AnXlaWithoutFuturesIsAnError) {
  fake::Runtime::instance().has_futures = false;
  EXPECT_THROW(Promise promise(fake::api()), Error);
  fake::Runtime::instance().has_futures = true;
  EXPECT_EQ(fake::Runtime::instance().live_errors.load(), 0);
}

}  // namespace
}  // namespace callgate::xla_ffi
