// SPDX-License-Identifier: Apache-2.0
// Calls on shards: the partition that comes as the last operand, and who makes the call.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <future>
#include <latch>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/call.h"
#include "fake_callee.h"
#include "fake_kernel.h"
#include "fake_xla.h"

namespace callgate {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsNan;
using Options = fake::FunctionCallee::Options;

class Shards : public ::testing::Test {
 protected:
  std::shared_ptr<Callee> define(fake::FunctionSite::Function function, Options options = {}) {
    auto callee =
        std::make_shared<fake::FunctionCallee>("f", std::move(function), std::move(options));
    Registry::instance().add(callee);
    return callee;
  }
  void TearDown() override { EXPECT_EQ(fake::Runtime::instance().live_errors.load(), 0); }

  fake::Array array(std::vector<float>& memory) {
    return {XLA_FFI_DataType_F32, {static_cast<std::int64_t>(memory.size())}, memory.data()};
  }
  fake::Array partition(std::uint32_t number) {
    partition_ = number;
    return {XLA_FFI_DataType_U32, {}, &partition_};
  }

  std::vector<float> x_{1, 2}, y_{-1, -1};
  std::uint32_t partition_ = 0;
};

TEST_F(Shards, ThePartitionIsTheContextsAndNoOperand) {
  std::vector<std::int32_t> shards;
  std::size_t operands = 0;
  SiteSpec spec;
  Options options;
  options.on_specialise = [&](SiteSpec seen) { spec = std::move(seen); };
  auto callee = define(
      [&](const Call& call) {
        shards.push_back(call.context.shard);
        operands = call.operands.size();
        return Outcome::success();
      },
      options);
  const fake::AttributeMap mesh{{"devices", 4},
                                {"names", fake::Attribute::listed({"x", "y"})},
                                {"sizes", fake::Attribute::Integers{2, 2}}};
  fake::Loaded<fake::Program> program("f", {{"shards", "1111"}, {"mesh", mesh}, {"layout", "{}"}});
  for (std::uint32_t number : {0U, 3U}) program.run({array(x_), partition(number)}, {array(y_)});
  EXPECT_THAT(shards, ElementsAre(0, 3));
  EXPECT_EQ(operands, 1U);
  EXPECT_EQ(spec.mesh.devices, 4);
  EXPECT_THAT(spec.mesh.axes, ElementsAre(std::pair("x", 2), std::pair("y", 2)));
  EXPECT_EQ(spec.layout, "{}");
}

TEST_F(Shards, ACallOnWholeArraysHasNone) {
  std::int32_t shard = 0;
  auto callee = define([&](const Call& call) {
    shard = call.context.shard;
    return Outcome::success();
  });
  fake::Loaded<fake::Program> program("f");
  program.run({array(x_)}, {array(y_)});
  EXPECT_EQ(shard, -1);
}

TEST_F(Shards, APartitionThatDoesNotMakeTheCallHasZeros) {
  int calls = 0;
  auto callee = define([&](const Call&) {
    ++calls;
    return Outcome::success();
  });
  fake::Loaded<fake::Program> program("f", {{"shards", "10"}});
  program.run({array(x_), partition(1)}, {array(y_)});
  EXPECT_THAT(y_, Each(0.0F));
  EXPECT_EQ(calls, 0);
  program.run({array(x_), partition(0)}, {array(y_)});
  EXPECT_EQ(calls, 1);
}

TEST_F(Shards, ACallWithoutItsPartitionIsAnError) {
  auto callee = define([](const Call&) { return Outcome::success(); });
  fake::Loaded<fake::Program> program("f", {{"shards", "10"}});
  EXPECT_THAT(program.execute().wait().message, HasSubstr("got no operand"));
  EXPECT_THAT(program.execute({array(x_)}).wait().message, HasSubstr("got float32[2]"));
  EXPECT_THAT(program.execute({partition(2)}).wait().message,
              HasSubstr("expected one of 2 partitions, got number 2"));
}

TEST_F(Shards, KernelsOnShardsToo) {
  auto kernel = fake::kernel("k", &fake::twice, fake::in_out(), {});
  Registry::instance().add(kernel);
  fake::Loaded<fake::KernelProgram> program("k", {{"shards", "10"}});
  program.run({array(x_), partition(1)}, {array(y_)});
  EXPECT_THAT(y_, Each(0.0F));
  program.run({array(x_), partition(0)}, {array(y_)});
  EXPECT_THAT(y_, ElementsAre(2.0F, 4.0F));
}

TEST_F(Shards, WhatACallThrowsPoisonsItsResultsAndIsKept) {
  // An error that one device returns leaves the others waiting in their next collective.
  std::vector<std::string> kept;
  for (bool own_thread : {false, true}) {
    Options options;
    options.own_thread = own_thread;
    options.on_defer = [&](const Error& error) { kept.emplace_back(error.what()); };
    int calls = 0;
    auto callee = define(
        [&](const Call&) -> Outcome {
          if (calls++ == 0) throw Error(ErrorCode::kInvalidArgument, "a lane of half a byte");
          throw std::bad_alloc();
        },
        options);
    fake::Loaded<fake::Program> program("f", {{"shards", "11"}, {"on_error", "poison"}});
    for (int i = 0; i < 2; ++i) {
      y_ = {5, 6};
      program.run({array(x_), partition(1)}, {array(y_)});
      EXPECT_THAT(y_, Each(IsNan()));
    }
    Registry::instance().remove(*callee);  // a worker may hold it for a moment longer
  }
  ASSERT_EQ(kept.size(), 4U);
  EXPECT_THAT(kept[0], HasSubstr("a lane of half a byte"));
  EXPECT_THAT(kept[1], HasSubstr("bad_alloc"));
}

TEST_F(Shards, WhatCanNotBeKeptStillPoisonsTheResults) {
  Options options;
  options.on_defer = [](const Error&) { throw std::bad_alloc(); };
  auto callee = define(
      [](const Call&) { return Outcome::failure(ErrorCode::kInternal, "no luck"); }, options);
  fake::Loaded<fake::Program> program("f", {{"shards", "11"}, {"on_error", "poison"}});
  ::testing::internal::CaptureStderr();
  program.run({array(x_), partition(1)}, {array(y_)});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("no luck"));
  EXPECT_THAT(y_, Each(IsNan()));
}

TEST_F(Shards, ACallThatTakesTooLongPoisonsItsResultsAndIsKept) {
  auto release = std::make_shared<std::latch>(1);  // the worker may be the last to let it go
  Options options;
  options.own_thread = true;
  options.timeout = std::chrono::milliseconds(1);
  // Kept behind the program's end, by the thread that made the report.
  auto message = std::make_shared<std::promise<std::string>>();
  options.on_defer = [message](const Error& error) { message->set_value(error.what()); };
  auto callee = define(
      [release](const Call&) {
        release->wait();
        return Outcome::success();
      },
      options);
  fake::Loaded<fake::Program> program("f", {{"shards", "11"}, {"on_error", "poison"}});
  program.run({array(x_), partition(1)}, {array(y_)});
  EXPECT_THAT(y_, Each(IsNan()));
  EXPECT_THAT(message->get_future().get(), HasSubstr("f(float32[2]) is stalled"));
  Registry::instance().remove(*callee);  // a worker may hold it for a moment longer
  release->count_down();
}

}  // namespace
}  // namespace callgate
