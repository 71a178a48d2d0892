// Launch plans and what becomes of them, against a driver without a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "cuda/launch.h"
#include "cuda/launch_plan.h"
#include "fake_launch.h"

namespace callgate::cuda {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Floats = fake::DeviceVector<float>;
using fake::parameter;

TEST(LaunchPlan, HoldsWhatItsTextSays) {
  LaunchPlan plan = LaunchPlan::parse(
      "scratch 256;zero 1;launch f 4,5,6 32,2,1 1024 2,1,1 0102 "
      "00000000000000001122334455667788@0=o2@8=s0;launch g 1,1,1 1,1,1 0 - ;");
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
  EXPECT_FALSE(plan.launches[1].clustered());
  EXPECT_THAT(launch.text(), HasSubstr("grid (4, 5, 6), block (32, 2, 1), shared 1024 bytes, "
                                       "cluster (2, 1, 1)"));
}

class BadPlans : public ::testing::TestWithParam<const char*> {};

TEST_P(BadPlans, AreRefused) { EXPECT_THROW(LaunchPlan::parse(GetParam()), Error); }

INSTANTIATE_TEST_SUITE_P(
    Texts, BadPlans,
    ::testing::Values("fly 3;", "launch f 1,1 1,1,1 0 -;", "launch f 1,1,1,1 1,1,1 0 -;",
                      "launch f 1,1,1 1,1,1 x -;", "launch f 1,1,1 1,1,1 0 - 012;",
                      "launch f 1,1,1 1,1,1 0 - 0g;", "launch f 1,1,1 1,1,1 0 - 00000000@0=o0;",
                      "launch f 1,1,1 1,1,1 0 - 0000000000000000@1=o0;",
                      "launch f 1,1,1 1,1,1 0 - 0000000000000000@0=x0;",
                      "launch f 1,1,1 1,1,1 0 - 0000000000000000@0=;",
                      "launch f 1,1,1 1,1,1 0 - 0000000000000000@0=s0;", "scratch -1;"));

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

  Outcome run(const std::string& plan, std::vector<ArrayView> operands,
              std::vector<ArrayView> results, const std::string& lanes = "",
              std::span<const DevicePointer> scratch = {}) {
    std::unique_ptr<LaunchSite> site = callee_->bind({plan, "train.py:3", Lanes::parse(lanes)});
    return run(*site, std::move(operands), std::move(results), scratch);
  }
  Outcome run(LaunchSite& site, std::vector<ArrayView> operands, std::vector<ArrayView> results,
              std::span<const DevicePointer> scratch = {}) {
    Device& device = Device::of(static_cast<Stream>(stream_));
    ContextScope current(device);
    CallContext context;
    context.stream = stream_;
    return site.run(Call{operands, results, context}, device, scratch);
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
  Floats x({1, 2, 3, 4, 5, 6}), y({0, 0, 0, 0, 0, 0});
  std::vector<std::int64_t> dims{3, 2};
  ASSERT_TRUE(run(fake::scale_plan(2), {view(x, dims)}, {view(y, dims)}, "3:1").ok());
  finish();
  EXPECT_EQ(fakecuda_launch_count(), 3U);
  EXPECT_THAT(y.values(), ElementsAre(3, 6, 9, 12, 15, 18));
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
  std::string plan = "launch scale 0,1,1 32,1,1 0 - 0000000000000000@0=o0;";
  EXPECT_TRUE(run(plan, {view(x, dims)}, {view(y, dims)}).ok());
  finish();
  EXPECT_EQ(fakecuda_calls("cuLaunchKernel"), 0U);
}

TEST_F(Launches, ZeroTheResultsThatThePlanNames) {
  Floats x({1, 2}), y({5, 5}), z({5, 5});
  std::vector<std::int64_t> dims{2};
  std::string plan = "zero 1;" + fake::scale_plan(2);
  ASSERT_TRUE(run(plan, {view(x, dims)}, {view(y, dims), view(z, dims)}).ok());
  finish();
  EXPECT_THAT(y.values(), ElementsAre(3, 6));
  EXPECT_THAT(z.values(), Each(0));
}

TEST_F(Launches, PassScratchMemory) {
  Floats x({1, 2}), memory({0, 0});
  std::vector<std::int64_t> dims{2};
  std::string plan =
      "scratch 8;launch scale 1,1,1 2,1,1 0 - 0000000000000000@0=o0 0000000000000000@0=s0 "
      "00004040;";
  DevicePointer scratch = memory.pointer();
  ASSERT_TRUE(run(plan, {view(x, dims)}, {}, "", {&scratch, 1}).ok());
  finish();
  EXPECT_THAT(memory.values(), ElementsAre(3, 6));
}

TEST_F(Launches, OfClustersSayHowManyBlocks) {
  Floats x({1, 2}), y({0, 0});
  std::vector<std::int64_t> dims{2};
  std::string plan =
      "launch scale 2,1,1 1,1,1 0 2,1,1 0000000000000000@0=o0 0000000000000000@0=r0 00004040;";
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
  std::unique_ptr<LaunchSite> site = callee_->bind({fake::scale_plan(1), "", {}});
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(run(*site, {view(x, dims)}, {view(y, dims)}).ok());
  finish();
  EXPECT_EQ(fakecuda_calls("cuModuleLoadData"), 1U);
  EXPECT_EQ(fakecuda_calls("cuModuleGetFunction"), 1U);
  EXPECT_EQ(fakecuda_launch_count(), 5U);
}

TEST_F(Launches, OnSeveralThreadsLoadOneModule) {
  Floats x({1}), y({0});
  std::vector<std::int64_t> dims{1};
  std::unique_ptr<LaunchSite> site = callee_->bind({fake::scale_plan(1), "", {}});
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
  std::string plan = "launch many 1,1,1 1,1,1 0 -";
  for (std::size_t i = 0; i < kCount; ++i) plan += " 02" + std::string(78, '0');
  ASSERT_TRUE(run(plan + ";", {}, {}).ok());
  finish();
  EXPECT_EQ(sum.load(), 200);
}

TEST_F(Launches, AskForMoreSharedMemoryThanTheUsual) {
  Floats x({1}), y({0});
  std::vector<std::int64_t> dims{1};
  auto plan = [](int bytes) {
    return "launch scale 1,1,1 1,1,1 " + std::to_string(bytes) +
           " - 0000000000000000@0=o0 0000000000000000@0=r0 00004040;";
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
  EXPECT_THAT(outcome.error().message,
              HasSubstr("; grid (1, 1, 1), block (1, 1, 1), shared 0 bytes; work that the device"));
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
  Outcome outcome = run("launch nosuch 1,1,1 1,1,1 0 -;", {}, {});
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
