// SPDX-License-Identifier: Apache-2.0
// Kernels in programs for CUDA, by way of the FFI handlers, against an XLA without XLA and a driver
// without a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "core/call.h"
#include "fake_kernel.h"
#include "fake_launch.h"
#include "fake_xla.h"
#include "xla/handlers.h"

namespace callgate {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsNan;
using Floats = fake::DeviceVector<float>;
using Integers = fake::Attribute::Integers;

constexpr const char* kName = "k[cuda:scale]";

class CudaKernels : public fake::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    fake::register_scale();
    callee_ = fake::launch_callee(kName);
    callee_->set_defer([this](const Error& error) { deferred_.emplace_back(error.what()); });
    Registry::instance().add(callee_);
  }
  void TearDown() override {
    Registry::instance().remove(*callee_);
    callee_.reset();
    GpuTest::TearDown();
    EXPECT_EQ(fake::Runtime::instance().live_errors.load(), 0);
  }

  static fake::Array array(const Floats& memory) {
    return {XLA_FFI_DataType_F32, {memory.size()}, memory.data()};
  }

  std::shared_ptr<cuda::LaunchCallee> callee_;
  std::vector<std::string> deferred_;
};

TEST_F(CudaKernels, RunOnTheProgramsStream) {
  Floats x({1, 2, 3}), y({0, 0, 0});
  fake::Loaded<fake::CudaKernelProgram> program(kName, stream_, {{"plan", fake::scale_plan(3)}});
  fakecuda_hold(stream_);
  program.run({array(x)}, {array(y)});
  EXPECT_THAT(y.values(), Each(0));  // nothing waited for it
  fakecuda_release(stream_);
  finish();
  EXPECT_THAT(y.values(), ElementsAre(3, 6, 9));
}

TEST_F(CudaKernels, OutliveTheirDefinitionInALoadedProgram) {
  Floats x({1}), y({0});
  fake::Loaded<fake::CudaKernelProgram> program(kName, stream_, {{"plan", fake::scale_plan(1)}});
  Registry::instance().remove(*callee_);
  program.run({array(x)}, {array(y)});
  finish();
  EXPECT_THAT(y.values(), ElementsAre(3));
}

TEST_F(CudaKernels, ReturnErrorsThatNameTheLaunch) {
  Floats x({1}), y({0});
  fake::Loaded<fake::CudaKernelProgram> program(kName, stream_, {{"plan", fake::scale_plan(1)}});
  fakecuda_fail("cuLaunchKernel", 1, 0, 1);
  fake::Status status = program.execute({array(x)}, {array(y)}).wait();
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_INTERNAL);
  EXPECT_THAT(status.message, HasSubstr("cuLaunchKernel: CUDA_ERROR_INVALID_VALUE"));
  EXPECT_THAT(status.message, HasSubstr("grid (1, 1, 1), block (1, 1, 1)"));
}

TEST_F(CudaKernels, PoisonTheirResultsWhereTheProgramAsksForIt) {
  Floats x({1}), y({5});
  fake::Loaded<fake::CudaKernelProgram> program(
      kName, stream_, {{"plan", fake::scale_plan(1)}, {"on_error", "poison"}});
  fakecuda_fail("cuLaunchKernel", 1, 0, 1);
  program.run({array(x)}, {array(y)});
  finish();
  EXPECT_THAT(y.values(), ElementsAre(IsNan()));
  ASSERT_EQ(deferred_.size(), 1U);
  EXPECT_THAT(deferred_[0], HasSubstr("CUDA_ERROR_INVALID_VALUE"));
}

TEST_F(CudaKernels, PoisonTheirResultsWhereTheCallCannotBegin) {
  Floats x({1}), y({5});
  fake::Loaded<fake::CudaKernelProgram> program(
      kName, stream_, {{"plan", fake::scale_plan(1)}, {"on_error", "poison"}});
  cuda::ContextScope of_xla(cuda::Device::at(0));
  fakecuda_fail("cuStreamGetCtx", 719, 0, 1);
  program.run({array(x)}, {array(y)});
  finish();
  EXPECT_THAT(y.values(), ElementsAre(IsNan()));
  ASSERT_EQ(deferred_.size(), 1U);
  EXPECT_THAT(deferred_[0], HasSubstr("'" + std::string(kName) + "': cuStreamGetCtx: "));
}

TEST_F(CudaKernels, PoisonTheirResultsWhereThereIsNoScratchMemory) {
  Floats x({1}), y({5});
  fake::CudaKernelProgram program(
      kName, stream_,
      {{"plan", fake::plan({}, {{"scratch", Integers{4}}})}, {"on_error", "poison"}});
  program.context().allocate = [](std::size_t) -> void* { return nullptr; };
  ASSERT_TRUE(program.load().ok());
  program.run({array(x)}, {array(y)});
  finish();
  EXPECT_THAT(y.values(), ElementsAre(IsNan()));
  ASSERT_EQ(deferred_.size(), 1U);
  EXPECT_THAT(deferred_[0], HasSubstr("scratch memory"));
}

