// SPDX-License-Identifier: Apache-2.0
// Launch plans and what becomes of them, against a driver without a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "cuda/launch.h"
#include "fake_attributes.h"
#include "fake_launch.h"
#include "outcome.h"

namespace callgate::cuda {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Floats = fake::DeviceVector<float>;
using fake::parameter;
using Integers = fake::Attribute::Integers;

LaunchPlan plan_of(fake::AttributeMap held) {
  return LaunchPlan::of(fake::decoded(std::move(held)));
}

TEST(LaunchPlan, HoldsWhatItsAttributesSay) {
  const fake::Argument structure{
      {0, 0, 0, 0, 0, 0, 0, 0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88},
      {{0, 0, 2}, {8, 2, 0}}};
  const fake::AttributeMap f = fake::launch("f", {{{1, 2}, {}}, structure},
                                            {{"grid", Integers{4, 5, 6}},
                                             {"block", Integers{32, 2, 1}},
                                             {"shared", 1024},
                                             {"cluster", Integers{2, 1, 1}}});
  LaunchPlan plan = plan_of(
      fake::plan({f, fake::launch("g")}, {{"scratch", Integers{256}}, {"zeroed", Integers{1}}}));
  ASSERT_EQ(plan.launches.size(), 2U);
  const Launch& launch = plan.launches[0];
  EXPECT_EQ(launch.entry, "f");
  EXPECT_THAT(launch.grid, ElementsAre(4, 5, 6));
  EXPECT_THAT(launch.block, ElementsAre(32, 2, 1));
  EXPECT_THAT(launch.cluster, ElementsAre(2, 1, 1));
  EXPECT_EQ(launch.shared_bytes, 1024U);
  EXPECT_THAT(launch.starts, ElementsAre(0, 16));
  ASSERT_EQ(launch.bytes.size(), 32U);
  EXPECT_EQ(launch.bytes[1], std::byte{2});
  EXPECT_EQ(launch.bytes[24], std::byte{0x11});
  ASSERT_EQ(launch.addresses.size(), 2U);
  EXPECT_EQ(launch.addresses[1].offset, 24U);
  EXPECT_EQ(launch.addresses[1].of, Address::Of::kScratch);
  EXPECT_THAT(plan.scratch, ElementsAre(256));
  EXPECT_THAT(plan.zeroed, ElementsAre(1));
  EXPECT_EQ(plan.operands, 3U);
  EXPECT_EQ(plan.results, 2U);
  EXPECT_EQ(plan.launches[1].entry, "g");
  EXPECT_FALSE(plan.launches[1].clustered());
  EXPECT_THAT(launch.text(), HasSubstr("grid (4, 5, 6), block (32, 2, 1), shared 1024 bytes, "
                                       "cluster (2, 1, 1)"));
}

TEST(LaunchPlan, WithAnotherFormIsRefused) {
  auto with_launch = [](fake::AttributeMap more) {
    return fake::plan({fake::launch("f", {fake::operand(0)}, std::move(more))});
  };
  const struct {
    fake::AttributeMap held;
    const char* shown;
  } cases[] = {
      {with_launch({{"grid", Integers{1, 1}}}), "three extents, got 2"},
      {with_launch({{"block", Integers{1, 1, 1, 1}}}), "three extents, got 4"},
      {with_launch({{"grid", Integers{1, -1, 1}}}), "a number of its range, got -1"},
      {with_launch({{"grid", Integers{1, 1, 1LL << 32}}}), "got 4294967296"},
      {with_launch({{"grid", "1,1,1"}}), "'grid': expected an array of int64"},
      {with_launch({{"cluster", Integers{}}}), "three extents, got 0"},
      {with_launch({{"shared", -1}}), "a number of its range, got -1"},
      {with_launch({{"entry", 7}}), "'entry': expected a string"},
      {with_launch({{"bytes", Integers(8)}}), "'bytes': expected an array of uint8"},
      {with_launch({{"bytes", fake::Attribute::bytes({0, 0, 0, 0})}}), "inside the parameters"},
      {with_launch({{"starts", Integers{8}}}), "parameters in the bytes, got 8"},
      {with_launch({{"addresses", Integers{0, 0}}}), "three numbers an address, got 2"},
      {with_launch({{"addresses", Integers{1, 0, 0}}}), "inside the parameters, got 1"},
      {with_launch({{"addresses", Integers{0, 3, 0}}}), "scratch memory's, got 3"},
      {with_launch({{"addresses", Integers{0, 0, -1}}}), "a number of its range, got -1"},
      {with_launch({{"addresses", Integers{0, 2, 0}}}), "scratch memory for each address, got 0"},
      {fake::plan({}, {{"scratch", Integers{-1}}}), "a number of its range, got -1"},
      {fake::plan({}, {{"zeroed", Integers{-1}}}), "a number of its range, got -1"},
      {fake::plan({"f"}), "'0': expected a dictionary"},
  };
  for (const auto& [held, shown] : cases) {
    try {
      plan_of(held);
      ADD_FAILURE() << "no error: " << shown;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(shown));
    }
  }
}

class Launches : public fake::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    fake::register_scale();
    callee_ = fake::launch_callee();
  }
  void TearDown() override {
    callee_.reset();
    GpuTest::TearDown();
  }

  Outcome run(const fake::AttributeMap& plan, std::vector<ArrayView> operands,
              std::vector<ArrayView> results, const std::string& lanes = "",
              std::span<const DevicePointer> scratch = {}) {
    std::unique_ptr<LaunchSite> site =
        callee_->bind({plan_of(plan), "train.py:3", fake::lanes(lanes)});
    return run(*site, std::move(operands), std::move(results), scratch);
  }
  Outcome run(LaunchSite& site, std::vector<ArrayView> operands, std::vector<ArrayView> results,
              std::span<const DevicePointer> scratch = {}) {
    Device& device = Device::of(static_cast<Stream>(stream_));
    ContextScope current(device);
    CallContext context;
    context.stream = stream_;
    return Outcome::of([&] { site.run(Call{operands, results, context}, device, scratch); });
  }

  std::shared_ptr<LaunchCallee> callee_;
};

TEST_F(Launches, PassAddressesAndNumbers) {
  Floats x({1, 2, 3}), y({0, 0, 0});
  std::vector<std::int64_t> dims{3};
  ASSERT_TRUE(run(fake::scale_plan(3), {view(x, dims)}, {view(y, dims)}).ok());
  finish();
  EXPECT_THAT(y.values(), ElementsAre(3, 6, 9));
}

TEST_F(Launches, OfLanesSelectEachLanesArrays) {
  for (const char* lanes : {"3:1", "-1:1"}) {  // of the second the arrays tell the extent
    Floats x({1, 2, 3, 4, 5, 6}), y({0, 0, 0, 0, 0, 0});
    std::vector<std::int64_t> dims{3, 2};
    const auto before = fakecuda_launch_count();
    ASSERT_TRUE(run(fake::scale_plan(2), {view(x, dims)}, {view(y, dims)}, lanes).ok());
    finish();
    EXPECT_EQ(fakecuda_launch_count(), before + 3U);
    EXPECT_THAT(y.values(), ElementsAre(3, 6, 9, 12, 15, 18));
  }
}

TEST_F(Launches, OfLanesShareWhatIsNotBatched) {
  Floats x({1, 2}), y({0, 0, 0, 0});
  std::vector<std::int64_t> one{2}, both{2, 2};
  ASSERT_TRUE(run(fake::scale_plan(2), {view(x, one)}, {view(y, both)}, "2:0").ok());
  finish();
  EXPECT_THAT(y.values(), ElementsAre(3, 6, 3, 6));
}

TEST_F(Launches, OfAnEmptyGridAreNone) {
  Floats x({1}), y({7});
  std::vector<std::int64_t> dims{0};
  const auto plan =
      fake::plan({fake::launch("scale", {fake::operand(0)}, {{"grid", Integers{0, 1, 1}}})});
  EXPECT_TRUE(run(plan, {view(x, dims)}, {view(y, dims)}).ok());
  finish();
  EXPECT_EQ(fakecuda_calls("cuLaunchKernel"), 0U);
}