TEST_F(CudaKernels, TakeScratchMemoryFromXla) {
  Floats x({2}), y({0});
  fake::CudaKernelProgram program(
      kName, stream_,
      {{"plan", fake::plan({fake::scale_launch(fake::operand(0), fake::scratch(0)),
                            fake::scale_launch(fake::scratch(0), fake::result(0))},
                           {{"scratch", Integers{4}}})}});
  std::vector<void*> freed;
  program.context().allocate = [](std::size_t bytes) {
    return reinterpret_cast<void*>(fakecuda_new_memory(0, bytes));
  };
  program.context().free = [&](void* memory) { freed.push_back(memory); };
  ASSERT_TRUE(program.load().ok());
  program.run({array(x)}, {array(y)});
  finish();
  EXPECT_THAT(y.values(), ElementsAre(18));
  ASSERT_EQ(freed.size(), 1U);
  fakecuda_delete_memory(reinterpret_cast<std::uint64_t>(freed[0]));
}

TEST_F(CudaKernels, SayThatThereIsNoScratchMemory) {
  fake::CudaKernelProgram program(kName, stream_,
                                  {{"plan", fake::plan({}, {{"scratch", Integers{4}}})}});
  program.context().allocate = [](std::size_t) -> void* { return nullptr; };
  ASSERT_TRUE(program.load().ok());
  EXPECT_THAT(program.execute({}, {}).wait().message,
              HasSubstr("expected 4 bytes on the device, got out of memory"));
}

TEST_F(CudaKernels, GiveBackWhatScratchMemoryTheyGotBeforeThereWasNone) {
  fake::CudaKernelProgram program(kName, stream_,
                                  {{"plan", fake::plan({}, {{"scratch", Integers{4, 0, 8}}})}});
  int memory = 0;
  std::vector<void*> freed;
  program.context().allocate = [&](std::size_t bytes) { return bytes == 4 ? &memory : nullptr; };
  program.context().free = [&](void* block) { freed.push_back(block); };
  ASSERT_TRUE(program.load().ok());
  EXPECT_THAT(program.execute({}, {}).wait().message, HasSubstr("expected 8 bytes on the device"));
  EXPECT_THAT(freed, ElementsAre(&memory));
}

TEST_F(CudaKernels, OnShardsThatOneDeviceRunsReadTheirPartitionOnce) {
  Floats x({1}), y({5});
  fake::DeviceVector<std::uint32_t> number({1});
  fake::Array partition{XLA_FFI_DataType_U32, {}, number.data()};
  fake::Loaded<fake::CudaKernelProgram> program(kName, stream_,
                                                {{"plan", fake::scale_plan(1)}, {"shards", "10"}});
  for (int i = 0; i < 3; ++i) program.run({array(x), partition}, {array(y)});
  finish();
  EXPECT_THAT(y.values(), ElementsAre(0));  // this partition skips the call
  EXPECT_EQ(fakecuda_launch_count(), 0U);
  EXPECT_EQ(fakecuda_calls("cuMemcpyDtoHAsync_v2"), 1U);
}

TEST_F(CudaKernels, OnShardsThatAllDevicesRunReadNoPartition) {
  Floats x({1}), y({5});
  fake::DeviceVector<std::uint32_t> number({1});
  fake::Array partition{XLA_FFI_DataType_U32, {}, number.data()};
  fake::Loaded<fake::CudaKernelProgram> program(kName, stream_,
                                                {{"plan", fake::scale_plan(1)}, {"shards", "11"}});
  program.run({array(x), partition}, {array(y)});
  finish();
  EXPECT_THAT(y.values(), ElementsAre(3));
  EXPECT_EQ(fakecuda_calls("cuMemcpyDtoHAsync_v2"), 0U);
}

TEST_F(CudaKernels, OfTheCpuAloneAreRefusedByName) {
  KernelInfo info;
  info.name = "only_cpu";
  auto kernel = std::make_shared<KernelCallee>(info, nullptr);
  Registry::instance().add(kernel);
  fake::CudaKernelProgram program("only_cpu", stream_, {{"plan", fake::scale_plan(1)}});
  EXPECT_THAT(program.load().message,
              HasSubstr("expected a kernel for CUDA (callgate.cuda, or callgate.cpp with "
                        "cuda_source=), got a gate, or a kernel only for the CPU"));
  Registry::instance().remove(*kernel);
}

TEST_F(CudaKernels, OfCudaAloneAreRefusedOnTheCpu) {
  fake::KernelProgram program(kName);
  EXPECT_THAT(program.load().message, HasSubstr("expected a kernel for the CPU"));
}

TEST_F(CudaKernels, AreCompatibleWithGraphsUnlessTheyHaveScratchMemory) {
  XLA_FFI_Metadata metadata{};
  ASSERT_TRUE(fake::query_metadata(&xla_ffi::cuda_kernel_execute, metadata).ok());
  EXPECT_NE(metadata.traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE, 0U);
  ASSERT_TRUE(fake::query_metadata(&xla_ffi::cuda_kernel_scratch_execute, metadata).ok());
  EXPECT_EQ(metadata.traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE, 0U);
}

}  // namespace
}  // namespace callgate