TEST_F(Launches, ZeroTheResultsThatThePlanNames) {
  Floats x({1, 2}), y({5, 5}), z({5, 5});
  std::vector<std::int64_t> dims{2};
  const auto plan = fake::scale_plan(2, {{"zeroed", Integers{1}}});
  ASSERT_TRUE(run(plan, {view(x, dims)}, {view(y, dims), view(z, dims)}).ok());
  finish();
  EXPECT_THAT(y.values(), ElementsAre(3, 6));
  EXPECT_THAT(z.values(), Each(0));
}

TEST_F(Launches, PassScratchMemory) {
  Floats x({1, 2}), memory({0, 0});
  std::vector<std::int64_t> dims{2};
  const auto plan = fake::plan(
      {fake::scale_launch(fake::operand(0), fake::scratch(0), {{"block", Integers{2, 1, 1}}})},
      {{"scratch", Integers{8}}});
  DevicePointer scratch = memory.pointer();
  ASSERT_TRUE(run(plan, {view(x, dims)}, {}, "", {&scratch, 1}).ok());
  finish();
  EXPECT_THAT(memory.values(), ElementsAre(3, 6));
}

TEST_F(Launches, OfClustersSayHowManyBlocks) {
  Floats x({1, 2}), y({0, 0});
  std::vector<std::int64_t> dims{2};
  const Integers two{2, 1, 1};
  const auto plan = fake::plan(
      {fake::scale_launch(fake::operand(0), fake::result(0), {{"grid", two}, {"cluster", two}})});
  ASSERT_TRUE(run(plan, {view(x, dims)}, {view(y, dims)}).ok());
  finish();
  fakecuda_launch launch{};
  ASSERT_EQ(fakecuda_launch_at(0, &launch), 0);
  EXPECT_EQ(launch.cluster[0], 2U);
  EXPECT_EQ(fakecuda_calls("cuLaunchKernelEx"), 1U);
  EXPECT_THAT(y.values(), ElementsAre(3, 6));
}

TEST_F(Launches, OfOneSiteResolveItsFunctionsOnce) {
  Floats x({1}), y({0});
  std::vector<std::int64_t> dims{1};
  std::unique_ptr<LaunchSite> site = callee_->bind({plan_of(fake::scale_plan(1)), "", {}});
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(run(*site, {view(x, dims)}, {view(y, dims)}).ok());
  finish();
  EXPECT_EQ(fakecuda_calls("cuModuleLoadData"), 1U);
  EXPECT_EQ(fakecuda_calls("cuModuleGetFunction"), 1U);
  EXPECT_EQ(fakecuda_launch_count(), 5U);
}

TEST_F(Launches, OnSeveralThreadsLoadOneModule) {
  Floats x({1}), y({0});
  std::vector<std::int64_t> dims{1};
  std::unique_ptr<LaunchSite> site = callee_->bind({plan_of(fake::scale_plan(1)), "", {}});
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      if (!run(*site, {view(x, dims)}, {view(y, dims)}).ok()) failures.fetch_add(1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  finish();
  EXPECT_EQ(failures.load(), 0);
  EXPECT_EQ(fakecuda_calls("cuModuleLoadData"), 1U);
}

TEST_F(Launches, MayHaveManyAndLargeParameters) {
  constexpr std::size_t kCount = 100;
  std::vector<std::size_t> sizes(kCount, 40);
  static std::atomic<int> sum;
  sum = 0;
  fakecuda_register_kernel(
      "many",
      [](const void** parameters, const unsigned*, const unsigned*, unsigned, void*) {
        for (std::size_t i = 0; i < kCount; ++i) sum += parameter<std::int32_t>(parameters, i);
        return 0;
      },
      kCount, sizes.data(), nullptr);
  fake::Argument two{std::vector<std::uint8_t>(40), {}};
  two.bytes[0] = 2;
  ASSERT_TRUE(run(fake::plan({fake::launch("many", std::vector(kCount, two))}), {}, {}).ok());
  finish();
  EXPECT_EQ(sum.load(), 200);
}

TEST_F(Launches, AskForMoreSharedMemoryThanTheUsual) {
  Floats x({1}), y({0});
  std::vector<std::int64_t> dims{1};
  auto plan = [](int bytes) {
    return fake::plan({fake::scale_launch(fake::operand(0), fake::result(0), {{"shared", bytes}})});
  };
  EXPECT_TRUE(run(plan(49152), {view(x, dims)}, {view(y, dims)}).ok());
  EXPECT_EQ(fakecuda_calls("cuFuncSetAttribute"), 0U);
  EXPECT_TRUE(run(plan(100000), {view(x, dims)}, {view(y, dims)}).ok());
  EXPECT_EQ(fakecuda_calls("cuFuncSetAttribute"), 1U);
  Outcome outcome = run(plan(300000), {view(x, dims)}, {view(y, dims)});
  ASSERT_FALSE(outcome.ok());
  EXPECT_THAT(outcome.error().message, HasSubstr("300000 bytes of dynamic shared memory"));
  finish();
}

TEST_F(Launches, ThatTheDriverRefusesSayWhatWasLaunched) {
  Floats x({1}), y({0});
  std::vector<std::int64_t> dims{1};
  fakecuda_fail("cuLaunchKernel", 719, 0, 1);
  Outcome outcome = run(fake::scale_plan(1), {view(x, dims)}, {view(y, dims)});
  ASSERT_FALSE(outcome.ok());
  EXPECT_THAT(outcome.error().message,
              HasSubstr("callgate: kernel 'k': cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED"));
  EXPECT_THAT(
      outcome.error().message,
      HasSubstr("; grid (1, 1, 1), block (1, 1, 1), shared 0 bytes; earlier work on the device"));
}

TEST_F(Launches, OfTooManyThreadsSayHowManyTheFunctionRunsWith) {
  Floats x({1}), y({0});
  std::vector<std::int64_t> dims{1};
  Outcome outcome = run(fake::scale_plan(2000), {view(x, dims)}, {view(y, dims)});
  ASSERT_FALSE(outcome.ok());
  EXPECT_THAT(outcome.error().message, HasSubstr("runs with at most 1024 threads a block"));
}

TEST_F(Launches, WithTooFewArraysAreRefused) {
  Outcome outcome = run(fake::scale_plan(1), {}, {});
  ASSERT_FALSE(outcome.ok());
  EXPECT_THAT(outcome.error().message,
              HasSubstr("expected 1 operands and 1 results at least, got 0 and 0"));
}

TEST_F(Launches, OfAFunctionThatTheImageLacksNameIt) {
  Outcome outcome = run(fake::plan({fake::launch("nosuch")}), {}, {});
  ASSERT_FALSE(outcome.ok());
  EXPECT_THAT(outcome.error().message, HasSubstr("cuModuleGetFunction of 'nosuch'"));
}

TEST_F(Launches, AreCapturedInGraphsAlsoWhereTheyLoadTheModule) {
  Floats x({1, 2}), y({0, 0});
  std::vector<std::int64_t> dims{2};
  fakecuda_begin_capture(stream_);
  EXPECT_TRUE(run(fake::scale_plan(2), {view(x, dims)}, {view(y, dims)}).ok());
  void* graph = fakecuda_end_capture(stream_);
  ASSERT_NE(graph, nullptr);
  EXPECT_EQ(fakecuda_launch_count(), 0U);
  x.set({5, 6});
  fakecuda_replay(graph, stream_);
  finish();
  EXPECT_EQ(fakecuda_launch_count(), 1U);
  EXPECT_THAT(y.values(), ElementsAre(15, 18));
  fakecuda_delete_graph(graph);
}

}  // namespace
}  // namespace callgate::cuda
